"""Another run's replay beside one's own: read, never changed, and never counted."""

import fcntl
import hashlib
import os
import shutil

import numpy as np
import pytest

from replay.blocks import HEADER
from replay.inspect import inspect
from replay.source import find_replay


def stored(counter, tmp_path, steps=700, streams=2):
    """A run's folder whose replay holds `steps` steps of each of `streams`."""
    folder = tmp_path / "other"
    replay = counter.make(streams=streams, folder=folder / "replay")
    counter.fill(replay, steps)
    replay.close()
    return folder


def digest(folder):
    return {
        path: (path.stat().st_mtime_ns, hashlib.sha1(path.read_bytes()).hexdigest())
        for path in folder.rglob("*")
        if path.is_file()
    }


def check(counter, replay, draw):
    """Streams of a source count as the same stream of the replay they come from."""
    positions = draw.positions
    batch = replay.read(draw)
    own = [(s - replay.streams if s >= replay.streams else s, start) for s, start in positions]
    draw.positions = own
    counter.check(replay, draw, batch)
    draw.positions = positions


def test_what_is_stored_can_be_sampled_from_the_start(image_counter, tmp_path):
    folder = stored(image_counter, tmp_path)
    before = digest(folder)
    replay = image_counter.make(streams=1, ram_bytes=0, source=folder)
    assert (len(replay), replay.added) == (2 * 672, 0)  # 21 whole blocks of each stream
    assert replay.ready(672)
    assert not replay.ready(673)
    draw = replay.draw(64, 40, (0, 0, 0))
    assert {stream for stream, _ in draw.positions} == {1, 2}
    check(image_counter, replay, draw)
    replay.collect([replay.state()], draw.positions)
    replay.close()
    assert digest(folder) == before


def test_own_steps_are_drawn_beside_them_in_proportion(counter, tmp_path):
    replay = counter.make(streams=1, source=stored(counter, tmp_path))
    counter.fill(replay, 672)
    draw = replay.draw(9000, 10, (0, 0, 0), online=False)
    own = sum(stream == 0 for stream, _ in draw.positions)
    assert 2800 < own < 3200  # a third; three standard deviations are 134
    check(counter, replay, draw)


def test_capacity_and_budget_count_own_steps_only(counter, tmp_path):
    folder = stored(counter, tmp_path)
    replay = counter.make(streams=1, capacity=100, disk_bytes=4 * 32 * 27, source=folder)
    for _ in range(20):
        counter.fill(replay, 64)
        replay.collect([replay.state()])
    own = replay.added - 32 * replay.first[0]
    assert 68 < own <= 100
    assert len(replay) == 2 * 672 + own
    check(counter, replay, replay.draw(64, 20, (0, 0, 0)))


def test_fresh_windows_are_own_steps(counter, tmp_path):
    replay = counter.make(streams=1, source=stored(counter, tmp_path))
    counter.fill(replay, 25)
    assert replay.draw(8, 10, (0, 0, 0)).positions[:2] == [(0, 0), (0, 10)]
    assert not replay.fresh


def test_after_restore_the_same_is_drawn_although_the_source_has_grown(counter, tmp_path):
    folder = stored(counter, tmp_path)
    replay = counter.make(streams=1, source=folder)
    counter.fill(replay, 100)
    state = replay.state()
    drawn = replay.draw(64, 20, (0, 0, 0))
    replay.close()
    grown = counter.make(streams=3, folder=folder / "replay")
    counter.fill(grown, 2000)
    grown.close()
    resumed = counter.make(streams=1, source=folder)
    assert len(resumed) == 3 * 1984
    resumed.restore(state)
    again = resumed.draw(64, 20, (0, 0, 0))
    assert again.positions == drawn.positions
    check(counter, resumed, again)


def test_a_source_that_lost_steps_is_refused(counter, tmp_path):
    folder = stored(counter, tmp_path, steps=3000)
    state = counter.make(streams=1, source=folder).state()
    (folder / "replay" / "stream0000-000000000.blocks").unlink()
    with pytest.raises(ValueError, match=r"held blocks \[\[0, 93\], \[0, 93\]\] .* but \[\[32, "):
        counter.make(streams=1, source=folder).restore(state)
    (folder / "replay" / "stream0000-000000064.blocks").rename(tmp_path / "kept")
    (folder / "replay" / "stream0001-000000032.blocks").unlink()
    with pytest.raises(ValueError, match="blocks before 64 of stream 1 are missing or damaged"):
        counter.make(streams=1, source=folder)


