"""Wiring of a run: folder, environments, models, replay, loop; starting afresh or resuming."""

from __future__ import annotations

import contextlib
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
from agent.checks import (
    MachineError,
    RunError,
    check_capacity,
    check_device,
    check_flops,
    check_mode,
    check_ranks,
    check_sizes,
    check_source,
    check_threads,
    lasting,
    reconcile,
    refused,
)
from agent.choices import Choices
from agent.environments import fields, make_pool
from agent.episodes import EpisodeTable, bsuite_file
from agent.evaluator import Evaluator
from agent.learner import KeptBatches, Learner
from agent.logger import Logger, Terminal
from agent.loop import Loop
from agent.notice import Notice, Stopped
from agent.offline import Offline
from agent.overlap import Overlapped
from agent.ranks import RankLost, Ranks, lost
from agent.status import ERROR
from agent.summary import model_summary
from agent.update import Update
from configs import load as configs
from configs.mkl import choose_products
from configs.schema import Config
from replay.blocks import Fields
from replay.budget import bytes_per_step
from replay.loader import Loader
from replay.replay import Replay
from replay.rows import Rows

LOOPS = {"lockstep": Loop, "overlapped": Overlapped, "offline": Offline}


def default_logdir(config: Config) -> str:
    return config.logdir or f"logs/{config.task}-{config.core}-s{config.seed}"


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
        raise MachineError(str(error)) from None
    with contextlib.ExitStack() as stack:
        if ranks.number:  # the first one speaks for all
            stack.enter_context(
                contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w")))
            )
        try:
            return run_folder(config, given, ranks, notice)
        except Stopped as word:
            print(f"stopped by {word}", flush=True)
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
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"--logdir {folder}: {error.strerror}; choose another") from None
    lock = FileLock(folder / "lock")

    def hold() -> None:
        try:
            lock.acquire(timeout=1)  # agent.status holds it for an instant
        except Timeout:
            raise RunError(
                f"another process is training in {folder}, or reads it (replay.from, "
                f"agent.staleness): wait until it has ended, or choose another --logdir"
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
                    (folder / ERROR).write_text(traceback.format_exc())
            raise


def run_in(folder: Path, config: Config, given: set[str], ranks: Ranks, notice: Notice) -> int:
    # The first rank alone writes the run's folder; what it chose is handed to the others.
    checkpoints = Checkpoints(folder / "checkpoints") if ranks.number == 0 else None
    if checkpoints:
        checkpoints.tidy()
    published = ranks.first(lambda: checkpoints.published())
    choices = parts = None
    if published:
        file = folder / "config.yaml"
        saved = ranks.first(lambda: configs.load(file))
        config = reconcile(config, saved, given)
    check_mode(config)
    check_device(config)
    check_ranks(config, ranks.count)
    if published:
        if by := ranks.first(lambda: limits.goes_on(folder, config.stop)):
            print(f"{folder} has ended by {by}: raise that to go on", flush=True)
            return 0
        print(f"resuming {folder} from {published[-1].name}", flush=True)
        with refused():  # it is damaged
            parts = Checkpoints.load(published[-1])
        if not parts:
            raise MachineError(
                f"{published[-1]} is not seen by this process: --logdir must be one folder for all"
            )
    else:
        choices = Choices(folder, given, ranks)
        config = choices.by_machine(config)
    check_threads(config)
    with contextlib.ExitStack() as stack:
        loop = assemble(stack, folder, config, ranks, checkpoints, parts, choices)
        if parts:
            with refused():  # the replay is not what the checkpoint says
                loop.restore(parts)
            now = lasting(config, saved)  # whoever looks at the run wants its limits of today
            if now != saved:
                ranks.first(lambda: configs.save(now, file))
        del parts  # as large as the model with its optimiser
        check_flops(config, loop.flops_per_update)
        ranks.first(lambda: (folder / ERROR).unlink(missing_ok=True))  # it goes on
        notice.tell(loop)
        end = loop.run()
        loop.terminal.close()
        if end and ranks.number == 0:
            limits.mark(folder, end)
        word = f"done, by {end['by']}," if end else f"stopped by {loop.stop or loop.leaving}"
        where = f"step {loop.agent_step:,}, update {loop.learner.updates:,}"
        ahead = f"raise --{end['by']}" if end else "run the same command"
        print(f"{word} at {where}; {ahead} to go on", flush=True)
    return 0


def assemble(
    stack: contextlib.ExitStack,
    folder: Path,
    config: Config,
    ranks: Ranks,
    checkpoints: Checkpoints | None,
    parts: dict[str, Any] | None,
    choices: Choices | None,
) -> Loop:
    """All that a run is made of, as a loop; `stack` closes it. `parts` is what a resumed run goes
    on from, `choices` are those of a fresh one."""
    products = choose_products(config.products)
    torch.set_num_threads(max(1, config.threads))
    seed_everything(config.seed)
    pool = make_pool(config, ranks)
    stack.callback(pool.close)
    spaces = pool.obs_space, pool.act_space
    if choices and ranks.number == 0:
        check_sizes(pool.obs_space)
        check_source(config)
    if choices:
        choices.reasons.append(products)
        config = choices.by_spaces(config, *spaces)
        seed_everything(config.seed)
    with refused():
        update = Update(config, *spaces).to(ranks.device(config.device))
    spec, state_bytes = fields(pool), 0
    if config.replay.start == "stored":
        state_bytes = Packing(update.world).bytes
        with refused():
            every = spacing(config, update.world.core.segment)
        config = configs.replace_flat(config, {"replay.state_every": every})
    each = bytes_per_step(spec, state_bytes, config.replay.state_every)
    if choices:
        config = choices.by_model(config, update, each)
    update.config = config
    replay = make_replay(folder, config, ranks, spec, state_bytes, bool(parts))
    check_capacity(config, ranks.count, replay, each)
    if choices:
        choices.write(config)
    loader = make_loader(config, ranks, replay, update)
    logger = evaluator = None
    if ranks.number == 0:
        logger = make_logger(folder, config, parts)
        stack.callback(logger.close)
    stack.callback(loader.close)
    flops = 0
    if choices:
        shape = config.batch.size, config.batch.length
        flops = ranks.first(lambda: auto.count_flops(update, *shape))
        ranks.first(lambda: (folder / "model.txt").write_text(model_summary(update, flops)))
    kept = KeptBatches(folder / "nonfinite", ranks.number)
    compiled = config.compile == "yes"
    ranks.wait()  # some take longer until here than the learner's first words to one another may
    learner = Learner(update, config.seed, config.precision, compiled, kept, ranks)
    actor = Actor(update, pool.count, config.seed, rank=ranks.number)
    if config.eval.every and logger:
        evaluator = Evaluator(config, folder, logger, parts["run"]["agent_step"] if parts else 0)
        stack.callback(evaluator.close)
    terminal = Terminal()
    stack.callback(terminal.close)
    print(f"policy features {config.behaviour.features}: {update.actor.inputs} numbers", flush=True)
    return LOOPS[config.loop.mode](
        config, pool, actor, learner, replay, loader, logger, terminal, checkpoints, flops,
        evaluator, ranks,
    )  # fmt: skip


def make_replay(
    folder: Path, config: Config, ranks: Ranks, spec: Fields, state_bytes: int, resumed: bool
) -> Replay:
    """The shard of this rank."""
    settings = config.replay
    source = Path(settings.from_) if settings.from_ else None
    with refused("--replay.from: "):
        replay = Replay(
            folder / "replay",
            spec,
            ranks.share(config.env.count),
            ranks.share(settings.capacity),
            int(settings.ram_gb * 1e9),
            ranks.share(int(settings.disk_gb * 1e9)) or None,
            online=settings.online,
            source=source,
            state_bytes=state_bytes,
            state_every=settings.state_every,
            shard=ranks.number,
            shards=ranks.count,
            resumed=resumed,
        )
    length = config.batch.length
    if config.loop.mode == "offline" and not (resumed or replay.ready(length)):
        raise RunError(f"{settings.from_} has no window of {length} steps")
    return replay


def make_loader(config: Config, ranks: Ranks, replay: Replay, update: Update) -> Loader:
    """The rows of this rank. An overlapped loop draws them in threads, beside the updates."""
    beside = config.loop.mode == "overlapped"
    return Loader(
        replay,
        ranks.share(config.batch.size),
        config.batch.length,
        (config.seed, ranks.number),
        ranks.device(config.device),
        depth=2 if beside else 1,
        exact=not beside,
        plan=update.world.core.plan,
        rows=Rows(replay) if config.replay.start == "stream" else None,
    )


def make_logger(folder: Path, config: Config, parts: dict[str, Any] | None) -> Logger:
    """Of the first rank; it goes on behind the rows that `parts` knows of."""
    logged = 0
    if parts:
        offline = config.loop.mode == "offline"
        logged = parts["learner"]["updates"] if offline else parts["run"]["env_step"]
    table = bsuite_file(folder, config.task)
    return Logger(folder, logged, table and EpisodeTable(table))
