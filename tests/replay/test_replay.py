"""Order, eviction and sampling."""

import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay.blocks import BLOCK, Slots
from replay.cache import OBJECTS


def test_a_window_counts_up_by_one_and_starts_again_only_at_is_first(counter):
    replay = counter.make()
    counter.fill(replay, 200)
    batch = replay.read(replay.draw(64, 20, (0, 0, 0)))
    age, first = batch["age"], batch["is_first"]
    assert batch["vector"].shape == (64, 20, 2)
    assert batch["reward"].flags.c_contiguous
    np.testing.assert_array_equal(age[:, 1:][~first[:, 1:]], (age[:, :-1] + 1)[~first[:, 1:]])
    assert (age[first] == 0).all()
    assert first.any(axis=1).all()  # episodes have 7 records, so windows cross episodes


@settings(max_examples=25, deadline=None)
@given(
    streams=st.integers(1, 4),
    capacity=st.integers(200, 700),
    length=st.integers(1, 50),
    images=st.booleans(),
    ram=st.sampled_from([0, 10**7]),
    seed=st.integers(0, 100),
)
def test_no_mix_of_old_and_new_through_three_wrap_arounds(
    counter_class, streams, capacity, length, images, ram, seed
):
    random = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        counter = counter_class(Path(folder) / "replay", images)
        replay = counter.make(streams, capacity, ram)
        while replay.added < 3 * capacity + 100:
            due = np.flatnonzero(random.random(streams) < 0.8)
            counter.add(replay, due.tolist())
            assert len(replay) <= capacity
            if replay.added > capacity:
                assert len(replay) > capacity - BLOCK
            if replay.added % 50 == 0 and replay.ready(length):
                draw = replay.draw(8, length, (seed, 0, replay.added))
                for stream, start in draw.positions:
                    assert start >= BLOCK * replay.first[stream]
                    assert start + length <= replay.count[stream]
                counter.check(replay, draw)
            if replay.added % 200 == 0:
                replay.collect([])


def test_the_block_that_was_finished_first_leaves_first(counter):
    replay = counter.make(streams=2, capacity=100)
    for _ in range(64):
        counter.add(replay, [1])  # two blocks of stream 1, then one of stream 0
    for _ in range(36):
        counter.add(replay, [0])
    assert (replay.first, len(replay)) == ([0, 0], 100)
    counter.add(replay, [0])
    assert (replay.first, len(replay)) == ([0, 1], 69)
    for _ in range(32):
        counter.add(replay, [1])
    assert (replay.first, len(replay)) == ([0, 2], 69)
    for _ in range(32):
        counter.add(replay, [1])
    assert (replay.first, len(replay)) == ([1, 2], 69)


def test_a_budget_of_bytes_also_evicts(counter):
    # Vector 8, action 4, reward 4, three flags, age 4, episode 4: 27 bytes a step.
    replay = counter.make(streams=1, disk_bytes=5 * 32 * 27)
    counter.fill(replay, 32 * 5 + 10)
    assert len(replay) == 170
    counter.fill(replay, 22)
    assert len(replay) == 160


def test_ready_asks_for_one_window(counter):
    replay = counter.make()
    assert not replay.ready(1)
    with pytest.raises(ValueError, match=r"no stream holds 10 .* \(the longest holds 0\)"):
        replay.draw(2, 10, (0, 0, 0))
    counter.fill(replay, 9)
    assert not replay.ready(10)
    counter.fill(replay, 1)
    assert replay.ready(10)
    assert replay.draw(4, 10, (0, 0, 0), online=False).positions[0][1] == 0


def test_every_start_is_drawn_equally_often(counter):
    replay = counter.make(streams=3)
    for stream, steps in enumerate([10, 40, 5]):
        for _ in range(steps):
            counter.add(replay, [stream])
    # Windows of 6: 5 starts in stream 0, 35 in stream 1, none in stream 2.
    draw = replay.draw(40_000, 6, (0, 0, 0), online=False)
    found, counts = np.unique(draw.positions, axis=0, return_counts=True)
    expected = [[0, start] for start in range(5)] + [[1, start] for start in range(35)]
    assert found.tolist() == expected
    chi_square = ((counts - 1000) ** 2 / 1000).sum()
    assert chi_square < 72  # 39 degrees of freedom: one seed in a thousand exceeds 72


def test_a_draw_follows_from_its_key_alone(counter):
    replay = counter.make(online=False)
    counter.fill(replay, 300)
    keys = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 0, 0, 0)]
    once = [replay.draw(8, 10, key).positions for key in keys]
    again = [replay.draw(8, 10, key).positions for key in reversed(keys)]
    assert once == again[::-1]
    assert len({tuple(positions) for positions in once}) == len(keys)


def test_fresh_windows_come_first_and_do_not_overlap(counter):
    replay = counter.make(streams=2)
    counter.fill(replay, 25)
    assert replay.draw(4, 10, (0, 0, 0)).positions[:2] == [(0, 0), (0, 10)]
    assert replay.draw(4, 10, (0, 0, 1)).positions[:2] == [(1, 0), (1, 10)]
    assert not replay.fresh
    counter.fill(replay, 5)
    assert replay.draw(4, 10, (0, 0, 2)).positions[:2] == [(0, 20), (1, 20)]


