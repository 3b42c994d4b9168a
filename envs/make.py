"""Tasks by name: `<suite>_<name>`, or `<module>:<callable>` for what lives elsewhere.

A new suite is one entry of SUITES (README.md).
"""

from __future__ import annotations

import difflib
import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from envs import table
from envs.env import Env, check_spaces
from envs.wrappers import ActionRepeat, TimeLimit, TruncationAsTerminal


def make_memory_maze(name: str, labels: bool = False) -> Env:
    from envs.memory_maze import MemoryMaze

    return MemoryMaze(name, labels=labels)


def make_dmc(name: str, repeat: int) -> Env:
    from envs.dmc import DMC

    return DMC(name, repeat)


def make_dmc_vision(name: str, repeat: int) -> Env:
    from envs.dmc import DMCVision

    return DMCVision(name, repeat)


def make_atari(name: str, repeat: int) -> Env:
    from envs.atari import Atari

    return Atari(name, repeat, small=False)


def make_atari100k(name: str, repeat: int) -> Env:
    from envs.atari import Atari

    return Atari(name, repeat, small=True)


def make_popgym(name: str) -> Env:
    from envs import popgym

    return popgym.build(name)


def check_popgym(name: str) -> None:
    check_name("popgym", name)
    require("popgym")
    if name.startswith("Labyrinth"):
        require("popgym", "mazelib")


def make_gym(name: str) -> Env:
    import gymnasium

    from envs.adapters import FromGymnasium

    try:
        # The adapter checks every observation itself.
        env = gymnasium.make(name, disable_env_checker=True)
    except (ImportError, gymnasium.error.Error) as error:  # a package that it needs is missing
        raise ValueError(f"--task gym_{name}: {error}") from error
    return FromGymnasium(env)


def check_gym(name: str) -> None:
    import gymnasium

    module, colon, ident = name.rpartition(":")
    try:
        if colon:
            importlib.import_module(module)
        gymnasium.spec(ident)
    except (ImportError, SyntaxError, ValueError) as error:
        raise ValueError(f"--task gym_{name}: {error}") from None
    except gymnasium.error.Error:
        if "/" in ident and not colon:
            raise ValueError(
                f"--task gym_{name}: an id with a namespace needs the module that registers it: "
                f"gym_<module>:{name}"
            ) from None
        raise unknown("gym", name, list(gymnasium.registry), listed=False) from None


def make_bsuite(name: str) -> Env:
    from envs.bsuite import BSuite

    return BSuite(name)


def check_bsuite(name: str) -> None:
    from envs import bsuite

    if name.startswith("mnist"):
        raise ValueError(f"--task bsuite_{name}: mnist needs a download and is not offered")
    if bsuite.memory_length(name) is None:
        check_name("bsuite", name, "memory_len_L30")
    require("bsuite")


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


def make_plugin(task: str) -> Env:
    from envs import plugin

    return plugin.build(task)


def check_plugin(task: str) -> None:
    from envs import plugin

    plugin.find(task)


def unknown(suite: str, name: str, known: Sequence[str], listed: bool = True) -> ValueError:
    """The error for a name that `suite` does not have, with the nearest that it has."""
    close = difflib.get_close_matches(name, known, 1, 0.4)
    hint = f"; did you mean {suite}_{close[0]}?" if close else ""
    has = f": it has {', '.join(known)}" if listed else ""
    return ValueError(f"--task {suite}_{name}: suite {suite} has no {name!r}{has}{hint}")


def check_name(suite: str, name: str, *more: str) -> None:
    """ValueError unless the table has `name`; `more`: what else a typing error may have meant."""
    if name not in table.names(suite):
        error = unknown(suite, name, [*table.names(suite), *more], listed=False)
        raise ValueError(f"{error}; python -m envs.list {suite}_ shows them all")


# The package of a suite, and the extra of setup.cfg that brings it.
PACKAGES = {
    "memory_maze": ("memory_maze", "memory-maze"),
    "dmc": ("dm_control", "dmc"),
    "dmc_vision": ("dm_control", "dmc"),
    "atari": ("ale_py", "atari"),
    "atari100k": ("ale_py", "atari"),
    "popgym": ("popgym", "popgym"),
    "bsuite": ("bsuite", "bsuite"),
}


