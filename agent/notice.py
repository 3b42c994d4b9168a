"""Signals that ask a run to save and end: a scheduler's notice, or Ctrl-C."""

from __future__ import annotations

import signal
from multiprocessing import resource_tracker
from typing import Any

from agent.loop import Loop

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Stopped(BaseException):
    """A notice to stop came while there was nothing to save."""


class Notice:
    """Handles what asks to stop: tells the loop, or ends the start of a run alone, or its compiler.

    One of several ranks cannot leave while the others wait for it: its start goes on, and the loop
    ends before its first step.
    """

    def __init__(self, several: bool) -> None:
        self.loop: Loop | None = None
        self.several = several
        self.early: str | None = None
        # It inherits that this is ignored, and so outlives a notice to the whole group.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        resource_tracker.ensure_running()
        for number in STOPS:
            signal.signal(number, self)

    def __call__(self, number: int, frame: Any) -> None:
        name = signal.Signals(number).name
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
