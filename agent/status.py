"""A run's health from outside: `python -m agent.status logs/a logs/b`.

Reads the files of a run's folder and nothing else, so it may look at any time and from any machine
that sees them: whether it runs, how fast, when it will be done, its last checkpoint, evaluation and
error, the trend of its scores, its memory and its disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agent import limits
from agent.pace import ROWS, between, span
from configs import load as configs
from configs.command import command_line
from configs.load import ConfigError
from configs.schema import Config

TAIL = 2**18  # bytes read from the end of a file of rows
SILENT = 6.0  # intervals without a row, after which a run that is up is called silent
SCORES = 100  # episodes of a mean
LEVEL = 2.0  # standard errors within which two means are level
ERROR = "error.txt"  # what run.py writes when a run ends by a failure


def rows(path: Path) -> list[dict[str, Any]]:
    """The last rows of a JSONL file, the oldest first; none where there is no file."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL))
        lines = file.read().split(b"\n")
    # The first may be cut, and what follows the last line break is being written.
    return [json.loads(line) for line in lines[size > TAIL : -1] if line]


def held(file: Path) -> bool:
    """Whether a process holds the lock that is this file."""
    if not file.exists():
        return False
    with file.open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(lock, fcntl.LOCK_UN)
    return False


def running(folder: Path) -> bool:
    """Whether a process trains in `folder`."""
    return held(folder / "lock")


def trend(scores: list[float]) -> str:
    """`rising`, `falling` or `level`: the last half of `scores` against the first."""
    before, after = scores[: len(scores) // 2], scores[len(scores) // 2 :]
    if len(before) < 2:
        return ""
    error = math.hypot(*(statistics.stdev(part) / math.sqrt(len(part)) for part in (before, after)))
    gain = statistics.fmean(after) - statistics.fmean(before)
    if abs(gain) <= LEVEL * error:
        return "level"
    return "rising" if gain > 0 else "falling"


def look(folder: Path, now: float | None = None) -> dict[str, Any]:
    """What is known of the run in `folder`. ValueError where none is."""
    now = time.time() if now is None else now
    file = folder / "config.yaml"
    if not file.exists():
        raise ValueError(f"{folder} holds no run: config.yaml is missing")
    config = configs.load(file)
    found = rows(folder / "metrics.jsonl")
    last = next((row for row in reversed(found) if "rate/agent_steps" in row), {})
    evaluation = next((row for row in reversed(found) if "eval/greedy/return" in row), {})
    scores = [row["return"] for row in rows(folder / "scores.jsonl")][-2 * SCORES :]
    saved = sorted(path for path in folder.glob("checkpoints/[0-9]*") if path.is_dir())
    error = folder / ERROR
    quiet = now - (folder / "metrics.jsonl").stat().st_mtime if found else None
    out = {
        "folder": str(folder),
        "task": config.task,
        "core": config.core,
        "size": config.size,
        "seed": config.seed,
        "state": state(folder, config, last, quiet),
        "quiet_seconds": quiet,
        **{key: last.get(key) for key in ("agent_step", "update", "wall_seconds")},
        "share": limits.nearest(config.stop, last)[0],
        "steps_per_second": last.get("rate/agent_steps"),
        "updates_per_second": last.get("rate/updates"),
        "eta_seconds": limits.left(config.stop, last),
        "checkpoint": int(saved[-1].name) if saved else None,
        "checkpoint_seconds": now - saved[-1].stat().st_mtime if saved else None,
        "return": statistics.fmean(scores[-SCORES:]) if scores else None,
        "trend": trend(scores),
        "evaluation": evaluation.get("eval/greedy/return"),
        "evaluation_step": evaluation.get("agent_step"),
        "loss": last.get("loss/total"),
        "restarts": last.get("env/restarts"),
        "ram_gb": last.get("usage/ram_gb"),
        "replay_steps": last.get("replay/steps"),
        "replay_gb": last.get("replay/disk_gb"),
        "disk_free_gb": shutil.disk_usage(folder).free / 1e9,
        "error": error.read_text().strip() if error.exists() else None,
        "error_seconds": now - error.stat().st_mtime if error.exists() else None,
    }
    return out


def state(folder: Path, config: Config, last: dict[str, Any], quiet: float | None) -> str:
    """`running`, `silent`, `done`, `failed`, or `stopped`: by a request, a kill or a crash."""
    if running(folder):
        every = between(config.log.every, last.get("wall_seconds", 0.0), ROWS)
        slow = quiet is not None and quiet > SILENT * every
        return "silent" if slow else "running"
    if (folder / limits.FINISHED).exists() or limits.nearest(config.stop, last)[0] >= 1:
        return "done"
    return "failed" if (folder / ERROR).exists() else "stopped"


def text(found: dict[str, Any]) -> str:
    """The lines that are printed of one run; what is not known is left out."""
    lines = [f"{found['folder']}: {found['task']}, core {found['core']}, seed {found['seed']}"]
    head = found["state"]
    if found["quiet_seconds"] is not None:
        head += f", last row {span(found['quiet_seconds'])} ago"
    if found["agent_step"] is not None:
        head += f"; step {found['agent_step']:,}, update {found['update']:,}"
        head += f", {found['share']:.1%} done"
    lines.append(head)
    if found["state"] in ("running", "silent") and found["steps_per_second"] is not None:
        ahead = f", done in {span(found['eta_seconds'])}" if found["eta_seconds"] else ""
        rates = (
            f"{found['steps_per_second']:.1f} steps/s, {found['updates_per_second']:.2f} updates/s"
        )
        lines.append(rates + ahead)
    if found["checkpoint"] is not None:
        ago = span(found["checkpoint_seconds"])
        lines.append(f"last checkpoint at {found['checkpoint']:,}, {ago} ago")
    if found["return"] is not None:
        direction = f", {found['trend']}" if found["trend"] else ""
        lines.append(f"return {found['return']:.2f} (last {SCORES} episodes{direction})")
    if found["evaluation"] is not None:
        lines[-1] += f"; evaluated {found['evaluation']:.2f} at step {found['evaluation_step']:,}"
    if found["ram_gb"] is not None:
        lines.append(
            f"RAM {found['ram_gb']:.1f} GB; replay {found['replay_steps']:,} steps, "
            f"{found['replay_gb']:.1f} GB; disk {found['disk_free_gb']:.0f} GB free; "
            f"failures of environments {found['restarts']}"
        )
    if found["error"]:
        last = found["error"].splitlines()[-1]
        lines.append(f"last error, {span(found['error_seconds'])} ago: {last}")
    return "\n  ".join(lines)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without a word about settings that are newer than the run."""
    log = logging.getLogger("configs")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, or 2 where a folder holds no run."""
    parser = command_line("agent.status", __doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="LOGDIR")
    parser.add_argument("--json", action="store_true", help="one object a line")
    args = parser.parse_args(argv)
    status = 0
    for folder in args.folders:
        try:
            with quiet():
                found = look(folder)
        except (ValueError, ConfigError) as error:
            print(f"error: {error}", file=sys.stderr)
            status = 2
            continue
        print(json.dumps(found) if args.json else text(found), flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
