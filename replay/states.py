"""Recurrent states ahead of some steps of the streams, beside the blocks: `replay.start stored`.

A *start* is a step whose age in its episode is 0, `every`, 2 `every` and so on: where `every` is a
multiple of a core's segment, each start is on a segment's border. Only starts of age above 0 have a
state; at age 0 the core resets.

States are slots of one size in one file. A new version of a state goes into a free slot, and a slot
is free once neither the index in RAM nor that of a kept checkpoint refers to it. So a resumed run
finds the states of its checkpoint, whatever was written after it. Every slot says whose it is, with
a checksum: one that cannot be trusted is counted and means no state, which is always valid.
"""

from __future__ import annotations

import os
import struct
import sys
import threading
import zlib
from array import array
from bisect import bisect_left, bisect_right
from pathlib import Path
from typing import Any

import numpy as np

from replay.blocks import BLOCK, FULL, Segments

HEADER = struct.Struct("<4sIqqq")  # magic, crc32 of all behind it; stream, step, update
MAGIC, CHECKED = b"STA1", 8
NONE, RESET = -1, -2  # in place of a slot: no state yet; none is needed


def slot_bytes(size: int) -> int:
    """Bytes on disk of one state of `size` bytes."""
    return HEADER.size + size


class States:
    def __init__(self, path: Path, size: int, every: int, streams: int):
        """`size` bytes a state, the same for all; nothing in `path` counts before `restore`."""
        self.path, self.size, self.every = path, size, every
        self.steps = [array("q") for _ in range(streams)]  # the starts, ascending
        self.slots = [array("i") for _ in range(streams)]
        self.live = 0  # states that the index refers to
        self.damaged = 0
        self.used = 0  # slots of the file, free ones included
        self.free: list[int] = []
        self.kept = np.zeros(0, bool)  # slots that a checkpoint may refer to
        # One thread adds starts while another reads and refreshes; a slot that is being read must
        # not be given away.
        self.lock = threading.RLock()
        self.file: int | None = None

    @property
    def bytes(self) -> int:
        """Bytes of the states that can be read; versions for checkpoints come on top."""
        return self.live * slot_bytes(self.size)

    @property
    def index_bytes(self) -> int:
        return sum(map(sys.getsizeof, [*self.steps, *self.slots])) + self.kept.nbytes

    # -- starts -----------------------------------------------------------------------------

    def begin(self, stream: int, step: int, age: int, state: tuple[int, bytes] | None) -> None:
        """Append a start, behind the others of its stream, with (update, state) or without."""
        with self.lock:
            steps = self.steps[stream]
            if not steps or steps[-1] != step:  # else it is added again, after a full disk
                steps.append(step)
                self.slots[stream].append(NONE if age else RESET)
            if state is not None:
                self.put(stream, step, *state)

    def begin_all(self, stream: int, segments: Segments) -> None:
        """Find the starts of all blocks of a stream that is stored."""
        for block in range(segments.base, segments.end):
            ages = segments.read_plain(block)["age"].tolist()
            for step, age in enumerate(ages, BLOCK * block):
                if age % self.every == 0:
                    self.begin(stream, step, age, None)

    def following(self, stream: int, step: int) -> int | None:
        """The first start that is not before `step`."""
        with self.lock:
            index = bisect_left(self.steps[stream], step)
            return self.steps[stream][index] if index < len(self.steps[stream]) else None

    def upto(self, stream: int, step: int) -> int | None:
        """The last start that is not behind `step`."""
        with self.lock:
            index = bisect_right(self.steps[stream], step)
            return self.steps[stream][index - 1] if index else None

    def drop_before(self, stream: int, step: int) -> None:
        """Forget the starts before `step`, and their states."""
        with self.lock:
            count = bisect_left(self.steps[stream], step)
            for slot in self.slots[stream][:count]:
                self.release(slot)
            del self.steps[stream][:count], self.slots[stream][:count]

    def find(self, stream: int, step: int) -> int | None:
        """Index of the start at `step` among those that have a state, or may."""
        index = bisect_left(self.steps[stream], step)
        here = index < len(self.steps[stream]) and self.steps[stream][index] == step
        return index if here and self.slots[stream][index] != RESET else None

    # -- states -----------------------------------------------------------------------------

    def put(self, stream: int, step: int, update: int, state: bytes) -> None:
        """Write the state ahead of `step`, made by weights after `update` updates.

        Nothing happens unless `step` is a start of age above 0. Raises OSError when the disk is
        full.
        """
        assert len(state) == self.size, (len(state), self.size)
        with self.lock:
            index = self.find(stream, step)
            if index is None:
                return
            slot = self.free[-1] if self.free else self.used
            checked = struct.pack("<qqq", stream, step, update) + state
            data = MAGIC + struct.pack("<I", zlib.crc32(checked)) + checked
            try:
                done = 0
                while done < len(data):  # a nearly full disk takes a part, then says no
                    at = slot * len(data) + done
                    done += os.pwrite(self.opened(), data[done:], at)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                raise OSError(
                    error.errno,
                    f"disk full: the states in {self.path} need {len(data):,} more bytes; free "
                    "space and run the same command to resume, with a lower --replay.capacity if "
                    "it would not last",
                ) from error
            if self.free:
                self.free.pop()
            self.used = max(self.used, slot + 1)
            self.release(self.slots[stream][index])
            self.slots[stream][index] = slot
            self.live += 1

    def get(self, stream: int, step: int) -> tuple[int, bytes] | None:
        """(update, state) ahead of `step`; None where none is known, or what is there is not it."""
        with self.lock:
            index = self.find(stream, step)
            slot = NONE if index is None else self.slots[stream][index]
            if slot == NONE:
                return None
            size = slot_bytes(self.size)
            data = os.pread(self.opened(), size, slot * size)
            if len(data) == size:
                magic, crc, *whose, update = HEADER.unpack_from(data)
                good = crc == zlib.crc32(memoryview(data)[CHECKED:])
                if good and (magic, whose) == (MAGIC, [stream, step]):
                    return update, data[HEADER.size :]
            self.damaged += 1
            return None

    def release(self, slot: int) -> None:
        """The index refers to `slot` no more."""
        if slot < 0:
            return
        self.live -= 1
        if slot >= len(self.kept) or not self.kept[slot]:
            self.free.append(slot)

    def opened(self) -> int:
        if self.file is None:
            self.file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        return self.file

    # -- what survives ----------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        size = slot_bytes(self.size)
        return {
            "states": self.live,
            "states_damaged": self.damaged,
            "states_gb": self.used * size / 1e9,  # versions for checkpoints and free slots included
        }

    def flush(self) -> None:
        if self.file is not None:
            os.fsync(self.file)

    def state(self) -> list[list[np.ndarray]]:
        """Starts and slots of every stream. From now on these slots are not written again until
        `collect` is called without this state."""
        with self.lock:
            state = [
                [np.array(steps, np.int64), np.array(slots, np.int32)]
                for steps, slots in zip(self.steps, self.slots, strict=True)
            ]
            self.kept = np.pad(self.kept, (0, self.used - len(self.kept)))
            self.kept |= self.referred([state])
            return state

    def referred(self, states: list[Any]) -> np.ndarray:
        """Which slots these states refer to."""
        out = np.zeros(self.used, bool)
        for state in states:
            for _, slots in state:
                slots = np.asarray(slots)
                out[slots[(slots >= 0) & (slots < self.used)]] = True
        return out

    def collect(self, states: list[Any]) -> None:
        """Free the slots that neither the index nor one of the `states` refers to."""
        with self.lock:
            self.kept = self.referred(states)
            now = self.referred([list(zip(self.steps, self.slots, strict=True))])
            self.free = np.flatnonzero(~(self.kept | now)).tolist()[::-1]

    def restore(self, state: list[Any]) -> None:
        """Back to what `state` refers to."""
        with self.lock:
            self.steps = [array("q", np.asarray(steps).tolist()) for steps, _ in state]
            self.slots = [array("i", np.asarray(slots).tolist()) for _, slots in state]
            self.live = sum(slot >= 0 for slots in self.slots for slot in slots)
            ends = [max(slots) + 1 for slots in self.slots if slots]
            size = self.path.stat().st_size if self.path.exists() else 0
            self.used = max([0, -(-size // slot_bytes(self.size)), *ends])
            # Other checkpoints may refer to any of them: `collect` will know.
            self.free, self.kept = [], np.ones(self.used, bool)

    def close(self) -> None:
        if self.file is not None:
            os.close(self.file)
            self.file = None
