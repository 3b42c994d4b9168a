"""Imagination of the core `elmur`: what the starts of a batch share, and what each adds.

A start reads the slots of its segment where the scan left them, laid out by the phase of its first
imagined step: no start copies a memory. When an imagined step completes a segment, the start writes
one slot of its own, which hides the shared slot it replaces; each further border adds one more. As
all starts of a column have one phase, each step completes the segments of exactly one column.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from worldmodels.attention import Pair
from worldmodels.core import State
from worldmodels.segments import Grid
from worldmodels.slots import Read, Slots

if TYPE_CHECKING:
    from worldmodels.elmur import Elmur


class Columns:
    """Vectors (B, G, P, D) of the starts of a column, which get them at different steps."""

    def __init__(self, count: int):
        self.parts: list[Tensor | None] = [None] * count

    def stack(self) -> Tensor:
        """(B, G, L, P, D), zeros for columns that have none yet."""
        known = next(part for part in self.parts if part is not None)
        empty = torch.zeros_like(known)
        return torch.stack([empty if part is None else part for part in self.parts], 2)


class RolledSlots:
    """One memory: the shared slots (B, G, M, D), and those that the starts have written since."""

    def __init__(self, slots: Slots, memory: Tensor, writes: Tensor, tokens: Pair, seen: Tensor):
        """writes (B, G); tokens: keys and values (B, G, L, D) of each segment; seen (B, G, L)."""
        self.slots, self.memory, self.writes = slots, memory, writes
        self.shared_tokens, self.shared_seen = tokens, seen
        self.tokens: list[Pair] = []  # (B, G, L, D) of each imagined step
        self.written: list[Columns] = []  # by the borders that a start has crossed before

    def old(self, column: int, crossed: int) -> Tensor:
        """What the slots in turn hold (B, G, E, D) after `crossed` borders."""
        life = 1 if self.slots.every else self.slots.slots
        if crossed < life:
            return self.slots.turn(self.memory, self.writes + crossed)
        return self.written[crossed - life].parts[column]

    def segment(self, column: int, phase: int) -> Pair:
        """Keys and values (B, G, L, D) of the segment's tokens up to `phase`, then zeros."""
        own = self.tokens[-(phase + 1) :]
        shared = phase + 1 - len(own)
        after = self.shared_tokens[0].shape[2] - phase - 1
        return tuple(
            F.pad(
                torch.cat([old[:, :, :shared], *(new[:, :, column, None] for new in news)], 2),
                (0, 0, 0, after),
            )
            for old, news in zip(self.shared_tokens, zip(*own, strict=True), strict=True)
        )

    def seen(self, column: int, phase: int) -> Tensor:
        """Which of them (B, G, 1, L) there are."""
        place = torch.arange(self.shared_seen.shape[-1], device=self.writes.device)
        shared = phase + 1 - len(self.tokens)
        return ((place <= phase) & ((place >= shared) | self.shared_seen))[:, :, None]

    def candidates(self, columns: list[int]) -> Tensor:
        """New contents (B, G, columns, E, D) if segments ended at the step imagined last."""
        length = self.shared_seen.shape[-1]
        at = [divmod(column + len(self.tokens) - 1, length) for column in columns]
        old, writes, keys, values, seen = [], [], [], [], []
        for column, (crossed, phase) in zip(columns, at, strict=True):
            key, val = self.segment(column, phase)
            keys.append(key)
            values.append(val)
            old.append(self.old(column, crossed))
            writes.append(self.writes + crossed)
            seen.append(self.seen(column, phase))
        old, writes, keys, values, seen = (
            torch.stack(parts, 2) for parts in (old, writes, keys, values, seen)
        )
        return self.slots.candidates(old, writes, (keys, values), seen)[..., 0, :, :]

    def commit(self, column: int, new: Tensor) -> None:
        """`new` (B, G, E, D) becomes the newest slot of the starts of `column`."""
        crossed = (column + len(self.tokens) - 1) // self.shared_seen.shape[-1]
        if crossed == len(self.written):
            self.written.append(Columns(self.shared_seen.shape[-1]))
        self.written[crossed].parts[column] = new