def require(suite: str, package: str = "") -> None:
    """ValueError with the line to type when the package of `suite`, or another, is missing."""
    usual, extra = PACKAGES[suite]
    package = package or usual
    if package not in sys.modules and importlib.util.find_spec(package) is None:
        raise ValueError(f"{package} is not installed: pip install -e '.[{extra}]'")


def from_table(suite: str, *packages: str) -> Callable[[str], None]:
    """The check of a suite whose names are those of the table, and which needs `packages` too."""

    def check(name: str) -> None:
        check_name(suite, name)
        for package in ("", *packages):
            require(suite, package)

    return check


@dataclass(frozen=True)
class Suite:
    """`make(name)` builds, `check(name)` raises ValueError for an unknown name without building.

    `repeats`: `make(name, repeat)` applies the action repeat itself, because every observation
    costs, or the last two are merged; elsewhere a wrapper does. `labels`: `make(name, labels=True)`
    gives arrays `label/<name>` too. `cheap`: a step costs less than a
    message to another process. `apart`: names that need a process all the same. `reset_ticks`:
    steps of the other environments that a reset may take (pool.py).
    """

    make: Callable[..., Env]
    check: Callable[[str], None]
    repeats: bool = False
    labels: bool = False
    cheap: bool = True
    apart: tuple[str, ...] = ()
    reset_ticks: int = 0


SUITES = {
    "memory_maze": Suite(
        make_memory_maze, from_table("memory_maze"), labels=True, cheap=False, reset_ticks=64
    ),
    "dmc": Suite(make_dmc, from_table("dmc"), repeats=True, apart=("quadruped_escape",)),
    "dmc_vision": Suite(make_dmc_vision, from_table("dmc_vision"), repeats=True, cheap=False),
    "atari": Suite(make_atari, from_table("atari", "cv2"), repeats=True, cheap=False),
    "atari100k": Suite(make_atari100k, from_table("atari100k", "cv2"), repeats=True, cheap=False),
    "popgym": Suite(make_popgym, check_popgym),
    "gym": Suite(make_gym, check_gym),
    "bsuite": Suite(make_bsuite, check_bsuite),
    "tmaze": Suite(make_tmaze, check_tmaze),
    "test": Suite(make_test, check_test, apart=("exit", "hang")),
}
PLUGIN = Suite(make_plugin, check_plugin, cheap=False)


def split(task: str) -> tuple[Suite, str]:
    """The suite whose name begins the task's, and the rest. ValueError when there is none."""
    # gymnasium too knows names of the form module:id.
    if ":" in task and not task.startswith("gym_"):
        return PLUGIN, task
    for name in sorted(SUITES, key=len, reverse=True):
        if task.startswith(name + "_"):
            return SUITES[name], task[len(name) + 1 :]
    head = task.partition("_")[0]
    close = difflib.get_close_matches(task[: max(map(len, SUITES))], SUITES, 1, 0.4)
    close = close or difflib.get_close_matches(head, SUITES, 1, 0.4)
    hint = f"; did you mean {close[0]}_...?" if close else ""
    if re.search(r"-v\d+$", task):  # as gymnasium calls its own
        hint = f"; did you mean gym_{task}?"
    raise ValueError(
        f"--task {task}: no such suite; known: {', '.join(SUITES)}, or module:callable{hint}"
    )


def check_task(task: str) -> None:
    """Raise ValueError, with what would be right, for a task that does not exist."""
    suite, name = split(task)
    suite.check(name)


def make_env(
    task: str,
    *,
    repeat: int = 1,
    time_limit: int = 0,
    truncation: str = "bootstrap",
    labels: bool = False,
) -> Env:
    """Build a task. `repeat`, `time_limit` (actions) and `truncation` as in configs/schema.py;
    `labels`: with what else its simulator knows, where the suite has it (env.py).

    ValueError for an unknown task and for spaces that cannot be used.
    """
    check_task(task)
    suite, name = split(task)
    more = {"labels": True} if labels and suite.labels else {}
    env = suite.make(name, repeat) if suite.repeats else suite.make(name, **more)
    check_spaces(env.obs_space, env.act_space)
    if repeat > 1 and not suite.repeats:
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
