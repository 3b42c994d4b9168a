"""Linear, norm and MLP blocks with the initialisation of DreamerV3.

Norms compute in float32 whatever the autocast dtype. Weights are drawn from a normal truncated at
two standard deviations, scaled to unit output variance (DreamerV3 code, `nets.py`).
"""

from __future__ import annotations

import contextlib
import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NORM_EPS = 1e-4
# A normal cut at two standard deviations has a standard deviation of 0.8796: this undoes it.
TRUNCATION = 1.1368


def without_autocast(kind: str) -> Any:
    """Autocast off on devices of a `kind`, where it is on: to leave any context of it empties the
    cache of casts, which belongs to all threads."""
    on = torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if on else contextlib.nullcontext()


def init_weight(weight: Tensor, fan_in: int, scale: float = 1.0) -> None:
    """Fill `weight` in place; `scale` 0 gives zeros (reward and value outputs)."""
    std = TRUNCATION * scale * math.sqrt(1 / fan_in)
    if std == 0:
        nn.init.zeros_(weight)
    else:
        nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


class Linear(nn.Linear):
    """Linear with truncated-normal weights times `scale` and zero bias."""

    def __init__(self, inputs: int, outputs: int, scale: float = 1.0):
        super().__init__(inputs, outputs)
        init_weight(self.weight, inputs, scale)
        nn.init.zeros_(self.bias)


class FusedNorm(torch.autograd.Function):
    """RMS norm over the last axis, then SiLU if `silu`; keeps its input alone.

    PyTorch composes both from seven operators on a CPU, and keeps three tensors as large as the
    input. With n = x / rms, y = n w and p = y' n: w' = sum p and x' = (y' w - n mean(p w)) / rms.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, silu: bool) -> Tensor:
        norm = torch.linalg.vector_norm(value, dim=-1, keepdim=True)
        scale = norm.square_().div_(value.shape[-1]).add_(NORM_EPS).rsqrt_()
        ctx.save_for_backward(value, weight, scale)
        ctx.silu = silu
        out = (value * scale).mul_(weight)
        return F.silu(out, inplace=True) if silu else out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        value, weight, scale = ctx.saved_tensors
        normed = value * scale
        if ctx.silu:
            grad = torch.ops.aten.silu_backward(grad, normed * weight)
        product = grad * normed
        mean = (product @ weight).div_(value.shape[-1]).unsqueeze(-1)
        back = (grad * weight).sub_(normed.mul_(mean)).mul_(scale)
        return back, product.flatten(0, -2).sum(0), None


class RMSNorm(nn.Module):
    """RMS norm over the last axis in float32, learned scale, eps 1e-4; then SiLU if `silu`."""

    def __init__(self, width: int, silu: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.silu = silu

    def forward(self, value: Tensor) -> Tensor:
        if value.dtype != self.weight.dtype:
            value = value.to(self.weight.dtype)
        if value.device.type == "cpu":
            with without_autocast("cpu"):
                return FusedNorm.apply(value, self.weight, self.silu)
        out = F.rms_norm(value, self.weight.shape, self.weight, NORM_EPS)
        return F.silu(out) if self.silu else out


class Dense(nn.Sequential):
    """Linear -> RMSNorm -> SiLU."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__(Linear(inputs, outputs), RMSNorm(outputs, silu=True))


def within(action: Tensor) -> Tensor:
    """Actions divided by max(1, |a|), and their gradients too, which a clamp would cut (DreamerV3
    code, `rssm.py`)."""
    return action / action.detach().abs().clamp(min=1)


class Enter(Dense):
    """Dense on u = (z, action), (..., Z + A), actions `within` [-1, 1].

    The bias is not zero at the start: an episode's first input is, and a chain of norms of zeros
    would multiply its gradient by 1/sqrt(eps) each.
    """

    def __init__(self, z: int, action: int, outputs: int):
        super().__init__(z + action, outputs)
        self.widths = (z, action)
        nn.init.normal_(self[0].bias, std=0.1)

    def forward(self, u: Tensor) -> Tensor:
        z, action = u.split(self.widths, -1)
        return super().forward(torch.cat([z, within(action)], -1))


class Dropout(nn.Dropout):
    """Dropout where a gradient is taken alone: never while acting or evaluating, in any mode."""

    def forward(self, value: Tensor) -> Tensor:
        return super().forward(value) if torch.is_grad_enabled() else value


class MLP(nn.Sequential):
    """`layers` Dense blocks of one width, then a linear output when `outputs` is given."""

    def __init__(
        self, inputs: int, units: int, layers: int, outputs: int = 0, outscale: float = 1.0
    ):
        widths = [inputs] + [units] * layers
        blocks: list[nn.Module] = [Dense(a, b) for a, b in itertools.pairwise(widths)]
        if outputs:
            blocks.append(Linear(widths[-1], outputs, outscale))
        super().__init__(*blocks)


class BlockLinear(nn.Module):
    """A block-diagonal matrix: (..., blocks * inputs) -> (..., blocks, outputs), no bias.

    `fan_in` is the number of inputs that sum into one output when others are added to it.
    """

    def __init__(self, blocks: int, inputs: int, outputs: int, fan_in: int = 0):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(blocks, inputs, outputs))
        init_weight(self.weight, fan_in or inputs)

    def forward(self, value: Tensor) -> Tensor:
        blocks, inputs, outputs = self.weight.shape
        lead = value.shape[:-1]
        split = value.reshape(-1, blocks, inputs).transpose(0, 1)
        return torch.bmm(split, self.weight).transpose(0, 1).reshape(*lead, blocks, outputs)
