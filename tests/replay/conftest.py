"""A record that counts: everything in it follows from its stream and its number there."""

import numpy as np
import pytest

from replay.replay import Replay

EPISODE = 7  # records in an episode
FIELDS = {
    "vector": (np.dtype(np.float32), (2,)),
    "action": (np.dtype(np.int32), (1,)),
    "reward": (np.dtype(np.float32), ()),
    "is_first": (np.dtype(bool), ()),
    "is_last": (np.dtype(bool), ()),
    "is_terminal": (np.dtype(bool), ()),
    "age": (np.dtype(np.int32), ()),
    "episode": (np.dtype(np.int32), ()),
}
IMAGES = {"image": (np.dtype(np.uint8), (8, 8, 3)), "map": (np.dtype(np.uint8), (4, 4, 1))}


def records(streams, numbers, images):
    """The records with these numbers in their streams, as the arguments of `Replay.add`."""
    streams, numbers = np.asarray(streams), np.asarray(numbers)
    age = numbers % EPISODE
    record = {
        "vector": np.stack([streams, numbers], -1).astype(np.float32),
        "action": (numbers[..., None] % 5).astype(np.int32),
        "reward": (numbers / 8).astype(np.float32),
        "is_first": age == 0,
        "is_last": age == EPISODE - 1,
        "is_terminal": age == EPISODE - 1,
        "age": age.astype(np.int32),
        "episode": (numbers // EPISODE).astype(np.int32),
    }
    if images:
        base = (numbers * 3 + streams)[..., None, None, None]
        record["image"] = ((base + np.arange(192).reshape(8, 8, 3)) % 256).astype(np.uint8)
        record["map"] = ((base + np.arange(16).reshape(4, 4, 1)) % 256).astype(np.uint8)
    return record


class Counter:
    """Fills a replay with counting records and checks what comes out of it."""

    def __init__(self, folder, images=False):
        self.folder, self.images = folder, images
        self.fields = {**FIELDS, **(IMAGES if images else {})}

    def make(self, streams=2, capacity=10**6, ram_bytes=10**6, folder=None, **more):
        folder = folder or self.folder
        return Replay(folder, self.fields, streams, capacity, ram_bytes, **more)

    def add(self, replay, streams, states=None):
        numbers = [replay.count[stream] for stream in streams]
        replay.add(np.array(streams), records(streams, numbers, self.images), states)

    def fill(self, replay, ticks):
        for _ in range(ticks):
            self.add(replay, range(replay.streams))

    def check(self, replay, draw, batch=None):
        """Every window is exactly the steps that its position names; returns the batch."""
        batch = replay.read(draw) if batch is None else batch
        streams = np.array([stream for stream, _ in draw.positions])[:, None]
        starts = np.array([start for _, start in draw.positions])[:, None]
        numbers = starts + np.arange(draw.length)
        expected = records(np.broadcast_to(streams, numbers.shape), numbers, self.images)
        assert batch.keys() == expected.keys()
        for key, value in expected.items():
            assert batch[key].dtype == value.dtype, key
            np.testing.assert_array_equal(batch[key], value, err_msg=key)
        return batch


@pytest.fixture(scope="session")
def counter_class():
    return Counter


@pytest.fixture
def counter(tmp_path):
    return Counter(tmp_path / "replay")


@pytest.fixture
def image_counter(tmp_path):
    return Counter(tmp_path / "replay", images=True)
