"""Twins: a run that nothing interrupts, and one that is killed three times, end bit for bit alike.

Every core, and a task of every suite. In lockstep on a CPU, as promised; agent/README.md.
"""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from agent.checkpoint import Checkpoints

ROOT = Path(__file__).parents[2]
FLAGS = [
    *("--loop.mode", "lockstep", "--device", "cpu", "--threads", "1", "--precision", "float32"),
    *("--size", "debug", "--batch.size", "2", "--batch.length", "16", "--env.count", "2"),
    *("--loop.train_ratio", "16", "--behaviour.horizon", "3", "--log.media_every", "0"),
    # A row for every update.
    *("--log.every", "0", "--checkpoint.every", "0.3"),
]
# What a clock decides, or what was in RAM since the last row.
NOT_COMPARED = (
    *("wall_seconds", "rate/", "usage/", "replay/cache_gb", "replay/disk_gb"),
    *("acting/", "x_norm/acting"),
)
TASKS = [
    *("bsuite_memory_len_L10", "popgym_RepeatPreviousEasy", "dmc_cartpole_swingup"),
    *("atari_pong", "memory_maze_9x9", "gym_CartPole-v1"),
]


def start(folder, task, core, steps):
    command = [sys.executable, "-m", "agent.train", "--logdir", str(folder), *FLAGS]
    return subprocess.Popen(
        [*command, "--task", task, "--core", core, "--steps", str(steps)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def finish(process):
    try:
        output, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, output
    return output


def published(folder):
    return sorted(path.name for path in (folder / "checkpoints").glob("0*"))


def kill_after_a_save(folder, process, moment):
    before = published(folder)
    deadline = time.monotonic() + 120
    while published(folder) == before and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    time.sleep(moment.uniform(0, 0.3))
    assert process.poll() is None, "it ended before it was killed: more steps"
    process.kill()
    process.communicate()


def rows(folder, name):
    found = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(NOT_COMPARED)} for row in found]


def update_rows(folder):
    found = [row for row in rows(folder, "metrics.jsonl") if "loss/total" in row]
    assert [row["update"] for row in found] == list(range(1, len(found) + 1))
    return found


def same(one, other, where=""):
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            same(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    elif isinstance(one, list):
        assert len(one) == len(other), where
        for index, pair in enumerate(zip(one, other, strict=True)):
            same(*pair, f"{where}/{index}")
    else:
        assert one == other or one != one, where


def twins(folder, task, core, steps):
    whole, killed = folder / "whole", folder / "killed"
    finish(start(whole, task, core, steps))
    moment = random.Random(core)
    for _ in range(3):
        kill_after_a_save(killed, start(killed, task, core, steps), moment)
    assert "resuming" in finish(start(killed, task, core, steps))
    ends = [
        Checkpoints.load(Checkpoints(f / "checkpoints").published()[-1]) for f in (whole, killed)
    ]
    assert ends[0]["learner"]["updates"] > 100
    same(ends[0]["learner"], ends[1]["learner"])
    same(*(end["run"]["actor"] for end in ends))
    same(*(end["run"]["replay"] for end in ends))
    assert len(update_rows(whole)) == ends[0]["learner"]["updates"]
    assert update_rows(whole) == update_rows(killed)
    scores = [rows(folder, "scores.jsonl") for folder in (whole, killed)]
    assert scores[0] == scores[1]


@pytest.mark.slow
@pytest.mark.parametrize("core", ["gru", "s3m", "elmur", "rate", "rlt", "transformer"])
def test_a_run_killed_three_times_ends_as_its_twin(tmp_path, core):
    twins(tmp_path, "test_counter", core, 600)


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_on_every_suite(tmp_path, task):
    twins(tmp_path, task, "s3m", 600)
