"""The loop with acting beside learning: environments, actor, decoding and learner at the same time.

    actor's thread     recv -> act -> send -> replay.add -> recv ...  waits when `loop.lead` is owed
    loader's threads   draw and decode the next batches
    main thread        update -> publish weights -> update ...        waits when nothing is owed

How many updates a run makes is a function of its steps, as in lockstep; which weights act, and what
a batch is drawn from, depend on timing. An update shares no lock with acting. For a checkpoint, and
for nothing else, acting is held between two ticks, where everything can be saved.
"""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from agent.loop import Loop
from agent.published import Published
from agent.update import Update

POLL = 0.001  # seconds between two looks of an actor that waits; it is ahead, so it has the time
IDLE = 0.1  # seconds after which a learner without work reports


class Overlapped(Loop):
    patient = False  # environments are waited for in the actor's thread alone

    def __init__(self, *parts: Any):
        """The parts of a `Loop`; its loader draws in its threads (`exact` false)."""
        super().__init__(*parts)
        self.ticked = threading.Event()
        self.gate = threading.Lock()  # held during a tick, and while a checkpoint is made
        self.knocking = False  # the main thread wants the gate: locks are not fair
        self.ending = False
        self.between = True  # false during a tick, and after one that raised

    def go(self) -> None:
        self.published = Published(self.learner.update, self.learner.updates)
        with ThreadPoolExecutor(1, "actor") as thread:
            self.acting: Future[None] = thread.submit(self.act)
            self.acting.add_done_callback(lambda _: self.ticked.set())
            try:
                while True:
                    if self.acting.done():
                        self.acting.result()  # raises what ended it
                    if self.learn():
                        break
                    self.report()
                    # Of the steps that all ranks have agreed on, all that is owed was learned.
                    if self.agreed_step >= self.config.stop.steps:
                        break
                    self.ticked.wait(IDLE)
                    self.ticked.clear()
            finally:
                self.ending = True
        self.acting.result()

    def act(self) -> None:
        """The actor's thread: ticks until it is told to end, but none past the run's last step,
        and never more than `lead` updates ahead."""
        # A second OpenMP team would fight with the learner's for the cores. The learner's thread
        # keeps its number; threads that begin after this take the new one.
        torch.set_num_threads(1)
        if self.actor.device.type == "cuda":
            torch.cuda.set_device(self.actor.device)  # a thread begins with the first
        with self.stream():
            while not self.ending:
                step = self.ahead()
                owed = self.due(step) - self.published.number
                if self.knocking or owed > self.config.loop.lead or step >= self.config.stop.steps:
                    time.sleep(POLL)
                    continue
                with self.gate:
                    self.tick()
                self.ticked.set()

    def ahead(self) -> int:
        """Agent steps of all ranks by now, if all were as fast as this one since they agreed."""
        return self.agent_step + (self.ranks.count - 1) * (self.own_step - self.told)

    def stream(self) -> contextlib.AbstractContextManager[Any]:
        """A CUDA stream of the actor's own, so that acting need not queue behind an update."""
        if self.actor.device.type != "cuda":
            return contextlib.nullcontext()
        stream = torch.cuda.Stream(self.actor.device)
        # The carry and the first copies were made on the default stream.
        stream.wait_stream(torch.cuda.default_stream(self.actor.device))
        return torch.cuda.stream(stream)

    def weights(self) -> tuple[Update, int]:
        """The latest, which lack at most `loop.lead` of the updates due."""
        update, number = self.published.take()
        self.staleness = self.due(self.ahead()) - number
        return update, number

    def tick(self) -> None:
        self.between = False
        super().tick()
        self.between = True

    def train(self) -> None:
        super().train()
        # On a GPU this waits for the update: acting finds finished weights and never waits for it.
        self.learner.check()
        self.published.publish(self.learner.updates)

    def save(self) -> None:
        self.knocking = True
        with self.gate:
            self.knocking = False
            if not self.between:
                self.acting.result()  # a tick that did not end is no state: raises what ended it
            super().save()
