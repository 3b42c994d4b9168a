"""Many runs: `python -m launch.sweep --tasks tmaze_9 --cores gru s3m --seeds 5 --out sweeps/a`.

The folder gets `manifest.json` with every run's settings, and `raw/` with what is kept of the
finished ones. Typed again, the command goes on: finished runs stay, stopped and failed ones resume,
missing ones start. More tasks, cores and seeds may be added; `--out` alone goes on with exactly the
runs that are there.
"""

from __future__ import annotations

import argparse
import functools
import os
import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from agent.limits import limits
from configs.command import command_line
from configs.load import resolve
from envs.make import check_task
from launch import manifest, slurm
from launch.attempt import TRAINER, command, packed
from launch.local import Local
from launch.manifest import Entry, Grid

MATCHES = ("none", "params", "flops", "seconds")
# What limits are of, in the words of an estimate.
UNITS = {
    "agent_step": "agent steps",
    "update": "updates",
    "train_flops": "FLOPs",
    "wall_seconds": "s",
}


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = command_line("launch.sweep", __doc__)
    add = parser.add_argument
    add("--tasks", nargs="+")
    add("--cores", nargs="+", help="CORE or CORE:KEY=VALUE:..., a variant")
    add("--seeds", nargs="+", help="one number: so many, from 0; several, or A-B: these")
    add("--match", choices=MATCHES, help="what is made equal for all cores; none unless given")
    add("--set", nargs="+", action="extend", metavar="KEY=VALUE", help="any setting of every run")
    add("--out", type=Path, default=Path("logs/sweep"), help="folder of the sweep")
    add("--runs", type=Path, help="folder of the runs' own folders; else <out>/runs")
    add("--on", choices=["local", "slurm"], default="local")
    add("--jobs", type=int, help="runs at a time; 1, or on SLURM 256")
    add("--gpus", nargs="+", help="local: GPUs of which each of the --jobs gets one, in turn")
    add("--threads", type=int, default=1, help="local: CPU threads of each run")
    add("--retries", type=int, default=1, help="how often a run that fails is tried again")
    add("--slurm", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="of submitit")
    add("--dry", action="store_true", help="print the commands and what they cost; write nothing")
    return parser.parse_args(argv)


def numbers(words: list[str] | None) -> list[int] | None:
    """Seeds as they are typed: `5` is 0 to 4, `5-9` is 5 to 9, `3 7` are 3 and 7."""
    if words is None:
        return None
    try:
        if len(words) == 1 and words[0].isdigit():
            words = [f"0-{int(words[0]) - 1}"] if int(words[0]) else []
        spans = [[int(end) for end in word.split("-", 1)] for word in words]
    except ValueError:
        raise ValueError(f"--seeds {' '.join(words)}: expected numbers, or A-B") from None
    found = [seed for span in spans for seed in range(span[0], span[-1] + 1)]
    if not found:
        raise ValueError("--seeds names no seed: expected a number above 0, or A-B")
    return found


def grid(args: argparse.Namespace) -> Grid:
    # Relative to the sweep, both may be moved or copied together.
    runs = args.runs and (args.runs if args.runs.is_absolute() else relative(args.runs, args.out))
    return Grid(
        args.tasks, args.cores, numbers(args.seeds), args.match, args.set, runs and runs.as_posix()
    )  # fmt: skip


def relative(path: Path, start: Path) -> Path:
    return Path(os.path.relpath(path, start))


def matching(
    match: str, variants: list[str], task: str, settings: list[str], threads: int = 0
) -> dict[str, dict[str, Any]]:
    """Settings that make each of `variants` equal to the first (launch/budget.py); how far they are
    from it is printed where it is more than a fair comparison bears. Seconds are those of so many
    `threads`, as runs have.

    Raises ConfigError or ValueError where that cannot be.
    """
    from launch import budget  # which needs torch, as a sweep that goes on does not

    own = {variant: manifest.pairs(variant.split(":")[1:]) for variant in variants}
    core = {variant: variant.partition(":")[0] for variant in variants}
    first = variants[0]
    for variant in variants:
        of_others = [key for key in own[variant] if not key.startswith(f"{core[variant]}.")]
        if of_others or (core[variant] == core[first] and variant != first):
            raise ValueError(
                f"--match: {variant} cannot be made equal to {first}: expected another core than "
                f"that of the first, with settings of its own (`{core[variant]}.`) alone"
            )
    given = {**manifest.pairs(settings), **own[first]}
    words = [f"--{key}={value}" for key, value in given.items()]
    size = resolve(["--task", task, "--core", core[first], *words]).size
    how = {"part": "total", "adjust": "train_ratio"} if match == "seconds" else {}
    plain = [variant for variant in variants if variant == first or not own[variant]]
    out = {}
    for group in [plain, *([first, variant] for variant in variants if variant not in plain)]:
        more = {**given, **own[group[-1]]}
        more.pop("size", None)
        cores = [core[variant] for variant in group]
        with budget.threads(threads):
            found = budget.matched(cores, match, size, task, more, **how)
        for variant in group:
            out[variant] = found[core[variant]]
            if clash := set(out[variant]) & set(own[variant]):
                raise ValueError(f"--match {match} sets {', '.join(clash)}, as does {variant}")
        if match != "seconds":
            for line in budget.misses(found, match, size, task, more):
                print(f"warning: {task}, {line}", file=sys.stderr)
    return {variant: out[variant] for variant in variants}


