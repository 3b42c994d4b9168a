"""Which core remembers: `python -m launch.recall --task tmaze --cores gru s3m --out results/tmaze`.

Cores alone, trained with targets on streams that only a memory can answer (launch/streams.py), all
from the same batches for the same seed, then tested on longer streams, the same for every core and
seed. The weights tested are the last ones: no length is used to choose among them. Each finished
(core, seed) is appended to results.jsonl; the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from pathlib import Path
from typing import Any

from configs import process

if __name__ == "__main__":
    process.prepare()  # before torch is imported

import numpy as np
import torch

from configs.command import command_line
from configs.load import ConfigError, resolve
from launch import recall_report
from launch.streams import TASKS, Task, make_task
from launch.supervised import Probe, check_against_step, disturb, drift, evaluate, train

# Streams for training and for testing come from different generators.
TRAIN, TEST = 0, 1
# What the grid is made of, and what does not change its numbers: a folder may go on with others.
MAY_CHANGE = ("cores", "seeds", "out", "threads")


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = command_line("launch.recall", __doc__)
    add = parser.add_argument
    add("--task", choices=TASKS, required=True)
    add("--cores", nargs="+", default=["gru", "s3m"], help="CORE or CORE:KEY=VALUE:..., a variant")
    add("--seeds", nargs="+", type=int, default=[0, 1, 2, 3])
    add("--out", type=Path, required=True, help="folder of results.jsonl, table.md and plot.png")
    add("--size", default="1m", help="size preset (configs/sizes.yaml)")
    add("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="any setting")
    add("--length", type=int, default=0, help="steps of training rows; 0: the task's own")
    add("--lengths", nargs="+", type=int, default=[], help="test lengths; none: the task's own")
    add("--updates", type=int, default=2000, help="the most updates")
    add("--flops", type=float, default=0, help="the most training FLOPs of each core; 0: no limit")
    add("--batch", type=int, default=32, help="training rows")
    add("--windows", type=int, default=1, help="parts of a training row, no gradient between them")
    add("--lr", type=float, default=1e-3, help="learning rate of LaProp")
    add("--warmup", type=int, default=100, help="updates over which the rate rises from 0")
    add("--decay", type=float, default=0, help="last share of updates in which the rate falls to 0")
    add("--smoothing", type=float, default=0, help="label smoothing in training")
    add("--rows", type=int, default=100, help="test rows")
    add("--chunk", type=int, default=960, help="steps of a test row scanned at once")
    add("--intervene", nargs="+", choices=["noise", "initial"], default=[], help="before the query")
    add("--drift", type=int, default=0, help="segments over which memories are compared; 0: none")
    add("--facts", type=int, default=4, help="of kcue")
    add("--values", type=int, default=8, help="of kcue")
    add("--back", type=int, default=4, help="of repeat")
    add("--threads", type=int, default=1, help="CPU threads")
    return parser.parse_args(argv)


def one(args: argparse.Namespace, task: Task, core: str, seed: int) -> list[dict[str, Any]]:
    """Train and test one core from one seed: a row for each test length and intervention."""
    optim = ["--optim.lr", str(args.lr), "--optim.warmup", str(args.warmup)]
    name, *own = core.split(":")
    given = [f"--{setting}" for setting in (*args.set, *own)]
    config = resolve(["--core", name, "--size", args.size, *optim, *given])
    torch.manual_seed(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    probe = Probe(config, task.inputs, task.classes).to(device)
    spent = train(
        probe,
        task,
        config,
        np.random.default_rng([TRAIN, seed]),
        rows=args.batch,
        length=args.length or task.length,
        windows=args.windows,
        updates=args.updates,
        flops=args.flops,
        smoothing=args.smoothing,
        decay=args.decay,
        report=lambda line: print(f"{core} seed {seed}: {line}", flush=True),
    )

    def pieces(length: int) -> Any:
        return task.test(np.random.default_rng([TEST, length]), args.rows, length, args.chunk)

    lengths = args.lengths or task.lengths
    common = {
        "core": core,
        "seed": seed,
        "task": args.task,
        "parameters": sum(param.numel() for param in probe.core.parameters()),
        "updates": spent.updates,
        "train_flops": spent.flops,
        "cpu_seconds": round(spent.seconds, 1),
        "loss": spent.loss,
        "gap": check_against_step(probe, next(pieces(lengths[0]))),
    }
    segment = probe.core.segment
    if args.drift and "memory" in probe.core.initial(1):
        steps = segment * args.drift + 2  # the last step of a test row is a piece of its own
        cut = task.test(np.random.default_rng([TEST, 0]), args.rows, steps, segment)
        common["drift"] = [step._asdict() for step in drift(probe, cut, segment)]
    rows = []
    for how in ("kept", *args.intervene):
        for length in lengths:
            change = functools.partial(disturb, probe.core, how, task.steps(length) - 1)
            score = evaluate(probe, pieces(length), change)
            rows.append({**common, "intervene": how, "length": length, **score._asdict()})
    return rows


def settings(args: argparse.Namespace) -> str:
    """What must stay the same in a folder, as JSON."""
    kept = {key: value for key, value in vars(args).items() if key not in MAY_CHANGE}
    return json.dumps(kept, indent=1)


def check_settings(args: argparse.Namespace, path: Path) -> None:
    """Raises ValueError where the settings of a folder are not those of `args`."""
    if path.exists() and path.read_text() != settings(args):
        before, now = json.loads(path.read_text()), json.loads(settings(args))
        wrong = [key for key in now if before.get(key) != now[key]]
        raise ValueError(f"{path} has another {', '.join(wrong)}: choose another --out")


def append(path: Path, rows: list[dict[str, Any]]) -> None:
    """Add all rows in one write: a pair is there or it is not."""
    with path.open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 when the grid is finished, 2 for a wrong command."""
    args = arguments(argv)
    torch.set_num_threads(args.threads)
    task = make_task(args.task, args.facts, args.values, args.back)
    try:
        check_settings(args, args.out / "settings.json")
        path = args.out / "results.jsonl"
        rows = [json.loads(line) for line in path.open()] if path.exists() else []
        finished = {(row["core"], row["seed"]) for row in rows}
        for core, seed in ((core, seed) for seed in args.seeds for core in args.cores):
            if (core, seed) in finished:
                continue
            new = one(args, task, core, seed)
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / "settings.json").write_text(settings(args))
            append(path, new)
            rows += new
            recall_report.write(args.out, args.task, task, rows)
            kept = [row for row in new if row["intervene"] == "kept"]
            shown = "  ".join(f"{row['length']}: {row[task.score]:.3f}" for row in kept)
            print(f"{core} seed {seed}, {new[0]['cpu_seconds']} CPU s  {shown}", flush=True)
    except (ConfigError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"table and plot in {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
