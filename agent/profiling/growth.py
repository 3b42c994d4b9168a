"""How cost grows: seconds with T, horizon and environments, operators of the sequence with T."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import math
import statistics
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from agent.auto import fake_batch
from agent.learner import Learner
from agent.profiling.bound import Traffic
from agent.profiling.cell import ACT, VECTOR, Cell, acting, seconds
from configs.load import resolve
from worldmodels.world_model import WorldModel

LENGTHS, HORIZONS, ENVIRONMENTS = (64, 256, 1024, 4096), (5, 15, 30), (1, 8, 32, 128)

Curves = dict[str, dict[str, dict[int, float]]]  # what grows -> core -> value -> seconds


def exponent(points: dict[int, float]) -> float:
    """Least-squares slope of log y over log x: y grows as x to this power."""
    xs, ys = [math.log(x) for x in points], [math.log(y) for y in points.values()]
    return statistics.linear_regression(xs, ys).slope


def curves(cores: list[str], size: str, precision: str, rounds: int) -> Curves:
    """Medians of updates of one row, over T and over the horizon, and of acting over environments.

    T changes at the default horizon, the horizon at the shortest T.
    """
    learners = {core: Cell(core, size, "1x64", "no", precision).learner() for core in cores}
    default = learners[cores[0]].update.config.behaviour.horizon
    over_length = {length: updates(learners, length, default, rounds) for length in LENGTHS}
    over_horizon = {h: updates(learners, LENGTHS[0], h, rounds) for h in HORIZONS}
    out: Curves = {"T": {}, "horizon": {}, "environments": {}}
    for core, learner in learners.items():
        out["T"][core] = {length: found[core] for length, found in over_length.items()}
        out["horizon"][core] = {h: found[core] for h, found in over_horizon.items()}
        out["environments"][core] = {n: acting(learner.update, n) for n in ENVIRONMENTS}
    return out


def updates(
    learners: dict[str, Learner], length: int, horizon: int, rounds: int
) -> dict[str, float]:
    """Median seconds of an update (1, length) by core, the cores in turn."""
    times: dict[str, list[float]] = {core: [] for core in learners}
    for turn in range(rounds + 1):
        for core, learner in learners.items():
            update = learner.update
            behaviour = dataclasses.replace(update.config.behaviour, horizon=horizon)
            update.config = dataclasses.replace(update.config, behaviour=behaviour)
            batch = fake_batch(update, 1, length, learner.device)
            spent = seconds(functools.partial(learner.train, batch), learner.device)
            if turn:
                times[core].append(spent)
    return {core: statistics.median(values) for core, values in times.items()}


def plot(found: Curves, folder: Path) -> str:
    """One log-log PNG for each thing that grows; a line that says where, or that there is none."""
    if not importlib.util.find_spec("matplotlib"):
        return "no pictures: matplotlib is not installed"
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    for name, by_core in found.items():
        axes = (figure := Figure(figsize=(5, 4))).subplots()
        for core, points in by_core.items():
            label = f"{core}: {name}^{exponent(points):.2f}"
            axes.loglog(list(points), list(points.values()), marker="o", label=label)
        axes.set(xlabel=name, ylabel="seconds")
        axes.legend()
        figure.savefig(folder / f"{name}.png", bbox_inches="tight")
    return f"pictures in {folder}"


def accelerator() -> str:
    """The device on which operators of the GPU path are counted: without a GPU, torch's `meta`.

    A build of torch without CUDA cannot run autograd on fake CUDA tensors, and `meta` takes the
    same branches: all that ask whether the device is a CPU.
    """
    return "cuda" if torch.cuda.is_available() else "meta"


def operators(core: str, size: str, length: int, device: str) -> int:
    """Operators that forward and backward of `observe` dispatch on 2 rows of `length` steps."""
    torch.manual_seed(0)
    world = WorldModel(resolve(["--core", core, "--size", size]), VECTOR, ACT).to(device)
    embed = torch.zeros(2, length, world.encoder.out, device=device, requires_grad=True)
    action = torch.zeros(2, length, world.action, device=device)
    first = torch.zeros(2, length, dtype=torch.bool, device=device)
    inputs = (embed, action, first, world.initial(2), world.noise(2, length))
    with contextlib.ExitStack() as stack:
        if device == "meta":  # where autocast is always off, and asking for it is an error
            stack.enter_context(patch("torch.autocast", lambda *_, **__: contextlib.nullcontext()))
            stack.enter_context(patch("torch.is_autocast_enabled", lambda _: False))
        traffic = stack.enter_context(Traffic())
        out, _ = world.observe(*inputs)
        parts = [value for value in out.values() if isinstance(value, Tensor)]
        sum(value.sum() for value in parts if value.requires_grad).backward()
    return traffic.operators
