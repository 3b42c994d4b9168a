"""Whole runs through the command line's own entry: resume, signals, refusals, evaluation."""

import errno
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from agent.checkpoint import Checkpoints
from agent.checks import RunError, check_device
from agent.evaluate import evaluate, interval, shares
from configs.load import resolve

ROOT = Path(__file__).parents[2]
SMALL = [
    *("--size", "debug", "--precision", "float32", "--device", "cpu", "--threads", "1"),
    *("--batch.size", "2", "--batch.length", "16", "--behaviour.horizon", "3"),
    *("--loop.train_ratio", "8", "--log.every", "0.2"),
]

# Both loops, of which the tests by default run the one that users have.
SLOWER = [pytest.param("lockstep", marks=pytest.mark.slow), "overlapped"]


def start(logdir, *flags, task="test_counter"):
    return subprocess.Popen(
        [sys.executable, "-m", "agent.train", "--task", task, "--logdir", str(logdir),
         *SMALL, *flags],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def train(logdir, *flags, task="test_counter", status=0):
    process = start(logdir, *flags, task=task)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == status, output
    return output


def newest(logdir):
    return Checkpoints.load(Checkpoints(Path(logdir) / "checkpoints").published()[-1])


def rows(logdir, name):
    return [json.loads(line) for line in (Path(logdir) / name).read_text().splitlines()]


@pytest.mark.parametrize("core", [pytest.param("gru", marks=pytest.mark.slow), "s3m"])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path, core):
    flags = ("--core", core, "--env.count", "3", "--loop.mode", "lockstep")
    train(tmp_path / "whole", *flags, "--stop.steps", "400")
    train(tmp_path / "parts", *flags, "--stop.steps", "170")
    train(tmp_path / "parts", *flags, "--stop.steps", "400")
    whole, parts = newest(tmp_path / "whole"), newest(tmp_path / "parts")
    assert whole["learner"]["updates"] == parts["learner"]["updates"] > 50
    for key, value in whole["learner"]["model"].items():
        assert torch.equal(value, parts["learner"]["model"][key]), key
    drop = ("wall_seconds",)
    scores = [
        [{k: v for k, v in row.items() if k not in drop} for row in rows(run, "scores.jsonl")]
        for run in (tmp_path / "whole", tmp_path / "parts")
    ]
    assert scores[0] == scores[1]


@pytest.mark.parametrize("mode", SLOWER)
def test_after_kill_9_the_same_command_goes_on_from_the_checkpoint(tmp_path, mode):
    flags = ("--checkpoint.every", "1", "--loop.mode", mode)
    process = start(tmp_path, *flags, "--stop.steps", "1000000")
    deadline = time.time() + 60
    while len(list(tmp_path.glob("checkpoints/0*"))) < 2 and time.time() < deadline:
        time.sleep(0.1)
    process.kill()
    process.wait()
    before = newest(tmp_path)
    again = train(tmp_path, *flags, "--stop.steps", str(before["run"]["agent_step"]))
    assert "resuming" in again
    after = newest(tmp_path)
    for key in ("agent_step", "fill_step"):
        assert after["run"][key] == before["run"][key]
    assert after["run"]["replay"]["count"] == before["run"]["replay"]["count"]
    # In lockstep nothing is left to do; overlapped, the updates that were owed are still made.
    made = after["learner"]["updates"] - before["learner"]["updates"]
    assert made <= {"lockstep": 0, "overlapped": 3}[mode]
    ranges = [part["learner"]["model"]["return_range"] for part in (before, after)]
    # Begun anew, three updates would bring it to a few hundredths of what it was.
    torch.testing.assert_close(*ranges, rtol=0.5 if made else 0, atol=0)
    steps = [row["agent_step"] for row in rows(tmp_path, "metrics.jsonl")]
    assert steps == sorted(steps)


@pytest.mark.parametrize("mode", SLOWER)
def test_a_signal_saves_and_ends_with_status_0_and_no_orphan(tmp_path, mode):
    flags = ("--env.processes", "yes", "--env.count", "2", "--loop.mode", mode)
    process = start(tmp_path, *flags, "--stop.steps", "1000000", task="test_image")
    deadline = time.time() + 60
    while not (tmp_path / "scores.jsonl").exists() and time.time() < deadline:
        time.sleep(0.1)
    time.sleep(2)
    children = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True
    ).stdout.split()
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert "stopped by SIGTERM" in output
    assert len(children) >= 2
    time.sleep(0.5)
    states = subprocess.run(
        ["ps", "-o", "stat=", "-p", ",".join(children)], capture_output=True, text=True
    ).stdout.split()
    # An ended process that nobody has waited for yet is still listed, as Z.
    assert all(state.startswith("Z") for state in states)
    step = newest(tmp_path)["run"]["agent_step"]
    assert step > 0
    assert "resuming" in train(tmp_path, *flags, "--stop.steps", str(step + 20), task="test_image")
    assert newest(tmp_path)["run"]["agent_step"] >= step + 20


