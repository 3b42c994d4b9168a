"""Rows cut into segments: the steps (B, T) of a batch laid in a grid (B, pieces, L) by phase.

A segment is L steps of an episode, its boundaries anchored to the episode's first step, so a step's
place is its phase, the steps since the episode's start modulo L. A row holds the end of one
segment, whole ones and the beginning of another; a reset cuts one short. Cutting by the row's own
steps instead would make acting and training disagree.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Grid:
    """Places (piece, phase) of the steps (B, T), no two steps of a row in one place."""

    def __init__(self, piece: Tensor, phase: Tensor, length: int):
        batch = len(piece)
        # Waits for the device, once a batch: the loop over pieces needs their number.
        self.pieces, self.length = int(piece.max()) + 1, length
        self.shape = (batch, self.pieces, length)
        row = torch.arange(batch, device=piece.device)[:, None]
        self.place = ((row * self.pieces + piece) * length + phase).flatten()

    def lay(self, value: Tensor) -> Tensor:
        """(B, T, ...) to (B, pieces, L, ...); zeros where no step is."""
        rest = value.shape[2:]
        grid = value.new_zeros(self.shape[0] * self.pieces * self.length, *rest)
        return grid.index_copy(0, self.place, value.flatten(0, 1)).unflatten(0, self.shape)

    def pick(self, grid: Tensor) -> Tensor:
        """(B, pieces, L, ...) back to (B, T, ...)."""
        flat = grid.flatten(0, 2).index_select(0, self.place)
        return flat.unflatten(0, (self.shape[0], -1))


class Pieces(Grid):
    """The grid of a batch; its first step belongs to piece 0, also where it is a reset.

    begins, ends (B, pieces): the piece starts with a reset; its segment is complete at its end.
    after (B, T): the piece that a step without reset would belong to next. A reset that follows a
    complete segment starts two pieces, the first without a step, so that `after` has one of its
    own: what follows the segment without the reset.
    """

    def __init__(self, age: Tensor, is_first: Tensor, length: int):
        """age (B, T): steps since the start of the episode."""
        phase = age % length
        complete = phase == length - 1
        cuts = torch.zeros_like(phase)
        cuts[:, 1:] = complete[:, :-1].to(phase.dtype) + is_first[:, 1:].to(phase.dtype)
        piece = cuts.cumsum(1)
        super().__init__(piece, phase, length)
        self.after = piece + complete
        self.taken = self.lay(torch.ones_like(is_first))
        self.begins = self.lay(is_first)[:, :, 0]
        self.ends = self.taken[:, :, -1]
