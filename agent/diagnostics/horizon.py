"""Diagnostic `horizon`: open-loop prediction error by steps ahead, by length of the context.

The long imagination of the study of world-model backbones (Deng et al. 2023, arXiv 2307.02064): the
model sees a context, then goes on from the actions alone. Every context ends at the same step, so
what a longer one gains is what the information in its older part is worth; a context begins as a
replayed row does, from the initial state. What information of a known age is worth is told by
`recall.py`, from the same predictions.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agent import media, seeding
from agent.diagnostics.recording import Recording
from worldmodels.dists import symlog
from worldmodels.encoder import one_hot

AHEAD, CONTEXT = 64, 256  # most steps
IMAGE_ROWS, ROWS = 32, 256
WORDS = {
    "image": "squared error a pixel, pixels in [0, 1]",
    "vector": "squared error an entry, of symlog values",
    "discrete": "share of wrong classes",
    "reward": "absolute error",
    "continue": "squared error of the probability of going on",
}

Errors = dict[str, Tensor]  # quantity -> (B, H), by row and steps ahead


def kinds(update: Any) -> dict[str, str]:
    """The quantities that a world model predicts, and what kind each is."""
    spaces = {key: space.kind for key, space in update.world.obs_space.items()}
    return {**spaces, "reward": "reward", "continue": "continue"}


def truths(update: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """What predictions are compared with, (B, T, ...) floats; discrete values are one-hot."""
    out = {}
    for key, space in update.world.obs_space.items():
        value = batch[key]
        if space.kind == "image":
            out[key] = value.float() / 255
        else:
            vector = space.kind == "vector"
            out[key] = symlog(value.float()) if vector else one_hot(value, space.classes)
    return {**out, "reward": batch["reward"], "continue": 1 - batch["is_terminal"].float()}


@torch.no_grad()
def predictions(update: Any, h: Tensor, z: Tensor) -> dict[str, Tensor]:
    """What latents (..., D) and (..., S*C) predict, in the form of `truths`."""
    world = update.world
    hz = torch.cat([h, z], -1)
    out = world.decoder(h, z)
    for key, space in world.obs_space.items():
        if space.kind == "discrete":
            parts = [part.softmax(-1) for part in out[key].split(list(space.classes), -1)]
            out[key] = torch.cat(parts, -1)
    going_on = (world.predict_cont(hz) / world.discount).clamp(max=1)
    return {**out, "reward": world.predict_reward(hz), "continue": going_on}


def errors(truth: Tensor, guess: Tensor, kind: str, classes: tuple[int, ...] = ()) -> Tensor:
    """Errors (...) of `guess`, as WORDS says; `truth` has as many axes, and may be broadcast."""
    if kind in ("reward", "continue"):
        return (truth - guess).abs() if kind == "reward" else (truth - guess).square()
    if kind == "discrete":
        pairs = zip(truth.split(list(classes), -1), guess.split(list(classes), -1), strict=True)
        wrong = [(a.argmax(-1) != b.argmax(-1)).float() for a, b in pairs]
        return torch.stack(wrong, -1).mean(-1)
    axes = (-3, -2, -1) if kind == "image" else (-1,)
    return (truth - guess).square().mean(axes)


def imagined(update: Any, batch: dict[str, Tensor], context: int, seed: int) -> tuple[Errors, ...]:
    """Errors after `context` steps of `batch`, of the mean of the draws and of a draw alone."""
    h, z = media.roll(update, batch, context, seeding.generator(seed, "diagnose", context))
    truth, kind = truths(update, batch), kinds(update)
    ahead = {key: value[:, context:] for key, value in truth.items()}
    totals: dict[str, Tensor] = {}
    single: Errors = {}
    for pair in zip(
        h[:, :, context:], z[:, :, context:], strict=True
    ):  # a draw: pictures are large
        for key, guess in predictions(update, *pair).items():
            error = errors(ahead[key], guess, kind[key], classes_of(update, key)) / len(h)
            single[key] = single.get(key, 0) + error
            totals[key] = totals.get(key, 0) + guess / len(h)
    mean = {
        key: errors(ahead[key], guess, kind[key], classes_of(update, key))
        for key, guess in totals.items()
    }
    return mean, single


def classes_of(update: Any, key: str) -> tuple[int, ...]:
    space = update.world.obs_space.get(key)
    return space.classes if space else ()


def references(update: Any, batch: dict[str, Tensor], context: int) -> tuple[Errors, Errors]:
    """Errors of repeating the last step of the context, and of the mean of all that is ahead."""
    kind, repeat, mean = kinds(update), {}, {}
    for key, value in truths(update, batch).items():
        last, ahead = value[:, context - 1 : context], value[:, context:]
        more = kind[key], classes_of(update, key)
        repeat[key] = errors(ahead, last.expand_as(ahead), *more)
        mean[key] = errors(ahead, ahead.mean((0, 1)).expand_as(ahead), *more)
    return repeat, mean


@dataclass(eq=False)
class Table:
    """All errors of one set of windows; `batch` is the windows themselves."""

    batch: dict[str, Tensor]
    context: int  # the longest
    after: dict[int, Errors]  # by length of the context, of the mean of the draws
    single: Errors
    repeat: Errors
    mean: Errors


def powers(most: int, base: int = 4) -> list[int]:
    """1, 4, 16, ... below `most`, and `most` itself."""
    out = [1]
    while out[-1] * base < most:
        out.append(out[-1] * base)
    return out if out[-1] == most else [*out, most]


@functools.lru_cache(maxsize=1)
def table(run: Recording) -> Table:
    """The errors of the windows of `run`. ValueError when episodes are too short for any."""
    typical = run.typical()
    ahead = min(AHEAD, typical // 2)
    longest = min(CONTEXT, typical - ahead)
    if ahead < 1:
        raise ValueError(f"episodes of {typical} steps have nothing to predict")
    images = bool(run.update.world.encoder.images)
    batch = run.windows(longest + ahead, IMAGE_ROWS if images else ROWS)
    after, single = {}, {}
    for context in powers(longest):
        part = {key: value[:, longest - context :] for key, value in batch.items()}
        after[context], single = imagined(run.update, part, context, run.config.seed)
    repeat, mean = references(run.update, batch, longest)
    return Table(batch, longest, after, single, repeat, mean)


def measure(run: Recording) -> dict[str, Any]:
    found, kind = table(run), kinds(run.update)
    rows, ahead = found.repeat["reward"].shape

    def line(values: Tensor) -> list[float]:
        return values.mean(0).tolist()

    return {
        "about": "open-loop error by steps ahead of the context's last step, a mean over windows "
        "of episodes; `context` by its length, for the mean of the model's draws; `single`: of one "
        "draw after the longest; `repeat` and `mean`: of the context's last step and of the mean",
        "windows": rows,
        "ahead": list(range(1, ahead + 1)),
        "errors": {
            key: {
                "is": WORDS[kind[key]],
                "context": {length: line(errs[key]) for length, errs in found.after.items()},
                "single": line(found.single[key]),
                "repeat": line(found.repeat[key]),
                "mean": line(found.mean[key]),
            }
            for key in kind
        },
    }


def plot(figure: Any, result: dict[str, Any]) -> None:
    found, ahead = result["errors"], result["ahead"]
    figure.set_size_inches(5 * len(found), 3.6)
    panels = figure.subplots(1, len(found), squeeze=False)[0]
    for axes, (key, errs) in zip(panels, found.items(), strict=True):
        for number, (length, values) in enumerate(errs["context"].items()):
            shade = 0.25 + 0.75 * (number + 1) / len(errs["context"])
            axes.plot(ahead, values, color="C0", lw=1.2, alpha=shade, label=f"after {length} steps")
        axes.plot(ahead, errs["single"], "C0:", lw=1, label="one draw, longest context")
        axes.plot(ahead, errs["repeat"], "C1--", lw=1, label="repeat the last step")
        axes.plot(ahead, errs["mean"], "k-.", lw=1, label="mean")
        axes.set_title(f"{key}: {errs['is']}", fontsize="small")
        axes.set_xlabel("steps ahead")
        axes.set_ylim(bottom=0)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")


def lines(result: dict[str, Any]) -> list[str]:
    ahead = powers(result["ahead"][-1])
    out = [f"{'error':12} {'context':>8}" + "".join(f"{f'{h} ahead':>11}" for h in ahead)]
    for key, errs in result["errors"].items():
        shown = {**errs["context"], "repeat": errs["repeat"], "mean": errs["mean"]}
        for name, values in shown.items():
            out.append(f"{key:12} {name:>8}" + "".join(f"{values[h - 1]:11.4f}" for h in ahead))
    return out
