"""Runs of a sweep as jobs of SLURM, through submitit: one array, a job for each run.

submitit writes the job file, submits it and, at its notice (SIGUSR2: time is nearly up, or the job
is to make room), calls `Job.checkpoint`: the run saves and ends, and the job is queued again.
A job of several GPUs or nodes runs torchrun on each node; its processes meet on the first host.
A file beside the run's folder holds the id of its job, so that no run is submitted twice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from launch.attempt import Attempt, beside, busy, command, limited, outcome, settle
from launch.manifest import Entry

log = logging.getLogger("launch")

POLL = 5.0
# After SIGTERM a run has saved and the job stays: SLURM then either takes it away or queues it
# again, which it would not do with one that has ended well.
GRACE = 120.0
TIMEOUTS = 1000  # a run goes on through as many time limits as it takes
# Parameters that submitit has for every cluster; others are SLURM's own.
SHARED = (
    *("name", "nodes", "tasks_per_node", "gpus_per_node", "cpus_per_task"),
    *("mem_gb", "timeout_min", "stderr_to_stdout"),
)


def library() -> Any:
    """submitit. ValueError with the line to type where it is not installed."""
    try:
        import submitit
    except ImportError:
        raise ValueError("submitit is not installed: pip install -e '.[launch]'") from None
    return submitit


@dataclasses.dataclass
class Job:
    """What a job does: one run, to its end or to the next notice."""

    sweep: Path
    trainer: list[str]
    nodes: int = 1
    gpus: int = 0  # of a node
    threads: int = 0
    retries: int = 1
    attempt: Attempt | None = None
    noticed: bool = False

    @property
    def distributed(self) -> bool:
        return self.nodes * self.gpus > 1

    def __call__(self, entry: Entry) -> str:
        """`finished` or `stopped`. RuntimeError when the run fails, and again when retried."""
        node = library().JobEnvironment()
        before = signal.signal(signal.SIGTERM, self.notice)
        try:
            if node.global_rank:
                return self.follow(entry, node)
            # torchrun itself tries again, on all nodes at once.
            for _ in range(1 if self.distributed else 1 + self.retries):
                if found := self.wait(entry, node):
                    return self.leave() if found == "stopped" else found
                status = self.attempt.process.wait()
                found = outcome(self.sweep, entry, status, asked=self.noticed)
                if found != "failed":
                    break
            else:
                raise RuntimeError(beside(self.sweep, entry, ".failed").read_text().strip())
            return self.leave() if found == "stopped" and self.noticed else found
        finally:
            signal.signal(signal.SIGTERM, before)

    def wait(self, entry: Entry, node: Any) -> str:
        """Begin the run once no other process has it; `finished` or `stopped` if it came to that
        meanwhile."""
        while not self.noticed:
            if not busy(self.sweep, entry):
                if settle(self.sweep, entry):
                    return "finished"
                with contextlib.suppress(BlockingIOError):  # begun elsewhere in this moment
                    self.attempt = self.begin(entry, node, ".log")
                    return ""
            time.sleep(POLL)
        return "stopped"

    def leave(self) -> str:
        """After a notice: what is to become of the job is told within a moment, if at all."""
        time.sleep(GRACE)
        return "stopped"

    def follow(self, entry: Entry, node: Any) -> str:
        """What a node after the first does: its share of the processes, no more."""
        self.attempt = self.begin(entry, node, f".node{node.global_rank}.log")
        self.attempt.process.wait()
        return "followed"

    def begin(self, entry: Entry, node: Any, log: str) -> Attempt:
        words = command(self.sweep, entry, self.launcher(node), self.threads)
        return Attempt(self.sweep, entry, words, limited(self.threads), log)

    def launcher(self, node: Any = None) -> list[str]:
        """The trainer, or torchrun that runs it once for each GPU of the job's nodes.

        `node`: submitit's environment; None where it is not known yet.
        """
        if not self.distributed:
            return self.trainer
        meet = ["--standalone"]  # at a port that is free
        if self.nodes > 1:
            number, host = (node.raw_job_id, node.hostnames[0]) if node else ("JOB", "HOST")
            # A number of this job alone, for two of them may share a host; below the ports that
            # Linux gives to outgoing connections.
            port = 20000 + (int(number) if number.isdigit() else 0) % 12000
            meet = [f"--nnodes={self.nodes}", "--rdzv_backend=c10d"]
            meet += [f"--rdzv_endpoint={host}:{port}", f"--rdzv_id={number}"]
        return [
            *(sys.executable, "-m", "torch.distributed.run", *meet),
            *(f"--nproc_per_node={self.gpus}", f"--max_restarts={self.retries}", *self.trainer[1:]),
        ]

    def notice(self, *_: Any) -> None:
        """SIGTERM: save now; what is to become of the job is not known yet."""
        self.noticed = True
        if self.attempt:
            self.attempt.stop()

    def checkpoint(self, entry: Entry) -> Any:
        """submitit's notice: wait until the run has saved; go on from there in the next job."""
        self.notice()
        if self.attempt:
            # Not `wait`, whose lock is held by the call that this notice has interrupted.
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, self.attempt.process.pid, os.WEXITED | os.WNOWAIT)
        anew = dataclasses.replace(self, attempt=None, noticed=False)
        return library().helpers.DelayedSubmission(anew, entry)


