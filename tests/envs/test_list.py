"""The table of tasks is what the packages offer and the environments are; `envs.list` shows it."""

import importlib.util

import numpy as np
import pytest

from configs.load import resolve
from envs import table
from envs.list import FIXED, describe, draw, main, offered
from envs.make import PACKAGES, make_env

# Built and played in milliseconds; the others draw, or load a game.
QUICK = ("bsuite", "dmc", "popgym")
SLOW = ("dmc_quadruped_escape",)


def marked(row):
    slow = row.suite not in QUICK or row.task in SLOW
    return pytest.param(row, id=row.task, marks=[pytest.mark.slow] if slow else [])


def skip_without(suite):
    if importlib.util.find_spec(PACKAGES[suite][0]) is None:
        pytest.skip(f"{suite} is not installed")


@pytest.mark.parametrize("row", [marked(row) for row in table.rows()])
def test_every_task_can_be_stepped_and_is_what_the_table_says(row):
    skip_without(row.suite)
    env = make_env(row.task)
    assert env.reset(1)["is_first"]
    record = env.step(draw(env.act_space, np.random.default_rng(0)))
    assert record["env_steps"] == 1
    assert np.isfinite(record["reward"])
    assert describe(env, row.suite, row.name) == row


@pytest.mark.parametrize("suite", FIXED)
def test_the_table_has_the_names_that_the_package_offers(suite):
    skip_without(suite)
    assert list(table.names(suite)) == offered(suite)


def test_the_suites_have_the_sizes_that_their_papers_give():
    sizes = {suite: len(table.names(suite)) for suite in FIXED}
    assert sizes["memory_maze"] == 4 * 16
    assert sizes["popgym"] == 3 * 14 + 6
    assert sizes["atari100k"] == 26
    assert sizes["bsuite"] == 468 - 60  # without mnist


@pytest.mark.parametrize(
    ("pattern", "shows"),
    [
        ("dmc_walker_run", ["dmc_walker_run | orientations: vector 14, height: vector 1"]),
        ("dmc_vision_walker_run", ["image 64x64x3 | vector 6 | limit 1000 | repeat 2 |"]),
        ("atari_pong", ["discrete 18 | limit 108000 | repeat 4 | loop.train_ratio=32"]),
        ("atari100k_p*g", ["atari100k_pong |", "discrete 6"]),
        ("popgym_*Easy", ["popgym_CountRecallEasy", "env.truncation=terminal", "discrete 8 8"]),
        ("9x9_6cl_top", ["memory_maze_9x9_6cl_top | image 256x256x3 | discrete 6 | limit 1000"]),
        ("dmc_lqr", ["limit none", "env.time_limit=500"]),
        ("gym_CartPole-v1", ["gym_CartPole-v1 | vector 4 | discrete 2 | limit 500"]),
        ("tmaze_7", ["tmaze_7 | vector 4 | discrete 3 | limit 27 | repeat 1"]),
        ("", ["memory_maze_9x9 |", "popgym_AutoencodeEasy | 0: discrete 2, 1:", "gym_<id>"]),
    ],
)
def test_a_pattern_shows_spaces_limit_repeat_and_settings(pattern, shows, capsys):
    assert main([pattern] if pattern else []) == 0
    shown = capsys.readouterr().out
    for text in shows:
        assert text in shown
    if "*" in pattern or not pattern:
        assert len(shown.splitlines()) > 1 or pattern == "atari100k_p*g"
    elif pattern != "dmc_lqr":
        assert len(shown.splitlines()) == 1


def test_a_name_that_nothing_has_is_an_error_with_the_nearest(capsys):
    assert main(["dmc_wlaker_walk"]) == 2
    assert "did you mean dmc_walker_walk" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("task", "repeat", "truncation"),
    [
        ("memory_maze_9x9_hd", 1, "bootstrap"),
        ("dmc_walker_walk", 2, "bootstrap"),
        ("dmc_vision_walker_walk", 2, "bootstrap"),
        ("atari_pong", 4, "bootstrap"),
        ("atari100k_pong", 4, "bootstrap"),
        ("popgym_AutoencodeEasy", 1, "terminal"),
        ("bsuite_catch_0", 1, "bootstrap"),
    ],
)
def test_repeat_and_truncation_are_declared_per_task(task, repeat, truncation):
    for preset in ([], ["--preset", "r2i"]):
        env = resolve(["--task", task, *preset]).env
        assert (env.repeat, env.truncation) == (repeat, truncation)
