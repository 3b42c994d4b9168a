"""A scan that two processes share, over T: states, h and gradients are those of one process."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from configs.load import resolve
from worldmodels.cores import make_core
from worldmodels.scan import as_complex, diag_scan
from worldmodels.scan_sharded import piece_map, sharded_scan

ROWS, STEPS, Z, ACTION = 3, 24, 8, 2
CUTS = (0, 7, STEPS)  # of two pieces, not equally long


def draws(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*s, generator=generator, dtype=torch.float64) for s in shapes]


def resets():
    """A row without any, one with one in each piece and at the cut, one twice at its ends."""
    reset = torch.zeros(ROWS, STEPS, dtype=torch.bool)
    reset[1, [3, 7, 20]] = reset[2, [0, 6, 8, 23]] = True
    return reset


@pytest.mark.parametrize("start", [0, 7])
def test_a_piece_maps_the_state_ahead_of_it_to_the_state_at_its_end(start):
    a, b, x0, x_reset = draws((2, 5), (ROWS, STEPS, 2, 5), (ROWS, 2, 5), (ROWS, 2, 5))
    a, b, reset = a / a.norm(dim=0), b[:, start:], resets()[:, start:]
    factor, end = piece_map(a, b, reset, x_reset)
    x = diag_scan(a, b, x0, reset, x_reset)[:, -1]
    found = as_complex(factor) * as_complex(x0) + as_complex(end)
    torch.testing.assert_close(found, as_complex(x))


def run_core(core, u, reset, weight):
    """h of u (B, T, U), and gradients of sum(h weight) by u and by all parameters."""
    u = u.clone().requires_grad_()
    h, x, state, _ = core.scan(u, reset, core.initial(ROWS))
    grads = torch.autograd.grad((h * weight).sum(), [u, *core.parameters()])
    return h.detach(), x.detach(), state["x"].detach(), grads


def share(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.manual_seed(0)
    sizes = ["--size", "debug", "--s3m.layers", "3", "--s3m.width", "16", "--s3m.state", "16"]
    core = make_core(resolve(["--core", "s3m", *sizes]), Z, ACTION).double()
    torch.nn.init.normal_(core.start)
    u, weight = draws((ROWS, STEPS, Z + ACTION), (ROWS, STEPS, core.out))
    h, x, state, grads = run_core(core, u, resets(), weight)
    core.diag_scan = functools.partial(sharded_scan, group=None)
    mine = slice(*CUTS[rank : rank + 2])
    part_h, part_x, part_state, parts = run_core(
        core, u[:, mine], resets()[:, mine], weight[:, mine]
    )
    same = functools.partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)
    same(part_h, h[:, mine])
    same(part_x, x[:, mine])
    if rank == 1:
        same(part_state, state)
    same(parts[0], grads[0][:, mine])
    for part, whole in zip(parts[1:], grads[1:], strict=True):
        part = part.contiguous()  # gloo would reduce what lies between strides
        dist.all_reduce(part)
        same(part, whole)
    dist.destroy_process_group()


def test_two_processes_share_the_steps_of_s3m(tmp_path):
    mp.spawn(share, (str(tmp_path),), 2)
