"""Several ranks are one run: what they hold alike, what their sum is, and how they leave.

Two processes and Gloo stand for many GPUs. The slow ones:
python -m pytest -m slow tests/agent/test_ranks.py
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from agent import deal, seeding
from agent.auto import choose_envs, choose_threads, fake_batch
from agent.checkpoint import Checkpoints
from agent.learner import Learner
from agent.ranks import Ranks, lost, of_all_ranks
from agent.run import RunError, check_ranks
from agent.update import Update
from configs.load import replace_flat, resolve
from envs.env import Space
from replay.inspect import inspect
from replay.replay import Replay

ROOT = Path(__file__).parents[2]
OBS, ACT = {"vector": Space("vector", (3,))}, Space("discrete", (1,), (3,))
ROWS, LENGTH = 4, 8
TINY = [
    *("--size", "debug", "--precision", "float32", "--device", "cpu", "--threads", "1"),
    *("--optim.warmup", "0", "--behaviour.horizon", "3", "--batch.size", str(ROWS)),
    *("--batch.length", str(LENGTH), "--behaviour.return_floor", "1e-6"),
]


# -- one update -----------------------------------------------------------------------------


def part(tree, rank, count, dim=0):
    """The share of `rank` of every tensor in a batch, or in noise."""
    return {key: value.chunk(count, dim)[rank] for key, value in tree.items()}


def noise_part(noise, rank, count):
    """Imagination's noise is (H, rows * T, ...): rows are in its second dimension."""
    return {
        "post": noise["post"].chunk(count)[rank],
        **part({key: noise[key] for key in ("z", "action")}, rank, count, 1),
    }


def learn(ranks, flags, updates, spoil=()):
    """A learner after `updates` on its share of batches and noise that are the same for all."""
    torch.set_num_threads(1)
    torch.manual_seed(ranks.number)  # the weights of rank 0 are handed to the others
    update = Update(resolve([*flags, *TINY]), OBS, ACT)
    learner = Learner(update, 0, "float32", ranks=ranks)
    draw = update.noise
    for number in range(updates):
        whole = fake_batch(update, ROWS, LENGTH)
        whole["reward"] += number
        if number in spoil:
            whole["reward"][0, 3] = torch.nan  # a row of rank 0 alone
        noise = draw(ROWS, LENGTH, seeding.generator(number, "test"))
        mine = noise_part(noise, ranks.number, ranks.count)
        update.noise = lambda *_, mine=mine: mine
        batch = part(whole, ranks.number, ranks.count)
        if update.world.core.plan:
            batch["plan"] = update.world.core.plan(batch["is_first"].numpy(), batch["age"].numpy())
        learner.train(batch)
    return learner.state()


def one_of(number, count, port, path, function, *args):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(number), LOCAL_RANK=str(number))
    os.environ.update(WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count))
    ranks = Ranks.of_torchrun()
    ranks.begin("cpu", False)
    torch.save(function(ranks, *args), path / f"{number}.pt")
    ranks.end()