def test_a_source_that_was_written_anew_is_refused(counter, tmp_path):
    folder = stored(counter, tmp_path)
    state = counter.make(streams=1, source=folder).state()
    shutil.rmtree(folder)
    other = counter.make(folder=folder / "replay")
    record = {key: np.zeros((2, *shape), dtype) for key, (dtype, shape) in counter.fields.items()}
    for _ in range(700):
        other.add(np.arange(2), record)
    other.close()
    replay = counter.make(streams=1, source=folder)
    with pytest.raises(ValueError, match="written anew since this run began: block 20 of stream 0"):
        replay.restore(state)
    state["source"] = [held[:2] for held in state["source"]]  # of an earlier version
    replay.restore(state)


@pytest.mark.parametrize("left", [0, 3, 100])  # bytes; a header has some 300
def test_a_file_that_ends_within_its_header_holds_nothing(counter, tmp_path, left):
    folder = stored(counter, tmp_path, streams=1, steps=2100)
    files = sorted((folder / "replay").iterdir())
    os.truncate(files[-1], left)
    assert len(counter.make(streams=1, source=folder)) == 2048
    report = inspect(folder)
    assert not report.problems
    assert "2,048 in 64 whole blocks" in report.lines[1]
    # In front of another it is a gap.
    os.truncate(files[0], left)
    with pytest.raises(ValueError, match="blocks before 32 of stream 0 are missing or damaged"):
        counter.make(streams=1, source=folder)


def test_a_length_that_is_wrong_is_no_unfinished_header(counter, tmp_path):
    folder = stored(counter, tmp_path, streams=1)
    path = folder / "replay" / "stream0000-000000000.blocks"
    data = bytearray(path.read_bytes())
    data[2] ^= 1  # 65,536 more
    path.write_bytes(data)
    with pytest.raises(ValueError, match="its header cannot be read"):
        counter.make(streams=1, source=folder)
    assert "its header cannot be read" in inspect(folder).problems[0]


def test_an_unfinished_block_at_the_end_is_left_out(counter, tmp_path):
    folder = stored(counter, tmp_path, streams=1)
    path = folder / "replay" / "stream0000-000000000.blocks"
    path.write_bytes(path.read_bytes()[:-10])
    before = digest(folder)
    assert len(counter.make(streams=1, source=folder)) == 672 - 32
    assert digest(folder) == before


def test_other_fields_are_refused_by_name(image_counter, tmp_path):
    folder = stored(image_counter, tmp_path)
    image_counter.fields = {**image_counter.fields, "image": (np.dtype(np.uint8), (9, 8, 3))}
    with pytest.raises(ValueError, match=r"image: \|u1 \[8, 8, 3\] there, \|u1 \[9, 8, 3\] in th"):
        image_counter.make(source=folder)


def test_a_run_that_writes_there_is_refused_and_readers_may_share(counter, tmp_path):
    folder = stored(counter, tmp_path)
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="a run is writing to it"):
            counter.make(source=folder)
        fcntl.flock(file, fcntl.LOCK_UN)
        one = counter.make(source=folder)
        two = counter.make(source=folder / "replay", folder=tmp_path / "two")
        for replay in (one, two):
            with pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            replay.close()
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_damaged_block_of_the_source_is_named_when_it_is_read(counter, tmp_path):
    folder = stored(counter, tmp_path, streams=1)
    path = folder / "replay" / "stream0000-000000000.blocks"
    data = bytearray(path.read_bytes())
    data[data.index(b"BLK1") + HEADER.size] ^= 1
    path.write_bytes(data)
    replay = counter.make(streams=1, ram_bytes=0, source=folder)
    with pytest.raises(ValueError, match=f"{path}: block 0 is damaged"):
        replay.read(replay.locate([(1, 0)], 20))


def test_a_folder_without_a_replay_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no replay: name the folder of a run"):
        find_replay(tmp_path)
