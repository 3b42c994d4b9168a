"""What a replay of a given size costs: time to append, to sample and to open, RAM and disk.

`python -m replay.bench --steps 100000 1000000` writes to a temporary folder under --folder (name
the disk of your runs; 10M steps of a maze are 36 GB) and removes it. Frames are synthetic, a view
that walks over a tiled wall, with noise, and compress about as frames of Memory Maze do; the ratio
is printed. Batches are decoded by two threads, as in a run.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil

from configs.command import command_line
from replay.blocks import Fields
from replay.replay import Replay

FLAGS: Fields = {
    "action": (np.dtype(np.int32), (1,)),
    "reward": (np.dtype(np.float32), ()),
    "is_first": (np.dtype(bool), ()),
    "is_last": (np.dtype(bool), ()),
    "is_terminal": (np.dtype(bool), ()),
    "age": (np.dtype(np.int32), ()),
    "episode": (np.dtype(np.int32), ()),
}
THREADS = 2  # that decode, as in `Loader`
NOISE = 0.25  # share of the numbers that are one higher than in the wall; sets the ratio
KINDS: dict[str, Fields] = {
    "image": {"image": (np.dtype(np.uint8), (64, 64, 3)), **FLAGS},
    "vector": {"vector": (np.dtype(np.float32), (3,)), **FLAGS},
}


def frames(steps: int, streams: int) -> np.ndarray:
    """Views (steps, streams, 64, 64, 3) of a walk over a wall."""
    random = np.random.default_rng(0)
    tiles = random.integers(0, 250, (64, 64, 3)).repeat(12, 0).repeat(12, 1)
    wall = tiles.astype(np.uint8)
    place = random.integers(0, 700, (streams, 2))
    out = np.empty((steps, streams, 64, 64, 3), np.uint8)
    for t in range(steps):
        place = (place + random.integers(-3, 4, place.shape)) % 700
        for stream, (y, x) in enumerate(place):
            out[t, stream] = wall[y : y + 64, x : x + 64]
    return out + (random.random(out.shape, np.float32) < NOISE).astype(np.uint8)


def append(replay: Replay, kind: str, steps: int) -> float:
    """Steps appended per second."""
    record = {
        key: np.zeros((replay.streams, *shape), dtype) for key, (dtype, shape) in FLAGS.items()
    }
    views = frames(128, replay.streams) if kind == "image" else np.zeros((128, replay.streams, 3))
    ids = np.arange(replay.streams)
    start = time.perf_counter()
    for t in range(steps // replay.streams):
        replay.add(ids, {**record, kind: views[t % 128]})
    replay.flush()
    return replay.added / (time.perf_counter() - start)


def sample(replay: Replay, batch: int, length: int, rounds: int) -> float:
    """Milliseconds of a draw and its decoding, median."""
    times = []
    for update in range(rounds):
        start = time.perf_counter()
        replay.read(replay.draw(batch, length, (0, 0, update), online=False))
        times.append(time.perf_counter() - start)
    return float(np.median(times) * 1e3)


def sample_beside(replay: Replay, batch: int, length: int, rounds: int) -> float:
    """Batches per second of `THREADS` threads that draw and decode, as those of the loader."""

    def read(update: int) -> None:
        replay.read(replay.draw(batch, length, (0, 1, update), online=False))

    with ThreadPoolExecutor(THREADS) as threads:
        start = time.perf_counter()
        list(threads.map(read, range(rounds)))
        return rounds / (time.perf_counter() - start)


def open_again(replay: Replay) -> float:
    """Seconds until a replay of the same files can be sampled, none of them in the page cache."""
    replay.flush()
    state = replay.state()
    replay.close()
    for path in replay.folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    start = time.perf_counter()
    fields = replay.layout.fields
    again = Replay(replay.folder, fields, replay.streams, replay.capacity, 0)
    again.restore(state)
    again.read(again.draw(1, 1, (0, 0, 0)))
    return time.perf_counter() - start


def measure(folder: Path, kind: str, steps: int, args: argparse.Namespace) -> dict[str, float]:
    """One row of the table, for a replay of `steps` steps in `folder`."""
    replay = Replay(folder, KINDS[kind], args.streams, 10**9, int(args.ram_gb * 1e9))
    row = {"steps": steps, "append_per_second": append(replay, kind, steps)}
    row["16x64_per_second"] = sample_beside(replay, 16, 64, args.rounds)
    row["4x1024_per_second"] = sample_beside(replay, 4, 1024, args.rounds)
    row["rss_gb"] = psutil.Process().memory_info().rss / 1e9
    row["index_bytes_per_step"] = replay.index_bytes / replay.added
    row["disk_gb"] = replay.bytes / 1e9
    row["ratio"] = replay.layout.step_bytes * replay.added / replay.bytes
    row["open_seconds"] = open_again(replay)
    return row


def main() -> None:
    parser = command_line("replay.bench", __doc__)
    parser.add_argument("--folder", type=Path, default=None, help="where to write")
    parser.add_argument("--steps", type=int, nargs="+", default=[100_000], help="sizes to measure")
    parser.add_argument("--kind", choices=list(KINDS), default="image", help="what a step holds")
    parser.add_argument("--ram-gb", type=float, default=1.0, help="as replay.ram_gb")
    parser.add_argument("--streams", type=int, default=16, help="environments")
    parser.add_argument("--rounds", type=int, default=100, help="batches of each measurement")
    args = parser.parse_args()
    print("     steps  append/s  16x64/s  4x1024/s  RSS GB  index B/st  disk GB  ratio  open s")
    rows = []
    for steps in args.steps:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            row = measure(Path(folder), args.kind, steps, args)
        rows.append({"kind": args.kind, "ram_gb": args.ram_gb, **row})
        print(
            f"{steps:10,}  {row['append_per_second']:8,.0f}  {row['16x64_per_second']:7.2f}"
            f"  {row['4x1024_per_second']:8.2f}  {row['rss_gb']:6.2f}"
            f"  {row['index_bytes_per_step']:10.2f}  {row['disk_gb']:7.2f}  {row['ratio']:5.2f}"
            f"  {row['open_seconds']:6.2f}",
            flush=True,
        )
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
