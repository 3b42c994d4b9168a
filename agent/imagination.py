"""Imagined trajectories: the policy rolled through the world model from replayed states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from worldmodels.world_model import WorldModel


@dataclass
class Trajectory:
    """N = B*K starts, H imagined steps: index 0 is the posterior state itself, detached."""

    h: Tensor  # (N, H+1, D)
    x: Tensor  # (N, H+1, X)
    z: Tensor  # (N, H+1, S*C)
    out: Tensor  # (N, H, ...) output of the actor, with its graph
    action: Tensor  # (N, H, A) encoded; taken in state t, it leads to t+1


def imagine(
    world: WorldModel,
    actor: nn.Module,
    policy: Any,
    start: dict[str, Any],
    noise: dict[str, Tensor],
    dynamics: bool,
    count: int,
) -> Trajectory:
    """Roll H steps from the last `count` = K steps of every row.

    start: h, x, z (B, T, ...) and the core's context; noise: `z` (H, B*K, S, C) and `action`
    (H, B*K, A). Unless `dynamics`, the world model runs without
    a graph and the actor's outputs carry theirs alone, which is all that REINFORCE needs.
    """
    h, x, z = (start[key][:, -count:].detach().flatten(0, 1) for key in ("h", "x", "z"))
    rows, length = start["h"].shape[:2]
    starts = None
    if count < length:
        every = torch.arange(rows * length, device=h.device).view(rows, length)
        starts = every[:, -count:].flatten()
    with torch.set_grad_enabled(dynamics):
        roll = world.core.imagine(start["context"], starts)
        hs, xs, zs, outs, actions = [h], [x], [z], [], []
        for z_noise, action_noise in zip(noise["z"], noise["action"], strict=True):
            # The actor reads detached features: its gradient through time is cut here.
            with torch.enable_grad():
                out = actor(h.detach(), x.detach(), z.detach())
            action = policy.sample(out if dynamics else out.detach(), action_noise)
            h, x = roll.step(torch.cat([z, action], -1))
            z = world.sample(world.prior(h), z_noise)
            for values, value in zip(
                (hs, xs, zs, outs, actions), (h, x, z, out, action), strict=True
            ):
                values.append(value)
    return Trajectory(*(torch.stack(values, 1) for values in (hs, xs, zs, outs, actions)))
