"""This process among the ranks of a run: torchrun starts one a GPU, torch.distributed joins them.

Every rank owns environments and a shard of the replay and makes the same updates; what they must
agree on is gathered at fixed points of the loop. A run alone is its own only rank: nothing is
initialised, and every method gives back what it was given.

Three groups: gradients and returns go through the default one (NCCL on GPUs, Gloo on CPUs); numbers
of the host through two of Gloo's. A rank that dies closes its connections, which ends the others at
once. `QUICK` bounds the wait for one that is merely silent; what may rightly take long (a save, a
video, an environment that hangs, the start) is waited for with `PATIENT`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

T = TypeVar("T")
QUICK = timedelta(seconds=45)
PATIENT = timedelta(hours=1)


class RankLost(RuntimeError):
    """Another rank has ended, or is silent."""


def lost(error: BaseException) -> bool:
    """Whether `error` is what torch.distributed raises when another rank is gone."""
    # Gloo raises plain RuntimeErrors, also out of a backward; they name its source files.
    return isinstance(error, dist.DistError) or "gloo/" in str(error)


def of_all_ranks(values: Tensor) -> Tensor:
    """`values` (...) of every rank, side by side in the first dimension; equal shapes only."""
    if not dist.is_available() or not dist.is_initialized():
        return values
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, values.contiguous())
    return torch.cat(parts)


@dataclass
class Ranks:
    number: int = 0  # of this process among all
    count: int = 1
    local: int = 0  # of this process among those of its machine
    beside: int = 1  # processes on its machine
    parent: int = field(default_factory=os.getppid)
    quick: Any = None
    patient: Any = None

    @classmethod
    def of_torchrun(cls) -> Ranks:
        """From the variables that torchrun sets; without them, a run alone."""
        names = {"number": "RANK", "count": "WORLD_SIZE"}
        names.update(local="LOCAL_RANK", beside="LOCAL_WORLD_SIZE")
        if any(name not in os.environ for name in names.values()):
            return cls()
        return cls(**{key: int(os.environ[name]) for key, name in names.items()})

    def begin(self, device: str, slow_first: bool) -> None:
        """Join the others. `device` is `cpu`, `cuda` or `auto`; `slow_first`: the first update of
        one rank may take minutes longer than that of another. ValueError when GPUs are missing."""
        if self.count == 1:
            return
        cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
        if cuda:
            found = torch.cuda.device_count()
            if found < self.beside:
                raise ValueError(
                    f"{self.beside} ranks on a machine with {found} GPUs: start as many as there "
                    f"are (--nproc_per_node), or add --device cpu"
                )
            torch.cuda.set_device(self.local)
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        dist.init_process_group(backend, timeout=PATIENT if slow_first else QUICK)
        self.quick = dist.new_group(backend="gloo", timeout=QUICK)
        self.patient = dist.new_group(backend="gloo", timeout=PATIENT)

    def end(self) -> None:
        if self.patient:
            dist.destroy_process_group()

    def device(self, kind: str) -> torch.device:
        """The device of this rank, for `cpu` or `cuda`."""
        several = self.count > 1 and kind == "cuda"
        return torch.device(kind, self.local) if several else torch.device(kind)

    @property
    def orphaned(self) -> bool:
        """Whether torchrun is gone, which would have ended this rank."""
        return self.count > 1 and os.getppid() != self.parent

    def share(self, total: int) -> int:
        """What falls to each rank of a number that all have together."""
        return total // self.count

    def first(self, function: Callable[[], T]) -> T:
        """What `function` returns on rank 0, which alone calls it; raises what it raised there."""
        if self.count == 1:
            return function()
        box: list[Any] = [None]
        if self.number == 0:
            try:
                box = [(function(), None)]
            except Exception as error:
                box = [(None, error)]
        dist.broadcast_object_list(box, 0, group=self.patient)
        result, error = box[0]
        if error is not None:
            raise error
        return result

    def table(self, values: list[int], patient: bool) -> list[list[int]]:
        """`values` of every rank, equally many of each, in the order of the ranks."""
        if self.count == 1:
            return [values]
        row = torch.tensor(values, dtype=torch.int64)
        rows = [torch.empty_like(row) for _ in range(self.count)]
        dist.all_gather(rows, row, group=self.patient if patient else self.quick)
        return torch.stack(rows).tolist()

    def any(self, flag: bool) -> bool:
        return any(row[0] for row in self.table([int(flag)], patient=False))

    def gather(self, part: T) -> list[T] | None:
        """The parts of all ranks on rank 0, None on the others. Tensors are the host's."""
        if self.count == 1:
            return [part]
        parts: list[Any] | None = [None] * self.count if self.number == 0 else None
        dist.gather_object(part, parts, group=self.patient)
        return parts

    def wait(self) -> None:
        """Until all ranks are here."""
        if self.count > 1:
            dist.barrier(group=self.patient)

    def wrap(self, update: nn.Module, unused: bool) -> nn.Module:
        """`update` with gradients that are means over the ranks, reduced during the backward.

        `unused`: a batch need not use all parameters, which costs a look at every graph.
        """
        if self.count == 1:
            return update
        # The one buffer that changes is alike on all ranks.
        with warnings.catch_warnings():
            # PyTorch 2.13 renames `broadcast_buffers`, which 2.11 does not know otherwise.
            warnings.simplefilter("ignore", FutureWarning)
            return DistributedDataParallel(
                update,
                broadcast_buffers=False,
                gradient_as_bucket_view=True,
                find_unused_parameters=unused,
            )
