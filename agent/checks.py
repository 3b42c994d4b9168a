"""What a run refuses to start with, each in one message that says what to change."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from pathlib import Path

from agent import limits
from configs import load as configs
from configs.schema import Config
from envs.env import Space
from envs.make import cheap
from replay.budget import fewest
from replay.replay import Replay

log = logging.getLogger("agent")

# A vector of more numbers is probably an image.
LARGE = 4096
# May differ between a run and its resumption; everything else must agree.
FREE_AT_RESUME = (
    *("stop.", "logdir", "log.", "eval.", "checkpoint.", "replay.ram_gb"),
    *("device", "precision", "threads", "products", "compile"),
    *("env.timeout", "env.restarts_per_hour", "replay.capacity", "replay.disk_gb"),
)
# Of these, what later sittings have too without being told again: all but what is of a machine.
LASTING = ("stop.", "log.", "eval.", "checkpoint.", "replay.", "env.")


class RunError(ValueError):
    """The run cannot start as asked; the message says what to change."""


class MachineError(RunError):
    """The run cannot start on this machine, which others of its ranks may not know."""


@contextlib.contextmanager
def refused(what: str = "") -> Iterator[None]:
    """Raises a ValueError within as RunError, after the word `what`."""
    try:
        yield
    except ValueError as error:
        raise RunError(f"{what}{error}") from error


def named(key: str, names: tuple[str, ...]) -> bool:
    """Whether a setting is one of `names`, or in one of the groups among them, which end in `.`."""
    return any(key == name or (name[-1] == "." and key.startswith(name)) for name in names)


def lasting(config: Config, saved: Config) -> Config:
    """What `config.yaml` of a resumed run, which was `saved`, says from now on."""
    now = configs.to_flat(config)
    return configs.replace_flat(saved, {k: v for k, v in now.items() if named(k, LASTING)})


def reconcile(asked: Config, saved: Config, given: set[str]) -> Config:
    """The saved configuration with what the user may change at resume.

    Raises RunError with a diff for anything else that was asked for explicitly or by presets.
    """
    ask, old = configs.to_flat(asked), configs.to_flat(saved)
    free = {key for key in old if named(key, FREE_AT_RESUME)}
    clash = [
        f"  {key}: {old[key]} in the run, {ask[key]} asked"
        for key in old
        if key not in free and key in given and ask[key] != old[key]
        and not (key == "size" and ask[key] == "auto")
    ]  # fmt: skip
    if clash:
        raise RunError(
            "this folder holds a run with other settings:\n"
            + "\n".join(clash)
            + "\nchoose another --logdir, or drop these flags to resume; nothing was touched"
        )
    changed = {key: ask[key] for key in free & given}
    return configs.replace_flat(saved, changed)


def check_mode(config: Config) -> None:
    """Raises RunError when the settings of a run without environment steps do not fit."""
    if config.loop.mode != "offline":
        return
    if not config.replay.from_:
        raise RunError("--loop.mode offline learns from stored steps: add --replay.from <folder>")
    if not set(limits.limits(config.stop)) - {limits.AXES["steps"]}:
        raise RunError(
            "--loop.mode offline ends after --stop.updates <number>, or --stop.flops or "
            "--stop.seconds, one of which must be given"
        )


def check_source(config: Config) -> None:
    """A warning where `replay.from` holds the steps of another task."""
    file = Path(config.replay.from_) / "config.yaml"
    if config.replay.from_ and file.exists():
        task = configs.read_yaml(file).get("task")
        if task != config.task:
            log.warning("replay.from holds steps of %s; this run is of %s", task, config.task)


def check_sizes(obs_space: dict[str, Space]) -> None:
    """A warning for vectors that are probably images."""
    for key, space in obs_space.items():
        if space.kind == "vector" and space.shape[0] > LARGE:
            log.warning(
                "observation %r is a vector of %d numbers, which an MLP will read; an image must "
                "be a uint8 box (height, width, channels)",
                *(key, space.shape[0]),
            )


def check_device(config: Config) -> None:
    """Raises RunError for a device that this machine has not."""
    import torch  # which those do without who only read settings

    if config.device == "cuda" and not torch.cuda.is_available():
        raise MachineError(
            "--device cuda: this machine has no GPU that PyTorch can use; add --device cpu"
        )


def check_threads(config: Config) -> None:
    """Raises RunError for environments that cannot be stepped beside the learner."""
    if (config.loop.mode, config.env.processes) == ("overlapped", "no") and not cheap(config.task):
        # Built in this thread and stepped in the actor's, where OpenGL would refuse to draw.
        raise RunError(
            f"env.processes no: {config.task} cannot be stepped in a thread beside the learner; "
            f"leave it at auto, or add --loop.mode lockstep"
        )


def check_ranks(config: Config, count: int) -> None:
    """Raises RunError for what `count` ranks cannot share."""
    if count > 1 and config.replay.start != "zero":
        raise RunError(
            f"replay.start {config.replay.start} is for a run of one rank, whose rows and streams "
            f"the states belong to; leave it at zero"
        )
    shared = {"batch.size": config.batch.size}
    if config.loop.mode != "offline":
        shared["env.count"] = config.env.count
    for key, number in shared.items():
        if number % count:
            fit = [n for n in range(1, number + 1) if number % n == 0]
            raise RunError(
                f"{key} {number} is that of all ranks together and does not divide among {count}: "
                f"choose a multiple of {count}, or start {' or '.join(map(str, fit))} ranks"
            )


def share_of_fill(config: Config, count: int) -> int:
    """Steps that each of `count` ranks holds before the first update."""
    fill = config.loop.fill or config.batch.size * config.batch.length
    return -(-fill // count)


def fewest_steps(config: Config, count: int, held: int = 0, longest: int = 0) -> int:
    """The smallest `replay.capacity` with which `count` ranks learn from the first update to the
    last, beside `held` steps of `replay.from`, whose longest stream has `longest`."""
    slots = 0 if longest >= config.batch.length else config.env.count // count
    every = config.replay.state_every if config.replay.start == "stored" else 0
    fill = share_of_fill(config, count) - held
    return count * fewest(slots, config.batch.length, fill, every)


def check_capacity(config: Config, count: int, replay: Replay, each: float) -> None:
    """Raises RunError for a replay, still without own steps, that would be too small to learn from
    at the start or later. A step is projected to take `each` bytes."""
    if config.loop.mode == "offline":
        return
    least = fewest_steps(config, count, len(replay), replay.longest)
    settings = config.replay
    need = (
        f"for {config.env.count} environments, windows of {config.batch.length} steps and a first "
        f"update after {count * share_of_fill(config, count):,} steps"
    )
    if settings.capacity // count < least // count:
        raise RunError(
            f"replay.capacity {settings.capacity:,} is too small {need}: it must be {least:,} or "
            f"more"
        )
    if 0 < settings.disk_gb * 1e9 < least * each:
        raise RunError(
            f"replay.disk_gb {settings.disk_gb:g}, about {int(settings.disk_gb * 1e9 / each):,} "
            f"steps, is too small {need}: it must be {math.ceil(least * each / 1e5) / 1e4:g} or "
            f"more"
        )


def check_flops(config: Config, update: int) -> None:
    """Raises RunError for a limit of FLOPs below those of one `update`."""
    if 0 < config.stop.flops < update:
        raise RunError(
            f"--stop.flops {config.stop.flops:g} is less than one update takes: {update:,}"
        )
