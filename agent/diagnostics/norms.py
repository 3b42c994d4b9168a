"""Diagnostic `norm`: the size of h and x over an episode, where the agent acted.

A state that grows with age leaves the range that training has shown to the heads (`ages.py`).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from agent.ages import by_age
from agent.diagnostics.recording import Recording


def measure(run: Recording) -> dict[str, Any]:
    episodes = [episode.steps for episode in run.episodes]
    age = torch.cat([torch.from_numpy(steps["age"]) for steps in episodes])
    # Powers of the root of 2, as whole numbers.
    starts = sorted({0, *(round(2 ** (n / 2)) for n in range(2 * int(age.max()).bit_length()))})
    starts = [start for start in starts if start <= int(age.max())]
    out: dict[str, Any] = {
        "about": "Euclidean norms of h and x by age in the episode, from each age up to the next: "
        "mean, and standard deviation over steps",
        "trained_length": run.config.batch.length,
        "ages": starts,
    }
    for name in ("h", "x"):
        norm = torch.cat([torch.from_numpy(steps[f"{name}_norm"]) for steps in episodes]).double()
        mean, square = (by_age(value, age, tuple(starts)) for value in (norm, norm.square()))
        out[name] = mean.tolist()
        out[f"{name}_std"] = (square - mean.square()).clamp(min=0).sqrt().tolist()
    empty = [n for n, value in enumerate(out["h"]) if math.isnan(value)]
    for values in (out["ages"], *(out[f"{name}{part}"] for name in "hx" for part in ("", "_std"))):
        values[:] = [value for n, value in enumerate(values) if n not in empty]
    return out


def plot(figure: Any, result: dict[str, Any]) -> None:
    figure.set_size_inches(6, 4)
    axes = figure.subplots()
    for colour, name in enumerate("hx"):
        mean, std = (torch.tensor(result[key]) for key in (name, f"{name}_std"))
        axes.plot(result["ages"], mean, f"C{colour}", marker="o", ms=3, label=f"norm of {name}")
        axes.fill_between(result["ages"], mean - std, mean + std, color=f"C{colour}", alpha=0.2)
    axes.axvline(result["trained_length"], color="grey", lw=1, ls=":", label="length of training")
    axes.set(xlabel="age in the episode (steps)", ylabel="norm, mean and deviation")
    axes.set_xscale("symlog", base=2, linthresh=1)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlim(left=-0.2)
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.15), fontsize="small", ncols=3)


def lines(result: dict[str, Any]) -> list[str]:
    out = [f"{'from age':10}" + "".join(f"{age:>8}" for age in result["ages"])]
    return out + [
        f"{f'norm of {name}':10}" + "".join(f"{value:8.2f}" for value in result[name])
        for name in "hx"
    ]
