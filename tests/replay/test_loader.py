"""Batches ahead of time are the same as batches in time."""

import pickle
import threading
import time

import pytest
import torch

from replay.blocks import HEADER
from replay.loader import Loader

CPU = torch.device("cpu")


def run(counter, replay, loader, updates):
    """Batches of `updates`, a few records being added before each."""
    out = []
    for update in updates:
        counter.fill(replay, 3)
        out.append(loader.next(update))
    return out


def same(left, right):
    return all(torch.equal(a[key], b[key]) for a, b in zip(left, right, strict=True) for key in a)


def test_a_batch_is_tensors_of_consecutive_steps(image_counter):
    replay = image_counter.make()
    image_counter.fill(replay, 100)
    loader = Loader(replay, 4, 20, (0, 0), CPU)
    expected = replay.draw(4, 20, (0, 0, 0, 0), online=False)
    replay.online = False
    batch = loader.next(0)
    assert batch["image"].shape == (4, 20, 8, 8, 3)
    assert batch["image"].dtype == torch.uint8
    image_counter.check(replay, expected, {key: value.numpy() for key, value in batch.items()})
    loader.close()


def test_a_plan_is_made_from_the_rows_and_goes_to_no_device(image_counter):
    replay = image_counter.make()
    image_counter.fill(replay, 100)
    loader = Loader(replay, 4, 20, (0, 0), CPU, plan=lambda is_first, age: (is_first, age))
    batch = loader.next(0)
    is_first, age = batch["plan"]
    assert (is_first == batch["is_first"].numpy()).all()
    assert (age == batch["age"].numpy()).all()
    loader.close()


@pytest.mark.parametrize("depth", [1, 3])
def test_batches_do_not_depend_on_how_slow_the_threads_are(counter, tmp_path, depth, monkeypatch):
    runs = []
    for index, delay in enumerate((0.0, 0.01)):
        replay = counter.make(folder=tmp_path / str(index), capacity=400)
        counter.fill(replay, 100)
        loader = Loader(replay, 4, 20, (0, 0), CPU, depth=depth)
        read = replay.read
        monkeypatch.setattr(
            replay, "read", lambda draw, read=read, delay=delay: (time.sleep(delay), read(draw))[1]
        )
        runs.append(run(counter, replay, loader, range(20)))
        loader.close()
    assert same(*runs)


@pytest.mark.parametrize("depth", [1, 3])
def test_a_resumed_loader_gives_the_same_batches(counter, depth):
    replay = counter.make(capacity=400, ram_bytes=0)
    counter.fill(replay, 100)
    loader = Loader(replay, 4, 20, (0, 0), CPU, depth=depth)
    run(counter, replay, loader, range(10))
    state = pickle.loads(pickle.dumps((replay.state(), loader.state())))
    assert [update for update, _ in state[1]["waiting"]] == list(range(10, 10 + depth))
    assert len(Loader.positions(state[1])) == 4 * depth
    expected = run(counter, replay, loader, range(10, 90))
    replay.collect([state[0]], Loader.positions(state[1]))
    loader.close()
    replay.close()

    replay = counter.make(capacity=400, ram_bytes=0)
    replay.restore(state[0])
    loader = Loader(replay, 4, 20, (0, 0), CPU, depth=depth)
    loader.restore(state[1])
    assert same(expected, run(counter, replay, loader, range(10, 90)))
    loader.close()


@pytest.mark.parametrize("exact", [True, False])
def test_an_exact_loader_draws_in_next_and_another_in_its_threads(counter, monkeypatch, exact):
    replay = counter.make()
    counter.fill(replay, 100)
    loader = Loader(replay, 4, 20, (0, 0), CPU, depth=2, exact=exact)
    names, draw = [], replay.draw

    def watched(*args):
        names.append(threading.current_thread().name)
        return draw(*args)

    monkeypatch.setattr(replay, "draw", watched)
    batch = loader.next(0)
    waiting = loader.state()["waiting"]
    assert [update for update, _ in waiting] == [1, 2]
    assert len(names) == 3
    assert all(name.startswith("MainThread" if exact else "replay_") for name in names)
    # What waits can be read again from its positions, in either case.
    expected = [loader.next(1), loader.next(2)]
    loader.restore({"waiting": waiting})
    assert same(expected, [loader.next(1), loader.next(2)])
    assert batch["vector"].shape == (4, 20, 2)
    loader.close()


def test_ranks_and_seeds_draw_differently(counter):
    replay = counter.make(online=False)
    counter.fill(replay, 300)
    starts = set()
    for key in ((0, 0), (0, 1), (1, 0)):
        loader = Loader(replay, 8, 20, key, CPU)
        starts.add(tuple(loader.next(0)["vector"][:, 0, 1].tolist()))
        loader.close()
    assert len(starts) == 3


def test_what_goes_wrong_in_a_thread_is_raised_by_next(counter):
    replay = counter.make(ram_bytes=0)
    counter.fill(replay, 200)
    for segments in replay.segments:
        path = segments.path(0)
        path.write_bytes(b"\0" * path.stat().st_size)
    loader = Loader(replay, 4, 100, (0, 0), CPU)
    with pytest.raises(ValueError, match="is damaged"):
        loader.next(0)
    loader.close()


def test_what_waits_is_saved_as_it_was_read_around_damage(counter):
    replay = counter.make(ram_bytes=0, online=False)
    counter.fill(replay, 200)
    path, offset, _ = replay.segments[0].place(2)
    data = bytearray(path.read_bytes())
    data[offset + HEADER.size] ^= 1
    path.write_bytes(data)
    loader = Loader(replay, 32, 20, (0, 0), CPU, depth=2)
    loader.next(0)
    state = loader.state()
    waiting = Loader.positions(state)
    assert not [start for s, start in waiting if s == 0 and 64 - 20 < start < 96]
    expected = [loader.next(1), loader.next(2)]
    loader.restore(state)
    assert same(expected, [loader.next(1), loader.next(2)])
    loader.close()


def test_updates_are_asked_for_in_order(counter):
    replay = counter.make()
    counter.fill(replay, 100)
    loader = Loader(replay, 4, 20, (0, 0), CPU)
    loader.next(5)
    with pytest.raises(AssertionError, match="batch 6 is next, not 8"):
        loader.next(8)
    loader.close()


@pytest.mark.gpu
def test_a_batch_arrives_on_the_device_unchanged(image_counter):
    replay = image_counter.make(online=False)
    image_counter.fill(replay, 100)
    loader = Loader(replay, 4, 20, (0, 0), torch.device("cuda"))
    for update in range(20):
        draw = replay.draw(4, 20, (0, 0, 0, update))
        batch = loader.next(update)
        assert batch["image"].device.type == "cuda"
        image_counter.check(
            replay, draw, {key: value.cpu().numpy() for key, value in batch.items()}
        )
    loader.close()
