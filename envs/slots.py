"""One environment of a pool: a spawned process, or an object in this one.

Both take a command (`reset`, `step`, `rerun`) with `begin` and give its record with `result`, or
raise SlotFailed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import traceback
import zlib
from collections.abc import Callable
from multiprocessing import shared_memory
from typing import Any

import numpy as np

from envs.env import Env, Step

PATIENCE = 2.0  # seconds that a process has to close its environment
WORKER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
}


def checksum(record: Step) -> int:
    code = 0
    for key in sorted(record):
        code = zlib.crc32(np.ascontiguousarray(record[key]).tobytes(), code)
    return code


class SlotFailed(Exception):
    """An environment raised, died or fell silent; the text says which, with its traceback."""


def rerun(env: Env, seed: int, actions: list[np.ndarray]) -> tuple[Step, int]:
    """The step that `actions` lead to from a reset, and the checksum of the one before it."""
    record, before = env.reset(seed), 0
    for action in actions:
        before = checksum(record)
        record = env.step(action)
    return record, before


class LocalSlot:
    """An environment in this process; results wait until they are asked for.

    An exception is treated as in a worker; a call that exits or hangs takes this process along.
    """

    def __init__(self, make: Callable[[], Env]):
        self.env = make()
        self.obs_space, self.act_space = self.env.obs_space, self.env.act_space

    def begin(self, command: str, *args: Any) -> None:
        self.error = ""
        try:
            if command == "rerun":
                self.answer = rerun(self.env, *args)
            else:
                self.answer = getattr(self.env, command)(*args)
        except Exception:
            self.error = traceback.format_exc()

    def result(self, timeout: float) -> Any:
        if self.error:
            raise SlotFailed(self.error)
        return self.answer

    def leave(self) -> None:
        """It ends when it is closed."""

    def close(self, patience: float = 0.0) -> None:
        self.env.close()


def worker(make: Callable[[], Env], pipe: Any) -> None:
    """The process of one environment. It ends when the parent closes the pipe or dies."""
    # The parent decides when to stop; Ctrl-C and a scheduler's notice reach the whole group.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=leave_with_parent, daemon=True).start()
    env = memory = None
    places: dict[str, np.ndarray] = {}
    try:
        env = make()
        pipe.send(("spaces", (env.obs_space, env.act_space)))
        name = pipe.recv()
        if name:
            memory = shared_memory.SharedMemory(name)
            places = image_places(memory, env.obs_space)
        while (message := pipe.recv()) is not None:
            command, args = message
            before = None
            if command == "rerun":
                record, before = rerun(env, *args)
            else:
                record = getattr(env, command)(*args)
            for key, place in places.items():
                place[...] = record[key]
            rest = {key: value for key, value in record.items() if key not in places}
            pipe.send(("step", (rest, before)))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    except BaseException as error:
        refused = env is None and isinstance(error, ValueError)
        with contextlib.suppress(OSError):
            pipe.send(("refused", str(error)) if refused else ("error", traceback.format_exc()))
    finally:
        with contextlib.suppress(Exception):
            if env is not None:
                env.close()
        places.clear()
        if memory:
            with contextlib.suppress(BufferError):
                memory.close()


def leave_with_parent() -> None:
    """End this process when its parent is gone, even in the middle of a simulator's call."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def image_places(memory: shared_memory.SharedMemory, spaces: dict[str, Any]) -> dict[str, Any]:
    """Views into shared memory, one an image key."""
    places, offset = {}, 0
    for key, space in spaces.items():
        if space.kind == "image":
            places[key] = np.ndarray(space.shape, space.dtype, memory.buf, offset)
            offset += int(np.prod(space.shape))
    return places


class ProcessSlot:
    """An environment in a spawned process: a pipe for messages, shared memory for images."""

    def __init__(self, make: Callable[[], Env]):
        context = multiprocessing.get_context("spawn")
        self.pipe, child = context.Pipe()
        self.process = context.Process(target=worker, args=(make, child), daemon=True)
        before = {key: os.environ.get(key) for key in WORKER_ENVIRONMENT}
        os.environ.update(WORKER_ENVIRONMENT)
        try:
            self.process.start()
        finally:
            for key, value in before.items():
                if value is None:
                    os.environ.pop(key)
                else:
                    os.environ[key] = value
        child.close()
        self.memory: shared_memory.SharedMemory | None = None
        self.places: dict[str, np.ndarray] = {}

    def connect(self, timeout: float) -> None:
        """Wait for the environment to be built, then share memory for its images."""
        _, (self.obs_space, self.act_space) = self.receive(timeout)
        size = sum(int(np.prod(s.shape)) for s in self.obs_space.values() if s.kind == "image")
        if size:
            self.memory = shared_memory.SharedMemory(create=True, size=size)
            self.places = image_places(self.memory, self.obs_space)
        self.pipe.send(self.memory.name if self.memory else "")

    def receive(self, timeout: float) -> Any:
        try:
            if not self.pipe.poll(timeout):
                raise SlotFailed(f"no answer within {timeout:g} s")
            kind, content = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(1)
            raise SlotFailed(f"its process died, exit code {self.process.exitcode}") from None
        if kind == "refused":
            raise ValueError(content)
        if kind == "error":
            raise SlotFailed(content)
        return kind, content

    def begin(self, command: str, *args: Any) -> None:
        # A process that died is noticed when its result is asked for.
        with contextlib.suppress(OSError):
            self.pipe.send((command, args))

    def result(self, timeout: float) -> Any:
        _, (record, before) = self.receive(timeout)
        record.update({key: place.copy() for key, place in self.places.items()})
        return record if before is None else (record, before)

    def leave(self) -> None:
        """Tell the process to end, which `close` waits for."""
        with contextlib.suppress(OSError):
            self.pipe.send(None)
        self.pipe.close()

    def close(self, patience: float = PATIENCE) -> None:
        """Waits for `patience` seconds, then kills."""
        self.leave()
        self.process.join(patience)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        if self.memory:
            self.places.clear()
            self.memory.close()
            self.memory.unlink()
