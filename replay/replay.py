"""First-in first-out replay over steps of several streams; a stream is one environment slot.

Steps are appended to a tail of up to 32 in RAM; full blocks go to disk. A sample is T consecutive
steps of one stream, at any position, joins between episodes included (marked by `is_first`).
Sampling is a pure function of a key, eviction is logical (a file goes when no kept state needs
it), and `state` and `restore` roll the buffer back to a checkpoint exactly.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from replay.blocks import BLOCK, Block, Fields, Layout, Segments

ONLINE_LIMIT = 1000


@dataclass
class Draw:
    """Where the windows of a batch lie, with copies of the unfinished tails they reach into."""

    positions: list[tuple[int, int]]  # (stream, first step)
    length: int
    tails: dict[tuple[int, int], Block] = field(default_factory=dict)


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
    ):
        """`fields`: name -> (dtype, shape) of a record; `capacity` in steps over all streams."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.layout = folder, Layout(fields)
        self.capacity, self.disk_bytes, self.online = capacity, disk_bytes, online
        self.streams = streams
        self.segments = [Segments(folder, stream, self.layout) for stream in range(streams)]
        self.tails = [self.layout.empty(BLOCK) for _ in range(streams)]
        self.count = [0] * streams  # steps ever added
        self.first = [0] * streams  # first block that may be sampled
        self.order: deque[int] = deque()  # streams of the live blocks, oldest first
        self.live_bytes = 0
        self.fresh: deque[tuple[int, int]] = deque()
        self.next_fresh = [0] * streams
        self.cache: OrderedDict[tuple[int, int], Block] = OrderedDict()
        self.ram_blocks = max(2, ram_bytes // (BLOCK * self.layout.step_bytes))
        self.lock = threading.Lock()

    def __len__(self) -> int:
        """Steps that can be sampled."""
        return sum(self.count) - BLOCK * sum(self.first)

    @property
    def added(self) -> int:
        return sum(self.count)

    def add(self, streams: np.ndarray, record: dict[str, np.ndarray]) -> None:
        """Append one step to each of `streams`; every array of `record` is (n, ...).

        Raises OSError when the disk is full; what was stored before stays good.
        """
        for row, stream in enumerate(np.asarray(streams).tolist()):
            tail = self.tails[stream]
            place = self.count[stream] % BLOCK
            plain = tail["plain"][place]
            for key in self.layout.plain.names:
                plain[key] = record[key][row]
            for key in self.layout.images:
                tail[key][place] = record[key][row]
            self.count[stream] += 1
            if place == BLOCK - 1:
                self.finish_block(stream)

    def finish_block(self, stream: int) -> None:
        segments = self.segments[stream]
        segments.append(self.layout.encode(self.tails[stream]))
        block = segments.end - 1
        self.live_bytes += segments.lengths[-1]
        self.order.append(stream)
        self.remember((stream, block), self.tails[stream])
        self.tails[stream] = self.layout.empty(BLOCK)
        while len(self) > self.capacity or (self.disk_bytes and self.live_bytes > self.disk_bytes):
            if len(self.order) <= 1:
                break
            oldest = self.order.popleft()
            gone = self.first[oldest]
            self.live_bytes -= self.segments[oldest].lengths[gone - self.segments[oldest].base]
            self.first[oldest] += 1

    def remember(self, key: tuple[int, int], block: Block) -> None:
        with self.lock:
            self.cache[key] = block
            self.cache.move_to_end(key)
            while len(self.cache) > self.ram_blocks:
                self.cache.popitem(last=False)

    def ready(self, length: int) -> bool:
        """Whether at least one window of `length` steps exists."""
        return any(n - BLOCK * f >= length for n, f in zip(self.count, self.first, strict=True))

    def draw(
        self, count: int, length: int, key: tuple[int, ...], online: bool | None = None
    ) -> Draw:
        """`count` windows of `length` steps, a function of `key` and of what is stored.

        Uniform over all starts of all streams, but for at most half of them, which are fresh:
        consecutive windows of every stream, each drawn once, as soon as it is complete. Raises
        ValueError when no stream is long enough.
        """
        starts = np.array(
            [
                max(0, n - BLOCK * f - length + 1)
                for n, f in zip(self.count, self.first, strict=True)
            ]
        )
        if not starts.sum():
            raise ValueError(f"no stream holds {length} consecutive steps yet")
        positions = []
        if self.online if online is None else online:
            positions = self.fresh_windows((count + 1) // 2, length)
        random = np.random.Generator(np.random.Philox(np.random.SeedSequence(list(key))))
        index = random.integers(starts.sum(), size=count - len(positions))
        edges = np.cumsum(starts)
        stream = np.searchsorted(edges, index, side="right")
        offset = index - (edges - starts)[stream]
        for s, start in zip(stream.tolist(), offset.tolist(), strict=True):
            positions.append((s, BLOCK * self.first[s] + start))
        return self.locate(positions, length)

    def fresh_windows(self, most: int, length: int) -> list[tuple[int, int]]:
        for stream, count in enumerate(self.count):
            while self.next_fresh[stream] + length <= count:
                self.fresh.append((stream, self.next_fresh[stream]))
                self.next_fresh[stream] += length
        while len(self.fresh) > ONLINE_LIMIT:
            self.fresh.popleft()
        out: list[tuple[int, int]] = []
        while self.fresh and len(out) < most:
            stream, start = self.fresh.popleft()
            if start >= BLOCK * self.first[stream]:
                out.append((stream, start))
        return out

    def locate(self, positions: list[tuple[int, int]], length: int) -> Draw:
        """A Draw of given positions; copies the tails, so that it can be read later."""
        draw = Draw(positions, length)
        for stream, start in positions:
            block = self.count[stream] // BLOCK
            if start + length > block * BLOCK and (stream, block) not in draw.tails:
                tail = self.tails[stream]
                draw.tails[stream, block] = {key: value.copy() for key, value in tail.items()}
        return draw

    def read(self, draw: Draw) -> dict[str, np.ndarray]:
        """The steps of a draw, every array (B, T, ...). Safe beside `add` in another thread."""
        length = draw.length
        out = self.layout.empty(len(draw.positions), length)
        for row, (stream, start) in enumerate(draw.positions):
            done = 0
            while done < length:
                block, skip = divmod(start + done, BLOCK)
                take = min(BLOCK - skip, length - done)
                source = draw.tails.get((stream, block)) or self.block(stream, block)
                for key, value in source.items():
                    out[key][row, done : done + take] = value[skip : skip + take]
                done += take
        plain = out.pop("plain")
        out.update({key: np.ascontiguousarray(plain[key]) for key in self.layout.plain.names})
        return out

    def block(self, stream: int, block: int) -> Block:
        with self.lock:
            cached = self.cache.get((stream, block))
            if cached is not None:
                self.cache.move_to_end((stream, block))
                return cached
        decoded = self.segments[stream].read(block)
        self.remember((stream, block), decoded)
        return decoded

    def stats(self) -> dict[str, float]:
        return {
            "steps": len(self),
            "added": self.added,
            "disk_gb": self.live_bytes / 1e9,
            "cache_gb": len(self.cache) * BLOCK * self.layout.step_bytes / 1e9,
        }

    def flush(self) -> None:
        """Make every full block durable; called before a checkpoint that refers to it."""
        for segments in self.segments:
            segments.flush()

    def state(self) -> dict[str, Any]:
        """What `restore` needs: counts, order of the blocks, fresh windows and the tails."""
        return {
            "count": list(self.count),
            "first": list(self.first),
            "order": np.array(self.order, np.int32),
            "fresh": [list(item) for item in self.fresh],
            "next_fresh": list(self.next_fresh),
            "tails": [
                {
                    key: np.frombuffer(value[: n % BLOCK].tobytes(), np.uint8)
                    for key, value in tail.items()
                }
                for n, tail in zip(self.count, self.tails, strict=True)
            ],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Back to `state`: what was appended later is deleted.

        Raises ValueError when the files are incomplete or hold other fields.
        """
        if len(state["count"]) != self.streams:
            raise ValueError(f"the state has {len(state['count'])} streams, not {self.streams}")
        self.count, self.first = list(state["count"]), list(state["first"])
        self.order = deque(np.asarray(state["order"]).tolist())
        self.fresh = deque((int(s), int(start)) for s, start in state["fresh"])
        self.next_fresh = list(state["next_fresh"])
        self.cache.clear()
        self.live_bytes = 0
        for stream, segments in enumerate(self.segments):
            # Windows that the loader had drawn may begin before the first live block.
            segments.restore(self.first[stream], self.count[stream] // BLOCK)
            live = segments.lengths[self.first[stream] - segments.base :]
            self.live_bytes += sum(live)
            tail = self.layout.empty(BLOCK)
            rows = self.count[stream] % BLOCK
            for key, raw in state["tails"][stream].items():
                kind = self.layout.plain if key == "plain" else np.dtype(np.uint8)
                value = np.frombuffer(np.asarray(raw).tobytes(), kind)
                tail[key][:rows] = value.reshape(tail[key][:rows].shape)
            self.tails[stream] = tail

    def collect(self, states: list[dict[str, Any]], drawn: list[list[Any]] | None = None) -> None:
        """Delete the files that no kept state refers to; `drawn` holds (stream, start) pairs."""
        for stream, segments in enumerate(self.segments):
            needed = [self.first[stream], *(state["first"][stream] for state in states)]
            needed += [start // BLOCK for s, start in drawn or [] if s == stream]
            segments.drop_before(min(needed))

    def close(self) -> None:
        for segments in self.segments:
            segments.close()
