"""Causal attention over the last W steps of an episode, with a bias by distance.

Every mask is one number a query: its *reach*, the distance of the oldest step that it may see. It
covers the window, the start of the episode and the start of a segment. Three faces share keys and
values without copying them for each query: `scan` (all T at once, in blocks of W queries on 2W
keys), `step` (one query on the cache of W-1 steps) and `imagine` (queries that go on from each step
of a scan, on its keys and on their own). A loop over T has a fourth: attention_loop.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worldmodels.layers import Dropout, init_weight

Pair = tuple[Tensor, Tensor]  # keys and values


def clean(value: Tensor) -> Tensor:
    """Zeros for what is not finite: a weight of 0 on a NaN of another episode would be a NaN."""
    return value.nan_to_num(0.0, 0.0, 0.0)


def biased(scores: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    """Logits of attention, in float32 or wider: `scores` + `bias`, -inf where not `seen`."""
    wide = scores if scores.dtype == torch.float64 else scores.float()
    return (wide + bias).masked_fill_(~seen, -torch.inf)


def blocks(keys: Tensor, window: int) -> Tensor:
    """(B, W-1 + T, ...) to (B, n, 2W, ...): for each block of W queries its own keys and the W
    before them, padded with zeros at both ends."""
    length = keys.shape[1] - (window - 1)
    after = -length % window
    padded = F.pad(keys, [0, 0] * (keys.dim() - 2) + [1, after])
    parts = padded.unflatten(1, (-1, window))
    return torch.cat([parts[:, :-1], parts[:, 1:]], 2)


class Window(nn.Module):
    """Attention over the `window` keys that end at the query's own step, for given projections.

    Queries (B, ..., H, d) are scaled; keys and values are finite.
    """

    def __init__(self, heads: int, window: int, dropout: float = 0.0):
        """`dropout` of the weights of `mix_scan`."""
        super().__init__()
        self.heads, self.window = heads, window
        self.drop = Dropout(dropout)
        self.bias = nn.Parameter(torch.zeros(heads, window))
        ahead = window + torch.arange(window)[:, None] - torch.arange(2 * window)
        self.register_buffer("ahead", ahead, persistent=False)  # distance of key j from query i

    def by_distance(self, distance: Tensor) -> Tensor:
        """Bias (H, ...) for integer distances (...); those outside the window are masked anyway."""
        return self.bias[:, distance.clamp(0, self.window - 1)]

    def in_blocks(self, query: Tensor, keys: Tensor, reach: Tensor, shift: int) -> Tensor:
        """Logits (B, n, H, W, 2W) of queries (B, T, H, d) on keys (B, W-1 + T, H, d).

        The queries stand `shift` steps after the last key that they may see.
        """
        window = self.window
        after = -query.shape[1] % window
        query = F.pad(query, (0, 0, 0, 0, 0, after)).unflatten(1, (-1, window))
        reach = F.pad(reach, (0, after)).unflatten(1, (-1, window))
        scores = torch.einsum("bnihd,bnjhd->bnhij", query, blocks(keys, window))
        distance = self.ahead + shift
        seen = (self.ahead >= 0) & (distance <= reach[..., None])
        return biased(scores, self.by_distance(distance), seen[:, :, None])

    def mix_scan(self, query: Tensor, pair: Pair, reach: Tensor) -> Tensor:
        """Queries (B, T, H, d) on keys and values (B, W-1 + T, H, d) to (B, T, H*d)."""
        keys, values = pair
        # A padded query sees its own place, so that no row of weights is empty.
        weights = self.drop(self.in_blocks(query, keys, reach, 0).softmax(-1))
        mixed = torch.einsum(
            "bnhij,bnjhd->bnihd", weights.to(values.dtype), blocks(values, self.window)
        )
        return mixed.flatten(1, 2)[:, : query.shape[1]].flatten(-2)

    def mix_step(self, query: Tensor, pair: Pair, reach: Tensor) -> Tensor:
        """A query (B, H, d) on keys and values (B, W, H, d) to (B, H*d)."""
        keys, values = pair
        distance = torch.arange(self.window - 1, -1, -1, device=query.device)
        scores = torch.einsum("bhd,bjhd->bhj", query, keys)
        seen = (distance <= reach[:, None])[:, None]
        weights = biased(scores, self.by_distance(distance), seen).softmax(-1)
        return torch.einsum("bhj,bjhd->bhd", weights.to(values.dtype), values).flatten(-2)

    def mix_imagine(self, query: Tensor, shared: Pair, own: list[Pair], reach: Tensor) -> Tensor:
        """Queries (B, K, H, d) that follow each of the last K steps of a scan, to (B, K, H*d).

        shared: keys and values (B, W-1 + K, H, d) up to those steps; own: those of the steps
        imagined since, the query's included, (B, K, H, d) each.
        """
        keys, values = shared
        length, shift = query.shape[1], len(own)
        # (B, n, H, W, 2W) to (B, K, H, 2W)
        prefix = self.in_blocks(query, keys, reach, shift).transpose(2, 3).flatten(1, 2)
        distance = torch.arange(shift - 1, -1, -1, device=query.device)
        mine = torch.stack([key for key, _ in own], 3)  # (B, K, H, p, d)
        ours = torch.einsum("bkhd,bkhpd->bkhp", query, mine)
        seen = (distance <= reach[..., None])[:, :, None]
        ours = biased(ours, self.by_distance(distance), seen)
        weights = torch.cat([prefix[:, :length], ours], -1).softmax(-1).to(values.dtype)
        far, near = weights.split([2 * self.window, shift], -1)
        far = F.pad(far, (0, 0, 0, 0, 0, -length % self.window)).unflatten(1, (-1, self.window))
        mixed = torch.einsum("bnihj,bnjhd->bnihd", far, blocks(values, self.window))
        mixed = mixed.flatten(1, 2)[:, :length]
        mixed = mixed + torch.einsum("bkhp,bkhpd->bkhd", near, torch.stack([v for _, v in own], 3))
        return mixed.flatten(-2)


def append(cache: Pair, new: Pair) -> Pair:
    """Keys and values (B, W-1, H, d) of a state, which may hold anything, then `new` ones."""
    keys, values = (torch.cat([clean(old), one], 1) for old, one in zip(cache, new, strict=True))
    return keys, values


class WindowAttention(Window):
    """Multi-head attention (B, T, D) -> (B, T, D) over `window` steps, the query's own included."""

    def __init__(self, width: int, heads: int, window: int, dropout: float = 0.0):
        if width % heads:
            raise ValueError(f"width {width} must be a multiple of {heads} heads")
        super().__init__(heads, window, dropout)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        for layer in (self.qkv, self.out):
            init_weight(layer.weight, width)

    def project(self, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scaled queries, keys and values (..., H, D/H); keys and values are finite."""
        query, key, val = self.qkv(value).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        return query * query.shape[-1] ** -0.5, clean(key), clean(val)

    def scan(self, value: Tensor, cache: Pair, reach: Tensor) -> tuple[Tensor, Pair]:
        """Steps (B, T, D) after the `cache` (B, W-1, H, d); also all keys and values, W-1 + T."""
        query, *new = self.project(value)
        pair = append(cache, (new[0], new[1]))
        return self.out(self.mix_scan(query, pair, reach)), pair

    def step(self, value: Tensor, cache: Pair, reach: Tensor) -> tuple[Tensor, Pair]:
        """One step (B, D); also the cache (B, W-1, H, d) for the next one."""
        query, *new = self.project(value)
        pair = append(cache, (new[0][:, None], new[1][:, None]))
        return self.out(self.mix_step(query, pair, reach)), (pair[0][:, 1:], pair[1][:, 1:])

    def imagine(self, value: Tensor, shared: Pair, own: list[Pair], reach: Tensor) -> Tensor:
        """A step (B, K, D) that follows each of the last K steps of a scan.

        shared: keys and values (B, W-1 + K, H, d) up to those steps; own: those of the steps
        imagined before, (B, K, H, d) each, to which this step's are appended.
        """
        query, *new = self.project(value)
        own.append((new[0], new[1]))
        return self.out(self.mix_imagine(query, shared, own, reach))


class CrossAttention(Window):
    """Attention of (B, T, D) over keys and values that others made, those of its own step included.

    `pair`, `shared` and `own` are those of the methods of `Window`.
    """

    def __init__(self, width: int, heads: int, window: int):
        super().__init__(heads, window)
        self.query = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        for layer in (self.query, self.out):
            init_weight(layer.weight, width)

    def project(self, value: Tensor) -> Tensor:
        query = self.query(value).unflatten(-1, (self.heads, -1))
        return query * query.shape[-1] ** -0.5

    def scan(self, value: Tensor, pair: Pair, reach: Tensor) -> Tensor:
        return self.out(self.mix_scan(self.project(value), pair, reach))

    def step(self, value: Tensor, pair: Pair, reach: Tensor) -> Tensor:
        return self.out(self.mix_step(self.project(value), pair, reach))

    def imagine(self, value: Tensor, shared: Pair, own: list[Pair], reach: Tensor) -> Tensor:
        return self.out(self.mix_imagine(self.project(value), shared, own, reach))
