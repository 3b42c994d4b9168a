"""One of four environments raises, exits or hangs: training goes on, counts it, or says why not."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from agent import status
from envs.pool import episode_seed

ROOT = Path(__file__).parents[2]
SMALL = [
    *("--size", "debug", "--precision", "float32", "--device", "cpu", "--threads", "1"),
    *("--batch.size", "2", "--batch.length", "16", "--behaviour.horizon", "3"),
    *("--loop.train_ratio", "8", "--env.processes", "yes"),
]


def train(logdir, *flags):
    command = [sys.executable, "-m", "agent.train", "--logdir", str(logdir), *SMALL, *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)


@pytest.mark.parametrize(
    "how", ["crash", *(pytest.param(how, marks=pytest.mark.slow) for how in ("exit", "hang"))]
)
def test_a_failure_in_one_of_four_workers_costs_its_episode_and_no_more(tmp_path, how):
    # Of the first three episodes of every slot, slot 2's first alone fails, at its fifth action.
    seed = next(
        seed
        for seed in itertools.count()
        if [
            key for key in itertools.product(range(4), range(3)) if not episode_seed(seed, *key) % 3
        ]
        == [(2, 0)]
    )
    flags = (
        "--task",
        f"test_{how}",
        "--seed",
        str(seed),
        "--env.count",
        "4",
        "--stop.steps",
        "100",
    )
    result = train(tmp_path, *flags, "--env.timeout", "6" if how == "hang" else "100")
    assert result.returncode == 0, result.stderr
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["env/restarts"] == 1
    assert last["agent_step"] >= 100
    assert last["update"] >= 10
    scores = [json.loads(line) for line in (tmp_path / "scores.jsonl").open()]
    cut = [(row["slot"], row["episode"], row["length"]) for row in scores if row["truncated"]]
    assert cut == [(2, 0, 5)]
    assert {row["slot"] for row in scores if row["length"] == 10} == {0, 1, 2, 3}
    assert "environment 2 failed and is started again" in result.stderr


def test_more_failures_than_the_rate_allows_end_the_run_with_their_cause(tmp_path):
    flags = ("--task", "test_exit", "--env.count", "2", "--env.restarts_per_hour", "1")
    result = train(tmp_path, *flags, "--stop.steps", "100000")
    assert result.returncode == 1
    assert "more than env.restarts_per_hour 1. The last:" in result.stderr
    assert "its process died, exit code 3" in result.stderr
    found = status.look(tmp_path)
    assert found["state"] == "failed"
    assert "more than env.restarts_per_hour 1" in found["error"]
