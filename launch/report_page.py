"""The blocks of a report: what is compared, over all tasks, by task, compute, memory, runs,
settings, commands, and how the numbers are made."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from pathlib import Path

from agent.scores import lines, source
from launch import report_plots as drawn
from launch import report_tables as tables
from launch.comparison import AXES, Comparison
from launch.document import Block, Code, Figures, Heading, Items, Table, Text
from launch.recall_report import title as short
from launch.runs import Run

STATUS = ("finished", "unfinished", "failed", "missing")

METHOD = [
    "**Budget.** Of a task on an axis: the smallest value at which one of its finished runs ended. "
    "A run that did not come that far is in no mean; `2 of 3` seeds says so.",
    "**Final score.** Mean return of the last episodes of training that ended within the budget, "
    "as many for each run of a task: 100, or a fifth of the fewest that a run has.",
    "**Area score.** Mean height of the learning curve from 0 to the budget.",
    "**Intervals.** 95 %, percentiles of 10,000 bootstraps over seeds, within tasks (stratified; "
    "Agarwal et al. 2021). One seed has no interval; few seeds have one that is too narrow.",
    "**IQM.** Interquartile mean of the normalised scores of all runs of all tasks. P(X > Y): how "
    "often a run of X is better than one of Y on the same task; it needs no reference.",
    "**Normalised.** (score - random) / (reference - random); random is 0 where it is not known.",
    "**Rise.** Mean score in the last fifth of the budget less that in the fifth before. Where its "
    "interval lies above 0 the variant is limited by the budget: with a larger one the comparison "
    "may end otherwise.",
    "**Curves.** Means over 25 parts of the axis; thick lines are means over finished seeds, as "
    "far as all of them go, with their intervals; a thin line up to a cross is a run that did not "
    "finish.",
]


def listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def plural(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def file_name(*words: str) -> str:
    return re.sub(r"[^\w.-]+", "_", "-".join(words)) + ".png"


def summary(
    comparison: Comparison, match: str, foreign: list[Run], left_out: list[Run]
) -> list[Block]:
    """What is compared, at what budget, what is not there, and what still rises."""
    own = [run for run in comparison.runs if not run.foreign]
    seeds = ", ".join(map(str, dict.fromkeys(run.seed for run in own)))
    counts = Counter(run.status for run in own)
    items = [
        f"**Compared:** {plural(len(comparison.variants), 'variant')} "
        f"({listed(comparison.variants)}) on {plural(len(comparison.tasks), 'task')}, seeds {seeds}"
        + (f"; runs were matched by `{match}`" if match != "none" else "")
        + f". What follows is at equal {AXES[comparison.axis]} unless it says otherwise.",
        f"**Runs:** {len(own)} planned: "
        + ", ".join(f"{counts[status]} {status}" for status in STATUS)
        + ".",
    ]
    if foreign:
        files = listed(list(dict.fromkeys(run.reason for run in foreign)))
        items.append(f"**Of other programs:** {plural(len(foreign), 'run')} from {files}.")
    if left_out:
        tasks = listed(list(dict.fromkeys(run.task for run in left_out)))
        items.append(f"**Left out:** {plural(len(left_out), 'run')} of other tasks: {tasks}.")
    items += [
        f"**{run.status.capitalize()}:** `{run.name}`: {run.reason}."
        for run in own
        if run.status != "finished"
    ]
    if counts["failed"] + counts["missing"]:
        items.append(
            "**Beware:** a run that failed or is missing before the budget is in no mean, so a "
            "variant whose runs fail looks better than it is."
        )
    interim = [key[1] for key, each in comparison.budgets.items() if each.interim]
    if interim:
        tasks = listed(list(dict.fromkeys(interim)))
        items.append(
            f"**Interim:** no run has finished on {tasks}; the budget is how far they are."
        )
    cells = {k[1:]: cell for k, cell in comparison.cells.items() if k[0] == comparison.axis}
    for task in comparison.tasks:
        rising = [
            f"`{key[1]}` by {tables.estimate(cell.rise)}"
            for key, cell in cells.items()
            if key[0] == task and cell.limited
        ]
        if rising:
            found = ", ".join(rising)
            items.append(f"**Limited by the budget** on `{task}`: still rising are {found}.")
    untold = sum(cell.rise.interval is None and cell.runs != [] for cell in cells.values())
    if not any(cell.limited for cell in cells.values()):
        items.append("**Limited by the budget:** no curve is known to rise still at its end.")
    if untold:
        items.append(
            f"**Not told:** whether {plural(untold, 'curve')} of fewer than two seeds still rise."
        )
    found = tables.iqms(comparison, comparison.axis, "final")
    if found:
        shown = [f"`{name}` {tables.with_interval(*each)}" for name, each in found.items()]
        items.append(f"**IQM of normalised final scores:** {', '.join(shown)}.")
    return [Items(items), Text("Budgets:"), tables.budgets(comparison)]


def aggregate(comparison: Comparison, plots: Path) -> list[Block]:
    axis, styles = comparison.axis, drawn.styles(comparison)
    tasks = comparison.aggregated()
    blocks: list[Block] = [Heading(2, "Over all tasks")]
    figures = []
    without = [task for task in comparison.tasks if task not in tasks]
    if without:
        blocks.append(Text(f"{listed(without)}: no reference, not aggregated."))
    if tasks:
        blocks += [Text(f"Normalised scores of {listed(tasks)}:"), tables.aggregate(comparison)]
    for kind in ("final", "area"):
        found = tables.iqms(comparison, axis, kind)
        if found:
            title = f"IQM of {kind} scores at equal {AXES[axis]}"
            rows = [(short(variant), *each, styles[variant]) for variant, each in found.items()]
            path = plots / f"iqm-{kind}.png"
            drawn.intervals(rows, title, "normalised score", path)
            figures.append((path, title))
    if found:
        path = drawn.profiles(comparison, list(found), tasks, plots / "profile.png")
        figures.append((path, f"Performance profile of final scores at equal {AXES[axis]}"))
    pairs = tables.improvements(comparison)
    if pairs:
        blocks += [
            Text(f"Probability of improvement of final scores at equal {AXES[axis]}:"),
            tables.improvement(comparison),
        ]
        shown = [(f"{short(x)} > {short(y)}", *found, styles[x]) for x, y, _, found in pairs]
        title = f"Probability of improvement at equal {AXES[axis]}"
        path = drawn.intervals(shown, title, "P(X > Y)", plots / "improvement.png", middle=0.5)
        figures.append((path, title))
    return [*blocks, Figures(figures)] if figures else blocks


def of_task(comparison: Comparison, task: str, plots: Path) -> list[Block]:
    blocks: list[Block] = [Heading(2, f"`{task}`")]
    axes = [axis for axis in comparison.axes if (axis, task) in comparison.budgets]
    if not axes:
        return [*blocks, Text("No run of this task has a score yet.")]
    figures = []
    for axis in axes:
        path = plots / file_name(task, axis)
        drawn.learning_curves(comparison, axis, task, path)
        figures.append((path, f"{task}: return by {AXES[axis]}"))
    blocks += [Figures(figures), tables.task(comparison, task)]
    found = [(AXES[axis], comparison.budgets[axis, task]) for axis in axes]
    ends = "; ".join(f"{name}: {b.window} (`{b.run}` ends first)" for name, b in found)
    blocks.append(Text(f"Episodes of a final score, and whose end is the budget: {ends}."))
    known = lines(task)
    if known:
        rows = [[name, tables.number(score), source(task)] for name, score in known.items()]
        blocks.append(Table(["reference", "score", "source"], rows))
    return blocks


def diagnostics(runs: list[Run]) -> list[Block]:
    """What lies in the folder `diagnostics` of each run: texts, or numbers where there is none of
    them, and pictures."""
    blocks: list[Block] = [Heading(2, "Memory diagnostics")]
    for run in runs:
        folder = run.folder / "diagnostics" if run.folder else None
        texts = sorted(folder.glob("*.txt")) if folder else []
        numbers = sorted(folder.glob("*.json")) if folder else []
        files = texts + [path for path in numbers if path.with_suffix(".txt") not in texts]
        pictures = sorted(folder.glob("*.png")) if folder else []
        if files or pictures:
            blocks.append(Heading(3, f"`{run.name}`"))
        for path in files:
            blocks.append(Code(path.name, path.read_text().splitlines()))
        if pictures:
            blocks.append(Figures([(path, f"{run.name}: {path.stem}") for path in pictures]))
    if len(blocks) == 1:
        blocks.append(Text("No run has a folder `diagnostics`."))
    return blocks


def commands(runs: list[Run], argv: list[str]) -> list[Block]:
    shown = [shlex.join(run.command) for run in runs if run.command]
    report = shlex.join(["python", "-m", "launch.report", *argv])
    return [
        Heading(2, "Commands"),
        Text(f"This report: `{report}`"),
        Code(f"All {plural(len(shown), 'run')}", shown),
    ]


def settings(comparison: Comparison) -> list[Block]:
    variants, tasks = tables.settings(comparison)
    blocks: list[Block] = [Heading(2, "Settings that differ")]
    for title, table in (("Between variants:", variants), ("Between tasks alone:", tasks)):
        if table.rows:
            blocks += [Text(title), table]
    return blocks if len(blocks) > 1 else [*blocks, Text("None.")]


def page(
    match: str,
    own: list[Run],
    foreign: list[Run],
    left_out: list[Run],
    plots: Path,
    argv: list[str],
) -> tuple[str, list[Block]]:
    """Title and blocks; pictures are written into `plots`. match: what runs of the sweep
    have in common, or `none`; left_out: runs of no task of `own`."""
    comparison = Comparison([*own, *foreign], match)
    title = f"Comparison of {', '.join(comparison.variants)}"
    blocks: list[Block] = [Heading(1, title)]
    blocks += summary(comparison, match, foreign, left_out)
    blocks += aggregate(comparison, plots)
    for task in comparison.tasks:
        blocks += of_task(comparison, task, plots)
    blocks += [
        Heading(2, "Compute"),
        Text("Means over finished runs, or all where none has."),
        tables.compute(comparison),
    ]
    blocks += diagnostics(own)
    blocks += [Heading(2, "Runs"), tables.runs(comparison)]
    blocks += settings(comparison)
    blocks += commands(own, argv)
    blocks += [Heading(2, "How the numbers are made"), Items(METHOD)]
    return title, blocks
