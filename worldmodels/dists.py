"""Scalar predictions: symlog and the symexp two-hot distribution (DreamerV3, section 3).

Everything here is float32 or wider: bins reach symexp(20) = 4.85e8.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

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
    with torch.autocast(probs.device.type, enabled=False):
        return (probs[..., half + 1 :] - probs[..., :half].flip(-1)) @ bins[half + 1 :]


def twohot_loss(
    logits: Tensor, target: Tensor, bins: Tensor, normaliser: Tensor | None = None
) -> Tensor:
    """Cross-entropy (...) between logits (..., 255) and the two-hot weights of `target` (...).

    Written as logsumexp minus the two logits that count: nothing as wide as the bins is stored.
    `normaliser` is logsumexp of the logits when it is already known.
    """
    logits = logits.float()
    normaliser = logits.logsumexp(-1) if normaliser is None else normaliser
    target = target.float().clamp(bins[0], bins[-1])
    above = torch.searchsorted(bins, target.contiguous()).clamp(1, len(bins) - 1)
    below = above - 1
    low, high = bins[below], bins[above]
    share = (target - low) / (high - low)
    pair = logits.gather(-1, torch.stack([below, above], -1))
    return normaliser - torch.lerp(pair[..., 0], pair[..., 1], share)
