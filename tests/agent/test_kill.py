"""`kill -9` at random moments of a run that saves all the time, and a disk that fills up.

KILLS=50 python -m pytest -m slow tests/replay/test_kill.py tests/agent/test_kill.py
"""

import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agent.checkpoint import Checkpoints
from replay.inspect import inspect

ROOT = Path(__file__).parents[2]
KILLS = int(os.environ.get("KILLS", "10"))
FLAGS = [
    *("--task", "gym_CartPole-v1", "--core", "gru", "--preset", "vector_small"),
    *("--device", "cpu", "--env.count", "2", "--batch.size", "4", "--batch.length", "16"),
    *("--loop.train_ratio", "8", "--log.every", "0.2", "--log.media_every", "0"),
]


def start(folder, *flags):
    return subprocess.Popen(
        [sys.executable, "-m", "agent.train", "--logdir", str(folder), *FLAGS, *flags],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def finish(process, status=0):
    """What it printed; it does not outlive the test."""
    try:
        output, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == status, output
    return output


def published(folder):
    """The checkpoints as they lie there: names, without what `Checkpoints` tidies up."""
    return sorted(path.name for path in (folder / "checkpoints").glob("0*"))


@pytest.mark.slow
def test_after_kill_9_at_any_moment_the_run_goes_on_from_its_last_save(tmp_path):
    flags = ("--checkpoint.every", "0.05", "--replay.capacity", "20000")
    moment = random.Random(0)
    counters = (0, 0, 0)
    for kill in range(KILLS):
        process = start(tmp_path, *flags)
        before = published(tmp_path)
        deadline = time.monotonic() + 60
        while published(tmp_path) == before and time.monotonic() < deadline:
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.01)
        time.sleep(moment.uniform(0, 2))
        process.kill()
        process.communicate()
        assert inspect(tmp_path).problems == [], kill
        newest = Checkpoints.load(Checkpoints(tmp_path / "checkpoints").published()[-1])
        run = newest["run"]
        now = (run["agent_step"], newest["learner"]["updates"], sum(run["replay"]["count"]))
        assert all(a <= b for a, b in zip(counters, now, strict=True)), (kill, counters, now)
        assert now[2] >= now[0]
        counters = now
    assert counters[1] > 0
    output = finish(start(tmp_path, *flags, "--stop.steps", str(counters[0] + 100)))
    assert f"resuming {tmp_path}" in output
    assert not inspect(tmp_path).problems
    assert not list((tmp_path / "checkpoints").glob("[!0-9]*"))


@pytest.mark.parametrize("step", [3, 2], ids=["a new one", "one replaced"])
def test_a_kill_between_any_two_calls_of_a_save_loses_no_checkpoint(tmp_path, monkeypatch, step):
    """Every call that changes a folder is the last one once."""

    class Killed(BaseException):
        pass

    def dying(call, name):
        def or_die(*args, **more):
            calls.append(name)
            if len(calls) > last:
                if name == "rmtree":  # killed with one of its files deleted
                    (args[0] / "run.pt").unlink()
                raise Killed
            return call(*args, **more)

        return or_die

    last, ended = 0, False
    while not ended:
        folder, calls = tmp_path / str(last), []
        for number in (1, 2):
            Checkpoints(folder).save(number, {"run": {"value": number}, "learner": {}})
        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", dying(Path.rename, "rename"))
            patch.setattr(shutil, "rmtree", dying(shutil.rmtree, "rmtree"))
            try:
                Checkpoints(folder).save(step, {"run": {"value": 9}, "learner": {}})
                ended = True
            except Killed:
                last += 1
        checkpoints = Checkpoints(folder)
        checkpoints.tidy()
        found = checkpoints.published()
        parts = [Checkpoints.load(path) for path in found]
        assert all(part.keys() == {"run", "learner"} for part in parts), calls
        assert parts[-1]["run"]["value"] in (2, 9), calls
        assert not list(folder.glob("[!0-9]*"))
    assert parts[-1]["run"]["value"] == 9
    assert {"rename", "rmtree"} == set(calls)


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 64 MB, which only root can mount."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no tmpfs can be mounted: {error}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every", "room"), [("0.5", 300_000), ("1000", 30_000)], ids=["while saving", "while adding"]
)
def test_a_full_disk_stops_the_run_with_the_reason_and_it_resumes(
    tmp_path, small_disk, every, room
):
    run = small_disk / "run"
    # A new run refuses so small a disk, so one that began elsewhere is moved there.
    finish(start(tmp_path / "run", "--stop.steps", "100"))
    shutil.move(tmp_path / "run", run)
    usage = os.statvfs(small_disk)
    filler = small_disk / "filler"
    filler.write_bytes(bytes(usage.f_bavail * usage.f_frsize - room))
    flags = ("--checkpoint.every", every, "--stop.steps", "1000000")
    output = finish(start(run, *flags), status=1)
    last = output.strip().splitlines()[-1]
    assert last.startswith("error: disk full"), output
    assert "free space" in last
    assert "agent/train.py" not in output  # no traceback; TensorBoard's own thread may print one
    assert not [path for path in run.rglob("*") if "writing" in path.name]
    assert inspect(run).problems == []
    step = int(published(run)[-1])
    filler.unlink()
    finish(start(run, "--stop.steps", str(step + 100)))
    assert int(published(run)[-1]) >= step + 100
    assert inspect(run).problems == []
