"""A notice to stop, whatever the run is doing: one save, status 0, nothing left, no noise."""

import os
import shutil
import signal
import subprocess
import sys
import time
from multiprocessing import resource_tracker
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from agent.checkpoint import Checkpoints
from agent.notice import STOPS, Notice, Stopped

ROOT = Path(__file__).parents[2]
FLAGS = [
    *("--task", "test_image", "--size", "debug", "--precision", "float32", "--device", "cpu"),
    *("--threads", "1", "--batch.size", "2", "--batch.length", "16", "--behaviour.horizon", "3"),
    *("--loop.train_ratio", "8", "--log.every", "0.2", "--env.processes", "yes"),
    *("--env.count", "2"),
]
GRACE = 30.0  # seconds; schedulers give this or more
COMPILE = 300.0  # what a notice to one of several ranks waits for


def training(folder):
    return '"loss/total"' in read(folder / "metrics.jsonl")


def read(path):
    return path.read_text() if path.exists() else ""


# What tells that a run is in a phase, and the flags that make it.
PHASES = {
    "prefill": (lambda f: "rate/" in read(f / "metrics.jsonl"), ["--loop.fill", "1000000"]),
    "training": (training, []),
    "video": (lambda f: (f / "media" / "prediction.gif").exists(), ["--log.media_every", "0.1"]),
    "checkpoint": (training, ["--checkpoint.every", "0.01"]),
    "evaluation": (
        lambda folder: (folder / "evaluation" / "weights.pt").exists(),
        ["--eval.every", "100", "--eval.episodes", "100000"],
    ),
    "compile": (
        lambda folder: "compiling the update" in read(folder / "out"),
        ["--compile", "yes"],
    ),
}


@pytest.fixture
def start():
    """Starts a run in a folder; what still runs when the test ends is killed."""
    started = []

    def begin(folder, *flags, ranks=1):
        folder.mkdir(exist_ok=True)
        command = [sys.executable, "-m"]
        if ranks > 1:
            command += ["torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "-m"]
        command += ["agent.train", "--logdir", str(folder), *FLAGS, *flags]
        with (folder / "out").open("w") as out:
            started.append(
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                )
            )
        return started[-1]

    yield begin
    for process in started:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
        process.kill()
        process.wait()


@pytest.mark.parametrize("when", ["imports", "assembles"])
def test_a_notice_before_the_first_step_ends_it_too(tmp_path, start, when):
    folder = tmp_path / "run"
    process = start(folder, "--stop.steps", "1000000")
    deadline = time.monotonic() + 60
    while not ((folder / "lock").exists() if when == "assembles" else read(folder / "out")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(GRACE) == 0
    said = read(tmp_path / "run" / "out")
    assert "stopped by SIGTERM before its first step" in said
    assert "Traceback" not in said


def test_a_notice_while_the_update_compiles_ends_the_run_as_it_was_saved(monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *args: None)
    monkeypatch.setattr(resource_tracker, "ensure_running", lambda: None)
    notice = Notice(several=False)
    learner = SimpleNamespace(updates=7)
    loop = SimpleNamespace(stop=None, expendable=True, saved={"agent_step": 34}, learner=learner)
    notice.tell(loop)
    with pytest.raises(Stopped, match=r"SIGTERM at step 34, update 7"):
        notice(signal.SIGTERM, None)
    notice(signal.SIGINT, None)  # while it ends
    assert loop.stop == "SIGINT"


HUNG_UP = """
import signal, sys, time
from types import SimpleNamespace
from agent.notice import Notice

if sys.argv[1] == "nohup":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
loop = SimpleNamespace(stop=None, expendable=False)
Notice(several=False).tell(loop)
print("begun", flush=True)
sys.stdin.read()  # until it may go on
for stream in (sys.stdout, sys.stderr):
    print("the last row", file=stream, flush=True)
sys.exit(3 if loop.stop == "SIGHUP" else 4)
"""


@pytest.mark.parametrize("how", ["terminal", "nohup"])
def test_a_closed_terminal_is_a_notice_unless_it_is_to_be_ignored(how):
    ours, terminal = os.openpty()
    outputs = {"stdout": terminal, "stderr": terminal}
    if how == "nohup":
        outputs = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    command = [sys.executable, "-c", HUNG_UP, how]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, **outputs)
    os.close(terminal)
    os.read(process.stdout.fileno() if how == "nohup" else ours, 5)
    os.close(ours)
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=60)
    assert process.returncode == {"terminal": 3, "nohup": 4}[how]


ALONE = [(whom, number) for whom in ("process", "group") for number in STOPS]
OF_TWO = [("one of two ranks", signal.SIGTERM), ("both ranks", signal.SIGTERM)]


@pytest.mark.slow
@pytest.mark.parametrize(("whom", "number"), [*ALONE, *OF_TWO])
@pytest.mark.parametrize("phase", PHASES)
def test_a_notice_ends_a_run_within_its_grace(tmp_path, start, phase, whom, number, capsys):
    begun, flags = PHASES[phase]
    if phase == "compile" and not shutil.which("g++"):
        pytest.skip("no C++ compiler")
    folder = tmp_path / "run"
    ranks = 2 if "rank" in whom else 1
    process = start(folder, *flags, "--stop.steps", "1000000", ranks=ranks)
    deadline = time.monotonic() + 200  # compilers take their time
    while not begun(folder):
        assert process.poll() is None, read(folder / "out")
        assert time.monotonic() < deadline, read(folder / "out")
        time.sleep(0.05)
    children = psutil.Process(process.pid).children(recursive=True)
    asked = time.monotonic()
    if whom == "group":
        os.killpg(process.pid, number)
    elif whom == "process":
        process.send_signal(number)
    else:
        told = psutil.Process(process.pid).children()[whom == "one of two ranks" :]
        for rank in told:
            rank.send_signal(number)
    status = process.wait(COMPILE if phase == "compile" and ranks > 1 else GRACE)
    seconds = time.monotonic() - asked
    said = read(folder / "out")
    assert status == 0, said
    assert f"stopped by {number.name}" in said
    assert "Traceback" not in said
    _, alive = psutil.wait_procs(children, 3)
    assert not alive
    assert not list((folder / "checkpoints").glob("writing-*"))
    published = Checkpoints(folder / "checkpoints").published()
    saved = Checkpoints.load(published[-1])
    step, update = saved["run"]["agent_step"], saved["learner"]["updates"]
    assert f"at step {step:,}, update {update:,}" in said
    with capsys.disabled():
        row = f"{phase}, {number.name} to {whom}: {seconds:.1f} s, status {status}, step {step}"
        sys.stdout.write(f"\n{row}\n")
    plain = ["--eval.every", "0", "--compile", "no"]
    resumed = start(folder, "--stop.steps", str(step), *plain, ranks=ranks)
    assert resumed.wait(120) == 0
    assert f"resuming {folder}" in read(folder / "out")
