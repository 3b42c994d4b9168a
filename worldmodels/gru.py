"""Core `gru`: the block GRU of DreamerV3 (section 2 and code `rssm.py`). Its x is its h.

    inputs  = [Dense(h), Dense(z), Dense(a / max(1, |a|))]
    hidden  = SiLU(RMSNorm(W inputs + blockdiag(V) h))
    r, c, g = split within each block of blockdiag(G) hidden
    h'      = sigmoid(g - 1) * tanh(sigmoid(r) * c) + (1 - sigmoid(g - 1)) * h

DreamerV3 copies the inputs into each of the blocks; a dense W over them is the same map.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from worldmodels.core import SequenceCore, State
from worldmodels.layers import BlockLinear, Dense, Linear, RMSNorm, init_weight, within
from worldmodels.products import LoopProduct
from worldmodels.uncompiled import uncompiled


class Prepared(NamedTuple):
    """The large matrices, for the steps of one loop."""

    from_z: LoopProduct
    mix_u: LoopProduct
    from_h: LoopProduct
    mix_h: LoopProduct
    mix_blocks: LoopProduct
    gates: LoopProduct
    gate_bias: Tensor


class GRU(SequenceCore):
    x_is_h = True

    def __init__(self, z: int, action: int, hidden: int, deter: int, blocks: int):
        """Widths: flat z, action, `hidden` of the input layers, `deter` of h in `blocks`."""
        super().__init__()
        if deter % blocks:
            raise ValueError(f"gru.deter {deter} must be a multiple of gru.blocks {blocks}")
        self.widths = (z, action)
        self.out = self.hidden = deter
        self.from_h = Dense(deter, hidden)
        self.from_z = Dense(z, hidden)
        self.from_a = Dense(action, hidden)
        for layer in (self.from_h, self.from_z, self.from_a):
            torch.nn.init.normal_(layer[0].bias, std=0.1)  # as that of `Enter`
        # W in two tensors: a slice taken in the loop would have a gradient of the whole, each step.
        self.mix_u = Linear(2 * hidden, deter)
        self.mix_h = torch.nn.Linear(hidden, deter, bias=False)
        self.mix_blocks = BlockLinear(blocks, deter // blocks, deter // blocks)
        for layer in (self.mix_u, self.mix_h, self.mix_blocks):
            init_weight(layer.weight, 3 * hidden + deter // blocks)
        self.norm = RMSNorm(deter, silu=True)
        self.gates = BlockLinear(blocks, deter // blocks, 3 * deter // blocks)
        self.gate_bias = torch.nn.Parameter(torch.zeros(blocks, 3 * deter // blocks))

    def initial(self, batch: int, age: Tensor | None = None) -> State:
        weight = self.norm.weight
        return {"h": torch.zeros(batch, self.out, device=weight.device, dtype=weight.dtype)}

    def inputs(self, u: Tensor, prepared: Prepared) -> Tensor:
        """The part of the update that does not depend on h; for (..., U), any lead shape."""
        z, action = u.split(self.widths, -1)
        linear, norm = self.from_z
        z = norm(prepared.from_z(z) + linear.bias)
        return prepared.mix_u(torch.cat([z, self.from_a(within(action))], -1)) + self.mix_u.bias

    def prepare(self) -> Prepared:
        layers = self.from_z[0], self.mix_u, self.from_h[0], self.mix_h, self.mix_blocks, self.gates
        products = [LoopProduct(layer.weight) for layer in layers]
        # The update gate opens at sigmoid(g - 1).
        shift = self.gate_bias.new_zeros(3, 1)
        shift[2] = -1.0
        bias = (self.gate_bias.unflatten(-1, (3, -1)) + shift).flatten(-2)
        return Prepared(*products, bias)

    def advance(self, inputs: Tensor, h: Tensor, prepared: Prepared) -> Tensor:
        linear, norm = self.from_h
        hidden = prepared.mix_h(norm(prepared.from_h(h) + linear.bias))
        hidden = self.norm(hidden + inputs + prepared.mix_blocks(h).flatten(-2))
        gates = prepared.gates(hidden).to(h.dtype) + prepared.gate_bias
        reset, cand, update = gates.chunk(3, -1)  # (B, blocks, D / blocks) each
        cand = torch.tanh(torch.sigmoid(reset) * cand)
        before = h.unflatten(-1, cand.shape[1:])
        return torch.lerp(before, cand, torch.sigmoid(update)).flatten(-2)

    def step(
        self, u: Tensor, is_first: Tensor | None, state: State, prepared: Any = None
    ) -> tuple[Tensor, Tensor, State]:
        h = state["h"]
        if is_first is not None:
            h = torch.where(is_first[:, None], 0.0, h)
        prepared = prepared or self.prepare()
        h = self.advance(self.inputs(u, prepared), h, prepared)
        return h, h, {"h": h}

    @uncompiled  # unrolled over T, the graph would take too long to compile
    def scan(
        self, u: Tensor, is_first: Tensor, state: State, plan: Any = None
    ) -> tuple[Tensor, Tensor, State, State]:
        h, outputs, prepared = state["h"], [], self.prepare()
        reset = is_first[..., None]
        for inputs, first in zip(self.inputs(u, prepared).unbind(1), reset.unbind(1), strict=True):
            h = self.advance(inputs, torch.where(first, 0.0, h), prepared)
            outputs.append(h)
        stacked = torch.stack(outputs, 1)
        return stacked, stacked, {"h": h}, {"h": stacked}

    def flops(self, batch: int, length: int) -> int:
        matrices = [self.from_h[0], self.from_z[0], self.from_a[0], self.mix_u]
        matrices += [self.mix_h, self.mix_blocks, self.gates]
        return 2 * batch * length * sum(layer.weight.numel() for layer in matrices)
