"""Plots of a comparison as PNG files. A core has one colour in all of them, which the colour-blind
can tell apart (Okabe and Ito 2008); variants of one core differ by the kind of line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from agent.scores import lines
from configs.load import blocks
from launch import statistics
from launch.comparison import AXES, Comparison, curve_of, reference

# Without its yellow, which is too light for a line on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
DASHES: tuple[Any, ...] = ("-", "--", ":", "-.", (0, (6, 1, 1, 1, 1, 1)))
CELLS = 25  # of a curve
FAR = 2  # heights of the data beyond which a reference is not drawn to scale


def styles(comparison: Comparison) -> dict[str, dict[str, Any]]:
    """Colour and dashes of each variant; the cores of the project always have the same colour."""
    names = [*blocks("cores"), *comparison.cores.values()]
    places = {core: index for index, core in enumerate(dict.fromkeys(names))}
    used: dict[str, int] = {}
    out = {}
    for variant, core in comparison.cores.items():
        colour = COLOURS[min(places[core], len(COLOURS) - 1)]
        out[variant] = {"color": colour, "linestyle": DASHES[used.get(colour, 0) % len(DASHES)]}
        used[colour] = used.get(colour, 0) + 1
    return out


def save(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight", dpi=110)
    return path


def legend_below(axes: Axes) -> None:
    handles, _ = axes.get_legend_handles_labels()
    if handles:
        axes.legend(
            loc="upper center",
            bbox_to_anchor=(0.5, -0.17),
            ncols=2,
            fontsize="small",
            frameon=False,
        )


def learning_curves(comparison: Comparison, axis: str, task: str, path: Path) -> Path:
    """Thick: the mean over finished seeds, of an interim report over those on their way, with its
    interval; thin, up to a cross: a run that did not finish; dotted: the budget."""
    axes = (figure := Figure(figsize=(6, 4))).subplots()
    hours = axis == "wall_seconds" and any(run.end.get(axis, 0) > 7200 for run in comparison.runs)
    unit = 3600 if hours else 1
    here = [run for run in comparison.runs if run.task == task]
    longest = max((run.end.get(axis, 0) for run in here), default=0) or 1
    edges = np.linspace(0, longest, CELLS + 1)
    budget = comparison.budgets.get((axis, task))
    counted = ("finished", "unfinished") if budget and budget.interim else ("finished",)
    for variant, style in styles(comparison).items():
        curves = []
        planned = comparison.planned(task, variant)
        for run in planned:
            x, y, weights = curve_of(run, axis)
            if not len(x):
                continue
            heights = statistics.curve(x, y, weights, edges)
            if run.status in counted:
                curves.append(heights)
                continue
            axes.plot(edges[1:] / unit, heights, lw=0.8, **style)
            last = np.flatnonzero(np.isfinite(heights))[-1]
            point = (edges[last + 1] / unit, heights[last])
            axes.plot(*point, marker="x", ms=7, mew=2, color=style["color"])
        # A curve of another program may not have this axis; a missing run has none at all.
        if any(axis in run.end or not run.end for run in planned):
            mean, band = statistics.band(np.stack(curves or [np.full(CELLS, np.nan)]))
            label = f"{variant}, {len(curves)} of {len(planned)} seeds"
            axes.plot(edges[1:] / unit, mean, lw=2, label=label, **style)
            if band is not None:
                fill = {"color": style["color"], "alpha": 0.2, "lw": 0}
                axes.fill_between(edges[1:] / unit, *band, **fill)
    if budget:
        axes.axvline(budget.value / unit, color="grey", lw=1, ls=":", label="budget")
    draw_references(axes, task)
    label = "wall clock (hours)" if hours else AXES[axis]
    axes.set(title=task, xlabel=label, ylabel="return", xlim=(0, longest * 1.02 / unit))
    axes.xaxis.get_major_formatter().set_powerlimits((-3, 5))
    legend_below(axes)
    return save(figure, path)


def draw_references(axes: Axes, task: str) -> None:
    """Lines of others' scores, named at the right, outside the data. One that would make the curves
    flat is named at the top or at the bottom, with its score."""
    low, high = axes.get_ylim()
    reach = FAR * (high - low)
    far: dict[float, list[str]] = {}
    for name, score in lines(task).items():
        if low - reach < score < high + reach:
            axes.axhline(score, color="grey", lw=1, ls=(0, (8, 3)))
            beside(axes, name, score, ("axes fraction", "data"), "center")
        else:
            far.setdefault(float(score > high), []).append(f"{name} {score:,g}")
    for place, names in far.items():
        mark, side = ("↑", "top") if place else ("↓", "bottom")
        text = "\n".join(f"{name} {mark}" for name in names)
        beside(axes, text, place, ("axes fraction", "axes fraction"), side)


def beside(axes: Axes, text: str, y: float, coordinates: tuple[str, str], side: str) -> None:
    axes.annotate(text, (1.01, y), xycoords=coordinates, va=side, fontsize="small", color="#555555")


def intervals(
    rows: list[tuple[str, float, statistics.Interval | None, dict[str, Any]]],
    title: str,
    label: str,
    path: Path,
    middle: float | None = None,
) -> Path:
    """A row for each estimate: a bar of its interval, a line at its value; no bar, no interval.

    middle: of a share, which says nothing.
    """
    axes = (figure := Figure(figsize=(6, 1.2 + 0.4 * len(rows)))).subplots()
    axes.use_sticky_edges = False  # bars keep off the frame
    for place, (_, value, interval, style) in enumerate(rows):
        if interval is not None:
            width = interval[1] - interval[0]
            axes.barh(place, width, left=interval[0], height=0.6, color=style["color"], alpha=0.4)
        axes.plot([value] * 2, [place - 0.3, place + 0.3], color=style["color"], lw=3)
    if middle is not None:
        axes.axvline(middle, color="grey", lw=1, ls=":")
        axes.set_xlim(middle - 0.53, middle + 0.53)
    axes.set(title=title, xlabel=label, yticks=range(len(rows)), yticklabels=[r[0] for r in rows])
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    return save(figure, path)


def profiles(comparison: Comparison, variants: list[str], tasks: list[str], path: Path) -> Path:
    """The share of runs above each normalised score, with pointwise intervals."""
    axes = (figure := Figure(figsize=(6, 4))).subplots()
    found = {v: comparison.matrix(comparison.axis, v, "final", tasks) for v in variants}
    every = np.concatenate([matrix.ravel() for matrix in found.values()])
    low, high = min(0.0, np.nanmin(every)), max(1.0, np.nanmax(every))
    taus = np.linspace(low, high, 101)
    for variant, style in styles(comparison).items():
        if variant in found:
            share, band = statistics.profile(found[variant], taus)
            axes.plot(taus, share, lw=2, label=variant, **style)
            if band is not None:
                axes.fill_between(taus, *band, color=style["color"], alpha=0.2, lw=0)
    names = ", ".join(dict.fromkeys(map(reference, tasks)))
    axes.set(title="Performance profile", ylabel="share of runs above", ylim=(-0.03, 1.03))
    axes.set(xlabel=f"final score, normalised ({names} = 1)")
    axes.grid(alpha=0.3)
    legend_below(axes)
    return save(figure, path)
