"""Which runs are compared, at what budget, and the numbers of each variant there.

The budget of a task on an axis is the smallest value at which one of its finished runs ended; of
runs that have not finished where no run has. Curves of other programs can only lower it. A run
counts where it came that far, even if it failed later. One that stopped earlier enters no
statistic; it appears only in the count of seeds (`2 of 3`).
"""

from __future__ import annotations

import dataclasses

import numpy as np

from agent.scores import lines, normalised
from launch import statistics
from launch.runs import EXACT, Columns, Run

AXES = {
    "env_step": "environment steps",
    "agent_step": "agent steps",
    "update": "updates",
    "train_flops": "training FLOPs",
    "wall_seconds": "wall seconds",
}
ALWAYS = ("env_step", "train_flops", "update", "wall_seconds")
MATCHED = {"flops": "train_flops", "updates": "update", "seconds": "wall_seconds"}
SHARE = 0.2  # of the fewest episodes of a run: the most that are averaged for a final score
NEAR = 1 - 1e-9


@dataclasses.dataclass
class Estimate:
    """A mean over seeds and its interval, None of one seed; NaN without any."""

    seeds: np.ndarray  # (seeds,)
    value: float
    interval: statistics.Interval | None


@dataclasses.dataclass
class Cell:
    """A variant on a task, at the budget of an axis."""

    planned: int
    runs: list[Run]  # that came as far as the budget
    final: Estimate
    area: Estimate
    rise: Estimate  # last fifth of the budget less the fifth before
    evaluation: Estimate  # greedy, the last one within the budget

    @property
    def limited(self) -> bool:
        """Whether the curve still rises at the end of the budget, as far as seeds can tell."""
        return self.rise.interval is not None and self.rise.interval[0] > 0


@dataclasses.dataclass
class Budget:
    value: float
    window: int  # episodes of a final score
    run: str  # that ended there
    interim: bool  # no run of the task has finished


def reference(task: str) -> str:
    """The line by which scores are normalised; nothing where there is none."""
    names = [name for name in lines(task) if name != "random"]
    return next((name for name in ("human", "best") if name in names), "".join(names[:1]))


def curve_of(run: Run, axis: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, y and weights, as in statistics.py, of episodes with a finite return; empty where the run
    has no such axis."""
    if axis not in run.scores:
        return np.empty(0), np.empty(0), np.empty(0)
    finite = np.isfinite(run.scores["return"])
    x, y, weights = (run.scores[name][finite] for name in (axis, "return", "episodes"))
    return x, y, weights


def evaluated(table: Columns, axis: str, budget: float) -> float:
    """The mean return of the last greedy evaluation by `budget`; NaN where there is none."""
    values = table.get("eval/greedy/return", np.empty(0))
    within = np.flatnonzero(table.get(axis, np.empty(0)) <= budget)
    return float(values[within[-1]]) if len(within) else np.nan


def over_seeds(values: list[float]) -> Estimate:
    seeds = np.array([value for value in values if np.isfinite(value)])
    if not len(seeds):
        return Estimate(seeds, np.nan, None)
    return Estimate(seeds, *statistics.estimate(seeds[:, None], statistics.mean))


class Comparison:
    """`cells[axis, task, variant]` and `budgets[axis, task]` of all runs."""

    def __init__(self, runs: list[Run], match: str):
        """`match`: what runs of the sweep have in common, as in its manifest."""
        self.runs = runs
        self.tasks = list(dict.fromkeys(run.task for run in runs))
        self.cores = {run.variant: run.core for run in runs}
        self.variants = list(self.cores)
        given = {axis for run in runs for axis in run.end}
        extra = any(set(run.end) == {"agent_step"} for run in runs)  # a curve with no other axis
        self.axes = [axis for axis in ALWAYS if axis in given] + ["agent_step"] * extra
        first = MATCHED.get(match, "env_step")
        self.axes.sort(key=lambda axis: axis != first)
        self.axis = self.axes[0] if self.axes else first
        self.budgets: dict[tuple[str, str], Budget] = {}
        self.cells: dict[tuple[str, str, str], Cell] = {}
        for axis in self.axes:
            for task in self.tasks:
                self.compare(axis, task)

    def planned(self, task: str, variant: str) -> list[Run]:
        return [run for run in self.runs if run.task == task and run.variant == variant]

    def compare(self, axis: str, task: str) -> None:
        runs = [run for run in self.runs if run.task == task and len(curve_of(run, axis)[0])]
        own = [run for run in runs if not run.foreign]
        finished = [run for run in own or runs if run.status == "finished"]
        interim = [run for run in own if run.status == "unfinished"]
        others = [run for run in runs if run.foreign] if finished or interim else []
        first = min([*(finished or interim), *others], key=lambda run: run.end[axis], default=None)
        if first is None or not first.end[axis]:
            return
        value = first.end[axis]
        used = [run for run in runs if run.end[axis] >= NEAR * value]
        curves = {id(run): curve_of(run, axis) for run in used}
        counts = [weights[x <= value].sum() for x, _, weights in curves.values()]
        fewest = min((count for count in counts if count), default=1)
        window = int(np.clip(SHARE * fewest, 1, EXACT))
        self.budgets[axis, task] = Budget(value, window, first.name, not finished)
        for variant in self.variants:
            planned = self.planned(task, variant)
            mine = [run for run in planned if id(run) in curves]
            if not planned:
                continue
            own = [curves[id(run)] for run in mine]
            self.cells[axis, task, variant] = Cell(
                len(planned),
                mine,
                over_seeds([statistics.final(*curve, value, window) for curve in own]),
                over_seeds([statistics.area(*curve, value) for curve in own]),
                over_seeds([statistics.rise(*curve, value) for curve in own]),
                over_seeds([evaluated(run.evaluations, axis, value) for run in mine]),
            )

    def matrix(self, axis: str, variant: str, kind: str, tasks: list[str]) -> np.ndarray:
        """Scores (runs, tasks) of `kind`, final or area, normalised where `reference` is known;
        NaN below the last run of a task."""
        columns = []
        for task in tasks:
            cell = self.cells.get((axis, task, variant))
            scores = getattr(cell, kind).seeds if cell else np.empty(0)
            line = reference(task)
            columns.append([normalised(task, s)[line] for s in scores] if line else list(scores))
        rows = max(map(len, columns), default=0)
        return np.array([column + [np.nan] * (rows - len(column)) for column in columns]).T

    def aggregated(self) -> list[str]:
        """The tasks whose scores can be normalised."""
        return [task for task in self.tasks if reference(task)]

    def lacking(self, axis: str, variant: str, tasks: list[str]) -> list[str]:
        """Tasks of which a variant has no score."""
        cells = {task: self.cells.get((axis, task, variant)) for task in tasks}
        return [task for task, cell in cells.items() if not cell or not len(cell.final.seeds)]

    def improvement(
        self, x: str, y: str
    ) -> tuple[int, tuple[float, statistics.Interval | None] | None]:
        """Tasks that two variants share, and P(X > Y) of final scores; None without a task."""
        lack = {*self.lacking(self.axis, x, self.tasks), *self.lacking(self.axis, y, self.tasks)}
        tasks = [task for task in self.tasks if task not in lack]
        if not tasks:
            return 0, None
        return len(tasks), statistics.improvement(
            *(self.matrix(self.axis, variant, "final", tasks) for variant in (x, y))
        )
