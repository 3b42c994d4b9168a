"""What a trained agent still knows: `python -m agent.probe --logdir logs/a --label vector:2`.

Episodes are played with seeds that training never uses. The label of an episode is what it showed
once: entry 2 of the observation `vector` at its first step, say, which is bsuite's cue. Small
classifiers learn to read it from h, x and z at later steps of four in five episodes; accuracies are
those on the fifth. Prints a table; the run's folder gets probe.json and (matplotlib) probe.png.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agent.evaluate import load_run, play, player, pool_of
from agent.update import Update

KINDS = ("linear", "mlp")
MOST_CLASSES = 32
TRAIN = 0.8  # share of the episodes
HIDDEN = 64
STEPS = 300  # of full-batch Adam
DECAY = 1e-2


class Recorder:
    """Collects the label of each episode, and h, x and z at some of its steps."""

    def __init__(self, key: str, index: int, when: int, ages: list[int]):
        self.key, self.index, self.when, self.ages = key, index, when, ages
        self.labels: dict[tuple[int, int], float] = {}
        self.seen: dict[tuple[int, int], dict[int, dict[str, Tensor]]] = {}

    def __call__(self, ids: np.ndarray, obs: dict[str, np.ndarray], actor: Any) -> None:
        width = actor.update.world.core.out
        hz, x = actor.latents["hz"], actor.latents["x"]
        parts = {"h": hz[:, :width], "x": x, "z": hz[:, width:]}
        for row, (slot, episode, age) in enumerate(
            zip(ids.tolist(), obs["episode"].tolist(), obs["age"].tolist(), strict=True)
        ):
            name = slot, episode
            if age == self.when:
                self.labels[name] = float(np.ravel(obs[self.key][row])[self.index])
            if age in self.ages:
                here = {key: part[row].float().cpu() for key, part in parts.items()}
                self.seen.setdefault(name, {})[age] = here

    def data(self) -> tuple[dict[int, dict[str, Tensor]], Tensor]:
        """Features (E, ...) by age and part, and classes (E,), of the episodes long enough."""
        names = sorted(n for n in self.labels if len(self.seen.get(n, {})) == len(self.ages))
        values = torch.tensor([self.labels[name] for name in names])
        kinds, classes = values.unique(return_inverse=True)
        if not 2 <= len(kinds) <= MOST_CLASSES:
            raise ValueError(
                f"--label: it took {len(kinds)} values in {len(names)} episodes of {self.ages[-1]} "
                f"steps or more; expected 2 to {MOST_CLASSES}"
            )
        rows = [self.seen[name] for name in names]
        features = {
            age: {part: torch.stack([row[age][part] for row in rows]) for part in rows[0][age]}
            for age in self.ages
        }
        return features, classes


def accuracy(features: Tensor, classes: Tensor, kind: str) -> float:
    """Share of held-out rows of `features` (E, F) whose class (E,) a classifier reads.

    `linear` is multinomial regression, `mlp` has one hidden layer; both with weight decay on
    standardised features, from fixed initial weights.
    """
    cut = int(TRAIN * len(features))
    mean, std = features[:cut].mean(0), features[:cut].std(0)
    inputs = ((features - mean) / (std + 1e-3)).clone()
    outputs = int(classes.max()) + 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Linear(inputs.shape[1], outputs)]
        if kind == "mlp":
            layers = [nn.Linear(inputs.shape[1], HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, outputs)]
        model = nn.Sequential(*layers)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=DECAY)
    for _ in range(STEPS):
        optimiser.zero_grad()
        F.cross_entropy(model(inputs[:cut]), classes[:cut]).backward()
        optimiser.step()
    with torch.no_grad():
        return float((model(inputs[cut:]).argmax(-1) == classes[cut:]).float().mean())


def chance(classes: Tensor) -> float:
    """The accuracy of the commonest class, on the held-out rows."""
    cut = int(TRAIN * len(classes))
    return float((classes[cut:] == classes[:cut].mode().values).float().mean())


def probe(
    folder: Path, key: str, index: int, when: int, ages: list[int], episodes: int
) -> dict[str, Any]:
    """Accuracies by age, part and kind. ValueError for a run or a label that cannot be used."""
    config, run = load_run(folder)
    recorder = Recorder(key, index, when, ages)
    pool = pool_of(config, episodes)
    try:
        space = pool.obs_space.get(key)
        if space is None or not 0 <= index < int(np.prod(space.shape)):
            shapes = ", ".join(f"{name} {space.shape}" for name, space in pool.obs_space.items())
            raise ValueError(f"--label {key}:{index}: the observations are {shapes}")
        update: Update = player(config, pool, run["weights"])
        play(update, pool, episodes, config.seed, greedy=False, watch=recorder)
    finally:
        pool.close()
    features, classes = recorder.data()
    rows = [
        {
            "age": age,
            **{
                f"{part}/{kind}": accuracy(value, classes, kind)
                for part, value in features[age].items()
                for kind in KINDS
            },
        }
        for age in ages
    ]
    about = {name: run[name] for name in ("agent_step", "update")}
    label = f"{key}:{index} at step {when}"
    return {
        **about,
        "task": config.task,
        "core": config.core,
        "label": label,
        "episodes": len(classes),
        "chance": chance(classes),
        "rows": rows,
    }


def plot(path: Path, result: dict[str, Any]) -> None:
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(6, 4))).subplots()
    ages = [row["age"] for row in result["rows"]]
    for colour, part in enumerate("hxz"):
        for kind, dash in zip(KINDS, ("-", "--"), strict=True):
            values = [row[f"{part}/{kind}"] for row in result["rows"]]
            axes.plot(ages, values, f"C{colour}{dash}", marker="o", ms=3, label=f"{part}, {kind}")
    axes.axhline(result["chance"], color="grey", lw=1, linestyle="-.", label="commonest class")
    axes.set(xlabel="step of the episode", ylabel="held-out accuracy", ylim=(-0.03, 1.03))
    axes.set(title=f"{result['task']}, {result['core']}: {result['label']}")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, bbox_inches="tight", dpi=150)


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, or 2 for a wrong command."""
    parser = argparse.ArgumentParser("agent.probe", description=__doc__)
    parser.add_argument("--logdir", type=Path, required=True)
    parser.add_argument("--label", required=True, metavar="KEY:INDEX", help="of the observation")
    parser.add_argument("--when", type=int, default=0, help="step at which the label is seen")
    parser.add_argument("--at", type=int, nargs="+", default=[1, 10, 30], help="steps to read at")
    parser.add_argument("--episodes", type=int, default=400)
    args = parser.parse_args(argv)
    key, _, index = args.label.rpartition(":")
    try:
        if not key or not index.isdigit():
            raise ValueError(f"--label {args.label}: expected KEY:INDEX, for example vector:2")
        ages = sorted(set(args.at))
        result = probe(args.logdir, key, int(index), args.when, ages, args.episodes)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    (args.logdir / "probe.json").write_text(json.dumps(result, indent=1))
    names = [name for name in result["rows"][0] if name != "age"]
    print(f"{result['task']}, core {result['core']}, step {result['agent_step']:,}")
    print(f"{result['label']}, {result['episodes']} episodes, chance {result['chance']:.2f}")
    print(f"{'step':>5}" + "".join(f"{name:>10}" for name in names))
    for row in result["rows"]:
        print(f"{row['age']:5}" + "".join(f"{row[name]:10.3f}" for name in names))
    if importlib.util.find_spec("matplotlib"):
        plot(args.logdir / "probe.png", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
