"""Slots of external memory: tokens read them, and whole segments are written into them in turn.

ELMUR (arXiv 2510.07151), section 3, algorithms 1 and 2. There the least recently used slot is
written: the first empty one is replaced, and when none is empty the one with the oldest anchor is
blended. Every write takes a newer anchor than all slots have, so the oldest is always the one after
the slot written last: slot = writes mod M, replaced while writes < M. That is the rule exactly, and
anchors follow from it: the slot written i segments ago ends i segments before the coming one. Time
from slot to token is then i and the token's phase, and the number of writes is all that is kept.

The slot in turn is the query of the write and stays the same within a segment, so what it has
gathered from the tokens so far is a running mean under softmax weights: `Sum`.

The candidate ends with a norm. With pre-norm residuals alone a blend would be m + lambda f(m),
which forgets nothing and has no bound; so ||m|| stays within that of the largest candidate or
initial slot (the paper's proposition 2).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worldmodels.attention import Pair, biased
from worldmodels.layers import Dropout, RMSNorm, init_weight
from worldmodels.segments import Grid
from worldmodels.transformer import FeedForward

Sum = tuple[Tensor, Tensor]  # mean of values (..., E, D) and log of the sum of weights (..., E, H)

NOTHING = -1e30  # log of no weight; finite, so that differences and gradients of it are
INITIAL = 0.1  # standard deviation of slots before their first write: RememberColor's, table 7


class SlotCrossAttention(nn.Module):
    """Projections of multi-head attention from one set of vectors (..., D) to another."""

    def __init__(self, width: int, heads: int, dropout: float):
        """`dropout` of the weights in training."""
        super().__init__()
        self.heads = heads
        self.drop = Dropout(dropout)
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
        """Keys and values (..., D)."""
        key, val = self.pair(value).chunk(2, -1)
        return key, val


class Read(SlotCrossAttention):
    """What tokens (..., Q, D) read from slots: a residual (..., Q, D)."""

    def __init__(
        self, width: int, heads: int, slots: int, segment: int, bias: bool, dropout: float
    ):
        super().__init__(width, heads, dropout)
        self.norm = RMSNorm(width)
        # By the token's phase and the segments since the slot was written; the last row: empty.
        table = torch.zeros(segment, slots + 1, heads)
        self.bias = nn.Parameter(table, requires_grad=bias)

    def by_time(self, phase: Tensor, since: Tensor) -> Tensor:
        """Bias (..., H, M) of tokens at `phase` (...) for slots `since` (..., M), see `Slots`."""
        segment, rows, _ = self.bias.shape
        index = phase[..., None] * rows + since.clamp(max=rows - 1)
        return F.embedding(index, self.bias.view(segment * rows, -1)).transpose(-1, -2)

    def ask(self, value: Tensor) -> Tensor:
        """Queries (..., H, d) of tokens (..., D)."""
        return self.queries(self.norm(value))

    def weights(self, query: Tensor, key: Tensor, bias: Tensor) -> Tensor:
        """Shares (..., Q, H, M) of the slots for queries (..., Q, H, d) on keys (..., M, H, d)."""
        scores = torch.einsum("...qhd,...mhd->...qhm", query, key)
        return torch.softmax(scores.to(bias.dtype) + bias, -1)

    def forward(self, query: Tensor, slots: Pair, bias: Tensor) -> Tensor:
        """`slots`: keys and values (..., M, D) for all Q queries; bias (..., Q, H, M)."""
        key, val = (self.split(part) for part in slots)
        weights = self.drop(self.weights(query, key, bias)).to(val.dtype)
        return self.out(torch.einsum("...qhm,...mhd->...qhd", weights, val).flatten(-2))

    def imagine(
        self, value: Tensor, grid: Grid, shared: Pair, own: Pair | None, bias: Tensor, seen: Tensor
    ) -> Tensor:
        """Steps (B, K, D) that lie in `grid` read the slots of their place, and their own.

        shared: keys and values (B, G, M, D); own: (B, K, P, D); bias (B, K, H, M + P) and seen
        (B, K, 1, M + P) of both.
        """
        query = self.ask(value)
        key, val = (self.split(part) for part in shared)
        scores = grid.pick(torch.einsum("bgqhd,bgmhd->bgqhm", grid.lay(query), key))
        if own is not None:
            own = tuple(self.split(part) for part in own)
            mine = (query.unsqueeze(2) * own[0]).sum(-1)  # (B, K, P, H)
            scores = torch.cat([scores, mine.transpose(2, 3)], -1)
        weights = biased(scores, bias, seen).softmax(-1).to(val.dtype)
        slots = key.shape[2]
        mixed = torch.einsum("bgqhm,bgmhd->bgqhd", grid.lay(weights[..., :slots]), val)
        mixed = grid.pick(mixed)
        if own is not None:
            mixed = mixed + (weights[..., slots:].transpose(2, 3).unsqueeze(-1) * own[1]).sum(2)
        return self.out(mixed.flatten(-2))


class Slots(SlotCrossAttention):
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
        dropout: float,
        dropout_memory: float,
    ):
        super().__init__(width, heads, dropout)
        self.slots, self.blend, self.write = slots, blend, write
        self.every = write == "all"
        self.each = slots if self.every else 1  # slots that a segment writes
        self.life = slots // self.each  # segments after which a slot is written again
        drawn = INITIAL * torch.randn(slots, width)
        self.initial = nn.Parameter(drawn, requires_grad=initial == "learned")
        self.slot_norm, self.token_norm = RMSNorm(width), RMSNorm(width)
        self.feed = FeedForward(width, ffn)
        self.close = RMSNorm(width)
        self.drop_memory = Dropout(dropout_memory)
        # The anchor of the slot in turn is always M segments back, so the time from it to a token
        # is the token's phase and a constant.
        self.bias = nn.Parameter(torch.zeros(segment, heads), requires_grad=bias)

    def since(self, writes: Tensor) -> Tensor:
        """Segments (..., M) since each slot was last written, 0 for the last one, after `writes`
        (...); M for empty slots."""
        if self.every:
            since = torch.where(writes > 0, 0, self.slots)
            return since[..., None].expand(*writes.shape, self.slots)
        slot = torch.arange(self.slots, device=writes.device)
        since = (writes[..., None] - 1 - slot) % self.slots
        return torch.where(slot < writes[..., None], since, self.slots)

    def until(self, writes: Tensor) -> Tensor:
        """Writes (..., M) that come before each slot's next one."""
        if self.every:
            return torch.zeros_like(writes)[..., None].expand(*writes.shape, self.slots)
        slot = torch.arange(self.slots, device=writes.device)
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

    def ask(self, old: Tensor) -> Tensor:
        """Queries (..., E, H, d) of the slots `old` (..., E, D)."""
        return self.queries(self.slot_norm(old))

    def tell(self, tokens: Tensor) -> Pair:
        """Keys and values of tokens (..., D) for the write."""
        return self.keys(self.token_norm(tokens))

    def nothing(self, *lead: int) -> Sum:
        """The sum (*lead, E, ...) before a segment's first token."""
        like = self.initial
        mean = like.new_zeros(*lead, self.each, like.shape[-1])
        return mean, like.new_full((*lead, self.each, self.heads), NOTHING)

    def add(self, query: Tensor, token: Pair, phase: Tensor, before: Sum) -> Sum:
        """The sum after one more token (..., D) at `phase` (...)."""
        mean, total = before
        key, val = (self.split(part)[..., None, :, :] for part in token)
        score = (query * key).sum(-1, dtype=total.dtype) + self.bias[phase][..., None, :]
        after = torch.logaddexp(total, score)
        share = (score - after).exp()[..., None]
        mean = self.split(mean) * (total - after).exp()[..., None] + val * share
        return mean.flatten(-2), after

    def sums(self, query: Tensor, tokens: Pair, taken: Tensor, before: Sum) -> Sum:
        """The sums (B, L, E, ...) after each token (B, L, D) of a segment, of those `taken` (B, L).

        `before`: that of the segment's tokens ahead of these.
        """
        mean, total = before
        key, val = (self.split(part) for part in tokens)
        scores = torch.einsum("behd,bphd->behp", query, key).to(total.dtype) + self.bias.T
        scores = torch.where(taken[:, None, None], scores, NOTHING)
        place = torch.arange(taken.shape[1], device=taken.device)
        later = (place > place[:, None])[:, None, None]
        scores = scores[:, None].masked_fill(later, NOTHING)  # (B, ends, E, H, L)
        ahead = total[:, None, :, :, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([ahead, scores], -1)
        weights = self.drop(torch.softmax(scores, -1))
        after = torch.einsum("bnehp,bphd->bnehd", weights[..., 1:].to(val.dtype), val)
        after = after + weights[..., :1] * self.split(mean)[:, None]
        return after.flatten(-2), scores.logsumexp(-1)

    def candidates(self, old: Tensor, mean: Tensor, writes: Tensor, drop: bool = False) -> Tensor:
        """New contents (..., E, D) of slots `old` (..., E, D) that have gathered `mean`, after
        `writes` (...); `drop`: with dropout of what is new."""
        new = old + self.out(mean)
        new = self.close(new + self.feed(new))
        new = self.drop_memory(new) if drop else new
        if self.write == "lru":
            share = torch.where(writes < self.slots, 1.0, self.blend).to(new.dtype)
            new = torch.lerp(old.expand_as(new), new, share[..., None, None])
        return new
