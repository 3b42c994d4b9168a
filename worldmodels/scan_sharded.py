"""One scan over T steps that several processes share, each with its own piece of them.

R2I, table 1: unlike a convolution, a parallel scan can be split over devices along T. A piece maps
the state ahead of it to the state at its end, x -> factor x + end, and a reset within makes the
factor 0. Processes exchange these maps, O(B N) numbers whatever T is; everything else, backward
included, stays where the steps are.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from worldmodels.scan import as_complex, as_planar, diag_scan, scan_dtype


def piece_map(a: Tensor, b: Tensor, reset: Tensor, x_reset: Tensor) -> tuple[Tensor, Tensor]:
    """(factor, end) (B, N) complex of the steps b (B, T, 2, N), as in `diag_scan` for a (2, N).

    A sum with weights a^(T-1-t) over the steps since the last reset. No state in between is made.
    Powers are float64, since float32 loses a digit at T = 4096.
    """
    length = b.shape[1]
    power = as_complex(a.double()) ** torch.arange(length, -1, -1, device=a.device)[:, None]
    power = power.to(torch.complex128 if b.dtype == torch.float64 else torch.complex64)
    # Resets at t and later, so 0 once the last one is behind; a step at its own reset is kept.
    ahead = reset.flip(1).cumsum(1).flip(1)
    kept = (ahead - reset.long() == 0).to(b.dtype)
    end = torch.einsum("btn,tn,bt->bn", as_complex(b), power[1:], kept.to(power.dtype))
    last = (reset & (kept > 0)).to(power.dtype)
    end = end + torch.einsum("bt,tn->bn", last, power[:-1]) * as_complex(x_reset)
    whole = (ahead[:, :1] == 0).to(power.dtype)
    return whole * power[0], end


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
        end = end + factor * as_complex(x0)
    mine = torch.stack([as_planar(factor), as_planar(end)])
    maps = Gathered.apply(mine, group).unbind(0)
    # The first rank takes part in the exchange of gradients with one that is 0.
    state = maps[0][1] if rank else x0 + 0 * maps[0][1]
    for now in maps[1:rank]:
        state = as_planar(as_complex(now[0]) * as_complex(state)) + now[1]
    return diag_scan(a, b, state, reset, x_reset)
