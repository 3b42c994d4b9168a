"""Action distributions from the actor's output: categorical (several numbers too) and bounded
normal (DreamerV3 code, `heads.py`). Actions are encoded: one-hot parts, or numbers about [-1, 1].
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from worldmodels import latent
from worldmodels.encoder import one_hot
from worldmodels.layers import within

STD_RANGE = (0.1, 1.0)


class Categorical:
    """k independent categorical numbers; logits (..., sum(classes))."""

    def __init__(self, classes: tuple[int, ...], unimix: float):
        self.classes, self.unimix = classes, unimix
        self.outputs = self.width = sum(classes)

    def noise(self, like: Tensor, lead: tuple[int, ...], generator: Any) -> Tensor:
        return latent.exponential_like(like.new_empty(*lead, self.width), generator)

    def log_probs(self, logits: Tensor) -> list[Tensor]:
        parts = logits.split(list(self.classes), -1)
        return [latent.mixed_log_probs(part, self.unimix) for part in parts]

    def sample(self, logits: Tensor, noise: Tensor) -> Tensor:
        parts = zip(
            *(value.split(list(self.classes), -1) for value in (logits, noise)), strict=True
        )
        draws = [latent.sample(latent.mixed_probs(a, self.unimix), b) for a, b in parts]
        return torch.cat(draws, -1)

    def mode(self, logits: Tensor) -> Tensor:
        parts = logits.split(list(self.classes), -1)
        index = torch.stack([part.argmax(-1) for part in parts], -1)
        return one_hot(index, self.classes)

    def log_prob_entropy(self, logits: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """log p(action) and the entropy, each (...), summed over the k numbers."""
        log_probs = torch.cat(self.log_probs(logits), -1)
        return (log_probs * action).sum(-1), -(log_probs.exp() * log_probs).sum(-1)

    def taken(self, action: Tensor) -> Tensor:
        return action

    def encode(self, action: Tensor) -> Tensor:
        return one_hot(action, self.classes)

    def decode(self, action: Tensor) -> np.ndarray:
        parts = action.split(list(self.classes), -1)
        return torch.stack([part.argmax(-1) for part in parts], -1).cpu().numpy().astype(np.int32)


class BoundedNormal:
    """Independent normals: mean tanh(.), standard deviation between 0.1 and 1."""

    def __init__(self, size: int):
        self.width, self.outputs = size, 2 * size

    def noise(self, like: Tensor, lead: tuple[int, ...], generator: Any) -> Tensor:
        return like.new_empty(*lead, self.width).normal_(generator=generator)

    def mean_std(self, out: Tensor) -> tuple[Tensor, Tensor]:
        mean, std = out.chunk(2, -1)
        low, high = STD_RANGE
        return torch.tanh(mean), (high - low) * torch.sigmoid(std + 2) + low

    def sample(self, out: Tensor, noise: Tensor) -> Tensor:
        mean, std = self.mean_std(out)
        return mean + std * noise

    def mode(self, out: Tensor) -> Tensor:
        return self.mean_std(out)[0]

    def log_prob_entropy(self, out: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        mean, std = self.mean_std(out)
        normal = torch.distributions.Normal(mean, std, validate_args=False)
        return normal.log_prob(action).sum(-1), normal.entropy().sum(-1)

    def taken(self, action: Tensor) -> Tensor:
        """A sample as the environment takes it, which is what the replay holds."""
        return within(action)

    def encode(self, action: Tensor) -> Tensor:
        return action.float()

    def decode(self, action: Tensor) -> np.ndarray:
        return action.cpu().numpy().astype(np.float32)


def make_policy(act_space: Any, unimix: float) -> Categorical | BoundedNormal:
    """The distribution for an action space of kind `discrete` or `vector`."""
    if act_space.kind == "discrete":
        return Categorical(tuple(act_space.classes), unimix)
    return BoundedNormal(act_space.shape[0])
