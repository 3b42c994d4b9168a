"""The stochastic latent z: S groups of C classes, straight-through samples, KL with free nats.

DreamerV3, section 2 ("categorical representations", "free bits") and its code `rssm.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def mixed_probs(logits: Tensor, share: float) -> Tensor:
    """Probabilities (..., C) `(1 - share) * softmax(logits) + share / C`, in float32."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    probs = F.softmax(logits, -1)
    return probs if share == 0 else (1 - share) * probs + share / logits.shape[-1]


def mixed_log_probs(logits: Tensor, share: float) -> Tensor:
    """Logarithms of `mixed_probs`."""
    if share == 0:
        return F.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), -1)
    return mixed_probs(logits, share).log()


def exponential_like(value: Tensor, generator: torch.Generator | None) -> Tensor:
    """Exponential noise of the shape of `value`: the race that `sample` runs between classes."""
    # Five times as fast as exponential_ on a CPU, and as good: -log(0) = inf never wins.
    noise = torch.empty_like(value, requires_grad=False).uniform_(generator=generator)
    return noise.log_().neg_()


class StraightThrough(torch.autograd.Function):
    """One-hot of the class with the largest score, with the gradient of the probabilities."""

    @staticmethod
    def forward(ctx: Any, probs: Tensor, noise: Tensor) -> Tensor:
        index = (probs / noise).argmax(-1, keepdim=True)
        return torch.zeros_like(probs).scatter_(-1, index, 1.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def sample(probs: Tensor, noise: Tensor) -> Tensor:
    """Straight-through one-hot sample of probabilities (..., C) under exponential `noise`.

    The class with the smallest noise / probability wins, which is the Gumbel-max trick without
    logarithms. The gradient is that of the probabilities (Bengio et al. 2013).
    """
    return StraightThrough.apply(probs, noise)


def kl(logp: Tensor, logq: Tensor) -> Tensor:
    """KL(p || q) of log-probabilities (..., S, C), summed over groups: (...)."""
    return (logp.exp() * (logp - logq)).sum((-2, -1))


def kl_losses(post: Tensor, prior: Tensor, free: float) -> tuple[Tensor, Tensor]:
    """`dyn` and `rep` losses (B, T), each at least `free` nats, where its gradient is zero."""
    dyn = kl(post.detach(), prior).clamp(min=free)
    rep = kl(post, prior.detach()).clamp(min=free)
    return dyn, rep


def entropy(logp: Tensor) -> Tensor:
    """Entropy in nats of log-probabilities (..., S, C), summed over groups."""
    return -(logp.exp() * logp).sum((-2, -1))