def test_every_row_has_every_axis_and_media_are_files(tmp_path):
    train(tmp_path, "--stop.steps", "300", "--log.media_every", "0.1", task="test_image")
    axes = ("env_step", "agent_step", "update", "train_flops", "wall_seconds")
    for name in ("metrics.jsonl", "scores.jsonl"):
        assert rows(tmp_path, name)
        for row in rows(tmp_path, name):
            assert all(axis in row for axis in axes)
    last = rows(tmp_path, "metrics.jsonl")[-1]
    assert last["train_flops"] > 1e6
    assert {"x_norm/acting_from_4", "x_norm/replay_from_4"} <= set().union(
        *rows(tmp_path, "metrics.jsonl")
    )
    assert (tmp_path / "media" / "prediction.gif").stat().st_size > 0
    assert (tmp_path / "media" / "policy.gif").stat().st_size > 0
    assert list(tmp_path.glob("tensorboard/events*"))
    assert "policy features" in (tmp_path / "model.txt").read_text()


def test_other_settings_in_the_same_folder_are_refused_with_a_diff(tmp_path):
    train(tmp_path, "--stop.steps", "60")
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    output = train(tmp_path, "--stop.steps", "60", "--core", "gru", status=2)
    assert "core: s3m in the run, gru asked" in output
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


def test_the_folder_alone_says_what_is_resumed(tmp_path):
    train(tmp_path, "--core", "gru", "--stop.steps", "60")
    command = [sys.executable, "-m", "agent.train", "--logdir", str(tmp_path)]
    command += ["--stop.steps", "80"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    assert "done, by stop.steps, at step 80" in result.stdout
    assert "raise --stop.steps to go on" in result.stdout


WORLD = """
import gymnasium
from gymnasium import spaces

class Told(gymnasium.Env):
    observation_space = spaces.Dict({"words": spaces.Text(5), "place": spaces.Discrete(3)})
    action_space = spaces.Discrete(2)
"""


@pytest.mark.parametrize("processes", ["yes", "no"])
def test_a_space_that_cannot_be_used_is_refused_by_name_in_one_line(
    tmp_path, monkeypatch, processes
):
    (tmp_path / "told_worlds.py").write_text(WORLD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    flags = ("--env.processes", processes, "--loop.mode", "lockstep")
    output = train(tmp_path / "run", *flags, task="told_worlds:Told", status=2)
    error = "error: --task told_worlds:Told: words: a space of type Text cannot be used"
    assert error in output.splitlines()[-1]
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--core", "gru", "--gru.blocks", "7"), "must be a multiple of gru.blocks 7"),
        (("--core", "rlt", "--model.posterior", "recurrent"), "set model.posterior parallel"),
    ],
)
def test_settings_that_do_not_fit_are_refused_in_one_line(tmp_path, flags, words):
    output = train(tmp_path, *flags, status=2)
    assert words in output.splitlines()[-1]
    assert "Traceback" not in output


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RunError, match="add --device cpu"):
        check_device(resolve(["--device", "cuda"]))


@pytest.mark.slow
def test_a_simulator_in_this_process_needs_lockstep(tmp_path):
    flags = ("--env.processes", "no", "--stop.steps", "20", "--log.media_every", "0")
    output = train(tmp_path, *flags, task="memory_maze_9x9", status=2)
    assert "env.processes no: memory_maze_9x9 cannot be stepped" in output
    train(tmp_path, *flags, "--loop.mode", "lockstep", task="memory_maze_9x9")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--task", "memory_maze_10x10"), "envs.list memory_maze_ shows"),
        (("--task", "gym_CartPole-v9"), "CartPole"),
        (("--task", "memry_maze_9x9"), "did you mean memory_maze_"),
        (("--core", "s4m"), "did you mean 's3m'"),
        (("--behaviour.horizons", "3"), "did you mean 'behaviour.horizon'"),
    ],
)
def test_a_wrong_command_is_one_line_with_the_nearest_right_name(flags, words):
    command = [sys.executable, "-m", "agent.train", *flags]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_evaluation_plays_exactly_n_episodes_on_seeds_of_its_own(tmp_path):
    train(tmp_path, "--stop.steps", "60")
    result = evaluate(tmp_path, episodes=5, slots=3)
    seen = {row["seed"] for row in rows(tmp_path, "scores.jsonl")}
    for mode in ("greedy", "sampled"):
        results = result[mode]["results"]
        assert len(results) == 5
        assert result[mode]["mean"] == 55.0  # a counter of 10 pays 1 + ... + 10
        assert not seen & {row["seed"] for row in results}
    assert shares(5, 3) == [2, 2, 1]


