"""Whole runs of several ranks under torchrun: resumption, notices to stop, and death.

Two processes and Gloo stand for many GPUs. The slow ones:
python -m pytest -m slow tests/agent/test_torchrun.py
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from agent.checkpoint import Checkpoints
from replay.inspect import inspect

ROOT = Path(__file__).parents[2]
SMALL = [
    *("--task", "test_counter", "--size", "debug", "--precision", "float32", "--device", "cpu"),
    *("--threads", "1", "--batch.size", "2", "--batch.length", "16", "--behaviour.horizon", "3"),
    *("--loop.train_ratio", "8", "--log.every", "0.2", "--env.count", "4"),
]
LOCKSTEP = ("--loop.mode", "lockstep")


def start(logdir, ranks, *flags):
    """A run of so many ranks; torchrun and they are a session of their own."""
    logdir.mkdir(exist_ok=True)
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command += ["-m", "agent.train", "--logdir", str(logdir), *SMALL, *flags]
    with (logdir / "out").open("w") as out:
        return subprocess.Popen(
            command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip


def said(logdir):
    return (logdir / "out").read_text()


def train(logdir, ranks, *flags, status=0):
    process = start(logdir, ranks, *flags)
    try:
        assert process.wait(200) == status, said(logdir)
    finally:
        end(process)
    return said(logdir)


def end(process):
    """Kill what is left of it."""
    if process.poll() is None:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        process.wait()


def newest(logdir):
    return Checkpoints.load(Checkpoints(logdir / "checkpoints").published()[-1])


def lines(logdir, name):
    return [json.loads(line) for line in (logdir / name).read_text().splitlines()]


def scores(logdir):
    drop = ("wall_seconds",)
    rows = [
        {k: v for k, v in row.items() if k not in drop} for row in lines(logdir, "scores.jsonl")
    ]
    return sorted(rows, key=lambda row: (row["episode"], row["slot"]))


@pytest.mark.slow
def test_a_batch_that_does_not_divide_is_refused_once(tmp_path):
    out = train(tmp_path, 3, "--stop.steps", "100", status=1)
    assert out.count("error: batch.size 2") == 1
    assert "starting" in out
    assert not (tmp_path / "config.yaml").exists()


@pytest.mark.slow
@pytest.mark.parametrize("core", ["gru", "s3m"])
def test_two_ranks_resume_bit_for_bit_and_on_other_numbers_of_ranks(tmp_path, core):
    flags = (*LOCKSTEP, "--core", core)
    train(tmp_path / "whole", 2, *flags, "--stop.steps", "400")
    train(tmp_path / "parts", 2, *flags, "--stop.steps", "172")
    train(tmp_path / "parts", 2, *flags, "--stop.steps", "400")
    whole, parts = newest(tmp_path / "whole"), newest(tmp_path / "parts")
    assert whole["learner"]["optimizer"]["steps"] == parts["learner"]["optimizer"]["steps"]
    for key, value in whole["learner"]["model"].items():
        assert torch.equal(value, parts["learner"]["model"][key]), key
    assert whole["learner"]["updates"] > 50
    assert scores(tmp_path / "whole") == scores(tmp_path / "parts")
    assert {row["slot"] for row in scores(tmp_path / "whole")} == {0, 1, 2, 3}
    step, update = whole["run"]["agent_step"], whole["learner"]["updates"]
    assert update == 1 + int((step - whole["run"]["fill_step"]) * 8 / 32)
    for ranks in (1, 4, 2):
        logdir = tmp_path / "parts"
        before = newest(logdir)
        if ranks == 4:
            out = train(logdir, ranks, *flags, status=1)
            assert "batch.size 2 is that of all ranks" in out
            continue
        out = train(logdir, ranks, *flags, "--stop.steps", str(before["run"]["agent_step"] + 100))
        assert "resuming" in out
        after = newest(logdir)
        assert after["run"]["agent_step"] >= before["run"]["agent_step"] + 100
        assert after["learner"]["updates"] > before["learner"]["updates"]
        assert sum(after["run"]["replay"]["count"]) > sum(before["run"]["replay"]["count"])
        assert inspect(logdir).problems == []
    steps = [row["agent_step"] for row in lines(tmp_path / "parts", "metrics.jsonl")]
    assert steps == sorted(steps)


@pytest.mark.slow
def test_two_ranks_play_the_episodes_of_one(tmp_path):
    seeds = []
    for ranks in (1, 2):
        train(tmp_path / str(ranks), ranks, *LOCKSTEP, "--stop.steps", "200")
        rows = scores(tmp_path / str(ranks))
        seeds.append({(row["slot"], row["episode"]): row["seed"] for row in rows})
    both = seeds[0].keys() & seeds[1].keys()
    assert len(both) > 8
    assert all(seeds[0][key] == seeds[1][key] for key in both)


@pytest.mark.slow
def test_a_run_of_one_goes_on_with_two_ranks_acting_beside_learning(tmp_path):
    train(tmp_path, 1, "--stop.steps", "200")
    before = newest(tmp_path)
    train(tmp_path, 2, "--stop.steps", "400")
    after = newest(tmp_path)
    assert after["run"]["agent_step"] >= 400
    made = after["learner"]["updates"] - before["learner"]["updates"]
    assert abs(made - (after["run"]["agent_step"] - before["run"]["agent_step"]) * 8 / 32) <= 3
    last = [row for row in lines(tmp_path, "metrics.jsonl") if "acting/staleness_max" in row][-1]
    assert last["acting/staleness_max"] <= 2


def begun(process, logdir, ranks=2):
    """The processes of the ranks, once updates are being made."""
    deadline = time.monotonic() + 120
    while (
        not (logdir / "metrics.jsonl").exists()
        or "loss/total" not in (logdir / "metrics.jsonl").read_text()
    ):
        assert process.poll() is None, said(logdir)
        assert time.monotonic() < deadline, said(logdir)
        time.sleep(0.1)
    found = psutil.Process(process.pid).children()
    assert len(found) == ranks
    return found


GRACE = 30.0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
@pytest.mark.parametrize("mode", ["lockstep", "overlapped"])
@pytest.mark.parametrize("whom", ["second", "all"])
def test_a_notice_to_any_rank_ends_all_with_one_save(tmp_path, whom, mode, number):
    flags = ("--loop.mode", mode, "--env.processes", "yes")
    process = start(tmp_path, 2, *flags, "--stop.steps", "1000000")
    try:
        ranks = begun(process, tmp_path)
        family = psutil.Process(process.pid).children(recursive=True)
        for rank in ranks[1:] if whom == "second" else ranks:
            rank.send_signal(number)
        assert process.wait(GRACE) == 0, said(tmp_path)  # torchrun's: that all of its ranks gave 0
        assert not psutil.wait_procs(family, 3)[1]
    finally:
        end(process)
    out = said(tmp_path)
    assert out.count(f"stopped by {number.name}") == 1
    assert "Traceback" not in out
    step = newest(tmp_path)["run"]["agent_step"]
    assert f"at step {step:,}" in out
    assert not list((tmp_path / "checkpoints").glob("[!0-9]*"))
    assert "resuming" in train(tmp_path, 2, *flags, "--stop.steps", str(step + 20))


@pytest.mark.slow
def test_a_notice_to_torchrun_saves_too(tmp_path):
    """Its own status and words are then torchrun's; what it leaves behind is whole."""
    process = start(tmp_path, 2, "--stop.steps", "1000000")
    try:
        begun(process, tmp_path)
        family = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(GRACE)
        assert not psutil.wait_procs(family, 3)[1]
    finally:
        end(process)
    assert "stopped by SIGTERM at step" in said(tmp_path)
    step = newest(tmp_path)["run"]["agent_step"]
    assert "resuming" in train(tmp_path, 2, "--stop.steps", str(step + 20))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lockstep", "overlapped"])
@pytest.mark.parametrize("dead", [0, 1])
def test_a_rank_that_dies_ends_the_others_within_a_minute(tmp_path, dead, mode):
    flags = ("--loop.mode", mode, "--env.processes", "yes")
    process = start(tmp_path, 2, *flags, "--stop.steps", "1000000")
    try:
        ranks = begun(process, tmp_path)
        family = psutil.Process(process.pid).children(recursive=True)
        ranks[dead].kill()
        assert process.wait(60) != 0
        assert not psutil.wait_procs(family, 5)[1]
    finally:
        end(process)
    assert "resuming" in train(tmp_path, 2, *flags, "--stop.steps", "300")


@pytest.mark.slow
def test_ranks_do_not_outlive_torchrun(tmp_path):
    process = start(tmp_path, 2, "--stop.steps", "1000000")
    family = []
    try:
        begun(process, tmp_path)
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        assert not psutil.wait_procs(family, GRACE)[1]
    finally:
        for left in family:
            if left.is_running():
                left.kill()
    assert "stopped by SIGHUP" in said(tmp_path)
