"""Runs as arrays: from the folder of a run, from one small file that outlives it, from a sweep, or
from a CSV of another program.

A sweep is a folder with `manifest.json`, which lists the runs that there should be, so that a run
that never began is seen too:

    {"version": 1, "tasks": [...], "variants": [...], "seeds": [...], "match": "flops",
     "runs": [{"name": ..., "task": ..., "core": ..., "variant": ..., "seed": 0,
               "flags": ["--task", ...], "logdir": "runs/<name>"}]}

`logdir` is relative to the sweep unless it is absolute; `raw/<name>.json` is a packed run. Beside
the folder of a run, `<name>.failed` says how its process ended, if it left no `error.txt`.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import os
import socket
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from agent.limits import FINISHED
from agent.logger import AXES
from agent.status import ERROR, running
from configs.load import read_yaml

Columns = dict[str, np.ndarray]

MANIFEST = "manifest.json"
ENTRY = ("name", "task", "core", "variant", "seed", "flags", "logdir")
COLUMNS = (*AXES, "return", "length")
EXACT = 100  # episodes at the end of a run that a packed file holds as they are
BINS = 300  # rows into which it averages all episodes before
ROWS = (64, 32, 16, 8, 1)  # of its metrics and evaluations: the most that fit into LIMIT
LIMIT = 100_000  # bytes of a packed run
EVALUATED = "eval/greedy/return"  # what a row of an evaluation has
THINNED = 500  # rows of metrics in memory


@dataclasses.dataclass
class Run:
    """One run. Each row of `scores` is one episode or the mean of `episodes` consecutive ones.
    `metrics` and `evaluations` have all axes and a column for each metric, NaN where a row lacks
    it."""

    name: str
    task: str
    core: str
    variant: str
    seed: int
    status: str  # finished, unfinished, failed or missing
    reason: str
    config: dict[str, Any] = dataclasses.field(default_factory=dict)  # dotted settings
    command: list[str] = dataclasses.field(default_factory=list)
    scores: Columns = dataclasses.field(default_factory=dict)
    metrics: Columns = dataclasses.field(default_factory=dict)
    evaluations: Columns = dataclasses.field(default_factory=dict)
    end: dict[str, float] = dataclasses.field(default_factory=dict)  # where each axis ended
    # parameters, update_flops, peak_ram_gb
    model: dict[str, float] = dataclasses.field(default_factory=dict)
    folder: Path | None = None  # where it is still there
    foreign: bool = False  # of another program


# Rows


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a JSONL file; the last one may be cut. ValueError names a line that is broken."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                raise ValueError(f"{path} line {number} is no JSON") from None


def read_columns(path: Path, names: tuple[str, ...]) -> Columns:
    """Columns `names` of a JSONL file, which may have the episodes of weeks: as `columns`, with one
    row in memory at a time."""
    found = {name: array("d") for name in names}
    for row in read_rows(path):
        for name, values in found.items():
            value = row.get(name)
            values.append(math.nan if value is None else value)
    return {name: np.array(values, np.float64) for name, values in found.items()}


def columns(rows: list[dict[str, Any]]) -> Columns:
    """Rows as columns of float64, NaN where one lacks a number."""
    names = dict.fromkeys(name for row in rows for name in row)
    found = {name: [row.get(name) for row in rows] for name in names}
    return {name: np.array(values, np.float64) for name, values in found.items()}


def binned(table: Columns, count: int) -> Columns:
    """At most `count` rows: means over neighbours that leave NaN out; `episodes` is summed."""
    length = len(next(iter(table.values()), ()))
    if length <= count:
        return table
    starts = np.linspace(0, length, count, endpoint=False).astype(int)
    weights = table.get("episodes", np.ones(length))

    def mean(values: np.ndarray) -> np.ndarray:
        known = np.isfinite(values)
        total = np.add.reduceat(np.where(known, weights * values, 0), starts)
        weight = np.add.reduceat(np.where(known, weights, 0), starts)
        return np.divide(total, weight, out=np.full(count, np.nan), where=weight > 0)

    out = {name: mean(values) for name, values in table.items() if name != "episodes"}
    if "episodes" in table:
        out["episodes"] = np.add.reduceat(weights, starts)
    return out


def cut(table: Columns, rows: slice | np.ndarray) -> Columns:
    return {name: values[rows] for name, values in table.items()}


def thinned(table: Columns, count: int) -> Columns:
    """At most `count` of its rows, the first and the last among them."""
    length = len(next(iter(table.values()), ()))
    return table if length <= count else cut(table, np.linspace(0, length - 1, count).astype(int))


# The folder of a run


def read_folder(folder: Path, entry: dict[str, Any]) -> Run:
    """The run that `agent.train` made in `folder`; `entry` is that of the manifest."""
    known = {key: entry[key] for key in ("name", "task", "core", "variant", "seed")}
    run = Run(**known, status="missing", reason="not begun, or its folder is gone")
    run.command = ["python", "-m", "agent.train", *entry["flags"], "--logdir", str(folder)]
    began = (folder / "config.yaml").exists()
    failure = last_words(folder / ERROR) or last_words(folder.with_name(f"{run.name}.failed"))
    if not began and not failure:
        return run
    run.folder = folder
    try:
        if began:
            run.config = flat(read_yaml(folder / "config.yaml"))
        run.model = model(folder / "model.txt")
        scores = read_columns(folder / "scores.jsonl", COLUMNS)
        run.scores = {**scores, "episodes": np.ones(len(scores["return"]))}
        rows = list(read_rows(folder / "metrics.jsonl"))
        played = [row for row in rows if EVALUATED in row]
        run.evaluations = columns(sorted(played, key=lambda row: row["agent_step"]))
        metrics = columns([row for row in rows if EVALUATED not in row])
        run.metrics = binned(metrics, THINNED)
        used = metrics.get("usage/ram_gb", np.empty(0))
        if np.isfinite(used).any():
            run.model["peak_ram_gb"] = float(np.nanmax(used))  # which means would hide
        run.end = {axis: float(max((row[axis] for row in rows), default=0)) for axis in AXES}
        for axis, values in cut(run.scores, slice(-1, None)).items():
            if axis in AXES and len(values):
                run.end[axis] = max(run.end[axis], values[0])
        run.status, run.reason = state(folder, run, failure)
    except ValueError as problem:
        run.status, run.reason = "failed", str(problem)
    return run


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as dotted ones, of whatever version wrote them."""
    out: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            out.update(flat(value, f"{prefix}{key}."))
        else:
            out[prefix + key] = value
    return out


