"""Statistics of few runs on few tasks, as in Agarwal et al. 2021 (Deep RL at the Edge of the
Statistical Precipice) and its library rliable, with which they agree.

Scores are (runs, tasks), NaN where there is no run; tasks may have different numbers of runs, and
count the same (rliable has equal numbers only). A run
is one seed: bootstraps draw seeds, never episodes. An interval holds 95 %, by the percentiles of
the bootstrap. It is None if any task has fewer than two runs.

A learning curve is `x`, the rising values of an axis, `y`, scores, and `weights`, the episodes that
each score stands for.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy.integrate import trapezoid

Interval = tuple[float, float]

REPS = 10_000
PERCENTILES = (2.5, 97.5)
SEED = 0  # of the bootstrap: the same runs give the same interval


def known(scores: np.ndarray) -> list[np.ndarray]:
    """The scores of each task."""
    return [column[np.isfinite(column)] for column in scores.T]


def resample(scores: np.ndarray, random: np.random.Generator) -> list[np.ndarray]:
    """Of each task (REPS, runs): as many of its runs, drawn with replacement."""
    return [
        column[random.integers(len(column), size=(REPS, len(column)))] for column in known(scores)
    ]


def pooled(parts: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Scores (..., runs) of all tasks side by side, and how often each counts: all tasks the same,
    so where one has fewer runs, each of them counts more often. Whole numbers."""
    counts = [part.shape[-1] for part in parts if part.shape[-1]]
    each = math.lcm(*counts)
    times = np.repeat([each // count for count in counts], counts).astype(np.int64)
    return np.concatenate(parts, -1), times


def single(scores: np.ndarray) -> bool:
    """Whether a task has no second run."""
    return any(len(column) < 2 for column in known(scores))


def percentiles(values: np.ndarray) -> Interval:
    low, high = np.percentile(values, PERCENTILES)
    return float(low), float(high)


def iqm(values: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Interquartile mean over the last axis, of `values` (..., n) that count `times` (n,): without
    a quarter of them at either end, rounded down."""
    order = values.argsort(-1)
    ends = np.cumsum(times[order], -1)
    total = times.sum()
    cut = total // 4
    inside = np.clip(ends, cut, total - cut)
    kept = np.diff(inside, axis=-1, prepend=cut)
    return (np.take_along_axis(values, order, -1) * kept).sum(-1) / (total - 2 * cut)


def mean(values: np.ndarray, times: np.ndarray) -> np.ndarray:
    return values @ times / times.sum()


def estimate(
    scores: np.ndarray, statistic: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> tuple[float, Interval | None]:
    """`statistic` of all scores, and its interval by the stratified bootstrap.

    statistic: (..., scores of all tasks), how often each counts -> (...)
    """
    point = float(statistic(*pooled(known(scores))))
    if single(scores):
        return point, None
    drawn = pooled(resample(scores, np.random.default_rng(SEED)))
    return point, percentiles(statistic(*drawn))


def profile(scores: np.ndarray, taus: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Performance profile: the share of runs of all tasks above each of `taus`, and (2, taus)."""

    def above(values: np.ndarray, times: np.ndarray) -> np.ndarray:
        return np.stack([mean(values > tau, times) for tau in taus], -1)

    point = above(*pooled(known(scores)))
    if single(scores):
        return point, None
    shares = above(*pooled(resample(scores, np.random.default_rng(SEED))))
    return point, np.percentile(shares, PERCENTILES, axis=0)


def improvement(x: np.ndarray, y: np.ndarray) -> tuple[float, Interval | None]:
    """P(X > Y): over pairs of runs of a task, a tie counts half, then the mean over tasks."""

    def of(xs: list[np.ndarray], ys: list[np.ndarray]) -> np.ndarray:
        tasks = []
        for one, other in zip(xs, ys, strict=True):
            difference = one[..., :, None] - other[..., None, :]
            tasks.append(((np.sign(difference) + 1) / 2).mean((-2, -1)))
        return np.mean(tasks, 0)

    point = float(of(known(x), known(y)))
    if single(x) or single(y):
        return point, None
    random = np.random.default_rng(SEED)
    return point, percentiles(of(resample(x, random), resample(y, random)))


# Learning curves


def final(x: np.ndarray, y: np.ndarray, weights: np.ndarray, budget: float, window: float) -> float:
    """Mean of the last `window` episodes that ended by `budget`; NaN where none did."""
    end = np.searchsorted(x, budget, "right")
    before = np.cumsum(weights[:end][::-1])[::-1] - weights[:end]  # episodes after each row
    used = np.clip(window - before, 0, weights[:end])
    return float(np.sum(used * y[:end]) / used.sum()) if end else np.nan


def area(x: np.ndarray, y: np.ndarray, weights: np.ndarray, budget: float) -> float:
    """Mean height of the curve from 0 to `budget`: linear between scores, the first of which holds
    before it and the last one after it. NaN where none is within the budget."""
    if not len(x) or x[0] > budget:
        return np.nan
    points, which = np.unique(x, return_inverse=True)  # scores of one moment are averaged
    heights = np.bincount(which, weights * y) / np.bincount(which, weights)
    ends = np.concatenate([[0], points[(points > 0) & (points < budget)], [budget]])
    return float(trapezoid(np.interp(ends, points, heights), ends) / budget)


def between(x: np.ndarray, y: np.ndarray, weights: np.ndarray, low: float, high: float) -> float:
    """Mean of the scores at low < x <= high; NaN where there is none."""
    inside = (x > low) & (x <= high)
    return float(np.average(y[inside], weights=weights[inside])) if inside.any() else np.nan


def rise(x: np.ndarray, y: np.ndarray, weights: np.ndarray, budget: float) -> float:
    """Mean score in the last fifth of the budget less that in the fifth before."""
    now = between(x, y, weights, 0.8 * budget, budget)
    return now - between(x, y, weights, 0.6 * budget, 0.8 * budget)


def curve(x: np.ndarray, y: np.ndarray, weights: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """The curve at the ends of cells, `edges[1:]`: the mean score within each cell; one without a
    score is interpolated between its neighbours, or NaN before the first and after the last."""
    cells = np.clip(np.searchsorted(edges, x, "left") - 1, 0, len(edges) - 1)
    inside = cells < len(edges) - 1
    total = np.bincount(cells[inside], (weights * y)[inside], len(edges) - 1)
    count = np.bincount(cells[inside], weights[inside], len(edges) - 1)
    filled = np.flatnonzero(count)
    if not len(filled):
        return np.full(len(edges) - 1, np.nan)
    heights = total[filled] / count[filled]
    every = np.arange(len(edges) - 1)
    return np.interp(every, filled, heights, left=np.nan, right=np.nan)


def band(curves: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Mean over seeds of curves (seeds, points) and its interval (2, points): whole curves are
    drawn. NaN at points that a seed lacks."""
    seeds = len(curves)
    if seeds < 2:
        return curves.mean(0), None
    counts = np.random.default_rng(SEED).multinomial(seeds, np.full(seeds, 1 / seeds), REPS)
    return curves.mean(0), np.percentile(counts @ curves / seeds, PERCENTILES, axis=0)