def estimate(entries: list[Entry]) -> str:
    """What `entries` cost at most, as far as their limits say."""
    lines = [f"{len(entries)} runs"]
    found: Counter[tuple[str, float]] = Counter()
    for entry in entries:
        ends = limits(resolve(entry["flags"]).stop)
        # Whichever comes first ends a run; compute is what a limit of compute says.
        axis = next((a for a in ("train_flops", "wall_seconds", "update") if a in ends), "")
        axis = axis or "agent_step"
        found[axis, ends[axis]] += 1
    for (axis, limit), count in found.items():
        each = f"{limit:.3g}" if axis == "train_flops" else f"{limit:,.0f}"
        whole = limit * count
        total = f"{whole:.3g}" if axis == "train_flops" else f"{whole:,.0f}"
        lines.append(f"  {count} x {each} {UNITS[axis]} = {total} {UNITS[axis]}")
    if any(axis != "train_flops" for axis, _ in found):
        lines.append("  FLOPs unknown: only --set stop.flops=<number> says them beforehand")
    return "\n".join(lines)


def show(
    args: argparse.Namespace, todo: list[Entry], given: dict[str, Any], trainer: list[str]
) -> None:
    """Print what would be done."""
    threads = args.threads
    if args.on == "slurm":
        job = slurm.job(args.out, trainer, given, args.retries)
        trainer, threads = job.launcher(), job.threads
    for entry in todo:
        print(shlex.join(command(args.out, entry, trainer, threads)))
    print(estimate(todo))


def main(argv: list[str] | None = None, trainer: list[str] = TRAINER) -> int:
    """Exit status: 0 when all is finished, submitted or stopped on request, 1 when runs failed or
    are unfinished, 2 for a wrong command. `trainer`: the command that trains one run."""
    args = arguments(argv)
    try:
        for task in args.tasks or ():
            check_task(task)
        given = slurm.parameters(args.slurm)
        if args.on == "slurm":
            slurm.check(given)
        alike = functools.partial(matching, threads=args.threads)
        entries = manifest.update(args.out, grid(args), alike, args.dry)
        todo = [entry for entry in entries if not packed(args.out, entry).exists()]
        print(f"{len(entries)} runs, {len(entries) - len(todo)} of them packed", flush=True)
        if args.dry:
            show(args, todo, given, trainer)
            return 0
        if args.on == "slurm":
            return submit(args, todo, given, trainer)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return train(args, todo, trainer)


def submit(
    args: argparse.Namespace, todo: list[Entry], given: dict[str, Any], trainer: list[str]
) -> int:
    jobs = slurm.submit(args.out, todo, trainer, given, jobs=args.jobs, retries=args.retries)
    ids = ", ".join(sorted({job.job_id.partition("_")[0] for job in jobs}))
    word = f" as job {ids}" if jobs else ""
    rest = "" if len(jobs) == len(todo) else "; the others run, or SLURM may still have their jobs"
    print(f"{len(jobs)} of {len(todo)} runs submitted{word}{rest}")
    print(f"python -m launch.status {args.out} shows them")
    return 0


def train(args: argparse.Namespace, todo: list[Entry], trainer: list[str]) -> int:
    local = Local(
        args.out,
        todo,
        trainer,
        jobs=args.jobs or 1,
        gpus=args.gpus,
        threads=args.threads,
        retries=args.retries,
        say=lambda line: print(line, flush=True),
    )
    states = local.run()
    left = {name: state for name, state in states.items() if state != "finished"}
    for name, state in left.items():
        if not local.notice:
            print(f"{state}: {name}", file=sys.stderr)
    word = f"stopped by {local.notice}" if local.notice else "done" if not left else "not all done"
    print(f"{word}: {len(states) - len(left)} of {len(states)} runs finished", flush=True)
    return 1 if left and not local.notice else 0


if __name__ == "__main__":
    sys.exit(main())
