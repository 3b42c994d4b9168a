"""DeepMind Control Suite (Tassa et al. 2018): states, or pixels as its papers show them.

Actions fill finite bounds only. An episode has 1000 simulator steps and is truncated; `lqr` alone
has no limit of its own and may end by itself.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from typing import Any

import numpy as np

from envs.adapters import FromDmEnv
from envs.env import Space
from envs.rendering import choose_backend

SIZE = 64
CAMERAS = {"quadruped": 2}  # elsewhere 0
# This terrain is sent to the graphics card at every reset, whether somebody looks or not.
DRAWS_ALWAYS = ("quadruped_escape",)


@functools.cache
def load_suite() -> Any:
    """dm_control.suite. Its import decides for the whole process what draws, and a wrong choice
    ends the process at the first picture; states alone need no backend."""
    with contextlib.suppress(RuntimeError):
        choose_backend()
    with warnings.catch_warnings():  # of a missing screen
        warnings.simplefilter("ignore")
        from dm_control import suite
    return suite


@functools.cache
def names() -> dict[str, tuple[str, str]]:
    """(domain, task) by name: domains have underscores too."""
    suite = load_suite()
    return {f"{domain}_{task}": (domain, task) for domain, task in suite.ALL_TASKS}


def build(name: str, seed: int) -> Any:
    """The dm_control environment, a function of the seed."""
    logging.getLogger("absl").setLevel(logging.ERROR)
    domain, task = names()[name]
    return load_suite().load(domain, task, task_kwargs={"random": seed})


def reseed(name: str, env: Any, seed: int) -> Any:
    """The environment whose episodes are those of a fresh one, without building it where it can."""
    if name.startswith("lqr"):  # its springs are drawn when it is built
        env.close()
        return build(name, seed)
    env.task.random.seed(seed)
    return env


class DMC(FromDmEnv):
    """Vectors by the names of dm_control, single numbers and matrices as vectors too."""

    def __init__(self, name: str, repeat: int):
        if name in DRAWS_ALWAYS:
            choose_backend()
        env = build(name, 0)
        from dm_control.rl.control import PhysicsError

        self.diverged = (PhysicsError,)
        super().__init__(env, functools.partial(reseed, name), repeat)


class DMCVision(DMC):
    """image (64, 64, 3), drawn once an action."""

    def __init__(self, name: str, repeat: int):
        choose_backend()
        self.camera = CAMERAS.get(names()[name][0], 0)
        super().__init__(name, repeat)

    def find_spaces(self) -> dict[str, Space]:
        return {"image": Space("image", (SIZE, SIZE, 3))}

    def observation(self, obs: Any) -> dict[str, np.ndarray]:
        return {"image": self.env.physics.render(SIZE, SIZE, camera_id=self.camera)}
