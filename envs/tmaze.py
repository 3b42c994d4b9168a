"""T-maze: a cue at the first step, a corridor, and a choice that only the cue decides.

Observation `vector` (4,): cue left, cue right (first step only), at the junction, in the corridor.
Actions: 0 forward, 1 left, 2 right. Forward moves through the `length` corridor steps; left and
right do nothing there. At the junction left or right ends the episode with reward 1 when it agrees
with the cue and -1 when not; forward waits. After 3 (length + 2) actions the episode is truncated.
"""

from __future__ import annotations

import numpy as np

from envs import env as steps
from envs.env import Space, Step


class TMaze:
    def __init__(self, length: int):
        if length < 1:
            raise ValueError(f"tmaze_{length}: the corridor needs at least one step")
        self.length = length
        self.limit = 3 * (length + 2)
        self.obs_space = {"vector": Space("vector", (4,))}
        self.act_space = Space("discrete", (1,), (3,))
        self.done = True

    def reset(self, seed: int) -> Step:
        self.cue = int(np.random.default_rng(seed).integers(2))
        self.position = self.taken = 0
        self.done = False
        return steps.first(self.observation())

    def step(self, action: np.ndarray) -> Step:
        assert not self.done, "step after is_last: reset first"
        choice = int(action[0])
        junction = self.position == self.length
        self.taken += 1
        if choice == 0 and not junction:
            self.position += 1
        if choice and junction:
            self.done = True
            return steps.terminal(self.observation(), 1.0 if choice - 1 == self.cue else -1.0)
        if self.taken >= self.limit:
            self.done = True
            return steps.truncated(self.observation(), 0.0)
        return steps.middle(self.observation(), 0.0)

    def observation(self) -> dict[str, np.ndarray]:
        seen = np.zeros(4, np.float32)
        if self.taken == 0:
            seen[self.cue] = 1
        seen[2 if self.position == self.length else 3] = 1
        return {"vector": seen}

    def close(self) -> None:
        pass
