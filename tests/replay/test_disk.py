"""What survives a crash, a full disk and a return to a checkpoint."""

import errno
import json
import os
import pickle
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from replay.blocks import BLOCK, HEADER
from replay.replay import Replay


def segment_files(counter):
    return sorted(path.name for path in counter.folder.iterdir())


def batches(counter, replay, updates=5):
    """Later draws, with the records that are added between them."""
    out = []
    for update in range(updates):
        counter.fill(replay, 13)
        out.append(replay.read(replay.draw(8, 20, (0, 0, update))))
    return out


def same(left, right):
    for a, b in zip(left, right, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            np.testing.assert_array_equal(a[key], b[key])


@pytest.mark.parametrize("extra", [0, 5, 40, 3000])
def test_restore_rolls_back_and_later_draws_are_identical(image_counter, extra):
    replay = image_counter.make(capacity=500)
    image_counter.fill(replay, 400)
    replay.draw(8, 20, (9, 9, 9))
    replay.flush()
    state = pickle.loads(pickle.dumps(replay.state()))
    length, size = len(replay), replay.bytes
    for _ in range(extra):
        image_counter.add(replay, [0])
    replay.collect([state])
    replay.close()

    resumed = image_counter.make(capacity=500)
    resumed.restore(state)
    assert (len(resumed), resumed.added, resumed.bytes) == (length, 800, size)
    first = batches(image_counter, resumed)
    image_counter.check(resumed, resumed.draw(64, 30, (0, 0, 99)))
    resumed.close()

    again = image_counter.make(capacity=500)
    again.restore(state)
    same(first, batches(image_counter, again))


def test_rollback_deletes_the_files_of_later_segments(counter):
    replay = counter.make(streams=1)
    counter.fill(replay, 1000)
    state = replay.state()
    counter.fill(replay, 2000)
    assert len(segment_files(counter)) == 3
    replay.restore(state)
    assert segment_files(counter) == ["stream0000-000000000.blocks"]
    assert not replay.cache  # what it held was rolled back as well
    counter.fill(replay, 2000)
    counter.check(replay, replay.draw(64, 100, (0, 0, 0)))
    assert replay.bytes == sum(path.stat().st_size for path in counter.folder.iterdir())


def test_disk_usage_levels_off(counter):
    replay = counter.make(streams=2, capacity=2048)
    sizes = []
    for _ in range(20):
        counter.fill(replay, 1024)
        replay.collect([replay.state()])
        sizes.append(replay.bytes)
        assert replay.bytes == sum(path.stat().st_size for path in counter.folder.iterdir())
    # Capacity, and for each stream at most one segment that is partly evicted.
    assert max(sizes) < (2048 + 2 * 1024) * 27 * 1.1
    assert len(set(sizes[10:])) == 1


def test_collect_keeps_what_a_kept_state_or_a_waiting_draw_refers_to(counter):
    replay = counter.make(streams=1, capacity=1000, ram_bytes=0)
    counter.fill(replay, 1000)
    state, draw = replay.state(), replay.draw(4, 20, (0, 0, 0))
    counter.fill(replay, 5000)
    replay.collect([state])
    assert segment_files(counter)[0] == "stream0000-000000000.blocks"
    replay.collect([], draw.positions)
    assert segment_files(counter)[0] == "stream0000-000000000.blocks"
    counter.check(replay, draw)
    replay.collect([])
    assert segment_files(counter)[0] == "stream0000-000000128.blocks"
    with pytest.raises(ValueError, match="block 0 of stream 0 is not there, only 128 to 186"):
        replay.read(replay.locate([(0, 0)], 20))


def test_windows_from_before_the_live_range_can_be_read_after_restore(counter):
    replay = counter.make(streams=1, capacity=1000)
    counter.fill(replay, 1000)
    waiting = replay.draw(4, 20, (0, 0, 0)).positions
    counter.fill(replay, 3000)
    replay.collect([], waiting)
    state = replay.state()
    resumed = counter.make(streams=1, capacity=1000)
    resumed.restore(state)
    counter.check(resumed, resumed.locate(waiting, 20))


def test_a_stream_without_live_blocks_is_restored(counter):
    replay = counter.make(streams=2, capacity=300)
    for _ in range(64):
        counter.add(replay, [0])
    for _ in range(1500):
        counter.add(replay, [1])
    replay.collect([])
    state = replay.state()
    resumed = counter.make(streams=2, capacity=300)
    resumed.restore(state)
    assert resumed.first == [2, 38]
    for _ in range(64):
        counter.add(resumed, [0])
    counter.check(resumed, resumed.draw(32, 20, (0, 0, 0)))


def test_a_new_run_in_the_folder_of_an_older_one_starts_from_nothing(counter):
    counter.fill(counter.make(streams=1), 3000)
    replay = counter.make(streams=1)
    assert len(replay) == 0
    counter.fill(replay, 40)
    assert segment_files(counter) == ["stream0000-000000000.blocks"]
    counter.check(replay, replay.draw(8, 20, (0, 0, 0)))


WRITER = """
import pickle, sys
from pathlib import Path
import numpy as np
from replay.replay import Replay

folder = Path(sys.argv[1])
fields = {"number": (np.dtype(np.int64), ()), "image": (np.dtype(np.uint8), (64, 64, 3))}
replay = Replay(folder / "replay", fields, 1, 10**6, 0)
noise = np.random.default_rng(0).integers(0, 256, (1, 64, 64, 3), dtype=np.uint8)
while True:
    replay.add([0], {"number": np.array([replay.added]), "image": noise})
    if replay.added == 100:
        replay.flush()
        (folder / "state").write_bytes(pickle.dumps(replay.state()))
        print("saved", flush=True)
"""


def test_a_killed_writer_leaves_a_replay_that_opens(tmp_path):
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert writer.stdout.readline() == b"saved\n"
    time.sleep(0.3)
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    fields = {"number": (np.dtype(np.int64), ()), "image": (np.dtype(np.uint8), (64, 64, 3))}
    replay = Replay(tmp_path / "replay", fields, 1, 10**6, 0)
    replay.restore(pickle.loads((tmp_path / "state").read_bytes()))
    assert len(replay) == 100
    number = replay.read(replay.locate([(0, 0)], 100))["number"]
    assert number.tolist() == [list(range(100))]


@pytest.mark.parametrize("cut", [1, HEADER.size - 1, HEADER.size + 1, 800])
def test_a_torn_last_block_is_dropped(counter, cut):
    replay = counter.make(streams=1)
    counter.fill(replay, 64)
    state = replay.state()
    whole = replay.bytes
    counter.fill(replay, 32)
    replay.close()
    path = replay.segments[0].path(0)
    os.truncate(path, whole + cut)
    resumed = counter.make(streams=1)
    resumed.restore(state)
    assert path.stat().st_size == whole
    counter.fill(resumed, 50)
    counter.check(resumed, resumed.draw(16, 60, (0, 0, 0)))


@pytest.mark.parametrize("written", [0, 1, 500])
@pytest.mark.parametrize("ticks", [31, 63])
def test_a_full_disk_says_so_and_keeps_what_was_good(counter, monkeypatch, written, ticks):
    replay = counter.make(streams=1, ram_bytes=0)
    counter.fill(replay, ticks)
    size, write = replay.bytes, os.write
    calls = []

    def full(descriptor, data):
        calls.append(len(data))
        if written and len(calls) == 1:
            return write(descriptor, data[:written])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match=r"disk full: the replay in .* needs 864 more") as caught:
            counter.fill(replay, 1)
    assert caught.value.errno == errno.ENOSPC
    assert "with a lower --replay.capacity" in str(caught.value)
    assert replay.added == ticks
    # A file that would hold nothing is gone.
    assert [path.stat().st_size for path in counter.folder.iterdir()] == [size][: bool(size)]
    counter.check(replay, replay.draw(8, 20, (0, 0, 0)))

    resumed = counter.make(streams=1)
    resumed.restore(replay.state())
    for after in (replay, resumed):
        after.restore(replay.state())
        counter.fill(after, 50)
        counter.check(after, after.draw(8, 20, (0, 0, 0)))


