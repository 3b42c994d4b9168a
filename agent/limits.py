"""When a run ends: the limits of `stop`, which of them comes first, and the mark of a run that has.

A row of metrics, or the axes alone, says how far a run is. `finished.json` in its folder says which
limit ended it, and where; a run that goes on has none.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from configs.schema import StopConfig

FINISHED = "finished.json"
AXES = {
    "updates": "update",
    "flops": "train_flops",
    "seconds": "wall_seconds",
    "steps": "agent_step",  # the last: updates that are owed are made after the last step
}


def limits(stop: StopConfig) -> dict[str, float]:
    """Axis -> limit, of the limits that are set."""
    found = {axis: getattr(stop, name) for name, axis in AXES.items()}
    return {axis: limit for axis, limit in found.items() if limit}


def reached(stop: StopConfig, axes: dict[str, Any]) -> str:
    """The setting whose limit ends a run at `axes`, or nothing.

    FLOPs end it where one more update would be more than the limit.
    """
    each = axes["train_flops"] // max(1, axes["update"])
    at = {**axes, "train_flops": axes["train_flops"] + each}
    over = {axis: at[axis] >= limit for axis, limit in limits(stop).items()}
    if "train_flops" in over:
        over["train_flops"] = at["train_flops"] > stop.flops
    return next((f"stop.{name}" for name, axis in AXES.items() if over.get(axis)), "")


def nearest(stop: StopConfig, row: dict[str, Any]) -> tuple[float, str]:
    """How much of the run is done, up to 1, and the setting whose limit is nearest."""
    names = {axis: f"stop.{name}" for name, axis in AXES.items()}
    shares = ((row.get(axis, 0) / limit, names[axis]) for axis, limit in limits(stop).items())
    done, name = max(shares)
    return min(1.0, done), name


def left(stop: StopConfig, row: dict[str, Any]) -> float | None:
    """Seconds to the limit that comes first, at the rates of `row`; None where none is known."""
    updates = row.get("rate/updates", 0)
    rates = {
        "agent_step": row.get("rate/agent_steps", 0),
        "update": updates,
        "train_flops": updates * row.get("train_flops", 0) / max(1, row.get("update", 0)),
        "wall_seconds": 1.0 if row else 0.0,
    }
    ahead = [
        max(0.0, limit - row.get(axis, 0)) / rates[axis]
        for axis, limit in limits(stop).items()
        if rates[axis]
    ]
    return min(ahead, default=None)


def mark(folder: Path, end: dict[str, Any]) -> None:
    aside = folder / "finished.writing"
    aside.write_text(json.dumps(end) + "\n")
    aside.replace(folder / FINISHED)


def goes_on(folder: Path, stop: StopConfig) -> str:
    """Remove the mark of a run that goes on; the setting that has ended it, where it does not."""
    path = folder / FINISHED
    by = reached(stop, json.loads(path.read_text())) if path.exists() else ""
    if not by:
        path.unlink(missing_ok=True)
    return by
