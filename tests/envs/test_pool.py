"""The pool in both modes: order, seeds, ticks, failures, and state."""

import functools
import io
import os
import signal
import time

import numpy as np
import pytest

from envs.env import Space
from envs.make import make_env
from envs.pool import EnvPool, PoolFailed, episode_seed
from envs.slots import PATIENCE
from envs.testing import ODD_OBS, Counter, Failing, Odd

both = pytest.mark.parametrize("processes", [False, True], ids=["here", "processes"])


@pytest.fixture
def pool_of():
    """A function that builds pools which are closed after the test."""
    pools = []

    def build(make, count=2, seed=0, processes=False, **options):
        pools.append(EnvPool(make, count, seed, processes, **options))
        return pools[-1]

    yield build
    for pool in pools:
        pool.close()


def answer(pool, ids, tick=0):
    """Send actions that depend on the slot and the tick only."""
    space = pool.act_space
    if space.kind == "discrete":
        actions = [[(int(slot) + tick) % n for n in space.classes] for slot in ids]
    else:
        actions = [np.full(space.shape, ((slot + tick) % 3) - 1.0) for slot in ids]
    pool.send(ids, np.array(actions, space.dtype))


def play(pool, ticks, start=0):
    """(tick, slot, record) of every record."""
    out = []
    for tick in range(start, start + ticks):
        ids, batch = pool.recv()
        for row, slot in enumerate(ids):
            out.append((tick, int(slot), {key: value[row] for key, value in batch.items()}))
        answer(pool, ids, tick)
    return out


def assert_same(left, right):
    assert [row[:2] for row in left] == [row[:2] for row in right]
    for (tick, slot, a), (_, _, b) in zip(left, right, strict=True):
        for key in a:
            np.testing.assert_array_equal(a[key], b[key], f"{key}, tick {tick}, slot {slot}")


@both
def test_every_slot_counts_its_own_steps_with_its_own_seeds(pool_of, processes):
    pool = pool_of(functools.partial(Counter, 4, vary=True, image=True), 3, 7, processes)
    for slot in range(3):
        records = [record for _, number, record in play_until(pool, 14)[slot]]
        episode = age = 0
        for record in records:
            seed = episode_seed(7, slot, episode)
            assert record["vector"].tolist() == [seed % 1000, age]
            assert record["image"].min() == record["image"].max() == age
            assert (record["reward"], record["age"], record["episode"]) == (age, age, episode)
            assert record["is_first"] == (age == 0)
            assert record["is_last"] == record["is_terminal"] == (age == 1 + seed % 4)
            episode, age = (episode + 1, 0) if record["is_last"] else (episode, age + 1)


def play_until(pool, ticks):
    """Records by slot; played once for a pool."""
    if not hasattr(pool, "played"):
        pool.played = play(pool, ticks)
    return {slot: [row for row in pool.played if row[1] == slot] for slot in range(pool.count)}


def test_both_modes_give_the_same_records(pool_of):
    make = functools.partial(Odd, ODD_OBS, Space("vector", (3,)))
    here, there = pool_of(make, 3), pool_of(make, 3, processes=True)
    assert_same(play(here, 12), play(there, 12))


@both
def test_a_batch_has_the_types_of_the_spaces(pool_of, processes):
    pool = pool_of(functools.partial(Odd, ODD_OBS, Space("vector", (3,))), 2, 0, processes)
    ids, batch = pool.recv()
    assert ids.tolist() == [0, 1]
    types = {key: (value.shape, value.dtype.name) for key, value in batch.items()}
    assert types == {
        "image": ((2, 63, 64, 1), "uint8"),
        "body/joints": ((2, 5), "float32"),
        "token": ((2, 2), "int32"),
        "reward": ((2,), "float32"),
        "is_first": ((2,), "bool"),
        "is_last": ((2,), "bool"),
        "is_terminal": ((2,), "bool"),
        "env_steps": ((2,), "int64"),
        "age": ((2,), "int32"),
        "episode": ((2,), "int32"),
    }