def on_ranks(tmp_path, function, *args, count=2):
    """What `function(ranks, *args)` gives on each rank."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    del store
    multiprocessing.spawn(one_of, (count, port, tmp_path, function, *args), nprocs=count)
    return [torch.load(tmp_path / f"{number}.pt") for number in range(count)]


def assert_same(one, other, **tolerance):
    assert one["updates"] == other["updates"]
    assert one["skipped"] == other["skipped"]
    for key, value in one["model"].items():
        torch.testing.assert_close(value, other["model"][key], msg=key, **tolerance)
    for key in ("square", "momentum"):
        for mine, yours in zip(one["optimizer"][key], other["optimizer"][key], strict=True):
            torch.testing.assert_close(mine, yours, **tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("core", ["gru", "s3m", "transformer", "rate", "rlt", "elmur"])
def test_two_ranks_hold_the_same_after_50_updates(tmp_path, core):
    one, other = on_ranks(tmp_path, learn, ("--core", core), 50)
    assert_same(one, other, rtol=0, atol=0)


def learn_each(ranks, cores, *args):
    return [learn(ranks, (*JOINED, "--core", core), *args) for core in cores]


# LaProp divides by the gradient; a larger eps keeps it from amplifying rounding at first.
JOINED = ("--optim.eps", "1e-3", "--optim.lr", "1e-3")


def test_two_ranks_are_one_with_the_joined_batch(tmp_path):
    """To float32 rounding, for the cores gru and s3m."""
    cores = ("gru", "s3m")
    ones, others = on_ranks(tmp_path, learn_each, cores, 5)
    for one, other, alone in zip(ones, others, learn_each(Ranks(), cores, 5), strict=True):
        assert_same(one, other, rtol=0, atol=0)
        assert_same(one, alone, rtol=1e-3, atol=2e-5)
        bounds = [state["model"]["return_range"] for state in (one, alone)]
        torch.testing.assert_close(*bounds, rtol=1e-4, atol=1e-7)
        assert bounds[0].abs().sum() > 0


@pytest.mark.slow
def test_an_update_that_is_not_finite_on_one_rank_is_left_out_on_all(tmp_path):
    one, other = on_ranks(tmp_path, learn, ("--optim.nonfinite", "skip"), 4, (1,))
    assert one["skipped"] == 1
    assert_same(one, other, rtol=0, atol=0)
    assert all(value.isfinite().all() for value in one["model"].values())


def test_a_run_alone_initialises_nothing():
    ranks = Ranks.of_torchrun()
    ranks.begin("cpu", False)
    values, module = torch.arange(3.0), torch.nn.Linear(1, 1)
    assert ranks == Ranks()
    assert not dist.is_initialized()
    assert of_all_ranks(values) is values
    assert ranks.wrap(module) is module
    assert ranks.first(lambda: 3) == 3
    assert ranks.gather("part") == ["part"]
    assert ranks.table([1, 2], patient=False) == [[1, 2]]
    assert not ranks.any(False)
    assert not ranks.orphaned


# -- one run --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "ranks", "words"),
    [
        (("--batch.size", "15"), 2, "batch.size 15 .* choose a multiple of 2, or start 1 or 3"),
        (("--env.count", "3"), 2, "env.count 3 .* divide among 2"),
    ],
)
def test_what_does_not_divide_is_refused(flags, ranks, words):
    with pytest.raises(RunError, match=words):
        check_ranks(resolve(flags), ranks)
    check_ranks(resolve(flags), 1)


def test_automatic_numbers_are_shares_of_the_machine():
    config = replace_flat(resolve(["--task", "memory_maze_9x9"]), {"device": "cpu"})
    cores = len(os.sched_getaffinity(0))
    assert choose_threads(config, beside=cores)[0].threads == 1
    assert choose_envs(config, False, ranks=8, beside=cores)[0].env.count % 8 == 0


FIELDS = {"value": (np.dtype(np.int64), ())}


def shard(folder, number, shards, streams, capacity=10_000):
    return Replay(folder, FIELDS, streams, capacity, 10**6, shard=number, shards=shards)


def state_of(replay, number, waiting):
    """A rank's state, with what `deal` looks into."""
    slots = replay.streams
    return {
        "agent_step": 10 + number, "env_step": 20, "fill_step": 5, "returns": np.arange(slots),
        "lengths": np.arange(slots), "actor": {"tick": 7, "carry": {"z": torch.ones(slots, 2)}},
        "pool": {
            "tick": 3 + number, "restarts": 1, "due": [3 + number] * slots,
            "episode": [number] * slots, "actions": [np.zeros(0)] * slots, "last": [None] * slots,
        },
        "replay": replay.state(), "loader": {"waiting": waiting},
    }  # fmt: skip


@pytest.fixture
def shards(tmp_path):
    """Two shards of two streams, with 100 steps each: step t of stream s is 1000 s + t."""
    replays = [shard(tmp_path, number, 2, 2) for number in range(2)]
    for t in range(100):
        for number, replay in enumerate(replays):
            replay.add(np.arange(2), {"value": np.array([2000 * number, 2000 * number + 1000]) + t})
    return replays


def test_a_joined_run_deals_out_the_parts_that_it_was_joined_from(shards):
    parts = [state_of(r, n, [[6, [[0, 1], [1, n]]]]) for n, r in enumerate(shards)]
    run = deal.join(parts)
    assert run["agent_step"] == 21
    assert run["fill_step"] == 10
    assert run["loader"]["waiting"] == [[6, [[0, 1], [1, 0], [2, 1], [3, 1]]]]
    for number, before in enumerate(parts):
        after = deal.deal(run, number, 2)
        for key in ("count", "first", "next_fresh", "fresh"):
            assert after["replay"][key] == before["replay"][key], key
        assert list(after["replay"]["order"]) == list(before["replay"]["order"])
        assert after["loader"] == before["loader"]
        assert after["fill_step"] == before["fill_step"]
        waits = [due - after["pool"]["tick"] for due in after["pool"]["due"]]
        assert waits == [due - before["pool"]["tick"] for due in before["pool"]["due"]]
    assert sum(deal.deal(run, number, 2)["agent_step"] for number in range(2)) == 21


