"""Evaluation beside training, in a process of its own that training never waits for.

When an evaluation is due, the learner's weights are copied to the host; a thread writes them to
evaluation/weights.pt in the run's folder and names the file to the process, which plays as
`python -m agent.evaluate` does and answers with the results. The row is logged under the step of
those weights. What falls due while the process is busy is skipped and counted. The process ends
with its parent, however that ends; its failures are reported and counted and end nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from agent.evaluate import MODES, logged, metrics_of, serve, weights_file
from agent.logger import Logger
from agent.published import acting_weights
from agent.update import Update
from configs.schema import Config

log = logging.getLogger("agent")

POLL = 0.1  # seconds between two looks of a run that has ended and waits for its last evaluation

LONGEST = 7200.0  # seconds that it waits: an environment may hang, or never end an episode

HUNG = 86400.0  # seconds after which one beside training is given up: the next are waiting

GRACE = 10.0  # seconds that the process has to close its environments


class Evaluator:
    def __init__(self, config: Config, folder: Path, logger: Logger, agent_step: int):
        """`agent_step` is where this sitting begins: what fell due before it is not repeated."""
        self.config, self.logger = config, logger
        self.file = weights_file(folder)
        self.file.parent.mkdir(exist_ok=True)
        self.number = agent_step // config.eval.every
        self.skipped = self.failed = 0
        self.begun, self.told = 0.0, False  # when the last was, and whether a skip has been told
        self.process: Any = None
        self.pipe: Any = None
        self.asked: dict[str, float] | None = None  # axes of the weights that are being evaluated
        self.thread = ThreadPoolExecutor(1, "weights")
        self.written: Future[None] | None = None
        # Before multiprocessing's own exit handler, which waits for a process that waits for us.
        atexit.register(self.close)
        self.start()

    def look(self, axes: dict[str, float], update: Update) -> None:
        """Log what is ready and begin what is due; takes no longer than copying the weights."""
        self.collect()
        if self.asked and time.monotonic() - self.begun > HUNG:
            self.end()
            self.fail(f"not done within {HUNG:g} s")
        number = int(axes["agent_step"]) // self.config.eval.every
        if number == self.number:
            return
        self.number = number
        if self.asked:
            self.skipped += 1
            if not self.told:  # once for each that is waited for
                log.warning(
                    "evaluation at step %d is skipped: the one of step %d is not done; "
                    "a larger eval.every or fewer eval.episodes would fit",
                    axes["agent_step"],
                    self.asked["agent_step"],
                )
            self.told = True
            return
        self.begin(axes, update)

    def finish(self, axes: dict[str, float], update: Update, stopped: Callable[[], bool]) -> None:
        """Wait for what is under way, then evaluate the run's last weights; or until `stopped`."""
        self.wait(stopped)
        # A run that had ended and is started again has been here before.
        done = {row["agent_step"] for row in logged(self.logger.folder)}
        if not stopped() and axes["agent_step"] not in done:
            self.begin(axes, update)
            self.wait(stopped)

    def wait(self, stopped: Callable[[], bool]) -> None:
        end = time.monotonic() + LONGEST
        while self.asked and not stopped():
            time.sleep(POLL)
            self.collect()
            if self.asked and time.monotonic() > end:
                self.end()
                self.fail(f"not done within {LONGEST:g} s of the run's end")

    def begin(self, axes: dict[str, float], update: Update) -> None:
        if self.process is None:
            self.start()
        self.asked, self.begun, self.told = dict(axes), time.monotonic(), False
        content = {
            "agent_step": int(axes["agent_step"]),
            "update": int(axes["update"]),
            "episodes": self.config.eval.episodes,
            "weights": acting_weights(update),
        }
        self.written = self.thread.submit(self.hand_over, content)

    def hand_over(self, content: dict[str, Any]) -> None:
        """In the thread: a disk may be slow."""
        aside = self.file.with_suffix(".writing")
        torch.save(content, aside)
        aside.replace(self.file)
        self.pipe.send(str(self.file))

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, child = context.Pipe()
        # No daemon: those may not have the environments' processes as children.
        self.process = context.Process(target=serve, args=(self.config, child), name="evaluation")
        self.process.start()
        child.close()

    def collect(self) -> None:
        """Log the results of the process, if it has any, or its failure."""
        if not self.asked:
            return
        try:
            if self.written and self.written.done():
                self.written.result()
                self.written = None
            if not self.pipe.poll():
                return
            result = self.pipe.recv()
        except (OSError, EOFError, RuntimeError) as error:
            if isinstance(error, EOFError | ConnectionError):
                self.process.join(1)  # its end of the pipe closes a moment before it ends
            code = "" if self.process.is_alive() else " (its process ended)"
            result = f"{error!r}{code}"
            self.end()
        if isinstance(result, str):
            self.fail(result)
            return
        self.logger.evaluation(self.asked, metrics_of(result))
        greedy, sampled = (result[mode]["mean"] for mode in MODES)
        step = self.asked["agent_step"]
        log.info("evaluation at step %d: greedy %.2f, sampled %.2f", step, greedy, sampled)
        self.asked = None

    def fail(self, why: str) -> None:
        self.failed += 1
        log.warning("evaluation at step %d failed: %s", self.asked["agent_step"], why)
        self.asked = None

    def stats(self) -> dict[str, float]:
        return {"eval/skipped": self.skipped, "eval/failed": self.failed}

    def end(self) -> None:
        """End the process, and with it its environments; another starts when one is due."""
        if self.process is None:
            return
        self.process.terminate()
        self.process.join(GRACE)
        self.process.kill()
        self.process.join()
        with contextlib.suppress(OSError):
            self.pipe.close()
        self.process = None

    def close(self) -> None:
        atexit.unregister(self.close)
        # The thread first: it sends to the pipe.
        self.thread.shutdown()
        self.end()
