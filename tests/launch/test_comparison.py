"""Which runs are compared, and what is drawn of them."""

import numpy as np
import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("scipy")

from launch import comparison, report_plots, runs
from launch.comparison import Comparison

MAZE, CART = "memory_maze_9x9", "gym_CartPole-v1"
HUMAN, ORACLE = 26.4, 34.8


def made(variant, end, status="finished", core="gru", seed=0, task=CART):
    run = runs.Run(f"{variant}-s{seed}", task, core, variant, seed, status, "")
    x = np.arange(1, end + 1.0)
    run.scores = {"env_step": x, "update": 2 * x, "return": x, "episodes": np.ones(end)}
    run.end = {"env_step": end, "update": 2 * end}
    return run


def test_without_a_finished_run_the_budget_is_how_far_they_are():
    interim = Comparison([made("a", 50, "unfinished"), made("b", 30, "unfinished")], "")
    assert interim.budgets["env_step", CART].interim
    assert interim.budgets["env_step", CART].value == 30
    done = Comparison([made("a", 50), made("b", 30, "unfinished")], "")
    assert not done.budgets["env_step", CART].interim
    assert done.budgets["env_step", CART].value == 50
    assert done.cells["env_step", CART, "b"].runs == []


def test_a_run_that_failed_after_the_budget_counts():
    both = Comparison([made("a", 50), made("a", 60, "failed", seed=1)], "")
    assert len(both.cells["env_step", CART, "a"].final.seeds) == 2


def test_what_was_matched_comes_first():
    runs_ = [made("a", 50)]
    assert Comparison(runs_, "steps").axes == ["env_step", "update"]
    assert Comparison(runs_, "updates").axes == ["update", "env_step"]
    assert Comparison(runs_, "flops").axis == "env_step"  # no such axis was written


# What is drawn


def test_a_core_has_one_colour_and_its_variants_differ_by_dashes():
    names = [("gru", "gru"), ("gru wide", "gru"), ("s3m", "s3m"), ("ppo", "ppo")]
    styles = report_plots.styles(Comparison([made(v, 9, core=core) for v, core in names], ""))
    assert styles["gru"]["color"] == styles["gru wide"]["color"]
    assert styles["gru"]["linestyle"] != styles["gru wide"]["linestyle"]
    assert len({style["color"] for style in styles.values()}) == 3
    alone = report_plots.styles(Comparison([made("s3m", 9, core="s3m")], ""))
    assert alone["s3m"] == styles["s3m"]


def test_episodes_without_a_finite_return_are_left_out():
    run = made("a", 50)
    run.scores["return"][[9, 49]] = np.nan
    cell = Comparison([run], "").cells["env_step", CART, "a"]
    assert cell.final.value == np.mean(np.arange(41, 50))  # a fifth of 48 episodes
    assert np.isfinite(cell.area.value)


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ({"oracle": 3.0, "human": 2.0}, "human"),
        ({"random": 0.0, "oracle": 3.0}, "oracle"),
        ({"random": 0.0}, ""),
        ({}, ""),
    ],
)
def test_scores_are_normalised_by_a_line_above_random(monkeypatch, known, expected):
    monkeypatch.setattr(comparison, "lines", lambda task: known)
    assert comparison.reference(CART) == expected


def test_a_curve_is_the_mean_of_its_seeds_within_their_band(tmp_path, monkeypatch):
    low, high = made("a", 50), made("a", 50, seed=1)
    high.scores["return"] = high.scores["return"] + 10
    kept = []
    monkeypatch.setattr(report_plots, "save", lambda figure, path: kept.append(figure))
    report_plots.learning_curves(Comparison([low, high], ""), "env_step", CART, tmp_path)
    axes = kept[0].axes[0]
    x, y = axes.lines[0].get_data()
    assert x.tolist() == [2 * n for n in range(1, 26)]
    assert y == pytest.approx(x - 0.5 + 5)  # the mean of two episodes, and of two seeds
    corners = axes.collections[0].get_paths()[0].vertices
    assert {(2.0, 1.5), (2.0, 11.5), (50.0, 49.5), (50.0, 59.5)} <= set(map(tuple, corners))


def drawn_texts(tmp_path, monkeypatch, runs_, task):
    """What stands beside the curves of a plot, and the heights of its lines across."""
    kept = []
    monkeypatch.setattr(report_plots, "save", lambda figure, path: kept.append(figure))
    report_plots.learning_curves(Comparison(runs_, ""), "env_step", task, tmp_path / "a.png")
    axes = kept[0].axes[0]
    across = [line.get_ydata()[0] for line in axes.lines if len(set(line.get_xdata())) == 2]
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    return [text.get_text() for text in axes.texts], across, legend


def test_references_are_drawn_unless_they_would_make_the_curves_flat(tmp_path, monkeypatch):
    texts, across, _ = drawn_texts(tmp_path, monkeypatch, [made("a", 50, task=MAZE)], MAZE)
    assert (texts, across) == (["human", "oracle"], [HUMAN, ORACLE])
    texts, across, _ = drawn_texts(tmp_path, monkeypatch, [made("a", 5, task=MAZE)], MAZE)
    assert (texts, across) == (["human 26.4 ↑\noracle 34.8 ↑"], [])


def test_a_plot_names_how_many_seeds_a_curve_is_of(tmp_path, monkeypatch):
    some = [made("a", 50), made("a", 30, "failed", seed=1), made("b:b.x=1", 20, "unfinished")]
    _, _, legend = drawn_texts(tmp_path, monkeypatch, some, CART)
    assert legend == ["a, 1 of 2 seeds", "b x=1, 0 of 1 seeds", "budget"]
    _, _, legend = drawn_texts(tmp_path, monkeypatch, some[2:], CART)  # an interim report
    assert legend == ["b x=1, 1 of 1 seeds", "budget"]
