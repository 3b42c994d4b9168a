"""The world model: encoder -> z ~ posterior -> u -> core -> prior, decoder, reward, continue.

The posterior belongs here, not to the core. `parallel` is q(z | o): every z is drawn at once and
the core runs in one scan. `recurrent` is q(z | h, o), DreamerV3's own: a loop of core steps,
allowed for cores whose imagination context is their state. Both return the same dictionary.
Timing: z_t and h_t describe o_t; h_t has absorbed z_{t-1} and a_{t-1}, which are zeroed together
where is_first_t. The diagram is in README.md.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from configs.schema import Config
from worldmodels import latent
from worldmodels.cores import make_core
from worldmodels.decoder import Decoder
from worldmodels.dists import make_bins, twohot_loss, twohot_mean
from worldmodels.encoder import Encoder
from worldmodels.layers import MLP, Linear, RMSNorm, init_weight
from worldmodels.products import LoopProduct
from worldmodels.uncompiled import uncompiled

Carry = dict[str, Any]  # core: state of the core; z (B, S*C); action (B, A)


def tree_map(function: Any, *trees: Any) -> Any:
    """A tree of `function` of the leaves that stand at the same place of each tree."""
    if isinstance(trees[0], dict):
        return {k: tree_map(function, *(tree[k] for tree in trees)) for k in trees[0]}
    return function(*trees)


# Neither encoder nor decoder draws random numbers.
recompute = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


class Posterior(nn.Module):
    """Logits (..., S*C) of q(z | o), or of q(z | h, o) when `h` is the width of h, not 0."""

    def __init__(self, embed: int, h: int, hidden: int, outputs: int):
        super().__init__()
        self.from_embed = Linear(embed, hidden)
        init_weight(self.from_embed.weight, embed + h)
        if h:
            self.from_h = nn.Linear(h, hidden, bias=False)
            init_weight(self.from_h.weight, embed + h)
        self.norm = RMSNorm(hidden, silu=True)
        self.out = Linear(hidden, outputs)

    def project(self, embed: Tensor) -> Tensor:
        """The part that reads the embedding: independent of h, so it is computed for all T."""
        return self.from_embed(embed)

    def prepare(self) -> tuple[LoopProduct, LoopProduct]:
        """The two matrices that a loop over time applies at every step."""
        return LoopProduct(self.from_h.weight), LoopProduct(self.out.weight)

    def forward(self, projected: Tensor) -> Tensor:
        """Logits of q(z | o)."""
        return self.out(self.norm(projected))

    def step(
        self, projected: Tensor, h: Tensor, prepared: tuple[LoopProduct, LoopProduct]
    ) -> Tensor:
        """Logits of q(z | h, o)."""
        from_h, out = prepared
        return out(self.norm(projected + from_h(h))) + self.out.bias


class WorldModel(nn.Module):
    def __init__(self, config: Config, obs_space: dict[str, Any], act_space: Any):
        """Spaces have `kind`, `shape` and `classes`; raises ValueError for settings that clash."""
        super().__init__()
        model = config.model
        self.obs_space, self.act_space = obs_space, act_space
        self.action = sum(act_space.classes or act_space.shape)
        self.groups, self.classes, self.unimix = model.groups, model.classes, model.unimix
        self.z = z = model.groups * model.classes
        self.free, self.chunk = config.loss.free, model.chunk
        self.discount = 1 - 1 / config.behaviour.discount_horizon
        self.core = make_core(config, z, self.action)
        self.h = h = model.readout or self.core.out
        self.readout = Linear(self.core.out, h) if model.readout else nn.Identity()
        posterior = model.posterior
        if posterior == "auto":
            posterior = "recurrent" if config.core == "gru" else "parallel"
        if posterior == "recurrent" and not self.core.markov:
            raise ValueError(
                f"model.posterior recurrent needs a core whose context is its state; "
                f"{config.core} is not one: set model.posterior parallel"
            )
        self.recurrent = posterior == "recurrent"
        self.encoder = Encoder(obs_space, model.depth, model.units, model.layers, model.conv)
        self.decoder = Decoder(obs_space, h, z, model.depth, model.units, model.layers, model.conv)
        self.posterior = Posterior(self.encoder.out, h * self.recurrent, model.hidden, z)
        self.prior = MLP(h, model.hidden, 2, z)
        self.reward = MLP(h + z, model.units, 1, 255, outscale=0.0)
        self.cont = MLP(h + z, model.units, 1, 1)
        self.register_buffer("bins", make_bins(), persistent=False)

    def initial(self, batch: int, age: Tensor | None = None) -> Carry:
        """Carry ahead of rows whose first step is `age` (B,) steps into its episode, or 0."""
        zeros = self.bins.new_zeros
        core = self.core.initial(batch, age)
        return {"core": core, "z": zeros(batch, self.z), "action": zeros(batch, self.action)}

    def log_probs(self, logits: Tensor) -> Tensor:
        grouped = logits.unflatten(-1, (self.groups, self.classes))
        return latent.mixed_log_probs(grouped, self.unimix)

    def sample(self, logits: Tensor, noise: Tensor) -> Tensor:
        """Flat z (..., S*C) drawn from logits (..., S*C) under `noise` (..., S, C)."""
        grouped = logits.unflatten(-1, (self.groups, self.classes))
        return latent.sample(latent.mixed_probs(grouped, self.unimix), noise).flatten(-2)

    def noise(self, *lead: int, generator: torch.Generator | None = None) -> Tensor:
        """Exponential noise (*lead, S, C) for `latent.sample`."""
        return latent.exponential_like(
            self.bins.new_empty(*lead, self.groups, self.classes), generator
        )

    def encode(self, obs: dict[str, Tensor]) -> Tensor:
        """Embeddings (B, T, E) of a batch."""
        if not self.chunk:
            return self.encoder(obs)
        lead = next(iter(obs.values())).shape[:2]
        parts = zip(*(value.flatten(0, 1).split(self.chunk) for value in obs.values()), strict=True)
        embeds = [recompute(self.encoder, dict(zip(obs, part, strict=True))) for part in parts]
        return torch.cat(embeds).unflatten(0, lead)

    def decode(self, h: Tensor, z: Tensor) -> dict[str, Tensor]:
        """Predictions (B, T, ...) of a batch."""
        if not self.chunk:
            return self.decoder(h, z)
        parts = zip(*(value.flatten(0, 1).split(self.chunk) for value in (h, z)), strict=True)
        outs = [recompute(self.decoder, *part) for part in parts]
        return {k: torch.cat([out[k] for out in outs]).unflatten(0, h.shape[:2]) for k in outs[0]}

    def observe(
        self,
        embed: Tensor,
        action: Tensor,
        is_first: Tensor,
        carry: Carry,
        noise: Tensor,
        plan: Any = None,
    ) -> tuple[dict[str, Any], Carry]:
        """Latents of a batch: embed (B, T, E), action (B, T, A) taken at t, is_first (B, T).

        `plan` is the core's for these rows, if the loader made one (`SequenceCore.plan`).

        Returns a dict of h (B, T, D), x (B, T, X), z (B, T, S*C), post (B, T, S, C) as
        log-probabilities, context (for `core.imagine`), and the carry after the last step.
        """
        parallel = functools.partial(self.observe_parallel, plan=plan)
        run = self.observe_recurrent if self.recurrent else parallel
        previous = torch.cat([carry["action"][:, None], action[:, :-1]], 1)
        previous = torch.where(is_first[..., None], 0.0, previous)
        out, core = run(self.posterior.project(embed), previous, is_first, carry, noise)
        return out, {"core": core, "z": out["z"][:, -1], "action": action[:, -1]}

    def observe_parallel(
        self,
        projected: Tensor,
        previous: Tensor,
        is_first: Tensor,
        carry: Carry,
        noise: Tensor,
        plan: Any,
    ) -> tuple[dict[str, Any], Any]:
        logits = self.posterior(projected)
        z = self.sample(logits, noise)
        z_before = torch.cat([carry["z"][:, None], z[:, :-1]], 1)
        z_before = torch.where(is_first[..., None], 0.0, z_before)
        u = torch.cat([z_before, previous], -1)
        h, x, core, context = self.core.scan(u, is_first, carry["core"], plan)
        h = self.readout(h)
        return {"h": h, "x": x, "z": z, "post": self.log_probs(logits), "context": context}, core

    @uncompiled  # unrolled over T, the graph would take too long to compile
    def observe_recurrent(
        self, projected: Tensor, previous: Tensor, is_first: Tensor, carry: Carry, noise: Tensor
    ) -> tuple[dict[str, Any], Any]:
        state, z = carry["core"], carry["z"]
        prepared, posterior = self.prepare()
        keys = ("h", "x", "z", "post")
        steps: dict[str, list[Tensor]] = {key: [] for key in keys}
        states: dict[str, list[Tensor]] = {key: [] for key in state}
        # unbind, not indexing: the gradient of one index is as large as the whole batch.
        inputs = (value.unbind(1) for value in (projected, previous, is_first, noise))
        for seen, action, first, random in zip(*inputs, strict=True):
            u = torch.cat([torch.where(first[:, None], 0.0, z), action], -1)
            h, x, state = self.core.step(u, first, state, prepared)
            h = self.readout(h)
            logits = self.posterior.step(seen, h, posterior)
            z = self.sample(logits, random)
            for key, value in zip(keys, (h, x, z, logits), strict=True):
                steps[key].append(value)
            for key, value in state.items():
                states[key].append(value)
        out = {key: torch.stack(values, 1) for key, values in steps.items()}
        out["post"] = self.log_probs(out["post"])
        context = {key: torch.stack(values, 1) for key, values in states.items()}
        return {**out, "context": context}, state

    def prepare(self) -> tuple[Any, Any]:
        """What the core and a recurrent posterior make of their weights alone, for many steps."""
        return self.core.prepare(), self.posterior.prepare() if self.recurrent else None

    def step(
        self,
        obs: dict[str, Tensor],
        is_first: Tensor,
        carry: Carry,
        noise: Tensor,
        prepared: tuple[Any, Any] | None = None,
    ) -> tuple[dict[str, Tensor], Carry]:
        """Acting: one observation (B, ...) to `hz`, h and z side by side, and x (B, ...).

        The action of the carry is filled in later. `prepared` is of `prepare`, by the same weights.
        """
        of_core, of_posterior = prepared or self.prepare()
        first = is_first[:, None]
        z, action = (torch.where(first, 0.0, carry[key]) for key in ("z", "action"))
        u = torch.cat([z, action], -1)
        h, x, core = self.core.step(u, is_first, carry["core"], of_core)
        h = self.readout(h)
        projected = self.posterior.project(self.encoder(obs))
        if self.recurrent:
            logits = self.posterior.step(projected, h, of_posterior)
        else:
            logits = self.posterior(projected)
        z = self.sample(logits, noise)
        latents = {"hz": torch.cat([h, z], -1), "x": x}
        return latents, {"core": core, "z": z, "action": carry["action"]}

    def predict_reward(self, hz: Tensor) -> Tensor:
        return twohot_mean(self.reward(hz), self.bins)

    def predict_cont(self, hz: Tensor) -> Tensor:
        """Probability of going on times the discount, which this head has learned."""
        return torch.sigmoid(self.cont(hz).float().squeeze(-1))

    def losses(
        self, batch: dict[str, Any], carry: Carry, noise: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """World-model losses, each (B, T): dyn, rep, reward, cont and rec/<key> a decoded key.

        batch: observations, action (B, T, A) encoded, reward, is_first, is_terminal, and `plan`, if
        there is one. Also returns
        the latents of `observe`, `hz` (B, T, D + S*C), which every head reads, and `carry`, that
        after the last step.
        """
        obs = {key: batch[key] for key in self.obs_space}
        inputs = batch["action"], batch["is_first"], carry, noise, batch.get("plan")
        out, out["carry"] = self.observe(self.encode(obs), *inputs)
        prior = self.log_probs(self.prior(out["h"]))
        losses = {}
        losses["dyn"], losses["rep"] = latent.kl_losses(out["post"], prior, self.free)
        out["hz"] = torch.cat([out["h"], out["z"]], -1)
        losses["reward"] = twohot_loss(self.reward(out["hz"]), batch["reward"], self.bins)
        # The discount is folded into the continue target (DreamerV3 code, `contdisc`).
        target = (1 - batch["is_terminal"].float()) * self.discount
        logits = self.cont(out["hz"]).float().squeeze(-1)
        losses["cont"] = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
        prediction = self.decode(out["h"], out["z"])
        losses.update(self.decoder.losses(prediction, obs))
        out["prior_entropy"], out["post_entropy"] = (
            latent.entropy(value.detach()) for value in (prior, out["post"])
        )
        return losses, out
