"""Batches ahead of time: indices are drawn at a fixed point of the loop, threads only decode."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from replay.replay import Draw, Replay


class Loader:
    """`next(update)` gives the batch of that update, and draws that of the one after it."""

    def __init__(
        self,
        replay: Replay,
        batch: int,
        length: int,
        key: tuple[int, int],
        device: torch.device,
        threads: int = 2,
    ):
        """`key` (seed, rank) and the number of the update decide what is drawn."""
        self.replay, self.batch, self.length, self.key = replay, batch, length, key
        self.device = device
        self.threads = ThreadPoolExecutor(threads, "replay")
        self.waiting: deque[tuple[int, Draw, Future]] = deque()

    def next(self, update: int) -> dict[str, Tensor]:
        """The batch (B, T, ...) of `update` on the device. Raises what decoding raised."""
        if not self.waiting:
            self.begin(update)
        number, _, future = self.waiting.popleft()
        assert number == update, f"batch {number} is next, not {update}"
        self.begin(update + 1)
        batch = {key: torch.from_numpy(value) for key, value in future.result().items()}
        if self.device.type == "cuda":
            return {k: v.pin_memory().to(self.device, non_blocking=True) for k, v in batch.items()}
        return batch

    def begin(self, update: int) -> None:
        self.submit(update, self.replay.draw(self.batch, self.length, (*self.key, 0, update)))

    def submit(self, update: int, draw: Draw) -> None:
        future: Future[dict[str, np.ndarray]] = self.threads.submit(self.replay.read, draw)
        self.waiting.append((update, draw, future))

    def state(self) -> dict[str, Any]:
        """Draws that are waiting, after their decoding has finished."""
        for _, _, future in self.waiting:
            future.exception()
        return {
            "waiting": [
                [update, [list(pair) for pair in draw.positions]]
                for update, draw, _ in self.waiting
            ]
        }

    @staticmethod
    def positions(state: dict[str, Any]) -> list[list[int]]:
        """(stream, start) of every window that a state waits for."""
        return [pair for _, pairs in state["waiting"] for pair in pairs]

    def restore(self, state: dict[str, Any]) -> None:
        self.waiting.clear()
        for update, pairs in state["waiting"]:
            positions = [(stream, start) for stream, start in pairs]
            self.submit(update, self.replay.locate(positions, self.length))

    def close(self) -> None:
        self.threads.shutdown(cancel_futures=True)
