"""Imagination of the core `elmur`: what the starts of a batch share, and what each adds.

A start reads the slots of its segment where the scan left them: they are laid out by segment, and
no start copies them. When an imagined step completes a segment, the start writes a slot of its own,
which hides the shared slot that it replaces; each further border adds one more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from worldmodels.attention import Pair
from worldmodels.core import State
from worldmodels.segments import Grid, Plan
from worldmodels.slots import Read, Slots, Sum

if TYPE_CHECKING:
    from worldmodels.elmur import Elmur


class Written:
    """Vectors (N, E, D) that N starts have written, one list entry a border they have crossed."""

    def __init__(self, starts: int):
        self.starts, self.parts = starts, []

    def put(self, rows: Tensor, border: int, new: Tensor) -> None:
        """`new` (R, E, D) of the starts `rows` (R,)."""
        if border == len(self.parts):
            self.parts.append(new.new_zeros(self.starts, *new.shape[1:]))
        self.parts[border] = self.parts[border].index_copy(0, rows, new)


class RolledSlots:
    """One memory: shared slots (B, G, M, D), and what N starts write and have written since."""

    def __init__(self, slots: Slots, memory: Tensor, writes: Tensor, place: Tensor, sums: Sum):
        """writes (B, G); place (N,): where in B x G a start is; sums: what it has gathered."""
        self.slots, self.memory, self.writes, self.place = slots, memory, writes, place
        self.written = Written(len(place))
        self.sums = sums
        self.old = slots.turn(memory, writes).flatten(0, 1)[place]
        self.query = slots.ask(self.old)

    def add(self, token: Tensor, phase: Tensor) -> None:
        """One more token (N, D) at `phase` (N,)."""
        self.sums = self.slots.add(self.query, self.slots.tell(token), phase, self.sums)

    def candidates(self, writes: Tensor, rows: Tensor | slice = slice(None)) -> Tensor:
        """What the starts `rows` would write now (R, E, D), after `writes` (N,)."""
        return self.slots.candidates(self.old[rows], self.sums[0][rows], writes[rows])

    def commit(self, rows: Tensor, border: int, new: Tensor) -> None:
        """The starts `rows` (R,) write `new` (R, E, D) and begin the next segment."""
        self.written.put(rows, border, new)
        replaced = border + 1 - self.slots.life
        if replaced < 0:
            shared = self.slots.turn(self.memory, self.writes + border + 1)
            old = shared.flatten(0, 1)[self.place[rows]]
        else:
            old = self.written.parts[replaced][rows]
        parts = (self.old, self.query, *self.sums)
        fresh = (old, self.slots.ask(old), *self.slots.nothing(len(rows)))
        self.old, self.query, *sums = (
            part.index_copy(0, rows, one.to(part.dtype))
            for part, one in zip(parts, fresh, strict=True)
        )
        self.sums = tuple(sums)


class RolledRead:
    """What a layer reads of them: keys and values, shared (B, G, M, D) and of each start."""

    def __init__(self, read: Read, memory: Tensor, starts: int):
        self.read, self.shared = read, read.keys(memory)
        self.own = (Written(starts), Written(starts))

    def put(self, rows: Tensor, border: int, new: Tensor) -> None:
        for written, part in zip(self.own, self.read.keys(new), strict=True):
            written.put(rows, border, part)

    def pair(self, last: int) -> Pair | None:
        """Those of each start (B, K, P, D), K the `last` steps; None before any border."""
        if not self.own[0].parts:
            return None
        return tuple(torch.cat(w.parts, 1).unflatten(0, (-1, last)) for w in self.own)


class ElmurRoll:
    """Continuations of the last K steps of each row: `step(u)` takes (B*K, U)."""

    def __init__(self, core: Elmur, context: State, last: int):
        plan = context["plan"] or Plan.read(context["age"], context["group"])
        context = {key: value.detach() for key, value in context.items() if key != "plan"}
        self.core, self.last, self.taken = core, last, 0
        self.known, self.age, group = (
            context[name][:, -last:] for name in ("known", "age", "group")
        )
        first = group[:, :1]
        after = plan.after[:, -last:]
        pieces = int((after - after[:, :1]).max()) + 1
        self.grid = Grid(group - first, (self.age + 1) % core.segment, core.segment, pieces)
        row = torch.arange(len(group), device=group.device)[:, None]
        take = first + torch.arange(self.grid.pieces, device=group.device)
        take = take.clamp(max=context["writes"].shape[1] - 1)
        place = (row * self.grid.pieces + group - first).flatten()
        writes = context["writes"][row, take]
        self.writes = writes.flatten()[place].unflatten(0, (-1, last))
        memories = [memory[row, take] for memory in context["memory"].unbind(1)]
        mean, total = (context[name][:, :, -last:] for name in ("mean", "total"))
        self.memories = [
            RolledSlots(slots, memory, writes, place, (one.flatten(0, 1), other.flatten(0, 1)))
            for slots, memory, one, other in zip(
                core.memories, memories, mean.unbind(1), total.unbind(1), strict=True
            )
        ]
        # The starts by the steps that complete their segments; they take turns of L steps.
        left = (-2 - self.age).flatten() % core.segment
        phases = (-2 - plan.age[:, -last:]).ravel() % core.segment
        counts = np.bincount(phases, minlength=core.segment).tolist()
        self.rows = left.argsort(stable=True).split(counts)
        keep = core.window - 1 + last
        keys, values = (context[name][:, :, -keep:] for name in ("key", "value"))
        self.shared = list(zip(keys.unbind(1), values.unbind(1), strict=True))
        self.own: list[list[Pair]] = [[] for _ in core.layers]
        self.reads = [
            RolledRead(layer.read, memories[min(n, len(memories) - 1)], len(place))
            for n, layer in enumerate(core.layers)
        ]

    def visible(self, crossed: Tensor) -> tuple[Tensor, Tensor]:
        """Segments since slots were written, and whether they are there, (B, K, M + P), for starts
        that have `crossed` (B, K) borders."""
        slots = self.memories[0].slots
        crossed = crossed[..., None]
        since = slots.since(self.writes)
        since = torch.where(since < slots.slots, since + crossed, slots.slots)
        seen = slots.until(self.writes) >= crossed
        borders = torch.arange(len(self.memories[0].written.parts), device=crossed.device)
        newer = crossed - 1 - borders.repeat_interleave(slots.each)
        there = (newer >= 0) & (newer < slots.life)
        return torch.cat([since, newer.clamp(min=0)], -1), torch.cat([seen, there], -1)

    def step(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """h and x (B*K, ...) of one more step."""
        core = self.core
        self.taken += 1
        age = self.age + self.taken
        phase = age % core.segment
        reach = core.reach(self.known + self.taken, age)
        crossed = age // core.segment - (self.age + 1) // core.segment
        since, seen = self.visible(crossed)
        writes = (self.writes + crossed).flatten()
        border, turn = divmod(self.taken - 1, core.segment)
        rows = self.rows[turn]  # the starts that this step completes a segment of
        value, news, xs = core.enter(u).unflatten(0, (-1, self.last)), [], []
        for number, (layer, shared, own, read) in enumerate(
            zip(core.layers, self.shared, self.own, self.reads, strict=True)
        ):
            value = value + layer.attention.imagine(layer.norm(value), shared, own, reach)
            bias = layer.read.by_time(phase, since)
            value = value + layer.read.imagine(
                value, self.grid, read.shared, read.pair(self.last), bias, seen[:, :, None]
            )
            value = value + layer.feed(value)
            if number < len(self.memories):
                rolled = self.memories[number]
                rolled.add(value.flatten(0, 1), phase.flatten())
                if core.provisional:
                    new = rolled.candidates(writes)
                    xs.append(new[:, 0])
                    news.append(new[rows])
                else:
                    news.append(rolled.candidates(writes, rows))
        if len(rows):
            self.commit(rows, border, [core.kept(new) for new in news])
        h = core.leave(value).flatten(0, 1)
        return h, torch.cat(xs, -1) if core.provisional else h

    def commit(self, rows: Tensor, border: int, news: list[Tensor]) -> None:
        """Not before all layers are done, for later ones may read the memory too."""
        for rolled, new in zip(self.memories, news, strict=True):
            rolled.commit(rows, border, new)
        for number, read in enumerate(self.reads):
            read.put(rows, border, news[min(number, len(news) - 1)])
