"""Scores beside what others reached: configs/references.yaml, with the source of each number."""

from __future__ import annotations

import re

from configs.load import blocks


def squash(name: str) -> str:
    """`PrivateEye` and `private_eye` are one game; `memory_len_5` and `memory_len_L30` one task."""
    return re.sub(r"[^a-z0-9]", "", re.sub(r"_L?\d+$", "", name).lower())


def lines(task: str) -> dict[str, float]:
    """Name -> score of every reference of a task, `random` included; empty where there is none."""
    for suite, block in blocks("references").items():
        if task.startswith(suite + "_"):
            known = {squash(name): scores for name, scores in block["tasks"].items()}
            return known.get(squash(task[len(suite) + 1 :]), {})
    return {}


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
