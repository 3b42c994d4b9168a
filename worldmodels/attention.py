"""Causal attention over the last W steps of an episode, with a bias by distance.

Every mask is one number a query: its *reach*, the distance of the oldest step that it may see. It
covers the window, the start of the episode and the start of a segment. Three faces share keys and
values without copying them for each query: `scan` (all T at once, in blocks of W queries on 2W
keys), `step` (one query on the cache of W-1 steps) and `imagine` (queries that go on from each step
of a scan, on its keys and on their own).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worldmodels.layers import init_weight

Pair = tuple[Tensor, Tensor]  # keys and values


def clean(value: Tensor) -> Tensor:
    """Zeros for what is not finite: a weight of 0 on a NaN of another episode would be a NaN."""
    return torch.where(torch.isfinite(value), value, 0.0)


def softmax(scores: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    """Weights over the last axis, in float32 or wider, of `scores` + `bias` where `seen`."""
    wide = scores if scores.dtype == torch.float64 else scores.float()
    return F.softmax((wide + bias).masked_fill(~seen, -torch.inf), -1)


def blocks(keys: Tensor, window: int) -> Tensor:
    """(B, W-1 + T, ...) to (B, n, 2W, ...): for each block of W queries its own keys and the W
    before them, padded with zeros at both ends."""
    length = keys.shape[1] - (window - 1)
    after = -length % window
    padded = F.pad(keys, [0, 0] * (keys.dim() - 2) + [1, after])
    parts = padded.unflatten(1, (-1, window))
    return torch.cat([parts[:, :-1], parts[:, 1:]], 2)


class WindowAttention(nn.Module):
    """Multi-head attention (B, T, D) -> (B, T, D) over `window` steps, the query's own included."""

    def __init__(self, width: int, heads: int, window: int):
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} must be a multiple of {heads} heads")
        self.heads, self.window = heads, window
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        for layer in (self.qkv, self.out):
            init_weight(layer.weight, width)
        self.bias = nn.Parameter(torch.zeros(heads, window))
        ahead = window + torch.arange(window)[:, None] - torch.arange(2 * window)
        self.register_buffer("ahead", ahead, persistent=False)  # distance of key j from query i

    def project(self, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scaled queries, keys and values (..., H, D/H); keys and values are finite."""
        query, key, val = self.qkv(value).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        return query * query.shape[-1] ** -0.5, clean(key), clean(val)

    def by_distance(self, distance: Tensor) -> Tensor:
        """Bias (H, ...) for integer distances (...); those outside the window are masked anyway."""
        return self.bias[:, distance.clamp(0, self.window - 1)]

    def in_blocks(
        self, query: Tensor, keys: Tensor, reach: Tensor, shift: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Scores, bias and mask (B, n, H, W, 2W) of queries (B, T, H, d) on keys (B, W-1+T, H, d).

        The queries stand `shift` steps after the last key that they may see.
        """
        window = self.window
        after = -query.shape[1] % window
        query = F.pad(query, (0, 0, 0, 0, 0, after)).unflatten(1, (-1, window))
        reach = F.pad(reach, (0, after)).unflatten(1, (-1, window))
        scores = torch.einsum("bnihd,bnjhd->bnhij", query, blocks(keys, window))
        distance = self.ahead + shift
        seen = (self.ahead >= 0) & (distance <= reach[..., None])
        return scores, self.by_distance(distance), seen[:, :, None]

    def scan(self, value: Tensor, cache: Pair, reach: Tensor) -> tuple[Tensor, Pair]:
        """Steps (B, T, D) after the `cache` (B, W-1, H, d); also all keys and values, W-1 + T."""
        query, *new = self.project(value)
        keys, values = (
            torch.cat([clean(old), one], 1) for old, one in zip(cache, new, strict=True)
        )
        length = value.shape[1]
        # A padded query sees its own place, so that no row of weights is empty.
        weights = softmax(*self.in_blocks(query, keys, reach, 0))
        mixed = torch.einsum(
            "bnhij,bnjhd->bnihd", weights.to(values.dtype), blocks(values, self.window)
        )
        mixed = mixed.flatten(1, 2)[:, :length]
        return self.out(mixed.flatten(-2)), (keys, values)

    def step(self, value: Tensor, cache: Pair, reach: Tensor) -> tuple[Tensor, Pair]:
        """One step (B, D); also the cache (B, W-1, H, d) for the next one."""
        query, *new = self.project(value)
        keys, values = (
            torch.cat([clean(old), one[:, None]], 1) for old, one in zip(cache, new, strict=True)
        )
        distance = torch.arange(self.window - 1, -1, -1, device=value.device)
        scores = torch.einsum("bhd,bjhd->bhj", query, keys)
        seen = (distance <= reach[:, None])[:, None]
        weights = softmax(scores, self.by_distance(distance), seen)
        mixed = torch.einsum("bhj,bjhd->bhd", weights.to(values.dtype), values)
        return self.out(mixed.flatten(-2)), (keys[:, 1:], values[:, 1:])

    def imagine(self, value: Tensor, shared: Pair, own: list[Pair], reach: Tensor) -> Tensor:
        """A step (B, K, D) that follows each of the last K steps of a scan.

        shared: keys and values (B, W-1 + K, H, d) up to those steps; own: those of the steps
        imagined before, (B, K, H, d) each, to which this step's are appended.
        """
        query, *new = self.project(value)
        own.append((new[0], new[1]))
        keys, values = shared
        length, shift = value.shape[1], len(own)
        prefix = [
            part.transpose(2, 3).flatten(1, 2)[:, :length]  # (B, n, H, W, 2W) to (B, K, H, 2W)
            for part in torch.broadcast_tensors(*self.in_blocks(query, keys, reach, shift))
        ]
        distance = torch.arange(shift - 1, -1, -1, device=value.device)
        mine = torch.stack([key for key, _ in own], 3)  # (B, K, H, p, d)
        ours = torch.einsum("bkhd,bkhpd->bkhp", query, mine)
        bias = self.by_distance(distance).expand_as(ours)
        seen = (distance <= reach[..., None])[:, :, None].expand_as(ours)
        weights = softmax(*(torch.cat(p, -1) for p in zip(prefix, (ours, bias, seen), strict=True)))
        weights = weights.to(values.dtype)
        far, near = weights.split([2 * self.window, shift], -1)
        far = F.pad(far, (0, 0, 0, 0, 0, -length % self.window)).unflatten(1, (-1, self.window))
        mixed = torch.einsum("bnihj,bnjhd->bnihd", far, blocks(values, self.window))
        mixed = mixed.flatten(1, 2)[:, :length]
        mixed = mixed + torch.einsum("bkhp,bkhpd->bkhd", near, torch.stack([v for _, v in own], 3))
        return self.out(mixed.flatten(-2))
