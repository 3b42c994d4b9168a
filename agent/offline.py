"""Learning from stored steps alone: no environment is stepped, and updates are what is counted.

The steps are those of `replay.from`, drawn as in the other modes. `train_ratio` says how many
updates a step pays for; here no step is made, so it plays no part, and neither do `loop.fill` and
`stop.steps`: another limit ends the run. Equal seeds give equal numbers, as in lockstep.
"""

from __future__ import annotations

from agent.loop import Loop


class Offline(Loop):
    @property
    def number(self) -> int:
        return self.learner.updates

    def go(self) -> None:
        self.fill_step = 0
        while not self.over:
            self.train()
            self.report()
