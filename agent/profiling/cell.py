"""One cell of the benchmark: a learner and a small replay on disk, and what their parts take.

The parts of an update are told apart from outside, in a real update: marks are set where the world
model's losses are done, where imagination is, and where the backward first reaches these losses,
which is after all of actor and critic, since autograd runs the newest operators first.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from agent import update as updates
from agent.actor import Actor
from agent.learner import Learner
from agent.update import Update
from configs.load import resolve
from envs.env import Space
from replay.bench import FLAGS, frames
from replay.blocks import BLOCK
from replay.loader import Loader
from replay.replay import Replay

PARTS = ("data", "noise", "world", "imagination", "behaviour", "optimiser")
STREAMS = 4
IMAGE, VECTOR = {"image": Space("image", (64, 64, 3))}, {"vector": Space("vector", (8,))}
ACT = Space("discrete", (1,), (6,))


@dataclass(frozen=True)
class Cell:
    core: str
    size: str
    batch: str  # BxT
    images: str  # yes: 64x64x3, no: 8 floats
    precision: str

    @property
    def shape(self) -> tuple[int, int]:
        rows, length = self.batch.split("x")
        return int(rows), int(length)

    @property
    def obs(self) -> dict[str, Space]:
        return IMAGE if self.images == "yes" else VECTOR

    def learner(self) -> Learner:
        """A learner with fresh weights, on the GPU when there is one."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.manual_seed(0)
        config = resolve(["--core", self.core, "--size", self.size])
        return Learner(Update(config, self.obs, ACT).to(device), 0, self.precision)

    def loader(self, folder: Path, learner: Learner) -> Loader:
        """Batches for `learner` from a new replay in `folder`, one episode a stream; nothing is
        read ahead."""
        fields = {**{key: (space.dtype, space.shape) for key, space in self.obs.items()}, **FLAGS}
        replay = Replay(folder, fields, STREAMS, 10**9, 10**9, online=False)
        random, ids = np.random.default_rng(0), np.arange(STREAMS)
        zeros = {key: np.zeros((STREAMS, *shape), dtype) for key, (dtype, shape) in FLAGS.items()}
        seen = {"image": frames(128, STREAMS)} if "image" in self.obs else {}
        seen["vector"] = random.standard_normal((128, STREAMS, 8), np.float32)
        rows, length = self.shape
        for t in range(length + BLOCK):
            step = {"is_first": np.full(STREAMS, t == 0), "age": np.full(STREAMS, t)}
            replay.add(ids, {**zeros, **step, **{key: seen[key][t % 128] for key in self.obs}})
        plan = learner.update.world.core.plan
        return Loader(replay, rows, length, (0, 0), learner.device, depth=0, plan=plan)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds(call: Callable[[], object], device: torch.device) -> float:
    wait(device)
    start = time.perf_counter()
    call()
    wait(device)
    return time.perf_counter() - start


class Clock:
    """Seconds `spent` by part: `lap` gives a part the time since the lap before."""

    def __init__(self, device: torch.device):
        self.device, self.spent = device, dict.fromkeys(PARTS, 0.0)
        wait(device)
        self.last = time.perf_counter()

    def lap(self, part: str) -> None:
        wait(self.device)
        now = time.perf_counter()
        self.spent[part] += now - self.last
        self.last = now

    def after(self, call: Callable[..., Any], part: str) -> Callable[..., Any]:
        """`call`, and then a lap."""

        def run(*args: Any, **kwargs: Any) -> Any:
            out = call(*args, **kwargs)
            self.lap(part)
            return out

        return run


def split(learner: Learner, loader: Loader, number: int) -> dict[str, float]:
    """Seconds of each part of reading batch `number` and training on it."""
    clock = Clock(learner.device)
    batch = loader.next(number)
    clock.lap("data")
    update, reached = learner.update, []

    def reach(grads: Any) -> None:
        if not reached:
            clock.lap("behaviour")
        reached.append(True)

    def losses(*args: Any, **kwargs: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
        values, latents = world_losses(*args, **kwargs)
        clock.lap("world")
        for value in values.values():
            value.grad_fn.register_prehook(reach)
        return values, latents

    def step() -> Tensor:
        clock.lap("world")
        return optimizer_step()

    world_losses, optimizer_step = update.world.losses, learner.optimizer.step
    with (
        patch.object(update, "noise", clock.after(update.noise, "noise")),
        patch.object(update.world, "losses", losses),
        patch.object(updates, "imagine", clock.after(updates.imagine, "imagination")),
        patch.object(learner.optimizer, "step", step),
    ):
        learner.train(batch)
    clock.lap("optimiser")
    assert reached, "the backward never reached the world model's losses"
    return clock.spent


def acting(update: Update, count: int, ticks: int = 50) -> float:
    """Median seconds in which `count` environments get their actions."""
    actor = Actor(update, count, 0)
    seen = {k: np.zeros((count, *s.shape), s.dtype) for k, s in update.world.obs_space.items()}
    seen |= {"is_first": np.zeros(count, bool), "is_last": np.zeros(count, bool)}
    ids = np.arange(count)
    times = [seconds(lambda: actor.act(ids, seen), actor.device) for _ in range(ticks + 10)]
    return statistics.median(times[10:])
