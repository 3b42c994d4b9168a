"""One update: every loss of world model, actor and critic from one batch, as one scalar.

`Update.forward(batch, noise)` is the whole computation; it alone is wrapped, compiled or timed.
Losses follow the newest public DreamerV3 code (`agent.py`); the equations are in README.md.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from agent.ages import norm_by_age
from agent.imagination import Trajectory, frozen, imagine
from agent.policy import make_policy
from agent.ranks import of_all_ranks
from agent.returns import lambda_return, percentile_range
from configs.schema import Config
from worldmodels.dists import BINS, twohot_losses, twohot_mean
from worldmodels.heads import FeatureHead
from worldmodels.world_model import Carry, WorldModel, tree_map

POLICY_OUTSCALE = 0.01


class Update(nn.Module):
    def __init__(self, config: Config, obs_space: dict[str, Any], act_space: Any):
        super().__init__()
        self.config = config
        behaviour = config.behaviour
        if behaviour.starts == 1:
            raise ValueError(
                "behaviour.starts 1 leaves no pair of steps for the replayed value loss: "
                "set 2 or more, or 0 for all steps"
            )
        self.world = WorldModel(config, obs_space, act_space)
        self.policy = make_policy(act_space, behaviour.unimix)
        core = self.world.core
        widths = (self.world.h, core.hidden, self.world.z)
        features = behaviour.features
        if features == "full" and core.x_is_h:
            features = "output"  # nothing is read twice

        def head(outputs: int, outscale: float) -> FeatureHead:
            return FeatureHead(
                features,
                behaviour.feature_norm,
                widths,
                config.model.units,
                behaviour.layers,
                outputs,
                outscale,
            )

        self.actor = head(self.policy.outputs, POLICY_OUTSCALE)
        self.critic = head(BINS, 0.0)
        self.slow = copy.deepcopy(self.critic).requires_grad_(False)
        self.register_buffer("return_range", torch.zeros(2))

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, param) for name, param in self.named_parameters() if param.requires_grad]

    def noise(self, batch: int, length: int, generator: torch.Generator) -> dict[str, Tensor]:
        """All random numbers of an update on (batch, length) replayed steps."""
        horizon, starts = self.config.behaviour.horizon, batch * self.starts(length)
        world = self.world
        return {
            "post": world.noise(batch, length, generator=generator),
            "z": world.noise(horizon, starts, generator=generator),
            "action": self.policy.noise(world.bins, (horizon, starts), generator),
        }

    def starts(self, length: int) -> int:
        """K: imagination starts from the last K of `length` steps (DreamerV3's `imag_last`)."""
        return min(self.config.behaviour.starts or length, length)

    def value(self, logits: Tensor) -> Tensor:
        return twohot_mean(logits, self.world.bins)

    def carry(self, batch: dict[str, Any]) -> Carry:
        """Carry ahead of the rows: that in `batch["carry"]` where `batch["carried"]` (B,), else
        the initial one."""
        fresh = self.world.initial(len(batch["reward"]), batch["age"][:, 0])
        if "carry" not in batch:
            return fresh

        def choose(kept: Tensor, new: Tensor) -> Tensor:
            return torch.where(batch["carried"].view(-1, *[1] * (new.dim() - 1)), kept, new)

        return tree_map(choose, batch["carry"], fresh)

    def forward(
        self, batch: dict[str, Any], noise: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor], Carry]:
        """Total loss (), metrics, detached scalars on the batch's device, and the carry after the
        last step, detached.

        batch: what the replay holds, (B, T, ...) each, `plan`, if the loader made one, and what
        `carry` reads, where rows go on from a state; noise: from `noise`.
        """
        batch = {**batch, "action": self.policy.encode(batch["action"])}
        losses, start = self.world.losses(batch, self.carry(batch), noise["post"])
        dynamics = self.config.behaviour.actor_grad == "dynamics"
        rows, length = batch["reward"].shape
        count = self.starts(length)
        trajectory = imagine(self.world, self.actor, self.policy, start, noise, dynamics, count)
        imagined, first_return, metrics = self.imagination_losses(trajectory)
        if self.config.loss.repval:
            boot = first_return.view(rows, count)
            losses["repval"] = self.replay_value_loss(batch, start, boot)
        means = {key: value.mean() for key, value in {**losses, **imagined}.items()}
        scales = self.scales(means)
        total = sum(scales[key] * value for key, value in means.items())
        metrics.update({f"loss/{key}": value for key, value in means.items()})
        metrics.update(self.latent_metrics(batch, start))
        metrics["loss/total"] = total
        # Copies: views of the last steps would keep, and save, those of all steps.
        after = tree_map(lambda leaf: leaf.detach().clone(), start["carry"])
        return total, {key: value.detach() for key, value in metrics.items()}, after

    def scales(self, losses: dict[str, Tensor]) -> dict[str, float]:
        """What each of `losses` counts for in their sum: all reconstructions `loss.rec`."""
        return {key: getattr(self.config.loss, key.partition("/")[0]) for key in losses}

    def imagination_losses(
        self, trajectory: Trajectory
    ) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]:
        """Policy and value losses (H, N), the return of every start (N,), and metrics."""
        behaviour, world = self.config.behaviour, self.world
        dynamics = behaviour.actor_grad == "dynamics"
        hz, x = trajectory.hz, trajectory.x
        features = hz.detach(), None if x is None else x.detach()
        logits = self.critic(*features)
        # Returns are differentiated only by the dynamics gradient.
        with frozen(world, self.critic) if dynamics else torch.no_grad():
            reward = world.predict_reward(hz[1:])
            cont = world.predict_cont(hz)
            value = self.value(self.critic(hz, x) if dynamics else logits)
            returns = lambda_return(reward.T, cont[1:].T, value[1:].T, behaviour.lam).T
        discount = world.discount
        # The first factor is the model's own estimate that the start is not an end.
        weight = (cont.detach().cumprod(0) / discount)[:-1]
        if self.training:
            with torch.no_grad():
                bounds = percentile_range(of_all_ranks(returns.detach()))
                self.return_range.lerp_(bounds, behaviour.return_rate)
        low, high = self.return_range
        scale = (high - low).clamp(min=behaviour.return_floor)
        advantage = (returns - value[:-1]) / scale
        logp, entropy = self.policy.log_prob_entropy(trajectory.out, trajectory.action.detach())
        gain = advantage if dynamics else logp * advantage.detach()
        policy_loss = -weight * (gain + behaviour.entropy * entropy)
        before = tuple(None if part is None else part[:-1] for part in features)
        value_loss = weight * self.critic_loss(logits[:-1], before, returns.detach())
        metrics = {
            "policy/entropy": entropy.mean(),
            "policy/advantage": advantage.mean(),
            "policy/advantage_size": advantage.abs().mean(),
            "return/mean": returns.mean(),
            "return/low": low.clone(),
            "return/high": high.clone(),
            "value/mean": value.mean(),
            "imagined/reward": reward.mean(),
            "imagined/cont": cont.mean(),
        }
        losses = {"policy": policy_loss, "value": value_loss}
        return losses, returns[0].detach(), metrics

    def critic_loss(
        self, logits: Tensor, features: tuple[Tensor, Tensor | None], target: Tensor
    ) -> Tensor:
        """Two-hot loss of the critic's `logits` at `features` towards `target`, plus the pull
        towards the slow critic."""
        hz, x = (None if part is None else part.detach() for part in features)
        with torch.no_grad():
            slow = self.value(self.slow(hz, x))
        targets = [(target, 1.0), (slow, self.config.behaviour.slow_reg)]
        return twohot_losses(logits, targets, self.world.bins)

    def replay_value_loss(
        self, batch: dict[str, Any], start: dict[str, Any], boot: Tensor
    ) -> Tensor:
        """Value loss (B, K-1) on the last K replayed states, with gradient into the world model.

        boot (B, K) are the imagined returns of these states. Rewards and ends are real. A time
        limit cuts lambda but is bootstrapped; only a terminal step stops the return.
        """
        count = boot.shape[1]
        reward, is_last, is_terminal = (
            batch[key][:, -count:].float() for key in ("reward", "is_last", "is_terminal")
        )
        live = (1 - is_terminal[:, 1:]) * self.world.discount
        mix = (1 - is_last[:, 1:]) * self.config.behaviour.lam
        returns = lambda_return(reward[:, 1:], live, boot[:, 1:], mix)
        weight = 1 - is_last[:, :-1]
        features = start["hz"][:, -count:-1], start["x"][:, -count:-1]
        return weight * self.critic_loss(self.critic(*features), features, returns)

    def latent_metrics(self, batch: dict[str, Tensor], start: dict[str, Any]) -> dict[str, Tensor]:
        norm = start["x"].detach().norm(dim=-1).flatten()
        return {
            "latent/prior_entropy": start["prior_entropy"].mean(),
            "latent/post_entropy": start["post_entropy"].mean(),
            "latent/x_size": start["x"].detach().square().mean().sqrt(),
            "latent/h_size": start["h"].detach().square().mean().sqrt(),
            "replay/reward": batch["reward"].float().mean(),
            **norm_by_age(norm, batch["age"].flatten(), "replay"),
        }

    @torch.no_grad()
    def update_slow(self) -> None:
        """Move the slow critic towards the critic; called after the optimiser."""
        torch._foreach_lerp_(
            list(self.slow.parameters()),
            list(self.critic.parameters()),
            self.config.behaviour.slow_rate,
        )
