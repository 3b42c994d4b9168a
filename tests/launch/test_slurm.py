"""Runs as jobs: submitit's debug and local executors, files for SLURM, what is submitted again."""

import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from launch import manifest, slurm, sweep
from launch.attempt import TRAINER, Attempt, beside, state
from launch.manifest import Grid
from launch.runs import unpack
from launch.slurm import Job, submit

submitit = pytest.importorskip("submitit")

# As much of SLURM as is asked for: `sacct` answers what lies in a file.
COMMANDS = {
    "srun": "exit 1",
    "scontrol": "exit 1",
    "sbatch": 'cp "$1" "$(dirname "$0")/submitted.sh"; echo Submitted batch job 4711',
    "sacct": 'cat "$(dirname "$0")/answer" 2>/dev/null || exit 1',
}


def entries(out, steps=40, seeds=(0, 1)):
    asked = Grid(["tmaze_5"], ["gru"], list(seeds), None, [f"stop.steps={steps}"])
    return manifest.update(out, asked, sweep.matching, False)


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """The folder of SLURM's commands."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in COMMANDS.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return folder


def wait_for(what):
    deadline = time.monotonic() + 120
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def tasks(job):
    """The processes of a job of the local executor: its controller's children."""
    return psutil.Process(int(job.job_id)).children()


def journal(out, entry):
    path = out / entry["logdir"] / "journal"
    return path.read_text() if path.exists() else ""


def test_the_debug_executor_runs_a_sweep(tmp_path, trainer, finished_once):
    out = tmp_path / "sweep"
    runs = entries(out)
    jobs = submit(out, runs, trainer, {}, cluster="debug")
    assert [job.result() for job in jobs] == ["finished", "finished"]
    for entry in runs:
        finished_once(out, entry["name"], 40)
    assert submit(out, runs, trainer, {}, cluster="debug") == []


@pytest.mark.parametrize(
    "notices",
    [
        pytest.param([signal.SIGUSR2], marks=pytest.mark.slow, id="USR2"),
        pytest.param([signal.SIGTERM, signal.SIGUSR2], id="TERM and USR2"),
    ],
)
def test_a_preempted_job_saves_is_queued_again_and_finishes(
    tmp_path, trainer, finished_once, notices
):
    out = tmp_path / "sweep"
    (entry,) = entries(out, steps=200, seeds=[0])
    (job,) = submit(out, [entry], trainer, {"timeout_min": 600}, cluster="local")
    wait_for(lambda: (out / entry["logdir"] / "metrics.jsonl").exists())
    (task,) = tasks(job)
    (run,) = task.children()
    for number in notices:
        # SLURM sends it to every process of a job, and `Job` passes SIGTERM on besides.
        run.send_signal(number)
        task.send_signal(number)
    assert job.result() == "finished"
    lines = [line.split()[0] for line in journal(out, entry).splitlines()]
    assert lines == ["began", "ended", "began", "ended"]
    finished_once(out, entry["name"], 200)
    assert "this job is preempted" in job.stderr()


def test_a_run_that_was_told_to_stop_waits_for_what_becomes_of_its_job(
    tmp_path, trainer, monkeypatch
):
    out = tmp_path / "sweep"
    (entry,) = entries(out, steps=100_000, seeds=[0])
    slept = []
    monkeypatch.setattr(slurm, "GRACE", "grace")
    monkeypatch.setattr(slurm.time, "sleep", slept.append)
    job = Job(out, trainer)
    begin = job.begin

    def told(*args):
        attempt = begin(*args)
        job.attempt = attempt
        while not (out / entry["logdir"] / "metrics.jsonl").exists():
            assert attempt.poll() is None
        signal.raise_signal(signal.SIGTERM)
        return attempt

    job.begin = told
    monkeypatch.setenv("SUBMITIT_DEBUG_JOB_ID", "1")
    assert job(entry) == "stopped"
    assert slept == ["grace"]
    assert state(out, entry) == "stopped"


