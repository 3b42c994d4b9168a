"""Sweeps on one machine: N at a time, killed and typed again, failures, and what is printed."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from launch import local, sweep
from launch.attempt import Attempt, command, folder
from launch.runs import read_manifest, unpack


def grid(out, *more, tasks="tmaze_5", seeds="2", steps=60):
    words = ["--tasks", tasks, "--cores", "gru", "s3m", "--seeds", seeds]
    return [*words, "--set", f"stop.steps={steps}", "--out", str(out), *more]


def names(out):
    return [entry["name"] for entry in read_manifest(out)["runs"]]


def journals(out):
    return [(out / "runs" / name / "journal").read_text() for name in names(out)]


def wait_for(what, seconds=30):
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def alone(trainer, capsys):
    """What a sweep prints that runs to its end in this process, and its exit status."""

    def run(*words):
        status = sweep.main([str(word) for word in words], trainer)
        return "".join(capsys.readouterr()), status

    return run


def test_killed_twice_on_the_way_it_completes_with_no_run_lost_or_doubled(
    tmp_path, begin, alone, finished_once
):
    out = tmp_path / "sweep"
    words = grid(out, "--jobs", "2")
    for number, kill in enumerate((signal.SIGKILL, signal.SIGINT), 1):
        process = begin(*words)
        # In the middle of a run: its scores have begun, and it has not ended.
        wait_for(lambda n=number: sum(j.count("began") for j in journals_so_far(out)) >= 2 * n)
        time.sleep(0.2)
        process.send_signal(kill)
        output, _ = process.communicate(timeout=30)
        if kill != signal.SIGKILL:
            assert process.returncode == 0
            assert f"stopped by {kill.name}: " in output
    output, status = alone(*words)
    assert status == 0, output
    assert output.splitlines()[-1] == "done: 4 of 4 runs finished"
    for name in names(out):
        finished_once(out, name, 60)
    assert len(list((out / "raw").iterdir())) == len(names(out)) == 4
    assert sum(journal.count("began") for journal in journals(out)) > 4  # some were resumed


def journals_so_far(out):
    return [path.read_text() for path in out.glob("runs/*/journal")]


def test_a_run_is_told_to_end_when_its_sweep_is_killed(tmp_path, begin):
    out = tmp_path / "sweep"
    process = begin(*grid(out, steps=100_000))
    wait_for(lambda: any("began" in journal for journal in journals_so_far(out)))
    children = psutil.Process(process.pid).children()
    assert children
    process.kill()
    psutil.wait_procs(children, timeout=10)
    assert not any(child.is_running() for child in children)
    assert "ended" in journals_so_far(out)[0]


def test_typed_again_finished_runs_are_kept_without_their_folders(tmp_path, alone):
    out = tmp_path / "sweep"
    assert alone(*grid(out, steps=3))[1] == 0
    (out / "runs").rename(tmp_path / "gone")
    output, status = alone(*grid(out, "--seeds", "3", steps=3))
    assert status == 0
    assert "6 runs, 4 of them packed" in output
    assert len(list((out / "runs").glob("*/journal"))) == 2
    assert len(list((out / "raw").iterdir())) == 6
    run = unpack(out / "raw" / "tmaze_5-gru-s0.json")
    assert (run.status, run.config["stop.steps"]) == ("finished", 3)
    assert list(run.scores["return"]) == [0.5, 1.0, 1.5]


def test_two_sweeps_in_one_folder_share_the_runs_and_wait_for_each_other(
    tmp_path, begin, alone, finished_once
):
    out = tmp_path / "sweep"
    first = begin(*grid(out, steps=60))
    wait_for(lambda: any("began" in journal for journal in journals_so_far(out)))
    output, status = alone(*grid(out, "--jobs", "4", steps=60))
    assert "tmaze_5-gru-s0: running in another process, which is waited for" in output
    assert (status, first.wait(timeout=30)) == (0, 0)
    for name in names(out):
        finished_once(out, name, 60)


def manifest_of(out, *more, **size):
    """The runs of a sweep that has not begun."""
    asked = sweep.grid(sweep.arguments(grid(out, *more, **size)))
    return sweep.manifest.update(out, asked, sweep.matching, False)


def test_a_run_begun_by_hand_is_no_failure(tmp_path, trainer, monkeypatch):
    out = tmp_path / "sweep"
    entry = manifest_of(out, steps=80)[0]
    looks, busy = [], local.busy
    # It takes the folder between the look and the start: only the trainer's own lock tells.
    monkeypatch.setattr(local, "busy", lambda *at: looks.pop() if looks else busy(*at))
    by_hand = subprocess.Popen(command(out, entry, trainer, 0))
    wait_for((folder(out, entry) / "journal").exists)
    queue = local.Local(out, [entry], trainer, retries=0)
    looks.append(False)
    states = queue.run()
    assert by_hand.wait(timeout=30) == 0
    assert states == {entry["name"]: "finished"}
    assert journals_so_far(out)[0].splitlines()[1:] == ["doubled", "ended"]


def test_the_log_is_held_as_long_as_a_process_writes_it(tmp_path, monkeypatch):
    out = tmp_path / "sweep"
    monkeypatch.setattr("launch.attempt.PATIENCE", 0.1)
    entry = manifest_of(out)[0]
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    attempt = Attempt(out, entry, sleeper, {})
    try:
        with pytest.raises(BlockingIOError):
            Attempt(out, entry, sleeper, {})
    finally:
        attempt.stop()
        attempt.process.wait()
    again = Attempt(out, entry, [sys.executable, "-c", "print('a word')"], {})
    assert again.process.wait() == 0
    log = (out / "runs" / f"{entry['name']}.log").read_text()
    assert log.splitlines()[-1] == "a word"
    assert log.count("$ ") == 2


def test_a_failing_run_is_tried_again_and_others_go_on(tmp_path, alone):
    out = tmp_path / "sweep"
    fail = tmp_path / "fail"
    words = grid(out, "--cores", "gru", "--retries", "2", steps=3)
    fail.write_text(json.dumps({"0": 4}))
    output, status = alone(*words)
    assert status == 1
    assert output.count("tmaze_5-gru-s0: failed, exit status 1: a wall; will be tried again") == 2
    assert "not all done: 1 of 2 runs finished" in output.splitlines()
    assert "failed: tmaze_5-gru-s0" in output.splitlines()
    assert [journal.count("began") for journal in journals(out)] == [3, 1]
    assert [path.stem for path in out.glob("raw/*")] == ["tmaze_5-gru-s1"]
    output, status = alone(*words)  # it fails once more
    assert (status, output.count("will be tried again")) == (0, 1)
    assert not list(out.glob("runs/*.failed"))


def test_a_run_that_ends_unfinished_is_not_begun_again_in_this_sitting(tmp_path, alone, trainer):
    script = Path(trainer[1])
    script.write_text("print('stopped by SIGTERM')")
    output, status = alone(*grid(tmp_path / "sweep", seeds="1"))
    assert status == 1
    assert "stopped: tmaze_5-gru-s0" in output.splitlines()


def test_a_run_that_was_stopped_before_it_could_save_is_no_failure(tmp_path, begin, trainer):
    out = tmp_path / "sweep"
    Path(trainer[1]).write_text("import time; print('ready', flush=True); time.sleep(60)")
    process = begin(*grid(out, seeds="1"))
    log = out / "runs" / "tmaze_5-gru-s0.log"
    wait_for(lambda: log.exists() and "ready\n" in log.read_text())
    process.terminate()
    assert "tmaze_5-gru-s0: stopped" in process.communicate(timeout=30)[0]
    assert process.returncode == 0
    assert not list(out.glob("runs/*.failed"))


def test_as_many_at_a_time_as_jobs_each_with_its_gpu_and_threads(tmp_path, alone):
    out = tmp_path / "sweep"
    words = grid(out, "--jobs", "3", "--gpus", "4", "6", "--threads", "2", steps=40)
    assert alone(*words)[1] == 0
    spans, said = [], set()
    for name in names(out):
        lines = (out / "runs" / name / "scores.jsonl").stat().st_mtime
        first = (out / "runs" / name / "config.yaml").stat().st_mtime
        spans.append((first, lines))
        began = (out / "runs" / name / "journal").read_text().splitlines()[0]
        env = json.loads(began.removeprefix("began "))
        said.add((env["OMP_NUM_THREADS"], env["CUDA_VISIBLE_DEVICES"]))
        assert "--threads 2 " in (out / "runs" / f"{name}.log").read_text()
    at_once = [sum(a <= first < b for a, b in spans) for first, _ in spans]
    assert max(at_once) == 3
    assert said == {("2", "4"), ("2", "6")}


def test_dry_prints_commands_and_compute_and_writes_nothing(tmp_path, capsys):
    out = tmp_path / "sweep"
    words = grid(out, "--dry", "--set", "stop.flops=1e15", steps=500)
    assert sweep.main(words) == 0
    printed = capsys.readouterr().out
    assert f"--core s3m --seed 1 --stop.steps 500 --stop.flops 1e15 --threads 1 --logdir {out}" in (
        printed
    )
    assert printed.count("-m agent.train --task tmaze_5") == 4
    assert "4 x 1e+15 FLOPs = 4e+15 FLOPs" in printed
    assert "unknown" not in printed
    assert sweep.main(grid(out, "--dry", steps=500)) == 0
    printed = capsys.readouterr().out
    assert "4 x 500 agent steps = 2,000 agent steps" in printed
    assert "FLOPs unknown" in printed
    assert not out.exists()


def test_runs_may_lie_elsewhere_and_the_manifest_names_no_machine(tmp_path, alone):
    out, runs = tmp_path / "a" / "sweep", tmp_path / "big"
    assert alone(*grid(out, "--runs", runs, seeds="1", steps=1))[1] == 0
    assert len(list(runs.glob("*/journal"))) == 2
    assert sorted(path.name for path in out.iterdir()) == ["manifest.json", "raw"]
    relative = sweep.grid(sweep.arguments(["--out", "a/sweep", "--runs", "big"])).logdir
    assert relative == "../../big"


@pytest.mark.parametrize(
    ("words", "seeds"),
    [
        (["5"], [0, 1, 2, 3, 4]),
        (["3", "7"], [3, 7]),
        (["5-7"], [5, 6, 7]),
        (["0-1", "9"], [0, 1, 9]),
        (None, None),
    ],
)
def test_seeds_as_they_are_typed(words, seeds):
    assert sweep.numbers(words) == seeds


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--seeds", "five"], "error: --seeds five: expected numbers, or A-B"),
        (["--tasks", "tmazes_5"], "did you mean"),
        (["--slurm", "nodes"], "error: --slurm nodes: expected KEY=VALUE"),
        ([], "error: a new sweep needs --tasks, --cores and --seeds"),
    ],
)
def test_a_wrong_command_is_one_line_and_status_2(tmp_path, capsys, words, expected):
    assert sweep.main([*words, "--out", str(tmp_path / "sweep")]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert len(error.splitlines()) == 1


def test_matching_asks_the_budget_for_each_core_and_for_variants_with_their_own(
    monkeypatch, capsys
):
    asked = []

    def matched(cores, match, size, task, given, **how):
        asked.append((cores, match, size, task, given, how))
        return {core: {f"{core}.width": 8 * len(given)} for core in cores}

    monkeypatch.setattr("launch.budget.matched", matched)
    monkeypatch.setattr("launch.budget.misses", lambda found, *_: [f"{len(found)} cores: NOT"])
    variants = ["gru", "s3m", "elmur:elmur.slots=2"]
    settings = ["size=debug", "batch.size=4"]
    assert sweep.matching("flops", variants, "tmaze_5", settings) == {
        "gru": {"gru.width": 16},
        "s3m": {"s3m.width": 8},
        "elmur:elmur.slots=2": {"elmur.width": 16},
    }
    assert capsys.readouterr().err.splitlines() == ["warning: tmaze_5, 2 cores: NOT"] * 2
    same = ("flops", "debug", "tmaze_5")
    assert asked == [
        (["gru", "s3m"], *same, {"batch.size": "4"}, {}),
        (["gru", "elmur"], *same, {"batch.size": "4", "elmur.slots": "2"}, {}),
    ]
    sweep.matching("seconds", ["gru"], "tmaze_5", [])
    assert asked[-1][-1] == {"part": "total", "adjust": "train_ratio"}


@pytest.mark.parametrize(
    ("variants", "words"),
    [
        (["gru", "gru:gru.blocks=4"], "gru:gru.blocks=4 cannot be made equal to gru"),
        (["gru", "s3m:model.units=4"], "s3m:model.units=4 cannot be made equal"),
        (["gru", "s3m:s3m.width=4"], "sets s3m.width, as does s3m:s3m.width=4"),
    ],
)
def test_variants_that_cannot_be_made_equal_are_refused(monkeypatch, variants, words):
    monkeypatch.setattr(
        "launch.budget.matched", lambda cores, *_, **__: {c: {f"{c}.width": 8} for c in cores}
    )
    monkeypatch.setattr("launch.budget.misses", lambda *_: [])
    with pytest.raises(ValueError, match=words):
        sweep.matching("flops", variants, "tmaze_5", ["size=debug"])


TINY = [
    *("size=debug", "precision=float32", "device=cpu", "batch.size=2", "batch.length=16"),
    *("behaviour.horizon=3", "loop.train_ratio=8", "log.every=0.2", "log.media_every=0"),
    *("loop.mode=lockstep", "env.count=2", "stop.steps=1000", "checkpoint.every=1"),
]


@pytest.mark.slow
def test_runs_of_agent_train_with_equal_flops_killed_twice_on_the_way(tmp_path):
    out = tmp_path / "sweep"
    words = ["--tasks", "bsuite_memory_len_5", "--cores", "gru", "s3m", "--seeds", "2", "--jobs"]
    words += ["2", "--match", "flops", "--out", str(out), "--set", *TINY]
    whole = [sys.executable, "-m", "launch.sweep", *words]
    for kill in (signal.SIGKILL, signal.SIGTERM):
        process = subprocess.Popen(whole)
        try:
            rows = sum_of_rows(out)
            wait_for(lambda n=rows: sum_of_rows(out) > n + 20, seconds=200)
            process.send_signal(kill)
            process.wait(timeout=60)
        finally:
            process.kill()
    result = subprocess.run(whole, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "done: 4 of 4 runs finished" in result.stdout
    manifest = read_manifest(out)
    for entry in manifest["runs"]:
        run = unpack(out / "raw" / f"{entry['name']}.json")
        assert (run.status, run.reason) == ("finished", "by stop.steps")
        lines = (folder(out, entry) / "scores.jsonl").read_text().splitlines()
        episodes = [json.loads(line) for line in lines]
        # An episode begun anew after a kill -9 replaces the one that was lost with it.
        steps = [row["agent_step"] for row in episodes]
        assert steps == sorted(steps)
        assert 1000 <= run.end["agent_step"] < 1010
        assert (out / "raw" / f"{entry['name']}.json").stat().st_size < 100_000
    logs = [path.read_text() for path in (out / "runs").glob("*.log")]
    assert any("resuming" in log for log in logs)
    assert not any("another process" in log for log in logs)
    assert set(manifest["matched"]["bsuite_memory_len_5"]) == {"gru", "s3m"}


def sum_of_rows(out):
    return sum(path.read_text().count("\n") for path in out.glob("runs/*/scores.jsonl"))
