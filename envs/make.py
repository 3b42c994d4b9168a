"""Tasks by name: `<suite>_<name>`. A new suite is one entry of SUITES (README.md)."""

from __future__ import annotations

import difflib
import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from envs.env import Env
from envs.wrappers import ActionRepeat, TimeLimit, TruncationAsTerminal


def make_memory_maze(name: str) -> Env:
    from envs.memory_maze import MemoryMaze

    return MemoryMaze(name)


def check_memory_maze(name: str) -> None:
    from envs.memory_maze import SIZES

    if name not in SIZES:
        raise unknown("memory_maze", name, SIZES)
    require("memory_maze")


def make_gym(name: str) -> Env:
    import gymnasium

    from envs.adapters import FromGymnasium

    # The adapter checks every observation itself.
    return FromGymnasium(gymnasium.make(name, disable_env_checker=True))


def check_gym(name: str) -> None:
    import gymnasium

    module, colon, ident = name.rpartition(":")
    try:
        if colon:
            importlib.import_module(module)
        gymnasium.spec(ident)
    except ImportError as error:
        raise ValueError(f"--task gym_{name}: {error}") from None
    except gymnasium.error.Error:
        raise unknown("gym", name, list(gymnasium.registry), listed=False) from None


def make_bsuite(name: str) -> Env:
    from envs.bsuite import BSuite

    return BSuite(name)


def check_bsuite(name: str) -> None:
    require("bsuite")
    from envs import bsuite

    if bsuite.memory_length(name) is None and name not in bsuite.names():
        if name.startswith("mnist"):
            raise ValueError(f"--task bsuite_{name}: mnist needs a download and is not offered")
        raise unknown("bsuite", name, [*bsuite.names(), "memory_len_L30"], listed=False)


def make_tmaze(name: str) -> Env:
    from envs.tmaze import TMaze

    return TMaze(int(name))


def check_tmaze(name: str) -> None:
    if not re.fullmatch(r"[1-9]\d*", name):
        raise ValueError(f"--task tmaze_{name}: expected a corridor length, for example tmaze_20")


def make_test(name: str) -> Env:
    from envs.testing import TESTS

    return TESTS[name]()


def check_test(name: str) -> None:
    from envs.testing import TESTS

    if name not in TESTS:
        raise unknown("test", name, list(TESTS))


def unknown(suite: str, name: str, known: Sequence[str], listed: bool = True) -> ValueError:
    """The error for a name that `suite` does not have, with the nearest that it has."""
    close = difflib.get_close_matches(name, known, 1, 0.4)
    hint = f"; did you mean {suite}_{close[0]}?" if close else ""
    has = f": it has {', '.join(known)}" if listed else ""
    return ValueError(f"--task {suite}_{name}: suite {suite} has no {name!r}{has}{hint}")


def require(suite: str) -> None:
    """ValueError with the line to type when the package of `suite` is missing."""
    if suite not in sys.modules and importlib.util.find_spec(suite) is None:
        raise ValueError(f"{suite} is not installed: pip install -e '.[{suite}]'")


@dataclass(frozen=True)
class Suite:
    """`make(name)` builds, `check(name)` raises ValueError for an unknown name without building.

    `cheap`: a step costs less than a message to another process. `apart`: names that need a process
    all the same. `reset_ticks`: steps of the other environments that a reset may take (pool.py).
    """

    make: Callable[[str], Env]
    check: Callable[[str], None]
    cheap: bool = True
    apart: tuple[str, ...] = ()
    reset_ticks: int = 0


SUITES = {
    "memory_maze": Suite(make_memory_maze, check_memory_maze, cheap=False, reset_ticks=64),
    "gym": Suite(make_gym, check_gym),
    "bsuite": Suite(make_bsuite, check_bsuite),
    "tmaze": Suite(make_tmaze, check_tmaze),
    "test": Suite(make_test, check_test, apart=("exit", "hang")),
}


def split(task: str) -> tuple[Suite, str]:
    """The suite whose name begins the task's, and the rest. ValueError when there is none."""
    for name in sorted(SUITES, key=len, reverse=True):
        if task.startswith(name + "_"):
            return SUITES[name], task[len(name) + 1 :]
    head = task.partition("_")[0]
    close = difflib.get_close_matches(task[: max(map(len, SUITES))], SUITES, 1, 0.4)
    close = close or difflib.get_close_matches(head, SUITES, 1, 0.4)
    hint = f"; did you mean {close[0]}_...?" if close else ""
    raise ValueError(f"--task {task}: no such suite; known: {', '.join(SUITES)}{hint}")


def check_task(task: str) -> None:
    """Raise ValueError, with what would be right, for a task that does not exist."""
    suite, name = split(task)
    suite.check(name)


def make_env(
    task: str, *, repeat: int = 1, time_limit: int = 0, truncation: str = "bootstrap"
) -> Env:
    """Build a task. `repeat`, `time_limit` (actions) and `truncation` as in configs/schema.py.

    ValueError for an unknown task and for spaces that cannot be used.
    """
    check_task(task)
    suite, name = split(task)
    env = suite.make(name)
    if repeat > 1:
        env = ActionRepeat(env, repeat)
    if time_limit:
        env = TimeLimit(env, time_limit)
    if truncation == "terminal":
        env = TruncationAsTerminal(env)
    return env


def cheap(task: str) -> bool:
    """Whether the task is better stepped in this process than in one of its own."""
    suite, name = split(task)
    return suite.cheap and name not in suite.apart


def reset_ticks(task: str) -> int:
    """For how many ticks of a pool a reset of the task may run beside the other slots."""
    return split(task)[0].reset_ticks