SLOW = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), print("saved", flush=True), sys.exit()))
print("ready", flush=True)
time.sleep(60)
"""


def test_a_notice_is_answered_when_the_run_has_saved(tmp_path, trainer):
    (entry,) = entries(tmp_path, seeds=[0])
    job = Job(tmp_path, trainer, retries=7)
    job.attempt = Attempt(tmp_path, entry, [sys.executable, "-c", SLOW], {})
    log = beside(tmp_path, entry, ".log")
    wait_for(lambda: "ready\n" in log.read_text())
    again = job.checkpoint(entry)
    assert log.read_text().endswith("saved\n")
    assert (again.function, again.args) == (Job(tmp_path, trainer, retries=7), (entry,))
    assert job.attempt.process.wait() == 0


def test_a_job_waits_for_a_run_that_another_process_has(tmp_path, trainer, monkeypatch):
    (entry,) = entries(tmp_path, seeds=[0], steps=3)
    other = Attempt(tmp_path, entry, [sys.executable, "-c", "import time; time.sleep(1.5)"], {})
    monkeypatch.setattr(slurm, "POLL", 0.05)
    monkeypatch.setenv("SUBMITIT_DEBUG_JOB_ID", "1")
    assert Job(tmp_path, trainer)(entry) == "finished"
    assert other.process.wait() == 0


def test_a_job_whose_run_fails_fails_after_another_try(tmp_path, trainer, monkeypatch):
    out = tmp_path / "sweep"
    runs = entries(out, seeds=[0, 1])
    (tmp_path / "fail").write_text('{"0": 2, "1": 1}')
    first, second = submit(out, runs, trainer, {}, cluster="debug")
    monkeypatch.setattr("pdb.post_mortem", lambda: None)  # to which the debug executor leads
    with pytest.raises(RuntimeError, match="exit status 1: a wall"):
        first.result()
    assert [journal(out, runs[0]).count("began"), state(out, runs[0])] == [2, "failed"]
    assert second.result() == "finished"


def parameters_of(text):
    """What a job file asks of SLURM."""
    lines = [line.removeprefix("#SBATCH --") for line in text.splitlines() if "#SBATCH" in line]
    return dict(line.partition("=")[::2] for line in lines)


def test_the_job_file_of_two_nodes_with_eight_gpus(tmp_path, cluster, capsys):
    out = tmp_path / "sweep"
    words = ["--tasks", "tmaze_5", "--cores", "gru", "--seeds", "3", "--out", str(out), "--on"]
    words += ["slurm", "--jobs", "2", "--slurm", "nodes=2", "gpus_per_node=8", "cpus_per_task=64"]
    words += ["timeout_min=1440", "partition=gpu", "account=lab", "signal_delay_s=120"]
    assert sweep.main(words) == 0
    assert "3 of 3 runs submitted as job 4711" in capsys.readouterr().out
    text = (cluster / "submitted.sh").read_text()
    found = parameters_of(text)
    expected = {
        **{"nodes": "2", "gpus-per-node": "8", "ntasks-per-node": "1", "cpus-per-task": "64"},
        **{"time": "1440", "partition": "gpu", "account": "lab", "signal": "USR2@120"},
        **{"array": "0-2%2", "requeue": "", "open-mode": "append", "job-name": "sweep"},
    }
    assert {key: found.get(key) for key in expected} == expected
    (line,) = (line for line in text.splitlines() if line.startswith("srun"))
    assert "--cpus-per-task=64" in line
    assert f"-u -m submitit.core._submit {out}/runs/jobs" in line
    for seed in range(3):
        job = submitit.SlurmJob(out / "runs" / "jobs", f"4711_{seed}")
        submission = job.submission()
        assert submission.args[0]["seed"] == seed
        assert (submission.function.nodes, submission.function.gpus) == (2, 8)
        assert submission.function.threads == 8  # of 64, for each of 8 processes
        assert submission._timeout_countdown >= 100


class Node:
    # The third of an array has a number of its own.
    job_id, raw_job_id, global_rank, hostnames = "4711_2", "4713", 1, ["n01", "n02"]


def test_the_processes_of_a_job_meet_on_its_first_host(tmp_path):
    words = Job(tmp_path, [sys.executable, "-m", "agent.train"], 2, 8, retries=3).launcher(Node())
    assert words[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert words[-2:] == ["-m", "agent.train"]
    assert {"--nnodes=2", "--nproc_per_node=8", "--rdzv_backend=c10d", "--max_restarts=3",
            "--rdzv_endpoint=n01:24713", "--rdzv_id=4713"} == set(words[3:-2])  # fmt: skip
    one_host = Job(tmp_path, [sys.executable, "-m", "agent.train"], 1, 4).launcher(Node())
    assert one_host[3:-2] == ["--standalone", "--nproc_per_node=4", "--max_restarts=1"]
    assert Job(tmp_path, ["python"], 1, 1).launcher(Node()) == ["python"]
    assert Job(tmp_path, [""], 1, 2).distributed
    assert Job(tmp_path, [""], 2, 1).distributed


def test_a_dry_command_shows_what_a_job_will_type(tmp_path, capsys):
    words = ["--tasks", "tmaze_5", "--cores", "gru", "--seeds", "1", "--out", str(tmp_path / "a")]
    words += ["--dry", "--on", "slurm", "--slurm", "nodes=2", "gpus_per_node=8", "cpus_per_task=16"]
    assert sweep.main(words) == 2
    assert "timeout_min" in capsys.readouterr().err
    assert sweep.main([*words, "timeout_min=600"]) == 0
    printed = capsys.readouterr().out
    assert "--nnodes=2 --rdzv_backend=c10d --rdzv_endpoint=HOST:20000 --rdzv_id=JOB" in printed
    assert "--nproc_per_node=8" in printed
    assert "-m agent.train --task tmaze_5 --core gru --seed 0 --threads 2 --logdir" in printed


def test_only_runs_that_slurm_no_longer_has_are_submitted_again(tmp_path, cluster):
    out = tmp_path / "sweep"
    runs = entries(out, seeds=[0, 1, 2])
    assert len(submit(out, runs, [], {})) == 3
    assert [beside(out, entry, ".job").read_text() for entry in runs] == [
        *("4711_0", "4711_1", "4711_2"),
    ]
    submitit.SlurmJob.watcher.clear()
    assert submit(out, runs, [], {}) == []  # `sacct` is silent: they may still be there
    (cluster / "answer").write_text(
        "JobID|State|NodeList\n4711_0|RUNNING|n01\n4711_1|FAILED|n02\n4711_[2-2]|PENDING|\n"
    )
    (again,) = submit(out, runs, [], {})
    assert again.submission().args[0]["seed"] == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["partitio=gpu"], "Unknown argument 'partitio'"),
        (["time=3"], "use timeout_min"),
        (["nodes=two"], '"nodes" expected type'),
        (["nodes"], "expected KEY=VALUE"),
    ],
)
def test_a_wrong_parameter_is_named(tmp_path, cluster, given, words):
    runs = entries(tmp_path / "sweep")
    with pytest.raises(ValueError, match=words):
        submit(tmp_path / "sweep", runs, [], slurm.parameters(given))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "needs timeout_min"),
        ({"timeout_min": 60, "gres": "gpu:4"}, "gres: use gpus_per_node"),
        ({"timeout_min": 60, "tasks_per_node": 8}, "tasks_per_node: use gpus_per_node"),
        ({"timeout_min": 60, "nodes": 2}, "add gpus_per_node"),
    ],
)
def test_parameters_that_would_make_other_runs_are_refused(given, words):
    with pytest.raises(ValueError, match=words):
        slurm.check(given)
    slurm.check({"timeout_min": 60, "nodes": 2, "gpus_per_node": 8})


def test_what_slurm_refuses_is_told_in_its_words(tmp_path, cluster):
    refusal = "echo sbatch: error: Invalid partition specified >&2; exit 1"
    (cluster / "sbatch").write_text(f"#!/bin/sh\n{refusal}\n")
    out = tmp_path / "sweep"
    with pytest.raises(ValueError, match=r"SLURM refuses these jobs.*Invalid partition"):
        submit(out, entries(out), [], {})


def test_a_run_that_another_process_begins_in_that_moment_is_waited_for(tmp_path, monkeypatch):
    out = tmp_path / "sweep"
    (entry,) = entries(out, seeds=[0])
    job, begun = Job(out, ["python"]), []

    def begin(*args):
        begun.append(args)
        if len(begun) == 1:
            raise BlockingIOError
        return "the attempt"

    monkeypatch.setattr(slurm, "POLL", 0)
    monkeypatch.setattr(job, "begin", begin)
    assert job.wait(entry, None) == ""
    assert job.attempt == "the attempt"


def test_without_slurm_or_submitit_a_line_says_so(tmp_path, monkeypatch):
    out = tmp_path / "sweep"
    runs = entries(out)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match="srun"):
        submit(out, runs, [], {})
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(ValueError, match=r"pip install -e '\.\[launch\]'"):
        submit(out, runs, [], {})


@pytest.mark.slow
def test_a_preempted_run_of_agent_train_is_resumed_by_its_next_job(tmp_path):
    out = tmp_path / "sweep"
    settings = ["size=debug", "precision=float32", "device=cpu", "batch.size=2", "env.count=2"]
    settings += ["batch.length=16", "behaviour.horizon=3", "loop.train_ratio=8", "log.every=0.2"]
    settings += ["log.media_every=0", "env.processes=yes", "stop.steps=600"]
    asked = Grid(["bsuite_memory_len_5"], ["gru"], [0], None, settings)
    (entry,) = manifest.update(out, asked, sweep.matching, False)
    (job,) = submit(out, [entry], TRAINER, {"timeout_min": 600}, cluster="local")
    rows = out / entry["logdir"] / "metrics.jsonl"
    wait_for(lambda: rows.exists() and '"loss/total"' in rows.read_text())
    (task,) = tasks(job)
    for process in [*task.children(recursive=True), task]:  # as SLURM does
        process.send_signal(signal.SIGUSR2)
    assert job.result() == "finished"
    log = beside(out, entry, ".log").read_text()
    assert log.count("stopped by SIGTERM") == log.count("resuming") == 1
    run = unpack(out / "raw" / f"{entry['name']}.json")
    assert (run.status, run.reason) == ("finished", "by stop.steps")
    assert 600 <= run.end["agent_step"] < 610


# Rank 0 trains; the other waits until it is told to end.
RANKS = """
import os, runpy, signal, sys, threading
if os.environ["RANK"] == "0":
    runpy.run_path({trainer!r}, run_name="__main__")
