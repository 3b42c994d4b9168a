"""What a replay holds and whether it is whole: `python -m replay.inspect logs/a`.

DIR is the folder of a run or of its replay, also of a run that is alive. Every block is read, its
checksum compared and its images decoded; --quick does not decode. Of a run's folder the checkpoints
are checked too, with what they need of the replay. Nothing is written.

Exit status: 0 when all is whole, 1 when something is damaged (file and block are named), 2 when
there is nothing to inspect.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import itertools
import os
import pickle
import struct
import sys
import time
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

from replay.blocks import BLOCK, HEADER, MAGIC, Layout, TornHeader, read_header
from replay.source import find_replay

THREADS = 4
HEADER_START = struct.Struct("<4sQ")  # magic and number of a block


@dataclass
class File:
    """What one segment file holds."""

    path: Path
    stream: int
    first: int
    end: int = 0  # the block behind the last that is there
    bytes: int = 0
    payload: int = 0
    begun: int = 0  # episodes
    ended: int = 0
    torn: int = 0  # bytes of an unfinished block at the end
    changed: float = 0.0
    fields: dict[str, str] | None = None  # None: the file is gone, or its header cannot be read
    problems: list[str] = field(default_factory=list)


@dataclass
class Checkpoint:
    """What a checkpoint says about the replay."""

    name: str
    count: list[int]
    first: list[int]
    needed: list[int]  # first block of each stream, windows still to be read included


@dataclass
class Report:
    """`lines` say what is there, `problems` what is damaged."""

    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class PlainUnpickler(pickle.Unpickler):
    """Numbers, texts and lists of a file that torch wrote; tensors come out as None.

    Every class is replaced by a function that does nothing, so nothing of the file can run.
    """

    def find_class(self, module: str, name: str) -> Any:
        return lambda *args, **more: None

    def persistent_load(self, pid: Any) -> None:
        return None


def read_checkpoint(folder: Path, report: Report) -> Checkpoint | None:
    """What `folder` says of the replay; None when it is gone by now, or damaged."""
    try:
        for path in sorted(folder.glob("*.pt")):
            with zipfile.ZipFile(path) as archive:
                if bad := archive.testzip():
                    raise zipfile.BadZipFile(f"{bad} has a wrong checksum")
        path = folder / "run.pt"
        with zipfile.ZipFile(path) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            with archive.open(name) as file:
                run = PlainUnpickler(file).load()
    except FileNotFoundError:
        if folder.exists():
            report.problems.append(f"{path}: is missing")
        return None
    except (zipfile.BadZipFile, EOFError, OSError, ValueError, pickle.UnpicklingError) as error:
        report.problems.append(f"{path}: damaged: {error}")
        return None
    count, first = run["replay"]["count"], run["replay"]["first"]
    needed = list(first)
    for _, pairs in run["loader"]["waiting"]:
        for stream, start in pairs:
            if stream < len(needed):
                needed[stream] = min(needed[stream], start // BLOCK)
    return Checkpoint(folder.name, count, first, needed)


def read_file(path: Path, quick: bool) -> File:
    """Check all blocks of a segment file."""
    stream, first = (int(number) for number in path.stem.removeprefix("stream").split("-"))
    found = File(path, stream, first, first)
    try:
        with path.open("rb") as file:
            found.fields, offset = read_header(path, file)
            file.seek(0)
            read_blocks(found, file, offset, quick)
    except (FileNotFoundError, TornHeader):
        pass  # a run that is alive has no more need of it, or has only begun it
    except (ValueError, OSError) as error:
        found.problems.append(str(error))
    return found


def read_blocks(found: File, file: BinaryIO, offset: int, quick: bool) -> None:
    assert found.fields is not None
    layout = Layout.described(found.fields)
    data = memoryview(file.read())
    found.bytes, found.changed = len(data), os.fstat(file.fileno()).st_mtime
    while offset < len(data):
        body = offset + HEADER.size
        magic, block, length, crc = MAGIC, found.end, 0, 0
        if body <= len(data):
            magic, block, length, crc = HEADER.unpack_from(data, offset)
        torn = body + length > len(data)
        # A length that was damaged reaches over the blocks behind it.
        hidden = torn and HEADER_START.pack(MAGIC, found.end + 1) in bytes(data[offset:])
        if (magic, block) != (MAGIC, found.end) or hidden:
            found.problems.append(
                f"{found.path}: block {found.end} is damaged: no block begins at byte {offset:,}; "
                f"it and the {len(data) - offset:,} bytes from there on cannot be read"
            )
            return
        if torn:
            found.torn = len(data) - offset
            return
        payload = data[body : body + length]
        if zlib.crc32(payload) != crc:
            found.problems.append(f"{found.path}: block {block} is damaged: wrong checksum")
        else:
            read_payload(found, layout, payload, quick)
        found.end += 1
        found.payload += length
        offset = body + length


def read_payload(found: File, layout: Layout, payload: memoryview, quick: bool) -> None:
    try:
        plain = layout.decode_plain(payload) if quick else layout.decode(payload)["plain"]
    except (zstandard.ZstdError, struct.error, ValueError) as error:
        found.problems.append(f"{found.path}: block {found.end} cannot be decoded: {error}")
        return
    names = plain.dtype.names or ()
    found.begun += int(plain["is_first"].sum()) if "is_first" in names else 0
    found.ended += int(plain["is_last"].sum()) if "is_last" in names else 0


def compare(streams: dict[int, list[File]], kept: list[Checkpoint], report: Report) -> None:
    """Gaps, unfinished blocks, and what the checkpoints need and is not there."""
    for stream, files in streams.items():
        for before, after in itertools.pairwise(files):
            if before.torn:
                report.problems.append(f"{before.path}: block {before.end} is cut off")
            if before.end != after.first and not before.problems and not before.torn:
                report.problems.append(
                    f"{before.path.parent}: blocks {before.end} to {after.first - 1} of stream "
                    f"{stream} are missing"
                )
    for checkpoint in kept:
        for stream, (count, needed) in enumerate(
            zip(checkpoint.count, checkpoint.needed, strict=True)
        ):
            files, end = streams.get(stream, []), count // BLOCK
            if needed < end and not (files and files[0].first <= needed and end <= files[-1].end):
                held = f"{files[0].first} to {files[-1].end - 1}" if files else "none"
                where = files[-1].path if files else f"stream {stream}"
                report.problems.append(
                    f"{where}: checkpoint {checkpoint.name} needs blocks {needed} to {end - 1}, "
                    f"there are {held}"
                )


def inspect(folder: Path, quick: bool = False) -> Report:
    """Look at all blocks and checkpoints. Raises ValueError when `folder` holds no replay."""
    replay = find_replay(folder)
    checkpoints = None if replay == folder else folder / "checkpoints"
    report = Report()
    published = sorted(p for p in checkpoints.glob("*") if p.name.isdigit()) if checkpoints else []
    # Before the blocks: what a checkpoint needs stays on disk as long as the checkpoint.
    kept = [c for c in (read_checkpoint(path, report) for path in published) if c]
    with ThreadPoolExecutor(THREADS) as threads:
        paths = sorted(replay.glob("stream*.blocks"))
        files = list(threads.map(lambda path: read_file(path, quick), paths))
    kept = [c for c in kept if checkpoints and (checkpoints / c.name).exists()]
    files = [file for file in files if file.fields or file.problems]
    streams: dict[int, list[File]] = {}
    for file in files:
        report.problems += file.problems
        streams.setdefault(file.stream, []).append(file)
    compare(streams, kept, report)
    readable = [file for file in files if file.fields]
    for file in readable:
        if file.fields != readable[-1].fields:
            report.problems.append(f"{file.path} holds other fields than {readable[-1].path}")
    report.lines = summary(replay, streams, readable, kept)
    return report


def summary(
    replay: Path, streams: dict[int, list[File]], files: list[File], kept: list[Checkpoint]
) -> list[str]:
    size = sum(file.bytes for file in files)
    steps = BLOCK * sum(file.end - file.first for file in files)
    lines = [f"replay       {replay}: {len(streams)} streams, {len(files)} files"]
    if not steps:
        return [*lines, "steps        0 in whole blocks"]
    assert files[0].fields is not None
    each = sum(file.payload for file in files) / steps
    raw = Layout.described(files[0].fields).step_bytes
    first = BLOCK * min(of[0].first for of in streams.values())
    last = BLOCK * max(of[-1].end for of in streams.values()) - 1
    when = [
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(choose(f.changed for f in files)))
        for choose in (min, max)
    ]
    lines += [
        f"steps        {steps:,} in {steps // BLOCK:,} whole blocks",
        f"episodes     {sum(f.begun for f in files):,} begun, "
        f"{sum(f.ended for f in files):,} ended",
        f"bytes        {size:,}; a step {each:,.0f}, uncompressed {raw:,}: ratio {raw / each:.2f}",
        f"age          steps {first:,} to {last:,} of the streams; files last written "
        f"{when[0]} to {when[1]}",
    ]
    if torn := [of[-1] for of in streams.values() if of[-1].torn]:
        lines.append(
            f"unfinished   {sum(file.torn for file in torn):,} bytes of a block at the end of "
            f"{len(torn)} streams: being written, or cut off when the run resumes"
        )
    for checkpoint in kept:
        stored = sum(checkpoint.count) - BLOCK * sum(checkpoint.first)
        tails = sum(count % BLOCK for count in checkpoint.count)
        lines.append(
            f"checkpoint   {checkpoint.name}: {sum(checkpoint.count):,} steps added, {stored:,} "
            f"can be sampled, {tails:,} of them in the checkpoint itself"
        )
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "replay.inspect", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="of a run or of its replay")
    parser.add_argument("--quick", action="store_true", help="checksums only, no decoding")
    args = parser.parse_args(argv)
    try:
        report = inspect(args.folder, args.quick)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(report.lines))
    for problem in report.problems:
        print(f"DAMAGED      {problem}")
    how = "checksums" if args.quick else "checksums and decoding"
    if not report.problems:
        print(f"integrity    good ({how} of every block)")
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
