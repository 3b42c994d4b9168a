"""The logged env_step is the number of simulator steps: a counter sits around each simulator."""

import functools
import itertools
import json

import numpy as np
import pytest

import agent.run
from envs.make import make_env
from envs.pool import EnvPool
from envs.testing import Counter
from envs.wrappers import ActionRepeat, Wrapper

# Nothing is learned: the replay is never full enough.
QUIET = ("--loop.fill", "100000", "--log.media_every", "0", "--log.every", "0.05")


class Watched:
    """A simulator of which every call of `method` is counted; everything else passes."""

    def __init__(self, simulator, method, calls):
        self.simulator, self.method, self.calls = simulator, method, calls

    def __getattr__(self, name):
        value = getattr(self.simulator, name)
        if name != self.method:
            return value

        def counted(*args):
            self.calls.append(name)
            return value(*args)

        return counted


def watch(env, calls, limits):
    """Count inside the innermost adapter; episodes of dm_control end after the next of `limits`."""
    adapter = env
    while isinstance(adapter, Wrapper):
        adapter = adapter.env
    if hasattr(adapter, "ale"):
        adapter.ale = Watched(adapter.ale, "act", calls)
        return env
    if not hasattr(adapter, "env"):
        step = adapter.step
        adapter.step = lambda action: calls.append("step") or step(action)
        return env
    if hasattr(adapter.env, "_step_limit"):
        adapter.env._step_limit = next(limits)
    adapter.env = Watched(adapter.env, "step", calls)
    if hasattr(adapter, "reseed"):
        reseed = adapter.reseed
        # Some are built anew for every seed.
        adapter.reseed = lambda env, seed: Watched(reseed(env.simulator, seed), "step", calls)
    return env


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


TASKS = [
    ("popgym_MineSweeperEasy", 1, 60),  # 4 to 14 steps an episode
    ("bsuite_cartpole_0", 1, 90),
    ("bsuite_catch_0", 2, 60),  # 9 steps: the last repeat is cut
    ("gym_CartPole-v1", 3, 60),
    ("dmc_cartpole_swingup", 2, 60),
    ("dmc_lqr_lqr_2_1", 3, 60),
    ("atari_pong", 4, 60),
    pytest.param("atari100k_breakout", 4, 60, marks=pytest.mark.slow),
    ("tmaze_3", 2, 60),
    pytest.param("memory_maze_9x9", 1, 30, marks=pytest.mark.slow),
    pytest.param("dmc_vision_reacher_easy", 2, 20, marks=pytest.mark.slow),
]

ENDLESS = ("bsuite_cartpole_0", "dmc_lqr_lqr_2_1", "memory_maze_9x9")  # in so few steps


@pytest.mark.parametrize("count", [1, 7])
@pytest.mark.parametrize(("task", "repeat", "steps"), TASKS)
def test_the_last_row_counts_every_simulator_step(
    tmp_path, monkeypatch, tiny, task, repeat, steps, count
):
    if task.startswith("atari"):
        # An odd number of frames, of which the waits at the start take unequal shares.
        monkeypatch.setattr("envs.atari.FRAMES", 45)
    calls, limits = [], itertools.cycle((7, 10, 5, 8, 3))
    make = functools.partial(make_env, task, repeat=repeat)

    def watched(config):
        return lambda: watch(make(), calls, limits)

    monkeypatch.setattr("agent.environments.env_maker", watched)
    flags = ("--task", task, "--env.repeat", str(repeat), "--env.count", str(count))
    config = tiny(
        *flags, *QUIET, "--stop.steps", str(steps + 10 * count), "--logdir", str(tmp_path),
        "--env.processes", "no", "--loop.mode", "lockstep",
    )  # fmt: skip
    assert agent.run.run(config, set()) == 0
    logged = rows(tmp_path)
    assert logged[-1]["env_step"] == len(calls)
    if repeat == 1:
        assert logged[-1]["env_step"] == logged[-1]["agent_step"]
    ends = (tmp_path / "scores.jsonl").read_text().splitlines()
    assert ends or task in ENDLESS


@pytest.mark.parametrize("mode", ["lockstep", "overlapped"])
def test_a_resumed_run_counts_on(tmp_path, tiny, mode):
    """Unequal episodes whose last repeats are cut, in two sittings and in one."""
    flags = ("--task", "tmaze_3", "--env.repeat", "4", "--env.count", "7", "--loop.mode", mode)
    for folder, stops in (("whole", (200,)), ("parts", (90, 200))):
        for steps in stops:
            config = tiny(
                *flags, *QUIET, "--logdir", str(tmp_path / folder), "--stop.steps", str(steps)
            )
            assert agent.run.run(config, {"stop.steps"}) == 0
    whole, parts = rows(tmp_path / "whole")[-1], rows(tmp_path / "parts")[-1]
    assert whole["env_step"] == parts["env_step"] < 4 * whole["agent_step"]


def test_what_is_under_way_can_be_waited_for_without_receiving_it():
    pool = EnvPool(lambda: ActionRepeat(Counter(5), 3), 2, 0, False)
    send = functools.partial(pool.send, np.arange(2), np.zeros((2, 1), np.int32))
    pool.recv()
    send()
    assert [record["env_steps"] for record in pool.settle()] == [3, 3]
    state = pool.state()
    assert pool.recv()[1]["env_steps"].tolist() == [3, 3]
    send()
    assert [record["env_steps"] for record in pool.settle()] == [2, 2]
    assert pool.recv()[1]["is_last"].all()
    send()
    assert [record["is_first"] for record in pool.settle()] == [True, True]
    assert pool.recv()[1]["episode"].tolist() == [1, 1]
    pool.close()
    again = EnvPool(lambda: ActionRepeat(Counter(5), 3), 2, 0, False)
    again.restore(state)
    assert again.recv()[1]["env_steps"].tolist() == [3, 3]
    assert again.restarts == 0
    again.close()
