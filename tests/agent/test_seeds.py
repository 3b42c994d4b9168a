"""All that is random in a run derives from its seed, and nothing plays the same episode twice."""

import functools
import itertools
import json
import signal

import numpy as np
import pytest

from agent import seeding
from agent.train import main
from envs.env import Space
from envs.pool import EnvPool, episode_seed
from envs.testing import ODD_OBS, Odd


def test_no_slot_episode_or_purpose_shares_a_seed():
    """Slots are numbered through the pools of all ranks."""
    cases = list(itertools.product(range(32), range(300), ("train", "eval")))
    drawn = {episode_seed(0, *case) for case in cases}
    assert len(drawn) == len(cases) == 19_200
    assert not drawn & {episode_seed(1, *case) for case in cases}


def test_pools_of_ranks_share_no_episode():
    make = functools.partial(Odd, ODD_OBS, Space("vector", (3,)))
    pools = [EnvPool(make, 4, 0, False, first=first) for first in (0, 4)]
    seeds = [pool.seed_of(slot, n) for pool in pools for slot in range(4) for n in range(50)]
    assert len(set(seeds)) == 400
    assert pools[1].seed_of(0, 7) == episode_seed(0, 4, 7)
    for pool in pools:
        pool.close()


def test_no_purpose_counter_or_rank_shares_its_noise():
    purposes = ("act", "evaluate", "update", "media")
    cases = list(itertools.product(range(3), purposes, range(300), range(4)))
    assert len({seeding.key(*case) for case in cases}) == len(cases)
    assert seeding.key(0, "act", 11) == seeding.key(0, "act", 11, rank=0)


def test_first_observations_of_all_slots_of_training_and_evaluation_differ():
    make = functools.partial(Odd, ODD_OBS, Space("vector", (3,)))
    seen = []
    for purpose in ("train", "eval"):
        pool = EnvPool(make, 8, 0, False, purpose=purpose)
        seen += [image.tobytes() for image in pool.recv()[1]["image"]]
        pool.close()
    assert len(set(seen)) == 16


@pytest.fixture
def _signals():
    """A run in this process takes SIGINT and SIGTERM for itself; give them back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def metrics(folder, seed):
    """Rows at every step of a short run in lockstep, without what measures time and memory."""
    flags = {
        **{"task": "gym_CartPole-v1", "seed": seed, "logdir": folder, "stop.steps": 120},
        **{"size": "debug", "precision": "float32", "device": "cpu", "threads": 1},
        **{"batch.size": 2, "batch.length": 16, "behaviour.horizon": 3},
        **{"loop.train_ratio": 8, "loop.mode": "lockstep", "log.every": 0},
    }
    assert main([f"--{key}={value}" for key, value in flags.items()]) == 0
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    measured = ("wall_seconds", "rate/", "usage/")
    return [
        {key: value for key, value in row.items() if not key.startswith(measured)} for row in rows
    ]


@pytest.mark.usefixtures("_signals")
def test_two_runs_of_a_seed_have_the_same_metrics_and_of_two_seeds_others(tmp_path):
    first, again, other = (
        metrics(tmp_path / name, seed) for name, seed in (("a", 3), ("b", 3), ("c", 4))
    )
    assert len(first) > 120
    assert first == again
    losses = [[row["loss/total"] for row in rows if "loss/total" in row] for rows in (first, other)]
    assert len(losses[0]) > 5
    assert not np.isclose(*(rows[:5] for rows in losses), rtol=1e-4).any()
