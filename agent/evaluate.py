"""Evaluate a run: `python -m agent.evaluate --logdir logs/a --episodes 20`.

Exactly N episodes, spread evenly over environment slots, with seeds that training never uses;
greedy and sampled actions apart. Prints a table and writes evaluation.json in the run's folder;
`--video N` films the first N episodes of each.
Weights, seeds and noise being the same, so are the numbers: on a CPU they are those that an
evaluation beside training logs, and `--repeat` plays the last of these again.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from agent.film import Film
from agent.scores import normalised
from configs import process
from configs.command import command_line
from configs.schema import Config

MODES = ("greedy", "sampled")
SLOTS = 4
FEW = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # Student's t at 97.5 % for so many episodes
NICE = 10  # of the process beside training: a tenth of the share of what it competes with


def shares(episodes: int, slots: int) -> list[int]:
    """How many episodes each slot plays: as even as possible, so short ones are not favoured."""
    return [episodes // slots + (slot < episodes % slots) for slot in range(slots)]


def interval(scores: list[float]) -> tuple[float, float | None]:
    """Mean and half width of its 95 % interval over episodes (Student's t); None for one."""
    mean = float(np.mean(scores))
    count = len(scores)
    if count < 2:
        return mean, None
    # Student's t at 97.5 % from the normal quantile (Cornish-Fisher), at most 1.5 % below it from
    # six episodes on.
    z, n = 1.959964, count - 1
    t = z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
    t = FEW.get(count, t)
    return mean, t * float(np.std(scores, ddof=1)) / math.sqrt(count)


def play(
    update: Any,
    pool: Any,
    episodes: int,
    seed: int,
    greedy: bool,
    forget: int = 0,
    watch: Callable[..., None] | None = None,
) -> list[dict[str, Any]]:
    """Results of exactly `episodes` episodes: return, length, slot, seed.

    forget: the step of each episode at which the memory is put back to its initial value; 0: none.
    watch(ids, obs, action, actor) is called after every choice of actions.
    """
    from agent.actor import Actor

    wanted = shares(episodes, pool.count)
    actor = Actor(update, pool.count, seed, purpose="evaluate")
    returns, lengths = np.zeros(pool.count), np.zeros(pool.count, int)
    done: list[list[dict[str, Any]]] = [[] for _ in wanted]
    while sum(map(len, done)) < episodes:
        ids, obs = pool.recv()
        if forget and (obs["age"] == forget).any():
            actor.forget(ids[obs["age"] == forget])
        action = actor.act(ids, obs, greedy=greedy)
        if watch:
            watch(ids, obs, action, actor)
        returns[ids] += obs["reward"]
        lengths[ids] += ~obs["is_first"]
        for row in np.flatnonzero(obs["is_last"]):
            slot = int(ids[row])
            if len(done[slot]) < wanted[slot]:
                done[slot].append(
                    {
                        "return": float(returns[slot]),
                        "length": int(lengths[slot]),
                        "slot": slot,
                        "seed": pool.seed_of(slot, int(obs["episode"][row])),
                    }
                )
            returns[slot], lengths[slot] = 0, 0
        pool.send(ids, action)
    return [result for slot in done for result in slot]


def pool_of(config: Config, episodes: int, slots: int = SLOTS, labels: bool = False) -> Any:
    """The environments of an evaluation, with seeds that training never uses; `labels` as in
    `make_env`."""
    from agent.environments import env_maker
    from envs.make import cheap
    from envs.pool import EnvPool

    asked = {"yes": True, "no": False}
    return EnvPool(
        env_maker(config, labels),
        min(slots, episodes),
        config.seed,
        asked.get(config.env.processes, not cheap(config.task)),
        timeout=config.env.timeout,
        restarts_per_hour=config.env.restarts_per_hour,
        purpose="eval",
    )


def player(config: Config, pool: Any, weights: dict[str, Any]) -> Any:
    """An agent that acts in `pool` with `weights` by name, which may be more than acting needs.

    Raises ValueError for weights of another model. On one CPU thread, and with the products of the
    process beside training, so that both round alike.
    """
    import torch

    from agent.checkpoint import check_model
    from agent.published import acting_copy
    from agent.update import Update
    from configs.mkl import choose_products

    choose_products(config.products)
    torch.set_num_threads(1)
    whole = Update(config, pool.obs_space, pool.act_space)
    update = acting_copy(whole)
    needed = update.state_dict()
    check_model(weights, needed, whole.state_dict())
    update.load_state_dict({name: weights[name] for name in needed})
    return update


def measure(
    config: Config,
    weights: dict[str, Any],
    episodes: int,
    slots: int = SLOTS,
    forget: int = 0,
    watch: dict[str, Callable[..., None]] | None = None,
) -> dict[str, Any]:
    """Play `episodes` in each mode with `player`: mode -> episodes, mean, interval_95, length, of
    (scores.py), restarts, results. `watch`, by mode, as in `play`."""
    out: dict[str, Any] = {}
    for mode in MODES:
        pool = pool_of(config, episodes, slots)
        try:
            update = player(config, pool, weights)
            seen = watch[mode] if watch else None
            results = play(update, pool, episodes, config.seed, mode == "greedy", forget, seen)
        finally:
            pool.close()
        mean, half = interval([result["return"] for result in results])
        out[mode] = {
            "episodes": len(results),
            "mean": mean,
            "interval_95": half,
            "length": float(np.mean([result["length"] for result in results])),
            "of": normalised(config.task, mean),
            "restarts": pool.restarts,
            "results": results,
        }
    return out


def metrics_of(result: dict[str, Any]) -> dict[str, float]:
    """What a row of metrics holds of a `measure`."""
    out: dict[str, float] = {}
    for mode in MODES:
        row = result[mode]
        out[f"eval/{mode}/return"] = row["mean"]
        if row["interval_95"] is not None:
            out[f"eval/{mode}/interval_95"] = row["interval_95"]
        out[f"eval/{mode}/length"] = row["length"]
        out.update({f"eval/{mode}/of_{name}": value for name, value in row["of"].items()})
        out[f"eval/{mode}/restarts"] = row["restarts"]
    out["eval/episodes"] = result["greedy"]["episodes"]
    return out


def weights_file(folder: Path) -> Path:
    """Where a run's folder holds the weights of its last evaluation beside training."""
    return folder / "evaluation" / "weights.pt"


def serve(config: Config, pipe: Any) -> None:
    """The process beside training: a file of weights in, what `measure` gives or a text out."""
    from envs.slots import WORKER_ENVIRONMENT, leave_with_parent

    # The parent decides when to stop; its SIGTERM lets the pool be closed. Ctrl-C and
    # a closed terminal reach us too.
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    threading.Thread(target=leave_with_parent, daemon=True).start()
    os.nice(NICE)
    os.environ.update(WORKER_ENVIRONMENT)
    import torch

    with contextlib.suppress(EOFError, OSError):
        while True:
            file = pipe.recv()
            try:
                content = torch.load(file, map_location="cpu", weights_only=True)
                pipe.send(measure(config, content["weights"], content["episodes"]))
            except Exception:
                pipe.send(traceback.format_exc())


def logged(folder: Path) -> list[dict[str, Any]]:
    """The rows of evaluations beside training, in the order of their steps."""
    file = folder / "metrics.jsonl"
    rows = file.read_text().splitlines() if file.exists() else []
    found = [json.loads(row) for row in rows if '"eval/greedy/return"' in row]
    return sorted(found, key=lambda row: row["agent_step"])


def load_run(folder: Path, repeat: bool = False) -> tuple[Config, dict[str, Any]]:
    """Settings, and agent_step, update and weights: of the newest checkpoint, or with `repeat` of
    the last evaluation beside training. ValueError when there is none."""
    import torch

    from agent.checkpoint import Checkpoints
    from configs import load as configs

    if not (folder / "config.yaml").exists():
        raise ValueError(f"{folder} holds no run: config.yaml is missing")
    config = configs.load(folder / "config.yaml")
    if repeat:
        file = weights_file(folder)
        if not file.exists():
            raise ValueError(f"{folder} holds no evaluation to repeat: train with --eval.every")
        return config, torch.load(file, map_location="cpu", weights_only=True)
    published = Checkpoints(folder / "checkpoints").published()
    if not published:
        raise ValueError(f"{folder} holds no checkpoint yet")
    parts = Checkpoints.load(published[-1])
    return config, {
        "agent_step": parts["run"]["agent_step"],
        "update": parts["learner"]["updates"],
        "episodes": config.eval.episodes,
        "weights": parts["learner"]["model"],
    }


def evaluate(
    folder: Path,
    episodes: int = 0,
    slots: int = SLOTS,
    forget: int = 0,
    repeat: bool = False,
    videos: int = 0,
) -> dict[str, Any]:
    """Evaluate what `load_run` gives; 0 episodes: as many as an evaluation beside training. Writes
    `videos` films of each mode to `evaluation` in the folder."""
    config, run = load_run(folder, repeat)
    about = {"task": config.task, "core": config.core}
    about.update({key: run[key] for key in ("agent_step", "update")})
    about["forget"] = forget
    episodes = episodes or run["episodes"]
    films = None
    if videos:
        films = {mode: Film(shares(min(videos, episodes), min(slots, episodes))) for mode in MODES}
    result = measure(config, run["weights"], episodes, slots, forget, films)
    for mode, film in (films or {}).items():
        film.write(folder / "evaluation", mode, result[mode]["results"])
    return {**about, **result}


def show(result: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """The table, and how it compares with the evaluations `rows` of the run."""
    gone = f", without memory from step {result['forget']}" if result["forget"] else ""
    print(f"{result['task']}, core {result['core']}, step {result['agent_step']:,}{gone}")
    names = list(result["greedy"]["of"])
    head = "".join(f" {'of ' + name:>10}" for name in names)
    print(f"{'mode':8} {'episodes':>8} {'mean':>9} {'+- (95 %)':>10} {'length':>8}{head}")
    for mode in MODES:
        row = result[mode]
        half = "none" if row["interval_95"] is None else f"{row['interval_95']:.2f}"
        of = "".join(f" {row['of'][name]:10.3f}" for name in names)
        print(
            f"{mode:8} {row['episodes']:8} {row['mean']:9.2f} {half:>10} {row['length']:8.1f}{of}"
        )
        if row["restarts"]:
            print(f"  {row['restarts']} failures of environments: their episodes count as cut")
        for played in row["results"]:
            if "video" in played:
                print(f"  {played['video']}: return {played['return']:.2f}")
    if not rows or result["forget"]:
        return
    here = [row for row in rows if row["agent_step"] == result["agent_step"]]
    last = (here or rows)[-1]
    for mode in MODES:
        key = f"eval/{mode}/return"
        half = result[mode]["interval_95"]
        away = abs(last[key] - result[mode]["mean"])
        where = ", the same" if not away else ""
        if away and half is not None:
            where = f", {'inside' if away <= half else 'outside'} the interval"
        best = max(rows, key=lambda row: row[key])
        print(
            f"{mode}: logged {last[key]:.2f} at step {last['agent_step']:,}{where}; "
            f"highest logged {best[key]:.2f} at step {best['agent_step']:,}"
        )


def main(argv: list[str] | None = None) -> int:
    parser = command_line("agent.evaluate", __doc__)
    parser.add_argument("--logdir", type=Path, required=True, help="folder of the run")
    parser.add_argument("--episodes", type=int, help="episodes in each mode; as in the run")
    parser.add_argument("--slots", type=int, default=SLOTS, help="environments side by side")
    parser.add_argument(
        "--forget", type=int, default=0, help="step at which memory is made initial; 0: never"
    )
    parser.add_argument(
        "--repeat", action="store_true", help="weights of the last evaluation beside training"
    )
    parser.add_argument("--video", type=int, default=0, help="episodes to film, in each mode")
    args = parser.parse_args(argv)
    if args.slots < 1 or (args.episodes is not None and args.episodes < 1):
        parser.error("--episodes and --slots must be at least 1")
    if args.forget < 0:
        parser.error("--forget must be a step of the episode, or 0")
    if args.video < 0:
        parser.error("--video must be a number of episodes, or 0")
    asked = args.episodes or 0, args.slots, args.forget, args.repeat, args.video
    try:
        result = evaluate(args.logdir, *asked)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    show(result, logged(args.logdir))
    (args.logdir / "evaluation.json").write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    process.prepare()
    sys.exit(main())
