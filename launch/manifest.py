"""The runs that a sweep is made of: `manifest.json`, made once, then only added to.

Every run's settings are written down when the sweep is made, so that they are the same on every
day and every machine. `launch/runs.py` has the format, and reads it. Here it has three more keys:
`settings` (KEY=VALUE, of every run), `logdir` (the folder of the runs' folders, relative to the
sweep unless it is absolute) and `matched` (task -> variant -> settings that make cores equal).
A run's flags are without `--logdir`, which is where the sweep is; `command` adds it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from configs.load import ConfigError, check_key, resolve
from launch.runs import MANIFEST, read_manifest

Entry = dict[str, Any]
Manifest = dict[str, Any]
# (match, variants, task, settings) -> variant -> settings
Matching = Callable[[str, list[str], str, list[str]], dict[str, dict[str, Any]]]

# Settings that are the sweep's own, and the option that is meant.
RESERVED = {
    "task": "--tasks",
    "core": "--cores",
    "seed": "--seeds",
    "logdir": "--runs",
    "threads": "--threads",
}


@dataclasses.dataclass(frozen=True)
class Grid:
    """What a command asks for; None: as the sweep has it."""

    tasks: list[str] | None = None
    variants: list[str] | None = None
    seeds: list[int] | None = None
    match: str | None = None
    settings: list[str] | None = None
    logdir: str | None = None


def pairs(settings: list[str]) -> dict[str, str]:
    """KEY=VALUE texts as a dict. ConfigError for an unknown key, one of RESERVED, or no value."""
    out = {}
    for text in settings:
        key, given, value = text.partition("=")
        if not given:
            raise ConfigError(f"--set {text}: expected KEY=VALUE")
        check_key(key, "--set")
        if key in RESERVED:
            raise ConfigError(f"--set {text}: use {RESERVED[key]}")
        out[key] = value
    return out


def name(task: str, variant: str, seed: int) -> str:
    """A run's name, which is also that of its folder."""
    return re.sub(r"[^\w.=-]", "_", f"{task}-{variant}-s{seed}")


def text(value: Any) -> str:
    """A setting as it is typed."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def make(grid: Grid, old: Manifest | None, matching: Matching) -> tuple[Manifest, list[Entry]]:
    """The manifest with what `grid` asks for, and of its runs those that were asked for.

    Raises ConfigError for a wrong setting, and ValueError with a diff where the sweep has others.
    """
    had = old or {"settings": [], "match": "none", "logdir": "runs"}
    asked = {key: getattr(grid, key) for key in ("settings", "match", "logdir")}
    kept = {key: had[key] if value is None else value for key, value in asked.items()}
    if old:
        refuse(old, kept)
        if grid.tasks is None and grid.variants is None and grid.seeds is None:
            return old, old["runs"]
    axes = {}
    for axis in ("tasks", "variants", "seeds"):
        known, given = had.get(axis, []), getattr(grid, axis)
        axes[axis] = known if given is None else given
        if not axes[axis]:
            raise ValueError("a new sweep needs --tasks, --cores and --seeds")
        if repeated := {one for one in axes[axis] if axes[axis].count(one) > 1}:
            raise ValueError(f"given twice: {', '.join(map(str, sorted(repeated)))}")
    matched = match(axes, kept, had.get("matched", {}), matching)
    runs = {entry["name"]: entry for entry in had.get("runs", [])}
    wanted = []
    for task in axes["tasks"]:
        for variant in axes["variants"]:
            for seed in axes["seeds"]:
                new = entry(task, variant, seed, kept, matched.get(task, {}).get(variant, {}))
                known = runs.setdefault(new["name"], new)
                if known != new:
                    raise ValueError(f"two runs would be called {new['name']}")
                wanted.append(new)
    manifest = {
        "version": 1,
        **{axis: list(dict.fromkeys([*had.get(axis, []), *axes[axis]])) for axis in axes},
        **kept,
        "matched": matched,
        "runs": list(runs.values()),
    }
    return manifest, wanted


def refuse(old: Manifest, asked: dict[str, Any]) -> None:
    """Raises ValueError with a diff where settings that must stay are asked otherwise."""
    changes = [
        f"  {key}: {old[key]} in the sweep, {asked[key]} asked"
        for key in ("match", "logdir")
        if asked[key] != old[key]
    ]
    before, now = pairs(old["settings"]), pairs(asked["settings"])
    changes += [
        f"  {key}: {before.get(key, 'not set')} in the sweep, {now.get(key, 'not set')} asked"
        for key in {**before, **now}
        if before.get(key) != now.get(key)
    ]
    if changes:
        raise ValueError(
            "this sweep has other settings:\n"
            + "\n".join(changes)
            + "\nchoose another --out, or drop these options to go on; nothing was touched"
        )


def match(
    axes: dict[str, list[Any]], kept: dict[str, Any], known: dict[str, Any], matching: Matching
) -> dict[str, Any]:
    """`known`, and settings for pairs of task and variant that are new.

    New variants are made equal to the first of the sweep: what others have is not changed.
    """
    if kept["match"] == "none":
        return {}
    out = {task: dict(by) for task, by in known.items()}
    for task in axes["tasks"]:
        by = out.setdefault(task, {})
        new = [variant for variant in axes["variants"] if variant not in by]
        if new:
            first = [next(iter(by))] if by else []
            found = matching(kept["match"], [*first, *new], task, kept["settings"])
            for variant in first:
                if found[variant] != by[variant]:
                    raise ValueError(
                        f"--match {kept['match']}: {', '.join(new)} cannot be made equal to "
                        f"{variant}, whose settings {by[variant]} would be {found[variant]}; "
                        f"choose another --out"
                    )
            by.update({variant: found[variant] for variant in new})
    return out


def entry(task: str, variant: str, seed: int, kept: dict[str, Any], matched: Any) -> Entry:
    """One run. What a variant says of itself wins over what is said of all."""
    core, *own = variant.split(":")
    settings = {**pairs(kept["settings"]), **matched, **pairs(own)}
    flags = ["--task", task, "--core", core, "--seed", str(seed)]
    for key, value in settings.items():
        flags += [f"--{key}", text(value)]
    resolve(flags)
    called = name(task, variant, seed)
    return {
        "name": called,
        "task": task,
        "core": core,
        "variant": variant,
        "seed": seed,
        "flags": flags,
        "logdir": f"{kept['logdir']}/{called}",
    }


def update(sweep: Path, grid: Grid, matching: Matching, dry: bool) -> list[Entry]:
    """Make or extend the manifest in `sweep`, and return the runs that `grid` asks for.

    `dry`: write nothing. Raises as `make` does.
    """
    while True:
        old = read(sweep)
        new, wanted = make(grid, old, matching)
        if dry or new == old:
            return wanted
        sweep.mkdir(parents=True, exist_ok=True)
        with locked(sweep):
            if read(sweep) == old:  # else another command has added runs meanwhile
                aside = sweep / f"{MANIFEST}.new"
                aside.write_text(json.dumps(new, indent=1) + "\n")
                aside.replace(sweep / MANIFEST)
                return wanted


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time; the folder is its own lock file."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def read(sweep: Path) -> Manifest | None:
    return read_manifest(sweep) if (sweep / MANIFEST).exists() else None
