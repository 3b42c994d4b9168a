"""Equal compute: `python -m launch.budget --cores gru s3m elmur --match flops --size 1m`.

Prints what every core costs (launch/cost.py), after the widths of all but the first, or their train
ratios, have been solved so that what is matched is that of the first: of the sequence part by the
widths of the core, of the whole by the width at which all else reads its output. Batch shape,
imagined starts and heads are the same for all. With --out each solution is a preset, one file a
core, for `agent.train --preset FOLDER/CORE.yaml`. README.md says what is made equal, and what not.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from configs import process

if __name__ == "__main__":
    process.prepare()  # before torch is imported

import torch

from agent.auto import choose_precision, fake_batch
from agent.learner import Learner
from agent.profiling import cell
from agent.update import Update
from configs import load as configs
from configs.command import command_line
from configs.load import ConfigError
from configs.mkl import choose_products
from configs.schema import Config
from launch.cost import Cost, cost, part_parameters, spaces, update_flops
from launch.manifest import text
from launch.solve import Settings, Widths
from worldmodels.cores import CORES

MEASURES = {"params": part_parameters, "flops": update_flops}
MATCHES = (*MEASURES, "seconds")
PARTS = ("sequence", "total")
BOTH = "both"
TOLERANCE = 0.02
RATIO = "loop.train_ratio"


def short(value: float) -> float:
    """A number that can be read: six digits."""
    return float(f"{value:.6g}")


class Budget:
    """Cores of one size on one task, and what is `given` for all of them, dotted settings."""

    def __init__(self, size: str, task: str, given: Mapping[str, Any]):
        """Raises ConfigError for what cannot be used, ValueError for a task that does not exist."""
        if size == configs.AUTO_SIZE:
            raise ConfigError("--size auto depends on the machine: name a size")
        for key in ("core", "size", "task"):
            if key in given:
                raise ConfigError(f"{key} is no setting for all cores: it has a word of its own")
        named = configs.preset_keys(given.get("preset", ""), task)
        self.task, self.given = task, {**named, **given, "size": size}
        for key in ("core", "preset"):  # of a preset, what it sets for all cores is left
            self.given.pop(key, None)
        self.spaces = spaces(self.config(next(iter(CORES)), {}))

    def config(self, core: str, settings: Mapping[str, Any]) -> Config:
        flags = {**self.given, "task": self.task, "core": core, **settings}
        return configs.resolve([f"--{key}={text(value)}" for key, value in flags.items()])

    def update(self, core: str, settings: Mapping[str, Any]) -> Update:
        return Update(self.config(core, settings), *self.spaces)

    def widths(self, core: str, match: str, targets: Mapping[str, float]) -> Settings:
        """Widths at which parts of `core` have so many parameters, or FLOPs of an update."""
        widths = Widths(self.config(core, {}), readout=len(targets) > 1)

        def measured(part: str, settings: Settings) -> float:
            return MEASURES[match](self.update(core, settings), part)

        values = [widths.fitted(functools.partial(measured, part)) for part in targets]
        solve = widths.solve if len(values) == 1 else widths.solve_both
        return solve(*values, *targets.values())


def matched(
    cores: Sequence[str],
    match: str,
    size: str,
    task: str,
    given: Mapping[str, Any],
    part: str = BOTH,
    adjust: str = "width",
    rounds: int = 6,
) -> dict[str, dict[str, Any]]:
    """Settings of each core, by name, that make it cost what the first of `cores` does.

    `match`: `params`; `flops`, of an update, or of an environment step where `adjust` is
    `train_ratio`; or `seconds` of learning for an environment step on this machine, medians of
    `rounds` updates, which only `train_ratio` can adjust: time is no smooth function of a width.
    `part` is `sequence`, `total` or `both`; of seconds it is always the total, and a train ratio
    cannot make both equal. `given` are settings of all cores, by dotted name, `preset` among them.
    Raises ConfigError or ValueError for what does not fit together.
    """
    check(match, adjust, part)
    budget, first = Budget(size, task, given), cores[0]
    if match == "seconds":
        times = timed({core: budget.update(core, {}) for core in cores}, rounds)
        ratio = budget.config(first, {}).loop.train_ratio
        return {
            core: {RATIO: short(ratio * median(times[first]) / median(times[core]))}
            for core in cores
        }
    if adjust == "train_ratio":
        costs = {core: cost(budget.update(core, {})) for core in cores}
        wanted = costs[first].per_step(part)
        return {
            core: {RATIO: short(found.replayed_for(part, wanted))} for core, found in costs.items()
        }
    of = budget.update(first, {})
    targets = {name: MEASURES[match](of, name) for name in PARTS if part in (name, BOTH)}
    solved = {core: budget.widths(core, match, targets) for core in cores[1:]}
    return {first: {}, **solved}


def misses(
    solved: dict[str, dict[str, Any]], match: str, size: str, task: str, given: Mapping[str, Any]
) -> list[str]:
    """A line for each part in which cores differ from the first by more than TOLERANCE, though
    their settings are `solved`, by parameters or FLOPs of an update."""
    budget = Budget(size, task, given)
    costs = {core: cost(budget.update(core, settings)) for core, settings in solved.items()}
    away = deviations(costs, match, "width", {})
    return [line for line in verdict(away, f"--match {match}") if "NOT" in line]


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """So many threads of PyTorch; 0: as they are."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check(match: str, adjust: str, part: str) -> None:
    """Raises ValueError for a request that makes no sense."""
    if match == "params" and adjust == "train_ratio":
        raise ValueError("--match params: a train ratio changes no parameters; --adjust width")
    if match != "seconds" and (adjust, part) == ("train_ratio", BOTH):
        raise ValueError("--adjust train_ratio is one number: --part sequence, or total")
    if match == "seconds" and (adjust, part) != ("train_ratio", "total"):
        raise ValueError(
            "--match seconds needs --adjust train_ratio --part total: the time of an update is no "
            "smooth function of a width, and that of a part is not what a run takes"
        )


