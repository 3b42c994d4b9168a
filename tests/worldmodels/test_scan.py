"""diag_scan against a complex128 loop, and the rules of a reset."""

import pytest
import torch

from worldmodels.scan import diag_scan, diag_scan_reference, diag_step

N = 5


def problem(B, T, resets=0.2, varying=False, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    radius = torch.rand(N, dtype=torch.float64) * 0.2 + 0.79
    angle = torch.rand(N, dtype=torch.float64) * 3
    a = torch.stack([radius * angle.cos(), radius * angle.sin()])
    if varying:
        a = a * (0.9 + 0.1 * torch.rand(B, T, 2, N, dtype=torch.float64))
    b = torch.randn(B, T, 2, N, dtype=torch.float64)
    x0, x_reset = torch.randn(2, B, 2, N, dtype=torch.float64)
    reset = torch.rand(B, T) < resets
    return [v.to(dtype).requires_grad_() for v in (a, b, x0)], reset, x_reset.to(dtype)


@pytest.mark.parametrize("T", [1, 2, 3, 64, 65, 1024])
@pytest.mark.parametrize("varying", [False, True])
@pytest.mark.parametrize("resets", [0.0, 0.1, 1.0])
def test_equals_the_loop_in_values_and_gradients(T, varying, resets):
    (a, b, x0), reset, x_reset = problem(2, T, resets, varying)
    x_reset.requires_grad_()
    weight = torch.randn(b.shape, dtype=torch.float64)
    results = []
    for scan in (diag_scan, diag_scan_reference):
        x = scan(a, b, x0, reset, x_reset)
        results.append([x, *torch.autograd.grad((x * weight).sum(), [a, b, x0, x_reset])])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)


def test_float32_is_within_1e5_of_the_channel_size():
    (a, b, x0), reset, x_reset = problem(2, 1024, 0.01)
    exact = diag_scan_reference(a, b, x0, reset, x_reset)
    rough = diag_scan(a.float(), b.float(), x0.float(), reset, x_reset.float())
    size = exact.square().mean((0, 1)).sqrt()
    assert ((rough - exact).abs() / size).max() < 1e-5


@pytest.mark.parametrize("varying", [False, True])
def test_gradcheck(varying):
    (a, b, x0), reset, x_reset = problem(2, 6, 0.3, varying)
    x_reset.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda *args: diag_scan(args[0], args[1], args[2], reset, args[3]), (a, b, x0, x_reset)
    )


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_nothing_from_before_a_reset_passes_it(poison):
    (a, b, x0), _, x_reset = problem(2, 9)
    reset = torch.zeros(2, 9, dtype=torch.bool)
    reset[:, 4] = True
    clean = diag_scan(a, b, x0, reset, x_reset)
    dirty_b = b.detach().clone()
    dirty_b[:, :4] = poison
    dirty = diag_scan(a, dirty_b, x0 + poison, reset, x_reset)
    assert torch.equal(clean[:, 4:], dirty[:, 4:])
    grad_b, grad_x0 = torch.autograd.grad(clean[:, 4:].sum(), [b, x0])
    assert (grad_b[:, :4] == 0).all()
    assert (grad_x0 == 0).all()


def test_reset_at_the_first_step_drops_the_initial_state():
    (a, b, x0), _, x_reset = problem(1, 1)
    x = diag_scan(a, b, x0, torch.tensor([[True]]), x_reset)
    torch.testing.assert_close(x, diag_scan(a, b, x_reset))


def test_step_repeated_is_the_scan():
    (a, b, x0), reset, x_reset = problem(2, 12)
    x, states = x0, []
    for t in range(12):
        x = diag_step(a, b[:, t], x, reset[:, t], x_reset)
        states.append(x)
    assert torch.equal(torch.stack(states, 1), diag_scan(a, b, x0, reset, x_reset))


def test_splitting_and_carrying_changes_nothing():
    (a, b, x0), reset, x_reset = problem(2, 12)
    whole = diag_scan(a, b, x0, reset, x_reset)
    for cut in range(1, 12):
        left = diag_scan(a, b[:, :cut], x0, reset[:, :cut], x_reset)
        right = diag_scan(a, b[:, cut:], left[:, -1], reset[:, cut:], x_reset)
        assert torch.equal(torch.cat([left, right], 1), whole)


def test_low_precision_inputs_are_scanned_in_float32():
    (a, b, x0), _, _ = problem(2, 4, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        x = diag_scan(a.bfloat16(), b.bfloat16(), x0)
    assert x.dtype == torch.float32


@pytest.mark.slow
def test_compiles_without_a_graph_break():
    (a, b, x0), reset, x_reset = problem(2, 8, dtype=torch.float32)
    compiled = torch.compile(diag_scan, fullgraph=True)
    torch.testing.assert_close(
        compiled(a, b, x0, reset, x_reset), diag_scan(a, b, x0, reset, x_reset)
    )
