"""Core `elmur`: a window of attention, and layers that each own a memory of slots.

ELMUR (arXiv 2510.07151), section 3, as a causal core. A layer attends to the last W steps, reads
its slots (mem2tok) and passes a feed-forward; at the end of each segment of L steps one slot is
written from the segment's tokens (tok2mem, slots.py). Segments follow the episode's steps; one that
a reset cuts short is never written (segments.py). Ours, not the paper's: pre-norm residuals, biases
by distance, plain feed-forwards, attention across the borders of segments (`attend`), learned
initial slots (`initial`), and gradients into the writer (`memory_grad`: the published trainer
detaches the memory, which leaves the writer as it was drawn).

Memory belongs to a layer, so a batch is worked off layer by layer: one call of attention for all T
steps, then a loop over segments, which alone is sequential.

x is h or, if `provisional`, what each memory's slot in turn would become if the segment ended at
that step. (Slots are constant within a segment: a policy that read them and not h would be blind to
the last steps.)
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from worldmodels.attention import Pair, WindowAttention
from worldmodels.core import SequenceCore, State
from worldmodels.elmur_roll import ElmurRoll
from worldmodels.layers import Dropout, Enter, RMSNorm
from worldmodels.segments import Pieces, Plan
from worldmodels.slots import NOTHING, Read, Slots, Sum
from worldmodels.transformer import FeedForward, since_first


class ElmurLayer(nn.Module):
    """The token track of a layer: attention, reading of slots, feed-forward."""

    def __init__(
        self,
        width: int,
        heads: int,
        window: int,
        ffn: int,
        read: Read,
        dropout: tuple[float, float],
    ):
        """`dropout` of residuals and of the attention's weights."""
        super().__init__()
        self.norm = RMSNorm(width)
        self.attention = WindowAttention(width, heads, window, dropout[1])
        self.read = read
        self.feed = FeedForward(width, ffn)
        self.drop = Dropout(dropout[0])

    def recall(self, value: Tensor, query: Tensor, slots: Tensor, bias: Tensor) -> Tensor:
        """Tokens (..., Q, D) after they have read `slots` (..., M, D)."""
        value = value + self.drop(self.read(query, self.read.keys(slots), bias))
        return value + self.drop(self.feed(value))


