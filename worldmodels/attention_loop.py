"""Window attention of one query after another in a loop over time, when keys depend on outputs.

Plain operators would copy the window at every step, and the gradient of a slice of all keys would
be as large as all keys, T times. Here the keys of a row lie in one buffer: every step reads its
window in place and writes its own key, and the backward adds to one gradient of that buffer, which
travels from step to step.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from worldmodels.attention import Pair, Window, clean
from worldmodels.layers import without_autocast


class Attend(torch.autograd.Function):
    """One step of `LoopWindow`; its second output is the buffer, for the next step."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, bias: Tensor, buffer: Tensor, start: int
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        rows, (batch, heads, window) = buffer.detach(), bias.shape
        stop = start + window
        parts = value.to(rows.dtype).unflatten(-1, (-1, heads, rows.shape[-1]))
        ctx.writes = parts.shape[1] == 3  # query, key and value
        if ctx.writes:
            # A weight of 0 on a NaN of another episode would be a NaN.
            own = parts[:, 1:].nan_to_num(0.0, 0.0, 0.0)
            rows[:, :, stop - 1] = own.transpose(0, 1).flatten(1, 2)
            ctx.mark_dirty(buffer)
        query = (parts[:, 0] * rows.shape[-1] ** -0.5).view(batch * heads, 1, -1)
        keys, values = rows[:, :, start:stop].unbind()
        with without_autocast(value.device.type):
            scores = torch.baddbmm(bias.flatten(0, 1).unsqueeze(1), query, keys.transpose(1, 2))
            weights = torch.softmax(scores, -1)
            mixed = torch.bmm(weights, values)
        # `rows` is not saved as autograd does: later steps write to it, but past this window.
        ctx.rows, ctx.start, ctx.shape = rows, start, bias.shape
        ctx.save_for_backward(query, weights)
        return mixed.view(batch, -1), buffer

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor | None, total: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor, None]:
        query, weights = ctx.saved_tensors
        rows, start, (batch, heads, window) = ctx.rows, ctx.start, ctx.shape
        stop = start + window
        # `total` has no other reader: the next step made it, or the unbind of `LoopWindow.pair`.
        total = torch.zeros_like(rows) if total is None else total
        into_query, into_bias = torch.zeros_like(query), None
        if grad is not None:
            grad = grad.reshape(query.shape)
            (keys, values), (into_keys, into_values) = (
                part[:, :, start:stop].unbind() for part in (rows, total)
            )
            into_weights = torch.bmm(grad, values.transpose(1, 2))
            scores = torch._softmax_backward_data(into_weights, weights, -1, weights.dtype)
            into_query = torch.bmm(scores, keys).mul_(query.shape[-1] ** -0.5)
            into_keys.addcmul_(scores.transpose(1, 2), query)
            into_values.addcmul_(weights.transpose(1, 2), grad)
            into_bias = scores.view(ctx.shape)
        into_value = into_query.view(batch, -1)
        if ctx.writes:
            own = total[:, :, stop - 1].unflatten(1, (batch, heads)).transpose(0, 1)
            into_value = torch.cat([into_value, own.flatten(1)], 1)
        return into_value, into_bias, total, None


class LoopWindow:
    """A `Window` in a loop: `loop(value)` is the attention of the next of T steps.

    value (B, D) is a query, or (B, 3 D) a query, a key and a value of which the last two are
    appended first; the result is (B, D). Computes in the dtype of the bias. Make one for each loop.
    """

    def __init__(self, window: Window, pair: Pair, reach: Tensor):
        """pair: keys and values (B, W-1 + T, H, d), or the W-1 before the loop; reach (B, T)."""
        length, size = reach.shape[1], window.window
        self.heads = window.heads
        distance = torch.arange(size - 1, -1, -1, device=reach.device)
        seen = distance <= reach.T[..., None, None]  # (T, B, 1, W)
        self.biases = iter(torch.where(seen, window.bias.flip(-1), -torch.inf).unbind())
        rows = torch.stack([clean(part).to(window.bias.dtype) for part in pair])
        rows = rows.transpose(2, 3).flatten(1, 2)  # (2, B*H, W-1 or W-1 + T, d)
        self.buffer = F.pad(rows, (0, 0, 0, length + size - 1 - rows.shape[2]))
        self.taken = 0

    def __call__(self, value: Tensor) -> Tensor:
        mixed, self.buffer = Attend.apply(value, next(self.biases), self.buffer, self.taken)
        self.taken += 1
        return mixed

    def pair(self) -> Pair:
        """All keys and values (B, W-1 + T, H, d), after the loop."""
        keys, values = self.buffer.unflatten(1, (-1, self.heads)).transpose(2, 3).unbind()
        return keys, values
