"""Steps per second of what stands beside the update: replay, environments, the whole loop."""

from __future__ import annotations

import functools
import importlib.util
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from agent.profiling.cell import Cell
from envs.bench import rate
from envs.memory_maze import MemoryMaze
from envs.pool import EnvPool
from envs.rendering import pick_backend
from replay.bench import KINDS, append, sample
from replay.replay import Replay


def replay_rates(shape: tuple[int, int], steps: int) -> dict[str, float]:
    """Steps/s appended, and milliseconds of a batch of `shape` (B, T) from the cache, by kind."""
    out = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind, fields in KINDS.items():
            replay = Replay(Path(folder) / kind, fields, 4, 10**9, 10**9)
            out[f"replay {kind}, appended steps/s"] = append(replay, kind, steps)
            out[f"replay {kind}, ms a batch"] = sample(replay, *shape, 20)
            replay.close()
    return out


def env_rates(steps: int) -> dict[str, float]:
    """Steps/s of Memory Maze 9x9 in one process and in two; empty where it is not installed."""
    if not importlib.util.find_spec("memory_maze"):
        return {}
    pick_backend()
    out = {}
    for workers in (1, 2):
        pool = EnvPool(functools.partial(MemoryMaze, "9x9"), workers, 0, True)
        try:
            rate(pool, 5)
            out[f"memory_maze_9x9, {workers} processes, steps/s"] = rate(pool, steps)
        finally:
            pool.close()
    return out


def loop_rate(task: str, cell: Cell, threads: int, products: str, seconds: float) -> float:
    """Environment steps/s of training on `task`, from the first row with an update to the last.

    Raises RuntimeError when `seconds` of wall time were too few for two such rows.
    """
    rows, length = cell.shape
    flags = {"task": task, "core": cell.core, "size": cell.size, "precision": cell.precision}
    flags |= {"batch.size": rows, "batch.length": length, "threads": threads, "products": products}
    flags |= {"log.every": 1, "log.media_every": 0}
    with tempfile.TemporaryDirectory() as folder:
        words = [f"--{key}={value}" for key, value in {**flags, "logdir": folder}.items()]
        command = [sys.executable, "-m", "agent.train", *words]
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        time.sleep(seconds)
        run.send_signal(signal.SIGTERM)
        run.wait()
        return read_rate((Path(folder) / "metrics.jsonl").read_text())


def read_rate(lines: str) -> float:
    """Environment steps/s from the rows of a run's metrics.jsonl."""
    rows = [row for row in map(json.loads, lines.splitlines()) if row["update"]]
    if len(rows) < 2 or rows[-1]["wall_seconds"] == rows[0]["wall_seconds"]:
        raise RuntimeError("the run was too short for two rows of metrics with updates")
    first, last = rows[0], rows[-1]
    steps = last["env_step"] - first["env_step"]
    return steps / (last["wall_seconds"] - first["wall_seconds"])
