"""The replay of another run, to be sampled from and never changed: `replay.from`."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from replay.blocks import Layout, Segments


def find_replay(folder: Path) -> Path:
    """The replay in the folder of a run, or the folder itself. Raises ValueError."""
    if (folder / "replay").is_dir():
        return folder / "replay"
    if any(folder.glob("stream*.blocks")):
        return folder
    raise ValueError(
        f"{folder} holds no replay: name the folder of a run (with `replay` in it) or of a replay "
        "(with stream*.blocks in it)"
    )


class Source:
    """All whole blocks of a stored replay, as streams that nothing is added to."""

    def __init__(self, folder: Path, layout: Layout):
        """Raises ValueError when a run writes to `folder`, or it is not whole, or has other fields.

        As long as this lives no run can resume there, which would delete what is read here.
        """
        self.folder = find_replay(folder)
        self.lock: int | None = None
        self.hold(self.folder.parent / "lock")
        names = sorted({path.name.split("-")[0] for path in self.folder.glob("stream*.blocks")})
        streams = [int(name.removeprefix("stream")) for name in names]
        self.segments = [Segments(self.folder, stream, layout) for stream in streams]
        try:
            for segments in self.segments:
                segments.load()
        except ValueError:
            self.close()
            raise
        self.segments = [segments for segments in self.segments if segments.offsets]

    def hold(self, lock: Path) -> None:
        """Share the lock of the run there, if it has one, with other readers."""
        if not lock.exists():
            return
        self.lock = os.open(lock, os.O_RDONLY)
        try:
            fcntl.flock(self.lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise ValueError(
                f"{self.folder}: a run is writing to it, and deletes old steps; wait until it has "
                "ended, or copy the folder and name the copy"
            ) from None

    def state(self) -> list[list[int]]:
        """First block and end of every stream, and the checksum of its last block."""
        return [[s.base, s.end, s.checksum(s.end - 1)] for s in self.segments]

    def restore(self, state: list[list[int]]) -> None:
        """Back to the blocks of `state`, should there be more by now. Raises ValueError."""
        held = [[base, end] for base, end, *_ in state]
        there = [[segments.base, segments.end] for segments in self.segments]
        kept = zip(held, there, strict=False)
        if len(there) < len(held) or any(not b <= base < end <= e for (base, end), (b, e) in kept):
            raise ValueError(
                f"{self.folder} held blocks {held} of its streams when this run began, but "
                f"{there} are there; put its files back, or start in a new folder"
            )
        self.segments = self.segments[: len(state)]
        # Earlier versions kept no checksum.
        for segments, (base, end, *checksum) in zip(self.segments, state, strict=True):
            segments.narrow(base, end)
            if checksum and checksum[0] != segments.checksum(end - 1):
                raise ValueError(
                    f"{self.folder} was written anew since this run began: block {end - 1} of "
                    f"stream {segments.stream} is another; put its files back, or start in a new "
                    f"folder"
                )

    def close(self) -> None:
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None
