"""Rows of T steps cut into pieces of at most K: at resets, and where a segment of an episode ends.

Segments are counted from the first step of the episode, so a row that begins or is cut inside one
has shorter pieces. Piece i of every row is computed in round i, side by side.
"""

from __future__ import annotations

import torch
from torch import Tensor


def indices(index: Tensor, value: Tensor) -> Tensor:
    index = index.reshape(index.shape + (1,) * (value.dim() - 2)).long()
    return index.expand(-1, -1, *value.shape[2:])


def take(value: Tensor, index: Tensor) -> Tensor:
    """(B, n, ...): of each row of (B, J, ...) the entries `index` (B, n)."""
    return value.gather(1, indices(index, value))


def put(value: Tensor, index: Tensor, new: Tensor) -> Tensor:
    """(B, J, ...) with `new` (B, n, ...) in place of the entries `index` (B, n)."""
    return value.scatter(1, indices(index, value), new.to(value.dtype))


class Pieces:
    """The pieces of rows whose steps are `is_first` (B, T) and `age` (B, T) into their episode.

    rounds: pieces of the row that has most; of each step (B, T) its `piece`, and `reset`, whether
    that piece begins an episode; of each piece (rounds, B) its `count` of steps, which may be 0.
    """

    def __init__(self, is_first: Tensor, age: Tensor, segment: int):
        self.segment = segment
        step = torch.arange(age.shape[1], device=age.device)
        begins = (age % segment == 0) | (step == 0)
        begin = torch.where(begins, step, 0).cummax(1).values
        self.piece = begins.cumsum(1) - 1
        self.reset = is_first.gather(1, begin)
        self.slot = self.piece * segment + step - begin
        self.rounds = int(self.piece.max()) + 1
        self.count = self.pack(torch.ones_like(age)).sum(2)

    def pack(self, value: Tensor) -> Tensor:
        """(B, T, ...) to (rounds, B, K, ...), padded with zeros."""
        empty = value.new_zeros(len(value), self.rounds * self.segment, *value.shape[2:])
        return put(empty, self.slot, value).unflatten(1, (self.rounds, -1)).transpose(0, 1)

    def unpack(self, rounds: list[Tensor]) -> Tensor:
        """(B, K, ...) for each round to (B, T, ...)."""
        return take(torch.cat(rounds, 1), self.slot)
