"""First-in first-out replay over steps of several streams; a stream is one environment slot.

Steps are appended to a tail of up to 32 in RAM; full blocks go to disk. A sample is T consecutive
steps of one stream, at any position, joins between episodes included (marked by `is_first`).
Sampling is a pure function of a key and of the contents, eviction is logical (a file goes when no
kept state needs it), and `state` and `restore` roll the buffer back to a checkpoint exactly.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from replay.blocks import BLOCK, Block, Damaged, Fields, Layout, Segments
from replay.cache import Cache
from replay.source import Source
from replay.states import States

ONLINE_LIMIT = 1000  # fresh windows that wait at most; the oldest are given up
REDRAWS = 100  # of one row


@dataclass
class Draw:
    """Where the windows of a batch lie, with the unfinished tails they reach into."""

    positions: list[tuple[int, int]]  # (stream, first step)
    length: int
    tails: dict[tuple[int, int], Block] = field(default_factory=dict)
    # What a row with a damaged block is drawn again by, and from; without them it is an error.
    key: tuple[int, ...] = ()
    spans: list[tuple[int, int]] = field(default_factory=list)


class Replay:
    def __init__(
        self,
        folder: Path,
        fields: Fields,
        streams: int,
        capacity: int,
        ram_bytes: int,
        disk_bytes: int | None = None,
        online: bool = True,
        source: Path | None = None,
        state_bytes: int = 0,
        state_every: int = 0,
        shard: int = 0,
        shards: int = 1,
        resumed: bool = False,
    ):
        """What is in `folder` counts only after `restore`. Processes may share it as `shards` of
        equally many streams, `shard` the number of this one's.

        fields: name -> (dtype, shape) of one step; capacity: steps over all streams; ram_bytes:
        for decoded blocks; disk_bytes: for the blocks that can be sampled; online: see `draw`;
        source: another replay, see `replay/source.py`; its streams are numbered behind one's own,
        and neither capacity nor disk_bytes counts them. Raises ValueError when it cannot be used.
        state_bytes, state_every: of the states that windows start from, see `replay/states.py`; 0:
        windows start anywhere, without one. resumed: `restore` follows, so nothing is looked for.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.layout = folder, Layout(fields)
        self.capacity, self.disk_bytes, self.online = capacity, disk_bytes, online
        self.streams, self.shards = streams, shards
        numbers = range(shard * streams, (shard + 1) * streams)
        self.segments = [Segments(folder, number, self.layout) for number in numbers]
        self.source = Source(source, self.layout) if source else None
        self.states: States | None = None
        if state_bytes:
            more = self.source.segments if self.source else []
            path, number = folder / "states", streams + len(more)
            self.states = States(path, state_bytes, state_every, number)
            for stream, segments in enumerate([] if resumed else more, streams):
                self.states.begin_all(stream, segments)
        self.tails = [self.layout.empty_block() for _ in range(streams)]
        self.count = [0] * streams  # steps ever added
        self.first = [0] * streams  # first block that may be sampled
        self.order: deque[int] = deque()  # streams of the live blocks, oldest first
        self.live_bytes = 0
        self.fresh: deque[tuple[int, int]] = deque()
        self.next_fresh = [0] * streams
        # Guards counts, tails, order and fresh windows: one thread adds while others draw.
        self.cursor = threading.RLock()
        self.cache = Cache(self.layout, ram_bytes)

    def __len__(self) -> int:
        """Steps that can be sampled, those of the source included."""
        counts, firsts = self.ranges()
        return sum(counts) - BLOCK * sum(firsts)

    def ranges(self) -> tuple[list[int], list[int]]:
        """Of every stream, those of the source behind: where its steps end; its first block."""
        more = self.source.segments if self.source else []
        return (
            [*self.count, *(BLOCK * segments.end for segments in more)],
            [*self.first, *(segments.base for segments in more)],
        )

    def segments_of(self, stream: int) -> Segments:
        if stream < self.streams:
            return self.segments[stream]
        assert self.source is not None
        return self.source.segments[stream - self.streams]

    @property
    def added(self) -> int:
        """Steps ever added."""
        return sum(self.count)

    @property
    def bytes(self) -> int:
        """Bytes of all files, with those that only a kept state still needs."""
        return sum(segments.bytes for segments in self.segments)

    @property
    def index_bytes(self) -> int:
        """RAM of what finds a block on disk, and of the order of eviction."""
        segments = map(self.segments_of, range(len(self.ranges()[0])))
        arrays = [array for s in segments for array in (s.offsets, s.lengths)]
        states = self.states.index_bytes if self.states else 0
        return sum(map(sys.getsizeof, arrays)) + sys.getsizeof(self.order) + states

    def add(
        self,
        streams: np.ndarray,
        record: dict[str, np.ndarray],
        states: dict[int, tuple[int, bytes]] | None = None,
    ) -> None:
        """Append one step to each of `streams`, (n,) ints; every array of `record` is (n, ...).

        states: row -> (update, state ahead of that step), where a state is to be kept. Other
        threads may draw and read meanwhile. Raises OSError when the disk is full. The step that did
        not fit and the rows behind it are then not part of the replay; everything before stays
        good.
        """
        ids = np.asarray(streams).tolist()
        rows = np.empty(len(ids), self.layout.plain)
        for key, (_, shape) in self.layout.fields.items():
            assert np.shape(record[key]) == (len(ids), *shape), (key, np.shape(record[key]), shape)
            if key not in self.layout.images:
                rows[key] = record[key]
        with self.cursor:
            for row, stream in enumerate(ids):
                tail, place = self.tails[stream], self.count[stream] % BLOCK
                tail["plain"][place] = rows[row]
                for key in self.layout.images:
                    tail[key][place] = record[key][row]
                if self.states and (age := int(record["age"][row])) % self.states.every == 0:
                    state = states.get(row) if states else None
                    self.states.begin(stream, self.count[stream], age, state)
                if place == BLOCK - 1:
                    self.finish_block(stream)
                self.count[stream] += 1
            self.evict()

    def finish_block(self, stream: int) -> None:
        segments, tail = self.segments[stream], self.tails[stream]
        segments.append(self.layout.encode(tail))
        self.live_bytes += segments.lengths[-1]
        self.order.append(stream)
        self.cache.put((stream, segments.end - 1), tail)
        self.tails[stream] = self.layout.empty_block()

    def evict(self) -> None:
        """Take the blocks that were finished first out of the range that can be sampled."""
        while self.order and (
            self.added - BLOCK * sum(self.first) > self.capacity
            or (self.disk_bytes and self.sampled_bytes > self.disk_bytes)
        ):
            stream = self.order.popleft()
            segments = self.segments[stream]
            self.live_bytes -= segments.lengths[self.first[stream] - segments.base]
            self.first[stream] += 1
            if self.states:
                self.states.drop_before(stream, BLOCK * self.first[stream])

    @property
    def sampled_bytes(self) -> int:
        """Bytes of the blocks and states that can be sampled."""
        return self.live_bytes + (self.states.bytes if self.states else 0)

    @property
    def longest(self) -> int:
        """Steps of the stream that has most."""
        return max(n - BLOCK * first for n, first in zip(*self.ranges(), strict=True))

    def ready(self, length: int) -> bool:
        """Whether at least one window of `length` steps exists."""
        with self.cursor:
            return any(low < high for low, high in self.starts(length))

    def starts(self, length: int) -> list[tuple[int, int]]:
        """Of every stream the steps from which windows start, from one up to another. Where windows
        start at states alone, each stands for the last state that is not behind it."""
        out = []
        for stream, (n, block) in enumerate(zip(*self.ranges(), strict=True)):
            first: int | None = BLOCK * block
            if self.states:
                first = self.states.following(stream, BLOCK * block)
            first = n if first is None else first
            out.append((first, max(first, n - length + 1)))
        return out

    def holds(self, stream: int, start: int, length: int) -> bool:
        """Whether all steps of a window can be sampled."""
        counts, firsts = self.ranges()
        return BLOCK * firsts[stream] <= start <= counts[stream] - length

    def draw(
        self, count: int, length: int, key: tuple[int, ...], online: bool | None = None
    ) -> Draw:
        """`count` windows of `length` steps, a function of `key` and of what is stored.

        `key` is (seed, ..., update). Windows start at a step that is uniform over all streams, or
        at the last of the `States` that is not behind it, where there are any; but for the first
        rows, at most half of them, which are fresh: the consecutive windows of each stream, each
        drawn at most once, the oldest first (the online queue of the public code of DreamerV3,
        which does not bound its share). `online` overrides the constructor's. Raises ValueError
        when no stream is long enough.
        """
        with self.cursor:
            return self.locate(self.choose(count, length, key, online), length, key)

    def choose(
        self, count: int, length: int, key: tuple[int, ...], online: bool | None
    ) -> list[tuple[int, int]]:
        spans = self.starts(length)
        if not any(low < high for low, high in spans):
            raise ValueError(
                f"no stream holds {length} consecutive steps (the longest holds {self.longest}); "
                "add more steps or draw shorter windows"
            )
        positions = []
        if self.online if online is None else online:
            positions = self.fresh_windows(count // 2, length)
        return positions + self.uniform(count - len(positions), spans, key)

    def uniform(
        self, count: int, spans: list[tuple[int, int]], key: tuple[int, ...]
    ) -> list[tuple[int, int]]:
        """Windows that start within `spans`, which `starts` gave."""
        starts = np.array([high - low for low, high in spans])
        # Each shard stands for all of them beside a source, which every one has whole.
        weight = np.where(np.arange(len(starts)) < self.streams, self.shards, 1)
        edges = np.cumsum(weight * starts)
        # The number of keys is one of them, since a seed sequence does not see zeros at its end.
        random = np.random.Generator(np.random.Philox(np.random.SeedSequence([len(key), *key])))
        index = random.integers(edges[-1], size=count)
        stream = np.searchsorted(edges, index, side="right")
        offset = (index - (edges - weight * starts)[stream]) // weight[stream]
        out = []
        for s, start in zip(stream.tolist(), offset.tolist(), strict=True):
            step = spans[s][0] + start
            state = self.states.upto(s, step) if self.states else step
            out.append((s, step if state is None else state))
        return out

    def fresh_windows(self, most: int, length: int) -> list[tuple[int, int]]:
        for stream, count in enumerate(self.count):
            while (start := self.fresh_start(stream)) + length <= count:
                self.fresh.append((stream, start))
                self.next_fresh[stream] = start + length
        while len(self.fresh) > ONLINE_LIMIT:
            self.fresh.popleft()
        out: list[tuple[int, int]] = []
        while self.fresh and len(out) < most:
            stream, start = self.fresh.popleft()
            if BLOCK * self.first[stream] <= start <= self.count[stream] - length:
                out.append((stream, start))
        return out

    def fresh_start(self, stream: int) -> int:
        """Where the next fresh window begins: behind the last, or at the last start that leaves no
        gap, where windows start at states."""
        following = self.next_fresh[stream]
        if not self.states or following >= self.count[stream]:
            return following
        start = self.states.upto(stream, following)
        return following if start is None else start

    def locate(
        self, positions: list[tuple[int, int]], length: int, key: tuple[int, ...] = ()
    ) -> Draw:
        """A Draw of given positions; holds on to the tails, so that it can be read later. With a
        `key` its rows whose blocks are damaged are drawn again, from what is stored now."""
        draw = Draw(positions, length, key=key)
        with self.cursor:
            draw.spans = self.starts(length) if key else []
            for stream, start in positions:
                if stream >= self.streams:
                    continue  # the source has no tails
                block, rows = divmod(self.count[stream], BLOCK)
                if start + length > block * BLOCK and (stream, block) not in draw.tails:
                    tail = self.tails[stream].items()
                    # No copy: rows once written never change, every block gets its own arrays.
                    draw.tails[stream, block] = {key: value[:rows] for key, value in tail}
        return draw

    def read(self, draw: Draw) -> dict[str, np.ndarray]:
        """The steps of a draw, every array (B, T, ...). Safe beside `add` in another thread.

        A row with a damaged block is another one afterwards, in `draw.positions` too: it follows
        from the key of the draw, what was stored then, and the damage. Raises Damaged for a draw
        that `locate` made without a key, and ValueError when a block is gone, or too many are
        damaged.
        """
        out = self.layout.empty(len(draw.positions), draw.length)
        for row in range(len(draw.positions)):
            for again in itertools.count(1):
                try:
                    self.read_row(draw, row, out)
                    break
                except Damaged:
                    if not draw.key or again > REDRAWS:
                        raise
                    key = (*draw.key, row, again)
                    other = self.uniform(1, draw.spans, key)
                    draw.positions[row : row + 1] = other
                    draw.tails.update(self.locate(other, draw.length).tails)
        plain = out.pop("plain")
        out.update({key: np.ascontiguousarray(plain[key]) for key in self.layout.plain.names})
        return out

    def read_row(self, draw: Draw, row: int, out: Block) -> None:
        (stream, start), length, done = draw.positions[row], draw.length, 0
        while done < length:
            block, skip = divmod(start + done, BLOCK)
            take = min(BLOCK - skip, length - done)
            source = draw.tails.get((stream, block)) or self.block(stream, block)
            for key, value in source.items():
                out[key][row, done : done + take] = value[skip : skip + take]
            done += take

    def block(self, stream: int, block: int) -> Block:
        return self.cache.get((stream, block), self.segments_of(stream))

    def stats(self) -> dict[str, float]:
        with self.cursor:
            return {
                "steps": len(self),
                "added": self.added,
                "disk_gb": self.bytes / 1e9,
                "damaged": len(self.cache.damaged),
                "cache_gb": len(self.cache) * self.cache.block_bytes / 1e9,
                **(self.states.stats() if self.states else {}),
            }

    def flush(self) -> None:
        """Make every full block durable; called before a checkpoint that refers to it."""
        for segments in self.segments:
            segments.flush()
        if self.states:
            self.states.flush()
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def state(self) -> dict[str, Any]:
        """What `restore` needs: counts, order of the blocks, fresh windows and the tails."""
        with self.cursor:
            return {
                "fields": self.layout.describe(),
                "count": list(self.count),
                "first": list(self.first),
                "order": np.array(self.order, np.int32),
                "fresh": [list(item) for item in self.fresh],
                "next_fresh": list(self.next_fresh),
                "source": self.source.state() if self.source else [],
                "states": self.states.state() if self.states else [],
                "tails": [
                    {
                        key: np.frombuffer(value[: n % BLOCK].tobytes(), np.uint8)
                        for key, value in tail.items()
                    }
                    for n, tail in zip(self.count, self.tails, strict=True)
                ],
            }

    def restore(self, state: dict[str, Any]) -> None:
        """Back to `state`: what was appended later is deleted. No read may be under way.

        Raises ValueError when the files are incomplete or hold other fields.
        """
        if len(state["count"]) != self.streams:
            raise ValueError(
                f"{self.folder} was recorded with {len(state['count'])} environments, this run has "
                f"{self.streams}; use the same number or start in a new folder"
            )
        self.layout.check(state["fields"], self.folder)
        if self.source:
            self.source.restore(state["source"])
        self.count, self.first = list(state["count"]), list(state["first"])
        self.order = deque(np.asarray(state["order"]).tolist())
        self.fresh = deque((int(s), int(start)) for s, start in state["fresh"])
        self.next_fresh = list(state["next_fresh"])
        if self.states:
            self.states.restore(state["states"])
        self.cache.clear()
        self.live_bytes = 0
        for stream, segments in enumerate(self.segments):
            blocks, rows = divmod(self.count[stream], BLOCK)
            segments.restore(self.first[stream], blocks)
            self.live_bytes += sum(segments.lengths[self.first[stream] - segments.base :])
            tail = self.layout.empty_block()
            for key, raw in state["tails"][stream].items():
                value = np.frombuffer(np.asarray(raw).tobytes(), tail[key].dtype)
                tail[key][:rows] = value.reshape(rows, *tail[key].shape[1:])
            self.tails[stream] = tail

    def collect(
        self, states: list[dict[str, Any]], drawn: list[tuple[int, int]] | None = None
    ) -> None:
        """Delete the files that nothing refers to: neither this replay, nor the kept `states`,
        nor the windows `drawn`, (stream, start) each, that are still to be read."""
        needed = list(self.first)
        for state in states:
            needed = [min(pair) for pair in zip(needed, state["first"], strict=True)]
        for stream, start in drawn or []:
            if stream < self.streams:
                needed[stream] = min(needed[stream], start // BLOCK)
        with self.cache.lock:
            for segments, block in zip(self.segments, needed, strict=True):
                segments.drop_before(block)
        if self.states:
            self.states.collect([state["states"] for state in states])

    def close(self) -> None:
        for segments in self.segments:
            segments.close()
        if self.states:
            self.states.close()
        if self.source:
            self.source.close()
