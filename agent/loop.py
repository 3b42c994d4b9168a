"""The online loop in lockstep: step, act, store, learn; log, save, resume.

    recv -> act -> send -> replay.add -> updates that the train ratio owes -> recv ...

Workers step while the learner learns. Everything the run is made of can be saved between `send`
and `recv`, and comes back so that a resumed run on a CPU equals the uninterrupted one.
`agent/overlap.py` runs `tick` in a thread beside `learn`: what `tick` writes and a row or a
checkpoint reads is therefore a number, or a deque that is taken from one item at a time.

Of several ranks each steps its own slots; what they do together, an update, a row, a save or the
end, follows from what they agree on (`agent/counters.py`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import deque
from typing import Any

import numpy as np
import torch

from agent import deal, limits, media, seeding
from agent.actor import Actor
from agent.ages import norm_by_age
from agent.carry import make_carry
from agent.checkpoint import Checkpoints
from agent.counters import MEDIA, ROW, SAVE, Counters
from agent.evaluator import Evaluator
from agent.learner import Learner
from agent.logger import Logger, Terminal
from agent.pace import span
from agent.ranks import Ranks
from agent.update import Update
from agent.usage import Usage
from configs.schema import Config
from envs.pool import EnvPool
from replay.loader import Loader
from replay.replay import Replay

log = logging.getLogger("agent")

LONGEST_CONTEXT = 64
KEEP_FRAMES = 200


class Loop(Counters):
    def __init__(
        self,
        config: Config,
        pool: EnvPool,
        actor: Actor,
        learner: Learner,
        replay: Replay,
        loader: Loader,
        logger: Logger | None,
        terminal: Terminal,
        checkpoints: Checkpoints | None,
        flops_per_update: int,
        evaluator: Evaluator | None = None,
        ranks: Ranks | None = None,
    ):
        """`logger` and `checkpoints` are those of the first rank, None on the others."""
        super().__init__(config, ranks or Ranks(), learner)
        self.pool, self.actor = pool, actor
        self.replay, self.loader, self.logger = replay, loader, logger
        self.terminal, self.checkpoints, self.evaluator = terminal, checkpoints, evaluator
        self.flops_per_update = flops_per_update
        self.carry = make_carry(config, replay, learner.update.world)
        count = pool.count
        self.returns = np.zeros(count)
        self.lengths = np.zeros(count, np.int64)
        self.recent: deque[float] = deque(maxlen=100)
        self.window: deque[dict[str, torch.Tensor]] = deque(maxlen=100)
        # Norm of x, age and staleness of the newest ticks.
        self.acted: deque[tuple[torch.Tensor, np.ndarray, int]] = deque(maxlen=1000)
        self.staleness = 0  # updates that are due and that the acting weights do not hold yet
        self.finished: deque[tuple[dict[str, float], dict[str, Any]]] = deque()  # not yet logged
        self.frames: list[np.ndarray] = []
        self.last_episode: np.ndarray | None = None
        self.rate_mark = (self.began, 0, 0)
        self.usage = Usage(replay.folder, learner.device)
        self.expendable = False  # what is under way was saved before, and may be lost
        # What the kept checkpoints need of the replay, by their names.
        self.needs: dict[str, dict[str, Any]] = {}

    # -- the loop ---------------------------------------------------------------------------

    def run(self) -> dict[str, Any] | None:
        """Until a limit of `stop` or a request to end; saves in either case.

        Returns the setting whose limit it was (`by`) and where the run was then (its axes); None
        when the run was asked to end.
        """
        if self.ranks.first(lambda: not self.checkpoints.published()):
            self.save()
        self.ranks.wait()
        self.go()
        self.learner.check()
        # A resumed run receives the last actions again: what they took is in this row alone.
        late = 0 if self.leaving else sum(map(self.beyond, self.pool.settle()))
        self.own_correction += late
        self.ranks.wait()
        self.agree()
        self.row()
        end = {"by": self.limit(), **self.axes()}
        self.own_correction -= late
        self.save()
        # The other ranks leave: only the first has anything to do here.
        if self.evaluator and not self.leaving:
            self.evaluator.finish(self.axes(), self.learner.update, lambda: bool(self.stop))
            self.publish(self.saved)  # with the evaluation among the metrics
        return None if self.leaving or self.stop else end

    def limit(self) -> str:
        """The setting whose limit all ranks agree to have reached, or nothing."""
        agreed = {"agent_step": self.agreed_step, "wall_seconds": self.agreed_seconds}
        return limits.reached(self.config.stop, {**self.axes(), **agreed})

    @property
    def over(self) -> bool:
        """Nothing more is to be done: by a request, or a limit other than that of steps, after
        which the updates that are owed are still made."""
        return bool(self.leaving) or self.limit() not in ("", "stop.steps")

    def go(self) -> None:
        """Ticks and the updates that they owe, until the end or a request to stop."""
        # First what is owed: a run that was stopped between two updates goes on with the second.
        while not self.learn():
            self.report()
            if self.agreed_step >= self.config.stop.steps:
                break
            self.tick()

    def weights(self) -> tuple[Update, int]:
        """What acting uses, and the updates that it holds."""
        return self.learner.update, self.learner.updates

    def tick(self) -> None:
        """One step of the slots that are due, into the replay."""
        self.actor.use(*self.weights())
        ids, obs = self.pool.recv()
        states = self.carry.before(obs, ids, self.actor, self.due() - self.staleness)
        action = self.actor.act(ids, obs)
        self.pool.send(ids, action)
        self.replay.add(ids, {**obs, "action": action}, states)
        self.own_step += int((~obs["is_last"]).sum())
        self.own_correction += self.beyond(obs)
        self.returns[ids] += obs["reward"]
        self.lengths[ids] += ~obs["is_first"]
        self.acted.append((self.actor.x_norm, obs["age"], self.staleness))
        self.keep_frames(ids, obs)
        for row in np.flatnonzero(obs["is_last"]):
            self.finish_episode(int(ids[row]), {key: value[row] for key, value in obs.items()})
        filled = self.own_fill is None and len(self.replay) >= self.fill
        if filled and self.replay.ready(self.config.batch.length):
            self.own_fill = self.own_step

    def finish_episode(self, slot: int, obs: dict[str, Any]) -> None:
        score = {
            "return": float(self.returns[slot]),
            "length": int(self.lengths[slot]),
            "truncated": not bool(obs["is_terminal"]),
            "slot": self.pool.first + slot,
            "episode": int(obs["episode"]),
            "seed": self.pool.seed_of(slot, int(obs["episode"])),
            **{key: float(value) for key, value in obs.items() if key.startswith("log/")},
        }
        self.returns[slot], self.lengths[slot] = 0.0, 0
        self.finished.append((self.axes(), score))

    def learn(self) -> bool:
        """The updates that are owed; true when the run is over."""
        while True:
            self.agree()
            if self.over:
                return True
            if self.learner.updates >= self.owed:
                return False
            if not self.learner.updates:
                self.terminal.show("replay is large enough: first update ...", force=True)
            self.train()
            self.report()

    def train(self) -> None:
        # A compiler takes minutes and hears no notice: one ends the run as it is saved here. Of
        # several ranks none can leave so, for the others wait for this update.
        if self.learner.compiles_next and self.ranks.count == 1:
            self.save()
            self.expendable = True
        number = self.learner.updates
        batch = self.loader.next(number)
        windows = self.loader.drawn
        self.window.append(self.learner.train({**batch, **self.carry.ahead(windows)}))
        self.expendable = False
        self.carry.after(windows, self.config.batch.length, self.learner.carry, number)

    # -- what is seen -----------------------------------------------------------------------

    def number(self, run: dict[str, Any]) -> int:
        """What checkpoints are numbered by."""
        return run["agent_step"]

    def axes(self) -> dict[str, float]:
        return {
            "env_step": self.env_step,
            "agent_step": self.agent_step,
            "update": self.learner.updates,
            "train_flops": self.learner.updates * self.flops_per_update,
            "wall_seconds": round(self.wall_seconds, 3),
        }

    def report(self) -> None:
        """What all ranks do now, by `agree`."""
        if self.evaluator:
            self.evaluator.look(self.axes(), self.learner.update)
        duties, self.duties = self.duties, 0
        if duties & ROW:
            self.row()
        if duties & MEDIA:
            self.last_media = time.monotonic()
            if self.ranks.number == 0:
                self.make_media()
            self.ranks.wait()
        if duties & SAVE:
            self.save()

    def log_scores(self) -> None:
        """The episodes that ended on any rank, in the order of their steps."""
        finished = [self.finished.popleft() for _ in range(len(self.finished))]
        parts = self.ranks.gather(finished)
        if parts is None:
            return
        for axes, score in sorted(deal.flat(parts), key=lambda item: item[0]["agent_step"]):
            self.recent.append(score["return"])
            self.logger.score(axes, score)

    def row(self) -> None:
        """One row of metrics; the only place where the host waits for the device's metrics."""
        self.learner.check()
        self.log_scores()
        now = time.monotonic()
        since, steps, updates = self.rate_mark
        span = max(now - since, 1e-9)
        metrics: dict[str, float] = {}
        if self.window:
            keys = self.window[0].keys()
            stacked = torch.stack(
                [torch.stack([row[key].float() for row in self.window]).nanmean() for key in keys]
            )
            metrics.update(zip(keys, stacked.tolist(), strict=True))
            self.window.clear()
        acted = [self.acted.popleft() for _ in range(len(self.acted))]
        if acted:
            norms, ages, staleness = zip(*acted, strict=True)
            metrics["acting/staleness"] = float(np.mean(staleness))
            metrics["acting/staleness_max"] = float(max(staleness))
            age = torch.from_numpy(np.concatenate(ages))
            acting = norm_by_age(torch.cat(norms), age, "acting")
            metrics.update((key, value.item()) for key, value in acting.items())
        # An age that was not seen since the last row has no norm.
        metrics = {k: v for k, v in metrics.items() if k[:7] != "x_norm/" or math.isfinite(v)}
        metrics["env/restarts"] = self.pool.restarts
        metrics.update(self.usage.measure())
        metrics.update({f"replay/{key}": value for key, value in self.replay.stats().items()})
        metrics.update(self.carry.stats())
        self.last_row = now
        rows = self.ranks.gather(metrics)
        if rows is None:
            return
        metrics = deal.joined_row(rows)
        metrics["rate/agent_steps"] = (self.agent_step - steps) / span
        metrics["rate/updates"] = (self.learner.updates - updates) / span
        metrics["optim/skipped"] = self.learner.skipped
        if self.evaluator:
            metrics.update(self.evaluator.stats())
        if self.recent:
            metrics["episode/return_mean_100"] = float(np.mean(list(self.recent)))
        self.logger.row(self.axes(), metrics)
        self.rate_mark = (now, self.agent_step, self.learner.updates)
        self.latest = metrics
        self.show()

    def show(self) -> None:
        metrics = self.latest
        stop, now = self.config.stop, {**metrics, **self.axes()}
        left, (done, limit) = limits.left(stop, now), limits.nearest(stop, now)
        parts = [
            f"step {self.agent_step:,}",
            f"update {self.learner.updates:,}",
            f"{metrics['rate/agent_steps']:.1f} steps/s",
            f"{metrics['rate/updates']:.2f} updates/s",
        ]
        if self.fill_step is None:
            parts.append(f"filling {len(self.replay):,}/{self.fill:,}")
        elif "loss/total" in metrics:
            parts.append(f"loss {metrics['loss/total']:.1f}")
        recent = list(self.recent)
        if recent:
            mean = np.mean(recent)
            parts.append(f"return {recent[-1]:.2f} (mean of {len(recent)}: {mean:.2f})")
        parts.append(f"RAM {metrics['usage/ram_gb']:.1f} GB")
        ahead = "" if left is None else f", {span(left)} left"
        parts.append(f"{done:.1%} of {limit}{ahead}")
        self.terminal.show("  ".join(parts))

    def keep_frames(self, ids: np.ndarray, obs: dict[str, np.ndarray]) -> None:
        """Frames of slot 0, for the policy video."""
        images = self.learner.update.world.encoder.images
        if not images or not self.config.log.media_every or ids[0] != 0:
            return
        if obs["is_first"][0]:
            self.frames = []
        if len(self.frames) < KEEP_FRAMES:
            self.frames.append(obs[images[0]][0])
        if obs["is_last"][0]:
            self.last_episode = np.stack(self.frames)

    def make_media(self) -> None:
        """Videos of the policy and of open-loop prediction, with the prediction's errors."""
        try:
            if self.learner.update.world.encoder.images:
                step = self.env_step
                frames = self.last_episode
                if frames is None and self.frames:
                    frames = np.stack(self.frames)
                if frames is not None:
                    self.logger.video("policy", frames, step)
                self.predict(step)
        except (RuntimeError, ValueError, OSError) as error:
            log.warning("a video could not be made: %r", error)

    def predict(self, step: int) -> None:
        batch = self.config.batch
        context = max(1, min(batch.length // 4, LONGEST_CONTEXT))
        length = min(batch.length, context + max(media.HORIZONS))
        key = (self.config.seed, 1, self.learner.updates)
        drawn = self.replay.read(self.replay.draw(media.ROWS, length, key, online=False))
        device = self.learner.device
        tensors = {k: torch.from_numpy(v).to(device) for k, v in drawn.items()}
        random = seeding.generator(self.config.seed, "media", self.learner.updates, device)
        truth, prediction = media.open_loop(self.learner.update, tensors, context, random)
        self.logger.row(self.axes(), media.errors(truth, prediction, context))
        self.logger.video("prediction", media.video(truth, prediction[0], context), step)
        self.logger.picture("prediction", media.strip(truth, prediction[0], context), step)

    # -- what survives ----------------------------------------------------------------------

    def save(self) -> None:
        """One checkpoint of all ranks, which the first one writes."""
        self.learner.check()
        self.log_scores()
        self.replay.flush()
        parts = self.ranks.gather(self.state())
        self.saved = deal.join(parts) if parts else {}
        self.ranks.first(lambda: self.publish(self.saved))
        self.collect()
        self.last_save = time.monotonic()

    def collect(self) -> None:
        """Delete what no kept checkpoint needs of the replay."""
        kept = self.ranks.first(self.needed)
        mine = [deal.needed(run, self.ranks.number, self.ranks.count) for run in kept]
        self.replay.collect(
            [{"first": first, "states": states} for first, states, _ in mine],
            [pair for *_, windows in mine for pair in windows],
        )

    def state(self) -> dict[str, Any]:
        """The part of this rank in a run's state; `deal.join` makes one of all."""
        loader = self.loader.state()  # first: threads that still draw take fresh windows
        return {
            "agent_step": self.own_step,
            "env_step": self.own_step * self.config.env.repeat + self.own_correction,
            "fill_step": self.own_fill,
            "wall_seconds": self.wall_seconds,
            "returns": self.returns,
            "lengths": self.lengths,
            "recent": list(self.recent),
            "actor": self.actor.state(),
            "pool": self.pool.state(),
            "replay": self.replay.state(),
            "loader": loader,
            "carry": self.carry.state(),
            "flops_per_update": self.flops_per_update,
        }

    def publish(self, run: dict[str, Any]) -> None:
        """Write the checkpoint."""
        self.others_step = run["agent_step"] - self.own_step
        run["logger"] = self.logger.state()
        parts = {"learner": self.learner.state(), "run": run}
        self.needs[self.checkpoints.save(self.number(run), parts).name] = deal.needs(run)

    def needed(self) -> list[dict[str, Any]]:
        """What the checkpoints that are kept need of the replay, by streams."""
        needs, self.needs = self.needs, {}
        for path in self.checkpoints.published():
            with contextlib.suppress(ValueError):  # it is damaged: none can go on from it
                name = path.name
                self.needs[name] = needs.get(name) or deal.needs(
                    Checkpoints.load_part(path / "run.pt")
                )
        return list(self.needs.values())

    def restore(self, parts: dict[str, Any]) -> None:
        """Continue from the parts of a checkpoint; what was appended after it is rolled back."""
        run = deal.deal(parts["run"], self.ranks.number, self.ranks.count)
        self.own_step, self.own_fill = run["agent_step"], run["fill_step"]
        self.others_step = parts["run"]["agent_step"] - self.own_step
        self.own_correction = run["env_step"] - self.own_step * self.config.env.repeat
        self.wall_before = run["wall_seconds"]
        self.returns = np.asarray(run["returns"]).copy()
        self.lengths = np.asarray(run["lengths"]).copy()
        self.recent.extend(run["recent"])
        self.flops_per_update = run["flops_per_update"]
        self.learner.restore(parts["learner"])
        self.actor.restore(run["actor"])
        self.replay.restore(run["replay"])
        self.loader.restore(run["loader"])
        self.carry.restore(run.get("carry"))
        if self.logger:
            self.logger.restore(run["logger"])
        self.collect()  # states of a sitting that saved none
        self.pool.restore(run["pool"])
        self.rate_mark = (time.monotonic(), self.agent_step, self.learner.updates)
