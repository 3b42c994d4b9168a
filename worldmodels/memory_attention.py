"""Attention of steps and memory tokens to one another: one softmax over groups of keys.

Biases are relative alone: by distance between steps, one number a head from a step to a memory
token and one from a memory token to a step. From memory to memory it is 0: a softmax sees only the
difference to the third. A group of keys is shared by many queries under a mask, or private to each.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worldmodels.attention import WindowAttention, biased


class Group(NamedTuple):
    """Keys and values (B, J, H, d), shared by the n places of a row, or (B, n, J, H, d).

    `bias` and `seen` broadcast to (B, n, H, i, J), for the i queries of each place.
    """

    keys: Tensor
    values: Tensor
    bias: Tensor
    seen: Tensor


def axes(group: Group) -> str:
    """The axes of a group's keys and values, for einsum."""
    return "bjhd" if group.keys.dim() == 4 else "bnjhd"


class MemoryAttention(WindowAttention):
    """Multi-head attention over `window` steps, the query's own included, and memory tokens."""

    def __init__(self, width: int, heads: int, window: int):
        super().__init__(width, heads, window)
        self.to_memory = nn.Parameter(torch.zeros(heads))
        self.to_steps = nn.Parameter(torch.zeros(heads))

    def weights(self, query: Tensor, groups: list[Group]) -> Tensor:
        """Shares (B, n, H, i, J) of all keys, group after group, for queries (B, n, i, H, d)."""
        scored = []
        for group in groups:
            scores = torch.einsum(f"bnihd,{axes(group)}->bnhij", query, group.keys)
            scored.append(torch.broadcast_tensors(scores, group.bias, group.seen))
        parts = zip(*scored, strict=True)
        logits = biased(*(torch.cat(part, -1) if len(part) > 1 else part[0] for part in parts))
        return logits.softmax(-1)

    def mix(self, query: Tensor, groups: list[Group]) -> Tensor:
        """(B, n, i, D) for i queries (B, n, i, H, d) at each of n places, over all groups."""
        sizes = [group.keys.shape[-3] for group in groups]
        weights = self.weights(query, groups).to(query.dtype).split(sizes, -1)
        mixed = sum(
            torch.einsum(f"bnhij,{axes(group)}->bnihd", weight, group.values)
            for weight, group in zip(weights, groups, strict=True)
        )
        return self.out(mixed.flatten(-2))

    def step_bias(self, memory: int, distance: Tensor) -> Tensor:
        """Bias (H, ..., m + J) of steps on `memory` tokens and on steps at `distance` (..., J)."""
        near = self.by_distance(distance)
        far = self.to_memory.reshape(-1, *[1] * distance.dim())
        return torch.cat([far.expand(*near.shape[:-1], memory), near], -1)

    def memory_bias(self, before: int, steps: int, after: int) -> Tensor:
        """Bias (H, 1, J) of memory tokens on `steps` between memory tokens `before` and `after`."""
        to_steps = self.to_steps[:, None, None].expand(-1, 1, steps)
        return F.pad(to_steps, (before, after))
