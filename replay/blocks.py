"""Blocks of consecutive steps of one stream, and the segment files that hold them.

A block is 32 steps: plain fields as one structured array, then every image field as one zstd frame
(level 3; small chunks compress as well as large ones and are cheaper to read). A segment is an
append-only file of up to 32 blocks behind a JSON header. A write is one system call, and every
block carries a checksum, so a torn tail is recognised and dropped.
"""

from __future__ import annotations

import errno
import json
import os
import struct
import zlib
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

BLOCK = 32
BLOCKS_PER_SEGMENT = 32
MAGIC = b"BLK1"
HEADER = struct.Struct("<4sQII")  # magic, block number, payload bytes, crc32
VERSION = 1
Fields = dict[str, tuple[np.dtype, tuple[int, ...]]]
Block = dict[str, Any]  # "plain": structured (32,); image fields (32, H, W, C)


def is_image(dtype: np.dtype, shape: tuple[int, ...]) -> bool:
    return dtype == np.uint8 and len(shape) == 3


class Layout:
    """Which fields are plain and which are images, and how a block is encoded."""

    def __init__(self, fields: Fields):
        self.fields = {key: (np.dtype(d), tuple(s)) for key, (d, s) in fields.items()}
        self.images = [key for key, (d, s) in self.fields.items() if is_image(d, s)]
        self.plain = np.dtype(
            [(key, d, s) for key, (d, s) in self.fields.items() if key not in self.images]
        )
        self.step_bytes = self.plain.itemsize + sum(
            int(np.prod(self.fields[key][1])) for key in self.images
        )

    def empty(self, *lead: int) -> Block:
        out: Block = {"plain": np.zeros(lead, self.plain)}
        for key in self.images:
            out[key] = np.empty((*lead, *self.fields[key][1]), np.uint8)
        return out

    def encode(self, block: Block) -> bytes:
        parts = [block["plain"].tobytes()]
        for key in self.images:
            packed = zstandard.ZstdCompressor(3).compress(np.ascontiguousarray(block[key]).data)
            parts += [struct.pack("<I", len(packed)), packed]
        return b"".join(parts)

    def decode(self, payload: bytes) -> Block:
        size = BLOCK * self.plain.itemsize
        block: Block = {"plain": np.frombuffer(payload[:size], self.plain)}
        offset = size
        for key in self.images:
            (length,) = struct.unpack_from("<I", payload, offset)
            offset += 4
            raw = zstandard.ZstdDecompressor().decompress(payload[offset : offset + length])
            block[key] = np.frombuffer(raw, np.uint8).reshape(BLOCK, *self.fields[key][1])
            offset += length
        return block

    def describe(self) -> dict[str, Any]:
        return {key: [d.str, list(s)] for key, (d, s) in self.fields.items()}


