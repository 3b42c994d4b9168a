"""Blocks of consecutive steps of one stream, and the segment files that hold them.

A block is 32 steps: plain fields as one structured array, then every image field as one zstd frame
(level 3; small chunks compress as well as large ones and are cheaper to read). A segment is an
append-only file of up to 32 blocks behind a JSON header. A write is one system call, and every
block carries its length and a checksum, so a torn tail is recognised and dropped.
"""

from __future__ import annotations

import errno
import json
import math
import os
import struct
import weakref
import zlib
from array import array
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import zstandard

BLOCK = 32
BLOCKS_PER_SEGMENT = 32
INDEX_THREADS = 16  # so many reads of a cold disk at the same time
MAGIC = b"BLK1"
HEADER = struct.Struct("<4sQII")  # magic, block number, payload bytes, crc32
VERSION = 1
FULL = (errno.ENOSPC, errno.EDQUOT)
Fields = dict[str, tuple[np.dtype, tuple[int, ...]]]
Block = dict[str, Any]  # "plain": structured (32,); image fields (32, H, W, C)


def is_image(dtype: np.dtype, shape: tuple[int, ...]) -> bool:
    return dtype == np.uint8 and len(shape) == 3


class Slots:
    """Memory for arrays of one shape, used again when nothing refers to an array any more.

    Blocks come and go in an order that scatters free memory between them: from malloc, a cache of
    1 GB made the process hold 2; fresh pages from the system cost half as much as decoding.
    """

    def __init__(self, shape: tuple[int, ...]):
        self.shape = shape
        self.free: deque[bytearray] = deque()  # its pop and append are safe in threads

    def take(self) -> np.ndarray:
        """An array uint8 with anything in it."""
        try:
            memory = self.free.pop()
        except IndexError:
            memory = bytearray(math.prod(self.shape))
        # Every view refers to this array, the one right above the memory.
        root = np.frombuffer(memory, np.uint8)
        weakref.finalize(root, self.free.append, memory).atexit = False
        return root.reshape(self.shape)


def segment_name(stream: int, first: int) -> str:
    return f"stream{stream:04d}-{first:09d}.blocks"


class Layout:
    """Which fields are plain and which are images, and how a block is encoded."""

    def __init__(self, fields: Fields):
        # Sorted, so that the bytes on disk do not depend on the order in which fields are named.
        self.fields = {key: (np.dtype(d), tuple(s)) for key, (d, s) in sorted(fields.items())}
        self.images = [key for key, (d, s) in self.fields.items() if is_image(d, s)]
        self.plain = np.dtype(
            [(key, d, s) for key, (d, s) in self.fields.items() if key not in self.images]
        )
        self.slots = {key: Slots((BLOCK, *self.fields[key][1])) for key in self.images}
        self.step_bytes = self.plain.itemsize + sum(
            int(np.prod(self.fields[key][1])) for key in self.images
        )

    def empty(self, *lead: int) -> Block:
        out: Block = {"plain": np.zeros(lead, self.plain)}
        for key in self.images:
            out[key] = np.empty((*lead, *self.fields[key][1]), np.uint8)
        return out

    def empty_block(self) -> Block:
        images = {key: slots.take() for key, slots in self.slots.items()}
        return {"plain": np.zeros(BLOCK, self.plain), **images}

    def encode(self, block: Block) -> bytes:
        parts = [block["plain"].tobytes()]
        for key in self.images:
            packed = zstandard.ZstdCompressor(3).compress(np.ascontiguousarray(block[key]).data)
            parts += [struct.pack("<I", len(packed)), packed]
        return b"".join(parts)

    def decode_plain(self, payload: bytes | memoryview) -> np.ndarray:
        """The plain fields alone, which are not compressed."""
        return np.frombuffer(memoryview(payload)[: BLOCK * self.plain.itemsize], self.plain)

    def decode(self, payload: bytes | memoryview) -> Block:
        view = memoryview(payload)
        # A copy, since a view would keep the payload as long as the block.
        block: Block = {"plain": self.decode_plain(payload).copy()}
        offset = BLOCK * self.plain.itemsize
        for key in self.images:
            (length,) = struct.unpack_from("<I", view, offset)
            offset += 4
            block[key] = self.slots[key].take()
            reader = zstandard.ZstdDecompressor().stream_reader(view[offset : offset + length])
            if reader.readinto(block[key].data.cast("B")) < block[key].nbytes or reader.read(1):
                raise ValueError(f"{key} is not {block[key].nbytes:,} bytes")
            offset += length
        return block

    def describe(self) -> dict[str, str]:
        return {key: f"{d.str} {list(s)}" for key, (d, s) in self.fields.items()}

    @classmethod
    def described(cls, found: dict[str, str]) -> Layout:
        """The layout that `describe` described. Raises ValueError when nothing did."""
        try:
            split = {key: text.split(" ", 1) for key, text in found.items()}
            fields = {key: (np.dtype(d), tuple(json.loads(s))) for key, (d, s) in split.items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"no description of fields: {found}") from error
        return cls(fields)

    def check(self, found: dict[str, str], where: Path) -> None:
        """Raises ValueError that names the fields that differ from `found`, a description."""
        ours = self.describe()
        lines = [
            f"  {key}: {found.get(key, 'absent')} there, {ours.get(key, 'absent')} in this run"
            for key in sorted({*found, *ours})
            if found.get(key) != ours.get(key)
        ]
        if lines:
            raise ValueError(
                "\n".join([f"{where} holds other fields than this run:", *lines])
                + "\nUse the task and wrappers it was recorded with, or start in a new folder."
            )


