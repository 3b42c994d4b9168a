"""Limits of a run: each ends it exactly, the first one counts, and a higher one lets it go on."""

import json

import pytest

from agent import limits
from agent.checkpoint import Checkpoints
from agent.train import main
from configs import load as configs
from configs.schema import StopConfig

ROW = {"agent_step": 100, "update": 10, "train_flops": 70, "wall_seconds": 30.0}
SMALL = [
    *("--size", "debug", "--precision", "float32", "--device", "cpu", "--threads", "1"),
    *("--batch.size", "2", "--batch.length", "16", "--behaviour.horizon", "3", "--core", "gru"),
    *("--task", "test_counter", "--env.count", "2", "--log.media_every", "0"),
]
MODES = ("lockstep", "overlapped")


def train(folder, *flags, mode="lockstep", ratio="8"):
    flags = ("--loop.mode", mode, "--loop.train_ratio", ratio, *flags)
    assert main([*SMALL, "--logdir", str(folder), *flags]) == 0
    return Checkpoints.load(Checkpoints(folder / "checkpoints").published()[-1])


def end(folder):
    return json.loads((folder / "finished.json").read_text())


@pytest.mark.parametrize("mode", MODES)
def test_updates_end_a_run_exactly(tmp_path, mode):
    # 64 replayed steps a step: four updates for the two steps of a tick, of which two are left.
    saved = train(tmp_path, "--stop.updates", "6", mode=mode, ratio="64")
    assert saved["learner"]["updates"] == 6
    assert (end(tmp_path)["by"], end(tmp_path)["update"]) == ("stop.updates", 6)
    assert saved["run"]["agent_step"] == end(tmp_path)["agent_step"] < 60


@pytest.mark.parametrize("mode", MODES)
def test_flops_end_a_run_before_the_update_that_would_be_too_many(tmp_path, mode):
    each = train(tmp_path / "one", "--stop.updates", "1")["run"]["flops_per_update"]
    for folder, limit, updates in (("exact", 5 * each, 5), ("less", 5 * each - 1, 4)):
        saved = train(tmp_path / folder, "--stop.flops", str(limit), mode=mode, ratio="64")
        assert saved["learner"]["updates"] == updates
        assert end(tmp_path / folder)["by"] == "stop.flops"
        assert end(tmp_path / folder)["train_flops"] == updates * each <= limit


@pytest.mark.parametrize("mode", MODES)
def test_steps_end_a_run_after_the_updates_that_they_owe(tmp_path, mode):
    saved = train(tmp_path, "--stop.steps", "80", mode=mode)
    assert 80 <= saved["run"]["agent_step"] <= 81  # two environments step at once
    owed = 1 + (saved["run"]["agent_step"] - saved["run"]["fill_step"]) * 8 // 32
    assert saved["learner"]["updates"] == owed
    assert end(tmp_path)["by"] == "stop.steps"


@pytest.mark.parametrize("mode", MODES)
def test_seconds_end_a_run_and_are_those_of_all_sittings(tmp_path, mode):
    train(tmp_path, "--stop.seconds", "1.5", mode=mode)
    assert end(tmp_path)["by"] == "stop.seconds"
    first = end(tmp_path)["wall_seconds"]
    assert 1.5 <= first < 6
    train(tmp_path, "--stop.seconds", str(first + 1), mode=mode)
    assert first + 1 <= end(tmp_path)["wall_seconds"] < first + 6


def test_a_run_at_its_limit_says_so_and_touches_nothing(tmp_path, capsys):
    train(tmp_path, "--stop.updates", "3")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.name != "lock"}
    capsys.readouterr()
    train(tmp_path, "--stop.updates", "3")
    assert "has ended by stop.updates" in capsys.readouterr().out
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.name != "lock"}
    assert after == before


def test_a_higher_limit_goes_on_as_if_there_had_been_none_and_is_recorded(tmp_path):
    whole = train(tmp_path / "whole", "--stop.updates", "9", ratio="64")
    train(tmp_path / "parts", "--stop.updates", "3", ratio="64")
    parts = train(tmp_path / "parts", "--stop.updates", "9", ratio="64")
    for key, value in whole["learner"]["model"].items():
        assert (value == parts["learner"]["model"][key]).all(), key
    assert parts["run"]["agent_step"] == whole["run"]["agent_step"]
    assert configs.load(tmp_path / "parts" / "config.yaml").stop.updates == 9


def test_a_run_that_goes_on_has_no_mark(tmp_path):
    limits.mark(tmp_path, {"by": "stop.updates", **ROW})
    assert limits.goes_on(tmp_path, StopConfig(updates=10)) == "stop.updates"
    assert (tmp_path / "finished.json").exists()
    assert limits.goes_on(tmp_path, StopConfig(updates=11)) == ""
    assert not (tmp_path / "finished.json").exists()


def test_fewer_flops_than_an_update_are_refused(tmp_path, capsys):
    flags = ["--logdir", str(tmp_path), "--loop.mode", "lockstep", "--stop.flops", "10"]
    assert main([*SMALL, *flags]) == 2
    assert "--stop.flops 10 is less than one update takes" in capsys.readouterr().err


def test_a_failure_is_past_once_the_run_goes_on(tmp_path):
    train(tmp_path, "--stop.updates", "2")
    (tmp_path / "error.txt").write_text("OSError: no space left\n")
    train(tmp_path, "--stop.updates", "2")  # nothing is left to do
    assert (tmp_path / "error.txt").exists()
    train(tmp_path, "--stop.updates", "3")
    assert not (tmp_path / "error.txt").exists()


@pytest.mark.parametrize(
    ("stop", "by"),
    [
        (StopConfig(), ""),
        (StopConfig(steps=100), "stop.steps"),
        (StopConfig(steps=101), ""),
        (StopConfig(steps=100, updates=10), "stop.updates"),
        (StopConfig(updates=11), ""),
        (StopConfig(flops=77.0), ""),
        (StopConfig(flops=76.9), "stop.flops"),
        (StopConfig(seconds=30.0), "stop.seconds"),
        (StopConfig(seconds=30.1), ""),
    ],
)
def test_which_limit_is_reached(stop, by):
    assert limits.reached(stop, ROW) == by


def test_what_is_left_is_that_of_the_limit_which_comes_first():
    row = {**ROW, "rate/agent_steps": 10.0, "rate/updates": 2.0}
    for stop, seconds, nearest in (
        (StopConfig(steps=1000), 90, (0.1, "stop.steps")),
        (StopConfig(steps=1000, updates=20), 5, (0.5, "stop.updates")),
        (StopConfig(steps=1000, flops=700.0), 45, (0.1, "stop.steps")),
        (StopConfig(steps=1000, seconds=40.0), 10, (0.75, "stop.seconds")),
        (StopConfig(steps=50), 0, (1.0, "stop.steps")),
    ):
        assert limits.left(stop, row) == pytest.approx(seconds)
        assert limits.nearest(stop, row) == nearest
    assert limits.left(StopConfig(), {}) is None
