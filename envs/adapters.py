"""Gymnasium and dm_env environments as `Env`: spaces become named arrays, actions are rescaled."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from envs import env as steps
from envs.env import Space, Step, check

UNBOUNDED = 1e10  # MuJoCo's word for no bound


def leaf_space(space: spaces.Space, name: str) -> Space:
    """The Space of a gymnasium space that holds no others; ValueError for kinds without one."""
    if isinstance(space, spaces.Discrete):
        return Space("discrete", (1,), (int(space.n),))
    if isinstance(space, spaces.MultiDiscrete):
        counts = tuple(int(n) for n in np.ravel(space.nvec))
        return Space("discrete", (len(counts),), counts)
    if isinstance(space, spaces.MultiBinary):
        count = int(np.prod(space.shape))
        return Space("discrete", (count,), (2,) * count)
    if isinstance(space, spaces.Box):
        if space.dtype == np.uint8 and len(space.shape) in (2, 3):
            height, width, *channels = space.shape
            if channels and height <= 4 and min(space.shape[1:]) >= 16:
                raise ValueError(
                    f"{name}: an image of shape {space.shape} has its channels first; expected "
                    f"(height, width, channels), as numpy.moveaxis(image, 0, -1) makes it"
                )
            return Space("image", (height, width, *(channels or [1])))
        return Space("vector", (int(np.prod(space.shape)),))
    nested = "" if name == "action" else ", and Tuple or Dict of these"
    raise ValueError(
        f"{name}: a space of type {type(space).__name__} cannot be used; supported are Box, "
        f"Discrete, MultiDiscrete, MultiBinary{nested}"
    )


def flatten_space(space: spaces.Space, name: str = "") -> dict[str, spaces.Space]:
    """Leaves by name: nested names joined by '/', a single one `image`, `vector` or `token`."""
    if isinstance(space, spaces.Dict):
        children = {str(key): child for key, child in space.spaces.items()}
    elif isinstance(space, spaces.Tuple):
        children = {str(index): child for index, child in enumerate(space.spaces)}
    else:
        kind = leaf_space(space, name or "observation").kind
        return {name or {"discrete": "token"}.get(kind, kind): space}
    out: dict[str, spaces.Space] = {}
    for key, child in children.items():
        leaves = flatten_space(child, f"{name}/{key}" if name else key)
        if same := sorted(set(out) & set(leaves)):
            raise ValueError(f"two observations would both be called {same[0]!r}: rename one")
        out.update(leaves)
    return out


def flatten_value(value: Any, space: spaces.Space, name: str = "") -> list[Any]:
    """Values in the order of `flatten_space`."""
    if isinstance(space, spaces.Dict):
        pairs = [(value[key], child) for key, child in space.spaces.items()]
    elif isinstance(space, spaces.Tuple):
        pairs = list(zip(value, space.spaces, strict=True))
    else:
        return [value]
    return [leaf for part, child in pairs for leaf in flatten_value(part, child)]


def to_leaf(key: str, value: Any, space: spaces.Space, target: Space) -> np.ndarray:
    value = np.asarray(value)
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        value = value - space.start
    if target.kind == "image" and value.ndim == 2:
        value = value[..., None]
    return check(key, value.reshape(-1) if target.kind != "image" else value, target)


def rescale(action: np.ndarray, box: spaces.Box) -> np.ndarray:
    """[-1, 1] to the box where both bounds are finite; elsewhere the value itself, clipped, or that
    of the two units next to the one bound where [-1, 1] lies beyond it.

    Bounds of UNBOUNDED or more are none. Whole-number boxes get the nearest whole number.
    """
    low, high = np.ravel(box.low).astype(np.float64), np.ravel(box.high).astype(np.float64)
    low = np.where(low <= -UNBOUNDED, -np.inf, low)
    high = np.where(high >= UNBOUNDED, np.inf, high)
    finite = np.isfinite(low) & np.isfinite(high)
    action = np.asarray(action, np.float64)
    span = np.where(finite, high - low, 0.0)
    scaled = np.where(finite, low, 0.0) + (np.clip(action, -1, 1) + 1) / 2 * span
    action = action + np.where(np.isfinite(low) & (low >= 1), low + 1, 0.0)
    action = action + np.where(np.isfinite(high) & (high <= -1), high - 1, 0.0)
    value = np.clip(np.where(finite, scaled, action), low, high).reshape(box.shape)
    whole = np.issubdtype(box.dtype, np.integer)
    return (np.rint(value) if whole else value).astype(box.dtype)


class FromGymnasium:
    """A gymnasium environment. ValueError at construction names a space that cannot be used."""

    def __init__(self, env: gymnasium.Env):
        self.env = env
        self.leaves = flatten_space(env.observation_space)
        self.obs_space = {key: leaf_space(space, key) for key, space in self.leaves.items()}
        space = env.action_space
        self.act_space = leaf_space(space, "action")
        if self.act_space.kind == "image":
            self.act_space = Space("vector", (int(np.prod(space.shape)),))
        self.done = True

    def reset(self, seed: int) -> Step:
        obs, _ = self.env.reset(seed=int(seed))
        self.done = False
        return steps.first(self.observation(obs))

    def step(self, action: np.ndarray) -> Step:
        assert not self.done, "step after is_last: reset first"
        obs, reward, terminated, truncated, _ = self.env.step(self.to_action(action))
        self.done = bool(terminated or truncated)
        return steps.flagged(
            self.observation(obs), reward, is_last=self.done, is_terminal=bool(terminated)
        )

    def observation(self, obs: Any) -> dict[str, np.ndarray]:
        values = flatten_value(obs, self.env.observation_space)
        return {
            key: to_leaf(key, value, self.leaves[key], self.obs_space[key])
            for key, value in zip(self.leaves, values, strict=True)
        }

    def to_action(self, action: np.ndarray) -> Any:
        space = self.env.action_space
        if isinstance(space, spaces.Box):
            return rescale(action, space)
        if isinstance(space, spaces.Discrete):
            return int(action[0]) + int(space.start)
        if isinstance(space, spaces.MultiDiscrete):
            return (np.asarray(action).reshape(space.shape) + space.start).astype(space.dtype)
        return np.asarray(action, np.int8).reshape(space.shape)

    def close(self) -> None:
        self.env.close()


class FromDmEnv:
    """A dm_env environment with one array, or a flat dict of arrays, as observation.

    `reseed(env, seed)` makes the next reset a function of the seed and returns the environment to
    use (often the same). discount 0 at the last step is terminal, anything else a truncation; so is
    an error of the kinds `diverged`. `repeat`: simulator steps per action, observed once.
    """

    diverged: tuple[type[Exception], ...] = ()

    def __init__(self, env: Any, reseed: Any, repeat: int = 1):
        self.env, self.reseed, self.repeat = env, reseed, repeat
        self.obs_space = self.find_spaces()
        act = env.action_spec()
        if hasattr(act, "num_values"):
            self.act_space = Space("discrete", (1,), (int(act.num_values),))
        else:
            self.act_space = Space("vector", (int(np.prod(act.shape)),))
            # A spec without bounds has neither attribute.
            low, high = getattr(act, "minimum", -np.inf), getattr(act, "maximum", np.inf)
            self.box = spaces.Box(
                np.broadcast_to(low, act.shape), np.broadcast_to(high, act.shape), dtype=act.dtype
            )
        self.done = True
        self.latest: dict[str, np.ndarray] = {}

    def find_spaces(self) -> dict[str, Space]:
        spec = self.env.observation_spec()
        self.named = isinstance(spec, dict)
        out = {}
        for key, part in (spec if self.named else {"": spec}).items():
            image = part.dtype == np.uint8 and len(part.shape) == 3
            shape = tuple(part.shape) if image else (int(np.prod(part.shape)),)
            kind = "image" if image else "vector"
            out[key or kind] = Space(kind, shape)
        return out

    def reset(self, seed: int) -> Step:
        self.env = self.reseed(self.env, int(seed))
        self.done = False
        self.latest = self.observation(self.env.reset().observation)
        return steps.first(self.latest)

    def step(self, action: np.ndarray) -> Step:
        assert not self.done, "step after is_last: reset first"
        discrete = self.act_space.kind == "discrete"
        told = int(action[0]) if discrete else rescale(action, self.box)
        reward, taken, ended = 0.0, 0, False
        try:
            while taken < self.repeat and not self.done:
                timestep = self.env.step(told)
                taken += 1
                reward += float(np.asarray(timestep.reward or 0.0).item())
                self.done = timestep.last()
            ended = self.done and timestep.discount == 0
            self.latest = self.observation(timestep.observation)
        except self.diverged:
            self.done, taken = True, taken + 1
            self.latest = {key: value.copy() for key, value in self.latest.items()}
        return steps.flagged(
            self.latest, reward, is_last=self.done, is_terminal=ended, env_steps=taken
        )

    def observation(self, obs: Any) -> dict[str, np.ndarray]:
        out = {}
        for key, space in self.obs_space.items():
            value = obs[key] if self.named else obs
            out[key] = check(key, value if space.kind == "image" else np.ravel(value), space)
        return out

    def close(self) -> None:
        self.env.close()
