"""The contract of worldmodels/core.py, over every core, in float64 on the same weights."""

import pytest
import torch

from configs.load import resolve
from worldmodels.cores import CORES, make_core

B, T, Z, A, H = 3, 13, 6, 2, 4


@pytest.fixture(params=sorted(CORES))
def core(request):
    torch.manual_seed(0)
    config = resolve(["--core", request.param, "--size", "debug"])
    core = make_core(config, Z, A).double()
    for param in core.parameters():  # zero biases and a zero initial state would hide errors
        param.data += 0.1 * torch.randn_like(param)
    return core


def make_state(core):
    """A non-zero state, reached by a few steps."""
    state = core.initial(B)
    for _ in range(3):
        _, _, state = core.step(torch.randn(B, Z + A).double(), None, state)
    return {key: value.detach() for key, value in state.items()}


def make_inputs(resets):
    torch.manual_seed(1)
    is_first = torch.zeros(B, T, dtype=torch.bool)
    for b, t in resets:
        is_first[b, t] = True
    return torch.randn(B, T, Z + A).double(), is_first


RESETS = {
    "none": [],
    "first": [(0, 0), (1, 0)],
    "middle": [(0, 5), (2, 7)],
    "twice in a row": [(1, 4), (1, 5)],
    "last": [(0, T - 1)],
    "many": [(0, 0), (0, 1), (0, 6), (1, 3), (2, 12), (2, 0)],
}


def by_steps(core, u, is_first, state):
    hs, xs = [], []
    for t in range(u.shape[1]):
        h, x, state = core.step(u[:, t], is_first[:, t], state)
        hs.append(h)
        xs.append(x)
    return torch.stack(hs, 1), torch.stack(xs, 1), state