class RolledRead:
    """Keys and values of a layer for the slots of a `RolledSlots`."""

    def __init__(self, read: Read, rolled: RolledSlots):
        self.read, self.rolled = read, rolled
        self.shared = read.keys(rolled.memory)
        self.own: list[tuple[Columns, Columns]] = []

    def pairs(self) -> Pair | None:
        """Those that starts have written, (B, G, L, P, D)."""
        written = self.rolled.written
        if len(self.own) < len(written):
            length = len(written[-1].parts)
            self.own.append((Columns(length), Columns(length)))
        for columns, pair in zip(written, self.own, strict=True):
            for column, part in enumerate(columns.parts):
                if part is not None and pair[0].parts[column] is None:
                    for kept, new in zip(pair, self.read.keys(part), strict=True):
                        kept.parts[column] = new
        if not written:
            return None
        return tuple(
            torch.cat([kept.stack() for kept in part], 3) for part in zip(*self.own, strict=True)
        )


class ElmurRoll:
    """Continuations of the last K steps of each row: `step(u)` takes (B*K, U)."""

    def __init__(self, core: Elmur, context: State, last: int):
        context = {key: value.detach() for key, value in context.items()}
        self.core, self.last, self.taken = core, last, 0
        self.known, self.age = (context[name][:, -last:] for name in ("known", "age"))
        group = context["group"][:, -last:]
        first = group[:, :1]
        self.grid = Grid(group - first, (self.age + 1) % core.segment, core.segment)
        row = torch.arange(len(group), device=group.device)[:, None]
        take = first + torch.arange(self.grid.pieces, device=group.device)
        take = take.clamp(max=context["writes"].shape[1] - 1)
        self.writes = context["writes"][row, take]
        seen = context["seen"][row, take]
        self.memories = []
        for number, slots in enumerate(core.memories):
            memory, *tokens = (
                context[name][:, number][row, take]
                for name in ("memory", "written_key", "written_value")
            )
            self.memories.append(RolledSlots(slots, memory, self.writes, tokens, seen))
        keep = core.window - 1 + last
        keys, values = (context[name][:, :, -keep:] for name in ("key", "value"))
        self.shared = list(zip(keys.unbind(1), values.unbind(1), strict=True))
        self.own: list[list[Pair]] = [[] for _ in core.layers]
        self.reads = [
            RolledRead(layer.read, self.memories[min(n, len(self.memories) - 1)])
            for n, layer in enumerate(core.layers)
        ]

    def visible(self, crossed: Tensor) -> tuple[Tensor, Tensor]:
        """Segments since slots were written, and whether they are there, (B, G, L, M + P), for
        starts that have `crossed` (L,) borders."""
        slots = self.memories[0].slots
        borders = crossed[:, None]
        since = slots.since(self.writes)[:, :, None]
        since = torch.where(since < slots.slots, since + borders, slots.slots)
        seen = slots.until(self.writes)[:, :, None] >= borders
        own = len(self.memories[0].written)
        life, each = (1, slots.slots) if slots.every else (slots.slots, 1)
        newer = borders - 1 - torch.arange(own, device=crossed.device).repeat_interleave(each)
        there = (newer >= 0) & (newer < life)
        lead = since.shape[:2]
        since = torch.cat([since, newer.clamp(min=0).expand(*lead, -1, -1)], -1)
        return since, torch.cat([seen, there.expand(*lead, -1, -1)], -1)

    def step(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """h and x (B*K, ...) of one more step."""
        core, length = self.core, self.core.segment
        at = torch.arange(length, device=u.device) + self.taken
        since, seen = self.visible(at // length)
        self.taken += 1
        reach = core.reach(self.known + self.taken, self.age + self.taken)
        full = -self.taken % length  # the column whose segments this step completes
        columns = list(range(length)) if core.provisional else [full]
        value, news = core.inputs(u).unflatten(0, (-1, self.last)), []
        for number, (layer, shared, own, read) in enumerate(
            zip(core.layers, self.shared, self.own, self.reads, strict=True)
        ):
            value = value + layer.attention.imagine(layer.norm(value), shared, own, reach)
            bias = layer.read.by_time(at % length, since)
            recalled = layer.read(
                self.grid.lay(value), read.shared, bias, seen[:, :, :, None], read.pairs()
            )
            value = value + self.grid.pick(recalled)
            value = value + layer.feed(value)
            if number < len(self.memories):
                rolled = self.memories[number]
                tokens = rolled.slots.keys(rolled.slots.token_norm(value))
                rolled.tokens.append(tuple(self.grid.lay(part) for part in tokens))
                news.append(rolled.candidates(columns))
        # Only now, for later layers may read the memory too.
        for rolled, new in zip(self.memories, news, strict=True):
            rolled.commit(full, core.kept(new[:, :, columns.index(full)]))
        h = core.leave(value)
        x = h
        if core.provisional:
            x = torch.cat([self.grid.pick(new[:, :, :, 0]) for new in news], -1)
        return h.flatten(0, 1), x.flatten(0, 1)
