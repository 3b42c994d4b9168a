"""Names of tasks: which suite they reach, and what an unknown one is told."""

import configparser
import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from envs.make import PACKAGES, cheap, check_task, make_env, reset_ticks


@pytest.mark.parametrize(
    ("task", "told"),
    [
        ("memory_maze_9x8", "did you mean memory_maze_9x9.*envs.list memory_maze_ shows"),
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
        ("doom_basic", "no such suite"),
        ("atari_pnog", "did you mean atari_pong"),
        ("atari100k_skiing", "has no 'skiing'"),
        ("dmc_walker_wlak", "did you mean dmc_walker_walk"),
        ("dmc_vision_cartpole", "did you mean dmc_vision_cartpole_"),
        ("popgym_RepeatPrevious", "did you mean popgym_RepeatPrevious"),
        ("memory_maze_9x9_extra_obs", "did you mean memory_maze_9x9_extraobs"),
        ("tmaze", "did you mean tmaze_"),
        ("CartPole-v1", "did you mean gym_CartPole-v1"),
        ("gym_there/Pong-v5", "needs the module that registers it: gym_<module>:there/Pong-v5"),
        ("gym_:CartPole-v1", "Empty module name"),
    ],
)
def test_an_unknown_task_is_refused_with_the_nearest_name(task, told):
    with pytest.raises(ValueError, match=told):
        check_task(task)


@pytest.mark.parametrize(
    ("task", "package", "extra"),
    [
        ("memory_maze_9x9", "memory_maze", "memory-maze"),
        ("dmc_walker_walk", "dm_control", "dmc"),
        ("dmc_vision_walker_walk", "dm_control", "dmc"),
        ("atari_pong", "ale_py", "atari"),
        ("atari100k_pong", "ale_py", "atari"),
        ("atari_pong", "cv2", "atari"),
        ("popgym_AutoencodeEasy", "popgym", "popgym"),
        ("popgym_LabyrinthEscapeEasy", "mazelib", "popgym"),
        ("bsuite_catch_0", "bsuite", "bsuite"),
    ],
)
def test_a_missing_package_is_answered_with_the_line_to_type(task, package, extra, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda x: None if x == package else real(x))
    with pytest.raises(ValueError, match=rf"{package} is not.*pip install -e '\.\[{extra}\]'"):
        check_task(task)


def test_every_extra_that_an_error_names_is_one_of_the_project():
    setup = configparser.ConfigParser()
    setup.read(Path(__file__).parents[2] / "setup.cfg")
    assert {extra for _, extra in PACKAGES.values()} <= set(setup["options.extras_require"])


def test_checking_a_name_does_not_load_the_simulator(monkeypatch):
    for package in ("ale_py", "dm_control", "popgym"):
        monkeypatch.setitem(sys.modules, package, None)
    for task in ("memory_maze_9x9", "dmc_walker_walk", "atari_pong", "popgym_AutoencodeEasy"):
        check_task(task)


def test_only_slow_or_dangerous_tasks_get_a_process():
    assert not cheap("memory_maze_9x9")
    assert not cheap("test_exit")
    assert cheap("test_counter")
    assert cheap("gym_CartPole-v1")
    assert cheap("dmc_walker_walk")
    assert not cheap("dmc_quadruped_escape")  # draws in a thread of its own
    assert not cheap("dmc_vision_walker_walk")
    assert not cheap("atari100k_pong")
    assert not cheap("my_package.my_module:make")
    assert reset_ticks("memory_maze_15x15") == 64
    assert reset_ticks("tmaze_3") == 0


def test_repeat_limit_and_truncation_reach_the_environment():
    env = make_env("test_constant", repeat=3, time_limit=2, truncation="terminal")
    env.reset(0)
    action = np.zeros(1, np.int32)
    middle, last = env.step(action), env.step(action)
    assert (middle["reward"], middle["is_last"]) == (3, False)
    assert (last["reward"], last["is_last"], last["is_terminal"]) == (3, True, True)


def test_a_gymnasium_task_whose_package_is_missing_is_told_in_one_line():
    with pytest.raises(ValueError, match="--task gym_HalfCheetah-v2: "):
        make_env("gym_HalfCheetah-v2")
