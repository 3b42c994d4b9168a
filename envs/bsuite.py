"""bsuite (Osband et al. 2020): bsuite_<experiment>_<n> by its own ids, and the letter L for a
memory length itself: `bsuite_memory_len_L30` has 30 steps between cue and question.

Every end has discount 0 in bsuite, time limits too, so every end is terminal here.
"""

from __future__ import annotations

import contextlib
import functools
import io
import re
from typing import Any

import numpy as np

from envs.adapters import FromDmEnv
from envs.env import Step

# Their loaders take none: two draw nothing but a mapping, the third is seeded after loading.
SEEDLESS = ("bandit", "discounting_chain", "deep_sea_stochastic")
LENGTH = re.compile(r"memory_len_L([1-9]\d*)")


def memory_length(name: str) -> int | None:
    match = LENGTH.fullmatch(name)
    return int(match[1]) if match else None


@functools.cache
def names() -> dict[str, str]:
    """bsuite's id by name, without the mnist experiments: their data must be downloaded."""
    from bsuite import sweep

    return {key.replace("/", "_"): key for key in sweep.SETTINGS if not key.startswith("mnist")}


def build(name: str, seed: int) -> Any:
    """The dm_env environment, a function of the seed where the experiment takes one."""
    length = memory_length(name)
    if length is not None:
        from bsuite.environments import memory_chain

        return memory_chain.MemoryChain(memory_length=length, num_bits=1, seed=seed)
    import bsuite
    from bsuite import sweep

    ident = names()[name]
    settings = dict(sweep.SETTINGS[ident])
    experiment = ident.split("/")[0]
    if experiment not in SEEDLESS:
        settings["seed"] = seed
    with contextlib.redirect_stdout(io.StringIO()):
        env = bsuite.load(experiment, settings)
    if experiment == "deep_sea_stochastic":
        env._rng = np.random.RandomState(seed)
    return env


class BSuite(FromDmEnv):
    """What `bsuite_info` counts comes as `log/<name>`: it is anew with every episode's build."""

    def __init__(self, name: str):
        # Building takes 0.02 to 0.5 ms, and no experiment can be seeded otherwise.
        super().__init__(build(name, 0), lambda env, seed: build(name, seed))

    def reset(self, seed: int) -> Step:
        return {**super().reset(seed), **self.numbers()}

    def step(self, action: np.ndarray) -> Step:
        return {**super().step(action), **self.numbers()}

    def numbers(self) -> dict[str, np.float64]:
        return {f"log/{key}": np.float64(value) for key, value in self.env.bsuite_info().items()}
