"""The contract of an environment, its spaces, and the helpers that set the flags of a step.

An episode of N actions gives N + 1 steps. The reward of a step arrived with its observation; the
action of a step is chosen after seeing it. `is_last` closes an episode for any reason,
`is_terminal` because the task itself ended: truncation is `is_last and not is_terminal`.
`env_steps` counts the simulator steps since the record before it: what an action repeat made of one
action, none at a reset. Names that begin with `log/` are numbers for the run's records, summed over
the episode so far; names that begin with `label/` are arrays that the simulator knows, given only
where they are asked for (`make_env`). The agent sees neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

Step = dict[str, Any]
DTYPES = {"image": np.uint8, "vector": np.float32, "discrete": np.int32}
FLAGS = ("reward", "is_first", "is_last", "is_terminal", "env_steps")

# Names that records, or batches of them, use for something else.
RESERVED = {*FLAGS, "action", "age", "episode", "plan", "carry", "carried"}


@dataclass(frozen=True)
class Space:
    """image: uint8 (H, W, C); vector: float32 (n,); discrete: int32 (k,) with k class counts.

    As an action, `vector` means numbers in [-1, 1] and `discrete` k numbers counted from 0.
    """

    kind: Literal["image", "vector", "discrete"]
    shape: tuple[int, ...]
    classes: tuple[int, ...] = ()

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(DTYPES[self.kind])


class Env(Protocol):
    """What a task must offer; the records it returns are the caller's to keep, never reused."""

    obs_space: dict[str, Space]
    act_space: Space

    def reset(self, seed: int) -> Step:
        """Open an episode that is a function of `seed`; allowed at any time."""
        ...

    def step(self, action: np.ndarray) -> Step:
        """Go on; after `is_last` an AssertionError."""
        ...

    def close(self) -> None: ...


def first(obs: dict[str, np.ndarray]) -> Step:
    return flagged(obs, 0.0, is_first=True, env_steps=0)


def middle(obs: dict[str, np.ndarray], reward: float) -> Step:
    return flagged(obs, reward)


def terminal(obs: dict[str, np.ndarray], reward: float) -> Step:
    return flagged(obs, reward, is_last=True, is_terminal=True)


def truncated(obs: dict[str, np.ndarray], reward: float) -> Step:
    return flagged(obs, reward, is_last=True)


def flagged(
    obs: dict[str, np.ndarray],
    reward: float,
    is_first: bool = False,
    is_last: bool = False,
    is_terminal: bool = False,
    env_steps: int = 1,
) -> Step:
    return {
        **obs,
        "reward": one_number(reward),
        "is_first": is_first,
        "is_last": is_last,
        "is_terminal": is_terminal,
        "env_steps": env_steps,
    }


def one_number(reward: Any) -> np.float32:
    """A reward, which some simulators return as an array of one number; ValueError for others."""
    value = np.asarray(reward)
    usable = value.size == 1 and value.dtype != object
    if not usable or not abs(value.item()) <= float(np.finfo(np.float32).max):
        raise ValueError(f"the reward is {reward!r}; expected one finite number")
    return np.float32(value.item())


def check_spaces(obs_space: dict[str, Space], act_space: Space) -> None:
    """ValueError for spaces that no agent can use."""
    taken = sorted(k for k in obs_space if k in RESERVED or k.startswith(("log/", "label/")))
    if taken:
        raise ValueError(f"observation names {taken} are taken by the step's own")
    if not obs_space:
        raise ValueError("there is no observation")
    if act_space.kind == "image":
        raise ValueError("the action space is an image; expected a vector or discrete numbers")
    for name, space in {**obs_space, "action": act_space}.items():
        if 0 in space.shape or 0 in space.classes:
            raise ValueError(f"{name}: a space of shape {space.shape} holds no number")


def check(key: str, value: Any, space: Space) -> np.ndarray:
    """A fresh array of `value` in the space's dtype; ValueError when it does not fit the space."""
    array = np.asarray(value)
    how = "safe" if space.kind == "image" else "same_kind"  # uint16 would wrap
    if array.shape != space.shape or not np.can_cast(array.dtype, space.dtype, how):
        raise ValueError(
            f"observation {key!r} is {array.dtype} {array.shape}, its space says {space.dtype} "
            f"{space.shape}: correct the environment's observation space"
        )
    if space.kind == "vector" and not np.isfinite(array).all():
        raise ValueError(f"observation {key!r} is not finite: {array.tolist()}")
    if space.kind == "discrete" and not ((array >= 0) & (array < space.classes)).all():
        raise ValueError(
            f"observation {key!r} is {array.tolist()}, its space says from 0 to below "
            f"{list(space.classes)}: correct the environment's observation space"
        )
    return np.array(array, space.dtype)