class Damaged(ValueError):
    """What is on disk of a block is not what was written."""


class TornHeader(ValueError):
    """A file ends within its header: it holds nothing yet."""


def read_header(path: Path, file: BinaryIO) -> tuple[dict[str, str], int]:
    """The fields of a segment, as `Layout.describe` gives them, and where its blocks start.

    Keys of the header that are not known are ignored. Raises ValueError when it cannot be read, is
    of another format, or is that of another file; TornHeader when the file ends before it does.
    """
    start = file.read(4)
    length = struct.unpack("<I", start)[0] if len(start) == 4 else 4
    text = file.read(length)
    # With a block behind it, it is the length that is wrong.
    if len(text) < length and MAGIC not in text:
        raise TornHeader(f"{path} ends within its header")
    try:
        header = json.loads(text)
        version, block, fields = header["version"], header["block"], header["fields"]
        name = segment_name(header["stream"], header["first"])
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is damaged: its header cannot be read") from error
    if (version, block) != (VERSION, BLOCK):
        raise ValueError(
            f"{path} has format {version} with blocks of {block} steps; "
            f"this version reads format {VERSION} with blocks of {BLOCK}"
        )
    if path.name != name:
        raise ValueError(f"{path} was written as {name}; give it this name again or remove it")
    return fields, 4 + length


