"""Learning from another run's replay: beside one's own steps, or from it alone."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from agent.checkpoint import Checkpoints
from agent.checks import RunError
from agent.run import run
from configs import load as configs

ROOT = Path(__file__).parents[2]
SMALL = [
    *("--size", "debug", "--precision", "float32", "--device", "cpu", "--threads", "1"),
    *("--batch.size", "2", "--batch.length", "16", "--behaviour.horizon", "3", "--core", "gru"),
    *("--loop.train_ratio", "8", "--log.every", "0.2", "--task", "test_counter"),
]
OFFLINE = ("--loop.mode", "offline")


def train(folder, *flags, status=0):
    done = subprocess.run(
        [sys.executable, "-m", "agent.train", "--logdir", str(folder), *SMALL, *flags],
        cwd=ROOT, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def newest(folder):
    return Checkpoints.load(Checkpoints(Path(folder) / "checkpoints").published()[-1])


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """The folder of a finished run of 400 steps."""
    folder = tmp_path_factory.mktemp("stored")
    train(folder, "--stop.steps", "400", "--env.count", "2", "--loop.mode", "lockstep")
    return folder


def test_offline_makes_so_many_updates_and_no_step_and_resumes_bit_for_bit(tmp_path, stored):
    before = {
        p: hashlib.sha1(p.read_bytes()).hexdigest() for p in stored.rglob("*.*") if p.is_file()
    }
    source = (*OFFLINE, "--replay.from", str(stored))
    train(tmp_path / "whole", *source, "--stop.updates", "12")
    train(tmp_path / "parts", *source, "--stop.updates", "5")
    train(tmp_path / "parts", "--stop.updates", "12")  # where from is known from the first time
    whole, parts = newest(tmp_path / "whole"), newest(tmp_path / "parts")
    assert whole["learner"]["updates"] == parts["learner"]["updates"] == 12
    for key, value in whole["learner"]["model"].items():
        assert torch.equal(value, parts["learner"]["model"][key]), key
    assert parts["run"]["agent_step"] == sum(parts["run"]["replay"]["count"]) == 0
    names = [p.name for p in Checkpoints(tmp_path / "parts" / "checkpoints").published()]
    assert names == ["000000000005", "000000000012"]
    rows = (tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(rows[-1])["update"] == 12
    assert configs.load(tmp_path / "parts" / "config.yaml").replay.from_ == str(stored.resolve())
    assert before == {
        p: hashlib.sha1(p.read_bytes()).hexdigest() for p in stored.rglob("*.*") if p.is_file()
    }


@pytest.mark.slow
def test_a_run_learns_from_stored_steps_as_soon_as_it_begins(tmp_path, stored):
    flags = ("--replay.from", str(stored), "--loop.mode", "lockstep", "--env.count", "1")
    train(tmp_path, *flags, "--loop.fill", "300", "--stop.steps", "40")
    parts = newest(tmp_path)
    assert parts["run"]["fill_step"] <= 1
    assert parts["run"]["replay"]["source"][0][0] == 0
    assert sum(parts["run"]["replay"]["count"]) >= 40
    again = train(tmp_path, *flags, "--loop.fill", "300", "--stop.steps", "80")
    assert "resuming" in again
    assert newest(tmp_path)["run"]["replay"]["source"] == parts["run"]["replay"]["source"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((*OFFLINE, "--stop.updates", "5"), "add --replay.from"),
        ((*OFFLINE, "--replay.from", "STORED"), "ends after --stop.updates <number>"),
        (("--replay.from", "absent"), "holds no replay"),
        ((*OFFLINE, "--replay.from", "STORED", "--stop.updates", "1", "--batch.length", "999"),
         "has no window of 999 steps"),
        (("--replay.from", "STORED", "--task", "gym_CartPole-v1"),
         "holds other fields than this run"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_in_one_message(tmp_path, stored, flags, words):
    argv = [str(stored) if flag == "STORED" else flag for flag in flags]
    # A flag is given once: those of a case replace those of all.
    pairs = dict(zip(SMALL[::2], SMALL[1::2], strict=True))
    rest = [word for key, value in pairs.items() if key not in argv for word in (key, value)]
    argv += [*rest, "--logdir", str(tmp_path)]
    with pytest.raises(RunError, match=words):
        run(configs.resolve(argv), configs.explicit(argv))
