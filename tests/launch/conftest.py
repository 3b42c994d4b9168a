"""A stand-in for `agent.train` that is over in a second, and sweeps of it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Files, lock, notices and exit statuses are those of `agent.train`. `journal` tells what happened;
# a file `fail` beside the script holds how often a seed is still to fail.
TRAINER = """
import fcntl, json, os, signal, sys, time
from pathlib import Path
from configs import load as configs

config = configs.resolve(sys.argv[1:])
folder = Path(config.logdir)
folder.mkdir(parents=True, exist_ok=True)
journal = (folder / "journal").open("a", buffering=1)
lock = (folder / "lock").open("w")
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("doubled", file=journal)
    sys.exit(2)
stop = []
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, lambda *_: stop.append(1))
said = {key: os.environ.get(key, "") for key in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")}
print("began", json.dumps(said), file=journal)
fail = Path(__file__).with_name("fail")
left = json.loads(fail.read_text()) if fail.exists() else {}
if left.get(str(config.seed)):
    left[str(config.seed)] -= 1
    fail.write_text(json.dumps(left))
    sys.exit("a wall")
configs.save(config, folder / "config.yaml")
scores = (folder / "scores.jsonl").open("a", buffering=1)
step = len((folder / "scores.jsonl").read_text().splitlines())
while step < config.stop.steps and not stop:
    step += 1
    axes = dict.fromkeys(("env_step", "agent_step", "update", "train_flops"), step)
    row = {**axes, "wall_seconds": step / 100}
    print(json.dumps({**row, "return": step / 2, "length": 1}), file=scores)
    rates = {"rate/agent_steps": 100.0, "rate/updates": 100.0}
    (folder / "metrics.jsonl").write_text(json.dumps({**row, **rates}) + "\\n")
    time.sleep(0.01)
if step >= config.stop.steps:
    (folder / "finished.json").write_text(json.dumps({"by": "stop.steps", **row}))
print("ended", file=journal)
"""
SWEEP = """
import sys
from launch.sweep import main
sys.exit(main(sys.argv[2:], [sys.executable, sys.argv[1]]))
"""


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    """The command of the stand-in."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER)
    return [sys.executable, str(script)]


@pytest.fixture
def begin(trainer):
    """Starts a sweep of the stand-in as a process; what still runs at the end is killed."""
    started = []

    def start(*words):
        command = [sys.executable, "-c", SWEEP, trainer[1], *map(str, words)]
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen(command, cwd=ROOT, **pipe))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def finished_once():
    """Asserts of a run of the stand-in that every step was made once, that nobody else was in its
    folder, and that it is packed in less than 100 KB."""

    def check(sweep, name, steps):
        folder = sweep / "runs" / name
        rows = [json.loads(line) for line in (folder / "scores.jsonl").read_text().splitlines()]
        assert [row["agent_step"] for row in rows] == list(range(1, steps + 1))
        assert "doubled" not in (folder / "journal").read_text()
        assert 0 < (sweep / "raw" / f"{name}.json").stat().st_size < 100_000

    return check