def parameters(given: list[str]) -> dict[str, Any]:
    """`--slurm` KEY=VALUE texts; ValueError for what is none."""
    out: dict[str, Any] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--slurm {text}: expected KEY=VALUE")
        if key == "time":
            raise ValueError(f"--slurm {text}: use timeout_min, in minutes")
        out[key] = int(value) if value.isdigit() else [value] if key == "setup" else value
    return out


def check(given: dict[str, Any]) -> None:
    """ValueError for parameters with which runs would not be what was meant."""
    if "timeout_min" not in given:
        raise ValueError("--slurm needs timeout_min=<minutes>: without it a job lasts for five")
    for key in ("gres", "gpus_per_task", "num_gpus", "tasks_per_node"):
        if key in given:
            raise ValueError(f"--slurm {key}: use gpus_per_node; a run has a process for each GPU")
    if given.get("nodes", 1) > 1 and not given.get("gpus_per_node"):
        raise ValueError("--slurm nodes: several nodes are for GPUs; add gpus_per_node=<number>")


def executor(folder: Path, cluster: str, given: dict[str, Any], jobs: int | None) -> Any:
    """submitit's executor. ValueError for a parameter it does not know, or without SLURM."""
    words = dict(given)
    if cluster == "slurm":
        # One task a node, which for several GPUs is torchrun. A job that makes room comes back.
        own = {"tasks_per_node": 1, "array_parallelism": jobs}
        own["additional_parameters"] = {"requeue": True}
        if "cpus_per_task" in given:  # srun has not inherited it since SLURM 22.05
            own["srun_args"] = [f"--cpus-per-task={given['cpus_per_task']}"]
        words = {**own, **given}
    words = {key if key in SHARED else f"{cluster}_{key}": word for key, word in words.items()}
    timeouts = {} if cluster == "debug" else {f"{cluster}_max_num_timeout": TIMEOUTS}
    try:
        made = library().AutoExecutor(folder=folder, cluster=cluster, **timeouts)
        made.update_parameters(**words)
    except (NameError, AssertionError, RuntimeError) as error:
        raise ValueError(f"--slurm: {str(error).splitlines()[0]}") from None
    return made


def job(sweep: Path, trainer: list[str], given: dict[str, Any], retries: int) -> Job:
    nodes, gpus = given.get("nodes", 1), given.get("gpus_per_node", 0)
    threads = given.get("cpus_per_task", 0) // max(1, gpus)
    return Job(sweep.resolve(), trainer, nodes, gpus, threads, retries)


def submit(
    sweep: Path,
    entries: list[Entry],
    trainer: list[str],
    given: dict[str, Any],
    *,
    jobs: int | None = None,
    retries: int = 1,
    cluster: str = "slurm",
) -> list[Any]:
    """Submit the runs that are neither finished nor running nor queued; their submitit jobs.

    `given`: parameters of submitit; `jobs`: how many may run at a time.
    """
    if not entries:
        return []
    folder = beside(sweep, entries[0], "").parent / "jobs"
    made = executor(folder.resolve(), cluster, {"name": sweep.resolve().name, **given}, jobs)
    waiting = queued(sweep, entries) if cluster == "slurm" else set()
    todo = [
        entry
        for entry in entries
        if entry["name"] not in waiting and not busy(sweep, entry) and not settle(sweep, entry)
    ]
    if not todo:
        return []
    try:
        submitted = made.map_array(job(sweep, trainer, given, retries), todo)
    except library().core.utils.FailedJobError as error:
        raise ValueError(f"SLURM refuses these jobs: {str(error).strip()}") from None
    for entry, one in zip(todo, submitted, strict=True):
        path = beside(sweep, entry, ".job")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(one.job_id)
    return submitted


def queued(sweep: Path, entries: list[Entry]) -> set[str]:
    """Names of the runs whose job SLURM still has, or may have: where `sacct` is silent, all.

    A job that `sacct` does not know while it knows others is gone.
    """
    files = {entry["name"]: beside(sweep, entry, ".job") for entry in entries}
    ids = {name: file.read_text() for name, file in files.items() if file.exists()}
    if not ids:
        return set()
    watcher = library().SlurmJob.watcher
    for number in ids.values():
        watcher.register_job(number)
    watcher.update()
    known = {name for name, number in ids.items() if watcher.get_info(number, mode="cache")}
    if not known:
        log.warning(
            "sacct knows none of these jobs; if they are gone, delete %s",
            ", ".join(str(files[name]) for name in ids),
        )
    left = known or ids
    return {name for name in left if not watcher.is_done(ids[name], mode="cache")}