@pytest.mark.parametrize(
    ("count", "t"),
    [(2, 12.706), (3, 4.303), (4, 3.182), (5, 2.776), (6, 2.571), (7, 2.447), (10, 2.262)],
)
def test_interval_is_students_and_one_episode_has_none(count, t):
    scores = [float(number) for number in range(count)]
    mean, half = interval(scores)
    assert mean == (count - 1) / 2
    assert half == pytest.approx(t * statistics.stdev(scores) / count**0.5, rel=0.015)
    assert interval([3.0]) == (3.0, None)


def test_a_full_disk_leaves_the_earlier_checkpoint_good(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"run": {"step": 1}})

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="disk full while writing a checkpoint"):
        checkpoints.save(2, {"run": {"step": 2}})
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["000000000001"]
    assert Checkpoints.load(checkpoints.published()[-1]) == {"run": {"step": 1}}


@pytest.mark.parametrize("size", [1, 10**6])  # what a buffer holds, and what torch itself writes
def test_a_full_disk_is_known_by_the_write_that_failed(tmp_path, monkeypatch, size):
    monkeypatch.setattr(Path, "open", lambda path, mode: open("/dev/full", mode))  # noqa: SIM115
    with pytest.raises(OSError, match="disk full while writing a checkpoint") as caught:
        Checkpoints(tmp_path).save(1, {"run": {"tensor": torch.zeros(size)}})
    assert caught.value.errno == errno.ENOSPC


def test_a_full_disk_is_known_behind_the_error_that_torch_makes_of_it(tmp_path, monkeypatch):
    def fail(*args):
        try:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        except OSError:
            raise RuntimeError("unexpected pos 704 vs 598")  # noqa: B904

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="disk full while writing a checkpoint"):
        Checkpoints(tmp_path).save(1, {"run": {}})


def test_another_failure_of_a_write_is_no_full_disk(tmp_path, monkeypatch):
    def fail(*args):
        raise RuntimeError("something else")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(RuntimeError, match="something else"):
        Checkpoints(tmp_path).save(1, {"run": {}})


def test_a_first_checkpoint_is_durable_with_the_folder_it_lies_in(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr("agent.checkpoint.sync", synced.append)
    Checkpoints(tmp_path / "checkpoints").save(1, {"run": {}})
    assert synced[-2:] == [tmp_path / "checkpoints", tmp_path]


def test_a_look_at_a_run_leaves_what_it_is_writing(tmp_path):
    Checkpoints(tmp_path).save(1, {"run": {"step": 1}})
    (tmp_path / "writing-000000000002").mkdir()
    assert [int(path.name) for path in Checkpoints(tmp_path).published()] == [1]
    assert (tmp_path / "writing-000000000002").exists()
    assert Checkpoints(tmp_path / "none").published() == []
    assert not (tmp_path / "none").exists()
    Checkpoints(tmp_path).tidy()
    assert [path.name for path in tmp_path.iterdir()] == ["000000000001"]


def test_the_last_two_checkpoints_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2, 3):
        checkpoints.save(step, {"run": {"step": step}})
    assert [int(path.name) for path in checkpoints.published()] == [2, 3]


def test_a_failing_environment_is_closed_as_truncated_and_training_goes_on(tmp_path):
    train(tmp_path, "--stop.steps", "300", "--env.restarts_per_hour", "1000", task="test_crash")
    assert rows(tmp_path, "metrics.jsonl")[-1]["env/restarts"] > 0
    cut = [row for row in rows(tmp_path, "scores.jsonl") if row["truncated"]]
    assert cut
    assert {row["length"] for row in cut} == {5}


os.environ.setdefault("OMP_NUM_THREADS", "1")
