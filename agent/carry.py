"""Where the carry ahead of a batch comes from: `replay.start zero | stored | stream`.

zero     every row starts from the initial state (R2I)
stored   a row starts at a state that the replay holds: the actor's, made while acting (the stored
         state of R2D2, Kapturowski et al. 2019), until a window that ends there has been trained on
stream   a row goes on where its row of the batch before ended (replay/rows.py)

All three are looked up when a batch is trained on, not when it is drawn: what is carried is then as
new as can be, and depends on the order of updates alone. A row without a carry starts from the
initial state, its age set; the gradient never leaves the batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from agent.actor import Actor
from configs.schema import Config
from replay.replay import Replay
from replay.states import States
from worldmodels.world_model import Carry, WorldModel, tree_map

Windows = list[tuple[int, int]]  # (stream, first step)


class Packing:
    """Carries of one model as rows of bytes, bit for bit, and back."""

    def __init__(self, world: WorldModel):
        self.like = tree_map(lambda leaf: leaf[0].detach(), world.initial(1))
        self.device = world.bins.device
        self.words = 0

        def count(leaf: Tensor) -> None:
            assert leaf.dtype in (torch.float32, torch.int32), leaf.dtype
            self.words += leaf.numel()

        tree_map(count, self.like)

    @property
    def bytes(self) -> int:
        """Bytes of one row."""
        return 4 * self.words

    def pack(self, carry: Carry) -> list[bytes]:
        """Rows of a carry (n, ...), with one copy from the device."""
        parts: list[Tensor] = []

        def put(like: Tensor, leaf: Tensor) -> None:
            parts.append(leaf.to(like.dtype).reshape(len(leaf), -1).view(torch.int32))

        tree_map(put, self.like, carry)  # in the order of `like`: that of a carry may be another
        return [row.tobytes() for row in torch.cat(parts, 1).cpu().numpy()]

    def unpack(self, rows: list[bytes]) -> Carry:
        """The carry (n, ...) of such rows, on the device of the model."""
        data = np.frombuffer(bytearray(b"".join(rows)), np.int32).reshape(len(rows), self.words)
        words, done = torch.from_numpy(data).to(self.device), 0

        def take(like: Tensor) -> Tensor:
            nonlocal done
            part = words[:, done : done + like.numel()].contiguous().view(like.dtype)
            done += like.numel()
            return part.unflatten(1, like.shape) if like.dim() else part[:, 0]

        return tree_map(take, self.like)


class Fresh:
    """`zero`, and what the others share. `carried` is the share of rows that had a carry."""

    def __init__(self) -> None:
        self.carried: list[float] = []

    def before(
        self, obs: dict[str, np.ndarray], ids: np.ndarray, actor: Actor, update: int
    ) -> dict[int, tuple[int, bytes]]:
        """What `Replay.add` shall keep of the carries ahead of the steps `obs` of the slots `ids`;
        `update` is the number of updates in the weights that act."""
        return {}

    def ahead(self, windows: Windows) -> dict[str, Any]:
        """What `Update.carry` reads: `carry` and `carried` (B,), or nothing."""
        return {}

    def after(self, windows: Windows, length: int, carry: Carry | None, update: int) -> None:
        """Take the carry behind windows of `length`, made by weights after `update` updates."""

    def stats(self) -> dict[str, float]:
        share = {"replay/carried": float(np.mean(self.carried))} if self.carried else {}
        self.carried.clear()
        return share

    def state(self) -> Any:
        """What a checkpoint holds besides the state of the replay."""
        return None

    def restore(self, state: Any) -> None:
        """Back to `state`."""


class Stored(Fresh):
    def __init__(self, states: States, world: WorldModel):
        super().__init__()
        self.states, self.packing = states, Packing(world)

    def before(
        self, obs: dict[str, np.ndarray], ids: np.ndarray, actor: Actor, update: int
    ) -> dict[int, tuple[int, bytes]]:
        age = obs["age"]
        rows = np.flatnonzero((age % self.states.every == 0) & (age > 0))
        if not len(rows):
            return {}
        slots = torch.as_tensor(ids[rows], device=self.packing.device)
        packed = self.packing.pack(tree_map(lambda leaf: leaf[slots], actor.carry))
        return {row: (update, state) for row, state in zip(rows.tolist(), packed, strict=True)}

    def ahead(self, windows: Windows) -> dict[str, Any]:
        found = [self.states.get(*window) for window in windows]
        known = [state is not None for state in found]
        self.carried.append(float(np.mean(known)))
        nothing = bytes(self.packing.bytes)
        carry = self.packing.unpack([state[1] if state else nothing for state in found])
        return {"carry": carry, "carried": torch.tensor(known, device=self.packing.device)}

    def after(self, windows: Windows, length: int, carry: Carry | None, update: int) -> None:
        if carry is None:
            return
        for (stream, start), state in zip(windows, self.packing.pack(carry), strict=True):
            self.states.put(stream, start + length, update, state)


class Streamed(Fresh):
    def __init__(self, world: WorldModel):
        super().__init__()
        self.world = world
        self.carry: Carry | None = None  # of the rows of the last batch, if that was finite
        self.ends: Windows = []  # what lies ahead of these steps
        self.since: list[int] = []  # windows trained on since the row began or jumped

    def ahead(self, windows: Windows) -> dict[str, Any]:
        known, carry = [False] * len(windows), self.carry
        if carry is None:  # a batch has the same tensors always: compiled code is for these
            carry = tree_map(Tensor.detach, self.world.initial(len(windows)))
        else:
            known = [window == end for window, end in zip(windows, self.ends, strict=True)]
        before = self.since or [0] * len(windows)
        self.since = [n * goes_on for n, goes_on in zip(before, known, strict=True)]
        self.carried.append(float(np.mean(known)))
        return {"carry": carry, "carried": torch.tensor(known, device=self.world.bins.device)}

    def after(self, windows: Windows, length: int, carry: Carry | None, update: int) -> None:
        self.carry = carry
        self.ends = [(stream, start + length) for stream, start in windows]
        self.since = [n + 1 for n in self.since]

    def state(self) -> Any:
        ends = [list(end) for end in self.ends]
        return {"carry": self.carry, "ends": ends, "since": self.since}

    def restore(self, state: Any) -> None:
        carry = state["carry"]
        self.carry = carry and tree_map(lambda leaf: leaf.to(self.world.bins.device), carry)
        self.ends = [(stream, step) for stream, step in state["ends"]]
        self.since = list(state["since"])


def spacing(config: Config, segment: int) -> int:
    """Steps between two states of `replay.start stored`, for a core with such segments.

    Raises ValueError where windows would not start and end at states, or states not at the borders
    of segments.
    """
    length = config.batch.length
    every = config.replay.state_every or length
    if length % every or every % segment:
        raise ValueError(
            f"--replay.start stored: replay.state_every ({every}) must divide batch.length "
            f"({length}) and be a multiple of the segment of {config.core} ({segment})"
        )
    return every


def make_carry(config: Config, replay: Replay, world: WorldModel) -> Fresh:
    if replay.states:
        return Stored(replay.states, world)
    return Streamed(world) if config.replay.start == "stream" else Fresh()
