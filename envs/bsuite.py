"""bsuite (Osband et al. 2020): bsuite_<experiment>_<n> by its own ids, and the letter L for a
memory length itself: `bsuite_memory_len_L30` has 30 steps between cue and question.

Every end has discount 0 in bsuite, time limits too, so every end is terminal here.
"""

from __future__ import annotations

import contextlib
import io
import re
from typing import Any

from envs.adapters import FromDmEnv

LENGTH = re.compile(r"memory_len_L(\d+)")


def memory_length(name: str) -> int | None:
    match = LENGTH.fullmatch(name)
    return int(match[1]) if match else None


def check(name: str) -> str:
    """bsuite's id of `name`; ValueError when there is none."""
    from bsuite import sweep

    experiment, _, number = name.rpartition("_")
    if experiment.startswith("mnist"):
        raise ValueError(f"bsuite_{name}: needs a data set that must be downloaded; not offered")
    ident = f"{experiment}/{number}"
    if ident not in sweep.SETTINGS:
        known = sorted({key.split("/")[0] for key in sweep.SETTINGS})
        raise ValueError(
            f"--task bsuite_{name}: bsuite has no {ident!r}; experiments: {', '.join(known)}, "
            f"or memory_len_L<length>"
        )
    return ident


def build(name: str, seed: int) -> Any:
    """The dm_env environment, a function of the seed where the experiment takes one."""
    length = memory_length(name)
    if length is not None:
        from bsuite.environments import memory_chain

        return memory_chain.MemoryChain(memory_length=length, num_bits=1, seed=seed)
    import bsuite
    from bsuite import sweep

    ident = check(name)
    settings = dict(sweep.SETTINGS[ident])
    experiment = ident.split("/")[0]
    if experiment not in ("bandit", "discounting_chain"):
        settings["seed"] = seed
    with contextlib.redirect_stdout(io.StringIO()):
        return bsuite.load(experiment, settings)


class BSuite(FromDmEnv):
    def __init__(self, name: str):
        # Building costs microseconds, and no experiment can be seeded otherwise.
        super().__init__(build(name, 0), lambda env, seed: build(name, seed))
