"""The scan's three engines against a complex128 loop, and the rules of a reset."""

import importlib.util
import os
import subprocess
import sys
import types

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from worldmodels import scan
from worldmodels.scan import (
    as_complex,
    as_planar,
    diag_scan,
    diag_step,
    doubling_backward,
    doubling_forward,
    scan_flops,
)

N = 5
RESETS = ["nowhere", "everywhere", "random", "first", "last", "twice in a row"]


def diag_scan_reference(a, b, x0, reset=None, x_reset=None):
    """The definition, step by step in complex128, traced by autograd."""
    a, b, x = as_complex(a.double()), as_complex(b.double()), as_complex(x0.double())
    start = torch.zeros_like(x) if x_reset is None else as_complex(x_reset.double()).expand_as(x)
    states = []
    for t in range(b.shape[1]):
        if reset is not None:
            x = torch.where(reset[:, t, None], start, x)
        x = (a if a.dim() == 1 else a[:, t]) * x + b[:, t]
        states.append(x)
    return as_planar(torch.stack(states, 1))


def resets(kind, B, T):
    reset = torch.zeros(B, T, dtype=torch.bool)
    if kind == "everywhere":
        reset[:] = True
    elif kind == "random":
        reset = torch.rand(B, T) < 0.1
    elif kind == "first":
        reset[0, 0] = True
    elif kind == "last":
        reset[-1, -1] = True
    elif kind == "twice in a row":
        reset[0, T // 2 - 1 : T // 2 + 1] = True
    return reset


def problem(B, T, kind="random", varying=False, dtype=torch.float64, seed=0):
    """a, b, x0 and x_reset, which want gradients, and reset."""
    torch.manual_seed(seed)
    radius = torch.rand(N, dtype=torch.float64) * 0.2 + 0.79
    angle = torch.rand(N, dtype=torch.float64) * 3
    a = torch.stack([radius * angle.cos(), radius * angle.sin()])
    if varying:
        a = a * (0.9 + 0.1 * torch.rand(B, T, 2, N, dtype=torch.float64))
    b = torch.randn(B, T, 2, N, dtype=torch.float64)
    x0, x_reset = torch.randn(2, B, 2, N, dtype=torch.float64)
    inputs = [v.to(dtype).clone().requires_grad_() for v in (a, b, x0, x_reset)]
    return inputs, resets(kind, B, T)


def close(results, expected, tolerance=1e-9):
    for one, other in zip(results, expected, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)


def values_and_gradients(scan, inputs, reset, weight):
    a, b, x0, x_reset = inputs
    x = scan(a, b, x0, reset, x_reset)
    return [x, *torch.autograd.grad((x * weight).sum(), inputs)]


def doubled(inputs, reset, weight):
    with torch.no_grad():
        a, b, x0, x_reset = inputs
        x = doubling_forward(a, b, x0, reset, x_reset)
        return [x, *doubling_backward(a, weight, x, x0, reset, x_reset, True)]


def test_two_steps_by_hand():
    a = torch.tensor([[0.0], [1.0]])  # i
    b = torch.tensor([[[[1.0], [0.0]], [[0.0], [2.0]]]])  # 1, 2i
    x0 = torch.tensor([[[3.0], [0.0]]])  # 3
    x = diag_scan(a, b, x0)  # 3i + 1, then i - 3 + 2i
    assert x[..., 0].tolist() == [[[1.0, 3.0], [-3.0, 3.0]]]
    x = diag_scan(a, b, x0, torch.tensor([[False, True]]), torch.tensor([[0.0], [5.0]]))
    assert x[..., 0].tolist() == [[[1.0, 3.0], [-5.0, 2.0]]]  # 5i i + 2i


@pytest.mark.parametrize("T", [1, 2, 3, 64, 65, 1024])
@pytest.mark.parametrize("varying", [False, True])
@pytest.mark.parametrize("kind", RESETS)
def test_loop_and_doubling_equal_the_definition_in_values_and_gradients(T, varying, kind):
    inputs, reset = problem(2, T, kind, varying)
    weight = torch.randn(2, T, 2, N, dtype=torch.float64)
    expected = values_and_gradients(diag_scan_reference, inputs, reset, weight)
    close(values_and_gradients(diag_scan, inputs, reset, weight), expected)
    close(doubled(inputs, reset, weight), expected)


def test_without_resets_and_reset_value_the_state_runs_through():
    (a, b, x0, _), _ = problem(2, 7)
    close([diag_scan(a, b, x0)], [diag_scan_reference(a, b, x0)])


def test_a_reset_value_may_be_shared_by_the_batch_and_defaults_to_zero():
    (a, b, x0, x_reset), reset = problem(2, 30)
    shared = x_reset[0]
    x = diag_scan(a, b, x0, reset, shared)
    weight = torch.randn_like(x)
    expected = diag_scan_reference(a, b, x0, reset, shared)
    close([x], [expected])
    grads = [torch.autograd.grad((v * weight).sum(), x_reset)[0] for v in (x, expected)]
    close(grads[:1], grads[1:])
    assert torch.equal(diag_scan(a, b, x0, reset), diag_scan(a, b, x0, reset, 0 * shared))


@pytest.mark.parametrize("engine", ["loop", "doubling"])
@pytest.mark.parametrize("T", [65, 1024])
def test_float32_is_within_1e5_of_the_channel_size(engine, T):
    scan = diag_scan if engine == "loop" else doubling_forward
    (a, b, x0, x_reset), reset = problem(2, T, "twice in a row")
    exact = diag_scan_reference(a, b, x0, reset, x_reset)
    rough = scan(a.float(), b.float(), x0.float(), reset, x_reset.float())
    assert rough.dtype == torch.float32
    assert ((rough - exact).abs() / exact.square().mean((0, 1)).sqrt()).max() < 1e-5


@pytest.mark.parametrize("varying", [False, True])
def test_gradcheck(varying):
    inputs, reset = problem(2, 6, "twice in a row", varying)
    assert torch.autograd.gradcheck(
        lambda a, b, x0, x_reset: diag_scan(a, b, x0, reset, x_reset), inputs
    )


@pytest.mark.parametrize("wanted", range(4))
def test_each_gradient_alone_is_that_of_all_together(wanted):
    inputs, reset = problem(2, 9, "random")
    x = diag_scan(*inputs[:3], reset, inputs[3])
    expected = torch.autograd.grad(x.square().sum(), inputs)[wanted]
    alone = [v if i == wanted else v.detach() for i, v in enumerate(inputs)]
    diag_scan(*alone[:3], reset, alone[3]).square().sum().backward()
    assert torch.equal(inputs[wanted].grad, expected)


@pytest.mark.parametrize("varying", [False, True])
@pytest.mark.parametrize("engine", ["loop", "doubling"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_nothing_from_before_a_reset_passes_it(poison, engine, varying):
    scan = diag_scan if engine == "loop" else doubling_forward
    inputs, _ = problem(2, 9, varying=varying)
    a, b, x0, x_reset = (v.detach() for v in inputs)
    reset = torch.zeros(2, 9, dtype=torch.bool)
    reset[:, 4] = True
    clean = scan(a, b, x0, reset, x_reset)
    dirty_a, dirty_b = a.clone(), b.clone()
    dirty_b[:, :4] = poison
    if varying:
        dirty_a[:, :4] = poison
    dirty = scan(dirty_a, dirty_b, x0 + poison, reset, x_reset)
    assert torch.equal(clean[:, 4:], dirty[:, 4:])


@pytest.mark.parametrize("varying", [False, True])
def test_no_gradient_passes_a_reset_even_beside_nan(varying):
    inputs, _ = problem(2, 9, varying=varying)
    reset = torch.zeros(2, 9, dtype=torch.bool)
    reset[:, 4] = True
    a, b, x0, x_reset = inputs
    dirty = b.detach().clone()
    dirty[:, :4] = float("nan")
    dirty.requires_grad_()
    x = diag_scan(a, dirty, x0, reset, x_reset)
    grad_b, grad_x0 = torch.autograd.grad(x[:, 4:].sum(), [dirty, x0])
    assert (grad_b[:, :4] == 0).all()
    assert (grad_x0 == 0).all()
    assert torch.isfinite(grad_b).all()


def test_reset_at_the_first_step_drops_the_initial_state():
    (a, b, x0, x_reset), _ = problem(1, 1)
    x = diag_scan(a, b, x0, torch.tensor([[True]]), x_reset)
    torch.testing.assert_close(x, diag_scan(a, b, x_reset))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_step_repeated_is_the_scan_in_values_and_gradients(dtype):
    inputs, reset = problem(2, 12, dtype=dtype)
    weight = torch.randn(2, 12, 2, N, dtype=dtype)

    def stepped(a, b, x0, reset, x_reset):
        x, states = x0, []
        for t in range(12):
            x = diag_step(a, b[:, t], x, reset[:, t], x_reset)
            states.append(x)
        return torch.stack(states, 1)

    one = values_and_gradients(stepped, inputs, reset, weight)
    other = values_and_gradients(diag_scan, inputs, reset, weight)
    assert torch.equal(one[0], other[0])
    close(one[1:], other[1:], 1e-12 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("varying", [False, True])
def test_splitting_and_carrying_changes_nothing(varying):
    (a, b, x0, x_reset), reset = problem(2, 12, varying=varying)
    whole = diag_scan(a, b, x0, reset, x_reset)
    for cut in range(1, 12):
        early, late = (a[:, :cut], a[:, cut:]) if varying else (a, a)
        left = diag_scan(early, b[:, :cut], x0, reset[:, :cut], x_reset)
        right = diag_scan(late, b[:, cut:], left[:, -1], reset[:, cut:], x_reset)
        assert torch.equal(torch.cat([left, right], 1), whole)


def test_inputs_may_be_views_with_gaps():
    (a, b, x0, x_reset), reset = problem(2, 6)
    weight = torch.randn(2, 6, 2, N, dtype=torch.float64)
    expected = values_and_gradients(diag_scan, [a, b, x0, x_reset], reset, weight)

    def scan(a, b, x0, reset, x_reset):
        apart = b.transpose(1, 3).contiguous().transpose(1, 3)
        return diag_scan(a.T.contiguous().T, apart, x0[:, :, :], reset.T.contiguous().T, x_reset)

    strided = values_and_gradients(scan, [a, b, x0, x_reset], reset, weight.expand(2, 6, 2, N))
    close(strided, expected)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_low_precision_inputs_are_scanned_in_float32(low):
    (a, b, x0, _), _ = problem(2, 4, dtype=torch.float32)
    plain = diag_scan(a.to(low).float(), b.to(low).float(), x0)
    with torch.autocast("cpu", torch.bfloat16):
        x = diag_scan(a.to(low), b.to(low), x0)
        step = diag_step(a.to(low), b[:, 0].to(low), x0)
    assert x.dtype == step.dtype == torch.float32
    assert torch.equal(x, plain)
    assert torch.equal(step, plain[:, 0])


@pytest.mark.parametrize("need_a", [False, True])
def test_flops_are_seen_by_the_counter_of_torch(need_a):
    (a, b, x0, _), _ = problem(2, 4)
    with FlopCounterMode(display=False) as counter:
        x = diag_scan(a if need_a else a.detach(), b, x0)
    assert counter.get_total_flops() == scan_flops(2, 4, N) == 8 * 2 * 4 * N
    with FlopCounterMode(display=False) as counter:
        x.sum().backward()
    assert counter.get_total_flops() == scan_flops(2, 4, N, backward=need_a)


def test_a_kernel_that_cannot_be_compiled_is_told_once_and_done_without(monkeypatch, caplog):
    broken = types.ModuleType("worldmodels.scan_triton")
    broken.forward = broken.backward = None  # which cannot be called
    monkeypatch.setitem(sys.modules, "worldmodels.scan_triton", broken)
    monkeypatch.setattr(scan, "scan_triton", broken, raising=False)
    monkeypatch.setattr(scan.importlib.util, "find_spec", lambda name: True)
    scan.kernels.cache_clear()
    for _ in range(2):
        assert scan.engine(torch.device("cuda")) == (doubling_forward, doubling_backward)
    scan.kernels.cache_clear()
    assert caplog.text.count("the kernel of the scan cannot be compiled") == 1


TRITON_CASES = """
import torch
from worldmodels import scan, scan_triton

def problem(B, T, N, varying, dtype):
    torch.manual_seed(T)
    a = torch.rand(B, T, 2, N, dtype=dtype) if varying else torch.rand(2, N, dtype=dtype)
    b, gx = torch.randn(2, B, T, 2, N, dtype=dtype)
    x0, x_reset = torch.randn(2, B, 2, N, dtype=dtype)
    return a * 0.7, b, gx, x0, x_reset

for T, N, varying, dtype, chance in [
    (1, 3, False, torch.float64, 0.0), (4, 3, True, torch.float64, 0.5),
    (6, 3, True, torch.float64, 1.0), (9, 40, False, torch.float64, 0.3),
    (9, 40, True, torch.float32, 0.3), (35, 33, False, torch.float32, 0.1),
]:
    a, b, gx, x0, x_reset = problem(2, T, N, varying, dtype)
    reset = torch.rand(2, T) < chance
    x = scan.loop_forward(a, b, x0, reset, x_reset)
    y = scan_triton.forward(a, b, x0, reset, x_reset)
    exact = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(y, x, atol=exact, rtol=exact)
    one = scan.loop_backward(a, gx, x, x0, reset, x_reset, True)
    two = scan_triton.backward(a, gx, x, x0, reset, x_reset, True)
    torch.testing.assert_close(two, one, atol=exact * 10, rtol=exact * 10)
    assert scan_triton.backward(a, gx, x, x0, reset, x_reset, False)[0].numel() == 0

a, b, gx, x0, x_reset = problem(2, 9, 3, False, torch.float64)
reset = torch.zeros(2, 9, dtype=torch.bool)
reset[:, 4] = True
b[:, :4] = float("nan")
x = scan_triton.forward(a, b, x0, reset, x_reset)
assert torch.isfinite(x[:, 4:]).all()
gx[:, :4] = 0
_, gb, g_x0, _ = scan_triton.backward(a, gx, x, x0, reset, x_reset, True)
assert (gb[:, :4] == 0).all()
assert (g_x0 == 0).all()
print("all equal")
"""


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="triton is not installed")
def test_triton_kernels_equal_the_loop_in_the_interpreter():
    # Triton decides at import whether to interpret, hence another process.
    done = subprocess.run(
        [sys.executable, "-c", TRITON_CASES],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.strip() == "all equal", done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("varying", [False, True])
def test_a_gpu_gives_what_the_cpu_gives(varying):
    inputs, reset = problem(2, 1024, "random", varying, torch.float32)
    weight = torch.randn(2, 1024, 2, N)
    expected = values_and_gradients(diag_scan, inputs, reset, weight)
    moved = [v.detach().cuda().requires_grad_() for v in inputs]
    results = values_and_gradients(diag_scan, moved, reset.cuda(), weight.cuda())
    for one, other in zip(results, expected, strict=True):
        size = other.detach().square().mean().sqrt()
        assert (one.cpu() - other).abs().max() < 1e-4 * size


@pytest.mark.slow
def test_compiles_without_a_graph_break_in_values_and_gradients():
    inputs, reset = problem(2, 8, dtype=torch.float32)
    weight = torch.randn(2, 8, 2, N)
    compiled = torch.compile(diag_scan, fullgraph=True)
    expected = values_and_gradients(diag_scan, inputs, reset, weight)
    close(values_and_gradients(compiled, inputs, reset, weight), expected, 1e-6)