@pytest.mark.parametrize(("count", "most"), [(1, 0), (4, 2), (5, 2)])
def test_fresh_windows_are_at_most_half_of_a_batch(counter, count, most):
    replay = counter.make(streams=2)
    counter.fill(replay, 100)
    replay.draw(count, 10, (0, 0, 0))
    assert len(replay.fresh) == 20 - most


def test_fresh_windows_that_have_left_are_not_drawn(counter):
    replay = counter.make(streams=1, capacity=100)
    counter.fill(replay, 400)
    draw = replay.draw(8, 10, (0, 0, 0))
    assert draw.positions[:2] == [(0, 320), (0, 330)]  # ten blocks have left
    counter.check(replay, draw)


def test_fresh_windows_of_another_length_never_pass_the_write_head(counter):
    replay = counter.make(streams=1)
    counter.fill(replay, 40)
    replay.draw(2, 10, (0, 0, 0))  # takes the start 0; 10, 20 and 30 wait
    draw = replay.draw(8, 20, (0, 0, 1))
    assert draw.positions[:2] == [(0, 10), (0, 20)]
    assert replay.draw(8, 20, (0, 0, 2), online=True).positions[0][1] <= 20
    counter.check(replay, draw)


def test_the_queue_of_fresh_windows_is_bounded(counter):
    replay = counter.make(streams=1)
    counter.fill(replay, 1200)
    replay.draw(2, 1, (0, 0, 0))
    assert len(replay.fresh) == 999
    assert replay.fresh[0] == (0, 201)


def test_a_draw_survives_the_end_of_its_block(image_counter):
    replay = image_counter.make(ram_bytes=0)
    image_counter.fill(replay, 40)
    draw = replay.draw(16, 33, (0, 0, 0))
    image_counter.fill(replay, 500)
    image_counter.check(replay, draw)


@pytest.mark.parametrize("ram_bytes", [0, 10**7])
def test_images_come_back_as_they_were(image_counter, ram_bytes):
    replay = image_counter.make(ram_bytes=ram_bytes)
    image_counter.fill(replay, 150)
    batch = image_counter.check(replay, replay.draw(32, 40, (0, 0, 0)))
    assert batch["image"].shape == (32, 40, 8, 8, 3)
    assert batch["image"].flags.c_contiguous


def test_a_record_of_another_shape_is_refused(counter):
    replay = counter.make()
    record = {key: np.zeros((2, *shape), dtype) for key, (dtype, shape) in counter.fields.items()}
    with pytest.raises(AssertionError, match="vector"):
        replay.add(np.arange(2), {**record, "vector": np.zeros((2, 3))})


def test_reading_goes_on_while_another_thread_adds(image_counter):
    replay = image_counter.make(streams=3, capacity=900, ram_bytes=0)
    image_counter.fill(replay, 200)
    draws = [replay.draw(8, 40, (0, 0, update)) for update in range(60)]
    errors = []

    def read():
        try:
            for draw in draws:
                image_counter.check(replay, draw)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(400):
        image_counter.fill(replay, 1)
        replay.collect([], [pair for draw in draws for pair in draw.positions])
    for thread in threads:
        thread.join()
    assert not errors


def test_draws_are_whole_while_another_thread_adds_and_evicts(image_counter):
    replay = image_counter.make(capacity=400, ram_bytes=0)
    image_counter.fill(replay, 60)
    drawn, failures = [0, 0], []

    def draw(rank):
        try:
            while drawn[rank] < 300:
                drawn[rank] += 1
                # Fresh windows reach into the tails, where the other thread writes.
                image_counter.check(replay, replay.draw(4, 20, (0, rank, drawn[rank])))
                state = replay.state()
                for count, tail in zip(state["count"], state["tails"], strict=True):
                    assert len(tail["plain"]) == count % BLOCK * replay.layout.plain.itemsize
        except BaseException as error:
            failures.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # seconds: threads take turns within every line
    threads = [threading.Thread(target=draw, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        image_counter.fill(replay, 1)
    sys.setswitchinterval(interval)
    assert not failures


def test_the_index_takes_less_than_a_byte_per_step(counter):
    replay = counter.make(streams=4, ram_bytes=0)
    counter.fill(replay, 6400)
    assert 0.3 < replay.index_bytes / replay.added < 1


def test_decoded_blocks_stay_within_the_ram_budget(image_counter):
    block = 32 * (27 + 8 * 8 * 3 + 4 * 4)
    replay = image_counter.make(ram_bytes=5 * (block + OBJECTS))
    image_counter.fill(replay, 800)
    replay.read(replay.draw(32, 40, (0, 0, 0)))
    assert len(replay.cache) == 5
    assert replay.stats()["cache_gb"] == 5 * block / 1e9


def test_memory_of_a_block_is_used_again_once_no_view_is_left():
    slots = Slots((4, 2, 2, 3))
    array = slots.take()
    array[:] = 7
    view = array[1:3, 0]
    address = array.ctypes.data
    del array
    other = slots.take()
    other[:] = 1
    assert (view == 7).all()
    del view
    assert slots.take().ctypes.data == address


def test_a_block_in_the_cache_does_not_keep_what_it_was_decoded_from(image_counter):
    replay = image_counter.make(streams=1, ram_bytes=0)
    image_counter.fill(replay, 200)
    assert replay.block(0, 1)["plain"].base is None
