"""Core `s3m`: the structured state-space model of R2I ("Recall to Imagine", section 3).

A stack of diagonal complex state-space layers (S5's multi-input form), trained by one scan over T:

    x_t = A x_{t-1} + B u_t                 diagonal, complex, `diag_scan`
    y_t = Re(C x_t) + D u_t
    u'  = LayerNorm(u + GLU(GELU(y)))       to the next layer
    h   = SiLU(Linear(u'))                  after the last layer

Complex numbers are planar (real block, imaginary block): every product is a real one. Departures
from the released code, with reasons: a reset replaces the state at its own step (theirs fires one
step early); Re(lambda) is kept below -1e-4 (theirs is free and may grow without bound); C is drawn
with variance 1/P as in S5 (theirs is sqrt(H) smaller), and B is divided by sqrt(dt), so that states
start with unit variance under white inputs (as released they start at about sqrt(dt)).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worldmodels.core import SequenceCore, State
from worldmodels.layers import Enter, Linear, without_autocast
from worldmodels.scan import diag_scan, diag_step, scan_flops


def hippo(size: int) -> tuple[Tensor, Tensor]:
    """Eigenvalues (size,) and eigenvectors (size, size) of HiPPO-LegS's normal part, complex128.

    Gu et al. 2022 (S4D), section 2: real parts are -1/2; the low-rank correction is dropped.
    """
    index = torch.arange(size, dtype=torch.float64)
    root = torch.sqrt(2 * index + 1)
    matrix = -torch.tril(root[:, None] * root[None], -1) - torch.diag(index + 1)
    rank_one = torch.sqrt(index + 0.5)
    normal = matrix + rank_one[:, None] * rank_one[None]
    # The normal part is -1/2 plus a skew-symmetric matrix, so -i times that is Hermitian.
    skew = normal - torch.diag(torch.diagonal(normal))
    imag, vectors = torch.linalg.eigh(skew * -1j)
    return torch.complex(torch.full_like(imag, -0.5), imag), vectors


class Below(torch.autograd.Function):
    """min(value, bound). Values beyond it keep the gradients that bring them back: with those of a
    clamp, a state that had once crossed would stay undamped for good."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, bound: float) -> Tensor:
        ctx.save_for_backward(value > bound)
        return value.clamp(max=bound)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (beyond,) = ctx.saved_tensors
        return torch.where(beyond & (grad < 0), 0.0, grad), None


