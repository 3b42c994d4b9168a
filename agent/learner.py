"""The learner: one gradient step from one batch, and the state that it leaves behind."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Any

import torch
from torch import Tensor

from agent import seeding
from agent.optim import LaProp
from agent.update import Update

log = logging.getLogger("agent")


class NonFiniteError(FloatingPointError):
    """A loss or gradient is not finite; nothing of that update was kept that matters."""


class Compiled:
    """`update` compiled for the shapes of its first call; when that fails, it says so and goes on
    without."""

    def __init__(self, update: Update):
        self.plain, self.compiled = update, torch.compile(update, dynamic=False)
        self.called = False

    def __call__(self, *args: Any) -> tuple[Tensor, dict[str, Tensor]]:
        if self.called:
            return self.compiled(*args)
        self.called = True
        log.info("compiling the update; this takes minutes, once a machine and shape")
        start = time.monotonic()
        try:
            result = self.compiled(*args)
        except Exception as error:  # whatever compilers raise: no C++ compiler, unknown operator
            log.warning("not compiled, going on without: %s", str(error).strip().splitlines()[0])
            self.compiled = self.plain
            return self.plain(*args)
        log.info("compiled the forward in %.0f s", time.monotonic() - start)
        return result


class Learner:
    def __init__(self, update: Update, seed: int, precision: str, compiled: bool = False):
        """precision: `float32`, or `bfloat16` for autocast of matrix products and convolutions."""
        self.update = update
        self.forward = Compiled(update) if compiled else update
        self.device = update.return_range.device
        self.optimizer = LaProp(update.trainable(), update.config.optim)
        self.seed, self.precision = seed, precision
        self.updates = 0
        self.unchecked: tuple[int, Tensor, dict[str, Tensor]] | None = None

    def autocast(self) -> Any:
        if self.precision == "float32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def train(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """One update; returns metrics as tensors on the device, without waiting for them.

        Raises NonFiniteError for a loss or gradient that is not finite: at once on a CPU, one
        update later on a GPU, where looking at once would make the host wait.
        """
        if self.device.type != "cpu":
            self.check()
        random = seeding.generator(self.seed, "update", self.updates, self.device)
        rows, length = batch["reward"].shape
        noise = self.update.noise(rows, length, random)
        with self.autocast():
            loss, metrics = self.forward(batch, noise)
        loss.backward()
        norms = self.optimizer.step()
        self.update.update_slow()
        self.updates += 1
        self.unchecked = (self.updates, norms, metrics)
        if self.device.type == "cpu":
            self.check()
        return {**metrics, "optim/grad_norm": norms.square().sum().sqrt()}

    def check(self) -> None:
        """Raise NonFiniteError when the last update was not finite."""
        if self.unchecked is None:
            return
        number, norms, metrics = self.unchecked
        self.unchecked = None
        if torch.isfinite(norms.sum() + metrics["loss/total"]):
            return
        losses = [k for k, v in metrics.items() if k[:5] == "loss/" and not torch.isfinite(v)]
        losses = [key for key in losses if key != "loss/total"] or losses
        bad = [n for n, ok in zip(self.optimizer.names, norms.isfinite(), strict=True) if not ok]
        modules = sorted({".".join(name.split(".")[:2]) for name in bad})
        raise NonFiniteError(
            f"update {number} is not finite: losses {losses or 'none'}, gradients of "
            f"{modules or 'none'}. The last checkpoint is untouched; look at the newest rewards "
            f"and observations, or lower optim.lr"
        )

    def state(self) -> dict[str, Any]:
        return {
            "model": self.update.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "updates": self.updates,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.update.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.updates = state["updates"]
