"""What `launch.status` says of a sweep, from its files alone."""

import fcntl
import json
import time

import pytest

from agent.logger import AXES
from configs import load as configs
from configs.load import resolve
from launch import manifest, status, sweep
from launch.attempt import settle
from launch.manifest import Grid

RATES = {"rate/agent_steps": 10.0, "rate/updates": 0.5}


@pytest.fixture
def runs(tmp_path):
    """A sweep of two cores and three seeds of 1000 steps, none of which has begun."""
    asked = Grid(["tmaze_5"], ["gru", "s3m"], [0, 1, 2], None, ["stop.steps=1000"])
    return manifest.update(tmp_path, asked, sweep.matching, False)


def begun(out, entry, step, seconds, score=0.5):
    """As `agent.train` leaves it after `step` steps that took `seconds`."""
    folder = out / entry["logdir"]
    folder.mkdir(parents=True)
    configs.save(resolve(entry["flags"]), folder / "config.yaml")
    row = {**dict.fromkeys(AXES, step), "wall_seconds": seconds}
    (folder / "metrics.jsonl").write_text(json.dumps({**row, **RATES}) + "\n")
    scores = [{**row, "return": score, "length": 5}] * 3
    (folder / "scores.jsonl").write_text("".join(json.dumps(score) + "\n" for score in scores))
    return folder


def finished(out, entry, seconds, score):
    folder = begun(out, entry, 1000, seconds, score)
    (folder / "finished.json").write_text(json.dumps({"by": "stop.steps"}))
    assert settle(out, entry)


def shown(out, capsys):
    assert status.main([str(out)]) == 0
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_a_row_for_each_run_then_the_whole_then_the_failures(tmp_path, runs, capsys):
    finished(tmp_path, runs[0], 100.0, 0.75)
    running = begun(tmp_path, runs[1], 600, 90.0, 0.25)
    begun(tmp_path, runs[2], 400, 80.0)
    failed = begun(tmp_path, runs[3], 100, 30.0)
    failed.with_name(f"{runs[3]['name']}.failed").write_text("exit status 1: a wall\n")
    failed.with_name(f"{runs[4]['name']}.job").write_text("4711_0")
    with (running / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lines = shown(tmp_path, capsys)
    assert lines[0] == ["task", "variant", "seed", "state", "done", "step", "score", "left"]
    assert [line[1:] for line in lines[1:7]] == [
        ["gru", "0", "finished", "100%", "1,000", "0.750"],
        ["gru", "1", "running", "60%", "600", "0.250", "40", "s"],
        ["gru", "2", "stopped", "40%", "400", "0.500"],
        ["s3m", "0", "failed", "10%", "100", "0.500"],
        ["s3m", "1", "queued"],
        ["s3m", "2", "missing"],
    ]
    # 40 s, 0.6 of the 150 s that a gru takes (100, 150 and 200), then of an s3m 0.9 and twice the
    # whole of the 300 s that the only one would take; one at a time: 40 + 90 + 870 s.
    summary = "1 of 6 runs finished, 1 running, 1 stopped, 1 failed, 1 queued, 1 missing; done in "
    assert " ".join(lines[7]) == summary + "17 min"
    assert " ".join(lines[8]).startswith(f"{runs[3]['name']}: exit status 1: a wall (log: ")


def test_what_is_packed_needs_no_folder(tmp_path, runs, capsys):
    for entry in runs:
        finished(tmp_path, entry, 100.0, 0.75)
    (tmp_path / "runs").rename(tmp_path / "gone")
    lines = shown(tmp_path, capsys)
    assert {tuple(line[3:]) for line in lines[1:7]} == {("finished", "100%", "1,000", "0.750")}
    assert " ".join(lines[7]) == "6 of 6 runs finished"


def test_a_file_that_cannot_be_read_is_told_and_hides_no_other_run(tmp_path, runs, capsys):
    finished(tmp_path, runs[0], 100.0, 0.75)
    (tmp_path / "raw" / f"{runs[0]['name']}.json").write_text("{")
    (begun(tmp_path, runs[1], 400, 80.0) / "config.yaml").write_text("sise: 1m")
    lines = [" ".join(line) for line in shown(tmp_path, capsys)]
    assert lines[1:3] == ["tmaze_5 gru 0 finished", "tmaze_5 gru 1 stopped"]
    assert "is no packed run" in lines[8]
    assert "sise" in lines[9]


def row(entry, state, seconds=None, share=None, left=None):
    return {"entry": entry, "state": state, "seconds": seconds, "share": share, "left": left}


def test_more_at_a_time_are_done_sooner_but_not_before_the_longest(runs):
    both = [row(runs[0], "running", 50, 0.5, 50), row(runs[1], "running", 50, 0.5, 50)]
    assert status.eta([*both, row(runs[2], "missing")]) == 100
    assert status.eta([*both, *[row(runs[2], "missing")] * 2]) == 150
    assert status.eta([both[0], row(runs[1], "running", 100, 0.2, 400)]) == 400
    assert status.eta([row(runs[0], "missing")]) is None
    assert status.eta([row(runs[0], "finished", 100, 1.0, 0.0), row(runs[1], "missing")]) is None


def test_on_a_terminal_it_is_renewed_until_all_is_finished(tmp_path, runs, monkeypatch):
    looks = []

    class Screen:
        """A terminal of which every look is kept."""

        def __init__(self, first, **_):
            looks.append(first)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def update(self, view, refresh):
            looks.append(view)

    def sleep(seconds):
        assert seconds == 2
        finished(tmp_path, left.pop(0), 10.0, 1.0)

    left = list(runs)
    monkeypatch.setattr(status, "Live", Screen)
    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert status.main([str(tmp_path), "--every", "2"]) == 0
    assert [str(look.renderables[1])[:6] for look in looks] == [f"{done} of 6" for done in range(7)]


def test_a_folder_without_a_sweep_is_one_line(tmp_path, capsys):
    assert status.main([str(tmp_path)]) == 2
    assert "holds no sweep: manifest.json is missing" in capsys.readouterr().err
