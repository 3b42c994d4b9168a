"""Lambda-returns and the return scale. Pure functions of float32 tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def lambda_return(reward: Tensor, live: Tensor, boot: Tensor, mix: Tensor | float) -> Tensor:
    """Lambda-return R (..., T) of the T states that precede the arguments, each (..., T).

        R_t = reward_{t+1} + live_{t+1} ((1 - mix_{t+1}) boot_{t+1} + mix_{t+1} R_{t+1})

    and R after the end is the last `boot`. Index t of every argument belongs to the state that is
    arrived in: `reward` came with it, `live` is discount times probability of going on from it,
    `boot` its value and `mix` is lambda, 0 where the trajectory is cut (DreamerV3 code,
    `agent.py`).
    """
    interim = reward + live * (1 - mix) * boot
    decay = (live * mix).unbind(-1)
    last, out = boot[..., -1], []
    for now, factor in zip(reversed(interim.unbind(-1)), reversed(decay), strict=True):
        last = now + factor * last
        out.append(last)
    return torch.stack(out[::-1], -1)


def percentile_range(returns: Tensor) -> Tensor:
    """The 5th and 95th percentile (2,) over all elements."""
    # Filled on the device: a list of numbers would be copied there, which is waited for.
    points = torch.stack([returns.new_full((), point) for point in (0.05, 0.95)])
    # torch.quantile refuses more than 2^24 elements; sorting and interpolating has no limit.
    ordered = returns.flatten().sort().values
    position = points * (len(ordered) - 1)
    below = position.floor().long()
    above = (below + 1).clamp(max=len(ordered) - 1)
    return torch.lerp(ordered[below], ordered[above], position - below)