def timed(updates: dict[str, Update], rounds: int) -> dict[str, list[float]]:
    """Seconds of `rounds` updates of each, in turns, after one that warms up."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    choose_products(next(iter(updates.values())).config.products)
    runs, out = {}, {core: [] for core in updates}
    for core, update in updates.items():
        batch = update.config.batch
        config, _ = choose_precision(update.config, update.to(device))  # as a run does
        learner = Learner(update, 0, config.precision)
        runs[core] = (learner, fake_batch(update, batch.size, batch.length, device))
    for number in range(rounds + 1):
        for core, (learner, fake) in runs.items():
            spent = cell.seconds(lambda run=learner, fake=fake: run.train(fake), device)
            out[core] += [spent] if number else []
    return out


def deviations(
    costs: dict[str, Cost], match: str, adjust: str, times: dict[str, list[float]]
) -> dict[str, dict[str, float]]:
    """How far each core is from the first, by part: 0.02 is 2 % more."""

    def quantity(core: str, part: str) -> float:
        found = costs[core]
        if match == "params":
            return found.of(part).parameters
        if match == "seconds":
            return median(times[core]) * found.replayed
        return found.per_step(part) if adjust == "train_ratio" else found.of(part).flops

    parts, first = PARTS[1:] if match == "seconds" else PARTS, next(iter(costs))
    return {
        core: {part: quantity(core, part) / quantity(first, part) - 1 for part in parts}
        for core in costs
    }


def table(
    costs: dict[str, Cost],
    solved: dict[str, dict[str, Any]],
    away: dict[str, dict[str, float]],
    times: dict[str, list[float]],
) -> str:
    """A Markdown table, a row for each core; `off` is what is matched, from the first core's."""
    rows = []
    for core, found in costs.items():
        row = {
            "core": core,
            "params seq": f"{found.sequence.parameters:,}",
            "params": f"{found.total.parameters:,}",
            "FLOPs/update seq": f"{found.sequence.flops:.3e}",
            "FLOPs/update": f"{found.total.flops:.3e}",
            "FLOPs/act": f"{found.acting:.3e}",
            "train ratio": f"{found.replayed:.4g}",
            "FLOPs/env step": f"{found.per_step('total'):.3e}",
            **({"s/update": f"{median(times[core]):.3f}"} if times else {}),
            "state bytes": f"{found.state:,}",
            "MB/update": f"{found.memory / 1e6:,.0f}",
            "policy input": f"{found.features:,}",
            **{f"{part} off": f"{share:+.1%}" for part, share in away[core].items()},
            "solved": " ".join(f"{key}={value:.6g}" for key, value in solved[core].items()) or "-",
        }
        rows.append(row)
    widths = {key: max(len(key), *(len(row[key]) for row in rows)) for key in rows[0]}
    lines = [{key: key for key in widths}, {key: "-" * width for key, width in widths.items()}]
    shown = (" | ".join(row[k].rjust(width) for k, width in widths.items()) for row in lines + rows)
    return "\n".join(f"| {row} |" for row in shown)


