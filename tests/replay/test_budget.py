"""The projected size of a run against the free disk."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from replay.budget import bytes_per_step, fit_capacity

FIELDS = {
    "image": (np.dtype(np.uint8), (64, 64, 3)),
    "reward": (np.dtype(np.float32), ()),
    "is_first": (np.dtype(bool), ()),
}
VECTOR = {"vector": (np.dtype(np.float32), (24,)), "reward": (np.dtype(np.float32), ())}


@pytest.fixture
def disk(monkeypatch):
    """A function that sets the free bytes of every disk."""

    def set_free(free):
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))

    return set_free


def test_images_count_as_compressed_and_the_rest_as_it_is():
    assert bytes_per_step(FIELDS) == pytest.approx(12288 / 3.4 + 5)
    assert bytes_per_step(VECTOR) == 100


def test_what_fits_is_left_as_it_is(disk, tmp_path):
    disk(1e12)
    capacity, line = fit_capacity(tmp_path, FIELDS, 10_000_000, False, 10**9)
    assert capacity == 10_000_000
    assert "10,000,000 steps of 3,619 bytes are 36.2 GB; 950.0 GB of the disk" in line


def test_a_short_run_needs_only_its_own_steps(disk, tmp_path):
    disk(3e9)
    assert fit_capacity(tmp_path, FIELDS, 10_000_000, True, 100_000)[0] == 10_000_000


def test_the_default_shrinks_to_what_fits(disk, tmp_path):
    disk(10e9)  # 2 GB stay free: 8 GB / 100 bytes
    capacity, line = fit_capacity(tmp_path, VECTOR, 100_000_000, False, 10**9)
    assert capacity == 80_000_000
    assert line.endswith("the capacity is lowered to 80,000,000 steps")


def test_an_explicit_capacity_that_does_not_fit_is_refused(disk, tmp_path):
    disk(10e9)
    with pytest.raises(ValueError, match=r"free space, .*what fits: 80,000,000 steps"):
        fit_capacity(tmp_path, VECTOR, 100_000_000, True, 10**9)


def test_a_full_disk_is_refused_even_by_default(disk, tmp_path):
    disk(1e9)
    with pytest.raises(ValueError, match=r"0\.0 GB of the disk"):
        fit_capacity(tmp_path, VECTOR, 100_000_000, False, 10**9)


def test_states_are_counted_twice_over_their_steps(disk, tmp_path):
    disk(10e9)
    # A vector's step is 100 bytes; 2 * (32 + 768) / 16 = 100 more.
    capacity, line = fit_capacity(tmp_path, VECTOR, 100_000_000, False, 10**9, 768, 16)
    assert capacity == 40_000_000
    assert "of 200 bytes" in line
