"""Several ranks are one run: what they hold alike, and what their sum is.

Two processes and Gloo stand for many GPUs.
"""

import os

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from agent import deal, seeding
from agent.auto import choose_envs, choose_threads, fake_batch
from agent.checks import RunError, check_ranks
from agent.learner import Learner
from agent.ranks import Ranks, lost, of_all_ranks
from agent.update import Update
from configs.load import replace_flat, resolve
from envs.env import Space
from replay.replay import Replay
from worldmodels.cores import CORES

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
        del whole["plan"]  # of all rows
        whole["reward"] += number
        if number in spoil:
            whole["reward"][0, 3] = torch.nan  # a row of rank 0 alone
        noise = draw(ROWS, LENGTH, seeding.generator(number, "test"))
        mine = noise_part(noise, ranks.number, ranks.count)
        update.noise = lambda *_, mine=mine: mine
        batch = part(whole, ranks.number, ranks.count)
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
        torch.testing.assert_close(
            value, other["model"][key], msg=lambda m, key=key: f"{key}: {m}", **tolerance
        )
    for key in ("square", "momentum"):
        for mine, yours in zip(one["optimizer"][key], other["optimizer"][key], strict=True):
            torch.testing.assert_close(mine, yours, **tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("core", "grad"),
    [*((core, "reinforce") for core in sorted(CORES)), ("s3m", "dynamics"), ("elmur", "dynamics")],
)
def test_two_ranks_hold_the_same_after_50_updates(tmp_path, core, grad):
    flags = ("--core", core, "--behaviour.actor_grad", grad)
    one, other = on_ranks(tmp_path, learn, flags, 50)
    assert_same(one, other, rtol=0, atol=0)


def learn_each(ranks, cores, *args):
    return [learn(ranks, (*JOINED, "--core", core), *args) for core in cores]


# LaProp divides by the gradient; a larger eps keeps it from amplifying rounding at first.
JOINED = ("--optim.eps", "1e-3", "--optim.lr", "1e-3")


def test_two_ranks_are_one_with_the_joined_batch(tmp_path):
    """To float32 rounding, for the cores gru and s3m."""
    cores = ("gru", "s3m")
    ones, others = on_ranks(tmp_path, learn_each, cores, 5)
    # In a process of its own too: kernels of another rounding would draw another z here and there.
    (alones,) = on_ranks(tmp_path, learn_each, cores, 5, count=1)
    for one, other, alone in zip(ones, others, alones, strict=True):
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
    assert ranks.wrap(module, unused=True) is module
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
        (("--replay.start", "stream"), 2, "replay.start stream is for a run of one rank"),
    ],
)
def test_what_ranks_cannot_share_is_refused(flags, ranks, words):
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


def test_what_a_lost_rank_raises_is_known():
    assert lost(
        RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:5] Connection closed")
    )
    assert not lost(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
