"""What this process may use of its machine: cores and memory, by affinity and by control group.

Containers and batch systems limit both by control groups (v2), of which psutil says nothing.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

ROOT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def groups() -> list[Path]:
    """The folders of this process's group and of those that it is in; none without groups."""
    try:
        lines = OWN.read_text().splitlines()
    except OSError:
        return []
    path = next((line[3:] for line in lines if line.startswith("0::")), None)
    if path is None:
        return []
    folder = ROOT / path.lstrip("/")
    return [folder, *(above for above in folder.parents if above.is_relative_to(ROOT))]


def words(name: str) -> Iterator[tuple[Path, list[str]]]:
    """Of each group that has a file `name`: the folder, and the file's words."""
    for folder in groups():
        with contextlib.suppress(OSError):
            yield folder, (folder / name).read_text().split()


def cores() -> int:
    """Cores that this process may keep busy."""
    count = len(os.sched_getaffinity(0))
    for _, (quota, period, *_) in words("cpu.max"):
        if quota != "max":
            count = min(count, max(1, math.ceil(int(quota) / int(period))))
    return count


def free_ram() -> int:
    """Bytes of memory that this process may still take."""
    free = psutil.virtual_memory().available
    for folder, (limit, *_) in words("memory.max"):
        if limit != "max":
            used = int((folder / "memory.current").read_text())
            free = min(free, int(limit) - used + reclaimable(folder))
    return max(0, free)


def reclaimable(folder: Path) -> int:
    """Bytes of a group's memory that hold files and are given up when memory is short."""
    rows = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
    return next((int(value) for name, value in rows if name == "inactive_file"), 0)
