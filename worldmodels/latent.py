"""The stochastic latent z: S groups of C classes, straight-through samples, KL with free nats.

DreamerV3, section 2 ("categorical representations", "free bits") and its code `rssm.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def mix_uniform(logits: Tensor, share: float) -> Tensor:
    """Log-probabilities (..., C) of `(1 - share) * softmax(logits) + share / C`, in float32."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if share == 0:
        return F.log_softmax(logits, -1)
    return ((1 - share) * F.softmax(logits, -1) + share / logits.shape[-1]).log()


def exponential_like(value: Tensor, generator: torch.Generator | None) -> Tensor:
    """Exponential noise of the shape of `value`: the race that `sample` runs between classes."""
    return torch.empty_like(value, requires_grad=False).exponential_(generator=generator)


def sample(logp: Tensor, noise: Tensor) -> Tensor:
    """Straight-through one-hot sample of log-probabilities (..., C) under exponential `noise`.

    The class with the smallest noise / probability wins, which is the Gumbel-max trick without
    logarithms. The gradient is that of the probabilities (Bengio et al. 2013).
    """
    probs = logp.exp()
    index = (probs.detach() / noise).argmax(-1, keepdim=True)
    onehot = torch.zeros_like(probs).scatter_(-1, index, 1.0)
    return onehot + (probs - probs.detach())


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
