"""Peak memory of one update, above what the process held before it, in bytes.

`python -m agent.profiling.peak CORE SIZE BxT IMAGES PRECISION THREADS PRODUCTS` prints the number.
It has a process of its own because memory that a process has freed is used again without growth.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from configs import process

if __name__ == "__main__":
    process.prepare()  # before torch is imported

import dataclasses

import torch

from agent.auto import fake_batch
from agent.profiling.cell import Cell
from configs.mkl import choose_products


def status(key: str) -> int:
    """Bytes of `VmRSS` or `VmHWM`. getrusage's peak would include that of the parent."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def peak(cell: Cell) -> int:
    """Bytes, in this process; on Linux."""
    learner = cell.learner()
    batch = fake_batch(learner.update, *cell.shape, learner.device)
    # What the first update alone allocates, libraries and optimiser, is no part of it.
    learner.train(fake_batch(learner.update, 1, 2, learner.device))
    if learner.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        learner.train(batch)
        return torch.cuda.max_memory_allocated() - before
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    learner.train(batch)
    return status("VmHWM") - before


def peak_apart(cell: Cell, threads: int, products: str) -> int:
    """`peak` in a fresh process. Raises CalledProcessError when that fails."""
    words = [*dataclasses.astuple(cell), str(threads), products]
    done = subprocess.run(
        [sys.executable, "-m", "agent.profiling.peak", *words],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return int(done.stdout)


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[6]))
    choose_products(sys.argv[7])
    sys.stdout.write(f"{peak(Cell(*sys.argv[1:6]))}\n")
