"""Scalar predictions: symlog and the symexp two-hot distribution (DreamerV3, section 3).

Everything here is float32 or wider: bins reach symexp(20) = 4.85e8.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from worldmodels.layers import without_autocast

BINS = 255


def symlog(value: Tensor) -> Tensor:
    return value.sign() * value.abs().log1p()


def symexp(value: Tensor) -> Tensor:
    return value.sign() * value.abs().expm1()


def make_bins(device: torch.device | str = "cpu") -> Tensor:
    """255 bin values, symexp of an even grid over [-20, 20], mirrored so that they pair exactly."""
    half = symexp(torch.linspace(-20, 0, BINS // 2 + 1, dtype=torch.float64)).float()
    return torch.cat([half, -half[:-1].flip(0)]).to(device)


def twohot_mean(logits: Tensor, bins: Tensor) -> Tensor:
    """Expected value (...) of logits (..., 255).

    Probabilities of bins that differ in sign alone are subtracted first, so that equal ones give
    exactly 0 whatever the size of the bins.
    """
    probs = F.softmax(logits.float(), -1)
    half = BINS // 2
    with without_autocast(probs.device.type):
        return (probs[..., half + 1 :] - probs[..., :half].flip(-1)) @ bins[half + 1 :]


def twohot_loss(logits: Tensor, target: Tensor, bins: Tensor) -> Tensor:
    """Cross-entropy (...) between logits (..., 255) and the two-hot weights of `target` (...)."""
    return twohot_losses(logits, [(target, 1.0)], bins)


def twohot_losses(logits: Tensor, targets: list[tuple[Tensor, float]], bins: Tensor) -> Tensor:
    """Sum (...) of the two-hot losses of several targets (...), each times its scale."""
    indices, weights = [], []
    for target, scale in targets:
        target = target.float().clamp(bins[0], bins[-1])
        above = torch.searchsorted(bins, target.contiguous()).clamp(1, len(bins) - 1)
        low, high = bins[above - 1], bins[above]
        share = (target - low) / (high - low)
        indices += [above - 1, above]
        weights += [scale * (1 - share), scale * share]
    return SparseCrossEntropy.apply(
        logits.float(), torch.stack(indices, -1), torch.stack(weights, -1)
    )


class SparseCrossEntropy(torch.autograd.Function):
    """Cross-entropy (...) of logits (..., C) with `weight` (..., K) on the classes `index`.

    K is small, so nothing as wide as C is stored but the probabilities, which are also the
    gradient; autograd would recompute them and fill a zero tensor for every gather.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        probs = F.softmax(logits, -1)
        total = weight.sum(-1)
        normaliser = logits.amax(-1) - probs.amax(-1).log()
        ctx.save_for_backward(probs, index, weight, total)
        return total * normaliser - (weight * logits.gather(-1, index)).sum(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        probs, index, weight, total = ctx.saved_tensors
        out = probs * (grad * total)[..., None]
        return out.scatter_add_(-1, index, -(grad[..., None] * weight)), None, None
