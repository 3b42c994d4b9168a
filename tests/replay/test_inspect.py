"""What `replay.inspect` says of a whole replay, of one that is being written, and of damage."""

import os
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch

from replay.blocks import HEADER, MAGIC
from replay.inspect import inspect, main

ROOT = Path(__file__).parents[2]


def block(path, number):
    """Where a block of a segment file begins, and its bytes with its header."""
    data = path.read_bytes()
    offset = data.index(MAGIC + number.to_bytes(8, "little"))
    return offset, HEADER.size + HEADER.unpack_from(data, offset)[2]


def flip(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def checkpoint(counter, replay, name, waiting=()):
    """A checkpoint as `agent/checkpoint.py` writes it, as far as a replay is concerned."""
    folder = counter.folder.parent / "checkpoints" / name
    folder.mkdir(parents=True)
    replay.flush()
    state = replay.state()
    state["order"] = torch.from_numpy(state["order"].copy())
    run = {"replay": state, "loader": {"waiting": [[0, list(waiting)]]}}
    run["replay"]["tails"] = [
        {key: torch.from_numpy(value.copy()) for key, value in tail.items()}
        for tail in state["tails"]
    ]
    torch.save(run, folder / "run.pt")
    torch.save({"weight": torch.zeros(9)}, folder / "learner.pt")
    return folder


@pytest.fixture
def written(image_counter):
    """Two streams of 70 steps and a checkpoint: two blocks each on disk."""
    replay = image_counter.make()
    image_counter.fill(replay, 70)
    checkpoint(image_counter, replay, "000000000140")
    return image_counter.folder.parent


@pytest.mark.parametrize("quick", [False, True])
def test_what_is_there_is_counted(written, quick):
    report = inspect(written, quick)
    assert not report.problems
    text = "\n".join(report.lines)
    assert "2 streams, 2 files" in text
    assert "128 in 4 whole blocks" in text
    assert "20 begun, 18 ended" in text  # 7 records an episode, 64 records a stream
    assert "uncompressed 235: ratio" in text
    assert "steps 0 to 63 of the streams" in text
    assert "000000000140: 140 steps added, 140 can be sampled, 12 of them in the che" in text
    size = sum(path.stat().st_size for path in (written / "replay").iterdir())
    assert f"bytes        {size:,};" in text


def test_the_folder_of_the_replay_will_do(written):
    assert inspect(written / "replay").lines == inspect(written).lines[:-1]  # no checkpoint


def test_the_status_says_whether_all_is_whole(written, capsys):
    assert main([str(written)]) == 0
    assert "integrity    good (checksums and decoding of every block)" in capsys.readouterr().out
    path = written / "replay" / "stream0001-000000000.blocks"
    offset, size = block(path, 1)
    flip(path, offset + size - 1)
    assert main([str(written), "--quick"]) == 1
    out = capsys.readouterr().out
    assert f"DAMAGED      {path}: block 1 is damaged: wrong checksum" in out
    assert "integrity" not in out
    assert main([str(written / "checkpoints")]) == 2
    assert "holds no replay" in capsys.readouterr().err


def test_nothing_is_written_and_no_torch_is_loaded(written):
    before = {path: path.stat().st_mtime_ns for path in written.rglob("*")}
    code = (
        "import sys; from replay.inspect import main; status = main(sys.argv[1:]);"
        "sys.exit(9 if 'torch' in sys.modules else status)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(written)], cwd=ROOT, check=False)
    assert done.returncode == 0
    assert before == {path: path.stat().st_mtime_ns for path in written.rglob("*")}


@pytest.mark.parametrize("at", [0, 4, 12])  # magic, number, length (too long)
def test_a_damaged_header_of_a_block_is_named(written, at):
    path = written / "replay" / "stream0000-000000000.blocks"
    data = bytearray(path.read_bytes())
    offset, _ = block(path, 0)
    data[offset + at + (2 if at == 12 else 0)] ^= 16
    path.write_bytes(data)
    assert f"{path}: block 0 is damaged: no block begins at" in inspect(written).problems[0]
    assert len(inspect(written / "replay").problems) == 1


def test_a_block_that_its_checksum_does_not_catch_is_found_by_decoding(written):
    path = written / "replay" / "stream0000-000000000.blocks"
    offset, size = block(path, 1)
    data = bytearray(path.read_bytes())
    start = offset + HEADER.size + 32 * 27 + 4  # behind the plain fields: the first zstd frame
    data[start : start + 4] = b"\0\0\0\0"
    payload = bytes(data[offset + HEADER.size : offset + size])
    data[offset : offset + HEADER.size] = HEADER.pack(MAGIC, 1, len(payload), zlib.crc32(payload))
    path.write_bytes(data)
    assert not inspect(written, quick=True).problems
    (problem,) = inspect(written).problems
    assert f"{path}: block 1 cannot be decoded" in problem


def test_an_unfinished_block_behind_the_checkpoint_is_no_damage(written):
    path = written / "replay" / "stream0000-000000000.blocks"
    _, size = block(path, 1)
    with path.open("ab") as file:
        file.write(HEADER.pack(MAGIC, 2, size, 0) + b"\0" * 30)
    report = inspect(written)
    assert not report.problems
    assert f"{HEADER.size + 30} bytes of a block at the end of 1 streams" in "".join(report.lines)


def test_an_unfinished_block_that_a_checkpoint_needs_is_damage(written):
    path = written / "replay" / "stream0000-000000000.blocks"
    offset, size = block(path, 1)
    os.truncate(path, offset + size - 3)
    (problem,) = inspect(written).problems
    assert problem == (f"{path}: checkpoint 000000000140 needs blocks 0 to 1, there are 0 to 0")
    assert not inspect(written / "replay").problems


def test_files_that_are_missing_are_named(counter):
    replay = counter.make(streams=1)
    counter.fill(replay, 4000)
    folder = counter.folder.parent
    checkpoint(counter, replay, "000000004000")
    replay.segments[0].path(64).unlink()
    (problem,) = inspect(folder).problems
    assert problem == f"{counter.folder}: blocks 64 to 95 of stream 0 are missing"
    replay.segments[0].path(32).unlink()
    replay.segments[0].path(0).unlink()
    (problem,) = inspect(folder).problems
    assert "checkpoint 000000004000 needs blocks 0 to 124, there are 96 to 124" in problem


def test_a_window_that_waits_is_needed_as_well(counter):
    replay = counter.make(streams=1, capacity=1500)
    counter.fill(replay, 4000)
    replay.collect([])
    checkpoint(counter, replay, "000000004000")
    assert not inspect(counter.folder.parent).problems
    checkpoint(counter, replay, "000000004001", waiting=[(0, 100)])
    (problem,) = inspect(counter.folder.parent).problems
    assert "000000004001 needs blocks 3 to 124, there are 64 to 124" in problem


def test_a_damaged_checkpoint_is_named(written):
    path = written / "checkpoints" / "000000000140" / "learner.pt"
    flip(path, path.read_bytes().index(b"\0" * 36) + 20)
    (problem,) = inspect(written).problems
    assert problem.startswith(f"{path}: damaged")
    path.unlink()
    (path.parent / "run.pt").unlink()
    (problem,) = inspect(written).problems
    assert problem == f"{path.parent / 'run.pt'}: is missing"


def test_a_file_under_another_name_is_named(written):
    path = written / "replay" / "stream0001-000000000.blocks"
    path.rename(path.with_name("stream0001-000000032.blocks"))
    problems = inspect(written).problems
    assert "was written as stream0001-000000000.blocks" in problems[0]


WRITER = """
import shutil, sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from conftest import Counter
from test_inspect import checkpoint

counter = Counter(Path(sys.argv[1]))
replay = counter.make(streams=2, capacity=3000)
for number in range(10**6):
    counter.fill(replay, 700)
    state = replay.state()
    folder = checkpoint(counter, replay, f"writing-{number}")
    folder.rename(folder.with_name(f"{number:012d}"))
    if number:
        old = folder.with_name(f"{number - 1:012d}")
        shutil.rmtree(old.rename(old.with_name("writing-old")))
    replay.collect([state])
    print(number, flush=True)
"""


def test_a_run_that_goes_on_looks_whole_at_every_moment(counter):
    """Reads race with appending, collecting and new checkpoints in another process."""
    paths = [str(Path(__file__).parent), str(ROOT)]
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(counter.folder), *paths], stdout=subprocess.PIPE
    )
    try:
        for _ in range(5):
            assert writer.stdout.readline()
        for _ in range(15):
            assert not inspect(counter.folder.parent).problems
    finally:
        writer.kill()
        writer.wait()
        writer.stdout.close()
    assert not inspect(counter.folder.parent).problems
