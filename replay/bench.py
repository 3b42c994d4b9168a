"""Steps appended and sampled per second, for frames of a maze and for small vectors.

`python -m replay.bench` writes to a temporary folder under --folder (name the disk of your runs).
Frames are synthetic, a view that walks over a tiled wall, with noise, and compress about as frames
of Memory Maze do; the ratio is printed. "disk" samples with next to no cache, "ram" from the cache.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np

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


def main() -> None:
    parser = argparse.ArgumentParser("replay.bench", description=__doc__)
    parser.add_argument("--folder", type=Path, default=None, help="where to write")
    parser.add_argument("--steps", type=int, default=32_768, help="steps appended")
    parser.add_argument("--streams", type=int, default=16, help="environments")
    parser.add_argument("--rounds", type=int, default=30, help="batches of each measurement")
    args = parser.parse_args()
    rows = []
    print(f"{'':22}{'append':>14}{'16 x 64':>12}{'4 x 1024':>12}{'on disk':>14}")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for kind, fields in KINDS.items():
            for memory, ram_bytes in (("disk", 0), ("ram", 10**10)):
                replay = Replay(
                    Path(folder) / f"{kind}-{memory}", fields, args.streams, 10**9, ram_bytes
                )
                rate = append(replay, kind, args.steps)
                short = sample(replay, 16, 64, args.rounds)
                long = sample(replay, 4, 1024, args.rounds)
                each = replay.bytes / replay.added
                ratio = replay.layout.step_bytes / each
                print(
                    f"{kind:8}{memory:14}{rate:8,.0f} st/s{short:9.2f} ms{long:9.2f} ms"
                    f"{each:9,.0f} B/st (ratio {ratio:.2f})"
                )
                rows.append(
                    {
                        "kind": kind,
                        "memory": memory,
                        "append_steps_per_second": rate,
                        "batch_16x64_ms": short,
                        "batch_4x1024_ms": long,
                        "bytes_per_step": each,
                        "ratio": ratio,
                    }
                )
                replay.close()
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