else:
    end = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: end.set())
    from configs.load import resolve
    config = resolve(sys.argv[1:])
    from pathlib import Path
    while not end.wait(0.1) and not (Path(config.logdir) / "finished.json").exists():
        pass
"""


@pytest.mark.slow
def test_torchrun_runs_a_process_for_each_gpu_and_hands_a_notice_on(
    tmp_path, trainer, finished_once
):
    out = tmp_path / "sweep"
    (entry,) = entries(out, steps=300, seeds=[0])
    script = tmp_path / "ranks.py"
    script.write_text(RANKS.format(trainer=trainer[1]))
    given = {"timeout_min": 600, "gpus_per_node": 2}
    (job,) = submit(out, [entry], [sys.executable, str(script)], given, cluster="local")
    wait_for(lambda: (out / entry["logdir"] / "metrics.jsonl").exists())
    (task,) = tasks(job)
    (torchrun,) = task.children()
    ranks = torchrun.children()
    task.send_signal(signal.SIGUSR2)
    psutil.wait_procs(ranks, timeout=60)
    assert job.result() == "finished"
    finished_once(out, entry["name"], 300)
    assert len(ranks) == 2
    assert journal(out, entry).count("began") == 2
    assert "--nproc_per_node=2" in Path(out / "runs" / f"{entry['name']}.log").read_text()
