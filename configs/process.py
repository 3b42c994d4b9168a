"""Settings of this process that must be made before the first tensor: allocator and OpenMP."""

from __future__ import annotations

import ctypes
import os
import sys

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
NEVER = -1


def prepare() -> None:
    """Keep freed memory for the next update, and let idle OpenMP threads sleep soon.

    glibc maps tensors over 32 MB afresh at each call and faults every page in again, which alone
    can double the time of an update. OpenMP threads that spin for long take the core that an
    environment worker needs, but those that sleep at once are woken for every small operator, which
    takes as long as the operator: they spin for some microseconds. The library reads its settings
    once, so torch must not be imported before.
    """
    assert "torch" not in sys.modules, "prepare() must run before torch is imported"
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            # The highest threshold that can be set, 2 GiB, is less than one update frees.
            libc.mallopt(M_TRIM_THRESHOLD, NEVER)
            libc.mallopt(M_MMAP_MAX, 0)
