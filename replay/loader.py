"""Batches ahead of time, decoded by threads; indices are drawn at a fixed point of the loop.

So what is trained on does not depend on how fast the threads are, and a resumed run, which reads
the positions that were waiting once more, gets the same batches bit for bit. Where steps are added
by another thread there is no fixed point, and the threads that decode draw as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from replay.replay import Draw, Replay
from replay.rows import Rows


class Loader:
    """`next(update)` gives the batch of that update and begins that of `update + depth`."""

    def __init__(
        self,
        replay: Replay,
        batch: int,
        length: int,
        key: tuple[int, int],
        device: torch.device,
        threads: int = 2,
        depth: int = 1,
        exact: bool = True,
        plan: Callable[[np.ndarray, np.ndarray], Any] | None = None,
        rows: Rows | None = None,
    ):
        """`key` (seed, rank) and the number of the update decide what is drawn.

        `plan(is_first, age)`, both (B, T), is laid beside a batch as its `plan`, on no device.

        exact: draw within `next`, from what is stored then; otherwise a thread draws, and `next`
        only waits for a batch that is not ready. rows: what draws, if not the replay itself.
        """
        self.replay, self.batch, self.length, self.key = replay, batch, length, key
        self.device, self.depth, self.exact, self.plan = device, depth, exact, plan
        self.rows = rows
        self.drawn: list[tuple[int, int]] = []  # (stream, start) of the batch that `next` gave
        # Rows that follow their streams are drawn in order: by one thread.
        self.threads = ThreadPoolExecutor(1 if rows and not exact else threads, "replay")
        self.waiting: deque[tuple[int, Future[tuple[Draw, dict[str, Any]]]]] = deque()

    def next(self, update: int) -> dict[str, Any]:
        """The batch (B, T, ...) of `update` on the device. Raises what decoding raised."""
        while len(self.waiting) <= self.depth:
            self.begin(update + len(self.waiting))
        number, future = self.waiting.popleft()
        assert number == update, f"batch {number} is next, not {update}"
        draw, batch = future.result()
        self.drawn = draw.positions
        return {
            key: value.to(self.device, non_blocking=True) if isinstance(value, Tensor) else value
            for key, value in batch.items()
        }

    def begin(self, update: int) -> None:
        key = (*self.key, 0, update)
        if self.exact:
            future = self.threads.submit(self.read, self.draw(key))
        else:
            future = self.threads.submit(lambda: self.read(self.draw(key)))
        self.waiting.append((update, future))

    def draw(self, key: tuple[int, ...]) -> Draw:
        return (self.rows or self.replay).draw(self.batch, self.length, key)

    def read(self, draw: Draw) -> tuple[Draw, dict[str, Any]]:
        arrays = self.replay.read(draw)
        batch: dict[str, Any] = {key: torch.from_numpy(value) for key, value in arrays.items()}
        if self.device.type == "cuda":
            batch = {key: value.pin_memory() for key, value in batch.items()}
        if self.plan:
            batch["plan"] = self.plan(arrays["is_first"], arrays["age"])
        return draw, batch

    def state(self) -> dict[str, Any]:
        """Draws that are waiting. Their decoding has ended, so `Replay.collect` may follow.

        Raises what drawing or decoding raised.
        """
        drawn = [(update, future.result()[0]) for update, future in self.waiting]
        return {
            "waiting": [
                [update, [list(pair) for pair in draw.positions]] for update, draw in drawn
            ],
            "rows": [list(pair) for pair in self.rows.next] if self.rows else [],
        }

    @staticmethod
    def positions(state: dict[str, Any]) -> list[tuple[int, int]]:
        """(stream, start) of every window that a state waits for."""
        return [(stream, start) for _, pairs in state["waiting"] for stream, start in pairs]

    def restore(self, state: dict[str, Any]) -> None:
        """Read again what was waiting; after the `restore` of the replay."""
        self.waiting.clear()
        if self.rows:
            self.rows.next = [(stream, start) for stream, start in state["rows"]]
        for update, pairs in state["waiting"]:
            positions = [(stream, start) for stream, start in pairs]
            draw = self.replay.locate(positions, self.length, (*self.key, 0, update))
            self.waiting.append((update, self.threads.submit(self.read, draw)))

    def close(self) -> None:
        self.threads.shutdown(cancel_futures=True)