class Segments:
    """The files of one stream: blocks from `base` up to `end`, found by number."""

    def __init__(self, folder: Path, stream: int, layout: Layout):
        self.folder, self.stream, self.layout = folder, stream, layout
        self.base = 0  # first block that is on disk, the first of its segment
        self.offsets = array("Q")  # of the payloads, in their files
        self.lengths = array("I")
        self.bytes = 0  # size of all files
        self.writing: int | None = None

    @property
    def end(self) -> int:
        return self.base + len(self.offsets)

    def path(self, block: int) -> Path:
        first = block - block % BLOCKS_PER_SEGMENT
        return self.folder / segment_name(self.stream, first)

    def files(self) -> dict[int, Path]:
        """First block -> segment file, ascending."""
        paths = self.folder.glob(f"stream{self.stream:04d}-*.blocks")
        return dict(sorted((int(path.stem.split("-")[1]), path) for path in paths))

    def header(self, block: int) -> bytes:
        described = {
            "version": VERSION,
            "stream": self.stream,
            "first": block,
            "block": BLOCK,
            "fields": self.layout.describe(),
        }
        text = json.dumps(described).encode()
        return struct.pack("<I", len(text)) + text

    def append(self, payload: bytes) -> None:
        """Write the next block. Raises OSError; nothing of the block is left on disk then."""
        block = self.end
        head = HEADER.pack(MAGIC, block, len(payload), zlib.crc32(payload))
        try:
            start = self.open_for(block)
            prefix = self.header(block) if start == 0 else b""
            self.write(prefix + head + payload, start)
        except OSError as error:
            if error.errno not in FULL:
                raise
            raise OSError(
                error.errno,
                f"disk full: the replay in {self.folder} needs {len(payload):,} more bytes; free "
                "space and run the same command to resume, with a lower --replay.capacity if it "
                "would not last",
            ) from error
        self.offsets.append(start + len(prefix) + HEADER.size)
        self.lengths.append(len(payload))

    def open_for(self, block: int) -> int:
        """Open the segment of `block` at its end; returns its size."""
        fresh = block % BLOCKS_PER_SEGMENT == 0
        if fresh or self.writing is None:
            self.close()
            if block == 0:
                # A run that ended before its first checkpoint starts over in the same folder.
                for path in self.files().values():
                    path.unlink()
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if fresh else 0)
            self.writing = os.open(self.path(block), flags, 0o644)
        return os.fstat(self.writing).st_size

    def write(self, data: bytes, start: int) -> None:
        assert self.writing is not None
        try:
            written = os.write(self.writing, data)
            while written < len(data):  # a nearly full disk takes a part, then says no
                written += os.write(self.writing, data[written:])
        except OSError:
            os.ftruncate(self.writing, start)
            if start == 0:
                self.close()
                self.path(self.end).unlink()
            raise
        self.bytes += len(data)

    def place(self, block: int) -> tuple[Path, int, int]:
        """File, offset and bytes of a block and its header. Raises ValueError when it is gone."""
        index = block - self.base
        if not 0 <= index < len(self.offsets):
            raise ValueError(
                f"{self.folder}: block {block} of stream {self.stream} is not there, only "
                f"{self.base} to {self.end - 1}; name the windows still to be read in `collect`"
            )
        size = HEADER.size + self.lengths[index]
        return self.path(block), self.offsets[index] - HEADER.size, size

    def read(self, block: int, place: tuple[Path, int, int]) -> Block:
        """Decode a block. Raises Damaged when what is on disk is not what was written."""
        path, offset, size = place
        try:
            with path.open("rb", buffering=0) as file:
                data = os.pread(file.fileno(), size, offset)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            data = b""  # a bad sector
        payload = data[HEADER.size :]
        expected = HEADER.pack(MAGIC, block, size - HEADER.size, zlib.crc32(payload))
        if len(data) < size or data[: HEADER.size] != expected:
            raise Damaged(
                f"{path}: block {block} is damaged; restore this file from a copy when the run "
                "has ended"
            )
        return self.layout.decode(payload)

    def read_plain(self, block: int) -> np.ndarray:
        """The plain fields (32,) of a block, not checked. Raises ValueError when it is gone."""
        path, offset, _ = self.place(block)
        with path.open("rb", buffering=0) as file:
            size = BLOCK * self.layout.plain.itemsize
            return self.layout.decode_plain(os.pread(file.fileno(), size, offset + HEADER.size))

    def checksum(self, block: int) -> int:
        """Of a block's payload, as its header says."""
        path, offset, _ = self.place(block)
        with path.open("rb", buffering=0) as file:
            return HEADER.unpack(os.pread(file.fileno(), HEADER.size, offset))[3]

    def flush(self) -> None:
        if self.writing is not None:
            os.fsync(self.writing)

    def close(self) -> None:
        if self.writing is not None:
            os.fsync(self.writing)
            os.close(self.writing)
            self.writing = None

    def restore(self, first: int, end: int) -> None:
        """Index what is on disk up to block `end`, by the headers, and delete what came later.

        Raises ValueError, before anything is deleted, when one of the blocks from `first` on is
        missing or the fields on disk are others.
        """
        self.close()
        sizes = self.read_index(end)
        if self.end != end or self.base > min(first, end - end % BLOCKS_PER_SEGMENT):
            raise ValueError(
                f"{self.folder}: stream {self.stream} should hold blocks {first} to {end - 1}, "
                f"but {self.base} to {self.end - 1} are there; the replay is incomplete, restore "
                "its files from a copy or start anew in another folder"
            )
        for number, path in self.files().items():
            if number < self.base or number >= end:
                path.unlink()
            else:
                os.truncate(path, sizes[path])
        self.bytes = sum(sizes[path] for number, path in self.files().items())

    def read_index(self, end: int) -> dict[Path, int]:
        """Find the blocks before `end` that lie behind the last gap; the size of whole ones."""
        self.base, self.offsets, self.lengths = end, array("Q"), array("I")
        files = {number: path for number, path in self.files().items() if number < end}
        sizes = {}
        with ThreadPoolExecutor(INDEX_THREADS) as threads:
            found = threads.map(lambda item: self.index(item[1], item[0], end), files.items())
            for (number, path), (offsets, lengths, size) in zip(files.items(), found, strict=True):
                if number != self.end:  # the first file, or the first behind a gap
                    self.base, self.offsets, self.lengths = number, array("Q"), array("I")
                self.offsets.extend(offsets)
                self.lengths.extend(lengths)
                sizes[path] = size
        return sizes

    def load(self) -> None:
        """Index all whole blocks on disk and change nothing. Raises ValueError for a gap."""
        numbers = list(self.files())
        self.read_index(numbers[-1] + BLOCKS_PER_SEGMENT)
        if self.base != numbers[0]:
            raise ValueError(
                f"{self.folder}: blocks before {self.base} of stream {self.stream} are missing or "
                f"damaged; python -m replay.inspect {self.folder} says which"
            )

    def narrow(self, base: int, end: int) -> None:
        """Forget the blocks before `base` and from `end` on; the files stay."""
        place = slice(base - self.base, end - self.base)
        self.base, self.offsets, self.lengths = base, self.offsets[place], self.lengths[place]

    def index(self, path: Path, number: int, end: int) -> tuple[array[int], array[int], int]:
        """Offsets and lengths of the whole blocks of a file, by their headers; where they end."""
        offsets, lengths = array("Q"), array("I")
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            try:
                described, offset = read_header(path, file)
            except TornHeader:  # nothing is there: at the end of a stream as in front of a gap
                return offsets, lengths, 0
            self.layout.check(described, path)
            size = os.fstat(file.fileno()).st_size
            for block in range(number, min(end, number + BLOCKS_PER_SEGMENT)):
                head = os.pread(file.fileno(), HEADER.size, offset)
                if len(head) < HEADER.size:
                    break
                magic, found, length, _ = HEADER.unpack(head)
                if (magic, found) != (MAGIC, block) or offset + HEADER.size + length > size:
                    break
                offsets.append(offset + HEADER.size)
                lengths.append(length)
                offset += HEADER.size + length
        return offsets, lengths, offset

    def drop_before(self, block: int) -> None:
        """Delete the segments whose blocks are all below `block`."""
        while self.base + BLOCKS_PER_SEGMENT <= min(block, self.end):
            path = self.path(self.base)
            self.bytes -= path.stat().st_size
            path.unlink()
            del self.offsets[:BLOCKS_PER_SEGMENT]
            del self.lengths[:BLOCKS_PER_SEGMENT]
            self.base += BLOCKS_PER_SEGMENT
