"""Environments that exist to test others: a counter, constant reward, odd spaces, failures."""

from __future__ import annotations

import os
import time

import numpy as np

from envs import env as steps
from envs.env import Space, Step


class Counter:
    """Observation (seed mod 1000, t), reward t: any error of order is seen by arithmetic.

    With `vary`, the length of an episode is 1 + seed mod `length`.
    """

    def __init__(self, length: int = 10, vary: bool = False, image: bool = False):
        self.length, self.vary = length, vary
        self.obs_space = {"vector": Space("vector", (2,))}
        if image:
            self.obs_space["image"] = Space("image", (16, 16, 3))
        self.act_space = Space("discrete", (1,), (3,))
        self.done = True

    def reset(self, seed: int) -> Step:
        self.seed, self.t, self.done = seed, 0, False
        self.end = 1 + seed % self.length if self.vary else self.length
        return steps.first(self.observation())

    def step(self, action: np.ndarray) -> Step:
        assert not self.done, "step after is_last: reset first"
        self.t += 1
        self.done = self.t >= self.end
        return steps.flagged(self.observation(), self.t, is_last=self.done, is_terminal=self.done)

    def observation(self) -> dict[str, np.ndarray]:
        out = {"vector": np.array([self.seed % 1000, self.t], np.float32)}
        if "image" in self.obs_space:
            out["image"] = np.full((16, 16, 3), self.t % 256, np.uint8)
        return out

    def close(self) -> None:
        pass


class ConstantReward(Counter):
    """The same reward at every step and a time limit only: the value is reward / (1 - discount)."""

    def __init__(self, reward: float = 1.0, length: int = 20):
        super().__init__(length)
        self.reward = reward

    def step(self, action: np.ndarray) -> Step:
        step = super().step(action)
        return {**step, "reward": np.float32(self.reward), "is_terminal": False}


class Failing(Counter):
    """A counter that fails at step 5 of some episodes: `raise`, `exit` or `hang`.

    Episodes whose seed is a multiple of `one_in` fail, so a restart gets past them.
    """

    def __init__(self, how: str, one_in: int = 3):
        super().__init__(length=10, image=True)
        self.how, self.one_in = how, one_in

    def step(self, action: np.ndarray) -> Step:
        if self.t == 4 and self.seed % self.one_in == 0:
            if self.how == "raise":
                raise RuntimeError("this environment fails at step 5, as asked")
            if self.how == "exit":
                os._exit(3)
            time.sleep(3600)
        return super().step(action)


class Odd:
    """Any observation and action spaces: observations are a function of (seed, t), actions checked.

    Four actions an episode, terminal; ValueError for an action outside its space.
    """

    def __init__(self, obs_space: dict[str, Space], act_space: Space):
        self.obs_space, self.act_space = obs_space, act_space
        self.done = True

    def reset(self, seed: int) -> Step:
        self.random, self.t, self.done = np.random.default_rng(seed), 0, False
        return steps.first(self.observation())

    def step(self, action: np.ndarray) -> Step:
        assert not self.done, "step after is_last: reset first"
        space = self.act_space
        low, high = (0, np.array(space.classes) - 1) if space.classes else (-1, 1)
        if action.shape != space.shape or (action < low).any() or (action > high).any():
            raise ValueError(f"action {action} is outside {space}")
        self.t += 1
        self.done = self.t == 4
        return steps.flagged(self.observation(), 0.0, is_last=self.done, is_terminal=self.done)

    def observation(self) -> dict[str, np.ndarray]:
        out = {}
        for key, space in self.obs_space.items():
            high = {"image": 256, "vector": 2, "discrete": space.classes}[space.kind]
            out[key] = self.random.integers(0, high, space.shape).astype(space.dtype)
        return out

    def close(self) -> None:
        pass


ODD_OBS = {
    "image": Space("image", (63, 64, 1)),
    "body/joints": Space("vector", (5,)),
    "token": Space("discrete", (2,), (3, 7)),
}
TESTS = {
    "counter": lambda: Counter(),
    "image": lambda: Counter(length=20, image=True),
    "constant": lambda: ConstantReward(),
    "odd": lambda: Odd(ODD_OBS, Space("vector", (3,))),
    "crash": lambda: Failing("raise"),
    "exit": lambda: Failing("exit"),
    "hang": lambda: Failing("hang"),
}