class Segments:
    """The files of one stream: blocks from `base` up to `end`, found by number."""

    def __init__(self, folder: Path, stream: int, layout: Layout):
        self.folder, self.stream, self.layout = folder, stream, layout
        self.base = 0  # first block that is on disk
        self.offsets = array("Q")
        self.lengths = array("I")
        self.writing: int | None = None

    @property
    def end(self) -> int:
        return self.base + len(self.offsets)

    def path(self, block: int) -> Path:
        first = block - block % BLOCKS_PER_SEGMENT
        return self.folder / f"stream{self.stream:04d}-{first:09d}.blocks"

    def header(self, block: int) -> bytes:
        text = json.dumps(
            {
                "version": VERSION,
                "stream": self.stream,
                "first": block - block % BLOCKS_PER_SEGMENT,
                "block": BLOCK,
                "fields": self.layout.describe(),
            }
        ).encode()
        return struct.pack("<I", len(text)) + text

    def append(self, payload: bytes) -> int:
        """Write the next block; returns its bytes. Raises OSError(ENOSPC) with a clear text."""
        block = self.end
        path = self.path(block)
        fresh = block % BLOCKS_PER_SEGMENT == 0
        if fresh or self.writing is None:
            self.close()
            self.writing = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            if fresh:
                os.ftruncate(self.writing, 0)
        start = os.fstat(self.writing).st_size
        head = HEADER.pack(MAGIC, block, len(payload), zlib.crc32(payload))
        prefix = self.header(block) if start == 0 else b""
        data = prefix + head + payload
        try:
            written = 0
            while written < len(data):
                written += os.write(self.writing, data[written:])
        except OSError as error:
            os.ftruncate(self.writing, start)
            if error.errno != errno.ENOSPC:
                raise
            raise OSError(
                errno.ENOSPC,
                f"disk full: the replay in {self.folder} needs {len(data)} more bytes; free space "
                f"or lower replay.capacity, then run the same command to resume",
            ) from None
        self.offsets.append(start + len(prefix) + HEADER.size)
        self.lengths.append(len(payload))
        return len(data)

    def read(self, block: int) -> Block:
        """Decode a block. Raises ValueError when what is on disk is not what was written."""
        index = block - self.base
        path = self.path(block)
        with path.open("rb", buffering=0) as file:
            head_at = self.offsets[index] - HEADER.size
            data = os.pread(file.fileno(), HEADER.size + self.lengths[index], head_at)
        magic, number, length, crc = HEADER.unpack_from(data)
        payload = data[HEADER.size :]
        if (
            magic != MAGIC
            or number != block
            or length != len(payload)
            or zlib.crc32(payload) != crc
        ):
            raise ValueError(f"{path}: block {block} is damaged")
        return self.layout.decode(payload)

    def flush(self) -> None:
        if self.writing is not None:
            os.fsync(self.writing)

    def close(self) -> None:
        if self.writing is not None:
            os.fsync(self.writing)
            os.close(self.writing)
            self.writing = None

    def restore(self, first: int, end: int) -> None:
        """Index blocks first..end - 1 from disk, by their headers, and delete what came later.

        Raises ValueError when a block is missing or the fields on disk are others.
        """
        self.close()
        self.base, self.offsets, self.lengths = end, array("Q"), array("I")
        pattern = f"stream{self.stream:04d}-*.blocks"
        found = {int(p.stem.split("-")[1]): p for p in self.folder.glob(pattern)}
        start = first - first % BLOCKS_PER_SEGMENT
        for number, path in sorted(found.items()):
            if number >= end:
                path.unlink()
            elif number >= start:
                self.index(path, number, end)
        have = range(self.base, self.end)
        if end > first and (first not in have or self.end != end):
            raise ValueError(
                f"{self.folder}: stream {self.stream} should hold blocks {first} to {end - 1}, "
                f"but {have.start} to {have.stop - 1} are there; the replay is incomplete"
            )

    def index(self, path: Path, number: int, end: int) -> None:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<I", file.read(4))
            header = json.loads(file.read(length))
            fields = {key: tuple(map(str, value)) for key, value in header["fields"].items()}
            ours = {key: tuple(map(str, value)) for key, value in self.layout.describe().items()}
            if fields != ours:
                differ = sorted(k for k in {*fields, *ours} if fields.get(k) != ours.get(k))
                raise ValueError(
                    f"{path} holds other fields than this run: {', '.join(differ)} differ"
                )
            if not len(self.offsets):
                self.base = number
            offset, block = 4 + length, number
            while block < end and offset + HEADER.size <= size:
                file.seek(offset)
                magic, found, length, _ = HEADER.unpack(file.read(HEADER.size))
                whole = offset + HEADER.size + length <= size
                if magic != MAGIC or found != block or not whole:
                    break
                self.offsets.append(offset + HEADER.size)
                self.lengths.append(length)
                offset += HEADER.size + length
                block += 1
        if offset < size:
            os.truncate(path, offset)

    def drop_before(self, block: int) -> None:
        """Delete the segments whose blocks are all below `block`."""
        while self.base + BLOCKS_PER_SEGMENT <= min(block, self.end):
            count = BLOCKS_PER_SEGMENT - self.base % BLOCKS_PER_SEGMENT
            self.path(self.base).unlink(missing_ok=True)
            del self.offsets[:count]
            del self.lengths[:count]
            self.base += count
