"""Diagnostic `recall`: prediction error against the age of the information that it needs.

Three views, after context-dependent recall and reward prediction of Deng et al. (2023, arXiv
2307.02064). `context`: errors some steps ahead, by length of the context, on the windows of
`horizon.py`; where a longer context does not help, older information is not used. `reward`, where
an episode shows a cue: the error of the reward that it decides, by age of the cue, and by how many
of the last steps were imagined. `place`, where positions are known: the error of a predicted
picture by the steps since the agent last stood in this cell and looked this way.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from agent.diagnostics.horizon import WORDS, imagined, kinds, powers, table
from agent.diagnostics.recording import Recording

CUES = {"bsuite_memory_": ("vector", 2), "tmaze_": ("vector", 0)}  # shown at step 0, by task
BLIND = (1, 4, 16)  # last steps that are imagined, besides all of them
TURN = math.cos(math.radians(30))
STARTS = (1, 4, 16, 64)  # of the bins of ages
QUERIES = 64  # of one age at most


def cue(task: str) -> tuple[str, int] | None:
    """Key and index of the observation whose value at step 0 decides the reward later."""
    return next((where for name, where in CUES.items() if task.startswith(name)), None)


def by_context(run: Recording) -> dict[str, Any]:
    found = table(run)
    steps = powers(found.repeat["reward"].shape[1])
    out = {}
    for key, kind in kinds(run.update).items():
        errs = {
            h: [after[key][:, h - 1].mean().item() for after in found.after.values()] for h in steps
        }
        out[key] = {"is": WORDS[kind], "ahead": errs}
    return {"lengths": list(found.after), "errors": out}


def queries(run: Recording) -> dict[int, list[dict[str, Any]]]:
    """By step t, the episodes whose last reward that is not zero came at t."""
    out: dict[int, list[dict[str, Any]]] = {}
    for episode in run.episodes:
        where = episode.steps["reward"].nonzero()[0]
        if len(where) and where[-1] > 0:
            t = int(where[-1])
            out.setdefault(t, []).append({k: v[: t + 1] for k, v in episode.steps.items()})
    return out


def by_cue(run: Recording) -> dict[str, Any]:
    """Error of the deciding reward when all, all but the last few, or none of the steps between it
    and the cue are seen."""
    rows: list[dict[str, Any]] = []
    for age, episodes in sorted(queries(run).items()):
        batch = run.batch(episodes[:QUERIES])
        for blind in [*(h for h in BLIND if h < age), age]:
            mean, _ = imagined(run.update, batch, age + 1 - blind, run.config.seed)
            rows.append(
                {
                    "age": age,
                    "blind": blind,
                    "episodes": len(batch["reward"]),
                    "error": mean["reward"][:, -1].mean().item(),
                    "mean": (batch["reward"][:, -1] - batch["reward"][:, -1].mean())
                    .abs()
                    .mean()
                    .item(),
                }
            )
    return {"rows": rows}


def place_ages(pos: Tensor, direction: Tensor, context: int) -> Tensor:
    """Ages (B, T - context) of what each later step shows: steps since, within the context, the
    agent was last in the same cell and turned at most 30 degrees away; 0: never.

    pos and direction (B, T, 2), in cells.
    """
    cell = pos.floor()
    same = (cell[:, context:, None] == cell[:, None, :context]).all(-1)
    same &= (direction[:, context:, None] * direction[:, None, :context]).sum(-1) >= TURN
    step = torch.arange(pos.shape[1])
    age = step[context:, None] - step[:context]
    age = torch.where(same, age, pos.shape[1] + 1).amin(-1)
    return torch.where(age > pos.shape[1], 0, age)


def by_place(run: Recording) -> dict[str, Any]:
    found, key = table(run), run.update.world.encoder.images[0]
    pos, direction = (found.batch[f"label/{name}"] for name in ("agent_pos", "agent_dir"))
    age = place_ages(pos, direction, found.context)
    long = found.context
    short = max((c for c in found.after if c <= long // 4), default=long)
    kinds_of = {f"after {long}": found.after[long][key], f"after {short}": found.after[short][key]}
    kinds_of |= {"repeat": found.repeat[key], "mean": found.mean[key]}
    spans = [("never", age == 0)]
    for low, high in zip(STARTS, (*STARTS[1:], math.inf), strict=True):
        spans.append((f"from {low}", (age >= low) & (age < high)))
    return {
        "is": WORDS["image"],
        "short": short,
        "long": long,
        "rows": [
            {"age": name, "pictures": int(member.sum())}
            | {name: errs[member].mean().item() for name, errs in kinds_of.items()}
            for name, member in spans
            if member.any()
        ],
    }


def measure(run: Recording) -> dict[str, Any]:
    out: dict[str, Any] = {
        "about": "error against the age of the information it needs; context: by length of the "
        "context, at so many steps ahead; reward: of the reward that the cue decides, by steps "
        "since the cue, with so many last steps imagined (blind; 1: all before it were seen, as "
        "many as the age: the cue alone was); "
        "place: of pictures, by steps since the same view was last seen within the context",
        "context": by_context(run),
    }
    if cue(run.config.task):
        out["reward"] = by_cue(run)
    if "label/agent_pos" in run.episodes[0].steps:
        out["place"] = by_place(run)
    return {name: view for name, view in out.items() if name == "about" or view.get("rows", True)}


def plot(figure: Any, result: dict[str, Any]) -> None:
    found, lengths = result["context"]["errors"], result["context"]["lengths"]
    views = [name for name in ("reward", "place") if name in result]
    figure.set_size_inches(4.6 * (len(found) + len(views)), 3.6)
    panels = list(figure.subplots(1, len(found) + len(views), squeeze=False)[0])
    for axes, (key, errs) in zip(panels, found.items(), strict=False):
        for ahead, values in errs["ahead"].items():
            axes.plot(lengths, values, marker="o", ms=3, label=f"{ahead} ahead")
        axes.set_title(f"{key}: {errs['is']}", fontsize="small")
        axes.set_xlabel("length of the context")
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, lengths)
        axes.set_ylim(bottom=0)
        axes.legend(fontsize="small")
    for axes, name in zip(panels[len(found) :], views, strict=True):
        {"reward": draw_cue, "place": draw_place}[name](axes, result[name])
        axes.set_ylim(bottom=0)
        axes.legend(fontsize="small")


def draw_cue(axes: Any, found: dict[str, Any]) -> None:
    """By age of the cue; where all are of one age, by the steps that were imagined."""
    rows = found["rows"]
    axes.set_title("reward that the cue decides: absolute error", fontsize="small")
    if len({row["age"] for row in rows}) == 1:
        xy = [[row[key] for row in rows] for key in ("blind", "error")]
        axes.plot(*xy, marker="o", ms=4, label=f"cue {rows[0]['age']} steps old")
        axes.axhline(rows[0]["mean"], color="k", lw=1, ls="-.", label="mean reward")
        axes.set_xlabel("last steps that were imagined")
    else:
        for blind in (*BLIND, "all"):
            some = [r for r in rows if blind == ("all" if r["blind"] == r["age"] else r["blind"])]
            xy = [[row[key] for row in some] for key in ("age", "error")]
            axes.plot(*xy, marker="o", ms=4, label=f"{blind} imagined")
        xy = [[row[key] for row in rows] for key in ("age", "mean")]
        axes.plot(*xy, "k_", ms=9, label="mean reward")
        axes.set_xlabel("age of the cue (steps)")
    axes.xaxis.get_major_locator().set_params(integer=True)


def draw_place(axes: Any, found: dict[str, Any]) -> None:
    rows = found["rows"]
    ages = [f"{row['age']}\n({row['pictures']})" for row in rows]
    for line in [key for key in rows[0] if key not in ("age", "pictures")]:
        axes.plot(ages, [row[line] for row in rows], marker="o", ms=3, label=line)
    axes.set_title(f"picture: {found['is']}", fontsize="small")
    axes.set_xlabel("steps since the view was last seen (pictures)")


def lines(result: dict[str, Any]) -> list[str]:
    lengths = result["context"]["lengths"]
    out = [f"{'error':12} {'ahead':>6}" + "".join(f"{f'after {n}':>11}" for n in lengths)]
    for key, errs in result["context"]["errors"].items():
        for ahead, values in errs["ahead"].items():
            out.append(f"{key:12} {ahead:>6}" + "".join(f"{value:11.4f}" for value in values))
    for name in ("reward", "place"):
        rows = result.get(name, {}).get("rows")
        if rows:
            out.append("".join(f"{head:>12}" for head in rows[0]))
            for row in rows:
                shown = (f"{v:12.4f}" if isinstance(v, float) else f"{v:>12}" for v in row.values())
                out.append("".join(shown))
    return out
