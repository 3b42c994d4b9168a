"""Imagined trajectories: the policy rolled through the world model from replayed states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from worldmodels.heads import FeatureHead
from worldmodels.world_model import WorldModel


@dataclass
class Trajectory:
    """N = B*K starts, H imagined steps, time first: index 0 is the posterior state, detached."""

    hz: Tensor  # (H+1, N, D + S*C): h and z side by side
    x: Tensor | None  # (H+1, N, X), when the policy reads it
    out: Tensor  # (H, N, ...) output of the actor, with its graph
    action: Tensor  # (H, N, A) encoded, as sampled; taken in state t, it leads to t+1


def imagine(
    world: WorldModel,
    actor: FeatureHead,
    policy: Any,
    start: dict[str, Any],
    noise: dict[str, Tensor],
    dynamics: bool,
    count: int,
) -> Trajectory:
    """Roll H steps from the last `count` = K steps of every row.

    start: hz, x, z (B, T, ...) and the core's context; noise: `z` (H, B*K, S, C) and `action`
    (H, B*K, A). Unless `dynamics`, the world model runs without
    a graph and the actor's outputs carry theirs alone, which is all that REINFORCE needs.
    """
    hz, x, z = (start[key][:, -count:].detach().flatten(0, 1) for key in ("hz", "x", "z"))
    with torch.set_grad_enabled(dynamics):
        roll = world.core.imagine(start["context"], count)
        hzs, xs, outs, actions = [hz], [x], [], []
        for z_noise, action_noise in zip(noise["z"], noise["action"], strict=True):
            # The actor reads detached features: its gradient through time is cut here.
            with torch.enable_grad():
                out = actor(hz.detach(), x.detach())
            action = policy.sample(out if dynamics else out.detach(), action_noise)
            h, x = roll.step(torch.cat([z, policy.taken(action)], -1))
            h = world.readout(h)
            z = world.sample(world.prior(h), z_noise)
            hz = torch.cat([h, z], -1)
            for values, value in zip((hzs, xs, outs, actions), (hz, x, out, action), strict=True):
                values.append(value)
    seen = None if actor.features == "output" else torch.stack(xs)
    return Trajectory(torch.stack(hzs), seen, torch.stack(outs), torch.stack(actions))
