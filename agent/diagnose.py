"""Memory diagnostics of a trained run: `python -m agent.diagnose --logdir logs/a`.

The same for each core, from episodes with seeds that training never uses: open-loop prediction
(horizon), what old information is worth (recall), what can be read from h, x and z (probe),
gradients through time (influence), sizes of the state (norm), and, where the core has them, reads
and writes of its memory (memory) and decays (spectrum). Prints tables; `diagnostics` in the run's
folder gets diagnostics.json and (matplotlib) a picture of each.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agent.diagnostics import (
    horizon,
    influence,
    memory_maps,
    norms,
    probe,
    recall,
    recording,
    spectrum,
)
from agent.diagnostics.recording import Recording
from agent.evaluate import load_run
from configs.command import command_line

MODULES = {
    "horizon": horizon,
    "recall": recall,
    "probe": probe,
    "influence": influence,
    "norm": norms,
    "memory": memory_maps,
    "spectrum": spectrum,
}
CORES = {"memory": ("elmur", "rate"), "spectrum": ("s3m",)}  # those that have it
AGES = {"memory_maze": [4, 64, 256, 512, 960], "": [1, 2, 4, 8, 16, 32, 64, 128, 256]}
EXPLORE = 0.5


def plain(value: Any) -> Any:
    """Numbers with five digits, and null for those that JSON has not."""
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    return value


def draw(path: Path, module: Any, result: dict[str, Any], title: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    module.plot(figure, result)
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, bbox_inches="tight", dpi=120)


def chosen(core: str, only: list[str]) -> dict[str, str]:
    """The diagnostics to make, and why not: "" or a reason. ValueError if one of `only` cannot."""
    out = {}
    for name in only or MODULES:
        cores = CORES.get(name, (core,))
        out[name] = "" if core in cores else f"core {core} has none: only {', '.join(cores)}"
        if only and out[name]:
            raise ValueError(f"--only {name}: {out[name]}")
    return out


def diagnose(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """What diagnostics.json says, and the results that were made. ValueError: see `main`."""
    config, loaded = load_run(args.logdir)
    wanted = chosen(config.core, args.only)
    named = next(ages for task, ages in AGES.items() if config.task.startswith(task))
    ages = sorted(set(args.at or named))
    label = args.label or recall.cue(config.task)
    explore = args.explore
    if explore is None:
        explore = EXPLORE if recall.cue(config.task) else 0.0
    plays = set(wanted) - {"spectrum"}
    episodes = args.episodes or recording.usual_episodes(config.task)
    kept = probe.ages_of(config.task, ages) if "probe" in wanted else set()
    run = recording.record(config, loaded, episodes if plays else 0, kept, args.steps, explore)
    calls: dict[str, Callable[[Recording], dict[str, Any]]] = {
        **{name: module.measure for name, module in MODULES.items()},
        "probe": functools.partial(probe.measure, ages=ages, label=label, when=args.when),
    }
    about = {**run.about, "episodes": len(run.episodes), "explore": explore}
    lengths = [len(episode) - 1 for episode in run.episodes]
    about["actions"] = [min(lengths), max(lengths)] if lengths else []
    made, skipped = {}, {}
    for name, reason in wanted.items():
        try:
            if reason:
                raise ValueError(reason)
            made[name] = plain(calls[name](run))
        except ValueError as error:
            # What was asked for by name must be possible; of all, those that are.
            if args.only:
                raise
            skipped[name] = str(error)
    return {**about, "skipped": skipped}, made


def words(about: dict[str, Any], made: dict[str, Any]) -> str:
    """What is printed: of which run it is, then the lines of each result."""
    head = f"{about['task']}, core {about['core']}, step {about['agent_step']:,}"
    parts = [head + (f", {about['episodes']} episodes" if about["episodes"] else "")]
    parts += ["\n".join([name, *MODULES[name].lines(result)]) for name, result in made.items()]
    parts += [f"{name}: left out, {reason}" for name, reason in about["skipped"].items()]
    return "\n\n".join(parts)


def write(folder: Path, about: dict[str, Any], made: dict[str, Any]) -> None:
    """diagnostics.json, the same as text, and pictures; what was made before of other weights is
    removed."""
    folder.mkdir(exist_ok=True)
    file = folder / "diagnostics.json"
    before = json.loads(file.read_text()) if file.exists() else {}
    if before.get("update") != about["update"]:
        before = {}
    every = {**before.get("diagnostics", {}), **made}
    skipped = {**before.get("skipped", {}), **about["skipped"]}
    about = {**about, "skipped": {k: v for k, v in skipped.items() if k not in every}}
    text = json.dumps({**about, "diagnostics": every}, indent=1)
    # A list of numbers is one line.
    text = re.sub(r"\[\s+([^][{}]*?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", text)
    file.write_text(text + "\n")
    (folder / "diagnostics.txt").write_text(words(about, every) + "\n")
    for name, module in MODULES.items():
        path = folder / f"{name}.png"
        if name not in every:
            path.unlink(missing_ok=True)
        elif name in made and importlib.util.find_spec("matplotlib"):
            title = f"{about['task']}, {about['core']}, step {about['agent_step']:,}: {name}"
            draw(path, module, made[name], title)


def label_of(text: str) -> tuple[str, int]:
    key, _, index = text.rpartition(":")
    if not key or not index.isdigit():
        raise argparse.ArgumentTypeError(f"{text}: expected KEY:INDEX, for example vector:2")
    return key, int(index)


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, or 2 for a wrong command."""
    parser = command_line("agent.diagnose", __doc__)
    parser.add_argument("--logdir", type=Path, required=True, help="folder of the run")
    parser.add_argument("--only", nargs="+", default=[], choices=MODULES, help="of these alone")
    parser.add_argument("--episodes", type=int, default=0, help="0: by the cost of the task")
    parser.add_argument("--steps", type=int, default=0, help="most actions an episode; 0: all")
    parser.add_argument(
        "--explore",
        type=float,
        help="share of uniform actions; where a cue decides the reward 0.5, elsewhere 0",
    )
    parser.add_argument(
        "--label", type=label_of, metavar="KEY:INDEX", help="probe: an entry of an observation"
    )
    parser.add_argument("--when", type=int, default=0, help="probe: step at which it is seen")
    parser.add_argument("--at", type=int, nargs="+", help="probe: steps to read at")
    args = parser.parse_args(argv)
    if min(args.episodes, args.steps, args.when, *(args.at or [0])) < 0:
        parser.error("--episodes, --steps, --when and --at must not be negative")
    if args.explore is not None and not 0 <= args.explore <= 1:
        parser.error("--explore is a share: 0 to 1")
    try:
        about, made = diagnose(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(words(about, made))
    write(args.logdir / "diagnostics", about, made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
