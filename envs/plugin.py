"""Environments that live elsewhere: `--task my_package.my_module:make`.

The callable takes nothing and returns a gymnasium environment, or an object with the contract of
`env.py`. The module is found as by `import`: the folder in which the command runs, or installed.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np

from envs.adapters import FromGymnasium
from envs.env import FLAGS, Env, Step, check, one_number
from envs.wrappers import Wrapper

CONTRACT = ("obs_space", "act_space", "reset", "step", "close")


def nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, 1, 0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def find(task: str) -> Callable[[], Any]:
    """The callable that `module:attribute` names. ValueError with the nearest name of what the
    module, or the attribute in it, is called."""
    name, _, attribute = task.partition(":")
    where, path = "", None
    for part in name.split("."):
        full = f"{where}.{part}" if where else part
        # Step by step: a package is imported before what is in it can be looked for.
        there = (
            part.isidentifier()
            and path != []
            and (full in sys.modules or importlib.util.find_spec(full) is not None)
        )
        if not there:
            known = [module.name for module in pkgutil.iter_modules(path)]
            inside = f" in {where}" if where else ""
            raise ValueError(f"--task {task}: no module {part!r}{inside}{nearest(part, known)}")
        try:
            module = importlib.import_module(full)
        except (ImportError, SyntaxError) as error:
            raise ValueError(f"--task {task}: {full} cannot be imported: {error}") from error
        where, path = full, getattr(module, "__path__", [])
    made = getattr(module, attribute, None)
    if not callable(made):
        known = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
        what = "is no callable" if hasattr(module, attribute) else "does not exist"
        raise ValueError(
            f"--task {task}: {attribute!r} {what} in {name}{nearest(attribute, known)}"
        )
    return made


class Checked(Wrapper):
    """An environment with the contract, whose records are held to its spaces."""

    def reset(self, seed: int) -> Step:
        return self.checked(self.env.reset(seed))

    def step(self, action: np.ndarray) -> Step:
        return self.checked(self.env.step(action))

    def checked(self, record: Step) -> Step:
        obs = {key: check(key, record[key], space) for key, space in self.obs_space.items()}
        return {**record, **obs, "reward": one_number(record["reward"])}


def build(task: str) -> Env:
    """ValueError when what comes back is neither a gymnasium environment nor an Env."""
    env = find(task)()
    if isinstance(env, gymnasium.Env):
        return FromGymnasium(env)
    lacks = [name for name in CONTRACT if not hasattr(env, name)]
    if not lacks:
        record = env.reset(0)
        lacks = sorted({*env.obs_space, *FLAGS} - set(record))
    if lacks:
        raise ValueError(
            f"the callable made a {type(env).__name__}, which is no gymnasium.Env and lacks "
            f"{', '.join(lacks)} of the contract in envs/README.md"
        )
    checked = Checked(env)
    checked.checked(record)
    return checked
