"""Matrix products of a loop over time, with one weight gradient for all of its steps.

A plain layer in a loop of T steps forms T gradients as large as its weight and sums them, which
for a few rows is most of the traffic of the backward. Here every step keeps its input and the
gradient of its output, and the node that every step's weight came from forms one product of both.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Of each step: the number of the backward pass, the input and the gradient of the output.
Pairs = list[tuple[int, Tensor, Tensor]]


def multiply(value: Tensor, weight: Tensor) -> Tensor:
    """(..., I) times weight (O, I), or rows (N, I) block by block times (K, I/K, O): (..., O) or
    (N, K, O)."""
    if weight.dim() == 2:
        return F.linear(value, weight)
    split = value.unflatten(-1, weight.shape[:2]).transpose(0, 1)
    return torch.bmm(split, weight).transpose(0, 1)


class Source(torch.autograd.Function):
    """The weight as the steps see it; its gradient is formed after the last of them."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, pairs: Pairs) -> Tensor:
        ctx.pairs = pairs
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, _: Tensor | None) -> tuple[Tensor | None, None]:
        if not ctx.pairs:
            return None, None
        _, *parts = zip(*ctx.pairs, strict=True)
        values, grads = (torch.cat(part) for part in parts)
        ctx.pairs.clear()
        if grads.dim() == 2:
            return grads.T @ values, None
        blocks = grads.shape[1]
        split = values.unflatten(-1, (blocks, -1)).permute(1, 2, 0)
        return torch.bmm(split, grads.transpose(0, 1)), None


class Step(torch.autograd.Function):
    """`multiply` whose backward leaves the weight's gradient to `Source`."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, pairs: Pairs) -> Tensor:
        ctx.pairs = pairs
        ctx.save_for_backward(value, weight)
        return multiply(value, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        value, weight = ctx.saved_tensors
        plain = weight.dim() == 2
        if ctx.needs_input_grad[1]:
            now = torch._C._current_graph_task_id()
            if ctx.pairs and ctx.pairs[0][0] != now:
                ctx.pairs.clear()  # of a pass for the inputs' gradients alone
            rows = (value.flatten(0, -2), grad.flatten(0, -2)) if plain else (value, grad)
            ctx.pairs.append((now, *rows))
        if plain:
            return grad @ weight, None, None
        back = torch.bmm(grad.transpose(0, 1), weight.transpose(1, 2))
        return back.transpose(0, 1).flatten(1), None, None


class LoopProduct:
    """`product(value)` is `multiply(value, weight)`; make one for each run of a loop."""

    def __init__(self, weight: Tensor):
        """weight (O, I) or blocks (K, I/K, O); under autocast it is cast here, once."""
        kind = weight.device.type
        if torch.is_autocast_enabled(kind):
            weight = weight.to(torch.get_autocast_dtype(kind))
        self.pairs: Pairs = []
        self.weight = Source.apply(weight, self.pairs)

    def __call__(self, value: Tensor) -> Tensor:
        return Step.apply(value.to(self.weight.dtype), self.weight, self.pairs)
