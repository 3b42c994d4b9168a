"""Runs of a sweep on this machine, N at a time, each a process of its own.

A run that another process is training occupies one of the N places until that process ends; it is
then looked at again. One that fails goes to the end of the queue and is tried again. A notice to
stop is passed on to the runs, which save and end; then the sweep ends too.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path

from agent.status import running
from launch.attempt import Attempt, beside, busy, command, folder, limited, outcome, settle
from launch.manifest import Entry

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
POLL = 0.1
VISIBLE = "CUDA_VISIBLE_DEVICES"


class Other:
    """A run that another process has."""

    def __init__(self, sweep: Path, entry: Entry):
        self.sweep, self.entry = sweep, entry

    def poll(self) -> int | None:
        return None if busy(self.sweep, self.entry) else 0

    def stop(self) -> None:
        """It is not ours to stop."""


@contextlib.contextmanager
def notices() -> Iterator[list[str]]:
    """Names of the signals of STOPS that have come."""
    came: list[str] = []
    before = {
        number: signal.signal(number, lambda n, frame: came.append(signal.Signals(n).name))
        for number in STOPS
    }
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Local:
    def __init__(
        self,
        sweep: Path,
        entries: list[Entry],
        trainer: list[str],
        *,
        jobs: int = 1,
        gpus: list[str] | None = None,
        threads: int = 1,
        retries: int = 1,
        say: Callable[[str], None] = lambda line: None,
    ):
        """`gpus`: of which each place gets one, in turn; None: every run sees all of them."""
        self.sweep, self.trainer = sweep, trainer
        self.gpus, self.threads, self.retries, self.say = gpus, threads, retries, say
        self.states = {entry["name"]: "waiting" for entry in entries}
        # Those that go on elsewhere come first: they count among the N.
        self.queue = deque(sorted(entries, key=lambda entry: not busy(sweep, entry)))
        self.tries: Counter[str] = Counter()
        self.places: list[Attempt | Other | None] = [None] * jobs
        self.notice = ""

    def run(self) -> dict[str, str]:
        """Name -> `finished`, `failed`, `stopped` or `waiting`, when nothing is left to be done or
        a notice to stop has come."""
        with notices() as came:
            while self.queue or any(self.places):
                if came and not self.notice:
                    self.stop(came[0])
                self.turn()
                time.sleep(POLL)
        return self.states

    def stop(self, notice: str) -> None:
        self.notice = notice
        self.say(f"{notice}: runs save and end ...")
        self.queue.clear()
        self.places = [place if isinstance(place, Attempt) else None for place in self.places]
        for place in filter(None, self.places):
            place.stop()

    def turn(self) -> None:
        """Look at every place once; begin what there is room for."""
        for index, place in enumerate(self.places):
            if place and (status := place.poll()) is not None:
                self.places[index] = None
                self.end(place, status)
            while self.queue and not self.places[index]:
                self.begin(index, self.queue.popleft())

    def begin(self, index: int, entry: Entry) -> None:
        if busy(self.sweep, entry):
            self.wait_for(index, entry)
        elif self.settled(entry):
            pass
        else:
            env = limited(self.threads)
            if self.gpus:
                env[VISIBLE] = self.gpus[index % len(self.gpus)]
            words = command(self.sweep, entry, self.trainer, self.threads)
            try:
                self.places[index] = Attempt(self.sweep, entry, words, env)
            except BlockingIOError:  # begun by another sweep in this moment
                self.wait_for(index, entry)
                return
            self.tries[entry["name"]] += 1
            self.report(entry, "running", f" on GPU {gpu}" if (gpu := env.get(VISIBLE)) else "")

    def settled(self, entry: Entry) -> bool:
        """Whether nothing is left to be done for a run, which is said."""
        try:
            done = settle(self.sweep, entry)
        except ValueError as error:  # it has finished, and cannot be packed
            self.report(entry, "failed", f", {error}")
            return True
        if done:
            self.report(entry, "finished")
        return done

    def wait_for(self, index: int, entry: Entry) -> None:
        self.places[index] = Other(self.sweep, entry)
        self.report(entry, "running", " in another process, which is waited for")

    def end(self, place: Attempt | Other, status: int) -> None:
        entry, name = place.entry, place.entry["name"]
        if isinstance(place, Other):
            self.queue.appendleft(entry)
            return
        if status and not self.notice and running(folder(self.sweep, entry)):
            # Somebody has begun it by hand: that is no failure, and waited for in its turn.
            self.tries[name] -= 1
            self.queue.appendleft(entry)
            return
        try:
            found = outcome(self.sweep, entry, status, asked=bool(self.notice))
        except ValueError as error:  # it has finished, and cannot be packed
            self.report(entry, "failed", f", {error}")
            return
        more = ""
        if found == "failed":
            more = f", {beside(self.sweep, entry, '.failed').read_text().strip()}"
            if self.tries[name] <= self.retries:
                more += "; will be tried again"
                self.queue.append(entry)
        self.report(entry, found, more)

    def report(self, entry: Entry, state: str, more: str = "") -> None:
        self.states[entry["name"]] = state
        done = sum(found == "finished" for found in self.states.values())
        self.say(f"[{done}/{len(self.states)}] {entry['name']}: {state}{more}")
