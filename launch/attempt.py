"""One sitting of one run of a sweep: a process, its log, how it ended, what is packed of it.

The log is also the run's lock: it is locked before the process begins, and the process, whose
output it is, holds it as long as it lives, whatever becomes of the sweep. So no run is begun twice.
On Linux a run is told to save and end when the process that started it dies; elsewhere it goes on,
and a sweep that is typed again waits for it.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from agent.limits import FINISHED
from agent.status import ERROR, held, running
from launch.manifest import Entry
from launch.runs import pack, read_folder

TRAINER = [sys.executable, "-m", "agent.train"]
PATIENCE = 1.0  # seconds for a lock that somebody holds for a look
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def folder(sweep: Path, entry: Entry) -> Path:
    return sweep / entry["logdir"]


def beside(sweep: Path, entry: Entry, ending: str) -> Path:
    """A file of the sweep about a run, next to the run's folder."""
    return folder(sweep, entry).with_name(entry["name"] + ending)


def packed(sweep: Path, entry: Entry) -> Path:
    return sweep / "raw" / f"{entry['name']}.json"


def command(sweep: Path, entry: Entry, trainer: list[str], threads: int) -> list[str]:
    """What is typed for a run; `threads` 0: as its settings say."""
    more = ["--threads", str(threads)] if threads else []
    return [*trainer, *entry["flags"], *more, "--logdir", str(folder(sweep, entry))]


def limited(threads: int) -> dict[str, str]:
    """The environment in which libraries, too, use so many threads."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return dict.fromkeys(names, str(threads)) if threads else {}


def busy(sweep: Path, entry: Entry) -> bool:
    """Whether a process has the run: one of a sweep, or one that somebody started by hand."""
    return held(beside(sweep, entry, ".log")) or running(folder(sweep, entry))


def state(sweep: Path, entry: Entry) -> str:
    """`finished`, `running`, `failed`, `stopped` or `missing`, from files alone."""
    place = folder(sweep, entry)
    if packed(sweep, entry).exists():
        return "finished"
    if busy(sweep, entry):
        return "running"
    if (place / FINISHED).exists():
        return "finished"
    if beside(sweep, entry, ".failed").exists() or (place / ERROR).exists():
        return "failed"
    return "stopped" if (place / "config.yaml").exists() else "missing"


def settle(sweep: Path, entry: Entry) -> bool:
    """Whether the run is finished; if so it is packed now, unless it was before."""
    path = packed(sweep, entry)
    if not path.exists():
        if not (folder(sweep, entry) / FINISHED).exists():
            return False  # told without reading all that it has written
        run = read_folder(folder(sweep, entry), entry)
        if run.status != "finished":
            return False
        pack(run, path)
    beside(sweep, entry, ".failed").unlink(missing_ok=True)
    return True


def outcome(sweep: Path, entry: Entry, status: int, asked: bool = False) -> str:
    """`finished`, `stopped` or `failed`, for an attempt that has ended with this exit status.

    `asked`: it was told to stop, so that another status than 0 is no failure.
    """
    if settle(sweep, entry):
        return "finished"
    if status == 0 or asked:
        return "stopped"
    words = last_words(beside(sweep, entry, ".log"))
    beside(sweep, entry, ".failed").write_text(f"exit status {status}: {words}\n")
    return "failed"


def last_words(log: Path) -> str:
    """The last line of a log that says something."""
    lines = log.read_text(errors="replace")[-4000:].split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "no output")


class Attempt:
    """A process that trains one run."""

    def __init__(
        self, sweep: Path, entry: Entry, words: list[str], env: dict[str, str], log: str = ".log"
    ):
        """`env` is added to the environment. BlockingIOError when another process has the run."""
        path = beside(sweep, entry, log)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.sweep, self.entry = sweep, entry
        with path.open("ab") as file:
            lock(file.fileno())
            beside(sweep, entry, ".failed").unlink(missing_ok=True)
            file.write(f"$ {' '.join(words)}\n".encode())
            file.flush()
            self.process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **env},
                start_new_session=True,  # Ctrl-C is for the sweep, which then tells its runs
                preexec_fn=prepare,
            )

    def poll(self) -> int | None:
        return self.process.poll()

    def stop(self) -> None:
        """Ask it to save and end."""
        self.process.terminate()


def lock(handle: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def prepare() -> None:
    """In the new process, before it is the trainer's."""
    # submitit's notice to a job, which SLURM sends to every process of it.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    if LIBC:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
