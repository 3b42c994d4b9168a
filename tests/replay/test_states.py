"""States beside the blocks: starts, versions, what a checkpoint keeps, and what damage means."""

import errno
import itertools
import os
import pickle
from array import array

import numpy as np
import pytest

from replay.blocks import Segments
from replay.states import States, slot_bytes

SIZE, EVERY = 24, 4  # bytes; an episode of 7 records has starts at ages 0 and 4


def state_of(stream, step, update):
    return np.arange(6, dtype=np.int32) * 1000 + stream * 100 + step + 7 * update


def packed(*whose):
    return state_of(*whose).tobytes()


def begun(path, steps=8):
    """States of a stream whose episode has no end, all of them written by update 0."""
    states = States(path, SIZE, EVERY, 1)
    for step in range(0, steps * EVERY, EVERY):
        states.begin(0, step, step, (0, packed(0, step, 0)) if step else None)
    return states


def add(counter, replay, ticks, update=0):
    """Records of all streams, with the states of their starts."""
    for _ in range(ticks):
        states = {
            stream: (update, packed(stream, step, update))
            for stream, step in enumerate(replay.count)
            if step % 7 == 4
        }
        counter.add(replay, range(replay.streams), states)


@pytest.fixture
def made(counter):
    """A function that makes a replay with states."""
    return lambda **more: counter.make(state_bytes=SIZE, state_every=EVERY, **more)


def test_a_state_comes_back_bit_for_bit_with_its_update_in_its_newest_version(tmp_path):
    states = begun(tmp_path / "states")
    assert states.get(0, 8) == (0, packed(0, 8, 0))
    states.put(0, 8, 5, packed(0, 8, 5))
    assert states.get(0, 8) == (5, packed(0, 8, 5))
    assert states.get(0, 12) == (0, packed(0, 12, 0))


def test_only_starts_of_age_above_0_have_a_state(tmp_path):
    states = begun(tmp_path / "states")
    for step in (0, 5, 1000):
        states.put(0, step, 1, packed(0, step, 1))
        assert states.get(0, step) is None
    assert states.live == 7
    assert states.bytes == 7 * slot_bytes(SIZE)
    assert states.damaged == 0


def test_windows_start_at_ages_that_are_multiples_and_all_starts_are_drawn(counter, made):
    replay = made(online=False)
    add(counter, replay, 96)
    draw = replay.draw(400, 10, (0,))
    counter.check(replay, draw)
    expected = {(s, n) for s in (0, 1) for n in range(96 - 9) if n % 7 in (0, 4)}
    assert set(draw.positions) == expected
    for stream, step in draw.positions:
        state = (0, packed(stream, step, 0)) if step % 7 else None
        assert replay.states.get(stream, step) == state


