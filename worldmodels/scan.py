"""The diagonal complex linear recurrence x_t = a_t x_{t-1} + b_t, with resets by assignment.

Complex numbers are planar: axis -2 holds (real, imaginary). Everything runs in float32 (or
float64 when b is), whatever the autocast dtype. The backward is written by hand: one reversed
scan, g_t = gx_t + conj(a_{t+1}) g_{t+1}, that keeps only a, x and the resets. Three engines compute
the same thing: a loop over time on a CPU (bound by memory, so it beats every log-depth form),
Triton kernels on a GPU, and doubling in log2(T) rounds where there is neither.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

log = logging.getLogger("worldmodels")
FLOPS = 8  # real FLOPs of one complex multiply-add


def as_complex(value: Tensor) -> Tensor:
    """(..., 2, N) real to (..., N) complex."""
    return torch.complex(value[..., 0, :], value[..., 1, :])


def as_planar(value: Tensor) -> Tensor:
    """(..., N) complex to (..., 2, N) real."""
    return torch.stack([value.real, value.imag], -2)


def swapped(a: Tensor) -> Tensor:
    """The partner of a (..., 2, N) in the planar product: a x = re(a) x + swapped(a) x.flip(-2)."""
    return torch.stack([-a[..., 1, :], a[..., 1, :]], -2)


def by_step(value: Tensor, length: int) -> list[Tensor]:
    """The T slices of a (B, T, ...) coefficient, or a fixed one T times."""
    return list(value.unbind(1)) if value.dim() == 4 else [value] * length


def loop_forward(a: Tensor, b: Tensor, x0: Tensor, reset: Tensor, x_reset: Tensor) -> Tensor:
    out = torch.empty_like(b, memory_format=torch.contiguous_format)
    length = b.shape[1]
    re, cross = by_step(a[..., :1, :], length), by_step(swapped(a), length)
    some, x = reset.any(0).tolist(), x0
    for t, (drive, place) in enumerate(zip(b.unbind(1), out.unbind(1), strict=True)):
        if some[t]:
            x = torch.where(reset[:, t, None, None], x_reset, x)
        torch.addcmul(drive, re[t], x, out=place)
        place.addcmul_(cross[t], x.flip(1))
        x = place
    return out


def loop_backward(
    a: Tensor, gx: Tensor, x: Tensor, x0: Tensor, reset: Tensor, x_reset: Tensor, need_a: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = gx.clone(memory_format=torch.contiguous_format)
    length, fixed = g.shape[1], a.dim() == 2
    re, cross = by_step(a[..., :1, :], length), by_step(-swapped(a), length)  # of conj(a)
    some, grads, before = reset.any(0).tolist(), g.unbind(1), [x0, *x.unbind(1)[:-1]]
    g_x0, g_reset = torch.zeros_like(x0), torch.zeros_like(x0)
    # g conj(past) = (sum of same, difference of other): summed over time in place when a is fixed.
    same, other = torch.zeros_like(x0), torch.zeros_like(x0)
    ga = torch.empty_like(g) if need_a and not fixed else None
    for t in range(length - 1, -1, -1):
        now, past, flipped = grads[t], before[t], grads[t].flip(1)
        if some[t]:
            first = reset[:, t, None, None]
            past = torch.where(first, x_reset, past)
        if ga is not None:
            same, other = now * past, flipped * past
            ga[:, t, 0], ga[:, t, 1] = same.sum(1), other[:, 0] - other[:, 1]
        elif need_a:
            same.addcmul_(now, past)
            other.addcmul_(flipped, past)
        target = grads[t - 1] if t else g_x0
        if some[t]:
            back = (re[t] * now).addcmul_(cross[t], flipped)
            g_reset += torch.where(first, back, 0.0)
            target += torch.where(first, 0.0, back)
        else:
            target.addcmul_(re[t], now).addcmul_(cross[t], flipped)
    if ga is None:
        same, other = same.sum(0), other.sum(0)
        ga = torch.stack([same.sum(0), other[0] - other[1]]) if need_a else a.new_empty(0)
    return ga, g, g_x0, g_reset


def doubling_forward(a: Tensor, b: Tensor, x0: Tensor, reset: Tensor, x_reset: Tensor) -> Tensor:
    """Hillis & Steele 1986: after round k every step has gathered the 2^k steps that end at it.

    Powers of a are float64, since squaring in float32 loses a digit at T = 4096.
    """
    power, x = as_complex(a.double()), as_complex(b)
    first, a_first = reset[..., None], as_complex(a)
    start = torch.where(first[:, 0], as_complex(x_reset), as_complex(x0))
    begin = torch.where(first, as_complex(x_reset)[:, None], 0.0)
    begin[:, 0] = start
    x = x + a_first * begin
    episode = reset.cumsum(1)[..., None]
    reach, length = 1, b.shape[1]
    while reach < length:
        joined = episode[:, reach:] == episode[:, :-reach]
        now = power if power.dim() == 1 else power[:, reach:]
        gathered = torch.where(joined, now.to(x.dtype) * x[:, :-reach], 0.0)
        x = torch.cat([x[:, :reach], x[:, reach:] + gathered], 1)
        past = power if power.dim() == 1 else power[:, :-reach]
        power = now * past if power.dim() == 1 else torch.cat([power[:, :reach], now * past], 1)
        reach *= 2
    return as_planar(x)


def doubling_backward(
    a: Tensor, gx: Tensor, x: Tensor, x0: Tensor, reset: Tensor, x_reset: Tensor, need_a: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same rounds on reversed time, where step s uses the a and the reset of step T - s."""
    conj = as_planar(as_complex(a).conj())
    turned = conj if a.dim() == 2 else conj.flip(1).roll(1, 1)
    nothing = torch.zeros_like(x0)
    g = doubling_forward(turned, gx.flip(1), nothing, reset.flip(1).roll(1, 1), nothing).flip(1)
    first, g_complex = reset[..., None], as_complex(g)
    back = as_complex(conj) * g_complex
    g_reset = as_planar(torch.where(first, back, 0.0).sum(1))
    g_x0 = as_planar(torch.where(first[:, 0], 0.0, back[:, 0]))
    ga = a.new_empty(0)
    if need_a:
        past = torch.cat([x0[:, None], x[:, :-1]], 1)
        past = torch.where(first[..., None], x_reset[:, None], past)
        ga = as_planar(g_complex * as_complex(past).conj())
        ga = ga.sum((0, 1)) if a.dim() == 2 else ga
    return ga, g, g_x0, g_reset


