"""The learner: one gradient step from one batch, and the state that it leaves behind."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from agent import seeding
from agent.checkpoint import check_model
from agent.optim import LaProp
from agent.ranks import Ranks
from agent.update import Update
from worldmodels.uncompiled import leave_uncompiled
from worldmodels.world_model import Carry, tree_map

log = logging.getLogger("agent")


MOST_LEFT_OUT = 100  # updates in a row, where those that are not finite are left out


class NonFiniteError(FloatingPointError):
    """A loss or gradient is not finite; nothing of that update was kept that matters."""


KEPT = 5


class KeptBatches:
    """Batches of updates that were not finite, the last five, for a look by hand."""

    def __init__(self, folder: Path, rank: int = 0):
        self.folder, self.rank = folder, rank

    def __call__(self, update: int, batch: dict[str, Any]) -> str:
        """Save one and say where; a disk that refuses is not what is to be told now."""
        path = self.folder / (f"{update:09}" + (f"-{self.rank}" if self.rank else "") + ".pt")
        try:
            self.folder.mkdir(exist_ok=True)
            # A plan follows from the rest, and is nothing that torch.load trusts.
            whole = {k: v for k, v in batch.items() if k != "plan"}
            torch.save(tree_map(lambda value: value.cpu(), whole), path)
            for old in sorted(self.folder.glob("*.pt"))[:-KEPT]:
                old.unlink()
        except (OSError, RuntimeError) as error:  # torch.save's own, where the disk is full
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            return f"its batch could not be kept ({error})"
        return f"its batch is kept in {path}"


class Compiled:
    """`update` compiled for the shapes of its first call; when that fails, it says so and goes on
    without."""

    def __init__(self, update: nn.Module):
        leave_uncompiled(update)
        # The backward too in the first call, in this thread, where a notice is heard.
        import torch._functorch.config as functorch

        if hasattr(functorch, "force_non_lazy_backward_lowering"):
            functorch.force_non_lazy_backward_lowering = True
        self.plain, self.compiled = update, torch.compile(update, dynamic=False)
        self.called = False

    def __call__(self, *args: Any) -> tuple[Tensor, dict[str, Tensor], Carry]:
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
    def __init__(
        self,
        update: Update,
        seed: int,
        precision: str,
        compiled: bool = False,
        keep: Callable[[int, dict[str, Any]], str] | None = None,
        ranks: Ranks | None = None,
    ):
        """precision: `float32`, or `bfloat16` for autocast of matrix products and convolutions;
        `keep(update, batch)` puts a batch aside whose update was not finite, and says where."""
        self.update = update
        self.ranks = ranks or Ranks()
        # Rows too short for a segment do not use what writes a memory.
        wrapped = self.ranks.wrap(update, unused=update.world.core.segment > 1)
        self.forward = Compiled(wrapped) if compiled else wrapped
        self.device = update.return_range.device
        self.optimizer = LaProp(update.trainable(), update.config.optim)
        self.seed, self.precision = seed, precision
        self.drops = any(isinstance(m, nn.Dropout) and m.p > 0 for m in update.modules())
        if self.device.type == "cuda":
            # By default convolutions in float32 are rounded to TF32, and matrix products are not.
            torch.backends.cudnn.allow_tf32 = False
        self.keep = keep or (lambda update, batch: "its batch is not kept")
        self.updates = self.skipped = 0
        self.in_row = 0  # updates that were left out since the last one that was not
        self.carry: Carry | None = None  # after the last step of the batch; None: not finite
        self.unchecked: tuple[int, Tensor, dict[str, Tensor], dict[str, Any]] | None = None

    @property
    def compiles_next(self) -> bool:
        """Whether the next update is the one that compiles."""
        return isinstance(self.forward, Compiled) and not self.forward.called

    def autocast(self) -> Any:
        if self.precision == "float32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def train(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """One update; returns metrics as tensors on the device, without waiting for them.

        Raises NonFiniteError for a loss or gradient that is not finite: at once on a CPU, one
        update later on a GPU, where looking at once would make the host wait. With
        `optim.nonfinite skip` it does look at once, and such an update changes nothing but
        `updates` and `skipped`; its metrics are NaN.
        """
        if self.device.type != "cpu":
            self.check()
        rank = self.ranks.number
        random = seeding.generator(self.seed, "update", self.updates, self.device, rank)
        rows, length = batch["reward"].shape
        noise = self.update.noise(rows, length, random)
        skip = self.update.config.optim.nonfinite == "skip"
        before = self.update.return_range.clone() if skip else None  # the forward moves it
        if self.drops:  # which draws from the generator of all
            torch.manual_seed(seeding.key(self.seed, "dropout", self.updates, rank))
        with self.autocast():
            loss, metrics, self.carry = self.forward(batch, noise)
        loss.backward()
        if skip:
            fault = self.fault(self.optimizer.norms(), metrics)
            # Gradients are those of all ranks, losses are each one's own.
            if self.ranks.any(bool(fault)):
                fault = fault or "losses of another rank"
                self.update.return_range.copy_(before)
                return self.leave_out(fault, batch, metrics)
        self.in_row = 0
        norms = self.optimizer.step()
        self.update.update_slow()
        self.updates += 1
        self.unchecked = (self.updates, norms, metrics, batch)
        if self.device.type == "cpu":
            self.check()
        return {**metrics, "optim/grad_norm": norms.square().sum().sqrt()}

    def check(self) -> None:
        """Raise NonFiniteError when the last update was not finite."""
        if self.unchecked is None:
            return
        number, norms, metrics, batch = self.unchecked
        self.unchecked = None
        fault = self.fault(norms, metrics)
        if fault:
            raise NonFiniteError(
                f"update {number} is not finite: {fault}; {self.keep(number, batch)}. The last "
                f"checkpoint is untouched; look at the newest rewards and observations, lower "
                f"optim.lr, or leave such updates out (optim.nonfinite skip)"
            )

    def leave_out(
        self, fault: str, batch: dict[str, Any], metrics: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Go on as if this update had not been, but for its number."""
        self.optimizer.clear()
        self.carry = None
        self.updates += 1
        self.skipped += 1
        self.in_row += 1
        where = self.keep(self.updates, batch)
        log.warning("update %d is left out, not finite: %s; %s", self.updates, fault, where)
        if self.in_row == MOST_LEFT_OUT:
            raise NonFiniteError(
                f"{self.in_row} updates in a row were not finite and left out: nothing is learned "
                f"any more. The last: {fault}; {where}"
            )
        nothing = torch.full_like(metrics["loss/total"], torch.nan)
        return dict.fromkeys([*metrics, "optim/grad_norm"], nothing)

    def fault(self, norms: Tensor, metrics: dict[str, Tensor]) -> str:
        """Which losses and gradients are not finite; empty where all are."""
        if torch.isfinite(norms.sum() + metrics["loss/total"]):
            return ""
        losses = [k for k, v in metrics.items() if k[:5] == "loss/" and not torch.isfinite(v)]
        losses = [key for key in losses if key != "loss/total"] or losses
        bad = [n for n, ok in zip(self.optimizer.names, norms.isfinite(), strict=True) if not ok]
        modules = sorted({".".join(name.split(".")[:2]) for name in bad})
        return f"losses {losses or 'none'}, gradients of {modules or 'none'}"

    def state(self) -> dict[str, Any]:
        return {
            "model": self.update.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "updates": self.updates,
            "skipped": self.skipped,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Raises ValueError for the state of another model."""
        model = self.update.state_dict()
        check_model(state["model"], model, model)
        self.update.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.updates, self.skipped = state["updates"], state.get("skipped", 0)
