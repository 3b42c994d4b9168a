"""Core `rate`: a transformer whose memory tokens are read and rewritten once a segment.

RATE, "Recurrent Action Transformer with Memory" (arXiv 2306.09459), section 3 and algorithms 1-2.
The steps of an episode are cut into segments of K, and the stack runs over [M; steps; M]:

    leading M    sees itself alone: what is read
    a step       sees the leading M and earlier steps, those of earlier segments included (cache)
    trailing M   sees the leading M, itself and all steps before it: what is written, new
    M'           = valve(M, new), once the segment is complete; a truncated one is never written

Departures, with reasons: one token a step (a world model has no returns to go); pre-norm blocks
with a feed-forward and a bias by distance, as in core `transformer`, its control (theirs is
post-norm, and its memory tokens read meaningless relative positions); the m initial memory tokens
differ (as released all are one vector); the trailing tokens see the cached steps that their last
step sees; gradients flow through the memory (as released nothing trains the valve: `memory_grad
detach`). Segments are counted from the first step of the episode, so acting and
training cut alike.

x is the memory and h, side by side: the committed memory, or the provisional one, as it would be
if the segment ended at this step.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worldmodels.attention import Pair, clean
from worldmodels.core import SequenceCore, State
from worldmodels.layers import Dropout, Enter, RMSNorm
from worldmodels.memory_attention import Group, MemoryAttention
from worldmodels.rate_roll import RateRoll
from worldmodels.segments import Pieces, Plan, take
from worldmodels.transformer import Block, since_first
from worldmodels.uncompiled import uncompiled
from worldmodels.valve import make_valve


class RateLayer(Block):
    kind = MemoryAttention


class Rate(SequenceCore):
    markov = False

    def __init__(
        self,
        z: int,
        action: int,
        layers: int,
        width: int,
        heads: int,
        window: int,
        ffn: int,
        segment: int,
        tokens: int,
        attend: str,
        valve: str,
        x: str,
        initial: str,
        memory_grad: str,
        dropout_memory: float,
    ):
        """Widths: flat z, action, `width` of tokens and h, `ffn` inside the feed-forward.

        window: steps that a step sees, its own included; segment: steps K between two writes;
        tokens: memory tokens m. The words are those of `RateConfig`.
        """
        super().__init__()
        self.heads, self.window, self.segment, self.tokens = heads, window, segment, tokens
        self.grain = math.lcm(window, segment)
        self.cut, self.provisional = attend == "segment", x == "provisional"
        self.detach = memory_grad == "detach"
        # Steps before the current one that any token sees: a write sees its whole segment.
        self.kept = max(window, segment) - 1
        self.out, self.hidden = width, tokens * width + width
        self.enter = Enter(z, action, width)
        self.blocks = nn.ModuleList(RateLayer(width, heads, window, ffn) for _ in range(layers))
        self.leave = RMSNorm(width)
        self.valve = make_valve(valve, width, heads)
        self.drop = Dropout(dropout_memory)
        memory = torch.randn(tokens, width)
        if initial == "learned":
            self.memory = nn.Parameter(memory)
        else:
            self.register_buffer("memory", memory)

    def initial(self, batch: int, age: Tensor | None = None) -> State:
        memory = self.memory.expand(batch, -1, -1)
        shape = (batch, len(self.blocks), self.kept, self.heads, self.out // self.heads)
        known = torch.zeros(batch, device=memory.device, dtype=torch.int32)
        return {
            "key": memory.new_zeros(shape),
            "value": memory.new_zeros(shape),
            "memory": memory,
            "age": known if age is None else age.to(known),
            "known": known,
        }

    def reaches(self, age: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        """Distance of the oldest step seen by a step, and by a write after it: `age` steps into
        the episode, of which `known` are at hand."""
        phase = age % self.segment
        near = known.clamp(max=self.window - 1)
        if self.cut:
            return torch.minimum(near, phase), torch.minimum(known, phase)
        return near, torch.minimum(known, phase.clamp(min=self.window - 1))

    def complete(self, age: Tensor) -> Tensor:
        """Whether a segment ends with the step at `age`."""
        return (age + 1) % self.segment == 0

    def masks(self, near: Tensor, at: Tensor, far: Tensor) -> Tensor:
        """Mask (B, q, m + kept + n + P*m) of the queries [leading M; n steps; P trailing M] on the
        keys [leading M; cache; n steps; P trailing M].

        near (B, n) and far (B, P) are the reaches of steps and of writes; a write follows the step
        that `at` (B, P) names.
        """
        lead, steps, device = self.tokens, near.shape[1], near.device
        place = torch.arange(-self.kept, steps, device=device)

        def window(when: Tensor, reach: Tensor) -> Tensor:
            distance = when[..., None] - place
            return (distance >= 0) & (distance <= reach[..., None])

        read = window(place[self.kept :], near)
        write = window(at, far).repeat_interleave(lead, 1)
        past = torch.cat([read.new_zeros(len(near), lead, len(place)), read, write], 1)
        own = torch.eye(at.shape[1], dtype=torch.bool, device=device)
        own = own.repeat_interleave(lead, 0).repeat_interleave(lead, 1)
        own = F.pad(own, (0, 0, lead + steps, 0)).expand(len(near), -1, -1)
        return torch.cat([torch.ones_like(past[..., :1]).expand(-1, -1, lead), past, own], -1)

    def biases(self, steps: int, writes: int) -> list[Tensor]:
        """Bias (H, q, keys) of each layer, for the queries and keys of `masks`."""
        lead, device = self.tokens, self.leave.weight.device
        place = torch.arange(-self.kept, steps, device=device)
        distance = place[self.kept :, None] - place
        out = []
        for block in self.blocks:
            step = F.pad(block.attention.step_bias(lead, distance), (0, writes * lead))
            memory = block.attention.memory_bias(lead, len(place), writes * lead)
            parts = [memory.expand(-1, lead, -1), step, memory.expand(-1, writes * lead, -1)]
            out.append(torch.cat(parts, 1))
        return out

    def run(
        self,
        steps: Tensor,
        memory: Tensor,
        caches: list[Pair],
        biases: list[Tensor],
        masks: Tensor,
    ) -> tuple[Tensor, Tensor, list[Pair]]:
        """A segment or a part of it: `steps` (B, n, D) that read `memory` (B, m, D) and `caches`.

        Returns h (B, n, D), the memories written (B, P, m, D), and the keys and values
        (B, kept + n, H, d) of each layer, those of its cache first.
        """
        lead, count = self.tokens, steps.shape[1]
        writes = (masks.shape[1] - lead - count) // lead
        value = torch.cat([memory, steps, memory.repeat(1, writes, 1)], 1)
        pairs = []
        for block, cache, bias in zip(self.blocks, caches, biases, strict=True):
            query, *new = block.attention.project(block.norm(value))
            keys, values = (
                torch.cat([one[:, :lead], old, one[:, lead:]], 1)
                for old, one in zip(cache, new, strict=True)
            )
            group = Group(keys, values, bias, masks[:, None, None])
            value = block.add(value, block.attention.mix(query[:, None], [group])[:, 0])
            span = slice(lead, lead + self.kept + count)
            pairs.append((keys[:, span], values[:, span]))
        value = self.leave(value)
        new = value[:, lead + count :].unflatten(1, (writes, lead))
        return value[:, lead : lead + count], self.valve(memory[:, None], new), pairs

    def lead(self, memory: Tensor) -> list[Pair]:
        """Keys and values (B, m, H, d) of each layer for the leading tokens of `memory` alone."""
        value, pairs = memory, []
        everything = torch.ones((), dtype=torch.bool, device=memory.device)
        for block in self.blocks:
            query, *new = block.attention.project(block.norm(value))
            group = Group(*new, bias=value.new_zeros(()), seen=everything)
            value = block.add(value, block.attention.mix(query[:, None], [group])[:, 0])
            pairs.append(tuple(new))
        return pairs

    def commit(self, where: Tensor, new: Tensor, old: Tensor) -> Tensor:
        """The memory after a step: `new` (B, ..., m, D) `where` (B, ...) it ends a segment."""
        new = new.detach() if self.detach else new
        return torch.where(where[..., None, None], new, old)

    def caches(self, state: State) -> list[Pair]:
        pairs = zip(state["key"].unbind(1), state["value"].unbind(1), strict=True)
        return [(clean(key), clean(value)) for key, value in pairs]

    def state(self, pairs: list[Pair], memory: Tensor, age: Tensor, known: Tensor) -> State:
        """The state after a step at `age` that knew `known` (B,) steps before it."""
        key, value = (torch.stack(parts, 1) for parts in zip(*pairs, strict=True))
        known = (known + 1).clamp(max=self.kept)
        return {"key": key, "value": value, "memory": memory, "age": age + 1, "known": known}

    def step(
        self, u: Tensor, is_first: Tensor | None, state: State, prepared: Any = None
    ) -> tuple[Tensor, Tensor, State]:
        age, known, memory = state["age"], state["known"], state["memory"]
        if is_first is not None:
            age, known = torch.where(is_first, 0, age), torch.where(is_first, 0, known)
            memory = torch.where(is_first[:, None, None], self.memory, memory)
        near, far = (reach[:, None] for reach in self.reaches(age, known))
        complete = self.complete(age)
        # Where no row ends a segment nothing is written; to ask would make another device wait.
        asked = not self.provisional and complete.device.type == "cpu"
        writes = int(bool(complete.any()) if asked else True)
        masks = self.masks(near, torch.zeros_like(far)[:, :writes], far[:, :writes])
        value, biases = self.enter(u)[:, None], self.biases(1, writes)
        h, new, pairs = self.run(value, memory, self.caches(state), biases, masks)
        if writes:
            memory = self.commit(complete, new[:, 0], memory)
        shown = new[:, 0] if self.provisional else memory
        x = torch.cat([shown.flatten(1), h[:, 0]], -1)
        pairs = [(key[:, 1:], value[:, 1:]) for key, value in pairs]
        return h[:, 0], x, self.state(pairs, memory, age, known)

    def plan(self, is_first: np.ndarray, age: np.ndarray) -> Plan:
        return Plan.of(is_first, age, self.segment)

    @uncompiled  # the number of rounds depends on the resets
    def scan(
        self, u: Tensor, is_first: Tensor, state: State, plan: Plan | None = None
    ) -> tuple[Tensor, Tensor, State, State]:
        age, known = (since_first(is_first, state[name]) for name in ("age", "known"))
        pieces = Pieces(age, is_first, self.segment, plan, packed=True)

        def rounds(value: Tensor) -> Tensor:
            return pieces.lay(value).transpose(0, 1)

        near, far = (rounds(reach) for reach in self.reaches(age, known))
        count = pieces.taken.sum(2).T
        last = (count - 1).clamp(min=0)[..., None]
        at = last
        if self.provisional:
            at = torch.arange(self.segment, device=u.device).expand_as(far)
        reaches = near, at, far.gather(2, at)
        masks = self.masks(*(part.flatten(0, 1) for part in reaches)).unflatten(0, near.shape[:2])
        value, complete, reset = rounds(self.enter(u)), pieces.ends.T, pieces.begins.T
        biases, caches = self.biases(self.segment, at.shape[2]), self.caches(state)
        shift = torch.arange(self.kept, device=u.device)
        memories = [self.memory.expand_as(state["memory"]), state["memory"]]
        before = [torch.stack(parts, 1).detach() for parts in zip(*caches, strict=True)]
        hs, news, keys, values = [], [], [], []
        for i in range(pieces.pieces):
            memory = torch.where(reset[i][:, None, None], self.memory, memories[-1])
            h, new, both = self.run(value[i], memory, caches, biases, masks[i])
            written = take(new, last[i])[:, 0] if self.provisional else new[:, 0]
            memories.append(self.commit(complete[i], self.drop(written), memory))
            hs.append(h)
            news.append(new)
            for part, parts in zip((keys, values), zip(*both, strict=True), strict=True):
                part.append(torch.stack([one[:, self.kept :].detach() for one in parts], 2))
            kept = count[i][:, None] + shift
            caches = [(take(key, kept), take(val, kept)) for key, val in both]

        def steps(rounds: list[Tensor]) -> Tensor:
            return pieces.pick(torch.stack(rounds, 1))

        h, memory = steps(hs), torch.stack(memories, 1)
        # The memory that follows each step, among the initial one, the state's and each round's.
        begun = torch.where(pieces.begins.gather(1, pieces.piece), 0, pieces.piece + 1)
        index = torch.where(self.complete(age), pieces.piece + 2, begun)
        shown = steps(news) if self.provisional else take(memory, index)
        context = {"memory": memory, "index": index, "age": age, "known": known, "plan": plan}
        for name, cache, parts in zip(("key", "value"), before, (keys, values), strict=True):
            new = steps(parts).transpose(1, 2)
            context[name] = torch.cat([cache, new], 2)  # of each layer kept + T keys or values
        state = self.state(caches, memories[-1], age[:, -1], known[:, -1])
        return h, torch.cat([shown.flatten(2), h], -1), state, context

    def imagine(self, context: State, last: int | None = None) -> RateRoll:
        """Rolls from the `last` steps of each row; keys and values of the rows are shared."""
        return RateRoll(self, context, last or context["age"].shape[1])

    def flops(self, batch: int, length: int) -> int:
        rounds = 1 + -(-length // self.segment)  # as `Plan.of` lays rows that begin anywhere
        writes = self.segment if self.provisional else 1
        queries = self.tokens + self.segment + writes * self.tokens
        block = self.blocks[0]
        layers = block.attention.qkv, block.attention.out, block.feed[1], block.feed[3]
        per_query = 2 * sum(layer.weight.numel() for layer in layers)
        per_query += 4 * (queries + self.kept) * self.out
        per_round = len(self.blocks) * queries * per_query + self.valve.flops(writes, self.tokens)
        return batch * (2 * length * self.enter[0].weight.numel() + rounds * per_round)
