"""Statistics agree with rliable, and with what can be worked out by hand."""

import itertools
import tracemalloc

import numpy as np
import pytest

pytest.importorskip("scipy")

from launch import statistics

# Scores (runs, tasks), and what rliable 1.2.0 (arch 7.2.0, numpy 2.4.6) makes of them by
# `get_interval_estimates` with 200,000 resamples, 100,000 for pairs, after np.random.seed(0). The
# package itself is not installed: it does not import beside pandas 3.
X = np.array([[0.1, 0.9, 0.4], [0.35, 1.2, 0.2], [0.6, 0.7, 0.45], [0.2, 1.0, 0.8]])
Y = np.array([[0.3, 0.5, 0.4], [0.1, 0.8, 0.1], [0.15, 0.75, 0.3]])
TAUS = np.array([0.0, 0.25, 0.4, 0.5, 0.85, 1.1])
RLIABLE = {
    "iqm": {"x": (0.55, (0.39166667, 0.7)), "y": (0.33, (0.23, 0.43))},
    "mean": {"x": (0.575, (0.46666667, 0.6875)), "y": (0.37777778, (0.3, 0.45))},
}
PROFILE = (
    [1, 0.75, 0.58333333, 0.5, 0.25, 0.08333333],
    [1, 0.5, 0.41666667, 0.33333333, 0.08333333, 0],
    [1, 0.91666667, 0.83333333, 0.75, 0.33333333, 0.25],
)
IMPROVEMENT = (0.77777778, (0.55555556, 0.95833333))
# Percentiles of 10,000 resamples against those of 200,000.
NEAR = {"abs": 0.01}


@pytest.mark.parametrize("name", RLIABLE)
@pytest.mark.parametrize(("key", "scores"), [("x", X), ("y", Y)])
def test_means_and_their_intervals_are_those_of_rliable(name, key, scores):
    value, interval = statistics.estimate(scores, getattr(statistics, name))
    expected, limits = RLIABLE[name][key]
    assert value == pytest.approx(expected)
    assert interval == pytest.approx(limits, **NEAR)


def test_a_profile_is_that_of_rliable():
    share, limits = statistics.profile(X, TAUS)
    assert share == pytest.approx(PROFILE[0])
    assert limits[0] == pytest.approx(PROFILE[1])
    assert limits[1] == pytest.approx(PROFILE[2])


def test_the_probability_of_improvement_is_that_of_rliable():
    value, interval = statistics.improvement(X, Y)
    assert value == pytest.approx(IMPROVEMENT[0])
    assert interval == pytest.approx(IMPROVEMENT[1], **NEAR)
    assert statistics.improvement(X, X)[0] == 0.5


def test_ties_count_half():
    x, y = np.array([[1.0], [2.0]]), np.array([[1.0], [0.0]])
    assert statistics.improvement(x, y)[0] == (0.5 + 1 + 1 + 1) / 4


def test_tasks_with_fewer_runs_are_resampled_among_their_own_and_count_the_same():
    scores = np.array([[0.1, 5.0], [0.4, 7.0], [0.9, np.nan]])
    drawn = [
        (np.mean(first) + np.mean(second)) / 2
        for first in itertools.product([0.1, 0.4, 0.9], repeat=3)
        for second in itertools.product([5.0, 7.0], repeat=2)
    ]
    value, interval = statistics.estimate(scores, statistics.mean)
    assert value == pytest.approx(((0.1 + 0.4 + 0.9) / 3 + 6) / 2)
    assert interval == pytest.approx(np.percentile(drawn, [2.5, 97.5]), **NEAR)
    easy, hard = [0.9] * 5, [0.1] * 5
    whole = statistics.estimate(np.array([easy, hard]).T, statistics.iqm)[0]
    lost = np.array([easy, [0.1, 0.1, np.nan, np.nan, np.nan]]).T
    assert statistics.estimate(lost, statistics.iqm)[0] == pytest.approx(whole)
    assert statistics.profile(lost, np.array([0.5]))[0] == [0.5]


def test_an_interquartile_mean_of_scores_that_count_more_than_once():
    values, times = np.array([[4.0, 0.0, 2.0], [1.0, 1.0, 9.0]]), np.array([3, 3, 4])
    # 0 0 0 2 2 2 2 4 4 4 and 1 1 1 1 1 1 9 9 9 9, two less at either end
    assert statistics.iqm(values, times) == pytest.approx([(4 * 2 + 0 + 4) / 6, (4 + 2 * 9) / 6])


