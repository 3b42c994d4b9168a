"""Batches ahead of time: indices are drawn at a fixed point of the loop, threads only decode.

So what is trained on does not depend on how fast the threads are, and a resumed run, which reads
the positions that were waiting once more, gets the same batches bit for bit.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from replay.replay import Draw, Replay


class Loader:
    """`next(update)` gives the batch of that update and draws that of `update + depth`."""

    def __init__(
        self,
        replay: Replay,
        batch: int,
        length: int,
        key: tuple[int, int],
        device: torch.device,
        threads: int = 2,
        depth: int = 1,
    ):
        """`key` (seed, rank) and the number of the update decide what is drawn."""
        self.replay, self.batch, self.length, self.key = replay, batch, length, key
        self.device, self.depth = device, depth
        self.threads = ThreadPoolExecutor(threads, "replay")
        self.waiting: deque[tuple[int, Draw, Future[dict[str, Tensor]]]] = deque()

    def next(self, update: int) -> dict[str, Tensor]:
        """The batch (B, T, ...) of `update` on the device. Raises what decoding raised."""
        while len(self.waiting) <= self.depth:
            self.begin(update + len(self.waiting))
        number, _, future = self.waiting.popleft()
        assert number == update, f"batch {number} is next, not {update}"
        batch = future.result()
        return {key: value.to(self.device, non_blocking=True) for key, value in batch.items()}

    def begin(self, update: int) -> None:
        self.submit(update, self.replay.draw(self.batch, self.length, (*self.key, 0, update)))

    def submit(self, update: int, draw: Draw) -> None:
        self.waiting.append((update, draw, self.threads.submit(self.read, draw)))

    def read(self, draw: Draw) -> dict[str, Tensor]:
        batch = {key: torch.from_numpy(value) for key, value in self.replay.read(draw).items()}
        if self.device.type == "cuda":
            return {key: value.pin_memory() for key, value in batch.items()}
        return batch

    def state(self) -> dict[str, Any]:
        """Draws that are waiting. Their decoding has ended, so `Replay.collect` may follow."""
        for _, _, future in self.waiting:
            future.exception()
        return {
            "waiting": [
                [update, [list(pair) for pair in draw.positions]]
                for update, draw, _ in self.waiting
            ]
        }

    @staticmethod
    def positions(state: dict[str, Any]) -> list[tuple[int, int]]:
        """(stream, start) of every window that a state waits for."""
        return [(stream, start) for _, pairs in state["waiting"] for stream, start in pairs]

    def restore(self, state: dict[str, Any]) -> None:
        """Read again what was waiting; after the `restore` of the replay."""
        self.waiting.clear()
        for update, pairs in state["waiting"]:
            positions = [(stream, start) for stream, start in pairs]
            self.submit(update, self.replay.locate(positions, self.length))

    def close(self) -> None:
        self.threads.shutdown(cancel_futures=True)
