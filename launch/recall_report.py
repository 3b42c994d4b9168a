"""What `launch.recall` found as a table and a plot: every seed, the mean, the chance line."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from launch.streams import Task

Row = dict[str, Any]


def by_line(rows: list[Row]) -> dict[tuple[str, str], dict[int, dict[int, Row]]]:
    """(core, intervention) -> seed -> length -> row, in the order of `rows`."""
    out: dict[tuple[str, str], dict[int, dict[int, Row]]] = {}
    for row in rows:
        seeds = out.setdefault((row["core"], row["intervene"]), {})
        seeds.setdefault(row["seed"], {})[row["length"]] = row
    return out


def means(seeds: dict[int, dict[int, Row]], score: str) -> dict[int, float]:
    """The mean over seeds by length."""
    lengths = next(iter(seeds.values()))
    return {n: sum(found[n][score] for found in seeds.values()) / len(seeds) for n in lengths}


def line(words: list[Any]) -> str:
    return f"| {' | '.join(map(str, words))} |"


def scores(rows: list[Row], task: Task) -> list[str]:
    lengths = list(dict.fromkeys(row["length"] for row in rows))
    out = [line(["core", "memory", "seed", *lengths]), line(["---"] * (3 + len(lengths)))]
    for (core, memory), seeds in by_line(rows).items():
        shown = {str(seed): {n: r[task.score] for n, r in by.items()} for seed, by in seeds.items()}
        for seed, found in {**shown, "mean": means(seeds, task.score)}.items():
            out.append(line([title(core), memory, seed, *(f"{found[n]:.3f}" for n in lengths)]))
    return [*out, line(["chance", "", "", *[f"{task.chance:.3f}"] * len(lengths)])]


def costs(rows: list[Row]) -> list[str]:
    keys = ("core", "seed", "parameters", "updates", "train_flops", "cpu_seconds", "loss", "gap")
    out = [line(keys), line(["---"] * len(keys))]
    pairs = {(row["core"], row["seed"]): row for row in rows}
    for row in pairs.values():
        shown = {**row, "parameters": f"{row['parameters']:,}", "updates": f"{row['updates']:,}"}
        shown |= {key: f"{row[key]:.3g}" for key in ("train_flops", "loss", "gap")}
        shown["core"] = title(row["core"])
        out.append(line([shown[key] for key in keys]))
    return out


def drifts(rows: list[Row]) -> list[str]:
    """Changes of the memory from segment to segment: the least, the mean and the most."""
    pairs = {(row["core"], row["seed"]): row["drift"] for row in rows if "drift" in row}
    if not pairs:
        return []
    names = ("cosine", "ratio", "change")
    out = ["", "Memory, from segment to segment: least / mean / most", ""]
    out += [line(["core", "seed", *names]), line(["---"] * 5)]
    for (core, seed), steps in pairs.items():
        found = [[step[name] for step in steps] for name in names]
        shown = [f"{min(v):.3f} / {sum(v) / len(v):.3f} / {max(v):.3f}" for v in found]
        out.append(line([title(core), seed, *shown]))
    return out


def write(folder: Path, name: str, task: Task, rows: list[Row]) -> None:
    """table.md and, where matplotlib is installed, plot.png."""
    text = [
        f"# {name}: share right ({task.score}) by length of the test stream",
        "",
        *scores(rows, task),
        "",
        "Weights are those after the last update. `memory`: the state before the last step as it",
        "is (kept), with noise, or replaced by the initial one.",
        "",
        *costs(rows),
        "",
        "Parameters are the core's; FLOPs are those of all updates by torch's counter: products",
        "and scans. CPU seconds are of training. gap: largest difference of logits by scan and by",
        "step on the first steps.",
        *drifts(rows),
        "",
    ]
    (folder / "table.md").write_text("\n".join(text))
    if importlib.util.find_spec("matplotlib"):
        plot(folder / "plot.png", name, task, rows)


def title(core: str) -> str:
    """`elmur:elmur.slots=2:elmur.blend=0.05` as `elmur slots=2 blend=0.05`."""
    name, *settings = core.split(":")
    return " ".join([name, *(setting.removeprefix(f"{name}.") for setting in settings)])


def plot(path: Path, name: str, task: Task, rows: list[Row]) -> None:
    """Seeds as thin lines, means as thick ones; disturbed memories are dashed."""
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(6, 4))).subplots()
    order = {core: index for index, core in enumerate(dict.fromkeys(row["core"] for row in rows))}
    dashes = {"kept": "-", "noise": "--", "initial": ":"}
    for (core, memory), seeds in by_line(rows).items():
        style = {"color": f"C{order[core]}", "linestyle": dashes[memory]}
        marker = "os^v"[order[core] // 10]  # colours come back after ten
        for found in seeds.values():
            axes.plot(list(found), [row[task.score] for row in found.values()], lw=0.6, **style)
        mean, label = means(seeds, task.score), title(core)
        label += "" if memory == "kept" else f", {memory}"
        axes.plot(list(mean), list(mean.values()), lw=2, marker=marker, ms=4, label=label, **style)
    axes.axhline(task.chance, color="grey", lw=1, linestyle="-.", label="chance")
    axes.set(xscale="log", xlabel="length of the test stream", ylabel=f"share right ({task.score})")
    lengths = sorted({row["length"] for row in rows})
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths], rotation=60, fontsize="small")
    axes.minorticks_off()
    axes.set(title=name, ylim=(-0.03, 1.03))
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.25), fontsize="small")
    figure.savefig(path, bbox_inches="tight", dpi=150)
