"""Automatic choices at start: device, threads, size, precision, environments. Each is explained in
a line that is printed and recorded in the run's folder.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from agent import seeding
from agent.flops import Flops
from agent.learner import Learner
from agent.update import Update
from configs.load import with_size
from configs.schema import Config
from envs import machine

CPU_SECONDS = 2.0  # an update on a CPU should take no longer
SHORTEST = 256  # T is not cut below this
CPU_SIZES = ("12m", "1m")
ENV_RAM = {"memory_maze": 0.8e9}  # bytes of one environment process
OTHER_ENV_RAM = 0.2e9


def fake_batch(
    update: Update, batch: int, length: int, device: torch.device | str = "cpu"
) -> dict[str, Any]:
    """A batch of the right shapes, for timing and counting; repeatable."""
    random = torch.Generator().manual_seed(0)

    def draw(space: Any) -> Tensor:
        shape = (batch, length, *space.shape)
        if space.kind == "vector":
            return torch.randn(shape, generator=random)
        if space.kind == "image":
            return torch.randint(0, 256, shape, generator=random, dtype=torch.uint8)
        parts = [
            torch.randint(0, count, shape[:-1], generator=random, dtype=torch.int32)
            for count in space.classes
        ]
        return torch.stack(parts, -1)

    out = {key: draw(space) for key, space in update.world.obs_space.items()}
    out["action"] = draw(update.world.act_space)
    out["reward"] = torch.randn(batch, length, generator=random)
    for key in ("is_first", "is_last", "is_terminal"):
        out[key] = torch.zeros(batch, length, dtype=torch.bool)
    out["age"] = torch.arange(length, dtype=torch.int32).expand(batch, -1)
    plan = update.world.core.plan(out["is_first"].numpy(), out["age"].numpy())
    return {**{key: value.to(device) for key, value in out.items()}, "plan": plan}


def dry_update(update: Update, batch: dict[str, Tensor], precision: str) -> None:
    """Forward and backward that leave no trace in weights, gradients or the return scale."""
    learner = Learner(update, 0, precision)
    rows, length = batch["reward"].shape
    random = seeding.generator(0, "dry", 0, learner.device)
    update.eval()
    with learner.autocast():
        loss, *_ = update(batch, update.noise(rows, length, random))
    loss.backward()
    if learner.device.type == "cuda":
        torch.cuda.synchronize()
    update.zero_grad(set_to_none=True)
    update.train()


def seconds(update: Update, batch: dict[str, Tensor], precision: str) -> float:
    """Seconds of one forward and backward, the better of two after a warm-up."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        dry_update(update, batch, precision)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def count_flops(
    update: Update, rows: int, length: int, run: Callable[..., None] = dry_update
) -> int:
    """FLOPs of one update of (rows, length), forward and backward, by PyTorch's formulas.

    `run(update, batch, precision)` is what is counted: a whole update, or a part of one.
    Counted at two small lengths and extended: every part is linear in the number of steps, by the
    `grain` of the core, but imagination, which is so up to its number of starts.
    """
    device = update.return_range.device

    def count(steps: int) -> int:
        batch = fake_batch(update, 1, steps, device)
        with Flops() as flops:
            run(update, batch, "float32")
        return flops.total

    starts, grain = update.starts(length), update.world.core.grain
    more = 2 * grain
    base = more * -(-(2 + (starts if starts < length else 0)) // more)
    if length <= base + more:
        return rows * count(length)
    small, large = count(base), count(base + more)
    return int(rows * (small + (large - small) / more * (length - base)))


def choose_device(config: Config) -> tuple[Config, str]:
    if config.device != "auto":
        return config, f"device {config.device}: as asked"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return dataclasses.replace(config, device=device), f"device {device}: what this machine has"


def choose_threads(config: Config, beside: int = 1) -> tuple[Config, str]:
    """`beside`: ranks on this machine, which share its cores."""
    cores = machine.cores() // beside
    if config.threads:
        return config, f"threads {config.threads}: as asked"
    threads = max(1, cores)
    return dataclasses.replace(config, threads=threads), f"threads {threads}: of {cores} cores"


def choose_envs(config: Config, cheap: bool, ranks: int = 1, beside: int = 1) -> tuple[Config, str]:
    """Environments by cores and RAM; one a rank when they run in its process. `ranks` in all, of
    which `beside` share this machine."""
    env = config.env
    processes = env.processes
    if processes == "auto":
        processes = "no" if cheap else "yes"
    count, why = env.count, "as asked"
    if not count:
        cores = max(1, machine.cores() // beside)
        suite = next((name for name in ENV_RAM if config.task.startswith(name)), "")
        room = int(machine.free_ram() * 0.5 / beside / ENV_RAM.get(suite, OTHER_ENV_RAM))
        # On a CPU the learner needs the cores too, and few streams fill long windows sooner.
        most = cores if config.device == "cpu" else 2 * cores
        count = ranks * (1 if processes == "no" else max(1, min(most, room, 40)))
        why = f"{cores} cores, RAM for {room}" if processes == "yes" else "cheap, in this process"
    env = dataclasses.replace(env, count=count, processes=processes)
    return dataclasses.replace(config, env=env), f"environments {count}: {why}"


def choose_size(
    config: Config, explicit: set[str], obs_space: dict[str, Any], act_space: Any, ranks: int = 1
) -> tuple[Config, str]:
    """The published size on a GPU; on a CPU one whose update takes about two seconds.

    `ranks` share the batch, and each has one row of it at least.

    Width shrinks first, then the batch, then T to no less than 256. Values that the user gave are
    never changed.
    """
    if config.size != "auto":
        return config, f"size {config.size}: as asked"
    if config.device != "cpu":
        return with_size(config, "50m", explicit), "size 50m: a GPU"
    batch = config.batch
    for size in CPU_SIZES:
        candidate = with_size(config, size, explicit)
        update = Update(candidate, obs_space, act_space)
        rows, length = 1, min(64, batch.length)
        cost = (
            seconds(update, fake_batch(update, rows, length), "float32") / (rows * length) / ranks
        )
        if cost * batch.size * batch.length <= CPU_SECONDS or size == CPU_SIZES[-1]:
            break
    size, length = batch.size, batch.length
    while (
        cost * size * length > CPU_SECONDS
        and size % (2 * ranks) == 0
        and "batch.size" not in explicit
    ):
        size //= 2
    while (
        cost * size * length > CPU_SECONDS
        and length // 2 >= SHORTEST
        and "batch.length" not in explicit
    ):
        length //= 2
    shape = dataclasses.replace(batch, size=size, length=length)
    candidate = dataclasses.replace(candidate, batch=shape)
    why = (
        f"size {candidate.size}, batch {size}x{length}: about {cost * size * length:.1f} s an "
        f"update on {config.threads} CPU threads (wanted: {CPU_SECONDS:.0f}); the longest "
        f"dependency that can be learned is {length} steps"
    )
    return candidate, why


def timed_shape(config: Config, device: torch.device, ranks: int) -> tuple[int, int]:
    """Rows and steps by which precisions are told apart: on a GPU those of a rank's update, since
    a small one takes as long as its kernels to be launched, which are more with bfloat16."""
    if device.type == "cuda":
        return config.batch.size // ranks, config.batch.length
    return 1, min(64, config.batch.length)


def choose_precision(config: Config, update: Update, ranks: int = 1) -> tuple[Config, str]:
    """One update timed each way; the faster of bfloat16 autocast and float32."""
    if config.precision != "auto":
        return config, f"precision {config.precision}: as asked"
    device = update.return_range.device
    rows, length = timed_shape(config, device, ranks)
    batch = fake_batch(update, rows, length, device)

    def tried(name: str) -> float:
        try:
            return seconds(update, batch, name)
        except torch.OutOfMemoryError:  # the other may fit
            torch.cuda.empty_cache()
            return math.inf

    times = {name: tried(name) for name in ("float32", "bfloat16")}
    best = min(times, key=times.__getitem__)
    # bfloat16 must earn its rounding: a tie goes to float32.
    if times["bfloat16"] > 0.9 * times["float32"]:
        best = "float32"
    why = ", ".join(f"{name} {value * 1000:.0f} ms" for name, value in times.items())
    why = f"precision {best}: {why} for {rows}x{length} steps"
    return dataclasses.replace(config, precision=best), why
