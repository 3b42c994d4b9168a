"""Runs that no sweep began, from their own folders: what each is called beside the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agent.checks import FREE_AT_RESUME, named
from configs import load as configs
from launch.manifest import Entry, text
from launch.runs import Run, read_folder

# Says which run it is, or where it is made, and not what is compared.
IDENTITY = ("task", "core", "seed", "preset", "env.processes", *FREE_AT_RESUME)


def read_folders(folders: list[Path]) -> list[Run]:
    """A Run of each folder. A variant is a core, with the settings in which its runs on one task
    differ: `s3m:behaviour.features=full`.

    ValueError for a folder without a run, and for two of one task, variant and seed.
    """
    settings = [settings_of(folder) for folder in folders]
    differs = differing(settings)
    variants = [variant(each, differs) for each in settings]
    seen: dict[tuple[str, str, int], Path] = {}
    runs = []
    for folder, each, called in zip(folders, settings, variants, strict=True):
        key = each["task"], called, each["seed"]
        if key in seen:
            raise ValueError(f"{seen[key]} and {folder} are runs of the same settings and seed")
        seen[key] = folder
        runs.append(read_folder(folder, entry(folder, each, called)))
    return runs


def settings_of(folder: Path) -> dict[str, Any]:
    """All settings of the run in `folder`. ValueError where there is none."""
    file = folder / "config.yaml"
    if not file.exists():
        raise ValueError(
            f"{folder} is neither a sweep nor a run: it has no manifest.json and no config.yaml"
        )
    return configs.to_flat(configs.load(file))


def differing(settings: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Core -> the settings in which its runs on one task differ."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for each in settings:
        groups.setdefault((each["core"], each["task"]), []).append(each)
    out: dict[str, list[str]] = {}
    for (core, _), group in groups.items():
        keys = [key for key in group[0] if any(one[key] != group[0][key] for one in group)]
        known = out.setdefault(core, [])
        known += [key for key in keys if key not in known and not named(key, IDENTITY)]
    return out


def variant(own: dict[str, Any], differs: dict[str, list[str]]) -> str:
    """What tells a run from others of its core, also where they are of another task."""
    settings = (f"{key}={text(own[key])}" for key in differs[own["core"]])
    return ":".join([own["core"], *settings])


def entry(folder: Path, settings: dict[str, Any], called: str) -> Entry:
    """As in a manifest. The flags are those that make these settings anew."""
    first = ("task", "core", "seed", "size", "preset")
    flags = [word for key in first if settings[key] for word in (f"--{key}", text(settings[key]))]
    usual = configs.to_flat(configs.resolve(flags))
    for key, value in settings.items():
        if value != usual[key] and key != "logdir":
            flags += [f"--{key}", text(value)]
    return {
        "name": folder.name,
        **{key: settings[key] for key in ("task", "core", "seed")},
        "variant": called,
        "flags": flags,
        "logdir": str(folder),
    }
