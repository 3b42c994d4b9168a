"""What a run refuses to start with, each in one message that says what to change."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from agent import limits
from configs import load as configs
from configs.schema import Config
from envs.make import cheap

# May differ between a run and its resumption; everything else must agree.
FREE_AT_RESUME = (
    *("stop.", "logdir", "log.", "eval.", "checkpoint.", "replay.ram_gb"),
    *("device", "precision", "threads", "products", "compile"),
    *("env.timeout", "env.restarts_per_hour"),
)


class RunError(ValueError):
    """The run cannot start as asked; the message says what to change."""


@contextlib.contextmanager
def refused(what: str = "") -> Iterator[None]:
    """Raises a ValueError within as RunError, after the word `what`."""
    try:
        yield
    except ValueError as error:
        raise RunError(f"{what}{error}") from error


def reconcile(asked: Config, saved: Config, given: set[str]) -> Config:
    """The saved configuration with what the user may change at resume.

    Raises RunError with a diff for anything else that was asked for explicitly or by presets.
    """
    ask, old = configs.to_flat(asked), configs.to_flat(saved)
    free = {k for k in old if any(k == f or (f[-1] == "." and k.startswith(f))
                                  for f in FREE_AT_RESUME)}  # fmt: skip
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


def check_device(config: Config) -> None:
    """Raises RunError for a device that this machine has not."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise RunError(
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


def check_flops(config: Config, update: int) -> None:
    """Raises RunError for a limit of FLOPs below those of one `update`."""
    if 0 < config.stop.flops < update:
        raise RunError(
            f"--stop.flops {config.stop.flops:g} is less than one update takes: {update:,}"
        )
