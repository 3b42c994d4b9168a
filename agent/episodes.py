"""A table of training episodes with running totals: bsuite's own file of an experiment, by its name
and columns (Osband et al. 2020), so that its analysis reads a run's folder `bsuite`.

Its own recorder lives inside one environment and refuses a folder that has a file already. Here the
episodes of all environments are added up in the order in which they end, and a resumed run goes on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agent.logger import Lines

TAIL = 4096  # bytes that the last row lies in
COLUMNS = ("steps", "episode", "total_return", "episode_len", "episode_return")


def bsuite_file(folder: Path, task: str) -> Path | None:
    """Where a task's table belongs; None for a task of another suite."""
    if not task.startswith("bsuite_"):
        return None
    experiment, _, number = task.removeprefix("bsuite_").rpartition("_")
    return folder / "bsuite" / f"bsuite_id_-_{experiment}-{number}.csv"


class EpisodeTable(Lines):
    """A row an episode; numbers named `log/<name>` are summed, those named `best_` maximised."""

    def __init__(self, path: Path):
        path.parent.mkdir(exist_ok=True)
        super().__init__(path)
        self.path = path
        self.read()

    def read(self) -> None:
        """The totals are those of the last row; a kill may have cut the line after it."""
        with self.path.open("rb") as file:
            head = file.readline()
            file.seek(max(len(head), self.path.stat().st_size - TAIL))
            *rows, _ = file.read().split(b"\n")
        self.headed = head.endswith(b"\n")
        names, last = (line.decode().strip().split(",") for line in (head, (rows or [b""])[-1]))
        self.totals = dict(zip(names, map(float, last), strict=True)) if rows else {}

    def write(self, score: dict[str, Any]) -> None:
        """One finished episode, as in scores.jsonl."""
        logged = {key[4:]: value for key, value in score.items() if key.startswith("log/")}
        total = {name: self.totals.get(name, 0) for name in (*COLUMNS, *logged)}
        total["steps"] += score["length"]
        total["episode"] += 1
        total["total_return"] += score["return"]
        total["episode_len"], total["episode_return"] = score["length"], score["return"]
        for name, value in logged.items():
            best = name.startswith("best_")
            total[name] = max(total[name], value) if best else total[name] + value
        text = ",".join(f"{value:.12g}" for value in total.values())
        if not self.headed:
            text = ",".join(total) + "\n" + text
        self.file.write(text.encode() + b"\n")
        self.file.flush()
        self.totals, self.headed = total, True

    def restore(self, length: int) -> None:
        super().restore(length)
        self.read()
