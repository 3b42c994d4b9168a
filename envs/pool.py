"""Environments side by side: spawned worker processes, or the same slots in this process.

Time is counted in ticks: one `recv` is one tick. A slot that closed its episode starts its reset at
once, inside `send`, and rejoins exactly `reset_ticks` ticks later while the others go on: nobody
waits for the slowest reset, and nothing depends on timing. A slot that raises, dies or falls silent
is started again; its episode is closed as truncated and counted in `restarts`.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from envs.env import Env, Step
from envs.slots import PATIENCE, LocalSlot, ProcessSlot, SlotFailed, checksum

log = logging.getLogger("envs")

HALF = 2**30
LONGEST = 1e6  # seconds; a pipe cannot be waited for much longer


class PoolFailed(RuntimeError):
    """An environment fails more often than is allowed, or cannot be built; the text says how."""


def episode_seed(seed: int, slot: int, episode: int, purpose: str = "train") -> int:
    """Seed of one episode: a pure function; `train` is below 2**30, `eval` from there to 2**31.

    Two episodes of one half have the same seed by chance alone, once in 2**30 pairs.
    """
    offset = {"train": 0, "eval": HALF}[purpose]
    sequence = np.random.SeedSequence([seed, slot, episode])
    return offset + int(sequence.generate_state(1)[0]) % HALF


class EnvPool:
    def __init__(
        self,
        make: Callable[[], Env],
        count: int,
        seed: int,
        processes: bool,
        reset_ticks: int = 0,
        timeout: float = 120.0,
        restarts_per_hour: int = 10,
        purpose: str = "train",
        first: int = 0,
    ):
        """`make` is picklable; `timeout` in seconds; `purpose` is `train` or `eval`; `first` is
        the number of its first slot among those of several pools, which seeds go by.

        An environment that cannot be built raises its own error; in a worker ValueError alone is
        handed on, others are a PoolFailed with the traceback.
        """
        self.make, self.count, self.seed, self.processes = make, count, seed, processes
        self.reset_ticks, self.timeout, self.purpose = reset_ticks, timeout, purpose
        self.restarts_per_hour, self.restarts, self.first = restarts_per_hour, 0, first
        self.restart_times: deque[float] = deque()
        self.stepped = False  # a first step has been made
        self.tick = 0
        self.episode = [0] * count
        self.due = [0] * count
        self.actions: list[list[np.ndarray]] = [[] for _ in range(count)]
        self.last: list[Step | None] = [None] * count
        self.rerunning: set[int] = set()
        self.early: dict[int, Step] = {}  # steps that `settle` waited for, not yet received
        self.waiting: list[int] = []  # slots received and not yet answered
        self.slots: list[Any] = []
        # Before multiprocessing's own exit handler, which waits for workers that wait for us.
        atexit.register(self.close)
        try:
            for _ in range(count):
                self.slots.append(self.start())
            for slot in self.slots:
                self.connect(slot)
        except SlotFailed as error:
            self.close()
            raise PoolFailed(f"an environment could not be built:\n{error}") from None
        except BaseException:
            self.close()
            raise
        self.obs_space = self.slots[0].obs_space
        self.act_space = self.slots[0].act_space
        for index in range(count):
            self.begin_episode(index)

    def start(self) -> Any:
        return ProcessSlot(self.make) if self.processes else LocalSlot(self.make)

    def connect(self, slot: Any) -> None:
        if self.processes:
            slot.connect(self.timeout)

    def seed_of(self, slot: int, episode: int) -> int:
        return episode_seed(self.seed, self.first + slot, episode, self.purpose)

    def begin_episode(self, index: int) -> None:
        self.actions[index] = []
        self.last[index] = None
        self.slots[index].begin("reset", self.seed_of(index, self.episode[index]))

    def recv(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Slots that are due (ascending) and their steps, stacked; adds `age` and `episode`."""
        assert not self.waiting, f"slots {self.waiting} have not been answered: send first"
        self.tick = max(self.tick, min(self.due))
        ids = [index for index in range(self.count) if self.due[index] <= self.tick]
        records = [self.early.pop(index, None) or self.collect(index) for index in ids]
        self.tick += 1
        for index, record in zip(ids, records, strict=True):
            self.last[index] = record
        self.waiting = ids
        keys = dict.fromkeys(key for record in records for key in record)
        # Numbers for the records of a run, `log/...`, need not be in each step.
        batch = {key: np.stack([record.get(key, 0.0) for record in records]) for key in keys}
        batch["age"] = np.array([len(self.actions[index]) for index in ids], np.int32)
        batch["episode"] = np.array([self.episode[index] for index in ids], np.int32)
        return np.array(ids), batch

    def collect(self, index: int) -> Step:
        while True:
            last, again = self.last[index], index in self.rerunning
            self.rerunning.discard(index)
            # A whole episode takes longer than an answer.
            patience = self.timeout * (1 + len(self.actions[index]) / 100 * again)
            patience = min(patience, LONGEST)
            try:
                record = self.slots[index].result(patience)
                if not again:
                    self.stepped |= not record["is_first"]
                    return record
                record, before = record
                if last is None or before == checksum(last):
                    return record
                self.restarts += 1
                log.warning(
                    "environment %d: its episode did not come out the same after a resume and is "
                    "cut here; it is no function of its seed",
                    index,
                )
            except SlotFailed as error:
                self.count_restart(index, str(error), again)
                self.restart(index)
            if last is not None:
                return closed(last)
            # Nothing of this episode was seen: the next one takes its place.
            self.episode[index] += 1
            self.begin_episode(index)

    def settle(self) -> list[Step]:
        """Between `send` and `recv`: wait for all that is under way; `recv` returns it later."""
        assert not self.waiting, f"slots {self.waiting} have not been answered: send first"
        for index in range(self.count):
            if index not in self.early:
                self.early[index] = self.collect(index)
        return list(self.early.values())

    def count_restart(self, index: int, why: str, again: bool) -> None:
        """`again`: while it ran an episode again, which says nothing of how often it fails."""
        now = time.monotonic()
        self.restarts += 1
        log.warning("environment %d failed and is started again: %s", index, why)
        if again:
            return
        self.restart_times.append(now)
        while now - self.restart_times[0] > 3600:
            self.restart_times.popleft()
        if not self.stepped and len(self.restart_times) > 1:  # it is no accident
            raise PoolFailed(f"environments fail before any has made a step. The last:\n{why}")
        if len(self.restart_times) > self.restarts_per_hour:
            raise PoolFailed(
                f"environment {index} failed; {len(self.restart_times)} failures within an hour "
                f"are more than env.restarts_per_hour {self.restarts_per_hour}. The last:\n{why}"
            )

    def restart(self, index: int) -> None:
        if self.processes:
            self.slots[index].process.kill()
        with contextlib.suppress(Exception):
            self.slots[index].close()
        try:
            self.slots[index] = self.start()
            self.connect(self.slots[index])
        except SlotFailed as error:
            raise PoolFailed(f"environment {index} could not be started again:\n{error}") from None

    def send(self, ids: np.ndarray, actions: np.ndarray) -> None:
        """Actions for exactly the slots of the last `recv`; a closed episode's slot resets."""
        assert list(ids) == self.waiting, f"actions for slots {ids}, expected {self.waiting}"
        self.waiting = []
        for index, action in zip(ids.tolist(), actions, strict=True):
            self.due[index] = self.tick
            last = self.last[index]
            assert last is not None
            if last["is_last"]:
                self.episode[index] += 1
                self.begin_episode(index)
                self.due[index] += self.reset_ticks
            else:
                self.actions[index].append(action.copy())
                self.slots[index].begin("step", action)

    def state(self) -> dict[str, Any]:
        """Between `send` and `recv`: what `restore` needs to bring every episode back."""
        assert not self.waiting, f"slots {self.waiting} have not been answered: send first"
        return {
            "tick": self.tick,
            "restarts": self.restarts,
            "episode": list(self.episode),
            "due": list(self.due),
            "actions": [np.stack(taken) if taken else np.zeros(0) for taken in self.actions],
            "last": [None if last is None else dict(last) for last in self.last],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Run every open episode again from its seed and recorded actions, side by side.

        For a pool just built. An episode that does not come out the same is closed as truncated
        and counted. ValueError when the state has another number of slots.
        """
        assert self.tick == 0, "restore a pool that has not been received from"
        if len(state["episode"]) != self.count:
            raise ValueError(
                f"the saved state has {len(state['episode'])} environments, this pool "
                f"{self.count}: set env.count to {len(state['episode'])}"
            )
        for index, slot in enumerate(self.slots):
            try:
                slot.result(self.timeout)  # the resets that construction began
            except SlotFailed:
                self.restart(index)
        self.tick, self.restarts, self.stepped = state["tick"], state["restarts"], True
        self.episode, self.due = list(state["episode"]), list(state["due"])
        kind = self.act_space.dtype
        for index, taken in enumerate(state["actions"]):
            self.actions[index] = list(np.asarray(taken).astype(kind))
            self.last[index] = self.typed(state["last"][index])
            self.rerunning.add(index)
            seed = self.seed_of(index, self.episode[index])
            self.slots[index].begin("rerun", seed, self.actions[index])

    def typed(self, record: dict[str, Any] | None) -> Step | None:
        """A record that went through a file, in the types of a fresh one."""
        if record is None:
            return None
        obs = {key: np.asarray(record[key], s.dtype) for key, s in self.obs_space.items()}
        flags = {key: bool(record[key]) for key in ("is_first", "is_last", "is_terminal")}
        logged = {key: np.float64(record[key]) for key in record if key.startswith("log/")}
        numbers = {"reward": np.float32(record["reward"]), "env_steps": int(record["env_steps"])}
        return {**obs, **flags, **numbers, **logged}

    def close(self) -> None:
        atexit.unregister(self.close)
        for slot in self.slots:
            slot.leave()
        end = time.monotonic() + PATIENCE  # of all together
        for slot in self.slots:
            try:
                slot.close(max(0.0, end - time.monotonic()))
            except Exception as error:
                log.warning("an environment could not be closed: %r", error)
        self.slots = []


def closed(record: Step) -> Step:
    """The record as the end of a cut episode: truncated, without reward or simulator steps."""
    return {
        **record,
        "reward": np.float32(0),
        "is_first": False,
        "is_last": True,
        "is_terminal": False,
        "env_steps": 0,
    }
