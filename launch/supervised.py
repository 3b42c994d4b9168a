"""One core, alone: trained with targets on a stream, then tested on longer ones.

Linear -> core -> Linear, through the contract of worldmodels/core.py only. A test stream of any
length is scanned piece by piece with the state carried over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agent.flops import Flops
from agent.optim import LaProp
from configs.schema import Config
from launch.streams import IGNORED, Piece, Task
from worldmodels.core import SequenceCore, State
from worldmodels.cores import make_core
from worldmodels.layers import Linear

# Of logits by `scan` from those by `step`: far more than float32 makes of as many steps.
LARGEST_GAP = 1e-2
CHECKED_STEPS = 16
# Times the root mean square of a leaf: noise that buries what the leaf held.
NOISE = 3.0
REPORT = 30.0  # seconds


class Probe(nn.Module):
    """inputs (B, T, I) to logits (B, T, classes); the embedding is `model.units` wide.

    Streams have no actions, but cores have an input for them: it is one number, always 0.
    """

    def __init__(self, config: Config, inputs: int, classes: int):
        super().__init__()
        self.embed = Linear(inputs, config.model.units)
        self.core = make_core(config, config.model.units, 1)
        self.classify = Linear(self.core.out, classes)

    def inputs(self, inputs: Tensor) -> Tensor:
        return F.pad(self.embed(inputs), (0, 1))

    def forward(self, piece: Piece, state: State, start: int) -> tuple[Tensor, State]:
        """Logits of a piece that begins at step `start`, and the state after it."""
        device, dtype = self.embed.weight.device, self.embed.weight.dtype
        age = np.broadcast_to(
            np.arange(start, start + piece.is_first.shape[1]), piece.is_first.shape
        )
        plan = self.core.plan(piece.is_first, age)
        u = self.inputs(torch.from_numpy(piece.inputs).to(device, dtype))
        is_first = torch.from_numpy(piece.is_first).to(device)
        h, _, state, _ = self.core.scan(u, is_first, state, plan)
        return self.classify(h), state


class Training(NamedTuple):
    """What a training took: FLOPs are those of torch's counter, forward and backward."""

    updates: int
    flops: int
    seconds: float
    loss: float