def test_seeds_lost_by_some_tasks_cost_no_memory():
    scores = np.random.default_rng(0).normal(size=(10, 48))
    for task, lost in ((0, 1), (1, 2), (2, 3)):
        scores[:lost, task] = np.nan
    tracemalloc.start()
    statistics.estimate(scores, statistics.iqm)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1e9  # each as often as in the least common multiple of 10, 9, 8 and 7: 10e9


def test_one_run_of_a_task_has_no_interval():
    alone = np.array([[0.5, 0.1], [np.nan, 0.3]])
    assert statistics.estimate(alone, statistics.iqm)[1] is None
    assert statistics.profile(alone, TAUS)[1] is None
    assert statistics.improvement(alone, X[:, :2])[1] is None
    assert statistics.improvement(X[:, :2], alone)[1] is None
    assert statistics.band(np.ones((1, 3)))[1] is None


def test_the_same_runs_have_the_same_interval():
    assert statistics.estimate(X, statistics.iqm) == statistics.estimate(X, statistics.iqm)


# Learning curves


def test_a_final_score_is_of_the_last_episodes_within_the_budget():
    x, y, ones = np.arange(1, 6.0), np.array([0, 1, 2, 3, 100.0]), np.ones(5)
    assert statistics.final(x, y, ones, budget=4, window=2) == 2.5
    assert statistics.final(x, y, ones, budget=9, window=1) == 100
    assert np.isnan(statistics.final(x, y, ones, budget=0.5, window=2))


def test_a_row_that_stands_for_many_episodes_counts_as_many():
    x, y, weights = np.array([1.0, 2, 3]), np.array([0.0, 6, 9]), np.array([10.0, 10, 2])
    assert statistics.final(x, y, weights, budget=3, window=8) == (2 * 9 + 6 * 6) / 8
    assert statistics.between(x, y, weights, 1, 3) == (60 + 18) / 12


def test_an_area_is_the_mean_height_up_to_the_budget():
    x, y, ones = np.array([2.0, 4.0, 8.0]), np.array([1.0, 3.0, 3.0]), np.ones(3)
    assert statistics.area(x, y, ones, budget=4) == (2 * 1 + 2 * 2) / 4
    assert statistics.area(x, y, ones, budget=3) == (2 * 1 + 1 * 1.5) / 3
    assert statistics.area(x, y, ones, budget=10) == (2 * 1 + 2 * 2 + 6 * 3) / 10
    assert np.isnan(statistics.area(x, y, ones, budget=1))


def test_scores_of_one_moment_are_averaged():
    x, y = np.array([0.0, 0.0, 4.0]), np.array([0.0, 2.0, 3.0])
    assert statistics.area(x, y, np.ones(3), budget=4) == 2
    assert statistics.area(x, y, np.array([3.0, 1, 1]), budget=4) == (0.5 + 3) / 2


def test_a_rise_is_the_last_fifth_less_the_one_before():
    x = np.arange(1, 11.0)
    assert statistics.rise(x, x**2, np.ones(10), budget=10) == (81 + 100 - 49 - 64) / 2
    assert np.isnan(statistics.rise(x[:6], x[:6], np.ones(6), budget=10))


def test_a_curve_has_the_mean_of_each_cell_and_is_interpolated_between_scores():
    x, y = np.array([1.0, 2.0, 5.5, 7.0]), np.array([1.0, 3.0, 8.0, 100.0])
    found = statistics.curve(x, y, np.ones(4), np.array([0.0, 2, 4, 6]))
    assert found == pytest.approx([2, 5, 8])
    found = statistics.curve(x[2:], y[2:], np.ones(2), np.array([0.0, 2, 4, 6, 8, 10]))
    assert found == pytest.approx([np.nan, np.nan, 8, 100, np.nan], nan_ok=True)


def test_a_band_draws_whole_curves():
    curves = np.array([[0.0, 1.0, np.nan], [2.0, 1.0, 5.0]])
    mean, limits = statistics.band(curves)
    assert mean == pytest.approx([1, 1, np.nan], nan_ok=True)
    assert limits[0] == pytest.approx([0, 1, np.nan], nan_ok=True)
    assert limits[1] == pytest.approx([2, 1, np.nan], nan_ok=True)
