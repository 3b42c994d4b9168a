"""Will the replay fit? The size projected for a run against the free disk, before it starts."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from replay.blocks import Fields, Layout
from replay.states import slot_bytes

# zstd on frames of a maze seen by a trained agent; most other images compress better.
IMAGE_RATIO = 3.4
# Left free for checkpoints and logs: bytes, or a share of what is free where that is more.
RESERVE_BYTES, RESERVE_SHARE = 2e9, 0.05
# A state that is refreshed exists twice as long as a checkpoint refers to what it was.
STATE_VERSIONS = 2
FEWEST = 10_000  # steps; with less than this nothing is learned


def bytes_per_step(fields: Fields) -> float:
    """Bytes on disk of one step, projected."""
    layout = Layout(fields)
    images = sum(int(np.prod(layout.fields[key][1])) for key in layout.images)
    return layout.plain.itemsize + images / IMAGE_RATIO


def fit_capacity(
    folder: Path,
    fields: Fields,
    capacity: int,
    explicit: bool,
    steps: int,
    state_bytes: int = 0,
    state_every: int = 1,
) -> tuple[int, str]:
    """The capacity to use and a line that explains it, for a run of `steps` decisions that keeps
    states of `state_bytes` every `state_every` steps.

    The default capacity shrinks to what fits on the disk of `folder`, which must exist. Raises
    ValueError when a capacity that the user gave (`explicit`) cannot be met, or when hardly
    anything fits. The run never needs more than its own steps.
    """
    free = shutil.disk_usage(folder).free
    usable = max(0, int(free - max(RESERVE_BYTES, RESERVE_SHARE * free)))
    each = bytes_per_step(fields)
    if state_bytes:
        each += STATE_VERSIONS * slot_bytes(state_bytes) / state_every
    # Episodes add one step each to the decisions that are counted; 10 % is ample.
    wanted = min(capacity, int(steps * 1.1) + 1000)
    fitting = int(usable / each)
    line = (
        f"replay: {wanted:,} steps of {each:,.0f} bytes are {wanted * each / 1e9:.1f} GB; "
        f"{usable / 1e9:.1f} GB of the disk of {folder} can be used"
    )
    if wanted <= fitting:
        return capacity, line
    if explicit or fitting < FEWEST:
        raise ValueError(
            f"{line}. That is not enough: free space, choose another --logdir, or lower "
            f"--replay.capacity (what fits: {fitting:,} steps)"
        )
    return fitting, f"{line}; the capacity is lowered to {fitting:,} steps"
