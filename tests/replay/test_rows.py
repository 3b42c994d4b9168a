"""Rows that follow their streams: window after window, and a jump where a stream ends."""

import pickle
import threading
import time

import pytest
import torch

from replay.loader import Loader
from replay.rows import Rows

CPU = torch.device("cpu")


def draws(counter, replay, rows, updates, new=3):
    out = []
    for update in updates:
        counter.fill(replay, new)
        out.append(rows.draw(6, 10, (0, update)).positions)
    return out


def test_a_row_goes_on_where_it_ended_until_its_stream_ends(counter):
    replay = counter.make()
    counter.fill(replay, 100)
    rows, previous, jumps = Rows(replay), None, 0
    for update in range(60):
        counter.fill(replay, 3)
        draw = rows.draw(6, 10, (0, update))
        counter.check(replay, draw)
        for row, (stream, start) in enumerate(draw.positions):
            if previous is None or (stream, start - 10) == previous[row]:
                continue
            jumps += 1
            before, place = previous[row]
            assert place + 20 > replay.count[before]  # its next window was not whole
        previous = draw.positions
    assert 10 < jumps < 100


def test_places_to_jump_to_are_uniform_over_what_is_stored(counter):
    replay = counter.make(streams=1)
    counter.fill(replay, 40)
    rows = Rows(replay)
    starts = torch.tensor([rows.draw(300, 30, (0, 0)).positions for _ in range(5)])[:, :, 1]
    assert starts[0].bincount(minlength=11).min() > 10
    assert starts.unique().tolist() == list(range(11))
    assert replay.next_fresh == [0]  # none of them is a fresh window


def test_a_row_whose_window_was_evicted_jumps(counter):
    replay = counter.make(capacity=200, online=False)
    counter.fill(replay, 100)
    rows = Rows(replay)
    rows.draw(6, 10, (0, 0))
    rows.next = [(0, 0)] * 6
    counter.fill(replay, 200)
    draw = rows.draw(6, 10, (0, 1))
    counter.check(replay, draw)
    assert min(start for _, start in draw.positions) >= 32 * min(replay.first) > 0


@pytest.mark.parametrize("exact", [True, False])
def test_a_loader_draws_the_rows_in_order_and_resumes_them(counter, exact):
    replay = counter.make(capacity=400)
    counter.fill(replay, 300)
    rows, before, draw = Rows(replay), None, Rows.draw

    def slow(*args):  # a second thread would overtake every other draw
        time.sleep(0.01 * (args[2][-1] % 2))
        return draw(rows, *args)

    rows.draw = slow
    loader = Loader(replay, 6, 10, (0, 0), CPU, depth=2, exact=exact, rows=rows)
    for update in range(20):
        loader.next(update)
        for row, (stream, start) in enumerate(before or ()):
            assert loader.drawn[row] == (stream, start + 10) or start + 20 > 300
        before = loader.drawn
    state = pickle.loads(pickle.dumps(loader.state()))
    expected = [(loader.next(update), loader.drawn)[1] for update in range(20, 40)]
    loader.close()
    loader = Loader(replay, 6, 10, (0, 0), CPU, depth=2, exact=exact, rows=Rows(replay))
    loader.restore(state)
    assert [(loader.next(update), loader.drawn)[1] for update in range(20, 40)] == expected
    loader.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("replay_") and t.is_alive()]


def test_a_resumed_replay_gives_the_same_rows(counter):
    replay = counter.make(capacity=400)
    counter.fill(replay, 100)
    rows = Rows(replay)
    draws(counter, replay, rows, range(20))
    state = pickle.loads(pickle.dumps((replay.state(), rows.next)))
    expected = draws(counter, replay, rows, range(20, 60))
    replay.close()
    replay = counter.make(capacity=400)
    replay.restore(state[0])
    rows = Rows(replay)
    rows.next = state[1]
    assert draws(counter, replay, rows, range(20, 60)) == expected
