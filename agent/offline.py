"""Learning from stored steps alone: no environment is stepped, and updates are what is counted.

The steps are those of `replay.from`, drawn as in the other modes. `train_ratio` says how many
updates a step pays for; here no step is made, so it plays no part, and neither do `loop.fill` and
`stop.steps`: another limit ends the run. Equal seeds give equal numbers, as in lockstep.
"""

from __future__ import annotations

from typing import Any

from agent.loop import Loop


class Offline(Loop):
    patient = False  # there is no environment to wait for

    def number(self, run: dict[str, Any]) -> int:
        return self.learner.updates

    def go(self) -> None:
        self.own_fill = 0
        while True:
            self.agree()
            if self.over:
                break
            self.train()
            self.report()
