"""Heads that read features: policy, value, reward and continue, all one small MLP."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from worldmodels.layers import MLP, RMSNorm

FEATURES = ("output", "hidden", "full")


class FeatureHead(nn.Module):
    """MLP on the policy features: output (h, z), hidden (x, z) or full (h, x, z).

    x is unbounded (it is a state of the core), so it passes one RMSNorm first; R2I feeds it raw.
    `inputs` is the width that results.
    """

    def __init__(
        self,
        features: str,
        norm: bool,
        widths: tuple[int, int, int],
        units: int,
        layers: int,
        outputs: int,
        outscale: float,
    ):
        """`widths` of h, x and z."""
        super().__init__()
        assert features in FEATURES, features
        h, x, z = widths
        self.features, self.h = features, h
        self.inputs = z + (h if features != "hidden" else 0) + (x if features != "output" else 0)
        self.norm = RMSNorm(x) if norm and features != "output" else None
        self.mlp = MLP(self.inputs, units, layers, outputs, outscale)

    def forward(self, hz: Tensor, x: Tensor | None) -> Tensor:
        """hz (..., D+Z): h and z side by side; x (..., X) is not looked at by `output`."""
        if x is None or self.features == "output":
            return self.mlp(hz).float()
        x = x if self.norm is None else self.norm(x)
        rest = hz if self.features == "full" else hz[..., self.h :]
        return self.mlp(torch.cat([rest, x], -1)).float()
