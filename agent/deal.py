"""A run in parts: `join` the states of its ranks to that of one run, `deal` it out again.

A checkpoint says nothing of ranks. Slots of environments and streams of the replay are numbered
through, rank after rank, so a run may go on with any number of ranks that divides them: each takes
its slots with their open episodes, and their streams with what is stored of them. Numbers that
count, such as steps, are sums; rank 0 has all of them when it is dealt out.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from replay.loader import Loader
from worldmodels.world_model import tree_map

SUMS = ("env/restarts", "usage/ram_gb", "usage/workers_ram_gb")
COUNTS = ("agent_step", "env_step")


def mixed(parts: list[Any]) -> list[Any]:
    """One list of several, each in its own order, taken from evenly."""
    places = [(np.arange(len(part)) + 0.5) / max(1, len(part)) for part in parts]
    items = [item for part in parts for item in part]
    return [items[index] for index in np.argsort(np.concatenate(places), kind="stable")]


def flat(parts: list[Any]) -> list[Any]:
    return [item for part in parts for item in part]


def join(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The state of a run from those of its ranks (`Loop.state`), in their order."""
    out = {**parts[0], "ranks": len(parts), "ready": [part["fill_step"] for part in parts]}
    if len(parts) == 1:
        return out
    out.update({key: sum(part[key] for part in parts) for key in COUNTS})
    out["fill_step"] = None if None in out["ready"] else sum(out["ready"])
    for key in ("returns", "lengths"):
        out[key] = np.concatenate([part[key] for part in parts])
    actors, pools, replays = ([part[key] for part in parts] for key in ("actor", "pool", "replay"))
    out["actor"] = {
        "carry": tree_map(lambda *leaves: torch.cat(leaves), *(a["carry"] for a in actors)),
        "tick": max(actor["tick"] for actor in actors),
    }
    tick = max(pool["tick"] for pool in pools)
    out["pool"] = {
        "tick": tick,
        "restarts": sum(pool["restarts"] for pool in pools),
        # Ranks tick on their own: what counts is how many ticks a slot still waits.
        "due": [due + tick - pool["tick"] for pool in pools for due in pool["due"]],
        **{key: flat([pool[key] for pool in pools]) for key in ("episode", "actions", "last")},
    }
    each = len(replays[0]["count"])
    total = each * len(parts)
    out["replay"] = {
        **replays[0],
        **{
            key: flat([replay[key] for replay in replays])
            for key in ("count", "first", "next_fresh", "tails")
        },
        "order": np.array(
            mixed([np.asarray(r["order"]) + n * each for n, r in enumerate(replays)]), np.int32
        ),
        "fresh": mixed([[[s + n * each, t] for s, t in r["fresh"]] for n, r in enumerate(replays)]),
    }
    waiting = [part["loader"]["waiting"] for part in parts]
    out["loader"] = {
        "waiting": [
            [same[0][0], [
                # The streams of a source lie behind those of all ranks.
                [s + n * each if s < each else s - each + total, t]
                for n, (_, pairs) in enumerate(same) for s, t in pairs
            ]]
            for same in zip(*waiting, strict=True)
        ]
    }  # fmt: skip
    return out


def deal(run: dict[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """The part of `rank` among `ranks`, which divide the number of slots."""
    total = len(run["replay"]["count"])
    each = total // ranks
    own = slice(rank * each, (rank + 1) * each)
    same = run.get("ranks", 1) == ranks
    pool, replay = run["pool"], run["replay"]
    ready = run["ready"][rank] if same and "ready" in run else run["fill_step"]
    if not same and ready is not None and rank:
        ready = 0
    order = np.asarray(replay["order"])
    return {
        **run,
        **{key: run[key] if rank == 0 else 0 for key in COUNTS},
        "fill_step": ready,
        "returns": run["returns"][own],
        "lengths": run["lengths"][own],
        "actor": {**run["actor"], "carry": tree_map(lambda leaf: leaf[own], run["actor"]["carry"])},
        "pool": {
            "tick": pool["tick"],
            "restarts": pool["restarts"] if rank == 0 else 0,
            **{key: pool[key][own] for key in ("due", "episode", "actions", "last")},
        },
        "replay": {
            **replay,
            **{key: replay[key][own] for key in ("count", "first", "next_fresh", "tails")},
            "order": order[order // each == rank] - rank * each,
            "fresh": [[s - rank * each, t] for s, t in replay["fresh"] if s // each == rank],
        },
        # Windows drawn from other shards cannot be read: with another number of ranks what was
        # waiting is drawn anew.
        "loader": {
            **run["loader"],
            "waiting": rows(run["loader"]["waiting"], rank, ranks, total) if same else [],
        },
    }


def rows(waiting: list[Any], rank: int, ranks: int, total: int) -> list[Any]:
    """The rows of this rank in the batches that wait."""
    each = total // ranks
    out = []
    for update, pairs in waiting:
        size = len(pairs) // ranks
        mine = pairs[rank * size : (rank + 1) * size]
        local = [[s - rank * each if s < total else s - total + each, t] for s, t in mine]
        out.append([update, local])
    return out


def needs(run: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint needs of the replay: first blocks, states and windows of all streams."""
    return {
        **{key: run["replay"].get(key, []) for key in ("first", "states")},
        "windows": Loader.positions(run["loader"]),
    }


def needed(
    run: dict[str, Any], rank: int, ranks: int
) -> tuple[list[int], list[Any], list[tuple[int, int]]]:
    """Of the streams of this rank, what a kept checkpoint needs: first blocks, states, windows.

    run: what `needs` gave.
    """
    each = len(run["first"]) // ranks
    first, end = rank * each, (rank + 1) * each
    windows = [(s - first, t) for s, t in run["windows"] if first <= s < end or ranks == 1]
    return run["first"][first:end], run["states"], windows


def joined_row(rows: list[dict[str, float]]) -> dict[str, float]:
    """One row of metrics from those of all ranks: means, but for what adds up or bounds."""
    if len(rows) == 1:
        return rows[0]
    out = {}
    for key in dict.fromkeys(flat([list(row) for row in rows])):
        values = [row[key] for row in rows if key in row and math.isfinite(row[key])]
        if not values:
            out[key] = math.nan
        elif key in SUMS or (key.startswith("replay/") and key != "replay/reward"):
            out[key] = sum(values)
        elif key.endswith("_max") or key == "usage/vram_gb":
            out[key] = max(values)
        elif key.endswith("_free_gb"):
            out[key] = min(values)
        else:
            out[key] = sum(values) / len(values)
    return out