def test_steps_count_equally_however_long_their_episodes_are(counter, made):
    replay = made(online=False)
    record = {key: np.zeros((2, *shape), dtype) for key, (dtype, shape) in counter.fields.items()}
    for step in range(640):  # episodes of 8 steps beside one of 640, with a start every 4 and 64
        age = [step % 8, step]
        replay.add(np.arange(2), {**record, "age": np.array(age, np.int32)})
    replay.states.steps[1] = array("q", range(0, 640, 64))
    replay.states.slots[1] = array("i", [-1] * 10)
    streams, starts = np.array(replay.draw(8000, 8, (0,)).positions).T
    assert 3800 < (streams == 0).sum() < 4200
    counts = np.bincount(starts[streams == 1] // 64)
    assert (np.abs(counts[:-1] - 400) < 80).all()  # four standard deviations
    assert 300 < counts[-1] < 400  # of its 64 steps the last 7 begin no window


@pytest.mark.parametrize("at_once", [True, False])
def test_fresh_windows_leave_no_gap(counter, made, at_once):
    replay, starts = made(streams=1), []
    for update in range(40):
        add(counter, replay, 5)
        if replay.ready(8) and (update == 39 or not at_once):
            most = 100 if at_once else 2
            fresh = len(replay.fresh_windows(0, 8)) + len(replay.fresh)
            starts += [n for _, n in replay.draw(most, 8, (update,)).positions[:fresh]]
    assert len(starts) > 20
    assert starts[0] == 0
    assert all(start % 7 in (0, 4) for start in starts)
    assert all(0 < after - before <= 8 for before, after in itertools.pairwise(starts))
    assert starts[-1] + 8 > 190


def test_states_count_in_the_byte_budget_and_go_with_their_blocks(counter, made, tmp_path):
    free = counter.make(folder=tmp_path / "free", disk_bytes=20_000)
    replay = made(disk_bytes=20_000)
    counter.fill(free, 600)
    add(counter, replay, 600)
    assert len(replay) < len(free) < 1200
    assert 20_000 - 2000 < replay.live_bytes + replay.states.bytes <= 20_000
    for stream, first in enumerate(replay.first):
        assert first > 0
        held = [n for n in range(32 * first, 600) if n % 7 == 4]
        assert [n for n in replay.states.steps[stream] if n % 7 == 4] == held
        assert replay.states.get(stream, 4) is None
    assert replay.states.live == sum(n % 7 == 4 for f in replay.first for n in range(32 * f, 600))


def test_a_restored_replay_has_the_states_of_its_checkpoint(counter, made):
    """Whatever is written, evicted and written over after it, with two checkpoints kept."""
    replay, kept, random = made(capacity=400), [], np.random.default_rng(0)

    def work(replay, update):
        add(counter, replay, int(random.integers(1, 30)), update)
        for _ in range(10):
            stream = int(random.integers(2))
            step = int(random.choice(replay.states.steps[stream]))
            replay.states.put(stream, step, update, packed(stream, step, update))

    def everything(replay):
        steps = replay.states.steps
        return {(s, n): replay.states.get(s, n) for s in range(2) for n in steps[s]}

    for update in range(60):
        work(replay, update)
        if update % 4 == 0:
            replay.flush()
            kept = [*kept[-1:], (pickle.dumps(replay.state()), everything(replay))]
            replay.collect([pickle.loads(state) for state, _ in kept])
    size = (counter.folder / "states").stat().st_size
    assert size <= 3 * slot_bytes(SIZE) * max(len(found) for _, found in kept)
    replay.close()
    for state, expected in reversed(kept):  # the older one also after work on the newer one
        replay = made(capacity=400)
        replay.restore(pickle.loads(state))
        assert everything(replay) == expected
        assert None not in [found for (_, n), found in expected.items() if n % 7]
        assert replay.states.live == sum(found is not None for found in expected.values())
        for update in range(100, 105):
            work(replay, update)
        replay.close()


def test_slots_are_used_again(tmp_path):
    states = begun(tmp_path / "states")
    for update in range(100):
        states.put(0, 8, update, packed(0, 8, update))
    assert states.used <= 8


def test_a_state_is_good_until_it_is_collected(tmp_path):
    states = begun(tmp_path / "states")
    for update in range(1, 4):
        states.put(0, 8, update, packed(0, 8, update))
    kept = states.state()
    for update in range(4, 20):
        states.put(0, 8, update, packed(0, 8, update))
        states.put(0, 12, update, packed(0, 12, update))
    states.restore(kept)
    assert states.get(0, 8) == (3, packed(0, 8, 3))
    assert states.get(0, 12) == (0, packed(0, 12, 0))


def damage(path, how):
    data = bytearray(path.read_bytes())
    if how == "bits":
        data[slot_bytes(SIZE) + 40] ^= 1
    elif how == "torn":
        del data[slot_bytes(SIZE) + 40 :]
    elif how == "swapped":
        size = slot_bytes(SIZE)
        data[size : 2 * size] = data[:size]
    else:
        data.clear()
    path.write_bytes(data)


@pytest.mark.parametrize("how", ["bits", "torn", "swapped", "gone"])
def test_a_damaged_state_is_none_and_counted(tmp_path, how):
    states = begun(tmp_path / "states")
    damage(tmp_path / "states", how)
    assert states.get(0, 8) is None
    assert states.stats()["states_damaged"] == 1
    if how in ("bits", "swapped"):
        assert states.get(0, 12) == (0, packed(0, 12, 0))
    states.put(0, 8, 1, packed(0, 8, 1))
    assert states.get(0, 8) == (1, packed(0, 8, 1))


def test_a_full_disk_says_so_and_leaves_the_old_version(tmp_path, monkeypatch):
    states, write = begun(tmp_path / "states"), os.pwrite

    def full(file, data, at):
        if len(data) < slot_bytes(SIZE):
            raise OSError(errno.ENOSPC, "full")
        return write(file, data[:10], at)

    states.put(0, 12, 1, packed(0, 12, 1))
    free = list(states.free)
    assert free
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="56 more bytes; free space"):
        states.put(0, 8, 1, packed(0, 8, 1))
    assert states.get(0, 8) == (0, packed(0, 8, 0))
    assert states.free == free


def test_starts_of_a_source_are_found_and_its_states_are_ones_own(counter, made, tmp_path):
    counter.fill(other := counter.make(folder=tmp_path / "other"), 100)
    other.close()
    before = sorted(path.name for path in (tmp_path / "other").iterdir())
    replay = made(streams=1, source=tmp_path / "other")
    for stream in (1, 2):
        assert list(replay.states.steps[stream]) == [n for n in range(96) if n % 7 in (0, 4)]
    assert {n % 7 for _, n in replay.draw(50, 10, (0,)).positions} == {0, 4}
    assert replay.states.get(1, 11) is None
    replay.states.put(1, 11, 3, packed(1, 11, 3))
    assert replay.states.get(1, 11) == (3, packed(1, 11, 3))
    assert sorted(path.name for path in (tmp_path / "other").iterdir()) == before


def test_a_replay_that_will_be_restored_reads_no_starts_of_its_source(
    counter, made, tmp_path, monkeypatch
):
    counter.fill(other := counter.make(folder=tmp_path / "other"), 100)
    other.close()
    state = made(streams=1, source=tmp_path / "other").state()
    monkeypatch.setattr(Segments, "read_plain", None)
    replay = made(streams=1, source=tmp_path / "other", resumed=True)
    replay.restore(state)
    assert list(replay.states.steps[1]) == [n for n in range(96) if n % 7 in (0, 4)]


def test_without_states_nothing_is_kept(counter):
    replay = counter.make()
    counter.fill(replay, 100)
    assert replay.states is None
    assert replay.state()["states"] == []
    assert "states" not in replay.stats()
    assert not (counter.folder / "states").exists()