@pytest.mark.parametrize("count", [1, 4])
def test_another_number_of_ranks_has_whole_streams_dealt_anew(tmp_path, shards, count):
    for replay in shards:
        replay.flush()
    run = deal.join([state_of(r, n, [[6, [[0, 1]]]]) for n, r in enumerate(shards)])
    seen = []
    for number in range(count):
        replay = shard(tmp_path, number, count, 4 // count)
        mine = deal.deal(run, number, count)
        assert mine["loader"]["waiting"] == []
        replay.restore(mine["replay"])
        for stream in range(replay.streams):
            values = replay.read(replay.locate([(stream, 0)], 100))["value"][0]
            assert (np.diff(values) == 1).all()
            seen.append(int(values[0]))
    assert seen == [0, 1000, 2000, 3000]


# -- whole runs -----------------------------------------------------------------------------

SMALL = [
    *("--task", "test_counter", "--size", "debug", "--precision", "float32", "--device", "cpu"),
    *("--threads", "1", "--batch.size", "2", "--batch.length", "16", "--behaviour.horizon", "3"),
    *("--loop.train_ratio", "8", "--log.every", "0.2", "--env.count", "4"),
]
LOCKSTEP = ("--loop.mode", "lockstep")


def start(logdir, ranks, *flags):
    """A run of so many ranks; torchrun and they are a session of their own."""
    logdir.mkdir(exist_ok=True)
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command += ["-m", "agent.train", "--logdir", str(logdir), *SMALL, *flags]
    with (logdir / "out").open("w") as out:
        return subprocess.Popen(
            command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip


def said(logdir):
    return (logdir / "out").read_text()


def train(logdir, ranks, *flags, status=0):
    process = start(logdir, ranks, *flags)
    try:
        assert process.wait(200) == status, said(logdir)
    finally:
        end(process)
    return said(logdir)


def end(process):
    """Kill what is left of it."""
    if process.poll() is None:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        process.wait()


def newest(logdir):
    return Checkpoints.load(Checkpoints(logdir / "checkpoints").published()[-1])


def lines(logdir, name):
    return [json.loads(line) for line in (logdir / name).read_text().splitlines()]


def scores(logdir):
    drop = ("wall_seconds",)
    rows = [
        {k: v for k, v in row.items() if k not in drop} for row in lines(logdir, "scores.jsonl")
    ]
    return sorted(rows, key=lambda row: (row["episode"], row["slot"]))


def test_a_batch_that_does_not_divide_is_refused_once(tmp_path):
    out = train(tmp_path, 3, "--steps", "100", status=1)
    assert out.count("error: batch.size 2") == 1
    assert "starting" in out
    assert not (tmp_path / "config.yaml").exists()


@pytest.mark.slow
@pytest.mark.parametrize("core", ["gru", "s3m"])
def test_two_ranks_resume_bit_for_bit_and_on_other_numbers_of_ranks(tmp_path, core):
    flags = (*LOCKSTEP, "--core", core)
    train(tmp_path / "whole", 2, *flags, "--steps", "400")
    train(tmp_path / "parts", 2, *flags, "--steps", "172")
    train(tmp_path / "parts", 2, *flags, "--steps", "400")
    whole, parts = newest(tmp_path / "whole"), newest(tmp_path / "parts")
    assert_same(whole["learner"], parts["learner"], rtol=0, atol=0)
    assert whole["learner"]["updates"] > 50
    assert scores(tmp_path / "whole") == scores(tmp_path / "parts")
    assert {row["slot"] for row in scores(tmp_path / "whole")} == {0, 1, 2, 3}
    step, update = whole["run"]["agent_step"], whole["learner"]["updates"]
    assert update == 1 + int((step - whole["run"]["fill_step"]) * 8 / 32)
    for ranks in (1, 4, 2):
        logdir = tmp_path / "parts"
        before = newest(logdir)
        if ranks == 4:
            out = train(logdir, ranks, *flags, status=1)
            assert "batch.size 2 is that of all ranks" in out
            continue
        out = train(logdir, ranks, *flags, "--steps", str(before["run"]["agent_step"] + 100))
        assert "resuming" in out
        after = newest(logdir)
        assert after["run"]["agent_step"] >= before["run"]["agent_step"] + 100
        assert after["learner"]["updates"] > before["learner"]["updates"]
        assert sum(after["run"]["replay"]["count"]) > sum(before["run"]["replay"]["count"])
        assert inspect(logdir).problems == []
    steps = [row["agent_step"] for row in lines(tmp_path / "parts", "metrics.jsonl")]
    assert steps == sorted(steps)


@pytest.mark.slow
def test_two_ranks_play_the_episodes_of_one(tmp_path):
    seeds = []
    for ranks in (1, 2):
        train(tmp_path / str(ranks), ranks, *LOCKSTEP, "--steps", "200")
        rows = scores(tmp_path / str(ranks))
        seeds.append({(row["slot"], row["episode"]): row["seed"] for row in rows})
    both = seeds[0].keys() & seeds[1].keys()
    assert len(both) > 8
    assert all(seeds[0][key] == seeds[1][key] for key in both)


@pytest.mark.slow
def test_a_run_of_one_goes_on_with_two_ranks_acting_beside_learning(tmp_path):
    train(tmp_path, 1, "--steps", "200")
    before = newest(tmp_path)
    train(tmp_path, 2, "--steps", "400")
    after = newest(tmp_path)
    assert after["run"]["agent_step"] >= 400
    made = after["learner"]["updates"] - before["learner"]["updates"]
    assert abs(made - (after["run"]["agent_step"] - before["run"]["agent_step"]) * 8 / 32) <= 3
    last = [row for row in lines(tmp_path, "metrics.jsonl") if "acting/staleness_max" in row][-1]
    assert last["acting/staleness_max"] <= 2


def begun(process, logdir, ranks=2):
    """The processes of the ranks, once updates are being made."""
    deadline = time.monotonic() + 120
    while (
        not (logdir / "metrics.jsonl").exists()
        or "loss/total" not in (logdir / "metrics.jsonl").read_text()
    ):
        assert process.poll() is None, said(logdir)
        assert time.monotonic() < deadline, said(logdir)
        time.sleep(0.1)
    found = psutil.Process(process.pid).children()
    assert len(found) == ranks
    return found


GRACE = 30.0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
@pytest.mark.parametrize("mode", ["lockstep", "overlapped"])
@pytest.mark.parametrize("whom", ["second", "all"])
def test_a_notice_to_any_rank_ends_all_with_one_save(tmp_path, whom, mode, number):
    flags = ("--loop.mode", mode, "--env.processes", "yes")
    process = start(tmp_path, 2, *flags, "--steps", "1000000")
    try:
        ranks = begun(process, tmp_path)
        family = psutil.Process(process.pid).children(recursive=True)
        for rank in ranks[1:] if whom == "second" else ranks:
            rank.send_signal(number)
        assert process.wait(GRACE) == 0, said(tmp_path)  # torchrun's: that all of its ranks gave 0
        assert not psutil.wait_procs(family, 3)[1]
    finally:
        end(process)
    out = said(tmp_path)
    assert out.count(f"stopped by {number.name}") == 1
    assert "Traceback" not in out
    step = newest(tmp_path)["run"]["agent_step"]
    assert f"at step {step:,}" in out
    assert not list((tmp_path / "checkpoints").glob("[!0-9]*"))
    assert "resuming" in train(tmp_path, 2, *flags, "--steps", str(step + 20))


@pytest.mark.slow
def test_a_notice_to_torchrun_saves_too(tmp_path):
    """Its own status and words are then torchrun's; what it leaves behind is whole."""
    process = start(tmp_path, 2, "--steps", "1000000")
    try:
        begun(process, tmp_path)
        family = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(GRACE)
        assert not psutil.wait_procs(family, 3)[1]
    finally:
        end(process)
    assert "stopped by SIGTERM at step" in said(tmp_path)
    step = newest(tmp_path)["run"]["agent_step"]
    assert "resuming" in train(tmp_path, 2, "--steps", str(step + 20))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lockstep", "overlapped"])
@pytest.mark.parametrize("dead", [0, 1])
def test_a_rank_that_dies_ends_the_others_within_a_minute(tmp_path, dead, mode):
    flags = ("--loop.mode", mode, "--env.processes", "yes")
    process = start(tmp_path, 2, *flags, "--steps", "1000000")
    try:
        ranks = begun(process, tmp_path)
        family = psutil.Process(process.pid).children(recursive=True)
        ranks[dead].kill()
        assert process.wait(60) != 0
        assert not psutil.wait_procs(family, 5)[1]
    finally:
        end(process)
    assert "resuming" in train(tmp_path, 2, *flags, "--steps", "300")


@pytest.mark.slow
def test_ranks_do_not_outlive_torchrun(tmp_path):
    process = start(tmp_path, 2, "--steps", "1000000")
    family = []
    try:
        begun(process, tmp_path)
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        assert not psutil.wait_procs(family, GRACE)[1]
    finally:
        for left in family:
            if left.is_running():
                left.kill()
    assert "stopped by SIGHUP" in said(tmp_path)


def test_what_a_lost_rank_raises_is_known():
    assert lost(
        RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:5] Connection closed")
    )
    assert not lost(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
