"""Imagination of core `rate` from many steps at once, across the ends of segments.

The keys and values of a row are shared by its starts under a mask, in groups of as many steps as a
token can see. A start owns its memory and the steps that it imagines. Starts end their segments at
different steps: a write is computed for those alone that end one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from worldmodels.attention import Pair
from worldmodels.core import State
from worldmodels.memory_attention import Group
from worldmodels.segments import put, take

if TYPE_CHECKING:
    from worldmodels.rate import Rate


class RateRoll:
    """Continuations of the last K steps of each row: `step(u)` takes (B*K, U)."""

    def __init__(self, core: Rate, context: State, last: int):
        self.core, self.last, self.taken = core, last, 0
        self.size = min(core.kept + 1, last)
        self.after = -last % self.size
        plan = context["plan"]
        ages = plan.age if plan else context["age"].cpu().numpy()  # without one, it is waited for
        context = {name: value.detach() for name, value in context.items() if name != "plan"}
        keys, values = (self.windows(context[name]) for name in ("key", "value"))
        self.shared = list(zip(keys, values, strict=True))
        self.age, self.known = (self.fold(context[name][:, -last:]) for name in ("age", "known"))
        memory, index = context["memory"], context["index"][:, -last:]
        self.memory = self.fold(take(memory, index))
        self.lead = [
            tuple(self.fold(take(part.unflatten(0, memory.shape[:2]), index)) for part in pair)
            for pair in core.lead(memory.flatten(0, 1))
        ]
        self.own: list[list[Pair]] = [[] for _ in core.blocks]
        place = torch.arange(-core.kept, self.size, device=memory.device)
        self.back = place[core.kept :, None] - place  # distance (Q, kept + Q) of keys from starts
        # The most starts of a group that end a segment at once, by their phase.
        groups = np.pad(ages[:, -last:] % core.segment, ((0, 0), (0, self.after)))
        groups = groups.reshape(-1, self.size)
        self.most = [int((groups == phase).sum(1).max()) for phase in range(core.segment)]

    def fold(self, value: Tensor) -> Tensor:
        """(B, K, ...) to (N, Q, ...), N groups of Q starts, padded with zeros."""
        padded = F.pad(value, [0, 0] * (value.dim() - 2) + [0, self.after])
        return padded.unflatten(1, (-1, self.size)).flatten(0, 1)

    def unfold(self, value: Tensor) -> Tensor:
        """(N, Q, D) to (B*K, D)."""
        rows = value.unflatten(0, (-1, (self.last + self.after) // self.size))
        return rows.flatten(1, 2)[:, : self.last].flatten(0, 1)

    def windows(self, keys: Tensor) -> list[Tensor]:
        """(B, layers, kept + T, H, d) to (N, kept + Q, H, d) for each layer: what a group sees."""
        keys = F.pad(keys[:, :, -self.core.kept - self.last :], (0, 0, 0, 0, 0, self.after))
        windows = keys.unfold(2, self.core.kept + self.size, self.size).movedim(-1, 3)
        return [layer.flatten(0, 1) for layer in windows.unbind(1)]

    def seen(self, reach: Tensor, back: Tensor, memory: int) -> tuple[Tensor, Tensor]:
        """Masks (N, n, 1, 1, J) of shared keys, `back` steps from the start, and of own ones with
        `memory` trailing tokens behind them, for queries of a `reach` (N, n)."""
        past = (back >= 0) & (back + self.taken <= reach[..., None])
        mine = torch.arange(self.taken - 1, -1, -1, device=reach.device) <= reach[..., None]
        mine = F.pad(mine, (self.core.tokens, memory), value=True)
        return past[:, :, None, None], mine[:, :, None, None]

    def step(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """h (B*K, D) and x (B*K, X) of one more step."""
        core = self.core
        self.taken += 1
        age = self.age + self.taken
        near, far = core.reaches(age, self.known + self.taken)
        past, mine = self.seen(near, self.back, 0)
        distance = torch.arange(self.taken - 1, -1, -1, device=u.device)
        value = self.fold(core.enter(u).unflatten(0, (-1, self.last)))[:, :, None]
        owned = []
        layers = zip(core.blocks, self.shared, self.lead, self.own, strict=True)
        for block, shared, lead, own in layers:
            attention = block.attention
            query, *new = attention.project(block.norm(value))
            own.append((new[0], new[1]))
            pair = tuple(torch.cat(parts, 2) for parts in zip(lead, *own, strict=True))
            bias = attention.step_bias(0, self.back + self.taken).transpose(0, 1).unsqueeze(2)
            own_bias = attention.step_bias(core.tokens, distance)[:, None]
            groups = [Group(*shared, bias, past), Group(*pair, own_bias, mine)]
            value = block.add(value, attention.mix(query, groups))
            owned.append(pair)
        h = core.leave(value)[:, :, 0]
        complete, count = core.complete(age), self.most[(-1 - self.taken) % core.segment]
        ends = complete.int().topk(count, 1).indices
        shown = None
        if core.provisional:
            every = torch.arange(self.size, device=u.device).expand_as(far)
            shown = self.write(every, far, owned)
        if count:
            new = self.write(ends, far, owned) if shown is None else take(shown, ends)
            self.commit(ends, complete, new)
        if shown is None:
            shown = self.memory
        return self.unfold(h), self.unfold(torch.cat([shown.flatten(2), h], -1))

    def write(self, index: Tensor, far: Tensor, owned: list[Pair]) -> Tensor:
        """The memory (N, n, m, D) as it is if the segments of the starts `index` (N, n) end now.

        far (N, Q): reaches of writes; owned: what `step` gathered of each layer's own keys.
        """
        core = self.core
        old = value = take(self.memory, index)
        past, mine = self.seen(take(far, index), self.back[index], core.tokens)
        for block, shared, pair in zip(core.blocks, self.shared, owned, strict=True):
            attention = block.attention
            query, *new = attention.project(block.norm(value))
            keys, values = (
                torch.cat([take(part, index), one], 2) for part, one in zip(pair, new, strict=True)
            )
            bias = attention.memory_bias(0, self.back.shape[1], 0)
            own_bias = attention.memory_bias(core.tokens, self.taken, core.tokens)
            groups = [Group(*shared, bias, past), Group(keys, values, own_bias, mine)]
            value = block.add(value, attention.mix(query, groups))
        return core.valve(old, core.leave(value))

    def commit(self, index: Tensor, complete: Tensor, new: Tensor) -> None:
        """The starts `index` (N, n) go on with `new` (N, n, m, D) where `complete` (N, Q): groups
        have different numbers of starts that end a segment, and n is the largest."""
        memory = self.core.commit(take(complete, index), new, take(self.memory, index))
        self.memory = put(self.memory, index, memory)
        leads = self.core.lead(memory.flatten(0, 1))
        self.lead = [
            tuple(
                put(part, index, one.unflatten(0, index.shape))
                for part, one in zip(pair, news, strict=True)
            )
            for pair, news in zip(self.lead, leads, strict=True)
        ]
