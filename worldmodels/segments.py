"""Rows cut into segments: the steps (B, T) of a batch laid in a grid (B, pieces, L).

A segment is L steps of an episode, its boundaries anchored to the episode's first step. A row holds
the end of one segment, whole ones and the beginning of another; a reset cuts one short. Cutting by
the row's own steps instead would make acting and training disagree.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
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


@dataclass(frozen=True)
class Plan:
    """What the host knows of a batch (B, T) before it reaches the device: nothing waits for it."""

    pieces: int  # that it is cut into, rounded up; 0: not known
    age: np.ndarray  # (B, T): steps since the episode's start
    after: np.ndarray  # (B, T): that of `Pieces`

    @classmethod
    def of(cls, is_first: np.ndarray, age: np.ndarray, length: int) -> Plan:
        """Pieces are those of rows without a reset, and so many more as the next power of 2:
        compiled code sees few sizes. `is_first` and `age` as in `Pieces`."""
        complete = age % length == length - 1
        cuts = np.zeros(age.shape, int)
        cuts[:, 1:] = complete[:, :-1].astype(int) + is_first[:, 1:]
        piece = cuts.cumsum(1)
        plain = 1 + -(-age.shape[1] // length)
        more = max(0, 1 + int(piece.max()) - plain)
        pieces = plain + (1 << (more - 1).bit_length() if more else 0)
        return cls(pieces, age, piece + complete)

    @classmethod
    def read(cls, age: Tensor, after: Tensor) -> Plan:
        """The same from the device, which is waited for."""
        return cls(0, age.cpu().numpy(), after.cpu().numpy())


class Grid:
    """Places (piece, slot) of the steps (B, T), no two steps of a row in one place."""

    def __init__(self, piece: Tensor, slot: Tensor, length: int, pieces: int = 0):
        """`pieces`: their number, if it is known."""
        batch = len(piece)
        # Unknown, it is waited for: loops over pieces need their number.
        self.pieces, self.length = pieces or int(piece.max()) + 1, length
        self.shape = (batch, self.pieces, length)
        row = torch.arange(batch, device=piece.device)[:, None]
        self.place = ((row * self.pieces + piece) * length + slot).flatten()

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

    A step's slot is its phase, the steps since the episode's start modulo L, or, if `packed`, the
    steps since its piece began.

    begins, ends (B, pieces): the piece starts with a reset; its segment is complete at its end.
    piece, after (B, T): the piece of a step, and that which a step without reset would belong to
    next. A reset that follows a complete segment starts two pieces, the first without a step, so
    that `after` has one of its own: what follows the segment without the reset.
    """

    def __init__(
        self, age: Tensor, is_first: Tensor, length: int, plan: Plan | None, packed: bool = False
    ):
        """age (B, T): steps since the start of the episode; `plan`: of these rows, or None."""
        phase = age % length
        complete = phase == length - 1
        cuts = torch.zeros_like(phase)
        cuts[:, 1:] = complete[:, :-1].to(phase.dtype) + is_first[:, 1:].to(phase.dtype)
        self.piece = cuts.cumsum(1)
        slot = phase
        if packed:
            step = torch.arange(age.shape[1], device=age.device)
            slot = step - torch.where(cuts > 0, step, 0).cummax(1).values
        super().__init__(self.piece, slot, length, plan.pieces if plan else 0)
        self.after = self.piece + complete
        self.taken = self.lay(torch.ones_like(is_first))
        self.begins = self.lay(is_first)[:, :, 0]
        self.ends = self.lay(complete).any(2)
