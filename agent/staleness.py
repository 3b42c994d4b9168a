"""How wrong old states are: `python -m agent.staleness --logdir logs/a`, of a run that has ended.

Of states that rows of a batch start from (`replay.start stored` or `stream`), as the newest
checkpoint has them, h is compared with that of a recomputation from the episode's first step with
the newest weights, as ||h - h'|| / ||h'|| at the first and at the last step of the row that is in
the same episode. Rows of the table are ages: so many updates ago a state was written (stored), or
its oldest part was (stream). Beside it stands the error of two others: the initial state (`zero`),
and a second recomputation (`redrawn`), whose past z are drawn anew, which is the least that is
possible. Ahead of the row the noise of z is the same for all.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from agent import seeding
from agent.carry import Packing
from agent.checkpoint import Checkpoints
from agent.environments import fields
from agent.evaluate import load_run, player, pool_of
from agent.update import Update
from configs.schema import Config
from replay.blocks import BLOCK, Layout
from replay.source import Source
from replay.states import States
from worldmodels.world_model import Carry, tree_map

KINDS = ("state", "zero", "redrawn")
FROM = (0, 1, 4, 16, 64, 256, 1024, 4096, 16384)  # updates


class Sample(NamedTuple):
    stream: int
    step: int
    updates: int  # age of the state
    carry: Carry  # ahead of the step, (1, ...)


class Steps:
    """Whole blocks of a run's replay, and of the one it was told to read from."""

    def __init__(self, folder: Path, config: Config, layout: Layout, state: dict[str, Any]):
        """Raises ValueError when a run is writing there."""
        self.sources = [Source(folder, layout)]
        self.segments = {part.stream: part for part in self.sources[0].segments}
        if config.replay.from_:
            self.sources.append(Source(Path(config.replay.from_), layout))
            self.sources[1].restore(state["source"])
            self.segments.update(enumerate(self.sources[1].segments, len(state["count"])))

    def read(self, stream: int, start: int, end: int) -> dict[str, np.ndarray] | None:
        """Steps of a stream, (T, ...) each; None where some are missing."""
        part = self.segments.get(stream)
        if part is None or not BLOCK * part.base <= start < end <= BLOCK * part.end:
            return None
        first = start // BLOCK
        blocks = [part.read(n, part.place(n)) for n in range(first, -(-end // BLOCK))]
        keys = blocks[0].keys()
        rows = {k: np.concatenate([block[k] for block in blocks]) for k in keys}
        rows = {k: value[start - BLOCK * first : end - BLOCK * first] for k, value in rows.items()}
        plain = rows.pop("plain")
        return {**rows, **{key: np.ascontiguousarray(plain[key]) for key in plain.dtype.names}}

    def end(self, stream: int) -> int:
        return BLOCK * self.segments[stream].end

    def close(self) -> None:
        for source in self.sources:
            source.close()


def stored_samples(
    folder: Path, run: dict[str, Any], update: int, world: Any, every: int, most: int
) -> list[Sample]:
    """States of the replay, drawn without replacement."""
    index, packing = run["replay"]["states"], Packing(world)
    states = States(folder / "replay" / "states", packing.bytes, every, len(index))
    states.restore(index)
    places = [
        (stream, step)
        for stream, (steps, slots) in enumerate(index)
        for step, slot in zip(steps.tolist(), slots.tolist(), strict=True)
        if slot >= 0
    ]
    order = np.random.default_rng(0).permutation(len(places))[:most]
    found = [(places[i], states.get(*places[i])) for i in order]
    states.close()
    return [Sample(*at, update - got[0], packing.unpack([got[1]])) for at, got in found if got]


def streamed_samples(state: dict[str, Any]) -> list[Sample]:
    """Carries of the rows; each carry is as old as the row, or as the episode."""
    rows = zip(state["ends"], state["since"], strict=True) if state["carry"] else ()
    return [
        Sample(*end, since, tree_map(lambda leaf, row=row: leaf[row : row + 1], state["carry"]))
        for row, (end, since) in enumerate(rows)
    ]


@torch.no_grad()
def errors(update: Update, rows: list[dict[str, np.ndarray]], carry: Carry, past: int) -> Any:
    """Relative errors of h, (2, B) for each of KINDS, at step `past` of the rows and at their last.

    `carry` is that ahead of step `past`.
    """
    world = update.world
    batch = {k: torch.from_numpy(np.stack([row[k] for row in rows])) for k in rows[0]}
    embed = world.encode({key: batch[key] for key in world.obs_space})
    action, is_first = update.policy.encode(batch["action"]), batch["is_first"]
    shape = is_first.shape
    random = seeding.generator(0, "staleness", past, world.bins.device)
    noise, other = (world.noise(*shape, generator=random) for _ in range(2))
    other = torch.cat([other[:, :past], noise[:, past:]], 1)

    def h(start: Carry, noise: torch.Tensor, skip: int = 0) -> torch.Tensor:
        inputs = (value[:, skip:] for value in (embed, action, is_first))
        out, _ = world.observe(*inputs, start, noise[:, skip:])
        return out["h"][:, [past - skip, -1]].transpose(0, 1)

    truth = h(world.initial(len(rows)), noise)
    zero = world.initial(len(rows), batch["age"][:, past])
    guesses = (h(carry, noise, past), h(zero, noise, past), h(world.initial(len(rows)), other))
    size = truth.norm(dim=-1)
    return {k: (v - truth).norm(dim=-1) / size for k, v in zip(KINDS, guesses, strict=True)}


def staleness(folder: Path, most: int = 256) -> dict[str, Any]:
    """Mean errors by age. Raises ValueError for a run without states, or one that is alive."""
    config, about = load_run(folder)
    if config.replay.start == "zero":
        raise ValueError(f"{folder}: its rows start from the initial state (--replay.start zero)")
    run = Checkpoints.load(Checkpoints(folder / "checkpoints").published()[-1])["run"]
    pool = pool_of(config, 1)
    try:
        layout = Layout(fields(pool))
        update: Update = player(config, pool, about["weights"])
    finally:
        pool.close()
    every, length = config.replay.state_every, config.batch.length
    if config.replay.start == "stored":
        samples = stored_samples(folder, run, about["update"], update.world, every, most)
    else:
        samples = streamed_samples(run["carry"])
    steps = Steps(folder, config, layout, run["replay"])
    groups = defaultdict(list)
    try:
        for sample in samples:
            group = read_sample(steps, sample, length)
            if group:
                groups[group[0]].append((sample, group[1]))
    finally:
        steps.close()
    found = []
    for (past, _), members in groups.items():
        carry = tree_map(
            lambda *leaves: torch.cat(leaves), *(sample.carry for sample, _ in members)
        )
        result = errors(update, [rows for _, rows in members], carry, past)
        for i, (sample, _) in enumerate(members):
            # What came before the episode is no part of a state.
            age = sample.updates
            if config.replay.start == "stream":
                age = min(age, -(-past // length))
            found.append((age, {kind: result[kind][:, i].tolist() for kind in KINDS}))
    return {
        **{key: about[key] for key in ("agent_step", "update")},
        **{"task": config.task, "core": config.core, "start": config.replay.start},
        "rows": table(found),
    }


def read_sample(
    steps: Steps, sample: Sample, length: int
) -> tuple[tuple[int, int], dict[str, np.ndarray]] | None:
    """((steps of the episode before it, all steps), the steps from the episode's first on); None
    where the episode's start is gone, or the steps after it are not in a block yet."""
    stream, step = sample.stream, sample.step
    here = steps.read(stream, step, step + 1)
    past = int(here["age"][0]) if here else 0
    end = min(step + length, steps.end(stream))
    rows = steps.read(stream, step - past, end) if past else None
    if rows is None:
        return None
    resets = np.flatnonzero(rows["is_first"][1:])
    size = int(resets[0]) + 1 if len(resets) else len(rows["is_first"])
    return (past, size), {key: value[:size] for key, value in rows.items()}


def table(found: list[tuple[int, dict[str, list[float]]]]) -> list[dict[str, float]]:
    """A row for each span of ages that has states: their number, and means at first and last."""
    out = []
    for low, high in zip(FROM, (*FROM[1:], np.inf), strict=True):
        errors = [error for age, error in found if low <= age < high]
        if errors:
            row: dict[str, float] = {"from": low, "states": len(errors)}
            for kind in KINDS:
                for place, name in enumerate(("first", "last")):
                    row[f"{kind}/{name}"] = float(np.mean([e[kind][place] for e in errors]))
            out.append(row)
    return out


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, or 2 for a wrong command."""
    parser = argparse.ArgumentParser(
        "agent.staleness", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--logdir", type=Path, required=True)
    parser.add_argument("--states", type=int, default=256, help="how many are looked at")
    args = parser.parse_args(argv)
    try:
        result = staleness(args.logdir, args.states)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    (args.logdir / "staleness.json").write_text(json.dumps(result, indent=1))
    where = f"step {result['agent_step']:,}, update {result['update']:,}"
    print(f"{result['task']}, core {result['core']}, replay.start {result['start']}, {where}")
    columns = [f"{kind}/{name}" for kind in KINDS for name in ("first", "last")]
    print(f"{'updates':>8}{'states':>8}" + "".join(f"{name:>15}" for name in columns))
    for row in result["rows"]:
        values = "".join(f"{row[name]:15.3f}" for name in columns)
        print(f"{row['from']:7}+{row['states']:8}{values}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
