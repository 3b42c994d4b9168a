"""Acting: observations of the environment slots to actions, with the carry of every slot."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from agent import seeding
from agent.update import Update
from worldmodels.world_model import tree_map


def put(into: Any, values: Any, rows: Tensor) -> None:
    """Write the leaves of a tree into `rows` of those of another."""
    tree_map(lambda leaf, value: leaf.index_copy_(0, rows, value), into, values)


class Actor:
    """Chooses actions for `count` slots; `carry` holds core state, z and action of each.

    Weights that change are told with `use`.
    """

    def __init__(self, update: Update, count: int, seed: int, purpose: str = "act", rank: int = 0):
        self.update, self.count, self.seed = update, count, seed
        self.purpose, self.rank = purpose, rank
        self.number = 0  # of updates that the weights hold
        self.prepared: Any = None  # what acting makes of these weights alone
        self.device = update.return_range.device
        self.tick = 0
        # Of the last call: hz (n, D + S*C) and x (n, X), and the norms (n,) of x on the host.
        self.latents: dict[str, Tensor] = {}
        self.x_norm = torch.zeros(0)
        with torch.inference_mode():
            self.carry = tree_map(torch.clone, update.world.initial(count))

    def use(self, update: Update, number: int) -> None:
        """Act with the weights of `update`, which hold `number` updates."""
        if number != self.number:
            self.number, self.prepared = number, None
        self.update = update

    @torch.inference_mode()
    def act(self, ids: np.ndarray, obs: dict[str, np.ndarray], greedy: bool = False) -> np.ndarray:
        """Actions (n, ...) for the observations (n, ...) of the slots `ids`, ascending.

        Where `is_last` there is nothing to choose: the action is all zeros.
        """
        world, policy = self.update.world, self.update.policy
        seen = {key: self.tensor(obs[key]) for key in world.obs_space}
        is_first = self.tensor(obs["is_first"])
        # Held until the action has been waited for: its memory may be another stream's.
        before = self.carry
        every = len(ids) == self.count
        rows = None if every else torch.as_tensor(ids, device=self.device)
        carry = before if every else tree_map(lambda leaf: leaf[rows], before)
        random = seeding.generator(self.seed, self.purpose, self.tick, self.device, self.rank)
        noise = world.noise(len(ids), generator=random)
        self.prepared = self.prepared or world.prepare()
        latents, carry = world.step(seen, is_first, carry, noise, self.prepared)
        self.latents = latents
        out = self.update.actor(**latents)
        noise = policy.noise(world.bins, (len(ids),), random)
        carry["action"] = policy.taken(policy.mode(out) if greedy else policy.sample(out, noise))
        if every:
            self.carry = carry
        else:
            put(self.carry, carry, rows)
        self.tick += 1
        # On its way, on this stream, ahead of the action, for which the host waits.
        self.x_norm = latents["x"].norm(dim=-1).to("cpu", non_blocking=True)
        action = policy.decode(carry["action"])
        action[obs["is_last"]] = 0
        return action

    @torch.inference_mode()
    def forget(self, ids: np.ndarray) -> None:
        """Put the memory of the slots `ids` back to the initial one at their age in the episode."""
        rows = torch.as_tensor(ids, device=self.device)
        core = self.carry["core"]
        age = core["age"][rows] if "age" in core else None
        put(core, self.update.world.core.initial(len(ids), age), rows)

    def tensor(self, value: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(value)).to(self.device)

    def state(self) -> dict[str, Any]:
        return {"carry": tree_map(lambda leaf: leaf.cpu(), self.carry), "tick": self.tick}

    def restore(self, state: dict[str, Any]) -> None:
        self.tick = state["tick"]
        self.carry = tree_map(lambda leaf: leaf.to(self.device), state["carry"])
