"""Whole episodes of a trained agent with what its core received: what diagnostics work on.

They are played by `evaluate.play`, with sampled actions and seeds that training never uses. A step
is kept as a replay keeps it, with the arrays `label/<name>` that only the simulator knows, the
classes of z and the sizes of h and x; h and x themselves are kept at some steps alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agent.evaluate import play, pool_of, shares
from agent.update import Update
from configs import load as configs
from configs.mkl import choose_products
from configs.schema import Config
from envs.make import cheap
from worldmodels.encoder import one_hot

EPISODES, FEW = 400, 24  # played where a step is cheap, and elsewhere


@dataclass
class Episode:
    """Of N + 1 steps: `steps` holds arrays (N + 1, ...), `latents` h, x and z by step."""

    steps: dict[str, Any]
    latents: dict[int, dict[str, Tensor]]

    def __len__(self) -> int:
        return len(self.steps["reward"])


class Recorder:
    """What `play` calls: keeps the first `wanted[slot]` episodes, with latents at steps `ages`."""

    def __init__(self, wanted: list[int], ages: set[int]):
        self.wanted, self.ages = wanted, ages
        self.open: dict[int, tuple[list[dict[str, Any]], dict[int, dict[str, Tensor]]]] = {}
        self.done: dict[tuple[int, int], Episode] = {}

    def __call__(
        self, ids: np.ndarray, obs: dict[str, np.ndarray], action: np.ndarray, actor: Any
    ) -> None:
        world = actor.update.world
        hz, x = actor.latents["hz"], actor.latents["x"]
        h, z = hz[:, : world.h], hz[:, world.h :]
        sizes = {"h_norm": h.norm(dim=-1).cpu().numpy(), "x_norm": x.norm(dim=-1).cpu().numpy()}
        classes = z.unflatten(-1, (world.groups, world.classes)).argmax(-1).to(torch.int16)
        seen = {key: value for key, value in obs.items() if not key.startswith("log/")}
        seen |= {"action": action, "z": classes.cpu().numpy(), **sizes}
        for row, slot in enumerate(ids.tolist()):
            name = slot, int(obs["episode"][row])
            if name[1] >= self.wanted[slot]:
                continue
            if obs["is_first"][row]:
                self.open[slot] = [], {}
            steps, latents = self.open[slot]
            if len(steps) in self.ages:
                parts = {"h": h[row], "x": x[row], "z": z[row]}
                latents[len(steps)] = {key: part.float().cpu() for key, part in parts.items()}
            steps.append({key: value[row] for key, value in seen.items()})
            if obs["is_last"][row]:
                stacked = {key: np.stack([step[key] for step in steps]) for key in steps[0]}
                self.done[name] = Episode(stacked, latents)

    @property
    def episodes(self) -> list[Episode]:
        return [self.done[name] for name in sorted(self.done)]


@dataclass(eq=False)
class Recording:
    config: Config
    update: Update  # whole, on the CPU, with the weights of the newest checkpoint
    about: dict[str, Any]  # task, core, agent_step, update
    episodes: list[Episode] = field(default_factory=list)

    def typical(self) -> int:
        """The steps that three in four episodes have."""
        return int(np.quantile([len(episode) for episode in self.episodes], 0.25))

    def windows(self, length: int, rows: int) -> dict[str, Tensor]:
        """At most `rows` windows (B, `length`, ...) within episodes, their ends first of all.

        ValueError when no episode is so long.
        """
        fits = [episode for episode in self.episodes if len(episode) >= length]
        if not fits:
            longest = max(map(len, self.episodes), default=0)
            raise ValueError(f"no episode of {length} steps: the longest has {longest}")
        each = -(-rows // len(fits))
        places = [
            (number, round(share * (len(fits[number]) - length)))
            for share in np.linspace(1, 0, each)
            for number in range(len(fits))
        ]
        chosen = list(dict.fromkeys(places))[:rows]
        return self.batch(
            [
                {key: value[start : start + length] for key, value in fits[number].steps.items()}
                for number, start in chosen
            ]
        )

    def rows(self, length: int, count: int) -> dict[str, Tensor]:
        """At most `count` rows (B, `length`, ...) of the episodes laid end to end, joins included,
        as a replay gives them."""
        total = sum(map(len, self.episodes))
        if total < length:
            raise ValueError(f"{len(self.episodes)} episodes have {total} steps, not {length}")
        parts, taken = [], 0
        for episode in self.episodes:  # not all: pictures are large
            if taken >= length * count:
                break
            parts.append(episode.steps)
            taken += len(episode)
        whole = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
        starts = range(0, min(taken, length * count) - length + 1, length)
        return self.batch(
            [{key: value[at : at + length] for key, value in whole.items()} for at in starts]
        )

    @staticmethod
    def batch(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        return {key: torch.from_numpy(np.stack([row[key] for row in rows])) for key in rows[0]}

    def core_inputs(self, batch: dict[str, Tensor]) -> Tensor:
        """u (B, T, U) of the steps of `batch`, whose rows begin as replayed ones do."""
        world = self.update.world
        z = one_hot(batch["z"], (world.classes,) * world.groups)
        both = torch.cat([z, self.update.policy.encode(batch["action"])], -1)
        both = torch.cat([torch.zeros_like(both[:, :1]), both[:, :-1]], 1)
        return torch.where(batch["is_first"][..., None], 0.0, both)


def record(
    config: Config,
    run: dict[str, Any],
    episodes: int,
    ages: set[int],
    steps: int = 0,
    explore: float = 0.0,
) -> Recording:
    """Play the run that `load_run` gave and keep what it did; 0 `episodes`: none are played.

    `steps`: at most so many actions an episode (0: as trained); `explore`: the share of discrete
    actions that are drawn uniformly (0: as trained). ValueError for a run that cannot be used.
    """
    if steps:
        config = configs.replace_flat(config, {"env.time_limit": steps})
    choose_products(config.products)
    torch.set_num_threads(1)  # many small operators, beside other processes
    pool = pool_of(config, max(1, episodes), labels=True)
    try:
        update = Update(config, pool.obs_space, pool.act_space).eval().requires_grad_(False)
        try:
            update.load_state_dict(run["weights"])
        except RuntimeError as error:
            raise ValueError(f"the checkpoint is of another version: {error}") from None
        about = {"task": config.task, "core": config.core}
        about |= {key: run[key] for key in ("agent_step", "update")}
        recorder = Recorder(shares(episodes, pool.count), ages)
        if episodes:
            if explore:
                if pool.act_space.kind != "discrete":
                    raise ValueError("--explore: the actions of this task are not discrete")
                update.policy.unimix = explore
            play(update, pool, episodes, config.seed, greedy=False, watch=recorder)
    finally:
        pool.close()
    return Recording(config, update, about, recorder.episodes)


def usual_episodes(task: str) -> int:
    return EPISODES if cheap(task) else FEW
