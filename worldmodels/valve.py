"""How a memory of m tokens takes in what a segment wrote: the retention valve of RATE.

`RATE: Recurrent Action Transformer with Memory` (arXiv 2306.09459), section 3 and the table of
valves. Each maps the old memory and the transformer's output at the write tokens, both (..., m, D),
to the next memory (..., m, D), in the precision of the old one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worldmodels.layers import Linear, init_weight


class Valve(nn.Module):
    """`none`: the next memory is what was written; the old one lives on in it or not at all."""

    def forward(self, old: Tensor, new: Tensor) -> Tensor:
        return new.to(old.dtype)

    def flops(self, sets: int, tokens: int) -> int:
        """FLOPs for `sets` memories of `tokens` tokens."""
        return 2 * sets * tokens * sum(p.numel() for p in self.parameters() if p.dim() == 2)


class ValveAttention(Valve):
    """`ca2`: the old memory asks, ReLU of the new one answers, then an output projection.

    Algorithm 2: Q = W_Q old, (K, V) = W_KV relu(new), W_M on the heads side by side. No residual
    and no feed-forward, as there: what the old memory does not ask for is gone.
    """

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width, bias=False)
        self.pair = nn.Linear(width, 2 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        for layer in (self.query, self.pair, self.out):
            init_weight(layer.weight, width)

    def forward(self, old: Tensor, new: Tensor) -> Tensor:
        query = self.query(old).unflatten(-1, (self.heads, -1))
        key, value = self.pair(F.relu(new)).unflatten(-1, (2, self.heads, -1)).unbind(-3)
        scores = torch.einsum("...ihd,...jhd->...hij", query * query.shape[-1] ** -0.5, key)
        mixed = torch.einsum("...hij,...jhd->...ihd", scores.softmax(-1), value)
        return self.out(mixed.flatten(-2)).to(old.dtype)

    def flops(self, sets: int, tokens: int) -> int:
        width = self.out.in_features
        return super().flops(sets, tokens) + 4 * sets * tokens * tokens * width


class Gate(Valve):
    """`gate`: the gate of GTrXL (Parisotto et al. 2020, section 3.2), which starts almost shut.

    r, z = sigmoid(W new + U old - (0, b));  old + z * (tanh(W' new + U' (r * old)) - old);  b = 2.
    """

    def __init__(self, width: int):
        super().__init__()
        self.new = nn.Linear(width, 3 * width, bias=False)
        self.old = nn.Linear(width, 2 * width, bias=False)
        self.reset = nn.Linear(width, width, bias=False)
        for layer in (self.new, self.old, self.reset):
            init_weight(layer.weight, 2 * width)
        self.shut = nn.Parameter(torch.full((width,), 2.0))

    def forward(self, old: Tensor, new: Tensor) -> Tensor:
        reset, update, candidate = self.new(new).chunk(3, -1)
        old_reset, old_update = self.old(old).chunk(2, -1)
        candidate = candidate + self.reset(torch.sigmoid(reset + old_reset) * old)
        update = torch.sigmoid(update + old_update - self.shut)
        return torch.lerp(old, torch.tanh(candidate).to(old.dtype), update.to(old.dtype))


class Cell(Valve):
    """`gru`: a GRU cell whose state is the old memory and whose input is the new one.

    r, z = sigmoid(W new + U old);  z * old + (1 - z) * tanh(W' new + r * (U' old)); with biases.
    """

    def __init__(self, width: int):
        super().__init__()
        self.new, self.old = (Linear(width, 3 * width) for _ in range(2))
        for layer in (self.new, self.old):
            init_weight(layer.weight, 2 * width)

    def forward(self, old: Tensor, new: Tensor) -> Tensor:
        reset, keep, candidate = self.new(new).chunk(3, -1)
        old_reset, old_keep, old_candidate = self.old(old).chunk(3, -1)
        candidate = torch.tanh(candidate + torch.sigmoid(reset + old_reset) * old_candidate)
        keep = torch.sigmoid(keep + old_keep)
        return torch.lerp(candidate.to(old.dtype), old, keep.to(old.dtype))


def make_valve(kind: str, width: int, heads: int) -> Valve:
    """The valve `kind`: none, ca2, gate or gru; `heads` are those of ca2."""
    if kind == "ca2":
        return ValveAttention(width, heads)
    return Valve() if kind == "none" else {"gate": Gate, "gru": Cell}[kind](width)
