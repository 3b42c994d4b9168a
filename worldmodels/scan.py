"""The diagonal complex linear recurrence x_t = a_t x_{t-1} + b_t, with resets by assignment.

Complex numbers are planar: axis -2 holds (real, imaginary). Everything runs in float32 (or
float64 when the inputs are), whatever the autocast dtype. The backward is written by hand: one
reversed scan, g_t = gx_t + conj(a_{t+1}) g_{t+1}, that keeps only a, x and the resets. On a CPU the
loop over time, vectorised over channels, is bound by memory and beats every log-depth form.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

FLOPS_FORWARD = 8  # real FLOPs of one complex multiply-add
FLOPS_BACKWARD = 16  # the reversed scan, and the product that gives the gradient of a


def swapped(a: Tensor) -> Tensor:
    """(-im, re-order) partner of a (..., 2, N): a * x = re(a) x + swapped(a) flip(x)."""
    return torch.stack([-a[..., 1, :], a[..., 1, :]], -2)


def multiply_add(b: Tensor, a_re: Tensor, a_swapped: Tensor, x: Tensor) -> Tensor:
    """b + a x for planar complex numbers (..., 2, N)."""
    return torch.addcmul(torch.addcmul(b, a_re, x), a_swapped, x.flip(-2))


@torch.library.custom_op("worldmodels::diag_scan", mutates_args=())
def scan_op(a: Tensor, b: Tensor, x0: Tensor, reset: Tensor, x_reset: Tensor) -> Tensor:
    """a (2, N) or (B, T, 2, N); b (B, T, 2, N); x0 and x_reset (B, 2, N); reset (B, T) bool."""
    out = torch.empty_like(b, memory_format=torch.contiguous_format)
    fixed = a.dim() == 2
    re, cross = a[..., :1, :], swapped(a)
    some = reset.any(0).tolist()
    x = x0
    for t, (drive, place) in enumerate(zip(b.unbind(1), out.unbind(1), strict=True)):
        if some[t]:
            x = torch.where(reset[:, t, None, None], x_reset, x)
        torch.addcmul(drive, re if fixed else re[:, t], x, out=place)
        place.addcmul_(cross if fixed else cross[:, t], x.flip(1))
        x = place
    return out


@scan_op.register_fake
def _(a: Tensor, b: Tensor, x0: Tensor, reset: Tensor, x_reset: Tensor) -> Tensor:
    return torch.empty_like(b, memory_format=torch.contiguous_format)


@torch.library.custom_op("worldmodels::diag_scan_backward", mutates_args=())
def scan_backward_op(
    a: Tensor, gx: Tensor, x: Tensor, x0: Tensor, reset: Tensor, x_reset: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of a, b, x0 and x_reset."""
    g = gx.contiguous().clone()
    fixed = a.dim() == 2
    re, cross = a[..., :1, :], -swapped(a)  # those of conj(a)
    some = reset.any(0).tolist()
    grads, before = g.unbind(1), [x0, *x.unbind(1)[:-1]]
    direct, crossed = torch.zeros_like(x0), torch.zeros_like(x0)
    ga = None if fixed else torch.empty_like(b_like(a, g))
    g_reset = torch.zeros_like(x_reset)
    back = torch.zeros_like(x0)
    for t in range(len(grads) - 1, -1, -1):
        now, past = grads[t], before[t]
        flipped = now.flip(1)
        if some[t]:
            first = reset[:, t, None, None]
            past = torch.where(first, x_reset, past)
        if fixed:
            direct.addcmul_(now, past)
            crossed.addcmul_(flipped, past)
        else:
            product, other = now * past, flipped * past
            ga[:, t, 0] = product[:, 0] + product[:, 1]
            ga[:, t, 1] = other[:, 0] - other[:, 1]
        back = now * (re if fixed else re[:, t])
        back.addcmul_(cross if fixed else cross[:, t], flipped)
        if some[t]:
            g_reset += torch.where(first, back, 0.0)
            back = torch.where(first, 0.0, back)
        if t:
            grads[t - 1].add_(back)
    if fixed:
        direct, crossed = direct.sum(0), crossed.sum(0)
        ga = torch.stack([direct[0] + direct[1], crossed[0] - crossed[1]])
    return ga, g, back.clone(), g_reset


def b_like(a: Tensor, g: Tensor) -> Tensor:
    return g if a.dtype == g.dtype else g.to(a.dtype)


@scan_backward_op.register_fake
def _(
    a: Tensor, gx: Tensor, x: Tensor, x0: Tensor, reset: Tensor, x_reset: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(a, memory_format=torch.contiguous_format),
        torch.empty_like(gx, memory_format=torch.contiguous_format),
        torch.empty_like(x0, memory_format=torch.contiguous_format),
        torch.empty_like(x_reset, memory_format=torch.contiguous_format),
    )


def _setup(ctx, inputs, output):
    a, _, x0, reset, x_reset = inputs
    ctx.save_for_backward(a, output, x0, reset, x_reset)


def _backward(ctx, gx):
    a, x, x0, reset, x_reset = ctx.saved_tensors
    ga, gb, gx0, g_reset = scan_backward_op(a, gx, x, x0, reset, x_reset)
    return ga, gb, gx0, None, g_reset


scan_op.register_autograd(_backward, setup_context=_setup)


def scan_flops(batch: int, length: int, states: int) -> int:
    """Forward FLOPs of a scan over `states` complex channels."""
    return FLOPS_FORWARD * batch * length * states


@register_flop_formula(torch.ops.worldmodels.diag_scan)
def _(a, b, *args, out_shape=None, **kwargs) -> int:
    return FLOPS_FORWARD * b[0] * b[1] * b[3]


@register_flop_formula(torch.ops.worldmodels.diag_scan_backward)
def _(a, gx, *args, out_shape=None, **kwargs) -> int:
    return FLOPS_BACKWARD * gx[0] * gx[1] * gx[3]


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
    before a reset, NaN included, passes it.
    """
    dtype = torch.float64 if b.dtype == torch.float64 else torch.float32
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
    """One step of `diag_scan`: a (2, N); b, x (B, 2, N); reset (B,); the same arithmetic."""
    dtype = torch.float64 if b.dtype == torch.float64 else torch.float32
    a, b, x = a.to(dtype), b.to(dtype), x.to(dtype)
    if reset is not None:
        x_reset = x.new_zeros(()) if x_reset is None else x_reset.to(dtype)
        x = torch.where(reset[:, None, None], x_reset, x)
    return multiply_add(b, a[..., :1, :], swapped(a), x)


def diag_scan_reference(
    a: Tensor,
    b: Tensor,
    x0: Tensor,
    reset: Tensor | None = None,
    x_reset: Tensor | None = None,
) -> Tensor:
    """The definition, step by step in complex128, traced by autograd: what tests compare with."""

    def merge(value: Tensor) -> Tensor:
        return torch.complex(value[..., 0, :].double(), value[..., 1, :].double())

    a, b, x = merge(a), merge(b), merge(x0)
    start = torch.zeros_like(x) if x_reset is None else merge(x_reset).expand_as(x)
    states = []
    for t in range(b.shape[1]):
        if reset is not None:
            x = torch.where(reset[:, t, None], start, x)
        x = (a if a.dim() == 1 else a[:, t]) * x + b[:, t]
        states.append(x)
    out = torch.stack(states, 1)
    return torch.stack([out.real, out.imag], -2)
