"""Signals that ask a run to save and end: a scheduler's notice, Ctrl-C, or a closed terminal."""

from __future__ import annotations

import os
import signal
import stat
from multiprocessing import resource_tracker
from typing import Any

from agent.loop import Loop

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


class Stopped(BaseException):
    """A notice to stop came while there was nothing to save."""


def leave_terminal() -> None:
    """Point what was written to a terminal that is gone to nowhere: each line would be an error."""
    with open(os.devnull, "w") as nowhere:
        for output in (1, 2):
            if stat.S_ISCHR(os.fstat(output).st_mode) and not os.isatty(output):
                os.dup2(nowhere.fileno(), output)


class Notice:
    """Handles what asks to stop: tells the loop, or ends the start of a run alone, or its compiler.

    One of several ranks cannot leave while the others wait for it: its start goes on, and the loop
    ends before its first step.
    """

    def __init__(self, several: bool) -> None:
        self.loop: Loop | None = None
        self.several = several
        self.early: str | None = None
        nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        # It inherits that these are ignored, and so outlives a notice to the whole group.
        for number in (signal.SIGUSR1, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        resource_tracker.ensure_running()
        for number in STOPS:
            if number != signal.SIGHUP or not nohup:
                signal.signal(number, self)

    def __call__(self, number: int, frame: Any) -> None:
        name = signal.Signals(number).name
        if number == signal.SIGHUP:
            leave_terminal()
        if self.loop is not None:
            self.loop.stop = name
            if self.loop.expendable:
                self.loop.expendable = False  # once: a second notice comes while the run ends
                step, update = self.loop.saved["agent_step"], self.loop.learner.updates
                where = f"step {step:,}, update {update:,}, while it compiled"
                raise Stopped(f"{name} at {where}; run the same command to go on")
        elif self.several:
            self.early = name
        else:
            raise Stopped(f"{name} before its first step; nothing was to be saved")

    def tell(self, loop: Loop) -> None:
        """From now on notices go to `loop`."""
        self.loop = loop
        loop.stop = loop.stop or self.early
