"""The contract of a sequence core: h, x, state = core(u, is_first, state).

One set of weights, three faces: `step` (acting, and any loop over time), `scan` (training, all T
at once) and `imagine` (rolls from every (b, t) of a scan). `scan` equals `step` repeated; the tests
in tests/worldmodels/test_core_contract.py run over every core. See README.md, "Add a core".

State is a dict of tensors whose first axis is the batch, float32 but for counters, which are int32.
x is the hidden state as the policy reads it, a flat (..., X) tensor, after the input of its step
has been absorbed.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

State = dict[str, Tensor]


class Roll:
    """A batch of imagined continuations: `step(u)` takes (N, U), returns h (N, D) and x (N, X)."""

    def __init__(self, core: SequenceCore, state: State, prepared: Any = None):
        self.core, self.state, self.prepared = core, state, prepared

    def step(self, u: Tensor) -> tuple[Tensor, Tensor]:
        h, x, self.state = self.core.step(u, None, self.state, self.prepared)
        return h, x


class SequenceCore(nn.Module):
    """Base of every core. `out` is the width D of h, `hidden` the width X of x.

    A core whose context is its state at t, one (B, T, ...) tensor a leaf, inherits `imagine`; any
    other core overrides it and sets `markov` to False (the recurrent posterior then refuses it).
    `grain` is the number of steps that `scan` works on at a time: its cost is linear in them.
    `x_is_h`: x is h itself, so that a policy which reads h has read it.
    `segment` is the number of steps of an episode after which a core that works in segments begins
    anew; a state within one is as good as any.
    """

    out: int
    hidden: int
    markov = True
    x_is_h = False
    grain = 1
    segment = 1

    def initial(self, batch: int, age: Tensor | None = None) -> State:
        """State before an episode's first step; `age` (B,) sets phases and positions only."""
        raise NotImplementedError

    def prepare(self) -> Any:
        """What depends on weights alone and is shared by many steps; None when nothing does."""
        return None

    def step(
        self, u: Tensor, is_first: Tensor | None, state: State, prepared: Any = None
    ) -> tuple[Tensor, Tensor, State]:
        """One step of u (B, U): h (B, D), x (B, X) and the next state.

        Where is_first (B,) is true the state is replaced by the initial one, never multiplied.
        """
        raise NotImplementedError

    def plan(self, is_first: Any, age: Any) -> Any:
        """How rows are cut into segments, in numpy, made by the batch loader; None: not at all."""
        return None

    def scan(
        self, u: Tensor, is_first: Tensor, state: State, plan: Any = None
    ) -> tuple[Tensor, Tensor, State, State]:
        """T steps of u (B, T, U): h (B, T, D), x (B, T, X), the last state and the context.

        `plan` is that of these rows; without one the device may be waited for.
        """
        raise NotImplementedError

    def imagine(self, context: State, last: int | None = None) -> Any:
        """Rolls from every (b, t), row-major, or from the `last` steps of each row: a `Roll`.

        The context is detached; what the roll itself computes keeps its graph.
        """
        first = 0 if last is None else -last
        state = {key: value[:, first:].detach().flatten(0, 1) for key, value in context.items()}
        return Roll(self, state, self.prepare())

    def flops(self, batch: int, length: int) -> int:
        """Forward FLOPs of `scan` (two for a multiply-add), as torch's counter counts them."""
        raise NotImplementedError