def train(
    probe: Probe,
    task: Task,
    config: Config,
    rng: np.random.Generator,
    *,
    rows: int,
    length: int,
    windows: int,
    updates: int,
    flops: float = 0,
    smoothing: float = 0,
    decay: float = 0,
    report: Callable[[str], None] = lambda line: None,
) -> Training:
    """`updates` updates, or fewer where more would exceed `flops` (0: no limit); at least one.

    A row is scanned in `windows` equal parts. The state goes from one to the next without its
    gradient, so with more than one nothing learns what to write for a later part. `smoothing` takes
    that share of every target and spreads it over all classes. Over the last share `decay` of the
    updates the learning rate falls to 0. `report` is told of the progress
    every half a minute.
    """
    if length % windows:
        raise ValueError(f"rows of {length} steps cannot be cut into {windows} equal windows")
    optimiser = LaProp(list(probe.named_parameters()), config.optim)

    def update() -> float:
        batch = task.train(rng, rows, length)
        count, state, total = (batch.targets != IGNORED).sum(), probe.core.initial(rows), 0.0
        for start in range(0, length, length // windows):
            piece = batch.cut(start, start + length // windows)
            if start:
                state = {key: value.detach() for key, value in state.items()}
            logits, state = probe(piece, state, start)
            targets = torch.from_numpy(piece.targets).to(logits.device).flatten()
            loss = F.cross_entropy(
                logits.flatten(0, 1),
                targets,
                ignore_index=IGNORED,
                reduction="sum",
                label_smoothing=smoothing,
            )
            (loss / count).backward()
            total += loss.item() / count
        optimiser.step()
        return total

    begin = time.process_time()
    with Flops() as counted:
        loss = update()
    each = counted.total
    count = int(max(1, min(updates, flops // each))) if flops else updates
    told = time.monotonic()
    rates = optimiser.rates
    for number in range(2, count + 1):
        left = (count + 1 - number) / max(1, decay * count)
        optimiser.rates = [rate * min(1.0, left) for rate in rates] if decay else rates
        loss = update()
        if time.monotonic() - told > REPORT:
            report(f"update {number:,} of {count:,}, loss {loss:.3g}")
            told = time.monotonic()
    return Training(count, count * each, time.process_time() - begin, loss)


class Score(NamedTuple):
    """Shares that are right: rows with every target right, last targets, targets."""

    row: float
    last: float
    each: float


def disturb(core: SequenceCore, how: str, query: int, step: int, state: State) -> State:
    """The state with its memory gone if `step` is the query; integer leaves (phases) are kept.

    `initial`: as an episode starts. `noise`: with normal noise, NOISE times the size of the leaf.
    `kept`: as it is, at the query too.
    """
    if how == "kept" or step != query:
        return state
    generator = torch.Generator().manual_seed(query)
    start = core.initial(len(next(iter(state.values()))))

    def gone(key: str, value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return value
        if how == "initial":
            return start[key]
        drawn = torch.randn(value.shape, generator=generator).to(value)
        return value + NOISE * value.square().mean().sqrt() * drawn

    return {key: gone(key, value) for key, value in state.items()}


@torch.no_grad()
def evaluate(
    probe: Probe, pieces: Iterable[Piece], change: Callable[[int, State], State] | None = None
) -> Score:
    """Scores of one stream, the state carried from piece to piece.

    `change(step, state)` gives the state that the piece which begins at `step` starts from.
    """
    state, step, right, valid = None, 0, 0, 0
    for piece in pieces:
        state = probe.core.initial(len(piece.inputs)) if state is None else state
        state = change(step, state) if change else state
        logits, state = probe(piece, state, step)
        step += piece.is_first.shape[1]
        same = logits.argmax(-1).cpu().numpy() == piece.targets
        right, valid = right + same.sum(1), valid + (piece.targets != IGNORED).sum(1)
    return Score(
        row=float((right == valid).mean()),
        last=float(same[:, -1].mean()),
        each=float(right.sum() / valid.sum()),
    )


class Drift(NamedTuple):
    """From one memory to the next, means over rows: cosine of both, ratio of their norms, and the
    norm of their difference over that of the first (the left side of RATE's theorem 1)."""

    cosine: float
    ratio: float
    change: float


@torch.no_grad()
def drift(probe: Probe, pieces: Iterable[Piece], segment: int) -> list[Drift]:
    """How the memory changes over each `segment` of a stream, but for the first, which writes one.

    Pieces are segments; shorter ones, which write nothing, are left out.
    """
    state, step, out = None, 0, []
    for piece in pieces:
        state = probe.core.initial(len(piece.inputs)) if state is None else state
        before = state["memory"].flatten(1)
        _, state = probe(piece, state, step)
        after = state["memory"].flatten(1)
        length = piece.is_first.shape[1]
        if step and length == segment:
            size = before.norm(dim=1)
            cosine = F.cosine_similarity(before, after)
            parts = cosine, after.norm(dim=1) / size, (after - before).norm(dim=1) / size
            out.append(Drift(*(float(part.mean()) for part in parts)))
        step += length
    return out


@torch.no_grad()
def check_against_step(probe: Probe, piece: Piece) -> float:
    """Largest gap between the logits of the first steps by `scan` and by `step`.

    Raises RuntimeError where it is no rounding: scores by `scan` would not be those of acting.
    """
    piece = piece.cut(0, CHECKED_STEPS)
    state = probe.core.initial(len(piece.inputs))
    scanned, _ = probe(piece, state, 0)
    device, dtype = scanned.device, probe.embed.weight.dtype
    u = probe.inputs(torch.from_numpy(piece.inputs).to(device, dtype))
    first = torch.from_numpy(piece.is_first).to(device)
    outputs = []
    for now, is_first in zip(u.unbind(1), first.unbind(1), strict=True):
        h, _, state = probe.core.step(now, is_first, state)
        outputs.append(h)
    gap = float((probe.classify(torch.stack(outputs, 1)) - scanned).abs().max())
    if gap > LARGEST_GAP:
        raise RuntimeError(f"logits by scan and by step differ by {gap:.2g}")
    return gap
