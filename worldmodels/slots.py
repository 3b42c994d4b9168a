"""Slots of external memory: tokens read them, and whole segments are written into them in turn.

ELMUR (arXiv 2510.07151), section 3, algorithms 1 and 2. There the least recently used slot is
written: the first empty one is replaced, and when none is empty the one with the oldest anchor is
blended. Every write takes a newer anchor than all slots have, so the oldest is always the one after
the slot written last: slot = writes mod M, replaced while writes < M. That is the rule exactly, and
anchors follow from it: the slot written i segments ago ends i segments before the coming one. Time
from slot to token is then i and the token's phase, and the number of writes is all that is kept.

The candidate ends with a norm. With pre-norm residuals alone a blend would be m + lambda f(m),
which forgets nothing and has no bound; so ||m|| stays within that of the largest candidate or
initial slot (the paper's proposition 2).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worldmodels.attention import Pair, biased, clean
from worldmodels.layers import RMSNorm, init_weight
from worldmodels.transformer import FeedForward

INITIAL = 0.1  # standard deviation of slots before their first write: RememberColor's, table 7


class CrossAttention(nn.Module):
    """Projections of multi-head attention from one set of vectors (..., D) to another."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width, bias=False)
        self.pair = nn.Linear(width, 2 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        for layer in (self.query, self.pair, self.out):
            init_weight(layer.weight, width)

    def split(self, value: Tensor) -> Tensor:
        """(..., D) to (..., H, d)."""
        return value.unflatten(-1, (self.heads, -1))

    def queries(self, value: Tensor) -> Tensor:
        """Scaled queries (..., H, d)."""
        query = self.split(self.query(value))
        return query * query.shape[-1] ** -0.5

    def keys(self, value: Tensor) -> Pair:
        """Keys and values (..., D), both finite."""
        key, val = clean(self.pair(value)).chunk(2, -1)
        return key, val


class Read(CrossAttention):
    """What tokens (..., Q, D) read from slots: a residual (..., Q, D)."""

    def __init__(self, width: int, heads: int, slots: int, segment: int, bias: bool):
        super().__init__(width, heads)
        self.norm = RMSNorm(width)
        # By the token's phase and the segments since the slot was written; the last row: empty.
        table = torch.zeros(segment, slots + 1, heads)
        self.bias = nn.Parameter(table, requires_grad=bias)

    def by_time(self, phase: Tensor, since: Tensor) -> Tensor:
        """Bias (..., H, M) of tokens at `phase` (...) for slots `since` (..., M), see `Slots`."""
        segment, rows, _ = self.bias.shape
        index = phase[..., None] * rows + since.clamp(max=rows - 1)
        return F.embedding(index, self.bias.view(segment * rows, -1)).transpose(-1, -2)

    def forward(
        self,
        value: Tensor,
        slots: Pair,
        bias: Tensor,
        seen: Tensor | None = None,
        own: Pair | None = None,
    ) -> Tensor:
        """`slots`: keys and values (..., M, D) that the Q tokens share; `own`: (..., Q, P, D) that
        each has besides. bias (..., Q, H, M + P); seen (..., Q, 1, M + P), all when None."""
        query = self.queries(self.norm(value))
        key, val = (self.split(part) for part in slots)
        scores = torch.einsum("...qhd,...mhd->...qhm", query, key)
        if own is not None:
            own = tuple(self.split(part) for part in own)
            mine = torch.einsum("...qhd,...qphd->...qhp", query, own[0])
            scores = torch.cat([scores, mine], -1)
        if seen is None:
            seen = torch.ones_like(scores, dtype=torch.bool)
        weights = biased(scores, bias, seen).softmax(-1).to(val.dtype)
        mixed = torch.einsum("...qhm,...mhd->...qhd", weights[..., : key.shape[-3]], val)
        if own is not None:
            rest = weights[..., key.shape[-3] :]
            mixed = mixed + torch.einsum("...qhp,...qphd->...qhd", rest, own[1])
        return self.out(mixed.flatten(-2))


class Slots(CrossAttention):
    """M slots (..., M, D), their turn and their candidates.

    `write`: `lru` replaces empty slots and then blends; `fifo` always replaces; `all` replaces
    every slot by its own candidate (the paper's ablation without LRU), and x is of the first.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        slots: int,
        segment: int,
        ffn: int,
        blend: float,
        initial: str,
        write: str,
        bias: bool,
    ):
        super().__init__(width, heads)
        self.slots, self.blend, self.write = slots, blend, write
        self.every = write == "all"
        drawn = INITIAL * torch.randn(slots, width)
        self.initial = nn.Parameter(drawn, requires_grad=initial == "learned")
        self.slot_norm, self.token_norm = RMSNorm(width), RMSNorm(width)
        self.feed = FeedForward(width, ffn)
        self.close = RMSNorm(width)
        # The anchor of the slot in turn is always M segments back, so the time from it to a token
        # is the token's phase and a constant.
        self.bias = nn.Parameter(torch.zeros(heads, segment), requires_grad=bias)

    def since(self, writes: Tensor) -> Tensor:
        """Segments (..., M) since each slot was last written, 0 for the last one, after `writes`
        (...); M for empty slots."""
        slot = torch.arange(self.slots, device=writes.device)
        if self.every:
            return torch.where(writes[..., None] > 0, 0, self.slots).expand(
                *writes.shape, len(slot)
            )
        since = (writes[..., None] - 1 - slot) % self.slots
        return torch.where(slot < writes[..., None], since, self.slots)

    def until(self, writes: Tensor) -> Tensor:
        """Writes (..., M) that come before each slot's next one."""
        slot = torch.arange(self.slots, device=writes.device)
        if self.every:
            slot = torch.zeros_like(slot)
            return slot.expand(*writes.shape, -1)
        return (slot - writes[..., None]) % self.slots

    def turn(self, memory: Tensor, writes: Tensor) -> Tensor:
        """The slots (..., E, D) of `memory` (..., M, D) that are written next: one, or all."""
        if self.every:
            return memory
        slot = (writes % self.slots)[..., None, None]
        return memory.gather(-2, slot.long().expand(*writes.shape, 1, memory.shape[-1]))

    def put(self, memory: Tensor, writes: Tensor, new: Tensor) -> Tensor:
        """`memory` with `new` (..., E, D) in the slots of `turn`; the others stay bit by bit."""
        if self.every:
            return new
        slot = torch.arange(self.slots, device=writes.device)
        return torch.where((writes[..., None] % self.slots == slot)[..., None], new, memory)

    def candidates(self, old: Tensor, writes: Tensor, tokens: Pair, seen: Tensor) -> Tensor:
        """New contents (..., n, E, D) of the slots `old` (..., E, D), at n ends of a segment.

        tokens: keys and values (..., L, D) by phase; seen (..., n, L): those before each end.
        """
        key, val = (self.split(part) for part in tokens)
        query = self.queries(self.slot_norm(old))
        scores = torch.einsum("...ehd,...phd->...ehp", query, key).unsqueeze(-4)
        # A place without tokens sees zeros, so that no row of weights is empty.
        seen = seen | ~seen.any(-1, keepdim=True)
        parts = torch.broadcast_tensors(scores, self.bias, seen[..., None, None, :])
        weights = biased(*parts).softmax(-1).to(val.dtype)
        mixed = torch.einsum("...nehp,...phd->...nehd", weights, val)
        old = old.unsqueeze(-3)
        new = old + self.out(mixed.flatten(-2))
        new = self.close(new + self.feed(new))
        if self.write == "lru":
            share = torch.where(writes < self.slots, 1.0, self.blend).to(new.dtype)
            new = torch.lerp(old.expand_as(new), new, share[..., None, None, None])
        return new
