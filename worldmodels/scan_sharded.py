"""One scan over T steps that several processes share, each with its own piece of them.

R2I, table 1: unlike a convolution, a parallel scan can be split over devices along T. A piece maps
the state ahead of it to the state at its end, x -> factor x + end, and a reset within makes the
factor 0. Processes exchange these maps, O(B N) numbers whatever T is, then scan once more from the
state ahead. All else, the backward included, stays where the steps are. Two scans of T / ranks: the
gain is in all that a model does at each step, and in memory.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from worldmodels.scan import as_complex, as_planar, diag_scan, scan_dtype, swapped


def piece_map(a: Tensor, b: Tensor, reset: Tensor, x_reset: Tensor) -> tuple[Tensor, Tensor]:
    """(factor, end), planar (B, 2, N), of the steps b (B, T, 2, N), as in `diag_scan` for a (2, N).

    The end is that of a scan from a state of zeros. A scan is bound by memory: a sum over T that
    makes no states costs five times as much.
    """
    end = diag_scan(a, b, torch.zeros_like(x_reset), reset, x_reset)[:, -1]
    # In float64, since float32 loses a digit at T = 4096.
    power = as_planar(as_complex(a.double()) ** b.shape[1]).to(b.dtype)
    return torch.where(reset.any(1)[:, None, None], 0.0, power), end


class Gathered(torch.autograd.Function):
    """value (...) of every process, (ranks, ...); the gradient goes back to whose value it was."""

    @staticmethod
    def forward(ctx, value, group):
        ctx.group = group
        parts = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, value.contiguous(), group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient[dist.get_rank(ctx.group)], None


def sharded_scan(
    a: Tensor,
    b: Tensor,
    x0: Tensor,
    reset: Tensor,
    x_reset: Tensor,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """This process's piece of `diag_scan`: all arguments are those of its own steps b (B, T, 2, N).

    Pieces lie in the order of ranks in `group` (the default group: None) and need not be equally
    long. a is (2, N); x0 of the first rank counts. Gradients of what a process gave are those of
    the sum of all processes' losses, so weights that all hold need theirs added up.
    """
    assert a.dim() == 2, a.shape
    dtype = scan_dtype(b)
    a, b, x0 = a.to(dtype), b.to(dtype), x0.to(dtype)
    x_reset = x_reset.to(dtype).expand(x0.shape)
    rank = dist.get_rank(group)
    factor, end = piece_map(a, b, reset, x_reset)
    if rank == 0:
        end = end + factor[:, :1] * x0 + swapped(factor) * x0.flip(1)
    mine = torch.stack([factor, end])
    maps = Gathered.apply(mine, group).unbind(0)
    # The first rank takes part in the exchange of gradients with one that is 0.
    state = maps[0][1] if rank else x0 + 0 * maps[0][1]
    for factor, end in maps[1:rank]:
        state = end + factor[:, :1] * state + swapped(factor) * state.flip(1)
    return diag_scan(a, b, state, reset, x_reset)
