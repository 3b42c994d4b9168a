"""Episodes of an evaluation as videos, of the first image that the agent sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from agent.logger import encode_gif


class Film:
    """Frames of the first episodes of each slot: `wanted` says of how many."""

    def __init__(self, wanted: list[int]):
        self.wanted = wanted
        self.episodes: list[list[list[np.ndarray]]] = [[] for _ in wanted]
        self.over = [0] * len(wanted)

    def __call__(self, ids: np.ndarray, obs: dict[str, np.ndarray], *_: Any) -> None:
        """As `watch` of `agent.evaluate.play`. ValueError where there is no image."""
        images = [key for key, values in obs.items() if values.ndim == 4]
        if not images:
            raise ValueError("--video: the observations of this task hold no image")
        for row, slot in enumerate(ids.tolist()):
            if self.over[slot] == self.wanted[slot]:
                continue
            if obs["is_first"][row]:
                self.episodes[slot].append([])
            self.episodes[slot][-1].append(obs[images[0]][row])
            self.over[slot] += int(obs["is_last"][row])

    def write(self, folder: Path, name: str, results: list[dict[str, Any]]) -> None:
        """One GIF an episode; each of the `results` of `play` that was filmed gets its `video`."""
        folder.mkdir(exist_ok=True)
        for old in folder.glob(f"{name}-*.gif"):
            old.unlink()
        number = 0
        for slot, episodes in enumerate(self.episodes):
            played = [result for result in results if result["slot"] == slot]
            for frames, result in zip(episodes, played, strict=False):
                path = folder / f"{name}-{number}.gif"
                path.write_bytes(encode_gif(np.stack(frames)))
                result["video"] = str(path)
                number += 1