def verdict(away: dict[str, dict[str, float]], what: str) -> list[str]:
    """A line for each part: whether it agrees."""
    lines = []
    for part in next(iter(away.values())):
        most = max((abs(by[part]), core) for core, by in away.items())
        within = "within" if most[0] <= TOLERANCE else "NOT within"
        lines.append(
            f"{what}, {part}: {within} 2 % of the first (furthest: {most[1]}, {most[0]:.1%})"
        )
    return lines


def write(folder: Path, budget: Budget, solved: dict[str, dict[str, Any]], words: str) -> None:
    """A preset for each core, and the table."""
    folder.mkdir(parents=True, exist_ok=True)
    for core, settings in solved.items():
        flat = configs.to_flat(budget.config(core, settings))
        keys = {"core", *budget.given, *settings} - set(configs.CHOSEN_BY)
        head = f"# {budget.task}, {words} (python -m launch.budget)\n"
        (folder / f"{core}.yaml").write_text(
            head + configs.render_flat({key: value for key, value in flat.items() if key in keys})
        )


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = command_line("launch.budget", __doc__)
    add = parser.add_argument
    add("--cores", nargs="+", choices=CORES, default=list(CORES), help="the first is the measure")
    add("--size", default="1m", help="size preset (configs/sizes.yaml)")
    add("--task", default=Config().task, help="whose spaces and batch shape")
    add("--match", choices=MATCHES, help="what is made equal; without it nothing is solved")
    add("--part", choices=(*PARTS, BOTH), default=BOTH, help="of what it is made equal")
    add("--adjust", choices=("width", "train_ratio"), default="width", help="what is solved for")
    add("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="any setting")
    add("--rounds", type=int, default=0, help="updates that are timed; for seconds at least 6")
    add("--threads", type=int, default=1, help="CPU threads")
    add("--out", type=Path, help="folder of presets, CORE.yaml, and table.md")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0; 1 where what was to be equal is not within 2 %; 2 for a wrong command."""
    args = arguments(argv)
    torch.set_num_threads(args.threads)
    rounds = max(args.rounds, 6) if args.match == "seconds" else args.rounds
    try:
        given = configs.parse_flags([f"--{word}" for word in args.set])
        solved: dict[str, dict[str, Any]] = {core: {} for core in args.cores}
        if args.match:
            request = (args.cores, args.match, args.size, args.task, given)
            solved = matched(*request, args.part, args.adjust, rounds)
        budget = Budget(args.size, args.task, given)
        updates = {core: budget.update(core, solved[core]) for core in args.cores}
    except (ConfigError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    costs = {core: cost(update) for core, update in updates.items()}
    # Of seconds, measured once more: what was solved from is no proof of what was reached.
    times = timed(updates, rounds) if rounds else {}
    match = args.match or "flops"
    away = deviations(costs, match, args.adjust, times)
    each = "an environment step" if args.adjust == "train_ratio" else "an update"
    what = "parameters" if match == "params" else f"{match} of {each}"
    lines = [table(costs, solved, away, times), "", *verdict(away, what)]
    print("\n".join(lines))
    wanted = PARTS if args.part == BOTH else [args.part]
    if args.out:
        parts = " and ".join(wanted)
        write(args.out, budget, solved, f"{what}, {parts}, as those of {args.cores[0]}")
        (args.out / "table.md").write_text("\n".join(lines) + "\n")
    wrong = any(abs(by[part]) > TOLERANCE for by in away.values() for part in wanted)
    return int(bool(args.match and wrong))


if __name__ == "__main__":
    sys.exit(main())
