"""Triton kernels of `scan`: one program per batch row and block of channels, sequential in time.

The order of operations is that of the CPU loop, so the two agree to rounding, and there is no
associative scan whose reversal or tiling could go wrong. Four steps are loaded ahead of the four
that are computed, since a step costs a trip to memory and almost no arithmetic. Steps past the
end load zeros and store nothing. Imported only for CUDA tensors (or Triton's interpreter).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 32  # channels of a program: one warp, and many programs even at B = 4


@triton.jit
def load_step(v_p, a_p, r_p, row, t, T, N, n, a_re, a_im, VARYING: tl.constexpr):
    """Planar values and coefficients at (row, t), and whether the step is a reset."""
    at = (row * T + t) * 2 * N + n
    here = n < tl.where(t < T, N, 0)
    re = tl.load(v_p + at, mask=here, other=0.0)
    im = tl.load(v_p + at + N, mask=here, other=0.0)
    if VARYING:
        a_re = tl.load(a_p + at, mask=here, other=0.0)
        a_im = tl.load(a_p + at + N, mask=here, other=0.0)
    first = tl.load(r_p + row * T + t, mask=t < T, other=0) != 0
    return re, im, a_re, a_im, first


@triton.jit
def forward_step(o_p, row, t, T, N, n, x, y, s_re, s_im, b_re, b_im, a_re, a_im, first):
    x, y = tl.where(first, s_re, x), tl.where(first, s_im, y)
    re = b_re + a_re * x - a_im * y
    im = b_im + a_re * y + a_im * x
    at = (row * T + t) * 2 * N + n
    here = n < tl.where(t < T, N, 0)
    tl.store(o_p + at, re, mask=here)
    tl.store(o_p + at + N, im, mask=here)
    return re, im


@triton.jit
def forward_kernel(a_p, b_p, x0_p, r_p, s_p, o_p, T, N, VARYING: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live, at = n < N, row * 2 * N + n
    x, y = tl.load(x0_p + at, mask=live), tl.load(x0_p + at + N, mask=live)
    s_re, s_im = tl.load(s_p + at, mask=live), tl.load(s_p + at + N, mask=live)
    p, q = x, y
    if not VARYING:
        p, q = tl.load(a_p + n, mask=live), tl.load(a_p + N + n, mask=live)
    for t in range(0, T, 4):
        b0, c0, p0, q0, f0 = load_step(b_p, a_p, r_p, row, t, T, N, n, p, q, VARYING)
        b1, c1, p1, q1, f1 = load_step(b_p, a_p, r_p, row, t + 1, T, N, n, p, q, VARYING)
        b2, c2, p2, q2, f2 = load_step(b_p, a_p, r_p, row, t + 2, T, N, n, p, q, VARYING)
        b3, c3, p3, q3, f3 = load_step(b_p, a_p, r_p, row, t + 3, T, N, n, p, q, VARYING)
        x, y = forward_step(o_p, row, t, T, N, n, x, y, s_re, s_im, b0, c0, p0, q0, f0)
        x, y = forward_step(o_p, row, t + 1, T, N, n, x, y, s_re, s_im, b1, c1, p1, q1, f1)
        x, y = forward_step(o_p, row, t + 2, T, N, n, x, y, s_re, s_im, b2, c2, p2, q2, f2)
        x, y = forward_step(o_p, row, t + 3, T, N, n, x, y, s_re, s_im, b3, c3, p3, q3, f3)


@triton.jit
def load_past(x_p, row, t, T, N, n, z_re, z_im, s_re, s_im, first):
    """x_{t-1} as step t saw it: x0 at the start, x_reset at a reset."""
    at = (row * T + t - 1) * 2 * N + n
    here = n < tl.where((t > 0) & (t < T), N, 0)
    re = tl.where(t == 0, z_re, tl.load(x_p + at, mask=here, other=0.0))
    im = tl.where(t == 0, z_im, tl.load(x_p + at + N, mask=here, other=0.0))
    return tl.where(first, s_re, re), tl.where(first, s_im, im)


@triton.jit
def backward_step(
    g_p, ga_p, row, t, T, N, n, VARYING: tl.constexpr,
    k_re, k_im, d_re, d_im, r_re, r_im, g_re, g_im, a_re, a_im, x, y, first,
):  # fmt: skip
    """Carry k, sums d (gradient of a) and r (of x_reset) after step t."""
    at, here = (row * T + t) * 2 * N + n, n < tl.where(t < T, N, 0)
    g_re, g_im = g_re + k_re, g_im + k_im
    tl.store(g_p + at, g_re, mask=here)
    tl.store(g_p + at + N, g_im, mask=here)
    if VARYING:
        tl.store(ga_p + at, g_re * x + g_im * y, mask=here)
        tl.store(ga_p + at + N, g_im * x - g_re * y, mask=here)
    else:
        d_re += g_re * x + g_im * y
        d_im += g_im * x - g_re * y
    k_re = a_re * g_re + a_im * g_im
    k_im = a_re * g_im - a_im * g_re
    r_re += tl.where(first, k_re, 0.0)
    r_im += tl.where(first, k_im, 0.0)
    return tl.where(first, 0.0, k_re), tl.where(first, 0.0, k_im), d_re, d_im, r_re, r_im


@triton.jit
def backward_kernel(
    a_p, gx_p, x_p, x0_p, r_p, s_p, g_p, ga_p, g0_p, gs_p, T, N,
    VARYING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live, at = n < N, row * 2 * N + n
    z, w = tl.load(x0_p + at, mask=live), tl.load(x0_p + at + N, mask=live)
    s, u = tl.load(s_p + at, mask=live), tl.load(s_p + at + N, mask=live)
    p, q = z, w
    if not VARYING:
        p, q = tl.load(a_p + n, mask=live), tl.load(a_p + N + n, mask=live)
    zero = tl.zeros((BLOCK,), dtype=g_p.dtype.element_ty)
    k, m, d, e, r, v = zero, zero, zero, zero, zero, zero
    groups = tl.cdiv(T, 4)
    for group in range(0, groups):
        t = (groups - 1 - group) * 4
        b0, c0, p0, q0, f0 = load_step(gx_p, a_p, r_p, row, t, T, N, n, p, q, VARYING)
        b1, c1, p1, q1, f1 = load_step(gx_p, a_p, r_p, row, t + 1, T, N, n, p, q, VARYING)
        b2, c2, p2, q2, f2 = load_step(gx_p, a_p, r_p, row, t + 2, T, N, n, p, q, VARYING)
        b3, c3, p3, q3, f3 = load_step(gx_p, a_p, r_p, row, t + 3, T, N, n, p, q, VARYING)
        x0, y0 = load_past(x_p, row, t, T, N, n, z, w, s, u, f0)
        x1, y1 = load_past(x_p, row, t + 1, T, N, n, z, w, s, u, f1)
        x2, y2 = load_past(x_p, row, t + 2, T, N, n, z, w, s, u, f2)
        x3, y3 = load_past(x_p, row, t + 3, T, N, n, z, w, s, u, f3)
        k, m, d, e, r, v = backward_step(
            g_p, ga_p, row, t + 3, T, N, n, VARYING,
            k, m, d, e, r, v, b3, c3, p3, q3, x3, y3, f3,
        )  # fmt: skip
        k, m, d, e, r, v = backward_step(
            g_p, ga_p, row, t + 2, T, N, n, VARYING,
            k, m, d, e, r, v, b2, c2, p2, q2, x2, y2, f2,
        )  # fmt: skip
        k, m, d, e, r, v = backward_step(
            g_p, ga_p, row, t + 1, T, N, n, VARYING,
            k, m, d, e, r, v, b1, c1, p1, q1, x1, y1, f1,
        )  # fmt: skip
        k, m, d, e, r, v = backward_step(
            g_p, ga_p, row, t, T, N, n, VARYING,
            k, m, d, e, r, v, b0, c0, p0, q0, x0, y0, f0,
        )  # fmt: skip
    tl.store(g0_p + at, k, mask=live)
    tl.store(g0_p + at + N, m, mask=live)
    tl.store(gs_p + at, r, mask=live)
    tl.store(gs_p + at + N, v, mask=live)
    if not VARYING:
        tl.store(ga_p + at, d, mask=live)
        tl.store(ga_p + at + N, e, mask=live)


def grid(b: Tensor) -> tuple[int, int]:
    return b.shape[0], triton.cdiv(b.shape[3], BLOCK)


def forward(a: Tensor, b: Tensor, x0: Tensor, reset: Tensor, x_reset: Tensor) -> Tensor:
    """x (B, T, 2, N); arguments as in `scan.scan_op`."""
    a, b, x0, x_reset = a.contiguous(), b.contiguous(), x0.contiguous(), x_reset.contiguous()
    flags, out = reset.contiguous().view(torch.uint8), torch.empty_like(b)
    varying, length, states = a.dim() == 4, b.shape[1], b.shape[3]
    with torch.cuda.device_of(b):
        forward_kernel[grid(b)](
            a, b, x0, flags, x_reset, out, length, states, varying, BLOCK, num_warps=1
        )
    return out


def backward(
    a: Tensor, gx: Tensor, x: Tensor, x0: Tensor, reset: Tensor, x_reset: Tensor, need_a: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients as in `scan.scan_backward_op`."""
    a, gx, x0, x_reset = a.contiguous(), gx.contiguous(), x0.contiguous(), x_reset.contiguous()
    flags, g = reset.contiguous().view(torch.uint8), torch.empty_like(gx)
    varying, length, states = a.dim() == 4, gx.shape[1], gx.shape[3]
    ga = torch.empty_like(gx if varying else x0)
    g_x0, g_reset = torch.empty_like(x0), torch.empty_like(x0)
    with torch.cuda.device_of(gx):
        backward_kernel[grid(gx)](
            a, gx, x, x0, flags, x_reset, g, ga, g_x0, g_reset, length, states, varying, BLOCK,
            num_warps=1,
        )  # fmt: skip
    if not need_a:
        return a.new_empty(0), g, g_x0, g_reset
    return ga if varying else ga.sum(0), g, g_x0, g_reset
