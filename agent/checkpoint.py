"""Checkpoints: folders written aside, synced, then published by one rename; the last two stay.

    checkpoints/000012000/learner.pt   weights and optimiser
                          run.pt       counters, actor, environments, replay cursor, logger
Both load with `torch.load(..., weights_only=True)`: tensors and plain values only.
"""

from __future__ import annotations

import errno
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from replay.blocks import FULL

KEEP = 2


def plain(tree: Any) -> Any:
    """A copy of `tree` in which numpy arrays are tensors and numpy scalars Python numbers."""
    if isinstance(tree, dict):
        return {plain(key): plain(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [plain(value) for value in tree]
    if isinstance(tree, np.ndarray):
        return torch.from_numpy(np.array(tree))
    if isinstance(tree, np.generic):
        return tree.item()
    return tree


def sync(path: Path) -> None:
    """Make a file or a folder's entries durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_model(held: dict[str, Any], wanted: dict[str, Any], known: dict[str, Any]) -> None:
    """Raises ValueError unless the weights `held` are those of one model: all of `wanted`, in their
    shapes, and none that is not `known`."""
    shapes = {name: value.shape for name, value in held.items()}
    other = [name for name in shapes if name not in known]
    other += [name for name, value in wanted.items() if shapes.get(name) != value.shape]
    if other:
        raise ValueError(
            f"the checkpoint is of another model than these settings make in this version: "
            f"{len(other)} weights differ, such as {other[0]}; go on with the version that wrote "
            f"it, or train anew with another --logdir"
        )


class Checkpoints:
    def __init__(self, folder: Path):
        """Changes nothing: a run that is alive may be looked at."""
        self.folder = folder

    def tidy(self) -> None:
        """Undo what a kill left half done. For the process alone that holds the run's lock."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.put_back()
        self.clear()

    def put_back(self) -> None:
        """Undo half a replacement: what ended between its two renames."""
        for left in self.folder.glob("replaced-*"):
            final = self.folder / left.name.removeprefix("replaced-")
            if not final.exists():
                left.rename(final)

    def clear(self) -> None:
        for left in [*self.folder.glob("writing-*"), *self.folder.glob("replaced-*")]:
            shutil.rmtree(left)

    def published(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted(path for path in self.folder.glob("*") if path.name.isdigit())

    def save(self, step: int, parts: dict[str, Any]) -> Path:
        """Write `parts` (file stem -> tree) for agent step `step`; older than two are removed.

        Raises OSError (disk full included) with the earlier checkpoints as they were.
        """
        aside = self.folder / f"writing-{step:012d}"
        final = self.folder / f"{step:012d}"
        replaced = self.folder / f"replaced-{step:012d}"
        self.folder.mkdir(parents=True, exist_ok=True)
        if aside.exists():
            shutil.rmtree(aside)
        try:
            aside.mkdir()
            for stem, tree in parts.items():
                with (aside / f"{stem}.pt").open("wb") as file:
                    torch.save(plain(tree), file)
                    file.flush()
                    os.fsync(file.fileno())
            sync(aside)
            if final.exists():
                final.rename(replaced)
            aside.rename(final)
            sync(self.folder)
            sync(self.folder.parent)  # which may have it since today
        except (OSError, RuntimeError) as error:
            # torch reports a failed write as a RuntimeError, with the OSError as its context.
            numbers = [getattr(e, "errno", None) for e in (error, error.__context__)]
            full = shutil.disk_usage(self.folder).free < 1 << 20 or set(FULL) & set(numbers)
            self.put_back()
            shutil.rmtree(aside, ignore_errors=True)
            if full:
                raise OSError(
                    errno.ENOSPC,
                    f"disk full while writing a checkpoint to {self.folder}; the earlier ones are "
                    f"good: free space and run the same command",
                ) from error
            raise
        for old in self.published()[:-KEEP]:
            # Renamed first: a kill while files are being deleted leaves nothing that looks whole.
            old.rename(self.folder / f"writing-{old.name}")
        self.clear()
        return final

    @staticmethod
    def load(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
        """The parts of one checkpoint. Raises ValueError when one of them is damaged."""
        return {
            file.stem: Checkpoints.load_part(file, device) for file in sorted(path.glob("*.pt"))
        }

    @staticmethod
    def load_part(file: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
        try:
            return torch.load(file, map_location=device, weights_only=True)
        except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise ValueError(
                f"{file} is damaged; remove the folder {file.parent}, and the same command goes on "
                f"from the checkpoint before it, where there is one"
            ) from error
