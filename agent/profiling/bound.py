"""The least time an update could take here: its products at the fastest rate, the rest at copying.

Products are matrix products and convolutions, counted by torch's FLOP counter. Every other operator
is held to reading its inputs and writing its outputs once, at the bandwidth of a large copy. Small
tensors that stay in a cache can be faster than that, so the bound is one of main memory.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from worldmodels.scan import engine

SCANS = {torch.ops.worldmodels.diag_scan: 0, torch.ops.worldmodels.diag_scan_backward: 1}


def touched(value: Any) -> int:
    """Bytes of all tensors in a nest of values; an expanded axis is stored once."""
    if isinstance(value, Tensor):
        sizes = zip(value.shape, value.stride(), strict=True)
        return value.element_size() * math.prod(size for size, stride in sizes if stride)
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return 0
    return sum(map(touched, value))


class Traffic(TorchDispatchMode):
    """Counts `operators` that are dispatched, and `bytes` of those that are no product or view.

    The scan is one operator to autograd. On a CPU it is a loop of others: these are counted as
    operators, but its bytes are those of its own inputs and outputs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func._overloadpacket
        if packet in SCANS and args[1].device.type == "cpu":
            before = self.bytes
            with self:
                out = engine(args[1].device)[SCANS[packet]](*args, **kwargs)
            self.bytes = before + touched([args, kwargs, out])
            return out
        out = func(*args, **kwargs)
        self.operators += 1
        product = packet in flop_registry and packet not in SCANS
        if not (product or func.is_view or "empty" in func.name()):
            written = out
            if func._schema.is_mutable:
                given = zip(func._schema.arguments, args, strict=False)
                written = [value for spec, value in given if spec.is_write]
            self.bytes += touched([args, kwargs, written])
        return out


@dataclass(frozen=True)
class Cost:
    flops: int  # all that torch's counter knows, the scan included
    products: int  # FLOPs of matrix products and convolutions
    bytes: int  # moved by the other operators
    operators: int  # dispatched


def cost(step: Callable[[], object]) -> Cost:
    """What one call of `step` computes and moves."""
    with Traffic() as traffic, FlopCounterMode(display=False) as counter:
        step()
    counts = counter.get_flop_counts().get("Global", {})
    scans = sum(counts.get(packet, 0) for packet in SCANS)
    flops = counter.get_total_flops()
    return Cost(flops, flops - scans, traffic.bytes, traffic.operators)


def fastest(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of five calls, after one."""
    times = []
    for _ in range(6):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def routes(
    size: int, dtype: torch.dtype, device: torch.device
) -> dict[str, tuple[int, Callable[[], Tensor]]]:
    """Ways to a product: name -> FLOPs and a call. `size` is that of the square matrices."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out: dict[str, tuple[int, Callable[[], Tensor]]] = {"matmul": (2 * size**3, lambda: a @ b)}
    if device.type == "cpu" and torch.backends.mkldnn.is_available():
        linear = torch.ops.mkldnn._linear_pointwise
        out["oneDNN linear"] = (2 * size**3, lambda: linear(a, b, None, "none", [], ""))
    side = max(1, size // 64)
    for kernel, channels in ((1, size // 8), (5, size // 16)):
        image = torch.randn(8, channels, side, side, device=device).to(dtype)
        weight = torch.randn(channels, channels, kernel, kernel, device=device).to(dtype)
        image, weight = (v.to(memory_format=torch.channels_last) for v in (image, weight))
        flops = 2 * 8 * (side * channels * kernel) ** 2
        call = functools.partial(F.conv2d, image, weight, padding=kernel // 2)
        out[f"{kernel}x{kernel} convolution"] = (flops, call)
    return out


@dataclass(frozen=True)
class Rates:
    """What this process reaches: FLOP/s by data type, and bytes/s read and written by a copy."""

    matmul: dict[str, float]  # `torch.matmul` of float32 and bfloat16
    best: dict[str, float]  # the fastest route
    route: dict[str, str]  # its name
    copy: float

    def bound(self, cost: Cost, precision: str) -> float:
        """Seconds that `cost` takes at least; autocast may leave products in float32."""
        fast = max(self.best[name] for name in {"float32", precision})
        return cost.products / fast + cost.bytes / self.copy


@torch.no_grad()
def measure(device: torch.device, size: int = 2048, megabytes: int = 256) -> Rates:
    """Rates from square matrices of `size` and a copy of `megabytes`."""
    matmul, best, route = {}, {}, {}
    for name in ("float32", "bfloat16"):
        ways = routes(size, getattr(torch, name), device)
        found = {way: flops / fastest(call, device) for way, (flops, call) in ways.items()}
        matmul[name] = found["matmul"]
        route[name] = max(found, key=found.__getitem__)
        best[name] = found[route[name]]
    source = torch.zeros(megabytes * 2**18, device=device)
    target = torch.ones_like(source)
    seconds = fastest(lambda: target.copy_(source), device)
    return Rates(matmul, best, route, 2 * touched(source) / seconds)
