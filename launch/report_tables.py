"""The tables of a report: one row for each variant, axis or run, numbers with their intervals."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from agent.scores import lines, normalised
from launch import statistics
from launch.comparison import AXES, Cell, Comparison, Estimate, curve_of
from launch.document import Table
from launch.runs import EXACT, Run

NONE = "–"
# What tells one run of a variant from another, and says nothing of the variant.
OWN = ("seed", "logdir", "task")
LARGE = 1e7  # from here on a count has three digits


def number(value: float) -> str:
    """Three digits, or all before the point."""
    if not np.isfinite(value):
        return NONE
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def amount(value: float) -> str:
    return NONE if not np.isfinite(value) else f"{value:,.0f}" if value < LARGE else f"{value:.3g}"


def with_interval(value: float, interval: statistics.Interval | None) -> str:
    if not np.isfinite(value):
        return NONE
    if interval is None:
        return f"{number(value)} (no interval)"
    return f"{number(value)} [{number(interval[0])}, {number(interval[1])}]"


def estimate(found: Estimate) -> str:
    return with_interval(found.value, found.interval)


def note(cell: Cell) -> str:
    """What the end of a curve says, or why there is none."""
    if not len(cell.final.seeds):
        return "no run with this axis came so far"
    if not len(cell.rise.seeds):
        return "too few episodes to tell whether it rises"
    if cell.rise.interval is None:
        return "one seed: cannot be told whether it rises"
    return "limited by the budget" if cell.limited else ""


def budgets(comparison: Comparison) -> Table:
    rows = []
    for task in comparison.tasks:
        found = [comparison.budgets.get((axis, task)) for axis in comparison.axes]
        shown = [amount(each.value) if each else NONE for each in found]
        rows.append([f"`{task}`", *shown])
    return Table(["task", *(AXES[axis] for axis in comparison.axes)], rows)


def task(comparison: Comparison, name: str) -> Table:
    """Final and area scores of every variant at the budget of each axis."""
    known = [line for line in lines(name) if line != "random"]
    cells = {key: cell for key, cell in comparison.cells.items() if key[1] == name}
    played = any(len(cell.evaluation.seeds) for cell in cells.values())
    head = ["at equal", "budget", "variant", "seeds", "final", "area"]
    head += [f"final of {line}" for line in known] + ["greedy evaluation"] * played
    rows = []
    for (axis, _, variant), cell in cells.items():
        budget = comparison.budgets[axis, name].value
        seeds = f"{len(cell.final.seeds)} of {cell.planned}"
        row = [AXES[axis], amount(budget), f"`{variant}`", seeds]
        row += [estimate(cell.final), estimate(cell.area)]
        for line in known:
            ratios = [normalised(name, score)[line] for score in cell.final.seeds]
            row.append(number(np.mean(ratios)) if ratios else NONE)
        if played:
            row.append(estimate(cell.evaluation))
        rows.append([*row, estimate(cell.rise), note(cell)])
    return Table([*head, "rise at the end", "note"], rows)


def iqms(
    comparison: Comparison, axis: str, kind: str
) -> dict[str, tuple[float, statistics.Interval | None]]:
    """Variant -> IQM of normalised scores, of those that have all tasks with a reference."""
    tasks = comparison.aggregated()
    whole = [v for v in comparison.variants if tasks and not comparison.lacking(axis, v, tasks)]
    scores = {variant: comparison.matrix(axis, variant, kind, tasks) for variant in whole}
    return {name: statistics.estimate(each, statistics.iqm) for name, each in scores.items()}


def aggregate(comparison: Comparison) -> Table:
    rows = []
    tasks = comparison.aggregated()
    for axis in comparison.axes:
        final, area = (iqms(comparison, axis, kind) for kind in ("final", "area"))
        for variant in comparison.variants:
            row = [AXES[axis], f"`{variant}`"]
            if variant in final:
                runs = np.isfinite(comparison.matrix(axis, variant, "final", tasks)).sum()
                found = (final[variant], area[variant])
                rows.append([*row, str(runs), *(with_interval(*each) for each in found)])
            else:
                lacking = comparison.lacking(axis, variant, tasks)
                names = ", ".join(f"`{name}`" for name in lacking)
                rows.append([*row, NONE, f"no score of {names}", NONE])
    return Table(["at equal", "variant", "runs", "IQM of final", "IQM of area"], rows)


def improvements(comparison: Comparison) -> list[tuple[str, str, int, Any]]:
    """(X, Y, tasks, P(X > Y) with its interval) for each pair that shares a task."""
    out = []
    for x, y in itertools.combinations(comparison.variants, 2):
        count, found = comparison.improvement(x, y)
        if found:
            out.append((x, y, count, found))
    return out


def improvement(comparison: Comparison) -> Table:
    rows = [
        [f"`{x}`", f"`{y}`", str(count), with_interval(*found)]
        for x, y, count, found in improvements(comparison)
    ]
    return Table(["X", "Y", "tasks", "P(X > Y)"], rows)


def average(values: list[float]) -> float:
    known = [value for value in values if np.isfinite(value)]
    return float(np.mean(known)) if known else np.nan


def compute(comparison: Comparison) -> Table:
    """Means over the finished runs of a variant, or over those that began."""
    rows = []
    for name, variant in itertools.product(comparison.tasks, comparison.variants):
        planned = [run for run in comparison.planned(name, variant) if run.end]
        runs = [run for run in planned if run.status == "finished"] or planned
        runs = [run for run in runs if run.config]
        if not runs:
            continue

        def end(axis: str, runs: list[Run] = runs) -> float:
            return average([run.end.get(axis, np.nan) for run in runs])

        parameters, flops = (
            average([run.model.get(key, np.nan) for run in runs])
            for key in ("parameters", "update_flops")
        )
        seconds = end("wall_seconds")
        peaks = [run.model["peak_ram_gb"] for run in runs if "peak_ram_gb" in run.model]
        devices = dict.fromkeys(str(run.config.get("device", NONE)) for run in runs)
        rows.append(
            [
                f"`{name}`",
                f"`{variant}`",
                str(len(runs)),
                amount(parameters),
                amount(flops),
                *(amount(end(axis)) for axis in ("env_step", "update", "train_flops")),
                amount(seconds),
                number(end("agent_step") / seconds if seconds else np.nan),
                number(end("update") / seconds if seconds else np.nan),
                number(average(peaks)),
                ", ".join(devices),
            ]
        )
    head = ["task", "variant", "runs", "parameters", "FLOPs an update", "environment steps"]
    head += ["updates", "training FLOPs", "wall seconds", "agent steps/s", "updates/s"]
    return Table([*head, "peak RAM (GB)", "device"], rows)


def runs(comparison: Comparison) -> Table:
    """Every run there should be: how it ended, where, and its last score."""
    rows = []
    for run in comparison.runs:
        status = run.status if run.status == "finished" else f"**{run.status}**"
        row = [f"`{run.name}`", f"`{run.variant}`", str(run.seed), status, run.reason]
        axis = next((axis for axis in AXES if axis in run.end), "")
        curve = curve_of(run, axis)
        window = max(1, min(EXACT, curve[2].sum() * 0.2))
        last = statistics.final(*curve, np.inf, window)
        ends = [amount(run.end.get(axis, np.nan)) for axis in comparison.axes]
        rows.append([*row, *ends, number(last)])
    head = ["run", "variant", "seed", "status", "reason"]
    head += [*(AXES[axis] for axis in comparison.axes), "last score"]
    return Table(head, rows)


def differing(runs: list[Run]) -> list[str]:
    """Settings that are not the same in all runs."""
    names = dict.fromkeys(name for run in runs for name in run.config if name not in OWN)
    return [name for name in names if len({str(run.config.get(name)) for run in runs}) > 1]


def by_group(runs: list[Run], names: list[str], kind: str) -> Table:
    """The values of settings in the runs of each `kind`, variant or task."""
    groups = list(dict.fromkeys(getattr(run, kind) for run in runs))
    rows = []
    for name in names:
        found = [
            dict.fromkeys(str(r.config.get(name, NONE)) for r in runs if getattr(r, kind) == group)
            for group in groups
        ]
        rows.append([f"`{name}`", *map(" / ".join, found)])
    return Table(["setting", *(f"`{group}`" for group in groups)], rows)


def settings(comparison: Comparison) -> tuple[Table, Table]:
    """Settings in which runs of one task differ, by variant; the others that differ, by task."""
    made = [run for run in comparison.runs if run.config]
    of_tasks = [[run for run in made if run.task == name] for name in comparison.tasks]
    within = {name for group in of_tasks for name in differing(group)}
    names = differing(made)
    return (
        by_group(made, [name for name in names if name in within], "variant"),
        by_group(made, [name for name in names if name not in within], "task"),
    )
