"""Where an update's time goes: `python -m agent.bench --size 1m --batch 16x64 --images no`.

One row for each core, size, batch, images and precision; bench.md says how to read it.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import os
import platform
import re
import statistics
import tempfile
from pathlib import Path
from typing import Any

from configs import process

if __name__ == "__main__":
    process.prepare()  # before torch is imported

import torch

from agent.auto import fake_batch
from agent.profiling import bound, growth, rates
from agent.profiling.cell import PARTS, Cell, acting, seconds, split
from agent.profiling.peak import peak_apart
from configs.command import command_line
from configs.load import blocks
from configs.mkl import choose_products
from worldmodels.cores import CORES

SCHEMA = 1
ENVIRONMENTS = (1, 8, 32)
KEY = tuple(field.name for field in dataclasses.fields(Cell))

Row = dict[str, Any]


def machine(products: str) -> dict[str, Any]:
    """What the numbers are of; `products` is what was chosen for them (`configs/mkl.py`)."""
    path = Path("/proc/cpuinfo")
    name = re.search(r"model name\s*: (.*)", path.read_text() if path.exists() else "")
    return {
        "cpu": name[1] if name else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "products": products,
    }


def timed(cells: list[Cell], rounds: int, found: bound.Rates) -> list[Row]:
    """Rows of cells of one batch shape, but for peak memory; every round runs all of them."""
    with tempfile.TemporaryDirectory() as folder:
        ready, out, reads = [], [], itertools.count()
        for number, cell in enumerate(cells):
            learner = cell.learner()
            loader = cell.loader(Path(folder) / str(number), learner)
            ready.append((learner, loader))
            train = functools.partial(learner.train, loader.next(next(reads)))
            train()  # warms up
            cost = bound.cost(train)
            row = {**dataclasses.asdict(cell), **dataclasses.asdict(cost)}
            row["bound"] = found.bound(cost, cell.precision)
            out.append({**row, "seconds": [], "parts": {part: [] for part in PARTS}})
        for _ in range(rounds):
            for row, (learner, loader) in zip(out, ready, strict=True):
                train = functools.partial(learner.train, loader.next(next(reads)))
                row["seconds"].append(seconds(train, learner.device))
                for part, spent in split(learner, loader, next(reads)).items():
                    row["parts"][part].append(spent)
        for row, (learner, loader) in zip(out, ready, strict=True):
            row["act"] = {str(n): acting(learner.update, n) for n in ENVIRONMENTS}
            loader.close()
            loader.replay.close()
    return out


def columns(row: Row) -> dict[str, str]:
    """The printed row; times are medians."""
    whole = statistics.median(row["seconds"])
    parts = {part: statistics.median(times) for part, times in row["parts"].items()}
    inside = sum(parts.values()) - parts["data"]
    return {
        **{key: row[key] for key in KEY},
        "update s": f"{whole:.3f}",
        "sum s": f"{inside:.3f}",
        **{part: f"{spent:.3f}" for part, spent in parts.items()},
        "GFLOP": f"{row['flops'] / 1e9:.2f}",
        "GB": f"{row['bytes'] / 1e9:.2f}",
        "operators": f"{row['operators']:,}",
        "bound s": f"{row['bound']:.3f}",
        "x bound": f"{whole / row['bound']:.2f}",
        "peak MB": f"{row['peak'] / 1e6:,.0f}",
        **{f"act {n} ms": f"{spent * 1e3:.2f}" for n, spent in row["act"].items()},
    }


def table(rows: list[dict[str, str]]) -> str:
    widths = {key: max(len(key), *(len(row[key]) for row in rows)) for key in rows[0]}
    lines = [{key: key for key in widths}, *rows]
    return "\n".join("  ".join(line[k].rjust(w) for k, w in widths.items()) for line in lines)


def earlier(path: Path) -> dict[str, Any]:
    """The results that --json wrote. Raises ValueError for those of another version."""
    found = json.loads(path.read_text())
    if found.get("schema") != SCHEMA or "cells" not in found:
        raise ValueError(f"{path} holds no table of version {SCHEMA}: measure it again with --json")
    return found


def compare(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """First the machine's rates now over then, which a ratio of times should be read beside.

    Then a line for each cell that both results have: time before over time now, by median. In
    brackets the smallest and the largest ratio of any round to any.
    """
    was, now = (
        {**found["rates"]["matmul"], "copy": found["rates"]["copy"]} for found in (old, new)
    )
    drift = "  ".join(f"{key} {now[key] / was[key]:.2f}x" for key in now)
    out = [f"the machine itself, now over then: {drift}"]
    before = {tuple(row[key] for key in KEY): row for row in old["cells"]}
    for row in new["cells"]:
        past = before.get(tuple(row[key] for key in KEY))
        if past:
            a, b = past["seconds"], row["seconds"]
            ratios = {"update": (statistics.median(a), statistics.median(b))}
            for part, times in row["parts"].items():
                ratios[part] = (statistics.median(past["parts"][part]), statistics.median(times))
            words = [f"{part} {was / now:.2f}x" for part, (was, now) in ratios.items()]
            words[0] += f" ({min(a) / max(b):.2f}..{max(a) / min(b):.2f})"
            out.append("  ".join([*(row[key] for key in KEY), *words]))
    return out


def trace(cell: Cell, path: Path) -> None:
    """A Chrome trace of one update."""
    learner = cell.learner()
    batch = fake_batch(learner.update, *cell.shape, learner.device)
    learner.train(batch)
    with torch.profiler.profile() as profile:
        learner.train(batch)
    profile.export_chrome_trace(str(path))


def shape(text: str) -> str:
    """A batch, if `text` is one."""
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no batch; expected rows x steps, as 16x64")
    return text


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = command_line("agent.bench", __doc__)
    add = parser.add_argument
    add("--cores", nargs="+", default=["gru", "s3m"], choices=sorted(CORES), help="cores")
    add("--size", nargs="+", default=["1m"], choices=list(blocks("sizes")), help="size presets")
    add("--batch", nargs="+", default=["16x64"], type=shape, help="BxT")
    add("--images", nargs="+", default=["no"], choices=["yes", "no"], help="64x64x3, or 8 floats")
    add("--precision", nargs="+", default=["float32"], choices=["float32", "bfloat16"])
    add("--threads", type=int, default=2, help="CPU threads")
    add("--products", default="auto", choices=["auto", "shipped"], help="as the setting of a run")
    add("--rounds", type=int, default=3, help="timed rounds")
    add("--json", type=Path, help="write the results to this file")
    add("--against", type=Path, help="compare the table with that in this file")
    add("--trace", type=Path, help="write a Chrome trace of one update of the first cell")
    only = parser.add_argument_group("measured instead of the table, for the first size and batch")
    only.add_argument("--scaling", action="store_true", help="time over T, horizon, environments")
    only.add_argument("--plots", type=Path, help="with --scaling: a folder for pictures")
    only.add_argument("--operators", action="store_true", help="operators of the sequence over T")
    only.add_argument("--rates", action="store_true", help="replay and environment steps/s")
    only.add_argument("--loop", metavar="TASK", help="environment steps/s of training")
    only.add_argument("--seconds", type=float, default=60, help="wall time of --loop for each core")
    return parser.parse_args(argv)


def measure_table(args: argparse.Namespace) -> dict[str, Any]:
    """Rates, rows and, with --against, ratios; printed."""
    old = earlier(args.against) if args.against else None
    found = bound.measure(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    for name, rate in found.matmul.items():
        print(
            f"{name}: matmul {rate / 1e9:,.0f} GFLOP/s, fastest {found.best[name] / 1e9:,.0f} "
            f"({found.route[name]})"
        )
    print(f"copy: {found.copy / 1e9:.1f} GB/s read and written\n")
    rows = []
    for batch in args.batch:
        mixed = itertools.product(args.size, args.images, args.precision, args.cores)
        cells = [Cell(core, size, batch, image, kind) for size, image, kind, core in mixed]
        for row, cell in zip(timed(cells, args.rounds, found), cells, strict=True):
            rows.append({**row, "peak": peak_apart(cell, args.threads, args.products)})
    print(table([columns(row) for row in rows]))
    out = {"rates": dataclasses.asdict(found), "cells": rows}
    if old:
        print("\n".join(compare(old, out)))
    return out


def measure_growth(args: argparse.Namespace) -> dict[str, Any]:
    found = growth.curves(args.cores, args.size[0], args.precision[0], args.rounds)
    for name, by_core in found.items():
        for core, points in by_core.items():
            times = "  ".join(f"{x}: {y * 1e3:.2f} ms" for x, y in points.items())
            print(f"{core:6} {name}^{growth.exponent(points):.2f}  {times}")
    if args.plots:
        print(growth.plot(found, args.plots))
    return {"scaling": found}


def measure_operators(args: argparse.Namespace) -> dict[str, Any]:
    out = {}
    for core, device in itertools.product(args.cores, ("cpu", growth.accelerator())):
        count = {n: growth.operators(core, args.size[0], n, device) for n in (64, 1024)}
        words = "  ".join(f"T {length}: {number:,}" for length, number in count.items())
        print(f"{core:6} on {device:5} operators dispatched  {words}")
        out[f"{core} {device}"] = count
    return {"operators": out}


def measure_rates(args: argparse.Namespace, first: Cell) -> dict[str, Any]:
    out = {}
    if args.rates:
        out.update(rates.replay_rates(first.shape, 16_384), **rates.env_rates(150))
    for core in args.cores if args.loop else ():
        name = f"{args.loop}, {core}, environment steps/s"
        cell = dataclasses.replace(first, core=core)
        out[name] = rates.loop_rate(args.loop, cell, args.threads, args.products, args.seconds)
    for name, value in out.items():
        print(f"{name}: {value:,.1f}")
    return {"other rates": out}


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    torch.set_num_threads(args.threads)
    first = Cell(args.cores[0], args.size[0], args.batch[0], args.images[0], args.precision[0])
    out: dict[str, Any] = {"schema": SCHEMA, "machine": machine(choose_products(args.products))}
    print("\n".join(f"{key:9} {value}" for key, value in out["machine"].items()))
    if args.scaling:
        out |= measure_growth(args)
    if args.operators:
        out |= measure_operators(args)
    if args.rates or args.loop:
        out |= measure_rates(args, first)
    if not (args.scaling or args.operators or args.rates or args.loop):
        out |= measure_table(args)
    if args.json:
        args.json.write_text(json.dumps(out, indent=1))
    if args.trace:
        trace(first, args.trace)


if __name__ == "__main__":
    main()
