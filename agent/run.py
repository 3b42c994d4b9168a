"""Wiring of a run: folder, environments, models, replay, loop; starting afresh or resuming."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import random
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout

from agent import auto, limits
from agent.actor import Actor
from agent.carry import Packing, spacing
from agent.checkpoint import Checkpoints
from agent.checks import RunError, check_mode, check_ranks, reconcile
from agent.episodes import EpisodeTable, bsuite_file
from agent.evaluator import Evaluator
from agent.learner import KeptBatches, Learner
from agent.logger import Logger, Terminal
from agent.loop import Loop
from agent.notice import Notice, Stopped
from agent.offline import Offline
from agent.overlap import Overlapped
from agent.ranks import RankLost, Ranks, lost
from agent.summary import model_summary
from agent.update import Update
from configs import load as configs
from configs.mkl import choose_products
from configs.schema import Config
from envs.env import Env
from envs.make import cheap, make_env, reset_ticks
from envs.pool import EnvPool
from replay.budget import fit_capacity
from replay.loader import Loader
from replay.replay import Replay
from replay.rows import Rows

log = logging.getLogger("agent")


def default_logdir(config: Config) -> str:
    return config.logdir or f"logs/{config.task}-{config.core}-s{config.seed}"


def env_maker(config: Config, labels: bool = False) -> functools.partial[Env]:
    """A picklable function without arguments that builds the task's environment; `labels` as in
    `make_env`."""
    env = config.env
    return functools.partial(
        make_env,
        config.task,
        repeat=env.repeat,
        time_limit=env.time_limit,
        truncation=env.truncation,
        labels=labels,
    )


def fields(pool: EnvPool) -> dict[str, tuple[Any, tuple[int, ...]]]:
    """Names, dtypes and shapes of a replay record."""
    out = {k: (np.dtype(s.dtype), tuple(s.shape)) for k, s in pool.obs_space.items()}
    out["action"] = (np.dtype(pool.act_space.dtype), tuple(pool.act_space.shape))
    out["reward"] = (np.dtype(np.float32), ())
    for key in ("is_first", "is_last", "is_terminal"):
        out[key] = (np.dtype(bool), ())
    out["age"] = out["episode"] = (np.dtype(np.int32), ())
    return out


def seed_everything(seed: int) -> None:
    """The global generators, for whatever does not draw by counter (weight initialisation)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def run(config: Config, given: set[str]) -> int:
    """Train until done; returns the exit status. Raises RankLost when another rank is gone."""
    ranks = Ranks.of_torchrun()
    level = logging.WARNING if ranks.number else logging.INFO
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")
    notice = Notice(ranks.count > 1)
    try:
        ranks.begin(config.device, config.compile == "yes")
    except ValueError as error:
        raise RunError(str(error)) from None
    with contextlib.ExitStack() as stack:
        if ranks.number:  # the first one speaks for all
            stack.enter_context(
                contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w")))
            )
        try:
            return run_folder(config, given, ranks, notice)
        except Stopped as word:
            print(f"stopped by {word} before its first step; nothing was to be saved", flush=True)
            return 0
        except Exception as error:
            if ranks.count > 1 and lost(error):
                raise RankLost(
                    f"rank {ranks.number}: another rank has ended or is silent; the last "
                    f"checkpoint is good: run the same command to resume"
                ) from error
            raise
        finally:
            ranks.end()


def run_folder(config: Config, given: set[str], ranks: Ranks, notice: Notice) -> int:
    if config.replay.from_:
        # The same command may resume from elsewhere.
        source = str(Path(config.replay.from_).resolve())
        config = configs.replace_flat(config, {"replay.from": source})
    folder = Path(default_logdir(config))
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / "lock")

    def hold() -> None:
        try:
            lock.acquire(timeout=1)  # agent.status holds it for an instant
        except Timeout:
            raise RunError(
                f"another process is training in {folder}; choose another --logdir"
            ) from None

    ranks.first(hold)
    with lock if ranks.number == 0 else contextlib.nullcontext():
        try:
            return run_in(folder, config, given, ranks, notice)
        except RunError:  # a command that cannot be followed leaves the folder as it is
            raise
        except Exception as error:
            if not lost(error):  # whose cause the rank that is gone has written
                with contextlib.suppress(OSError):  # the disk may be full
                    (folder / "error.txt").write_text(traceback.format_exc())
            raise


