"""Steps per second of Memory Maze with one and two workers, beside the package as it comes.

`python -m envs.bench --steps 150` interleaves the variants and prints medians. Resets are outside
the timed windows.
"""

from __future__ import annotations

import functools
import json
import statistics
import time

import numpy as np

from configs.command import command_line
from envs.memory_maze import MemoryMaze
from envs.pool import EnvPool
from envs.rendering import pick_backend


def rate(pool: EnvPool, steps: int) -> float:
    """Steps per second of all slots together, `steps` ticks, actions uniform."""
    random = np.random.default_rng(0)
    start, done = time.perf_counter(), 0
    for _ in range(steps):
        ids, _ = pool.recv()
        pool.send(ids, random.integers(0, 6, (len(ids), 1), dtype=np.int32))
        done += len(ids)
    return done / (time.perf_counter() - start)


def main() -> None:
    parser = command_line("envs.bench", __doc__)
    parser.add_argument("--size", default="9x9", help="maze size")
    parser.add_argument("--steps", type=int, default=150, help="steps of a timed window")
    parser.add_argument("--rounds", type=int, default=3, help="windows of each variant")
    args = parser.parse_args()
    pick_backend()
    variants = {
        (workers, patched): EnvPool(
            functools.partial(MemoryMaze, args.size, patched), workers, 0, True
        )
        for patched in (False, True)
        for workers in (1, 2)
    }
    rates: dict[tuple[int, bool], list[float]] = {key: [] for key in variants}
    try:
        for pool in variants.values():
            rate(pool, 5)
        for _ in range(args.rounds):
            for key, pool in variants.items():
                rates[key].append(rate(pool, args.steps))
    finally:
        for pool in variants.values():
            pool.close()
    rows = []
    for (workers, patched), values in rates.items():
        median = statistics.median(values)
        base = statistics.median(rates[workers, False])
        name = "patched" if patched else "package"
        print(f"{name:8} {workers} workers  {median:7.1f} steps/s  {median / base:5.2f}x")
        rows.append({"variant": name, "workers": workers, "rates": values})
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
