"""Diagnostic `memory`: what cores with an external memory read, what they write, and when.

Episodes are worked off step by step from their beginning. A read is the share of a step's
attention that goes to each slot (`elmur`) or memory token (`rate`, where steps share the rest); a
write is the share of each step of a segment in what the segment wrote. Both are means over heads
and episodes: segments follow the episode's steps, so all episodes write at the same ones. `changed`
says how far each slot or token moved at each step, which is when and where the core wrote.

Weights are those that the core's own attention computes, watched from outside.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from agent.diagnostics.recording import Recording
from worldmodels.core import SequenceCore
from worldmodels.elmur import Elmur
from worldmodels.rate import Rate

ROWS, LENGTH = 16, 512
ROUNDS = 3  # times that every slot is written, where episodes are long enough

Maps = dict[str, Tensor]  # reads (T, L, M), writes (T, L), changed (T, L', M), by `maps_of`


def watching(call: Callable[..., Any], into: list[Any]) -> Callable[..., Any]:
    """`call`, whose results are kept in `into` too."""

    def run(*args: Any, **kwargs: Any) -> Any:
        out = call(*args, **kwargs)
        into.append(out)
        return out

    return run


@contextlib.contextmanager
def watched(owners: list[Any], name: str) -> Iterator[list[Any]]:
    """A list of what the method `name` of each of `owners` returns within this context."""
    kept: list[Any] = []
    with contextlib.ExitStack() as stack:
        for owner in owners:
            stack.enter_context(patch.object(owner, name, watching(getattr(owner, name), kept)))
        yield kept


def states(core: SequenceCore, u: Tensor, is_first: Tensor) -> Iterator[tuple[int, Any, Any]]:
    """t and the states before and after each step of u (B, T, U)."""
    state = core.initial(len(u))
    for t in range(u.shape[1]):
        before = state
        _, _, state = core.step(u[:, t], is_first[:, t], state)
        yield t, before, state


def moved(before: Tensor, after: Tensor) -> Tensor:
    """Mean over episodes of the distance (..., M) of vectors (B, ..., M, D)."""
    return (after - before).norm(dim=-1).mean(0)


def elmur_maps(core: Elmur, u: Tensor, is_first: Tensor) -> Maps:
    """Writes: the softmax over a segment's tokens, from the sums that the slot in turn gathers."""
    reads, changed, totals = [], [], []
    with (
        watched([layer.read for layer in core.layers], "weights") as read,
        watched(list(core.memories), "add") as added,
    ):
        for _, before, after in states(core, u, is_first):
            reads.append(torch.stack([weights[:, 0].mean((0, 1)) for weights in read]))
            totals.append(torch.stack([total for _, total in added]))  # (L', B, E, H)
            changed.append(moved(before["memory"], after["memory"]))
            read.clear()
            added.clear()
    total, writes = torch.stack(totals).double(), []
    segment = core.segment
    for start in range(0, len(total) - segment + 1, segment):
        upto = (total[start : start + segment] - total[start + segment - 1]).exp()
        share = torch.cat([upto[:1], upto[1:] - upto[:-1]])
        writes.append(share.mean((2, 3, 4)))
    left = total.new_full((len(total) % segment, *total.shape[1:2]), float("nan"))
    return {
        "reads": torch.stack(reads),
        "writes": torch.cat([*writes, left]).float(),
        "changed": torch.stack(changed),
    }


def rate_maps(core: Rate, u: Tensor, is_first: Tensor) -> Maps:
    """Writes: of the trailing tokens' attention, what goes to each step of the segment."""
    lead, segment = core.tokens, core.segment
    reads, changed, writes = [], [], []
    with watched([block.attention for block in core.blocks], "weights") as kept:
        for t, before, after in states(core, u, is_first):
            weights = [value[:, 0].mean((0, 1)) for value in kept]  # (q, keys)
            reads.append(torch.stack([value[lead, :lead] for value in weights]))
            changed.append(moved(before["memory"], after["memory"])[None])
            if t % segment == segment - 1:
                end = lead + core.kept + 1
                shares = [v[lead + 1 :, end - segment : end].mean(0) for v in weights]
                writes.append(torch.stack(shares, 1))
            kept.clear()
    left = u.new_full((u.shape[1] % segment, len(core.blocks)), float("nan"))
    return {
        "reads": torch.stack(reads),
        "writes": torch.cat([*writes, left]),
        "changed": torch.stack(changed),
    }


