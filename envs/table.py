"""The tasks of the suites whose names are fixed, with their spaces, from tasks.tsv.

Known without building anything or importing a simulator; `python -m envs.list --write` makes the
file anew, and a test compares it with the real environments.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("tasks.tsv")


@dataclass(frozen=True)
class Row:
    """`limit`: the most simulator steps of an episode, empty without one."""

    suite: str
    name: str
    observation: str
    action: str
    limit: str

    @property
    def task(self) -> str:
        return f"{self.suite}_{self.name}"


@functools.cache
def rows() -> tuple[Row, ...]:
    lines = FILE.read_text().splitlines()
    return tuple(Row(*line.split("\t")) for line in lines if not line.startswith("#"))


@functools.cache
def names(suite: str) -> tuple[str, ...]:
    return tuple(row.name for row in rows() if row.suite == suite)
