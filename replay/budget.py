"""Will the replay fit? The size projected for a run against the free disk, before it starts."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from replay.blocks import Fields, Layout

# zstd on frames of a maze seen by a trained agent; most other images compress better.
IMAGE_RATIO = 3.4
RESERVE = 0.05


def bytes_per_step(fields: Fields) -> float:
    """Bytes on disk of one step."""
    layout = Layout(fields)
    images = sum(int(np.prod(layout.fields[key][1])) for key in layout.images)
    return layout.plain.itemsize + images / IMAGE_RATIO


def fit_capacity(
    folder: Path, fields: Fields, capacity: int, explicit: bool, steps: int
) -> tuple[int, str]:
    """The capacity to use and a line that explains it.

    A capacity that the user gave and that cannot be met raises ValueError; the default one shrinks
    to what fits. The run never needs more than its own steps.
    """
    free = int(shutil.disk_usage(folder).free * (1 - RESERVE))
    each = bytes_per_step(fields)
    # Episodes add one step each to the decisions that are counted; 10 % is ample.
    wanted = min(capacity, int(steps * 1.1) + 1000)
    need = wanted * each
    line = (
        f"replay: {wanted:,} steps of {each:,.0f} bytes are {need / 1e9:.1f} GB, "
        f"{free / 1e9:.1f} GB of disk are free"
    )
    if need <= free:
        return capacity, line
    if explicit:
        raise ValueError(
            f"{line}: replay.capacity {capacity:,} cannot be met; free space, choose another "
            f"--logdir, or set --replay.capacity {int(free / each):,} or less"
        )
    fitting = int(free / each)
    return fitting, f"{line}; the capacity is lowered to {fitting:,} steps"
