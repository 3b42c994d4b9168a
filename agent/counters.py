"""The counters of a run, and what its ranks agree on: how many updates are owed, and what is next.

Each rank counts the steps of its own slots. `agree` adds up those of all; what they do together
follows from that alone, so none waits for another in vain. A run alone agrees with itself.
"""

from __future__ import annotations

import signal
import time
from typing import Any

import numpy as np

from agent.checks import share_of_fill
from agent.learner import Learner
from agent.pace import PICTURES, ROWS, between
from agent.ranks import Ranks
from configs.schema import Config

ROW, MEDIA, SAVE = 1, 2, 4  # what is done together when the first rank finds it is time


def updates_due(agent_steps: int, train_ratio: float, batch_steps: int) -> int:
    """Updates owed after `agent_steps` decisions: `train_ratio` replayed steps for each.

    A function of counters alone, so a fraction of an update is never lost or rounded twice.
    """
    return int(agent_steps * train_ratio / batch_steps)


class Counters:
    patient = True  # a rank may have waited for an environment before it agrees

    def __init__(self, config: Config, ranks: Ranks, learner: Learner):
        self.config, self.ranks, self.learner = config, ranks, learner
        self.own_step = 0  # agent steps of the slots of this rank
        # Simulator steps received, less `repeat` for every action of theirs.
        self.own_correction = 0
        self.fill = share_of_fill(config, self.ranks.count)
        self.own_fill: int | None = None  # agent steps of this rank when its share was there
        # What `agree` last heard: of this rank, and of the others.
        self.told = self.others_step = self.others_correction = 0
        self.others_fill: int | None = None if self.ranks.count > 1 else 0
        self.agreed_step = self.owed = self.duties = 0
        self.agreed_seconds = 0.0  # those of the first rank
        self.leaving: str | None = None  # the request to stop that all ranks know of
        self.stop: str | None = None
        self.began = self.last_row = self.last_save = time.monotonic()
        self.last_media = -float("inf")
        self.wall_before = 0.0  # seconds of earlier sittings

    def agree(self) -> None:
        """Tell the other ranks how far this one is, and learn what all do next. A run alone hears
        itself."""
        if self.ranks.orphaned:
            self.stop = self.stop or "SIGHUP"
        told, fill = self.own_step, self.own_fill
        stop = signal.Signals[self.stop] if self.stop else 0
        own = [told, -1 if fill is None else fill, self.own_correction, int(stop), self.time_for()]
        table = self.ranks.table([*own, round(1000 * self.wall_seconds)], self.patient)
        steps, fills, corrections, stops, duties, clocks = zip(*table, strict=True)
        self.told, self.others_step = told, sum(steps) - told
        self.others_correction = sum(corrections) - own[2]
        others = [other for rank, other in enumerate(fills) if rank != self.ranks.number]
        self.others_fill = None if -1 in others else sum(others)
        self.agreed_step, self.duties = sum(steps), duties[0]
        self.agreed_seconds = clocks[0] / 1000
        self.owed = self.due(sum(steps)) if -1 not in fills else 0
        if any(stops):
            self.leaving = signal.Signals(max(stops)).name

    @property
    def wall_seconds(self) -> float:
        return self.wall_before + time.monotonic() - self.began

    def time_for(self) -> int:
        """What the clock of this rank says is to be done."""
        now, run, due = time.monotonic(), self.wall_seconds, 0
        if now - self.last_row >= between(self.config.log.every, run, ROWS):
            due |= ROW
        every = between(self.config.log.media_every, run, PICTURES)
        if every and self.learner.updates and now - self.last_media >= every:
            due |= MEDIA
        if now - self.last_save >= self.config.checkpoint.every:
            due |= SAVE
        return due

    def due(self, agent_step: int | None = None) -> int:
        """Updates owed for all steps so far: what lockstep would have made by now."""
        fill_step = self.fill_step
        if fill_step is None:
            return 0
        batch = self.config.batch
        # The step that fills the replay pays for one update, so that learning starts at once.
        steps = (self.agent_step if agent_step is None else agent_step) - fill_step
        return 1 + updates_due(steps, self.config.loop.train_ratio, batch.size * batch.length)

    @property
    def agent_step(self) -> int:
        """Decisions of all ranks, of the others those that this one has heard of."""
        return self.own_step + self.others_step

    @property
    def fill_step(self) -> int | None:
        """Agent step at which updates begin; None before it is known."""
        if self.own_fill is None or self.others_fill is None:
            return None
        return self.own_fill + self.others_fill

    @property
    def env_step(self) -> int:
        """Simulator steps of all actions, and of resets that count some.

        An action is `repeat` of them until its record says how many there were: the end of an
        episode cuts the last one short.
        """
        correction = self.own_correction + self.others_correction
        return self.agent_step * self.config.env.repeat + correction

    def beyond(self, obs: dict[str, Any]) -> int:
        """Simulator steps of records (n,) or of one, beyond `repeat` an action."""
        expected = np.where(obs["is_first"], 0, self.config.env.repeat)
        return int((obs["env_steps"] - expected).sum())
