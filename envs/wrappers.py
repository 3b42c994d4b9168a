"""Wrappers around an `Env`: action repeat, a time limit, time limits as ends."""

from __future__ import annotations

from typing import Any

import numpy as np

from envs.env import Env, Step


class Wrapper:
    def __init__(self, env: Env):
        self.env = env
        self.obs_space, self.act_space = env.obs_space, env.act_space

    def reset(self, seed: int) -> Step:
        return self.env.reset(seed)

    def step(self, action: np.ndarray) -> Step:
        return self.env.step(action)

    def close(self) -> None:
        self.env.close()


class ActionRepeat(Wrapper):
    """Each action `repeat` times, rewards and `env_steps` summed, cut at the episode's end."""

    def __init__(self, env: Env, repeat: int):
        super().__init__(env)
        self.repeat = repeat

    def step(self, action: np.ndarray) -> Step:
        total, env_steps = 0.0, 0
        for _ in range(self.repeat):
            step: dict[str, Any] = self.env.step(action)
            total += float(step["reward"])
            env_steps += step["env_steps"]
            if step["is_last"]:
                break
        return {**step, "reward": np.float32(total), "env_steps": env_steps}


class TimeLimit(Wrapper):
    """Truncate after `limit` actions."""

    def __init__(self, env: Env, limit: int):
        super().__init__(env)
        self.limit, self.taken = limit, 0

    def reset(self, seed: int) -> Step:
        self.taken = 0
        return self.env.reset(seed)

    def step(self, action: np.ndarray) -> Step:
        assert self.taken < self.limit, "step after is_last: reset first"
        step = self.env.step(action)
        self.taken += 1
        return {**step, "is_last": step["is_last"] or self.taken >= self.limit}


class TruncationAsTerminal(Wrapper):
    """Time limits count as ends, as some published scores have it."""

    def step(self, action: np.ndarray) -> Step:
        step = self.env.step(action)
        return {**step, "is_terminal": step["is_last"]}