def model(path: Path) -> dict[str, float]:
    """Parameters and FLOPs of an update, as in model.txt."""
    names = {"trainable parameters": "parameters", "FLOPs of one update": "update_flops"}
    lines = path.read_text().splitlines() if path.exists() else []
    return {
        name: float(line.rsplit(maxsplit=1)[-1].replace(",", ""))
        for line in lines
        for start, name in names.items()
        if line.startswith(start)
    }


def last_words(path: Path) -> str:
    """The last line of a file that says something; nothing where there is no file."""
    if not path.exists():
        return ""
    return (path.read_text(errors="replace").strip() or f"{path.name} is empty").splitlines()[-1]


def state(folder: Path, run: Run, failure: str) -> tuple[str, str]:
    """Status and its reason; `run.end` becomes what a finished run says itself."""
    file = folder / FINISHED
    if file.exists():
        found = json.loads(file.read_text())
        run.end.update({axis: float(found[axis]) for axis in AXES if axis in found})
        return "finished", f"by {found['by']}"
    where = f"step {run.end['agent_step']:,.0f}"
    if running(folder):
        return "unfinished", f"runs, {where}"
    if failure:
        return "failed", f"{where}: {failure}"
    return "unfinished", f"stopped at {where}"


# A packed run


def pack(run: Run, path: Path) -> None:
    """Write a run as one JSON file of less than LIMIT bytes, whatever its length.

    The last EXACT episodes stay as they are; all before become at most BINS means of as many
    episodes each, with six digits, as do metrics and evaluations. ValueError when it is too large
    even so, which settings alone would have to cause.
    """
    cutoff = max(0, len(run.scores.get("return", ())) - EXACT)
    before, last = cut(run.scores, slice(0, cutoff)), cut(run.scores, slice(cutoff, None))
    before = {name: short(values) for name, values in binned(before, BINS).items()}
    kept = ("name", "task", "core", "variant", "seed", "status", "config", "command")
    kept += ("end", "model")
    tree: dict[str, Any] = {"version": 1, **{name: getattr(run, name) for name in kept}}
    tree["reason"] = run.reason[:2000]
    tree["scores"] = {name: before[name] + exact(last[name]) for name in run.scores}
    for rows in ROWS:
        metrics, evaluations = binned(run.metrics, rows), thinned(run.evaluations, rows)
        for name, table in (("metrics", metrics), ("evaluations", evaluations)):
            # A budget is compared with where a row stands, to the last digit.
            tree[name] = {
                key: exact(values) if key in AXES else short(values)
                for key, values in table.items()
            }
        text = json.dumps(tree, separators=(",", ":")) + "\n"
        if len(text) < LIMIT:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Two sweeps, perhaps on two machines, may pack it at once.
            new = path.with_name(f"{path.name}.{socket.gethostname()}-{os.getpid()}.new")
            new.write_text(text)
            os.replace(new, path)
            return
    raise ValueError(f"{run.name} takes {len(text):,} bytes packed, the limit is {LIMIT:,}")