def engine(device: torch.device) -> tuple[Callable[..., Tensor], Callable[..., tuple]]:
    """The forward and the backward to run on a device."""
    if device.type == "cpu":
        return loop_forward, loop_backward
    return kernels() if device.type == "cuda" else (doubling_forward, doubling_backward)


@functools.cache
def kernels() -> tuple[Callable[..., Tensor], Callable[..., tuple]]:
    """Those of a CUDA device: Triton's where it can compile, for which it needs a C compiler and
    Python's headers, and doubling elsewhere."""
    if importlib.util.find_spec("triton"):
        try:
            from worldmodels import scan_triton

            one = torch.zeros(1, 1, 2, 1, device="cuda")
            reset = torch.zeros(1, 1, dtype=torch.bool, device="cuda")
            scan_triton.forward(one[0, 0], one, one[:, 0], reset, one[:, 0])
        except Exception as error:  # whatever it raises, the scan goes on without
            log.warning("the kernel of the scan cannot be compiled, so it is slower: %s", error)
        else:
            return scan_triton.forward, scan_triton.backward
    return doubling_forward, doubling_backward


# Not `torch.library.custom_op`: its kernels import torch.compile when they are first called, which
# takes as long as to import PyTorch.
FORWARD, BACKWARD = "worldmodels::diag_scan", "worldmodels::diag_scan_backward"
INPUTS = "Tensor x0, Tensor reset, Tensor x_reset"
torch.library.define(FORWARD, f"(Tensor a, Tensor b, {INPUTS}) -> Tensor")
torch.library.define(
    BACKWARD,
    f"(Tensor a, Tensor gx, Tensor x, {INPUTS}, bool need_a) -> (Tensor, Tensor, Tensor, Tensor)",
)
scan_op = torch.ops.worldmodels.diag_scan.default
scan_backward_op = torch.ops.worldmodels.diag_scan_backward.default


@torch.library.impl(FORWARD, "default")
def _(a: Tensor, b: Tensor, x0: Tensor, reset: Tensor, x_reset: Tensor) -> Tensor:
    """a (2, N) or (B, T, 2, N); b (B, T, 2, N); x0 and x_reset (B, 2, N); reset (B, T) bool."""
    return engine(b.device)[0](a, b, x0, reset, x_reset)


