"""Diagnostic `spectrum`: how long the states of core `s3m` remember, from its weights alone.

A state decays by |a| a step, a = exp(dt lambda) or its bilinear form: its half-life is
log(2) / log(1 / |a|) steps. Beside it what initialisation spans: Re(lambda) = -1/2, dt between
its two settings.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agent.diagnostics.recording import Recording
from worldmodels.s3m import SSM


def half_life(decay: Tensor) -> Tensor:
    """Steps after which what decays by the factor `decay` a step has halved; inf for 1."""
    return math.log(2) / (1 / decay.double()).log()


@torch.no_grad()
def layer_spectrum(layer: SSM) -> dict[str, Tensor]:
    """half_life (steps), period (steps of a turn) and dt of the P states, all float64."""
    a, _, _ = layer.coefficients()
    decay = torch.hypot(*a.double())
    turn = torch.atan2(*a.double().flip(0)).abs()
    return {
        "half_life": half_life(decay),
        "period": 2 * math.pi / turn,
        "dt": layer.log_dt.double().exp(),
    }


def initial_range(dt_min: float, dt_max: float) -> list[float]:
    """Half-lives that states begin with, the shortest and the longest, in steps."""
    return [math.log(2) / (0.5 * dt) for dt in (dt_max, dt_min)]


def measure(run: Recording) -> dict[str, Any]:
    settings = run.config.s3m
    layers = [layer_spectrum(layer) for layer in run.update.world.core.layers]
    return {
        "about": "of each state of each layer: half_life in steps, period of its turn in steps "
        "(null: for ever), and the learned dt; initial: the shortest and the longest "
        "half-life at initialisation",
        "initial": initial_range(settings.dt_min, settings.dt_max),
        "dt_range": [settings.dt_min, settings.dt_max],
        "trained_length": run.config.batch.length,
        "layers": [{key: value.tolist() for key, value in layer.items()} for layer in layers],
    }


def lives_of(result: dict[str, Any]) -> list[np.ndarray]:
    """Half-lives by layer; null, for one that never ends, as infinity."""
    found = [np.array(layer["half_life"], float) for layer in result["layers"]]
    return [np.where(np.isnan(lives), np.inf, lives) for lives in found]


def plot(figure: Any, result: dict[str, Any]) -> None:
    lives = lives_of(result)
    figure.set_size_inches(9, 2 * len(lives) + 1)
    finite = np.concatenate(lives)
    finite = finite[np.isfinite(finite)]
    edges = np.geomspace(finite.min() * 0.99, finite.max() * 1.01, 41)
    for n, (axes, dots) in enumerate(figure.subplots(len(lives), 2, squeeze=False, sharex="col")):
        axes.hist(lives[n], bins=edges, color="C0", label="states")
        axes.axvspan(*result["initial"], color="C1", alpha=0.15, label="at initialisation")
        axes.axvline(result["trained_length"], color="grey", ls=":", label="length of training")
        axes.set_xscale("log")
        axes.set_ylabel(f"layer {n}: states")
        dots.plot(lives[n], result["layers"][n]["dt"], ".", ms=3)
        dots.set(xscale="log", yscale="log")
        dots.axhspan(*result["dt_range"], color="C1", alpha=0.15)
        dots.set_ylabel("learned dt")
    axes.set_xlabel("half-life (steps)")
    dots.set_xlabel("half-life (steps)")
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.3), fontsize="small", ncols=3)


def lines(result: dict[str, Any]) -> list[str]:
    out = [f"{'layer':>5} {'half-life: 5 %':>15} {'median':>9} {'95 %':>9} {'longest':>9}"]
    for n, lives in enumerate(lives_of(result)):
        low, middle, high = np.quantile(lives, [0.05, 0.5, 0.95])
        out.append(f"{n:5} {low:15.1f} {middle:9.1f} {high:9.1f} {lives.max():9.1f}")
    return out
