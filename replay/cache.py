"""Blocks as they are read: decoded ones that wait in RAM, and those that are damaged on disk."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict

from replay.blocks import BLOCK, Block, Damaged, Layout, Segments

log = logging.getLogger("replay")
OBJECTS = 600  # bytes that Python takes to keep a decoded block, besides its arrays
DAMAGED_LIMIT = 100  # blocks; with more of them the disk is to be looked at first
Key = tuple[int, int]  # (stream, block)


class Cache:
    """Decoded blocks, least recently used out first. Safe in threads."""

    def __init__(self, layout: Layout, ram_bytes: int):
        self.block_bytes = BLOCK * layout.step_bytes
        self.most = max(2, ram_bytes // (self.block_bytes + OBJECTS))
        self.blocks: OrderedDict[Key, Block] = OrderedDict()
        self.damaged: dict[Key, str] = {}  # as this process found them
        # Guards all of these, and the index of the files while a block is looked up in it.
        self.lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.blocks)

    def put(self, key: Key, block: Block) -> None:
        with self.lock:
            self.blocks[key] = block
            self.blocks.move_to_end(key)
            while len(self.blocks) > self.most:
                self.blocks.popitem(last=False)

    def get(self, key: Key, segments: Segments) -> Block:
        """The block, read from `segments` where need be.

        Raises Damaged for a damaged one, without a look at the disk from the second time on, and
        ValueError when it is gone, or is one damaged block too many.
        """
        with self.lock:
            if key in self.damaged:
                raise Damaged(self.damaged[key])
            if key in self.blocks:
                self.blocks.move_to_end(key)
                return self.blocks[key]
            place = segments.place(key[1])
        try:
            decoded = segments.read(key[1], place)
        except Damaged as error:
            self.mark(key, error)
            raise
        self.put(key, decoded)
        return decoded

    def mark(self, key: Key, error: Damaged) -> None:
        with self.lock:
            known, self.damaged[key] = key in self.damaged, str(error)
        if not known:
            log.warning("%s; rows that need it are drawn again", error)
        if len(self.damaged) > DAMAGED_LIMIT:
            raise ValueError(
                f"more than {DAMAGED_LIMIT} blocks of the replay are damaged; python -m "
                "replay.inspect with the run's folder names them"
            ) from error

    def clear(self) -> None:
        with self.lock:
            self.blocks.clear()