def number(value: float) -> float | int | None:
    if not np.isfinite(value):
        return None
    return int(value) if value == int(value) else float(value)


def exact(values: np.ndarray) -> list[float | int | None]:
    return [number(value) for value in values]


def short(values: np.ndarray) -> list[float | int | None]:
    return [number(float(f"{value:.6g}")) for value in values]


def unpack(path: Path) -> Run:
    """What `pack` wrote. ValueError where it is something else."""
    try:
        tree = json.loads(path.read_text())
        if tree.pop("version") != 1:
            raise ValueError
        run = Run(**tree)
        for name in ("scores", "metrics", "evaluations"):
            table = getattr(run, name)
            setattr(run, name, {key: np.array(v, np.float64) for key, v in table.items()})
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{path} is no packed run of version 1") from None
    return run


# A sweep


def read_manifest(folder: Path) -> dict[str, Any]:
    """Raises ValueError where `folder` holds no sweep, or one of another version."""
    path = folder / MANIFEST
    if not path.exists():
        raise ValueError(f"{folder} holds no sweep: {MANIFEST} is missing")
    try:
        manifest = json.loads(path.read_text())
        version, entries = manifest["version"], manifest["runs"]
    except (json.JSONDecodeError, KeyError, TypeError):
        raise ValueError(f"{path} is no manifest of a sweep: no `version` and `runs`") from None
    if version != 1:
        raise ValueError(f"{path} has version {version}; expected 1")
    for index, entry in enumerate(entries):
        lacks = [key for key in ENTRY if key not in entry]
        if lacks:
            raise ValueError(f"{path}: run {index} has no {', '.join(lacks)}")
    return manifest


def read_sweep(folder: Path) -> list[Run]:
    """A Run for every entry of the manifest, in its order; a packed one where its folder has none
    that finished.

    Raises ValueError as `read_manifest` does; a run that cannot be read is `failed`.
    """
    out = []
    for entry in read_manifest(folder)["runs"]:
        run = read_folder(folder / entry["logdir"], entry)
        packed = folder / "raw" / f"{entry['name']}.json"
        # What is packed has finished, whatever an older folder beside it says.
        if run.status != "finished" and packed.exists():
            try:
                run = dataclasses.replace(unpack(packed), folder=run.folder)
            except ValueError as problem:
                run.status, run.reason = "failed", str(problem)
        out.append(run)
    return out


# Runs of other programs


def read_csv(path: Path) -> list[Run]:
    """Runs of another program: a header with `task`, `variant`, `seed`, `score` and one of AXES,
    then a row for each point of a curve.

    A score counts as the mean of EXACT episodes, as published curves are; a column `episodes` says
    otherwise. ValueError names the line that cannot be read.
    """
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        names = reader.fieldnames or []
        axes = [name for name in AXES if name in names]
        lacks = [name for name in ("task", "variant", "seed", "score") if name not in names]
        if lacks or len(axes) != 1:
            expected = f"task, variant, seed, score and one of {', '.join(AXES)}"
            raise ValueError(f"{path} line 1: columns {', '.join(names)}; expected {expected}")
        groups: dict[tuple[str, str, int], list[tuple[float, float, float]]] = {}
        for row in reader:
            where = f"{path} line {reader.line_num}"
            try:
                point = tuple(float(row[key]) for key in (axes[0], "score"))
                episodes = float(row.get("episodes") or EXACT)
                seed = int(row["seed"])
            except (TypeError, ValueError):
                raise ValueError(
                    f"{where}: {axes[0]}, score and episodes must be numbers, seed a whole one"
                ) from None
            if not np.isfinite([*point, episodes]).all() or point[0] < 0 or episodes <= 0:
                raise ValueError(f"{where}: numbers must be finite, {axes[0]} not negative")
            if not row["task"] or not row["variant"]:
                raise ValueError(f"{where}: no task or no variant")
            groups.setdefault((row["task"], row["variant"], seed), []).append((*point, episodes))
    if not groups:
        raise ValueError(f"{path} has no rows")
    return [foreign(path, axes[0], *key, points) for key, points in groups.items()]


def foreign(path: Path, axis: str, task: str, variant: str, seed: int, points: list[Any]) -> Run:
    table = dict(zip((axis, "return", "episodes"), np.array(sorted(points)).T, strict=True))
    run = Run(f"{task}-{variant}-s{seed}", task, variant, variant, seed, "finished", path.name)
    run.foreign = True
    run.scores, run.end = table, {axis: float(table[axis][-1])}
    return run
