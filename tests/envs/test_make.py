"""Names of tasks: which suite they reach, and what an unknown one is told."""

import importlib.util
import sys

import numpy as np
import pytest

from envs.make import cheap, check_task, make_env, reset_ticks


@pytest.mark.parametrize(
    ("task", "told"),
    [
        ("memory_maze_9x8", "did you mean memory_maze_9x9"),
        ("memorymaze_9x9", "did you mean memory_maze_"),
        ("gym_Cartpole-v1", "did you mean gym_CartPole-v1"),
        ("gym_no.such.module:X-v0", "No module named"),
        ("bsuite_memry_len_5", "did you mean bsuite_memory_len_5"),
        ("bsuite_memory_len_99", "did you mean bsuite_memory_len_9"),
        ("bsuite_memory_len_L0", "did you mean bsuite_memory_len_"),
        ("bsuite_mnist_0", "not offered"),
        ("tmaze_long", "tmaze_20"),
        ("tmaze_0", "tmaze_20"),
        ("test_crsh", "did you mean test_crash"),
        ("atari_pong", "no such suite"),
        ("tmaze", "did you mean tmaze_"),
    ],
)
def test_an_unknown_task_is_refused_with_the_nearest_name(task, told):
    with pytest.raises(ValueError, match=told):
        check_task(task)


@pytest.mark.parametrize("suite", ["memory_maze", "bsuite"])
def test_a_missing_package_is_answered_with_the_line_to_type(suite, monkeypatch):
    monkeypatch.delitem(sys.modules, suite, raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    task = {"memory_maze": "memory_maze_9x9", "bsuite": "bsuite_catch_0"}[suite]
    with pytest.raises(ValueError, match=rf"pip install -e '\.\[{suite}\]'"):
        check_task(task)


def test_checking_a_maze_does_not_load_the_simulator(monkeypatch):
    monkeypatch.setitem(sys.modules, "dm_control", None)
    check_task("memory_maze_9x9")


def test_only_slow_or_dangerous_tasks_get_a_process():
    assert not cheap("memory_maze_9x9")
    assert not cheap("test_exit")
    assert cheap("test_counter")
    assert cheap("gym_CartPole-v1")
    assert reset_ticks("memory_maze_15x15") == 64
    assert reset_ticks("tmaze_3") == 0


def test_repeat_limit_and_truncation_reach_the_environment():
    env = make_env("test_constant", repeat=3, time_limit=2, truncation="terminal")
    env.reset(0)
    action = np.zeros(1, np.int32)
    middle, last = env.step(action), env.step(action)
    assert (middle["reward"], middle["is_last"]) == (3, False)
    assert (last["reward"], last["is_last"], last["is_terminal"]) == (3, True, True)