def test_missing_blocks_are_named_before_anything_is_deleted(counter):
    replay = counter.make(streams=1)
    counter.fill(replay, 3000)
    state = replay.state()
    replay.segments[0].path(32).unlink()
    before = segment_files(counter)
    with pytest.raises(ValueError, match="should hold blocks 0 to 92, but 64 to 92 are there"):
        counter.make(streams=1).restore(state)
    assert segment_files(counter) == before


def damage(replay, stream, block):
    path, offset, size = replay.segments[stream].place(block)
    content = bytearray(path.read_bytes())
    content[offset + size - 1] ^= 1
    path.write_bytes(content)


def test_a_damaged_block_is_named_when_it_is_read(counter):
    replay = counter.make(streams=1, ram_bytes=0)
    counter.fill(replay, 200)
    damage(replay, 0, 2)
    replay.read(replay.locate([(0, 0)], 64))
    with pytest.raises(ValueError, match=r"stream0000-000000000\.blocks: block 2 is damaged"):
        replay.read(replay.locate([(0, 60)], 10))


def needs(draw, stream, block):
    """The rows of a draw that lie in a block."""
    return [
        row
        for row, (s, start) in enumerate(draw.positions)
        if s == stream and BLOCK * block - draw.length < start < BLOCK * (block + 1)
    ]


def test_rows_with_a_damaged_block_are_drawn_again_and_the_same_whenever_they_are_read(
    counter, caplog
):
    replay = counter.make(ram_bytes=0)
    counter.fill(replay, 200)
    state = replay.state()
    damage(replay, 1, 2)
    first = replay.draw(32, 20, (0, 0, 0))
    before, hit = list(first.positions), needs(first, 1, 2)
    assert any(row < 16 for row in hit)  # a fresh window too
    counter.check(replay, first)
    other = [row for row in range(32) if first.positions[row] != before[row]]
    assert other == hit
    assert not needs(first, 1, 2)
    assert replay.stats()["damaged"] == 1
    (warning,) = caplog.messages
    assert "stream0001-000000000.blocks: block 2 is damaged" in warning
    damage(replay, 1, 2)  # back to what it was: not looked at again, so what is drawn is settled
    late = replay.draw(64, 20, (0, 0, 1), online=False)
    assert needs(late, 1, 2)
    replay.read(late)
    assert not needs(late, 1, 2)
    damage(replay, 1, 2)

    replay = counter.make(ram_bytes=0)
    replay.restore(state)
    again = replay.draw(32, 20, (0, 0, 0))
    counter.fill(replay, 300)  # while it waits
    counter.check(replay, again)
    assert again.positions == first.positions


