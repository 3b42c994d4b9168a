"""Heads that read features: policy, value, reward and continue, all one small MLP."""

from __future__ import annotations

from torch import Tensor, nn

from worldmodels.layers import MLP, Linear, RMSNorm, init_weight

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
        rest = z if features == "hidden" else h + z
        self.inputs = rest + (0 if features == "output" else x)
        self.norm = RMSNorm(x) if norm and features != "output" else None
        # One layer over h, z and x in two parts: the features are never copied side by side.
        self.from_hz = Linear(rest, units)
        init_weight(self.from_hz.weight, self.inputs)
        if features != "output":
            self.from_x = nn.Linear(x, units, bias=False)
            init_weight(self.from_x.weight, self.inputs)
        self.enter = RMSNorm(units, silu=True)
        self.mlp = MLP(units, units, layers - 1, outputs, outscale)

    def forward(self, hz: Tensor, x: Tensor | None) -> Tensor:
        """hz (..., D+Z): h and z side by side; x (..., X) is not looked at by `output`."""
        hidden = self.from_hz(hz[..., self.h :] if self.features == "hidden" else hz)
        if self.features != "output":
            assert x is not None, f"features {self.features} read x"
            hidden = hidden + self.from_x(x if self.norm is None else self.norm(x))
        return self.mlp(self.enter(hidden)).float()
