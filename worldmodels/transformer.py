"""Core `transformer`: causal attention over the last W steps and no other memory.

The control of every claim about memory: what lies further back than layers x (W - 1) steps cannot
reach h. Pre-norm blocks with a bias by distance (no absolute positions). x is h: there is no other
state to show a policy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from worldmodels.attention import Pair, WindowAttention
from worldmodels.core import SequenceCore, State
from worldmodels.layers import Enter, Linear, RMSNorm


class FeedForward(nn.Sequential):
    """RMSNorm -> Linear -> SiLU -> Linear: the residual (..., D) of a block."""

    def __init__(self, width: int, hidden: int):
        super().__init__(RMSNorm(width), Linear(width, hidden), nn.SiLU(), Linear(hidden, width))


class Block(nn.Module):
    kind: type[WindowAttention] = WindowAttention

    def __init__(self, width: int, heads: int, window: int, hidden: int):
        super().__init__()
        self.norm = RMSNorm(width)
        self.attention = self.kind(width, heads, window)
        self.feed = FeedForward(width, hidden)

    def add(self, value: Tensor, attended: Tensor) -> Tensor:
        value = value + attended
        return value + self.feed(value)


def since_first(is_first: Tensor, before: Tensor) -> Tensor:
    """Steps (B, T) since the last reset, that is 0 where `is_first` (B, T), or, before the first
    reset of the row, since `before` (B,) steps ahead of the row."""
    step = torch.arange(is_first.shape[1], device=is_first.device, dtype=before.dtype)
    reset = torch.where(is_first, step, -1).cummax(1).values
    return torch.where(reset < 0, before[:, None] + step, step - reset)


class Transformer(SequenceCore):
    markov = False
    x_is_h = True

    def __init__(
        self, z: int, action: int, layers: int, width: int, heads: int, window: int, ffn: int
    ):
        """Widths: flat z, action, `width` of tokens and h, `ffn` inside the feed-forward."""
        super().__init__()
        self.out = self.hidden = width
        self.heads, self.window = heads, window
        self.grain = window
        self.enter = Enter(z, action, width)
        self.blocks = nn.ModuleList(Block(width, heads, window, ffn) for _ in range(layers))
        self.leave = RMSNorm(width)

    def initial(self, batch: int, age: Tensor | None = None) -> State:
        weight = self.leave.weight
        shape = (batch, len(self.blocks), self.window - 1, self.heads, self.out // self.heads)
        zeros = torch.zeros(shape, device=weight.device, dtype=weight.dtype)
        known = torch.zeros(batch, device=weight.device, dtype=torch.int32)
        return {"key": zeros, "value": zeros, "known": known}

    def step(
        self, u: Tensor, is_first: Tensor | None, state: State, prepared: Any = None
    ) -> tuple[Tensor, Tensor, State]:
        known = state["known"]
        if is_first is not None:
            known = torch.where(is_first, 0, known)
        value, pairs = self.enter(u), []
        caches = zip(state["key"].unbind(1), state["value"].unbind(1), strict=True)
        for block, cache in zip(self.blocks, caches, strict=True):
            attended, pair = block.attention.step(block.norm(value), cache, known)
            value = block.add(value, attended)
            pairs.append(pair)
        h = self.leave(value)
        return h, h, self.state(pairs, known)

    def state(self, pairs: list[Pair], known: Tensor) -> State:
        """The state after a step that knew `known` (B,) steps before it."""
        dtype = self.leave.weight.dtype
        key, value = (torch.stack(parts, 1).to(dtype) for parts in zip(*pairs, strict=True))
        return {"key": key, "value": value, "known": (known + 1).clamp(max=self.window - 1)}

    def scan(
        self, u: Tensor, is_first: Tensor, state: State, plan: Any = None
    ) -> tuple[Tensor, Tensor, State, State]:
        known = since_first(is_first, state["known"])
        reach = known.clamp(max=self.window - 1)
        value, pairs = self.enter(u), []
        caches = zip(state["key"].unbind(1), state["value"].unbind(1), strict=True)
        for block, cache in zip(self.blocks, caches, strict=True):
            cache = tuple(part.to(value.dtype) for part in cache)
            attended, pair = block.attention.scan(block.norm(value), cache, reach)
            value = block.add(value, attended)
            pairs.append(pair)
        h = self.leave(value)
        kept = [tuple(part[:, u.shape[1] :] for part in pair) for pair in pairs]
        key, value = (torch.stack(parts, 1) for parts in zip(*pairs, strict=True))
        context = {"key": key, "value": value, "known": known}
        return h, h, self.state(kept, known[:, -1]), context

    def imagine(self, context: State, last: int | None = None) -> TransformerRoll:
        """Rolls from the `last` steps of each row; keys and values of the rows are shared."""
        return TransformerRoll(self, context, last or context["known"].shape[1])

    def flops(self, batch: int, length: int) -> int:
        per_step = self.enter[0].weight.numel()
        for block in self.blocks:
            per_step += block.attention.qkv.weight.numel() + block.attention.out.weight.numel()
            per_step += block.feed[1].weight.numel() + block.feed[3].weight.numel()
        padded = -(-length // self.window) * self.window
        attention = 2 * padded * 2 * self.window * self.out * len(self.blocks)
        return 2 * batch * (length * per_step + attention)


class TransformerRoll:
    """Continuations of the last K steps of each row: `step(u)` takes (B*K, U)."""

    def __init__(self, core: Transformer, context: State, last: int):
        self.core, self.last, self.taken = core, last, 0
        self.known = context["known"][:, -last:]
        keep = core.window - 1 + last
        keys, values = (context[name][:, :, -keep:].detach() for name in ("key", "value"))
        self.shared = list(zip(keys.unbind(1), values.unbind(1), strict=True))
        self.own: list[list[Pair]] = [[] for _ in core.blocks]

    def step(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """h and x (B*K, D) of one more step."""
        core = self.core
        self.taken += 1
        reach = (self.known + self.taken).clamp(max=core.window - 1)
        value = core.enter(u).unflatten(0, (-1, self.last))
        for block, shared, own in zip(core.blocks, self.shared, self.own, strict=True):
            attended = block.attention.imagine(block.norm(value), shared, own, reach)
            value = block.add(value, attended)
        h = core.leave(value).flatten(0, 1)
        return h, h
