"""How far a sweep is: `python -m launch.status logs/sweep`.

Reads files alone, so it may look at any time and from any machine that sees them. On a terminal the
table is renewed until all is finished; elsewhere it is printed once.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from agent.pace import span
from agent.status import ERROR, SCORES, look, quiet
from configs.command import command_line
from launch.attempt import beside, folder, last_words, packed, state
from launch.manifest import Entry
from launch.runs import read_manifest, unpack

COLOURS = {"finished": "green", "running": "cyan", "failed": "red", "stopped": "yellow"}
COLUMNS = ("task", "variant", "seed", "state", "done", "step", "score", "left")


def row(sweep: Path, entry: Entry) -> dict[str, Any]:
    """What is known of one run. `seconds`: how long it has trained; `left`: how long it will."""
    found: dict[str, Any] = {"entry": entry, "state": state(sweep, entry), "why": ""}
    found |= dict.fromkeys(("share", "step", "score", "seconds", "left"))
    try:
        found |= (
            of_packed(sweep, entry) if packed(sweep, entry).exists() else of_folder(sweep, entry)
        )
    except ValueError as error:  # a file that cannot be read is told, and hides no other run
        found["why"] = str(error)
    if found["state"] == "running":
        return found
    if found["state"] != "finished":
        found["left"] = None
    if found["state"] == "missing" and beside(sweep, entry, ".job").exists():
        found["state"] = "queued"
    if found["state"] == "failed":
        found["why"] = reason(sweep, entry)
    return found


def of_packed(sweep: Path, entry: Entry) -> dict[str, Any]:
    run = unpack(packed(sweep, entry))
    scores = run.scores.get("return", ())[-SCORES:]
    return {
        "share": 1.0,
        "step": run.end["agent_step"],
        "score": statistics.fmean(scores) if len(scores) else None,
        "seconds": run.end["wall_seconds"],
        "left": 0.0,
    }


def of_folder(sweep: Path, entry: Entry) -> dict[str, Any]:
    if not (folder(sweep, entry) / "config.yaml").exists():
        return {}
    with quiet():
        seen = look(folder(sweep, entry))
    names = {"step": "agent_step", "score": "return", "seconds": "wall_seconds"}
    found = {name: seen[key] for name, key in {**names, "left": "eta_seconds"}.items()}
    return {**found, "share": min(1.0, seen["share"])}


def reason(sweep: Path, entry: Entry) -> str:
    """Why a run failed, in a line, and where more is told."""
    failed, log = beside(sweep, entry, ".failed"), beside(sweep, entry, ".log")
    if failed.exists():
        return f"{failed.read_text().strip()} (log: {log})"
    return last_words(folder(sweep, entry) / ERROR)


def eta(rows: list[dict[str, Any]]) -> float | None:
    """Seconds until all is finished, with as many at a time as run now; None when none runs.

    A run that has not begun takes as long as others of its task and variant, or of any: the mean.
    """
    whole: dict[Any, list[float]] = {}
    for found in rows:
        if found["seconds"] and found["share"]:
            seconds = found["seconds"] / found["share"]
            for key in (pair(found), None):
                whole.setdefault(key, []).append(seconds)
    left = []
    for found in rows:
        if found["left"] is not None:
            left.append(found["left"])
        elif known := whole.get(pair(found)) or whole.get(None):
            left.append(statistics.fmean(known) * (1 - (found["share"] or 0.0)))
        else:
            return None
    at_once = sum(found["state"] == "running" for found in rows)
    return max(sum(left) / at_once, *left) if at_once else None


def pair(found: dict[str, Any]) -> tuple[str, str]:
    return found["entry"]["task"], found["entry"]["variant"]


def cells(found: dict[str, Any]) -> list[str]:
    """A row of the table, as COLUMNS."""
    entry = found["entry"]

    def shown(key: str, form: str) -> str:
        value = found[key]
        return "" if value is None or not math.isfinite(value) else format(value, form)

    left = "" if not found["left"] else span(found["left"])
    return [
        *(entry["task"], entry["variant"], str(entry["seed"]), found["state"]),
        *(shown("share", ".0%"), shown("step", ",.0f"), shown("score", ".3f"), left),
    ]


def summary(rows: list[dict[str, Any]]) -> str:
    """`12 of 30 runs finished, 2 running, 16 missing; done in 3.4 h`."""
    counts = Counter(found["state"] for found in rows)
    parts = [f"{counts.pop('finished', 0)} of {len(rows)} runs finished"]
    parts += [f"{count} {state}" for state, count in counts.items()]
    ahead = eta(rows)
    return ", ".join(parts) + (f"; done in {span(ahead)}" if ahead else "")


def view(rows: list[dict[str, Any]]) -> Group:
    """The table, the summary and the failures."""
    table = Table(*COLUMNS, box=None, pad_edge=False)
    for column in table.columns[2:]:
        column.justify = "right" if column.header != "state" else "left"
        column.no_wrap = True
    for found in rows:
        table.add_row(*cells(found), style=COLOURS.get(found["state"], "dim"))
    failures = [f"{f['entry']['name']}: {f['why']}" for f in rows if f["why"]]
    return Group(table, Text(summary(rows)), *(Text(line, style="red") for line in failures))


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, or 2 where the folder holds no sweep."""
    parser = command_line("launch.status", __doc__)
    parser.add_argument("sweep", type=Path)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between looks; 0: once")
    args = parser.parse_args(argv)
    try:
        entries = read_manifest(args.sweep)["runs"]
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    # Lines are cut by a terminal alone.
    live = sys.stdout.isatty() and args.every > 0
    console = Console(width=None if sys.stdout.isatty() else 1000)
    rows = [row(args.sweep, entry) for entry in entries]
    if not live:
        console.print(view(rows))
        return 0
    with Live(view(rows), console=console, auto_refresh=False) as display:
        try:
            while any(found["state"] != "finished" for found in rows):
                time.sleep(args.every)
                rows = [row(args.sweep, entry) for entry in entries]
                display.update(view(rows), refresh=True)
        except KeyboardInterrupt:
            return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