def run_in(folder: Path, config: Config, given: set[str], ranks: Ranks, notice: Notice) -> int:
    # The first rank alone writes the run's folder; what it chose is handed to the others.
    checkpoints = Checkpoints(folder / "checkpoints") if ranks.number == 0 else None
    if checkpoints:
        checkpoints.tidy()
    published = ranks.first(lambda: checkpoints.published())
    config_file = folder / "config.yaml"
    reasons: list[str] = []

    def note(choose: Any, *args: Any) -> Config:
        config, why = ranks.first(lambda: choose(*args))
        reasons.append(why)
        return config

    if published:
        saved = ranks.first(lambda: configs.load(config_file))
        config = reconcile(config, saved, given)
        check_mode(config)
        check_ranks(config, ranks.count)
        if by := ranks.first(lambda: limits.goes_on(folder, config.stop)):
            print(f"{folder} has ended by {by}: raise that to go on", flush=True)
            return 0
        if config.stop != saved.stop:  # whoever looks at the run wants its limits of today
            now = dataclasses.replace(saved, stop=config.stop)
            ranks.first(lambda: configs.save(now, config_file))
        print(f"resuming {folder} from {published[-1].name}", flush=True)
    else:
        check_mode(config)
        check_ranks(config, ranks.count)
        config = note(auto.choose_device, config)
        config = note(auto.choose_threads, config, ranks.beside)
        if config.loop.mode == "offline":
            # One environment for its spaces, never stepped.
            one = {"env.count": ranks.count, "env.processes": "no"}
            config = configs.replace_flat(config, one)
        config = note(auto.choose_envs, config, cheap(config.task), ranks.count, ranks.beside)
    reasons.append(choose_products(config.products))
    overlapped, offline = (config.loop.mode == mode for mode in ("overlapped", "offline"))
    if overlapped and config.env.processes == "no" and not cheap(config.task):
        # Built in this thread and stepped in the actor's, where OpenGL would refuse to draw.
        raise RunError(
            f"env.processes no: {config.task} cannot be stepped in a thread beside the learner; "
            f"leave it at auto, or add --loop.mode lockstep"
        )
    torch.set_num_threads(max(1, config.threads))
    seed_everything(config.seed)
    env, make = config.env, env_maker(config)
    slots = ranks.share(env.count)
    try:
        pool = EnvPool(
            make,
            slots,
            config.seed,
            env.processes == "yes",
            reset_ticks=reset_ticks(config.task),
            timeout=env.timeout,
            restarts_per_hour=env.restarts_per_hour,
            first=ranks.number * slots,
        )
    except ValueError as error:  # spaces that cannot be used
        raise RunError(f"--task {config.task}: {error}") from error
    terminal = Terminal()
    loader = logger = evaluator = None
    try:
        if not published:
            spaces = pool.obs_space, pool.act_space
            config = note(auto.choose_size, config, given, *spaces, ranks.count)
            check_ranks(config, ranks.count)
            seed_everything(config.seed)
        device = ranks.device(config.device)
        update = Update(config, pool.obs_space, pool.act_space).to(device)
        spec, state_bytes = fields(pool), 0
        if config.replay.start == "stored":
            state_bytes = Packing(update.world).bytes
            try:
                every = spacing(config, update.world.core.segment)
            except ValueError as error:
                raise RunError(str(error)) from None
            config = configs.replace_flat(config, {"replay.state_every": every})
        if not published:
            config = note(auto.choose_precision, config, update)
            explicit = "replay.capacity" in given
            steps = 0 if offline else config.stop.steps
            try:
                capacity, message = ranks.first(
                    lambda: fit_capacity(
                        folder, spec, config.replay.capacity, explicit, steps,
                        state_bytes, config.replay.state_every,
                    )
                )  # fmt: skip
            except ValueError as error:
                raise RunError(str(error)) from None
            reasons.append(message)
            if ranks.count > 1:
                reasons.append(
                    f"ranks {ranks.count}: each has {ranks.share(config.batch.size)} of "
                    f"{config.batch.size} rows of a batch, {slots} of {env.count} environments and "
                    f"{ranks.share(capacity):,} of {capacity:,} steps of the replay"
                )
            config = configs.replace_flat(config, {"replay.capacity": capacity})
            print(configs.render(config))
            print("\n".join(reasons), flush=True)
            if ranks.number == 0:
                configs.save(config, config_file)
                (folder / "choices.txt").write_text("\n".join(reasons) + "\n")
        update.config = config
        try:
            replay = Replay(
                folder / "replay",
                spec,
                slots,
                ranks.share(config.replay.capacity),
                int(config.replay.ram_gb * 1e9),
                ranks.share(int(config.replay.disk_gb * 1e9)) or None,
                online=config.replay.online,
                source=Path(config.replay.from_) if config.replay.from_ else None,
                state_bytes=state_bytes,
                state_every=config.replay.state_every,
                shard=ranks.number,
                shards=ranks.count,
            )
        except ValueError as error:
            raise RunError(f"--replay.from: {error}") from None
        if offline and not replay.ready(config.batch.length):
            raise RunError(f"{config.replay.from_} has no window of {config.batch.length} steps")
        batch = config.batch
        loader = Loader(
            replay,
            ranks.share(batch.size),
            batch.length,
            (config.seed, ranks.number),
            device,
            depth=2 if overlapped else 1,
            exact=not overlapped,
            plan=update.world.core.plan,
            rows=Rows(replay) if config.replay.start == "stream" else None,
        )
        parts = Checkpoints.load(published[-1]) if published else None
        flops = 0
        if not parts:
            flops = ranks.first(lambda: auto.count_flops(update, batch.size, batch.length))
            ranks.first(lambda: (folder / "model.txt").write_text(model_summary(update, flops)))
        logged = parts["run"]["env_step"] if parts else 0
        if parts and offline:
            logged = parts["learner"]["updates"]
        if ranks.number == 0:
            table = bsuite_file(folder, config.task)
            logger = Logger(folder, logged, table and EpisodeTable(table))
        kept = KeptBatches(folder / "nonfinite", ranks.number)
        compiled = config.compile == "yes"
        learner = Learner(update, config.seed, config.precision, compiled, kept, ranks)
        actor = Actor(update, slots, config.seed, rank=ranks.number)
        if config.eval.every and logger:
            begun = parts["run"]["agent_step"] if parts else 0
            evaluator = Evaluator(config, folder, logger, begun)
        loop = (Overlapped if overlapped else Offline if offline else Loop)(
            config, pool, actor, learner, replay, loader, logger, terminal, checkpoints, flops,
            evaluator, ranks,
        )  # fmt: skip
        if parts:
            try:
                loop.restore(parts)
            except ValueError as error:  # the replay is not what the checkpoint says
                raise RunError(str(error)) from error
        if 0 < config.stop.flops < loop.flops_per_update:
            raise RunError(
                f"--stop.flops {config.stop.flops:g} is less than one update takes: "
                f"{loop.flops_per_update:,}"
            )
        widths = update.actor.inputs
        print(f"policy features {config.behaviour.features}: {widths} numbers", flush=True)

        notice.tell(loop)
        end = loop.run()
        if end and ranks.number == 0:
            limits.mark(folder, end)
        word = f"done, by {end['by']}," if end else f"stopped by {loop.stop or loop.leaving}"
        where = f"step {loop.agent_step:,}, update {learner.updates:,}"
        print(f"{word} at {where}; run the same command to go on", flush=True)
        return 0
    finally:
        terminal.close()
        if evaluator:
            evaluator.close()
        if loader:
            loader.close()
        if logger:
            logger.close()
        pool.close()