@pytest.mark.parametrize("resets", RESETS.values(), ids=RESETS)
def test_scan_equals_step_repeated_with_its_gradients(core, resets):
    u, is_first = make_inputs(resets)
    state = make_state(core)
    results = []
    for run in (core.scan, by_steps):
        inputs = u.clone().requires_grad_()
        start = {
            key: value.clone().requires_grad_() if value.is_floating_point() else value
            for key, value in state.items()
        }
        leaves = [value for value in start.values() if value.requires_grad]
        if run is by_steps:
            h, x, last = by_steps(core, inputs, is_first, start)
        else:
            h, x, last, _ = core.scan(inputs, is_first, start)
        loss = (h.sin() + 0).sum() + (x * 0.3).cos().sum()
        grads = torch.autograd.grad(loss, [inputs, *leaves, *core.parameters()], allow_unused=True)
        results.append([h, x, *last.values(), *grads])
    for one, other in zip(*results, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("cut", range(1, T))
def test_splitting_anywhere_changes_nothing(core, cut):
    u, is_first = make_inputs(RESETS["many"])
    state = make_state(core)
    h, x, last, _ = core.scan(u, is_first, state)
    h1, x1, middle, _ = core.scan(u[:, :cut], is_first[:, :cut], state)
    h2, x2, end, _ = core.scan(u[:, cut:], is_first[:, cut:], middle)
    torch.testing.assert_close(torch.cat([h1, h2], 1), h)
    torch.testing.assert_close(torch.cat([x1, x2], 1), x)
    for key in last:
        torch.testing.assert_close(end[key], last[key])


@pytest.mark.parametrize("reset", [1, 6])
@pytest.mark.parametrize("poison", [1.0, float("nan"), float("inf")])
def test_is_first_forgets_everything_before_it(core, poison, reset):
    u, is_first = make_inputs([(b, reset) for b in range(B)])
    state = make_state(core)
    h, x, last, _ = core.scan(u, is_first, state)
    changed = u.clone()
    changed[:, :reset] += poison
    state = {k: v + poison if v.is_floating_point() else v + 1 for k, v in state.items()}
    h2, x2, last2, _ = core.scan(changed, is_first, state)
    assert torch.equal(h[:, reset:], h2[:, reset:])
    assert torch.equal(x[:, reset:], x2[:, reset:])
    assert all(torch.equal(last[key], last2[key]) for key in last)


def test_a_reset_starts_from_the_initial_state(core):
    u, is_first = make_inputs([(b, 6) for b in range(B)])
    h, x, _, _ = core.scan(u, is_first, make_state(core))
    none = torch.zeros(B, T - 6, dtype=torch.bool)
    fresh_h, fresh_x, _, _ = core.scan(u[:, 6:], none, core.initial(B))
    torch.testing.assert_close(h[:, 6:], fresh_h)
    torch.testing.assert_close(x[:, 6:], fresh_x)


def test_the_future_does_not_change_the_past(core):
    u, is_first = make_inputs(RESETS["middle"])
    state = make_state(core)
    h, x, _, _ = core.scan(u, is_first, state)
    changed = u.clone()
    changed[:, 8:] += 1
    h2, x2, _, _ = core.scan(changed, is_first, state)
    assert torch.equal(h[:, :8], h2[:, :8])
    assert torch.equal(x[:, :8], x2[:, :8])
    assert not torch.allclose(h[:, 8:], h2[:, 8:])


def test_imagination_from_every_step_reproduces_the_scan(core):
    u, is_first = make_inputs([])
    h, x, _, context = core.scan(u, is_first, make_state(core))
    roll = core.imagine(context)
    for k in range(1, H + 1):
        shifted = torch.roll(u, -k, 1)
        rolled_h, rolled_x = roll.step(shifted.flatten(0, 1))
        rolled_h, rolled_x = (part.unflatten(0, (B, T)) for part in (rolled_h, rolled_x))
        torch.testing.assert_close(rolled_h[:, : T - k], h[:, k:])
        torch.testing.assert_close(rolled_x[:, : T - k], x[:, k:])


@pytest.mark.parametrize("last", [1, 4, T])
def test_imagination_from_the_last_steps_of_each_row_is_that_part(core, last):
    u, is_first = make_inputs(RESETS["middle"])
    _, _, _, context = core.scan(u, is_first, make_state(core))
    whole, part = core.imagine(context), core.imagine(context, last)
    for _ in range(2):
        inputs = torch.randn(B, T, Z + A).double()
        h, x = whole.step(inputs.flatten(0, 1))
        part_h, part_x = part.step(inputs[:, -last:].flatten(0, 1))
        torch.testing.assert_close(part_h, h.unflatten(0, (B, T))[:, -last:].flatten(0, 1))
        torch.testing.assert_close(part_x, x.unflatten(0, (B, T))[:, -last:].flatten(0, 1))


def test_gradient_through_imagination_is_that_of_steps_and_stops_at_the_context(core):
    u, is_first = make_inputs([])
    u.requires_grad_()
    _, _, state, context = core.scan(u, is_first, make_state(core))
    inputs = torch.randn(H, B, Z + A).double().requires_grad_()
    roll = core.imagine(context, 1)
    for part in inputs:
        rolled, _ = roll.step(part)
    state = {key: value.detach() for key, value in state.items()}
    for part in inputs:
        stepped, _, state = core.step(part, None, state)
    one = torch.autograd.grad(rolled.sin().sum(), inputs, retain_graph=True)[0]
    other = torch.autograd.grad(stepped.sin().sum(), inputs)[0]
    torch.testing.assert_close(one, other)
    assert torch.autograd.grad(rolled.sum(), u, allow_unused=True)[0] is None


def test_every_parameter_gets_a_gradient(core):
    u, is_first = make_inputs(RESETS["middle"])
    h, x, _, _ = core.scan(u, is_first, make_state(core))
    (h.square().sum() + x.square().sum()).backward()
    for name, param in core.named_parameters():
        assert param.grad is not None, name
        assert param.grad.abs().sum() > 0, name


def test_state_is_float32_under_autocast():
    for name in CORES:
        core = make_core(resolve(["--core", name, "--size", "debug"]), Z, A)
        u = torch.randn(B, T, Z + A)
        first = torch.zeros(B, T, dtype=torch.bool)
        with torch.autocast("cpu", torch.bfloat16):
            h, x, state, _ = core.scan(u, first, core.initial(B))
            h1, x1, state1 = core.step(u[:, 0], first[:, 0], core.initial(B))
        leaves = [h, x, h1, x1, *state.values(), *state1.values()]
        # Counters alone are integers.
        kinds = {torch.float32, torch.int32}
        assert {leaf.dtype for leaf in leaves} <= kinds, name
        assert all(leaf.dtype == torch.float32 for leaf in (h, x, h1, x1)), name


def test_widths_are_as_declared(core):
    u, is_first = make_inputs([])
    h, x, state, _ = core.scan(u, is_first, core.initial(B))
    assert h.shape == (B, T, core.out)
    assert x.shape == (B, T, core.hidden)
    assert all(len(leaf) == B for leaf in state.values())
    if core.x_is_h:
        assert torch.equal(h, x)


def test_flops_are_those_that_torch_counts():
    from torch.utils.flop_counter import FlopCounterMode

    for name in CORES:
        core = make_core(resolve(["--core", name, "--size", "debug"]), Z, A)
        u, is_first = torch.randn(B, T, Z + A), torch.zeros(B, T, dtype=torch.bool)
        plan = core.plan(is_first.numpy(), torch.arange(T).expand(B, -1).numpy())
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            core.scan(u, is_first, core.initial(B), plan)
        assert core.flops(B, T) == pytest.approx(counter.get_total_flops(), rel=0.02), name
