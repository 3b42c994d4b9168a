"""Imagined trajectories: the policy rolled through the world model from replayed states."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from worldmodels.heads import FeatureHead
from worldmodels.world_model import WorldModel


@dataclass
class Trajectory:
    """N = B*K starts, H imagined steps, time first: index 0 is the posterior state, detached."""

    hz: Tensor  # (H+1, N, D + S*C): h and z side by side
    x: Tensor | None  # (H+1, N, X), when the policy reads it
    out: Tensor  # (H, N, ...) output of the actor, with its graph
    action: Tensor  # (H, N, A) encoded, as sampled; taken in state t, it leads to t+1


@contextlib.contextmanager
def frozen(*modules: nn.Module) -> Iterator[None]:
    """Within, gradients pass through the modules and do not move them: a policy that is trained
    through its world model must not train the model to promise more."""
    params = [p for module in modules for p in module.parameters() if p.requires_grad]
    for param in params:
        param.requires_grad_(False)
    try:
        yield
    finally:
        for param in params:
            param.requires_grad_(True)


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
    with frozen(world) if dynamics else torch.no_grad():
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
