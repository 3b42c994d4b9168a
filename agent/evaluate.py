"""Evaluate a run: `python -m agent.evaluate --logdir logs/a --episodes 20`.

Exactly N episodes, spread evenly over environment slots, with seeds that training never uses;
greedy and sampled actions apart. Prints a table and writes evaluation.json in the run's folder.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

from configs import process


def shares(episodes: int, slots: int) -> list[int]:
    """How many episodes each slot plays: as even as possible, so short ones are not favoured."""
    return [episodes // slots + (slot < episodes % slots) for slot in range(slots)]


def interval(scores: list[float]) -> tuple[float, float | None]:
    """Mean and half width of its 95 % interval over episodes (Student's t); None for one."""
    mean = float(np.mean(scores))
    count = len(scores)
    if count < 2:
        return mean, None
    # Student's t at 97.5 % from the normal quantile (Cornish-Fisher): 0.3 % off at 10 episodes.
    z, n = 1.959964, count - 1
    t = z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
    return mean, t * float(np.std(scores, ddof=1)) / math.sqrt(count)


def play(
    update: Any, pool: Any, episodes: int, seed: int, greedy: bool, forget: int = 0
) -> list[dict[str, Any]]:
    """Results of exactly `episodes` episodes: return, length, slot, seed.

    forget: the step of each episode at which the memory is put back to its initial value; 0: none.
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


def evaluate(folder: Path, episodes: int, slots: int, forget: int = 0) -> dict[str, Any]:
    """Load the newest checkpoint of a run and play; ValueError when there is none."""
    import torch

    from agent.checkpoint import Checkpoints
    from agent.run import env_maker
    from agent.update import Update
    from configs import load as configs
    from envs.make import cheap
    from envs.pool import EnvPool

    if not (folder / "config.yaml").exists():
        raise ValueError(f"{folder} holds no run: config.yaml is missing")
    config = configs.load(folder / "config.yaml")
    published = Checkpoints(folder / "checkpoints").published()
    if not published:
        raise ValueError(f"{folder} holds no checkpoint yet")
    parts = Checkpoints.load(published[-1])
    out: dict[str, Any] = {
        "task": config.task,
        "core": config.core,
        "agent_step": parts["run"]["agent_step"],
        "update": parts["learner"]["updates"],
    }
    for mode in ("greedy", "sampled"):
        pool = EnvPool(
            env_maker(config),
            min(slots, episodes),
            config.seed,
            not cheap(config.task),
            purpose="eval",
        )
        try:
            update = Update(config, pool.obs_space, pool.act_space)
            update.load_state_dict(parts["learner"]["model"])
            torch.set_num_threads(max(1, config.threads))
            results = play(update, pool, episodes, config.seed, mode == "greedy", forget)
        finally:
            pool.close()
        mean, half = interval([result["return"] for result in results])
        out[mode] = {
            "episodes": len(results),
            "mean": mean,
            "interval_95": half,
            "length": float(np.mean([result["length"] for result in results])),
            "results": results,
        }
    return out


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("agent.evaluate", description=__doc__)
    parser.add_argument("--logdir", type=Path, required=True, help="folder of the run")
    parser.add_argument("--episodes", type=int, default=20, help="episodes in each mode")
    parser.add_argument("--slots", type=int, default=4, help="environments side by side")
    parser.add_argument(
        "--forget", type=int, default=0, help="step at which memory is made initial; 0: never"
    )
    args = parser.parse_args(argv)
    if args.episodes < 1 or args.slots < 1:
        parser.error("--episodes and --slots must be at least 1")
    try:
        result = evaluate(args.logdir, args.episodes, args.slots, args.forget)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{result['task']}, core {result['core']}, step {result['agent_step']:,}")
    print(f"{'mode':8} {'episodes':>8} {'mean':>9} {'+- (95 %)':>10} {'length':>8}")
    for mode in ("greedy", "sampled"):
        row = result[mode]
        half = "no interval" if row["interval_95"] is None else f"{row['interval_95']:.2f}"
        print(f"{mode:8} {row['episodes']:8} {row['mean']:9.2f} {half:>10} {row['length']:8.1f}")
    (args.logdir / "evaluation.json").write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    process.prepare()
    sys.exit(main())
