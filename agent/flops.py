"""FLOPs of what runs, by the formulas of PyTorch's own counter."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


class Flops(TorchDispatchMode):
    """Within it, `total` counts the FLOPs of all operators, as `FlopCounterMode` of PyTorch does.

    That one imports torch.compile and follows every module, which took 40 % of a run's start.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled within, and to skip the compiler is to import it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        count = flop_registry.get(func.overloadpacket)
        if count is None and func is not torch.ops.prim.device.default:
            with self:  # what it is made of may be counted
                out = func.decompose(*args, **kwargs)
                if out is not NotImplemented:
                    return out
        out = func(*args, **kwargs)
        if count is not None:
            self.total += count(*args, **kwargs, out_val=out)
        return out
