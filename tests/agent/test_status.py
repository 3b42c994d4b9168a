"""What `agent.status` says of a run, from its files alone."""

import fcntl
import json

import pytest

from agent import status
from configs import load as configs
from configs.load import resolve

ROW = {
    "agent_step": 2_500,
    "update": 40,
    "wall_seconds": 100.0,
    "rate/agent_steps": 10.0,
    "rate/updates": 0.5,
    "loss/total": 3.0,
    "env/restarts": 0,
    "usage/ram_gb": 1.5,
    "replay/steps": 2_400,
    "replay/disk_gb": 0.1,
}


@pytest.fixture
def run(tmp_path):
    configs.save(resolve(["--task", "tmaze_5", "--stop.steps", "10000"]), tmp_path / "config.yaml")
    (tmp_path / "checkpoints" / "000002000").mkdir(parents=True)
    (tmp_path / "lock").touch()
    write(tmp_path / "metrics.jsonl", [{**ROW, "agent_step": 1_000}, ROW])
    return tmp_path


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def after(run, seconds):
    """What is seen some seconds after the last row."""
    return status.look(run, (run / "metrics.jsonl").stat().st_mtime + seconds)


def test_a_run_that_is_up(run, capsys):
    with (run / "lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = after(run, 5)
        assert found["state"] == "running"
        assert after(run, 500)["state"] == "silent"
    assert found["eta_seconds"] == 750
    assert found["checkpoint"] == 2000
    text = status.text(found)
    assert "running, last row 5 s ago; step 2,500, update 40, 25.0% done" in text
    assert "10.0 steps/s, 0.50 updates/s, done in 12 min" in text


def test_rows_of_a_run_of_days_come_more_seldom(run):
    write(run / "metrics.jsonl", [{**ROW, "wall_seconds": 1e6}])  # 100 seconds apart
    with (run / "lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert after(run, 500)["state"] == "running"
        assert after(run, 700)["state"] == "silent"


def test_a_run_that_is_not(run):
    assert after(run, 5)["state"] == "stopped"
    (run / "error.txt").write_text("Traceback\nRuntimeError: a wall\n")
    assert after(run, 5)["state"] == "failed"
    assert "ago: RuntimeError: a wall" in status.text(after(run, 5))
    write(run / "metrics.jsonl", [{**ROW, "agent_step": 10_000}])
    assert after(run, 5)["state"] == "done"


def test_a_run_without_a_row_yet(run):
    (run / "metrics.jsonl").unlink()
    found = status.look(run)
    assert (found["state"], found["agent_step"], found["eta_seconds"]) == ("stopped", None, None)
    assert status.text(found).splitlines()[1].strip() == "stopped"


def test_offline_it_is_updates_that_count(run):
    flags = ["--loop.mode", "offline", "--stop.updates", "80", "--replay.from", "elsewhere"]
    configs.save(resolve(flags), run / "config.yaml")
    found = after(run, 5)
    assert (found["share"], found["eta_seconds"]) == (0.5, 80)


@pytest.mark.parametrize(
    ("scores", "word"),
    [
        ([0.0, 1.0] * 50 + [2.0, 3.0] * 50, "rising"),
        ([2.0, 3.0] * 50 + [0.0, 1.0] * 50, "falling"),
        ([0.0, 1.0] * 100, "level"),
        ([0.0, 1.0, 0.5, 1.0], "level"),
        ([1.0, 2.0], ""),
    ],
)
def test_trend_is_more_than_two_standard_errors(scores, word):
    assert status.trend(scores) == word


def test_scores_and_evaluation(run):
    write(
        run / "scores.jsonl", [{"return": 0.0}] * 300 + [{"return": float(n)} for n in range(200)]
    )
    write(run / "metrics.jsonl", [ROW, {"agent_step": 2_000, "eval/greedy/return": 7.5}])
    found = after(run, 1)
    assert found["return"] == 149.5
    assert (found["evaluation"], found["evaluation_step"]) == (7.5, 2000)
    assert found["agent_step"] == 2500
    assert "return 149.50 (last 100 episodes, rising); evaluated 7.50 at step 2,000" in status.text(
        found
    )


def test_only_whole_rows_of_the_end_are_read(run, monkeypatch):
    monkeypatch.setattr(status, "TAIL", 100)
    path = run / "scores.jsonl"
    write(path, [{"return": float(n)} for n in range(1000)])
    with path.open("a") as file:
        file.write('{"return": 12')  # being written
    assert [row["return"] for row in status.rows(path)] == [996.0, 997.0, 998.0, 999.0]


def test_a_folder_without_a_run_is_one_line(run, tmp_path, capsys):
    other = tmp_path / "other"
    assert status.main([str(other), str(run), "--json"]) == 2
    printed = capsys.readouterr()
    assert printed.err == f"error: {other} holds no run: config.yaml is missing\n"
    assert json.loads(printed.out)["task"] == "tmaze_5"