def test_episode_seeds_differ_and_evaluation_has_a_half_of_its_own():
    keys = [(seed, slot, n) for seed in range(3) for slot in range(4) for n in range(50)]
    train = {episode_seed(*key) for key in keys}
    evaluation = {episode_seed(*key, purpose="eval") for key in keys}
    assert len(train) == len(evaluation) == 600
    assert 0 <= min(train) <= max(train) < 2**30 <= min(evaluation) <= max(evaluation) < 2**31


@both
def test_a_slot_in_reset_rejoins_after_exactly_reset_ticks(pool_of, processes):
    # Episodes of 2 actions: records at ticks 0, 1, 2, then a gap of 3 ticks.
    pool = pool_of(functools.partial(Counter, 2), 1, 0, processes, reset_ticks=3)
    seen = []
    for _ in range(9):
        ids, batch = pool.recv()
        seen.append((pool.tick - 1, int(batch["age"][0])))
        answer(pool, ids)
    assert seen == [(0, 0), (1, 1), (2, 2), (6, 0), (7, 1), (8, 2), (12, 0), (13, 1), (14, 2)]


def test_the_other_slots_go_on_while_one_resets(pool_of):
    make = functools.partial(Counter, 5, vary=True)
    # The first seed for which slot 0 has 1 action and slot 1 has 5.
    seed = next(
        seed
        for seed in range(1000)
        if episode_seed(seed, 0, 0) % 5 == 0 and episode_seed(seed, 1, 0) % 5 == 4
    )
    pool = pool_of(make, 2, seed, reset_ticks=2)
    seen = []
    for _ in range(6):
        ids, batch = pool.recv()
        seen.append(list(zip(ids.tolist(), batch["age"].tolist(), strict=True)))
        answer(pool, ids)
    assert seen[:2] == [[(0, 0), (1, 0)], [(0, 1), (1, 1)]]
    assert seen[2:4] == [[(1, 2)], [(1, 3)]]
    assert seen[4] == [(0, 0), (1, 4)]


def test_an_unanswered_or_wrongly_answered_recv_is_an_assertion_error(pool_of):
    pool = pool_of(Counter)
    pool.recv()
    with pytest.raises(AssertionError, match="send first"):
        pool.recv()
    with pytest.raises(AssertionError, match="send first"):
        pool.state()
    with pytest.raises(AssertionError, match="expected"):
        answer(pool, np.array([0]))


FAILURES = [("raise", False), ("raise", True), ("exit", True), ("hang", True)]


@pytest.mark.parametrize(("how", "processes"), FAILURES)
def test_a_failure_closes_the_episode_as_truncated_and_is_counted(pool_of, how, processes, caplog):
    # Slot 1 fails at step 5 of its first episode, slot 0 does not.
    seed = next(
        seed
        for seed in range(1000)
        if [episode_seed(seed, slot, n) % 3 for slot, n in ((0, 0), (1, 0), (1, 1))] == [1, 0, 1]
    )
    timeout = 1.5 if how == "hang" else 60
    pool = pool_of(functools.partial(Failing, how), 2, seed, processes, timeout=timeout)
    rows = play(pool, 8)
    records = [record for _, slot, record in rows if slot == 1]
    before, closing, opening = records[4:7]
    np.testing.assert_array_equal(closing["vector"], before["vector"])
    np.testing.assert_array_equal(closing["image"], before["image"])
    assert (closing["reward"], closing["age"], closing["episode"]) == (0, 5, 0)
    flags = ("is_first", "is_last", "is_terminal")
    assert [bool(closing[flag]) for flag in flags] == [False, True, False]
    assert opening["is_first"]
    assert (opening["age"], opening["episode"]) == (0, 1)
    assert opening["vector"][0] == episode_seed(seed, 1, 1) % 1000
    assert [record["age"] for _, slot, record in rows if slot == 0] == list(range(8))
    assert pool.restarts == 1
    told = {"raise": "in step", "exit": "exit code 3", "hang": "no answer within 1.5 s"}[how]
    assert "environment 1 failed" in caplog.text
    assert told in caplog.text


class BadReset(Counter):
    """Cannot reset from even seeds."""

    def reset(self, seed):
        if seed % 2 == 0:
            raise RuntimeError("this seed is bad")
        return super().reset(seed)