@torch.no_grad()
def maps_of(core: SequenceCore, u: Tensor, is_first: Tensor) -> Maps:
    """reads (T, layers, M) and writes (T, layers), NaN in a segment that is not complete, and
    changed (T, memories, M), of steps (B, T, U) from the beginning of episodes."""
    return (elmur_maps if isinstance(core, Elmur) else rate_maps)(core, u, is_first)


def measure(run: Recording) -> dict[str, Any]:
    core = run.update.world.core
    places = core.memories[0].slots if isinstance(core, Elmur) else core.tokens
    rounds = ROUNDS * core.segment * (places if isinstance(core, Elmur) else 4)
    length = min(LENGTH, rounds, run.typical())
    fits = [episode for episode in run.episodes if len(episode) >= length]
    wanted = {"z", "action", "is_first"}
    batch = run.batch(
        [{key: episode.steps[key][:length] for key in wanted} for episode in fits[:ROWS]]
    )
    maps = maps_of(core, run.core_inputs(batch), batch["is_first"])
    return {
        "about": "by step of the episode, means over heads and episodes; "
        "reads[layer][place][step]: share of the attention of the step that goes to this slot "
        "or memory token; "
        "writes[layer][step]: share of the step in what its segment wrote; "
        "changed[memory][place][step]: how far the slot or token moved with the step",
        "place": "slot" if isinstance(core, Elmur) else "memory token",
        "segment": core.segment,
        "episodes": len(batch["is_first"]),
        "reads": maps["reads"].permute(1, 2, 0).tolist(),
        "writes": maps["writes"].T.tolist(),
        "changed": maps["changed"].permute(1, 2, 0).tolist(),
    }


def array(values: Any) -> np.ndarray:
    """Nested lists in which null is not a number."""
    return np.array(values, float)


def plot(figure: Any, result: dict[str, Any]) -> None:
    reads, writes, changed = (array(result[key]) for key in ("reads", "writes", "changed"))
    figure.set_size_inches(9, 1.5 * (len(reads) + len(changed)) + 1.8)
    panels = figure.subplots(len(reads) + len(changed) + 1, 1, sharex=True)
    names = [f"read by layer {n}" for n in range(len(reads))]
    names += [f"memory {n} changed" for n in range(len(changed))] + ["writes, by layer"]
    for axes, name, values in zip(panels, names, (*reads, *changed, writes), strict=True):
        image = axes.imshow(values, aspect="auto", interpolation="nearest", origin="lower")
        figure.colorbar(image, ax=axes, pad=0.01)
        axes.set_title(name, fontsize="medium")
        axes.set_ylabel("layer" if name.startswith("writes") else result["place"])
        axes.yaxis.get_major_locator().set_params(integer=True)
    panels[-1].set_xlabel(f"step of the episode (segments of {result['segment']})")


def lines(result: dict[str, Any]) -> list[str]:
    reads, writes = array(result["reads"]), array(result["writes"])
    out = [f"{'layer':>5} {'on memory':>10} {'largest place':>14} {'last quarter of segments':>25}"]
    quarter = np.arange(writes.shape[1]) % result["segment"] >= 0.75 * result["segment"]
    segments = max(1, writes.shape[1] // result["segment"])
    for n, layer in enumerate(reads):
        late = np.nansum(writes[min(n, len(writes) - 1), quarter]) / segments
        out.append(f"{n:5} {layer.sum(0).mean():10.3f} {layer.mean(1).max():14.3f} {late:25.3f}")
    return out
