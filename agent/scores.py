"""Scores beside what others reached: configs/references.yaml, with the source of each number."""

from __future__ import annotations

import re
from typing import Any

from configs.load import blocks


def squash(name: str) -> str:
    """`PrivateEye` and `private_eye` are one game; `memory_len_5` and `memory_len_L30` one task."""
    return re.sub(r"[^a-z0-9]", "", re.sub(r"_L?\d+$", "", name).lower())


def suite(task: str) -> tuple[dict[str, Any], str]:
    """The block of references of a task's suite, empty where there is none; the name in there."""
    for name, block in blocks("references").items():
        if task.startswith(name + "_"):
            return block, task[len(name) + 1 :]
    return {}, task


def lines(task: str) -> dict[str, float]:
    """Name -> score of every reference of a task, `random` included; empty where there is none."""
    block, rest = suite(task)
    known = {squash(name): scores for name, scores in block.get("tasks", {}).items()}
    return known.get(squash(rest), {})


def source(task: str) -> str:
    """Where the references of a task's suite are from."""
    return suite(task)[0].get("source", "")


def normalised(task: str, score: float) -> dict[str, float]:
    """(score - random) / (line - random) for every line of the task; random is 0 if not known.

    `human` of Atari is the human-normalised score (Wang et al. 2016); `best` of bsuite its regret
    score, in [0, 1], of these episodes alone (Osband et al. 2020, section 2.3).
    """
    known = dict(lines(task))
    low = known.pop("random", 0.0)
    out = {name: (score - low) / (line - low) for name, line in known.items()}
    if task.startswith("bsuite_"):
        out = {name: min(1.0, max(0.0, value)) for name, value in out.items()}
    return out
