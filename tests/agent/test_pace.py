"""How many rows and videos a run has by its age."""

import math
import time

import pytest

from agent.counters import MEDIA, ROW, Counters
from agent.pace import PICTURES, ROWS, between
from agent.ranks import Ranks


def written(every, full, seconds):
    now = count = 0
    while now < seconds:
        now += between(every, now, full)
        count += 1
    return count


def test_at_first_as_often_as_asked():
    assert written(10.0, ROWS, 3600) == 360
    assert written(600.0, PICTURES, 36_000) == 60


@pytest.mark.parametrize(("every", "full"), [(10.0, ROWS), (600.0, PICTURES)])
def test_a_month_has_little_more_than_a_day(every, full):
    month = 30 * 86400.0
    expected = full * (1 + math.log(month / (full * every)))
    assert written(every, full, month) == pytest.approx(expected, rel=0.01)
    assert expected == pytest.approx({ROWS: 42_500, PICTURES: 477}[full], rel=0.01)


def test_nothing_between_stays_so():
    assert between(0.0, 1e6, ROWS) == 0


def test_the_clock_of_a_run_follows_it(tiny, monkeypatch):
    class Learner:
        updates = 1

    counters = Counters(tiny("--checkpoint.every", "1e9"), Ranks(), Learner())
    now = time.monotonic()
    counters.last_row = counters.last_media = now
    due = {}
    for days in (0, 10):
        counters.wall_before = days * 86400.0
        due[days] = []
        for wait in (12.0, 90.0, 700.0, 9000.0):
            monkeypatch.setattr(time, "monotonic", lambda wait=wait: now + wait)
            due[days].append(counters.time_for())
    assert due[0] == [ROW, ROW, ROW | MEDIA, ROW | MEDIA]
    assert due[10] == [0, ROW, ROW, ROW | MEDIA]