class SSM(nn.Module):
    """One layer: (..., H) -> (..., H), with P complex states."""

    def __init__(
        self, width: int, state: int, blocks: int, discretisation: str, dt: tuple[float, float]
    ):
        super().__init__()
        self.state, self.discretisation = state, discretisation
        eigen, vectors = hippo(state // blocks)
        eigen, rotation = eigen.repeat(blocks), torch.block_diag(*[vectors] * blocks)
        self.lambda_re = nn.Parameter(eigen.real.float())
        self.lambda_im = nn.Parameter(eigen.imag.float())
        low, high = math.log(dt[0]), math.log(dt[1])
        self.log_dt = nn.Parameter(torch.rand(state) * (high - low) + low)
        # States have unit variance under white inputs: that of x_t is about |B u|^2 dt.
        into = rotation.conj().T @ (torch.randn(state, width).double() / width**0.5 + 0j)
        into = into / self.log_dt.detach().double().exp().sqrt()[:, None]
        out = torch.randn(2, width, state).double() / state**0.5
        out = torch.complex(out[0], out[1]) @ rotation
        self.B = nn.Parameter(torch.stack([into.real, into.imag]).float())  # (2, P, H)
        self.C = nn.Parameter(torch.stack([out.real, -out.imag]).float())  # (2, H, P)
        self.D = nn.Parameter(torch.randn(width))
        self.glu = Linear(width, 2 * width)
        self.norm = nn.LayerNorm(width, eps=1e-6)

    def coefficients(self) -> tuple[Tensor, Tensor, Tensor]:
        """A (2, P), B (2P, H) and C (H, 2P) in discrete time, real and planar.

        In float64 where it matters: Im(lambda) * dt reaches hundreds of radians.
        """
        with without_autocast(self.B.device.type):
            lam = torch.complex(
                Below.apply(self.lambda_re.double(), -1e-4), self.lambda_im.double()
            )
            dt = self.log_dt.double().exp()
            if self.discretisation == "bilinear":
                a = (1 + dt * lam / 2) / (1 - dt * lam / 2)
                gain = dt / (1 - dt * lam / 2)
            else:
                a = torch.exp(dt * lam)
                gain = (a - 1) / lam
            a = torch.stack([a.real, a.imag]).to(self.B.dtype)
            gain = torch.stack([gain.real, gain.imag]).to(self.B.dtype)[..., None]
            b_re = gain[0] * self.B[0] - gain[1] * self.B[1]
            b_im = gain[0] * self.B[1] + gain[1] * self.B[0]
            return a, torch.cat([b_re, b_im]), torch.cat([self.C[0], self.C[1]], -1)

    def readout(self, u: Tensor, x: Tensor, c: Tensor) -> Tensor:
        """u' from the layer's input u (..., H) and state x (..., 2, P)."""
        y = F.linear(x.flatten(-2), c) + self.D * u
        value, gate = self.glu(F.gelu(y, approximate="tanh")).chunk(2, -1)
        mixed = u + value * torch.sigmoid(gate)
        with without_autocast(u.device.type):
            return self.norm(mixed.to(self.D.dtype))


class S3M(SequenceCore):
    def __init__(
        self,
        z: int,
        action: int,
        layers: int,
        state: int,
        width: int,
        deter: int,
        blocks: int,
        discretisation: str,
        initial: str,
        dt_min: float,
        dt_max: float,
    ):
        """Widths: flat z, action, `state` P of a layer, `width` H of a layer, `deter` of h."""
        super().__init__()
        if state % blocks:
            raise ValueError(f"s3m.state {state} must be a multiple of s3m.blocks {blocks}")
        self.out, self.hidden = deter, layers * 2 * state
        self.enter = Enter(z, action, width)
        self.layers = nn.ModuleList(
            SSM(width, state, blocks, discretisation, (dt_min, dt_max)) for _ in range(layers)
        )
        self.leave = Linear(width, deter)
        # Over a T that several processes share: a partial of `scan_sharded.sharded_scan`.
        self.diag_scan: Callable[..., Tensor] = diag_scan
        start = torch.zeros(layers, 2, state)
        self.start = nn.Parameter(start) if initial == "learned" else None
        self.register_buffer("zeros", start, persistent=False)

    def reset_value(self) -> Tensor:
        """The state (L, 2, P) that an episode starts from."""
        return self.zeros if self.start is None else self.start

    def initial(self, batch: int, age: Tensor | None = None) -> State:
        return {"x": self.reset_value().expand(batch, -1, -1, -1)}

    def prepare(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        return [layer.coefficients() for layer in self.layers]

    def step(
        self, u: Tensor, is_first: Tensor | None, state: State, prepared: Any = None
    ) -> tuple[Tensor, Tensor, State]:
        prepared = prepared or self.prepare()
        u, states = self.enter(u), []
        reset_value = self.reset_value()
        for index, (layer, (a, b, c)) in enumerate(zip(self.layers, prepared, strict=True)):
            drive = F.linear(u, b).to(self.zeros.dtype).unflatten(-1, (2, layer.state))
            x = diag_step(a, drive, state["x"][:, index], is_first, reset_value[index])
            u = layer.readout(u, x, c)
            states.append(x)
        x = torch.stack(states, 1)
        return F.silu(self.leave(u)).to(x.dtype), x.flatten(1), {"x": x}

    def scan(
        self, u: Tensor, is_first: Tensor, state: State, plan: Any = None
    ) -> tuple[Tensor, Tensor, State, State]:
        u, states = self.enter(u), []
        reset_value = self.reset_value()
        for index, (layer, (a, b, c)) in enumerate(zip(self.layers, self.prepare(), strict=True)):
            drive = F.linear(u, b).to(self.zeros.dtype).unflatten(-1, (2, layer.state))
            x = self.diag_scan(a, drive, state["x"][:, index], is_first, reset_value[index])
            u = layer.readout(u, x, c)
            states.append(x)
        x = torch.stack(states, 2)  # (B, T, L, 2, P)
        h = F.silu(self.leave(u)).to(x.dtype)
        return h, x.flatten(2), {"x": x[:, -1]}, {"x": x}

    def flops(self, batch: int, length: int) -> int:
        products = self.enter[0].weight.numel() + self.leave.weight.numel()
        scans = 0
        for layer in self.layers:
            products += layer.B.numel() + layer.C.numel() + layer.glu.weight.numel()
            scans += scan_flops(batch, length, layer.state)
        return 2 * batch * length * products + scans
