"""Will the replay fit? The size projected for a run against the free disk, before it starts."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from replay.blocks import BLOCK, Fields, Layout
from replay.states import slot_bytes

# zstd on frames of a maze seen by a trained agent; most other images compress better.
IMAGE_RATIO = 3.4
# Left free for logs and much else: bytes, or a share of what is free where that is more.
RESERVE_BYTES, RESERVE_SHARE = 2e9, 0.05
CHECKPOINTS = 3  # folders on disk while one is written
# A state that is refreshed exists anew, as long as one of two checkpoints refers to what it was.
STATE_VERSIONS = 3


def bytes_per_step(fields: Fields, state_bytes: int = 0, state_every: int = 1) -> float:
    """Bytes on disk of one step, projected, with states of `state_bytes` every `state_every`."""
    layout = Layout(fields)
    images = sum(int(np.prod(layout.fields[key][1])) for key in layout.images)
    states = STATE_VERSIONS * slot_bytes(state_bytes) / state_every if state_bytes else 0
    return layout.plain.itemsize + images / IMAGE_RATIO + states


def fewest(streams: int, length: int, fill: int, state_every: int = 0) -> int:
    """The smallest capacity with a window of `length` steps in each stream always, and `fill` steps
    at some time.

    Blocks leave one at a time, over all streams in turn. So a stream may lack one that has left and
    one that is being written, and with states the steps ahead of its first one.
    """
    return max(streams * (length + state_every + 2 * BLOCK), fill + BLOCK)


def fit_capacity(
    folder: Path,
    capacity: int,
    explicit: bool,
    steps: int,
    least: int,
    each: float,
    checkpoint_bytes: int = 0,
) -> tuple[int, str]:
    """The capacity to use and a line that explains it, for a run of `steps` decisions of `each`
    bytes, whose checkpoints are of `checkpoint_bytes`.

    The default capacity shrinks to what fits on the disk of `folder`, which must exist. Raises
    ValueError when a capacity that the user gave (`explicit`) cannot be met, or when less than
    `least` fits (`fewest`). The run never needs more than its own steps.
    """
    free = shutil.disk_usage(folder).free
    reserve = max(RESERVE_BYTES + CHECKPOINTS * checkpoint_bytes, RESERVE_SHARE * free)
    usable = max(0, int(free - reserve))
    # Episodes add one step each to the decisions that are counted: 10 % is for those of ten steps
    # and more. Of shorter ones, up to twice as many steps are kept as there are decisions.
    wanted = min(capacity, int(steps * 1.1) + 1000)
    fitting = int(usable / each)
    line = (
        f"replay: {wanted:,} steps of {each:,.0f} bytes are {wanted * each / 1e9:.1f} GB; "
        f"{usable / 1e9:.1f} GB of the disk of {folder} can be used"
    )
    if wanted <= fitting:
        return capacity, line
    if explicit or fitting < least:
        raise ValueError(
            f"{line}. That is not enough: free space, choose another --logdir, or lower "
            f"--replay.capacity (what fits: {fitting:,} steps)"
        )
    return fitting, f"{line}; the capacity is lowered to {fitting:,} steps"