@both
def test_a_failed_reset_is_replaced_by_the_next_episode(pool_of, processes):
    seed = next(s for s in range(100) if [episode_seed(s, 0, n) % 2 for n in (0, 1)] == [0, 1])
    pool = pool_of(BadReset, 1, seed, processes)
    _, batch = pool.recv()
    assert (batch["is_first"].tolist(), batch["episode"].tolist()) == ([True], [1])
    assert pool.restarts == 1


@both
def test_too_many_failures_end_the_run_with_index_traceback_and_count(pool_of, processes):
    make = functools.partial(Failing, "raise", one_in=1)
    pool = pool_of(make, 1, 0, processes, restarts_per_hour=1)
    with pytest.raises(RuntimeError, match="environment 0 failed; 2 failures") as caught:
        play(pool, 30)
    assert "as asked" in str(caught.value)
    assert "Traceback" in str(caught.value)


class Unlike(Counter):
    """Its observations are not what its space says."""

    def step(self, action):
        raise ValueError("observation 'vector' is float32 (5,), its space says float32 (4,)")


@both
def test_failures_before_any_step_end_the_run_at_the_second(pool_of, processes):
    pool = pool_of(Unlike, 3, 0, processes, restarts_per_hour=10)
    with pytest.raises(PoolFailed, match=r"before any has made a step[\s\S]*its space says"):
        play(pool, 30)
    assert pool.restarts == 2
    restored = pool_of(Unlike, 3, 0, processes, restarts_per_hour=10)
    state = pool_of(Counter, 3).state()
    restored.restore(state)
    with pytest.raises(PoolFailed, match="11 failures"):  # its steps were made before
        play(restored, 30)


class Unbuildable(Counter):
    def __init__(self, error=ValueError("no licence")):  # noqa: B008 - raised, not kept
        raise error


def test_an_environment_that_cannot_be_built_says_why(pool_of):
    for processes in (False, True):
        with pytest.raises(ValueError, match=r"^no licence$"):
            pool_of(Unbuildable, processes=processes)
    with pytest.raises(RuntimeError, match=r"could not be built[\s\S]*KeyError: 'licence'"):
        pool_of(functools.partial(Unbuildable, KeyError("licence")), processes=True)


TASKS = {
    "counter": (functools.partial(Counter, 7, vary=True, image=True), 4),
    "cartpole": (functools.partial(make_env, "gym_CartPole-v1"), 4),
    "odd": (functools.partial(Odd, ODD_OBS, Space("vector", (3,))), 0),
}


