"""The settings of a fresh run: what was left to the program is chosen, with a reason that is kept.

In the order in which what a choice depends on exists: the machine, the spaces of the environments,
the model. Of several ranks the first one chooses for all.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from agent import auto
from agent.checks import check_ranks, fewest_steps, refused
from agent.ranks import Ranks
from agent.update import Update
from configs import load as configs
from configs.schema import Config
from envs.make import cheap
from replay.budget import fit_capacity
from worldmodels.cores import CORES


class Choices:
    def __init__(self, folder: Path, given: set[str], ranks: Ranks):
        """`given`: the settings that the user named, which no choice changes."""
        self.folder, self.given, self.ranks = folder, given, ranks
        self.reasons: list[str] = []

    def choose(self, function: Callable[..., tuple[Config, str]], *args: Any) -> Config:
        config, why = self.ranks.first(lambda: function(*args))
        self.reasons.append(why)
        return config

    def by_machine(self, config: Config) -> Config:
        ranks = self.ranks
        config = self.choose(auto.choose_device, config)
        config = self.choose(auto.choose_threads, config, ranks.beside)
        if config.loop.mode == "offline":
            # One environment for its spaces, never stepped.
            one = {"env.count": ranks.count, "env.processes": "no"}
            config = configs.replace_flat(config, one)
        return self.choose(auto.choose_envs, config, cheap(config.task), ranks.count, ranks.beside)

    def by_spaces(self, config: Config, obs_space: dict[str, Any], act_space: Any) -> Config:
        count = self.ranks.count
        config = self.choose(auto.choose_size, config, self.given, obs_space, act_space, count)
        check_ranks(config, count)
        return config

    def by_model(self, config: Config, update: Update, each: float) -> Config:
        """A step of the replay is projected to take `each` bytes."""
        ranks, replay = self.ranks, config.replay
        config = self.choose(auto.choose_precision, config, update, ranks.count)
        explicit = "replay.capacity" in self.given
        steps = 0 if config.loop.mode == "offline" else config.stop.steps
        # Weights and two moments of the optimiser.
        checkpoint = 12 * sum(weight.numel() for weight in update.parameters())
        least = fewest_steps(config, ranks.count)
        wanted = replay.capacity, explicit, steps, least, each, checkpoint
        with refused():
            capacity, why = ranks.first(lambda: fit_capacity(self.folder, *wanted))
        self.reasons.append(why)
        if ranks.count > 1:
            rows, slots = config.batch.size, config.env.count
            self.reasons.append(
                f"ranks {ranks.count}: each has {ranks.share(rows)} of {rows} rows of a batch, "
                f"{ranks.share(slots)} of {slots} environments and {ranks.share(capacity):,} of "
                f"{capacity:,} steps of the replay"
            )
        return configs.replace_flat(config, {"replay.capacity": capacity})

    def changed(self, config: Config) -> str:
        """What is not at its default, but for settings of other cores."""
        flat, default = configs.to_flat(config), configs.to_flat(Config())
        others = tuple(f"{name}." for name in CORES if name != config.core)
        lines = [
            f"{key}: {value}"
            for key, value in flat.items()
            if value != default[key] and not key.startswith(others)
        ]
        lines.append(f"all other settings, at their defaults: {self.folder}/config.yaml")
        return "\n".join(lines)

    def write(self, config: Config) -> None:
        """Say what was chosen and why, and write both into the run's folder."""
        reasons = "\n".join(self.reasons)
        print(f"{self.changed(config)}\n{reasons}", flush=True)
        if self.ranks.number == 0:
            configs.save(config, self.folder / "config.yaml")
            (self.folder / "choices.txt").write_text(reasons + "\n")