class Elmur(SequenceCore):
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
        slots: int,
        blend: float,
        attend: str,
        initial: str,
        memory: str,
        write: str,
        bias: bool,
        memory_grad: str,
        dropout: float,
        dropout_attention: float,
        dropout_memory: float,
        provisional: bool,
    ):
        """Widths: flat z, action, `width` of tokens, slots and h, `ffn` inside the feed-forwards.

        The other settings are those of ElmurConfig; `provisional` chooses x.
        """
        super().__init__()
        self.heads, self.window, self.segment = heads, window, segment
        self.grain = math.lcm(window, segment)
        self.cut, self.detach = attend == "segment", memory_grad == "detach"
        self.provisional = provisional
        self.enter = Enter(z, action, width)
        self.layers = nn.ModuleList(
            ElmurLayer(width, heads, window, ffn, read, (dropout, dropout_attention))
            for read in (
                Read(width, heads, slots, segment, bias, dropout_attention) for _ in range(layers)
            )
        )
        # A shared memory is written by the first layer alone: were it written by a later one, no
        # layer could be worked off before the others.
        self.memories = nn.ModuleList(
            Slots(
                width,
                heads,
                slots,
                segment,
                ffn,
                blend,
                initial,
                write,
                bias,
                dropout_attention,
                dropout_memory,
            )
            for _ in range(layers if memory == "per_layer" else 1)
        )
        self.leave = RMSNorm(width)
        self.out = width
        self.hidden = width * len(self.memories) if provisional else width

    def initial(self, batch: int, age: Tensor | None = None) -> State:
        weight = self.leave.weight
        slots = torch.stack([memory.initial for memory in self.memories])
        head = self.out // self.heads

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(batch, *shape, device=weight.device, dtype=weight.dtype)

        count = torch.zeros(batch, device=weight.device, dtype=torch.int32)
        cache = zeros(len(self.layers), self.window - 1, self.heads, head)
        mean, total = self.memories[0].nothing(batch, len(slots))
        return {
            "key": cache,
            "value": cache,
            "mean": mean,  # what the slots in turn have gathered from the segment's tokens
            "total": total,
            "memory": slots.expand(batch, *slots.shape),
            "writes": count,
            "age": count if age is None else age.to(count),  # steps of the episode
            "known": count,  # those of them that the state has seen
        }

    def reset(self, state: State, is_first: Tensor) -> State:
        """The state with rows that start an episode replaced."""
        new = self.initial(len(is_first))
        out = dict(state)
        for key in ("mean", "total", "memory", "writes", "age", "known"):
            first = is_first.view(-1, *[1] * (state[key].dim() - 1))
            out[key] = torch.where(first, new[key], state[key])
        return out  # `known` masks the other two

    def reach(self, known: Tensor, age: Tensor) -> Tensor:
        """Distance of the oldest step that a step attends to."""
        reach = known.clamp(max=self.window - 1)
        return torch.minimum(reach, age % self.segment) if self.cut else reach

    def kept(self, memory: Tensor) -> Tensor:
        return memory.detach() if self.detach else memory

    def step(
        self, u: Tensor, is_first: Tensor | None, state: State, prepared: Any = None
    ) -> tuple[Tensor, Tensor, State]:
        if is_first is not None:
            state = self.reset(state, is_first)
        age, known, writes = state["age"], state["known"], state["writes"]
        reach, phase = self.reach(known, age), age % self.segment
        complete = (phase == self.segment - 1)[:, None, None]
        # Where no row ends a segment nothing is written; to ask would make another device wait.
        writing = self.provisional or complete.device.type != "cpu" or bool(complete.any())
        caches = zip(state["key"].unbind(1), state["value"].unbind(1), strict=True)
        value, pairs, sums, memories, xs = self.enter(u), [], [], [], []
        for number, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            attended, pair = layer.attention.step(layer.norm(value), cache, reach)
            pairs.append(pair)
            index = min(number, len(self.memories) - 1)
            slots, memory = self.memories[index], state["memory"][:, index]
            bias = layer.read.by_time(phase[:, None], slots.since(writes)[:, None])
            value = (value + attended)[:, None]
            value = layer.recall(value, layer.read.ask(value), memory, bias)[:, 0]
            if number > index:
                continue
            old = slots.turn(memory, writes)
            before = state["mean"][:, index], state["total"][:, index]
            sums.append(slots.add(slots.ask(old), slots.tell(value), phase, before))
            if not writing:
                memories.append(memory)
                continue
            new = slots.candidates(old, sums[-1][0], writes)
            put = self.kept(slots.put(memory, writes, new))
            memories.append(torch.where(complete, put, memory))
            xs.append(new[:, 0])
        h = self.leave(value)
        mean, total = self.after(sums, complete[..., None])
        last = self.state(
            pairs,
            mean=mean,
            total=total,
            memory=torch.stack(memories, 1),
            writes=(writes + complete[:, 0, 0]).int(),
            age=age + 1,
            known=known + 1,
        )
        return h, torch.cat(xs, -1) if self.provisional else h, last

    def after(self, sums: list[Sum], complete: Tensor) -> Sum:
        """Means and totals, memories side by side in axis 1; none where a segment is complete."""
        mean, total = (torch.stack(parts, 1) for parts in zip(*sums, strict=True))
        return torch.where(complete, 0.0, mean), torch.where(complete, NOTHING, total)

    def state(self, pairs: list[Pair], **rest: Tensor) -> State:
        """A state with the layers' keys and values side by side in axis 1."""
        dtype = self.leave.weight.dtype
        key, value = (torch.stack(parts, 1).to(dtype) for parts in zip(*pairs, strict=True))
        return {"key": key, "value": value, **rest}

    def plan(self, is_first: np.ndarray, age: np.ndarray) -> Plan:
        return Plan.of(is_first, age, self.segment)

    def scan(
        self, u: Tensor, is_first: Tensor, state: State, plan: Plan | None = None
    ) -> tuple[Tensor, Tensor, State, State]:
        length = u.shape[1]
        state = self.reset(state, is_first[:, 0])
        known, age = (since_first(is_first, state[name]) for name in ("known", "age"))
        pieces = Pieces(age, is_first, self.segment, plan)
        reach, phase = self.reach(known, age), age % self.segment
        writes = [state["writes"]]
        for s, done in enumerate(pieces.ends.unbind(1), 1):
            count = (writes[-1] + done).int()
            writes.append(count if s == pieces.pieces else count.where(~pieces.begins[:, s], 0))
        writes = torch.stack(writes, 1)
        cuts = pieces.taken, pieces.begins, pieces.ends, writes[:, :-1]
        places = torch.arange(self.segment, device=u.device)
        nothing = self.memories[0].nothing(len(u))
        value, pairs, sums, memories, xs = self.enter(u), [], [], [], []
        caches = zip(state["key"].unbind(1), state["value"].unbind(1), strict=True)
        for number, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            cache = tuple(part.to(value.dtype) for part in cache)
            attended, pair = layer.attention.scan(layer.norm(value), cache, reach)
            pairs.append(pair)
            value = value + layer.drop(attended)
            laid, query = pieces.lay(value), pieces.lay(layer.read.ask(value))
            index = min(number, len(self.memories) - 1)
            slots = self.memories[index]
            bias = layer.read.by_time(places, slots.since(writes[:, :-1])[:, :, None])
            if number > index:
                value = pieces.pick(layer.recall(laid, query, memories[index][:, :-1], bias))
                continue
            memory = state["memory"][:, index]
            ahead = state["mean"][:, index], state["total"][:, index]
            parts: list[tuple[Tensor, ...]] = []
            # unbind, not indexing: the gradient of one index is as large as the whole batch.
            inputs = (part.unbind(1) for part in (laid, query, bias, *cuts))
            for one, asked, biased, taken, begins, ends, count in zip(*inputs, strict=True):
                memory = torch.where(begins[:, None, None], slots.initial, memory)
                out = layer.recall(one, asked, memory, biased)
                old = slots.turn(memory, count)
                mean, total = slots.sums(slots.ask(old), slots.tell(out), taken, ahead)
                ahead = nothing
                # All of them for x; else the last, which alone may be written.
                upto = mean if self.provisional else mean[:, -1:]
                new = slots.candidates(old[:, None], upto, count[:, None], drop=True)
                parts.append((out, memory, mean, total, new[:, :, 0]))
                put = self.kept(slots.put(memory, count, new[:, -1]))
                memory = torch.where(ends[:, None, None], put, memory)
            out, before, mean, total, new = zip(*parts, strict=True)
            value = pieces.pick(torch.stack(out, 1))
            memories.append(torch.stack([*before, memory], 1))
            sums.append(tuple(pieces.pick(torch.stack(part, 1)) for part in (mean, total)))
            if self.provisional:
                xs.append(pieces.pick(torch.stack(new, 1)))
        h = self.leave(value)
        x = torch.cat(xs, -1) if self.provisional else h

        complete = (phase == self.segment - 1)[:, None, :, None, None]
        mean, total = self.after(sums, complete)
        memory = torch.stack(memories, 1)
        kept = [tuple(part[:, length:] for part in pair) for pair in pairs]
        row, group = torch.arange(len(u), device=u.device), pieces.after[:, -1]
        last = self.state(
            kept,
            mean=mean[:, :, -1],
            total=total[:, :, -1],
            memory=memory[row, :, group],
            writes=writes[row, group],
            age=age[:, -1] + 1,
            known=known[:, -1] + 1,
        )
        key, value = (torch.stack(parts, 1) for parts in zip(*pairs, strict=True))
        context = {
            "key": key,
            "value": value,
            "mean": mean,
            "total": total,
            "memory": memory,  # ahead of each piece, and after the last
            "writes": writes,
            "group": pieces.after,
            "age": age,
            "known": known,
            "plan": plan,
        }
        return h, x, last, context

    def imagine(self, context: State, last: int | None = None) -> ElmurRoll:
        """Rolls from the `last` steps of each row, which share its keys, values and slots."""
        return ElmurRoll(self, context, last or context["known"].shape[1])

    def flops(self, batch: int, length: int) -> int:
        width, window, segment = self.out, self.window, self.segment
        pieces = 1 + -(-length // segment)  # as `Plan.of` lays rows that begin anywhere
        laid = pieces * segment
        padded = -(-length // window) * window
        total = 2 * length * self.enter[0].weight.numel()
        for number, layer in enumerate(self.layers):
            attention, read = layer.attention, layer.read
            projections = attention.qkv.weight.numel() + attention.out.weight.numel()
            total += 2 * length * projections + 4 * padded * 2 * window * width
            tokens = read.query.weight.numel() + read.out.weight.numel()
            tokens += layer.feed[1].weight.numel() + layer.feed[3].weight.numel()
            slots = self.memories[min(number, len(self.memories) - 1)].slots
            total += 2 * laid * tokens + 2 * pieces * slots * read.pair.weight.numel()
            total += 4 * laid * slots * width
        for memory in self.memories:
            each = memory.each
            ends = segment if self.provisional else 1
            total += 2 * laid * memory.pair.weight.numel()
            total += 2 * pieces * each * memory.query.weight.numel()
            total += 2 * laid * each * width * (1 + segment)
            after = memory.out.weight.numel()
            after += memory.feed[1].weight.numel() + memory.feed[3].weight.numel()
            total += 2 * pieces * each * ends * after
        return batch * total
