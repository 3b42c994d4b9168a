"""The environments of a run: how one is built, the slots of a rank, what a step of them holds."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from agent.checks import refused
from agent.ranks import Ranks
from configs.schema import Config
from envs.env import Env
from envs.make import make_env, reset_ticks
from envs.pool import EnvPool


def env_maker(config: Config, labels: bool = False) -> functools.partial[Env]:
    """A picklable function without arguments that builds the task's environment; `labels` as in
    `make_env`."""
    env = config.env
    return functools.partial(
        make_env,
        config.task,
        repeat=env.repeat,
        time_limit=env.time_limit,
        truncation=env.truncation,
        labels=labels,
    )


def make_pool(config: Config, ranks: Ranks) -> EnvPool:
    """The slots of this rank. Raises RunError for spaces that cannot be used."""
    env, slots = config.env, ranks.share(config.env.count)
    with refused(f"--task {config.task}: "):
        return EnvPool(
            env_maker(config),
            slots,
            config.seed,
            env.processes == "yes",
            reset_ticks=reset_ticks(config.task),
            timeout=env.timeout,
            restarts_per_hour=env.restarts_per_hour,
            first=ranks.number * slots,
        )


def fields(pool: EnvPool) -> dict[str, tuple[Any, tuple[int, ...]]]:
    """Names, dtypes and shapes of a replay record."""
    out = {k: (np.dtype(s.dtype), tuple(s.shape)) for k, s in pool.obs_space.items()}
    out["action"] = (np.dtype(pool.act_space.dtype), tuple(pool.act_space.shape))
    out["reward"] = (np.dtype(np.float32), ())
    for key in ("is_first", "is_last", "is_terminal"):
        out[key] = (np.dtype(bool), ())
    out["age"] = out["episode"] = (np.dtype(np.int32), ())
    return out
