"""What a run refuses to start or to resume with, and what it may change."""

import dataclasses
import errno
import fcntl

import pytest

from agent import train
from agent.checkpoint import Checkpoints
from agent.checks import RunError, check_capacity, check_sizes, check_source, fewest_steps, lasting
from agent.run import run
from configs import load as configs
from envs.env import Space

SMALL = [
    *("--task", "test_counter", "--size", "debug", "--precision", "float32", "--device", "cpu"),
    *("--threads", "1", "--batch.size", "2", "--batch.length", "16", "--behaviour.horizon", "3"),
    *("--core", "gru", "--env.count", "2", "--loop.mode", "lockstep", "--log.media_every", "0"),
    *("--loop.train_ratio", "4"),
]


def start(folder, *flags):
    argv = [*SMALL, "--logdir", str(folder), *flags]
    return run(configs.resolve(argv), configs.explicit(argv))


class Held:
    """A replay that holds so many steps of another run, in streams of up to `longest`."""

    def __init__(self, steps=0, longest=0):
        self.steps, self.longest = steps, longest

    def __len__(self):
        return self.steps


def checked(config, ranks=1, held=None, each=1000.0, **settings):
    config = dataclasses.replace(config, replay=dataclasses.replace(config.replay, **settings))
    check_capacity(config, ranks, held or Held(), each)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_capacity_must_hold_windows_of_every_stream_and_the_fill(tiny, ranks):
    config = tiny("--env.count", "4")
    assert fewest_steps(config, ranks) == 4 * (16 + 64)
    checked(config, ranks, capacity=320)
    with pytest.raises(RunError, match=r"capacity 319 is too small for 4 .* 320 or more"):
        checked(config, ranks, capacity=319)
    large = tiny("--env.count", "4", "--loop.fill", "1000")
    assert fewest_steps(large, ranks) == 1000 + 32 * ranks
    with pytest.raises(RunError, match=r"first update after 1,000 steps: it must be 1,0"):
        checked(large, ranks, capacity=1000)
    stored = tiny("--env.count", "4", "--replay.start", "stored", "--replay.state_every", "8")
    assert fewest_steps(stored, ranks) == 4 * (16 + 8 + 64)


def test_a_budget_of_bytes_counts_as_the_steps_that_it_is_thought_to_hold(tiny):
    config = tiny("--env.count", "4")
    checked(config, disk_gb=320e-6)
    with pytest.raises(RunError, match=r"0\.00031, about 310 steps, .* must be 0\.0004 or more"):
        checked(config, disk_gb=310e-6)


def test_steps_of_another_run_count_for_the_fill_and_hold_windows(tiny):
    config = tiny("--env.count", "4", "--loop.fill", "1000")
    checked(config, held=Held(960, 16), capacity=72)
    for held in (Held(960, 15), Held(900, 16), Held()):
        with pytest.raises(RunError, match="too small"):
            checked(config, held=held, capacity=72)
    checked(tiny("--loop.mode", "offline"), capacity=1)


def test_what_was_freely_changed_and_lasts_is_saved(tiny):
    saved = tiny("--replay.capacity", "1000")
    flags = ("--stop.steps", "7", "--log.every", "3", "--products", "shipped")
    found = lasting(tiny("--replay.capacity", "500", *flags), saved)
    assert (found.replay.capacity, found.stop.steps, found.log.every) == (500, 7, 3)
    assert found.products == saved.products == "auto"


def test_a_run_learns_from_as_little_as_is_allowed_and_less_is_refused(tmp_path):
    with pytest.raises(RunError, match="it must be 160 or more"):
        start(tmp_path, "--replay.capacity", "159", "--stop.steps", "400")
    assert not (tmp_path / "config.yaml").exists()
    start(tmp_path, "--replay.capacity", "160", "--stop.steps", "400")
    saved = Checkpoints.load(Checkpoints(tmp_path / "checkpoints").published()[-1])
    assert saved["learner"]["updates"] > 40


def test_a_resumed_run_may_have_another_capacity_from_then_on(tmp_path):
    start(tmp_path, "--replay.capacity", "1000", "--stop.steps", "300")
    with pytest.raises(RunError, match="it must be 160 or more"):
        start(tmp_path, "--replay.capacity", "100", "--stop.steps", "400")
    assert configs.load(tmp_path / "config.yaml").replay.capacity == 1000
    start(tmp_path, "--replay.capacity", "200", "--stop.steps", "310")
    start(tmp_path, "--stop.steps", "320")
    replay = Checkpoints.load(Checkpoints(tmp_path / "checkpoints").published()[-1])["run"][
        "replay"
    ]
    assert 168 < sum(replay["count"]) - 32 * sum(replay["first"]) <= 200
    assert configs.load(tmp_path / "config.yaml").replay.capacity == 200


@pytest.mark.parametrize(
    ("name", "content"), [("learner.pt", b""), ("run.pt", b"PK\3\4 cut"), ("run.pt", b"\0" * 999)]
)
def test_a_damaged_checkpoint_is_named_and_without_it_the_older_one_is_used(
    tmp_path, capsys, name, content
):
    for steps in ("40", "50"):
        start(tmp_path, "--stop.steps", steps)
    older, newest = Checkpoints(tmp_path / "checkpoints").published()
    (newest / name).write_bytes(content)
    with pytest.raises(RunError, match=f"{newest / name} is damaged; remove the folder {newest},"):
        start(tmp_path, "--stop.steps", "60")
    newest.rename(tmp_path / "removed")
    capsys.readouterr()
    start(tmp_path, "--stop.steps", "60")
    assert f"resuming {tmp_path} from {older.name}" in capsys.readouterr().out


def test_an_older_checkpoint_that_is_damaged_does_no_harm(tmp_path):
    for steps in ("40", "50"):
        start(tmp_path, "--stop.steps", steps)
    older = Checkpoints(tmp_path / "checkpoints").published()[0]
    (older / "run.pt").write_bytes(b"")
    start(tmp_path, "--stop.steps", "60")
    assert older not in Checkpoints(tmp_path / "checkpoints").published()


def test_a_folder_that_is_being_read_is_said_to_be(tmp_path):
    with (tmp_path / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        with pytest.raises(RunError, match="or reads it"):
            start(tmp_path)


def test_a_full_disk_is_told_by_the_rank_that_has_it(tmp_path, monkeypatch, capsys):
    def full(config, given):
        raise OSError(errno.ENOSPC, "disk full: here")

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("agent.run.run", full)
    assert train.main([*SMALL, "--logdir", str(tmp_path)]) == 1
    assert "error: disk full: here" in capsys.readouterr().err


def test_steps_of_another_task_are_warned_of(tmp_path, caplog):
    configs.save(configs.resolve(SMALL), tmp_path / "config.yaml")
    learn = ["--replay.from", str(tmp_path), "--task"]
    check_source(configs.resolve([*learn, "test_counter"]))
    check_source(configs.resolve(SMALL))
    assert not caplog.messages
    check_source(configs.resolve([*learn, "test_constant"]))
    told = "replay.from holds steps of test_counter; this run is of test_constant"
    assert caplog.messages == [told]


def test_vectors_that_may_be_images_are_warned_of(caplog):
    check_sizes({"a": Space("vector", (4096,)), "b": Space("image", (99, 99, 3))})
    assert not caplog.messages
    check_sizes({"view": Space("vector", (12288,))})
    assert "observation 'view' is a vector of 12288 numbers" in caplog.text
