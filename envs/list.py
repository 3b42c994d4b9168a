"""Tasks with their spaces, episode limits and settings: `python -m envs.list "dmc_walker*"`.

A pattern is a part of a name or has wildcards; the full name of any other task works too. Without
one all tasks of fixed name are shown. `--write` builds every environment to make tasks.tsv anew.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import signal
import sys
from typing import Any

import numpy as np

from configs import load as configs
from configs.command import command_line
from envs import table
from envs.env import Env, Space
from envs.make import SUITES, make_env
from envs.table import Row

FREE_NAMES = """\
Others by the form of their name:
  gym_<id>, gym_<module>:<id>    any registered gymnasium environment
  bsuite_memory_len_L<n>         memory_len with n steps between cue and question
  tmaze_<n>                      T-maze with a corridor of n steps
  <module>:<callable>            your own (envs/README.md)"""


def shown(space: Space) -> str:
    """`image 64x64x3`, `vector 5`, `discrete 8 8`, `discrete 52 times 3`."""
    numbers = space.classes or space.shape
    if space.kind == "image":
        return "image " + "x".join(map(str, numbers))
    if len(numbers) > 4 and len(set(numbers)) == 1:
        return f"{space.kind} {len(numbers)} times {numbers[0]}"
    return f"{space.kind} {' '.join(map(str, numbers))}"


def observation(spaces: dict[str, Space]) -> str:
    parts = {key: shown(space) for key, space in spaces.items()}
    named = [text if text.startswith(key) else f"{key}: {text}" for key, text in parts.items()]
    return ", ".join(named)


def draw(space: Space, random: np.random.Generator) -> np.ndarray:
    if space.kind == "discrete":
        return random.integers(0, space.classes).astype(np.int32)
    return random.uniform(-1, 1, space.shape).astype(np.float32)


def played(env: Env, episodes: int = 5) -> tuple[set[int], bool]:
    """Lengths of episodes of random actions, and whether one of them was truncated."""
    random, lengths, truncated = np.random.default_rng(0), set(), False
    for seed in range(episodes):
        record, length = env.reset(seed), 0
        while not record["is_last"]:
            record, length = env.step(draw(env.act_space, random)), length + 1
        lengths.add(length)
        truncated |= not record["is_terminal"]
    return lengths, truncated


def limit(suite: str, env: Any) -> str:
    """The most simulator steps of an episode: what the simulator declares, or what is played."""
    if suite.startswith("atari"):
        from envs.atari import FRAMES

        return str(FRAMES)
    raw = getattr(env, "env", env)
    if not suite:
        spec = getattr(raw, "spec", None)
        return str(getattr(raw, "limit", getattr(spec, "max_episode_steps", "")) or "")
    if suite.startswith("dmc"):
        return "" if np.isinf(raw._step_limit) else str(int(raw._step_limit))
    if suite == "memory_maze":
        return str(round(raw._time_limit / raw.control_timestep()))
    lengths, truncated = played(env)
    if truncated or len(lengths) == 1:
        return str(max(lengths))
    if suite == "popgym":
        return str(raw.unwrapped.max_episode_length)
    # Two of bsuite's end by falling over, or by the clock.
    raw = getattr(raw, "raw_env", raw)
    seconds = getattr(raw, "_max_time", None)
    return str(round(seconds / raw._timescale) + 1 if seconds else raw._max_steps)


def describe(env: Env, suite: str = "", name: str = "") -> Row:
    """What the table says of a task, from the environment itself, which is closed."""
    try:
        spaces, action = observation(env.obs_space), shown(env.act_space)
        return Row(suite, name, spaces, action, limit(suite, env))
    finally:
        env.close()


def built(suite: str, name: str) -> Row:
    """A row of the table from a name that need not be in it."""
    entry = SUITES[suite]
    return describe(entry.make(name, 1) if entry.repeats else entry.make(name), suite, name)


def offered(suite: str) -> list[str]:
    """The names that the packages themselves offer."""
    from envs import atari, bsuite, dmc, memory_maze, popgym

    names = {
        "memory_maze": lambda: memory_maze.NAMES,
        "dmc": dmc.names,
        "dmc_vision": dmc.names,
        "atari": atari.games,
        "atari100k": lambda: atari.ATARI_100K,
        "popgym": popgym.names,
        "bsuite": bsuite.names,
    }
    return list(names[suite]())


FIXED = ("memory_maze", "dmc", "dmc_vision", "atari", "atari100k", "popgym", "bsuite")


def settings(task: str) -> dict[str, Any]:
    """What configs/tasks.yaml sets for the task."""
    return configs.by_prefix(configs.blocks("tasks"), task, "configs/tasks.yaml")


def line(task: str, row: Row) -> str:
    changed = settings(task)
    repeat = changed.pop("env.repeat", 1)
    rest = " ".join(f"{key}={value}" for key, value in changed.items())
    return (
        f"{task} | {row.observation} | {row.action} | limit {row.limit or 'none'} | "
        f"repeat {repeat} | {rest}"
    )


def main(argv: list[str] | None = None) -> int:
    parser = command_line("envs.list", __doc__)
    parser.add_argument("pattern", nargs="?", default="", help="part of a name, or wildcards")
    parser.add_argument("--write", action="store_true", help="make tasks.tsv anew (minutes)")
    args = parser.parse_args(argv)
    if args.write:
        write()
        return 0
    pattern = args.pattern if set(args.pattern) & set("*?[") else f"*{args.pattern}*"
    found = [row for row in table.rows() if fnmatch.fnmatchcase(row.task, pattern)]
    for row in found:
        print(line(row.task, row))
    if not args.pattern:
        print(FREE_NAMES)
    elif not found:
        try:
            print(line(args.pattern, describe(make_env(args.pattern))))
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    return 0


def write() -> None:
    lines = ["# suite, name, observation, action, most simulator steps (envs/list.py --write)"]
    for suite in FIXED:
        names = offered(suite)
        lines += ["\t".join(dataclasses.astuple(built(suite, name))) for name in names]
        print(f"{suite}: {len(names)}", flush=True)
    table.FILE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is no failure
    sys.exit(main())