@torch.library.register_fake(FORWARD)
def _(a: Tensor, b: Tensor, x0: Tensor, reset: Tensor, x_reset: Tensor) -> Tensor:
    return torch.empty_like(b, memory_format=torch.contiguous_format)


@torch.library.impl(BACKWARD, "default")
def _(
    a: Tensor, gx: Tensor, x: Tensor, x0: Tensor, reset: Tensor, x_reset: Tensor, need_a: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of a (empty unless need_a), b, x0 and x_reset."""
    return engine(gx.device)[1](a, gx, x, x0, reset, x_reset, need_a)


@torch.library.register_fake(BACKWARD)
def _(
    a: Tensor, gx: Tensor, x: Tensor, x0: Tensor, reset: Tensor, x_reset: Tensor, need_a: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        a.new_empty(a.shape if need_a else 0),
        gx.new_empty(gx.shape),
        x0.new_empty(x0.shape),
        x0.new_empty(x0.shape),
    )


def _setup(ctx, inputs, output):
    a, _, x0, reset, x_reset = inputs
    ctx.save_for_backward(a, output, x0, reset, x_reset)


def _backward(ctx, gx):
    a, x, x0, reset, x_reset = ctx.saved_tensors
    need_a = ctx.needs_input_grad[0]
    ga, gb, g_x0, g_reset = scan_backward_op(a, gx, x, x0, reset, x_reset, need_a)
    return ga if need_a else None, gb, g_x0, None, g_reset


torch.library.register_autograd(FORWARD, _backward, setup_context=_setup)


def scan_flops(batch: int, length: int, states: int, backward: bool = False) -> int:
    """FLOPs of a scan over `states` complex channels, or of its backward.

    The backward is the reversed scan and the product that gives the gradient of a.
    """
    return (2 if backward else 1) * FLOPS * batch * length * states


@register_flop_formula(torch.ops.worldmodels.diag_scan)
def _(a, b, *args, **kwargs) -> int:
    return scan_flops(b[0], b[1], b[3])


@register_flop_formula(torch.ops.worldmodels.diag_scan_backward)
def _(a, gx, x, x0, reset, x_reset, need_a, **kwargs) -> int:
    return scan_flops(gx[0], gx[1], gx[3], backward=need_a)


def scan_dtype(b: Tensor) -> torch.dtype:
    return torch.float64 if b.dtype == torch.float64 else torch.float32


def diag_scan(
    a: Tensor,
    b: Tensor,
    x0: Tensor,
    reset: Tensor | None = None,
    x_reset: Tensor | None = None,
) -> Tensor:
    """All states x (B, T, 2, N) of x_t = a_t x_{t-1} + b_t.

    a (2, N) or (B, T, 2, N); b (B, T, 2, N); x0 (B, 2, N). Where reset (B, T) is true, x_{t-1} is
    replaced by x_reset ((2, N) or (B, 2, N), zeros when None) before the step, so nothing from
    before a reset, NaN included, passes it. Differentiable once, in every input but reset.
    """
    assert b.dim() == 4, b.shape
    assert b.shape[1] > 0, b.shape
    assert b.shape[2] == 2, b.shape
    assert a.shape in (b.shape, b.shape[2:]), (a.shape, b.shape)
    dtype = scan_dtype(b)
    a, b, x0 = a.to(dtype), b.to(dtype), x0.to(dtype)
    if reset is None:
        reset = torch.zeros(b.shape[:2], dtype=torch.bool, device=b.device)
    x_reset = x0.new_zeros(()) if x_reset is None else x_reset.to(dtype)
    return scan_op(a, b, x0, reset, x_reset.expand(x0.shape))


def diag_step(
    a: Tensor,
    b: Tensor,
    x: Tensor,
    reset: Tensor | None = None,
    x_reset: Tensor | None = None,
) -> Tensor:
    """One step of `diag_scan`: a (2, N) or (B, 2, N); b, x (B, 2, N); reset (B,).

    In the order of operations of the loop, so acting and training agree.
    """
    dtype = scan_dtype(b)
    a, b, x = a.to(dtype), b.to(dtype), x.to(dtype)
    if reset is not None:
        x_reset = x.new_zeros(()) if x_reset is None else x_reset.to(dtype)
        x = torch.where(reset[:, None, None], x_reset, x)
    return torch.addcmul(torch.addcmul(b, a[..., :1, :], x), swapped(a), x.flip(-2))