def through_a_file(state):
    """As a checkpoint stores it: tensors and plain values, nothing of numpy's."""
    import torch  # here, for workers import this module

    plain = {
        **state,
        "actions": [torch.from_numpy(taken) for taken in state["actions"]],
        "last": [
            last
            and {
                key: torch.from_numpy(value) if isinstance(value, np.ndarray) else float(value)
                for key, value in last.items()
            }
            for last in state["last"]
        ],
    }
    file = io.BytesIO()
    torch.save(plain, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("ticks", [0, 1, 9, 23])
def test_a_restored_pool_goes_on_as_if_never_stopped(pool_of, name, ticks):
    make, reset_ticks = TASKS[name]
    whole = pool_of(make, 3, 1, reset_ticks=reset_ticks)
    play(whole, ticks)
    state = through_a_file(whole.state())
    restored = pool_of(make, 3, 1, reset_ticks=reset_ticks)
    restored.restore(state)
    assert_same(play(whole, 25, ticks), play(restored, 25, ticks))
    assert restored.restarts == 0


def test_a_pool_of_processes_is_restored_from_a_pool_in_this_process(pool_of):
    make, reset_ticks = TASKS["counter"]
    whole = pool_of(make, 2, 1, reset_ticks=reset_ticks)
    play(whole, 12)
    restored = pool_of(make, 2, 1, processes=True, reset_ticks=reset_ticks)
    restored.restore(through_a_file(whole.state()))
    assert_same(play(whole, 12, 12), play(restored, 12, 12))


@both
def test_an_episode_that_comes_out_otherwise_is_closed_as_truncated(pool_of, processes):
    whole = pool_of(functools.partial(Counter, 9))
    played = play(whole, 4)
    state = whole.state()
    state["last"][1]["vector"][1] = 55
    restored = pool_of(functools.partial(Counter, 9), processes=processes)
    restored.restore(state)
    ids, batch = restored.recv()
    assert ids.tolist() == [0, 1]
    assert batch["is_last"].tolist() == [False, True]
    assert batch["is_terminal"].tolist() == [False, False]
    assert batch["vector"][1].tolist() == [played[-1][2]["vector"][0], 55]
    assert batch["age"].tolist() == [4, 4]
    assert restored.restarts == 1


@pytest.mark.parametrize("how", ["differs", "fails"])
def test_many_episodes_that_do_not_come_out_the_same_do_not_end_a_resumed_run(pool_of, how):
    make = functools.partial(Counter, 9)
    whole = pool_of(make, 12)
    play(whole, 4)
    state = whole.state()
    for last in state["last"]:
        last["vector"][1] = 55
    if how == "fails":  # the episode is over before its actions are
        make = functools.partial(Counter, 2)
    restored = pool_of(make, 12, restarts_per_hour=10)
    restored.restore(state)
    _, batch = restored.recv()
    assert batch["is_last"].all()
    assert restored.restarts == 12
    assert not restored.restart_times


class Slow(Counter):
    def step(self, action):
        time.sleep(0.02)
        return super().step(action)


def test_an_episode_that_runs_again_has_time_for_all_its_steps(pool_of):
    make = functools.partial(Slow, 200)
    whole = pool_of(make, 1)
    play(whole, 60)
    restored = pool_of(make, 1, processes=True)
    restored.timeout = 1.0
    restored.restore(whole.state())
    _, batch = restored.recv()
    assert (batch["vector"][0, 1], restored.restarts) == (60, 0)


class Counted(Counter):
    """Gives a number for the records at the end of an episode alone."""

    def step(self, action):
        step = super().step(action)
        return {**step, "log/success": 1.0} if step["is_last"] else step


def test_numbers_for_the_records_may_come_at_the_end_alone(pool_of):
    pool = pool_of(functools.partial(Counted, 5, vary=True), 2)
    seen = []
    for _ in range(20):
        ids, batch = pool.recv()
        if "log/success" in batch:
            assert (batch["log/success"] == batch["is_last"]).all()
            seen.append(batch["is_last"].sum())
        pool.send(ids, np.ones((len(ids), 1), np.int32))
    assert 1 in seen  # one of the two ended, the other had no such number


def test_an_action_that_fails_again_after_a_resume_closes_the_episode(pool_of):
    make = functools.partial(Failing, "raise", one_in=1)
    whole = pool_of(make, 1)
    play(whole, 5)
    restored = pool_of(make, 1)
    restored.restore(whole.state())
    _, batch = restored.recv()
    assert (batch["is_last"].tolist(), batch["age"].tolist()) == ([True], [5])
    assert batch["vector"][0, 1] == 4


def test_a_state_with_another_number_of_slots_is_refused(pool_of):
    pool = pool_of(Counter, 2)
    with pytest.raises(ValueError, match=r"set env\.count to 2"):
        pool_of(Counter, 3).restore(pool.state())


def test_workers_survive_what_asks_a_run_to_stop(pool_of):
    pool = pool_of(Counter, processes=True)
    ids, _ = pool.recv()
    for slot in pool.slots:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            os.kill(slot.process.pid, number)
    answer(pool, ids)
    play(pool, 3)
    assert pool.restarts == 0


class Clings(Counter):
    """Takes its time to close."""

    def close(self):
        time.sleep(60)


def test_environments_close_side_by_side_and_one_that_fails_leaves_none_open(pool_of, caplog):
    pool = pool_of(Clings, 3, processes=True)
    start = time.monotonic()
    pool.close()
    assert time.monotonic() - start < 2 * PATIENCE
    closed = []

    class Breaks(Counter):
        def close(self):
            closed.append(self)
            raise RuntimeError("no window")

    pool_of(Breaks, 3).close()
    assert len(closed) == 3
    assert "no window" in caplog.text
