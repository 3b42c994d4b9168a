"""Diagnostic streams: every target by hand, and the same numbers however they are cut."""

import numpy as np
import pytest

from launch.streams import (
    DOWN,
    IGNORED,
    RIGHT,
    TASKS,
    UP,
    KCue,
    Parity,
    Repeat,
    Swaps,
    TMaze,
    make_task,
)

TASK_LIST = [make_task(name, facts=3, values=5, back=2) for name in TASKS]


def rng(seed=0):
    return np.random.default_rng(seed)


def joined(pieces):
    return [np.concatenate(parts, 1) for parts in zip(*pieces, strict=True)]


def test_tmaze_shows_the_cue_once_and_the_flag_where_the_turn_is_due():
    task = TMaze()
    pieces = task.walk(rng(), np.array([3, 1]), np.array([1, -1]), [(0, 5)])
    inputs, targets, is_first = next(pieces)
    y, clue, flag, noise = np.moveaxis(inputs, -1, 0)
    assert not y.any()
    assert clue.tolist() == [[1, 0, 0, 0, 0], [-1, 0, 0, 0, 0]]
    assert flag.tolist() == [[0, 0, 0, 1, 0], [0, 1, 0, 0, 0]]
    assert set(noise.flatten()) <= {-1, 0, 1}
    assert targets.tolist() == [
        [RIGHT, RIGHT, RIGHT, UP, IGNORED],
        [RIGHT, DOWN, IGNORED, IGNORED, IGNORED],
    ]
    assert is_first.tolist() == [[True, False, False, False, False]] * 2


def test_tmaze_trains_on_every_corridor_that_fits_and_tests_on_the_longest():
    batch = TMaze().train(rng(), 2000, 9)
    corridors = (batch.targets == RIGHT).sum(1)
    assert sorted(set(corridors)) == [1, 2, 3, 4, 5, 6, 7]
    assert batch.inputs.shape == (2000, 9, 4)
    inputs, targets, _ = joined(TMaze().test(rng(), 100, 9, 960))
    assert targets.shape == (100, 8)
    assert (targets[:, :7] == RIGHT).all()
    assert (targets[:, 7] == UP).sum() == (targets[:, 7] == DOWN).sum() == 50
    assert (inputs[:, 7, 2] == 1).all()


def test_tmaze_noise_is_uniform_and_drawn_at_every_step():
    inputs, _, _ = joined(TMaze().test(rng(), 100, 1001, 960))
    shares = [(inputs[..., 3] == value).mean() for value in (-1, 0, 1)]
    assert np.allclose(shares, 1 / 3, atol=0.01)
    assert abs(np.corrcoef(inputs[:, :-1, 3].flatten(), inputs[:, 1:, 3].flatten())[0, 1]) < 0.01


def test_kcue_asks_for_the_value_of_one_of_its_facts():
    task = KCue(facts=3, values=5)
    inputs, targets, _ = joined(task.test(rng(), 200, 8, 960))
    assert (targets[:, :-1] == IGNORED).all()
    for row, target in zip(inputs, targets[:, -1], strict=True):
        told = {int(step[:3].argmax()): int(step[3:8].argmax()) for step in row[:3]}
        assert sorted(told) == [0, 1, 2]
        assert row[3:7, :9].sum() == 0  # the gap: noise alone
        assert row[:, 8].tolist() == [0] * 7 + [1]
        assert row[7, 3:8].sum() == 0
        assert told[int(row[7, :3].argmax())] == target


def test_kcue_trains_on_every_gap_and_refuses_rows_too_short_for_its_facts():
    batch = KCue(3, 5).train(rng(), 500, 8)
    queries = (batch.targets != IGNORED).argmax(1)
    assert sorted(set(queries)) == [3, 4, 5, 6, 7]
    assert ((batch.targets != IGNORED).sum(1) == 1).all()
    with pytest.raises(ValueError, match="3 facts and a query need 4 steps"):
        next(KCue(3, 5).test(rng(), 2, 3, 960))


def test_parity_of_a_string():
    inputs, targets, _ = Parity().stream(np.array([[1, 0, 1, 1, 0, 0, 1]]))
    assert targets.tolist() == [[1, 1, 0, 1, 1, 1, 0]]
    assert inputs[0, :3].tolist() == [[0, 1], [1, 0], [0, 1]]


def test_parity_trains_on_rows_of_three_bits_or_more():
    batch = Parity().train(rng(), 2000, 6)
    ends = (batch.targets != IGNORED).sum(1)
    assert sorted(set(ends)) == [3, 4, 5, 6]


def test_parity_trains_on_rows_of_every_share_of_ones_and_tests_on_halves():
    ones = Parity().train(rng(), 2000, 40).inputs[..., 1].mean(1)
    assert np.histogram(ones, 4, (0, 1))[0].min() > 400
    ones = Parity().whole(rng(), 2000, 40).inputs[..., 1].mean(1)
    assert 0.05 < ones.min() < ones.max() < 0.95


def test_swaps_compose():
    task = Swaps()
    place = {pair: index for index, pair in enumerate(task.places)}
    swaps = np.array([[place[0, 1], place[0, 1], place[3, 4], place[0, 4]]])
    _, targets, _ = task.stream(swaps)
    arrangements = [task.arrangements[number] for number in targets[0]]
    assert arrangements == [(1, 0, 2, 3, 4), (0, 1, 2, 3, 4), (0, 1, 2, 4, 3), (3, 1, 2, 4, 0)]
    assert (task.inputs, task.classes) == (10, 120)


def test_repeat_asks_for_the_token_of_some_steps_ago():
    inputs, targets, _ = Repeat(back=2).stream(np.array([[3, 1, 0, 2, 2]]))
    assert targets.tolist() == [[IGNORED, IGNORED, 3, 1, 0]]
    assert inputs[0, 0].tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize("task", TASK_LIST, ids=TASKS)
def test_a_stream_is_a_function_of_its_seed_whatever_its_cuts(task):
    whole, cut = (joined(task.test(rng(3), 4, 50, chunk)) for chunk in (960, 7))
    for one, other in zip(whole, cut, strict=True):
        assert np.array_equal(one, other)
    assert whole[0].shape == (4, task.steps(50), task.inputs)
    assert whole[0].dtype == np.float32
    assert whole[2].sum() == 4
    assert whole[2][:, 0].all()
    assert (whole[1][:, -1] != IGNORED).all()
    assert not np.array_equal(whole[0], joined(task.test(rng(4), 4, 50, 960))[0])


@pytest.mark.parametrize("task", TASK_LIST, ids=TASKS)
def test_training_rows_have_targets_among_the_classes(task):
    inputs, targets, is_first = task.train(rng(), 64, task.length)
    assert inputs.shape == (64, task.length, task.inputs)
    assert (targets < task.classes).all()
    assert ((targets != IGNORED).any(1)).all()
    assert np.array_equal(is_first.argmax(1), np.zeros(64))


def test_rows_and_sizes_of_tasks_are_options():
    assert make_task("kcue", facts=3, values=5, back=1).inputs == 3 + 5 + 2
    assert make_task("kcue", facts=3, values=5, back=1).chance == 1 / 5
    assert make_task("repeat", facts=3, values=5, back=7).back == 7
