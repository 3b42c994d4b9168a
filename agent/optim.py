"""LaProp with adaptive gradient clipping, over all tensors at once (DreamerV3 code, `opt.py`).

Order: AGC per tensor, RMS scaling by the bias-corrected second moment, bias-corrected momentum of
the scaled gradient (Ziyin et al. 2020, "LaProp"), learning rate with a linear warm-up from 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from configs.schema import OptimConfig

SMALLEST_NORM = 1e-3


class LaProp:
    def __init__(self, named: list[tuple[str, nn.Parameter]], config: OptimConfig):
        """`named` parameters; those of `actor.` and `critic.` may have their own rates."""
        self.config = config
        self.names = [name for name, _ in named]
        self.params = [param for _, param in named]
        rates = {"actor": config.actor_lr, "critic": config.critic_lr}
        self.rates = [rates.get(name.split(".")[0], 0) or config.lr for name in self.names]
        self.square = [torch.zeros_like(param) for param in self.params]
        self.momentum = [torch.zeros_like(param) for param in self.params]
        self.steps = 0

    @torch.no_grad()
    def step(self) -> Tensor:
        """Apply the gradients and clear them; returns the gradient norms (number of tensors,).

        A parameter without a gradient counts as one with a gradient of zero.
        """
        config = self.config
        grads = self.grads()
        norms = torch._foreach_norm(grads)
        result = torch.stack(norms)
        limits = torch._foreach_clamp_min(torch._foreach_norm(self.params), SMALLEST_NORM)
        torch._foreach_mul_(limits, config.agc)
        scale = torch._foreach_div(norms, limits)
        torch._foreach_clamp_min_(scale, 1.0)
        grads = torch._foreach_div(grads, scale)
        self.steps += 1
        torch._foreach_mul_(self.square, config.beta2)
        torch._foreach_addcmul_(self.square, grads, grads, 1 - config.beta2)
        root = torch._foreach_div(self.square, 1 - config.beta2**self.steps)
        torch._foreach_sqrt_(root)
        torch._foreach_add_(root, config.eps)
        torch._foreach_div_(grads, root)
        torch._foreach_lerp_(self.momentum, grads, 1 - config.beta1)
        warm = min(1.0, self.steps / config.warmup) if config.warmup else 1.0
        correction = 1 - config.beta1**self.steps
        change = torch._foreach_mul(
            self.momentum, [-rate * warm / correction for rate in self.rates]
        )
        torch._foreach_add_(self.params, change)
        self.clear()
        return result

    def grads(self) -> list[Tensor]:
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in self.params]

    @torch.no_grad()
    def norms(self) -> Tensor:
        """Gradient norms (number of tensors,), before `step`."""
        return torch.stack(torch._foreach_norm(self.grads()))

    def clear(self) -> None:
        for param in self.params:
            param.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "square": self.square, "momentum": self.momentum}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        torch._foreach_copy_(self.square, state["square"])
        torch._foreach_copy_(self.momentum, state["momentum"])
