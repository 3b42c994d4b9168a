"""The projected size of a run against the free disk."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from replay.budget import bytes_per_step, fewest, fit_capacity

FIELDS = {
    "image": (np.dtype(np.uint8), (64, 64, 3)),
    "reward": (np.dtype(np.float32), ()),
    "is_first": (np.dtype(bool), ()),
}
VECTOR = {"vector": (np.dtype(np.float32), (24,)), "reward": (np.dtype(np.float32), ())}
LEAST, EACH = 10_000, 100


@pytest.fixture
def disk(monkeypatch):
    """A function that sets the free bytes of every disk."""

    def set_free(free):
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))

    return set_free


def test_images_count_as_compressed_and_the_rest_as_it_is():
    assert bytes_per_step(FIELDS) == pytest.approx(12288 / 3.4 + 5)
    assert bytes_per_step(VECTOR) == EACH == 100


def test_what_fits_is_left_as_it_is(disk, tmp_path):
    disk(1e12)
    capacity, line = fit_capacity(tmp_path, 10**7, False, 10**9, LEAST, bytes_per_step(FIELDS))
    assert capacity == 10_000_000
    assert "10,000,000 steps of 3,619 bytes are 36.2 GB; 950.0 GB of the disk" in line


def test_a_short_run_needs_only_its_own_steps(disk, tmp_path):
    disk(3e9)
    assert fit_capacity(tmp_path, 10**7, True, 100_000, LEAST, 3619)[0] == 10**7


def test_the_default_shrinks_to_what_fits(disk, tmp_path):
    disk(10e9)  # 2 GB stay free: 8 GB / 100 bytes
    capacity, line = fit_capacity(tmp_path, 10**8, False, 10**9, LEAST, EACH)
    assert capacity == 80_000_000
    assert line.endswith("the capacity is lowered to 80,000,000 steps")


def test_an_explicit_capacity_that_does_not_fit_is_refused(disk, tmp_path):
    disk(10e9)
    with pytest.raises(ValueError, match=r"free space, .*what fits: 80,000,000 steps"):
        fit_capacity(tmp_path, 10**8, True, 10**9, LEAST, EACH)


def test_a_full_disk_is_refused_even_by_default(disk, tmp_path):
    disk(1e9)
    with pytest.raises(ValueError, match=r"0\.0 GB of the disk"):
        fit_capacity(tmp_path, 10**8, False, 10**9, LEAST, EACH)


def test_less_than_the_least_is_refused_even_by_default(disk, tmp_path):
    disk(2e9 + 999_900)
    with pytest.raises(ValueError, match=r"what fits: 9,999 steps"):
        fit_capacity(tmp_path, 10**8, False, 10**9, LEAST, EACH)
    assert fit_capacity(tmp_path, 10**8, False, 10**9, 9999, EACH)[0] == 9999


def test_three_checkpoints_have_room(disk, tmp_path):
    disk(10e9)  # less 2 GB, and three times one
    assert fit_capacity(tmp_path, 10**8, False, 10**9, LEAST, EACH, 10**9)[0] == 50_000_000


def test_states_are_counted_twice_over_their_steps():
    assert bytes_per_step(VECTOR, 768, 16) == 100 + 3 * (32 + 768) / 16


@pytest.mark.parametrize(("length", "fill"), [(1, 1), (10, 302), (33, 1), (100, 700)])
@pytest.mark.parametrize("state_every", [0, 4])
def test_the_fewest_steps_are_enough_for_the_fill_and_then_always_hold_windows(
    counter, length, fill, state_every
):
    streams, filled, random = 4, False, np.random.default_rng(0)
    more = {"state_bytes": 8, "state_every": 4} if state_every else {}
    capacity = fewest(streams, length, fill, state_every)
    replay = counter.make(streams=streams, capacity=capacity, **more)
    for tick in range(3 * capacity):
        # First in step; later some wait, as those do that are reset.
        due = random.random(streams) < (1 if tick < capacity else 0.8)
        counter.add(replay, np.flatnonzero(due).tolist())
        everywhere = all(low < high for low, high in replay.starts(length))
        filled = filled or (len(replay) >= fill and everywhere)
        assert not filled or everywhere
        assert filled or tick < capacity
