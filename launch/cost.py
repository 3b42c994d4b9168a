"""What an agent with a core costs: parameters, FLOPs, state and memory, by parts.

`sequence` is the part that cores differ in: core with its input layers, prior and posterior, in
training, forward and backward, and in imagination. `total` is all of an update. What lies between
them is encoder, decoder and heads, whose layers are as wide for every core; but the first of them
read h and x, and cost more where these are wider. FLOPs are two for a multiply-add, by torch's
counter, the scan by its own formula (worldmodels/scan.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from agent.actor import Actor
from agent.auto import count_flops, dry_update, fake_batch
from agent.environments import env_maker
from agent.flops import Flops
from agent.imagination import frozen
from agent.summary import parameters
from agent.update import Update
from configs.schema import Config
from worldmodels.bench import sequence_parameters

WEIGHT = 4 * 4  # bytes of a parameter: float32, with its gradient and LaProp's two averages


@dataclass(frozen=True)
class Part:
    """Of the sequence part and of the whole; FLOPs are those of one update."""

    parameters: int
    flops: int


@dataclass(frozen=True)
class Cost:
    sequence: Part
    total: Part
    acting: float  # FLOPs of one environment's decision, mean over the steps of a segment
    state: int  # bytes that an environment carries
    memory: int  # bytes of weights with what the optimiser keeps, and of what the backward keeps
    features: int  # numbers that the policy reads
    replayed: float  # replayed steps per agent step: the train ratio
    batch: int  # replayed steps of an update
    repeat: int  # environment steps of an agent step

    def of(self, part: str) -> Part:
        return self.total if part == "total" else self.sequence

    def per_step(self, part: str) -> float:
        """FLOPs of an environment step: its share of updates and, in the total, of acting."""
        acting = self.acting if part == "total" else 0.0
        return (self.of(part).flops * self.replayed / self.batch + acting) / self.repeat

    def replayed_for(self, part: str, flops: float) -> float:
        """The train ratio at which an environment step costs `flops`."""
        acting = self.acting if part == "total" else 0.0
        return (flops * self.repeat - acting) * self.batch / self.of(part).flops


def spaces(config: Config) -> tuple[dict[str, Any], Any]:
    """Spaces of observations and actions of `config.task`, of an environment that is built."""
    env = env_maker(config)()
    try:
        return env.obs_space, env.act_space
    finally:
        env.close()


def sequence_update(update: Update, batch: dict[str, Tensor], precision: str = "float32") -> None:
    """Forward and backward of the sequence part alone, as in `Update.forward`.

    Embeddings and actions are random. Gradients reach h, z and, where the policy reads it, x, as
    those of decoder and heads do.
    """
    world, behaviour, features = update.world, update.config.behaviour, update.actor.features
    rows, length = batch["reward"].shape
    dynamics = behaviour.actor_grad == "dynamics"
    embed = torch.randn(rows, length, world.encoder.out, requires_grad=True)
    action = torch.randn(rows, length, world.action)
    carry = world.initial(rows, batch["age"][:, 0])
    noise = world.noise(rows, length)
    out, _ = world.observe(embed, action, batch["is_first"], carry, noise, batch["plan"])
    read = [out["h"], out["z"], out["post"], world.prior(out["h"])]
    read += [] if features == "output" else [out["x"]]
    count = update.starts(length)
    z = out["z"][:, -count:].detach().flatten(0, 1)
    with frozen(world) if dynamics else torch.no_grad():
        roll = world.core.imagine(out["context"], count)
        for _ in range(behaviour.horizon):
            action = torch.randn(len(z), world.action, requires_grad=dynamics)
            h, x = roll.step(torch.cat([z, action], -1))
            h = world.readout(h)
            z = world.sample(world.prior(h), world.noise(len(z)))
            read += [h, z] if dynamics else []
            read += [x] if dynamics and features != "output" else []
    sum(value.sum() for value in read).backward()
    update.zero_grad(set_to_none=True)


RUNS = {"sequence": sequence_update, "total": dry_update}


def update_flops(update: Update, part: str) -> int:
    """FLOPs of one update, or of its sequence part."""
    batch = update.config.batch
    return count_flops(update, batch.size, batch.length, RUNS[part])


def part_parameters(update: Update, part: str) -> int:
    return sequence_parameters(update.world) if part == "sequence" else parameters(update)


def acting_flops(update: Update) -> float:
    """FLOPs of a decision of one environment, mean over as many as its core works on at a time."""
    actor, steps = Actor(update, 1, 0), update.world.core.grain
    seen = {
        key: np.zeros((1, *space.shape), space.dtype)
        for key, space in update.world.obs_space.items()
    }
    seen |= {"is_last": np.zeros(1, bool)}
    with Flops() as flops:
        for step in range(steps):
            actor.act(np.arange(1), {**seen, "is_first": np.full(1, step == 0)})
    return flops.total / steps


def state_bytes(update: Update) -> int:
    """Bytes of the core's state of one environment."""
    return sum(leaf.nbytes for leaf in update.world.core.initial(1).values())


@contextlib.contextmanager
def kept_bytes() -> Iterator[list[int]]:
    """Bytes of what the forward keeps for the backward, in a list of one number; weights too."""
    seen, found = set(), [0]

    def pack(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            found[0] += storage.nbytes()
        return value

    with saved_tensors_hooks(pack, lambda value: value):
        yield found


def memory_bytes(update: Update) -> int:
    """Bytes that an update needs: weights, gradients and averages, and what the backward keeps.

    Measured on two short rows and extended: what is kept is linear in steps.
    """
    batch = update.config.batch
    grain = 2 * update.world.core.grain
    kept = []
    for steps in (grain, 2 * grain):
        with kept_bytes() as found:
            dry_update(update, fake_batch(update, 1, steps), "float32")
        kept += found
    each = (kept[1] - kept[0]) / grain
    return int(WEIGHT * parameters(update) + batch.size * batch.length * each)


def cost(update: Update) -> Cost:
    config = update.config
    sequence, total = (
        Part(part_parameters(update, part), update_flops(update, part))
        for part in ("sequence", "total")
    )
    return Cost(
        sequence,
        total,
        acting=acting_flops(update),
        state=state_bytes(update),
        memory=memory_bytes(update),
        features=update.actor.inputs,
        replayed=config.loop.train_ratio,
        batch=config.batch.size * config.batch.length,
        repeat=config.env.repeat,
    )
