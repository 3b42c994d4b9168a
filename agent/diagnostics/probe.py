"""Diagnostic `probe`: what can be read from h, x and z as an episode goes on.

Small models, linear and with one hidden layer, learn from four in five episodes to read a label
from each of h, x and z; scores are those on the fifth, and weight decay is chosen on a fifth of the
four. There is one model an age.

Labels: an entry of an observation at one step, such as a cue (a class); in Memory Maze the layout
of the walls, cell by cell, where the probe is told place and direction too, without which a map has
no frame (as in pydreamer's probes), and the objects' positions as seen from the agent. There a
model reads some of the SPAN steps from its age on, since episodes are few.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agent.diagnostics.recording import Episode, Recording

KINDS = ("linear", "mlp")
PARTS = ("h", "x", "z")
MOST_CLASSES = 32
FEWEST = 10  # episodes
HELD_OUT = 0.2  # share of the episodes
HIDDEN = 64
STEPS = 100  # of L-BFGS
DECAYS = (1e-3, 1e-1, 1e1)
SPAN, EVERY = 32, 4  # steps read from an age on where labels are positions, and how many apart


@dataclass
class Label:
    """`targets` (R, ...) of the rows `where`: (episode, step) each, for the probe at one age.

    kind: `class` (R,) whole numbers; `cells` (R, n) of 0 and 1; `places` (R, n, 2) positions.
    `told` (R, k): what the probe is given besides latents.
    """

    kind: str
    targets: Tensor
    where: list[tuple[int, int]]
    told: Tensor


def loss_of(kind: str, outputs: Tensor, targets: Tensor) -> Tensor:
    if kind == "class":
        return F.cross_entropy(outputs, targets)
    if kind == "cells":
        return F.binary_cross_entropy_with_logits(outputs, targets)
    return F.mse_loss(outputs, targets.flatten(1))


def score_of(kind: str, outputs: Tensor, targets: Tensor) -> float:
    """Share of right classes or cells; for places the mean distance."""
    if kind == "class":
        return (outputs.argmax(-1) == targets).float().mean().item()
    if kind == "cells":
        return ((outputs > 0) == (targets > 0.5)).float().mean().item()
    return (outputs.view_as(targets) - targets).norm(dim=-1).mean().item()


def fit(inputs: Tensor, label: tuple[str, Tensor], outputs: int, kind: str, decay: float) -> Any:
    """A model of `inputs` (R, F) with a penalty on squared weights, from fixed initial ones."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Linear(inputs.shape[1], outputs)]
        if kind == "mlp":
            layers = [nn.Linear(inputs.shape[1], HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, outputs)]
        model = nn.Sequential(*layers)
    weights = [param for name, param in model.named_parameters() if name.endswith("weight")]
    optimiser = torch.optim.LBFGS(model.parameters(), max_iter=STEPS, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = loss_of(label[0], model(inputs), label[1])
        loss = loss + decay * sum(weight.square().sum() for weight in weights) / 2
        loss.backward()
        return loss

    with torch.enable_grad():
        optimiser.step(closure)
    return model


def held_out(episodes: int, share: float = HELD_OUT) -> int:
    return max(1, round(share * episodes))


def split(episode: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Rows (R,) that learn and rows that count, by the number of the episode each is of."""
    names = episode.unique()
    held = names[len(names) - held_out(len(names), share) :]
    counts = torch.isin(episode, held)
    return ~counts, counts


def score(features: Tensor, targets: Tensor, episode: Tensor, label: str, kind: str) -> float:
    """Held-out score of a `kind` of model that reads `targets` (R, ...) from `features` (R, F).

    `episode` (R,) says which episode a row is of: all rows of one learn, or all count.
    """
    outputs = int(targets.max()) + 1 if label == "class" else targets[0].numel()

    def tried(learns: Tensor, counts: Tensor, decay: float) -> float:
        mean, std = features[learns].mean(0), features[learns].std(0)
        # What never changed while learning says nothing, whatever it does later.
        inputs = torch.where(std > 1e-6, (features - mean) / std, 0.0)
        model = fit(inputs[learns], (label, targets[learns]), outputs, kind, decay)
        with torch.no_grad():
            return score_of(label, model(inputs[counts]), targets[counts])

    learns, counts = split(episode, HELD_OUT)
    inner, outer = split(episode[learns], HELD_OUT)
    rows = learns.nonzero().squeeze(1)
    sign = -1 if label == "places" else 1
    best = max(DECAYS, key=lambda decay: sign * tried(rows[inner], rows[outer], decay))
    return tried(learns, counts, best)


def chance(targets: Tensor, episode: Tensor, label: str) -> float:
    """The score of the best constant of the rows that learn, on those that count."""
    learns, counts = split(episode, HELD_OUT)
    seen, rest = targets[learns], targets[counts]
    if label == "class":
        return (rest == seen.mode().values).float().mean().item()
    if label == "cells":
        return score_of(label, (seen.mean(0) - 0.5).expand_as(rest), rest)
    return score_of(label, seen.mean(0).expand_as(rest).flatten(1), rest)


def class_label(episodes: list[Episode], key: str, index: int, when: int, age: int) -> Label:
    """Entry `index` of observation `key` at step `when`. ValueError when it is no class."""
    long = [n for n, episode in enumerate(episodes) if len(episode) > max(age, when)]
    values = torch.tensor([float(episodes[n].steps[key][when].ravel()[index]) for n in long])
    kinds, classes = values.unique(return_inverse=True)
    if not 2 <= len(kinds) <= MOST_CLASSES:
        raise ValueError(
            f"--label {key}:{index}: it took {len(kinds)} values in {len(long)} episodes of "
            f"{max(age, when) + 1} steps or more; expected 2 to {MOST_CLASSES}"
        )
    return Label("class", classes, [(n, age) for n in long], torch.zeros(len(long), 0))


def maze_labels(episodes: list[Episode], age: int) -> dict[str, Label]:
    """`layout` and `objects` of Memory Maze at the steps from `age` on."""
    where = [
        (n, step)
        for n, episode in enumerate(episodes)
        for step in range(age, age + SPAN, EVERY)
        if step < len(episode)
    ]

    def at(name: str) -> Tensor:
        rows = [torch.from_numpy(episodes[n].steps[f"label/{name}"][step]) for n, step in where]
        return torch.stack(rows)

    told = torch.cat([at("agent_pos"), at("agent_dir")], -1)
    nothing = torch.zeros(len(where), 0)
    return {
        "layout": Label("cells", at("maze_layout").flatten(1), where, told),
        "objects": Label("places", at("targets_vec"), where, nothing),
    }


def read(episodes: list[Episode], label: Label) -> dict[str, float]:
    """Scores by part and kind, and the chance line; `told`: from what all probes are told alone."""
    episode = torch.tensor([n for n, _ in label.where])
    out = {"rows": len(episode), "chance": chance(label.targets, episode, label.kind)}
    features = {
        part: torch.stack([episodes[n].latents[step][part] for n, step in label.where])
        for part in PARTS
    }
    if label.told.shape[1]:
        features = {"told": torch.zeros(len(episode), 0), **features}
    for (part, value), kind in itertools.product(features.items(), KINDS):
        inputs = torch.cat([value, label.told], -1)
        out[f"{part}/{kind}"] = score(inputs, label.targets, episode, label.kind, kind)
    return out


def ages_of(task: str, ages: list[int]) -> set[int]:
    """The steps whose latents a recording must keep."""
    if task.startswith("memory_maze"):
        return {step for age in ages for step in range(age, age + SPAN, EVERY)}
    return set(ages)


IS = {
    "class": "share of right classes",
    "cells": "share of right cells",
    "places": "mean distance, cells",
}


def measure(
    run: Recording, ages: list[int], label: tuple[str, int] | None, when: int = 0
) -> dict[str, Any]:
    """Scores at `ages` of `label`, (key, index) of an observation at step `when`, and of what the
    simulator knows. ValueError when a label cannot be used, or there is none."""
    spaces = run.update.world.obs_space
    if label:
        key, index = label
        if key not in spaces or not 0 <= index < torch.Size(spaces[key].shape).numel():
            shapes = ", ".join(f"{name} {space.shape}" for name, space in spaces.items())
            raise ValueError(f"--label {key}:{index}: the observations are {shapes}")
    maze = "label/maze_layout" in run.episodes[0].steps
    if not (label or maze):
        raise ValueError("there is no label to read: give --label KEY:INDEX of an observation")
    found: dict[str, dict[str, Any]] = {}
    for age in ages:
        if sum(len(episode) > age for episode in run.episodes) < FEWEST:
            continue
        labels = {}
        if label:
            labels[f"{label[0]}:{label[1]} at step {when}"] = class_label(
                run.episodes, *label, when, age
            )
        if maze:
            labels |= maze_labels(run.episodes, age)
        for name, one in labels.items():
            row = {"age": age, **read(run.episodes, one)}
            found.setdefault(name, {"is": IS[one.kind], "rows": []})["rows"].append(row)
    if not found:
        raise ValueError(
            f"fewer than {FEWEST} of {len(run.episodes)} episodes reach the steps "
            f"{', '.join(map(str, ages))}: give more --episodes, or other --at"
        )
    return {
        "about": "scores on held-out episodes of models that read a label from h, x and z at a "
        "step of the episode; chance: of the best constant; told: of a model that gets only what "
        "all get besides the latents (place and direction)",
        "episodes": len(run.episodes),
        "held_out": held_out(len(run.episodes)),
        "labels": found,
    }


def plot(figure: Any, result: dict[str, Any]) -> None:
    found = result["labels"]
    figure.set_size_inches(5 * len(found), 3.8)
    shown: dict[str, Any] = {}
    for axes, (name, label) in zip(
        figure.subplots(1, len(found), squeeze=False)[0], found.items(), strict=True
    ):
        rows = label["rows"]
        ages = [row["age"] for row in rows]
        colours = {"h": "C0", "x": "C1", "z": "C2", "told": "C7"}
        for key in [key for key in rows[0] if key not in ("age", "rows", "chance")]:
            part, kind = key.split("/")
            # Where lines lie upon one another, the wide ones still show.
            style = {"lw": 4, "alpha": 0.4} if kind == "linear" else {"lw": 1.2, "ls": "--"}
            style["color"] = colours[part]
            values = [row[key] for row in rows]
            axes.plot(ages, values, marker="o", ms=3, label=f"{part}, {kind}", **style)
        axes.plot(ages, [row["chance"] for row in rows], "k-.", lw=1, label="best constant")
        shown |= {line.get_label(): line for line in axes.get_lines()}
        axes.set_title(f"{name}: {label['is']}, held out", fontsize="small")
        axes.set_xlabel("step of the episode")
    figure.legend(handles=list(shown.values()), loc="outside right center", fontsize="small")


def lines(result: dict[str, Any]) -> list[str]:
    out = []
    for name, label in result["labels"].items():
        episodes = f"{result['episodes']} episodes, {result['held_out']} of them held out"
        out.append(f"{name}: {label['is']}, {episodes}")
        names = [key for key in label["rows"][0] if key not in ("age", "rows")]
        out.append(f"{'step':>5}" + "".join(f"{key:>12}" for key in names))
        for row in label["rows"]:
            out.append(f"{row['age']:5}" + "".join(f"{row[key]:12.3f}" for key in names))
    return out