@pytest.mark.parametrize("states", [{}, {"state_bytes": 8, "state_every": 4}])
def test_a_replay_with_nothing_but_damage_gives_up(counter, monkeypatch, states):
    replay = counter.make(streams=1, ram_bytes=0, **states)
    counter.fill(replay, 128)
    for block in range(4):
        damage(replay, 0, block)
    replay.cache.clear()
    with pytest.raises(ValueError, match=r"block \d is damaged"):
        replay.read(replay.draw(4, 20, (0, 0, 0)))
    assert replay.stats()["damaged"] == 4
    replay.cache.damaged.clear()
    monkeypatch.setattr("replay.cache.DAMAGED_LIMIT", 3)
    with pytest.raises(ValueError, match="more than 3 blocks of the replay are damaged"):
        replay.read(replay.draw(4, 20, (0, 0, 0)))


def test_a_sector_that_cannot_be_read_is_damage(counter, monkeypatch):
    replay = counter.make(ram_bytes=0)
    counter.fill(replay, 200)
    read, calls = os.pread, []

    def bad(*args):
        calls.append(args)
        if len(calls) == 1:
            raise OSError(errno.EIO, "Input/output error")
        return read(*args)

    monkeypatch.setattr(os, "pread", bad)
    counter.check(replay, replay.draw(4, 20, (0, 0, 0)))
    assert replay.stats()["damaged"] == 1


def test_a_header_that_cannot_be_read_is_named(counter):
    replay = counter.make(streams=1)
    counter.fill(replay, 64)
    path = replay.segments[0].path(0)
    path.write_bytes(b"\x10\0\0\0not json" + path.read_bytes()[12:])
    with pytest.raises(ValueError, match="its header cannot be read"):
        replay.restore(replay.state())


def test_other_fields_are_named(image_counter):
    replay = image_counter.make()
    image_counter.fill(replay, 100)
    state = replay.state()
    fields = image_counter.fields
    image_counter.fields = {**fields, "image": (np.dtype(np.uint8), (9, 8, 3))}
    del image_counter.fields["map"]
    with pytest.raises(ValueError, match="other fields") as caught:
        image_counter.make().restore(state)
    lines = str(caught.value).splitlines()[1:3]
    assert lines == [
        "  image: |u1 [8, 8, 3] there, |u1 [9, 8, 3] in this run",
        "  map: |u1 [4, 4, 1] there, absent in this run",
    ]
    # The files say it too, when the state does not.
    state["fields"] = image_counter.make().layout.describe()
    with pytest.raises(ValueError, match=r"stream0000-000000000.blocks holds other fields"):
        image_counter.make().restore(state)


def test_the_order_of_the_fields_does_not_matter(image_counter):
    replay = image_counter.make()
    image_counter.fill(replay, 100)
    state = replay.state()
    image_counter.fields = dict(reversed(image_counter.fields.items()))
    resumed = image_counter.make()
    resumed.restore(state)
    image_counter.check(resumed, resumed.draw(16, 20, (0, 0, 0)))


def test_another_number_of_streams_is_refused(counter):
    replay = counter.make(streams=2)
    counter.fill(replay, 10)
    with pytest.raises(ValueError, match="recorded with 2 environments, this run has 3"):
        counter.make(streams=3).restore(replay.state())


def rewrite_header(path, change):
    content = path.read_bytes()
    length = int.from_bytes(content[:4], "little")
    header = json.loads(content[4 : 4 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(4, "little") + text + content[4 + length :])


def test_a_header_may_hold_more_than_this_version_knows(counter):
    replay = counter.make(streams=1)
    counter.fill(replay, 100)
    state = replay.state()
    rewrite_header(replay.segments[0].path(0), lambda header: header.update(snapshots=[1, 2]))
    replay.restore(state)
    counter.check(replay, replay.draw(16, 20, (0, 0, 0)))


def test_a_later_format_is_refused(counter):
    replay = counter.make(streams=1)
    counter.fill(replay, 100)
    rewrite_header(replay.segments[0].path(0), lambda header: header.update(version=2))
    with pytest.raises(ValueError, match=r"has format 2 .* reads format 1"):
        replay.restore(replay.state())


def test_a_block_is_written_every_32_steps(counter):
    replay = counter.make(streams=1)
    counter.fill(replay, 31)
    assert (replay.bytes, segment_files(counter)) == (0, [])
    counter.fill(replay, 1)
    path = replay.segments[0].path(0)
    assert path.stat().st_size == replay.bytes > BLOCK * 27
