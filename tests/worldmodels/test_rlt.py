"""The core `rlt` beyond the contract of every core: feedback, chunks, windows, sizes."""

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from configs.load import resolve
from worldmodels.attention import CrossAttention
from worldmodels.attention_loop import LoopWindow
from worldmodels.bench import Vector, sequence_parameters
from worldmodels.rlt import RLT
from worldmodels.world_model import WorldModel

B, T, Z, A = 2, 11, 3, 2
SIZES = ["1m", "12m", "25m"]


def make_core(seed=0, **settings):
    """A small core in float64 none of whose parameters is zero."""
    torch.manual_seed(seed)
    default = {"layers_enc": 1, "layers_dec": 1, "width": 8, "heads": 2, "window": 3}
    default |= {"window_enc": 4, "ffn": 8, "alpha": 0.5, "feedback": 1}
    core = RLT(Z, A, **(default | settings)).double()
    for param in core.parameters():
        param.data += 0.2 * torch.randn_like(param)
    return core


def inputs(length=T):
    return torch.randn(B, length, Z + A).double()


def never(length=T):
    return torch.zeros(B, length, dtype=torch.bool)


def by_steps(core, u, is_first, state):
    hs, xs = [], []
    for t in range(u.shape[1]):
        h, x, state = core.step(u[:, t], is_first[:, t], state)
        hs.append(h)
        xs.append(x)
    return torch.stack(hs, 1), torch.stack(xs, 1), state


def warm(core, age):
    """A state of rows that began at `age` (B,), a few steps later."""
    u = inputs(3)
    _, _, state = by_steps(core, u, never(3), core.initial(B, torch.tensor(age)))
    return {key: value.detach() for key, value in state.items()}


@st.composite
def cases(draw):
    settings = {
        "window": draw(st.integers(1, 4)),
        "window_enc": draw(st.integers(1, 5)),
        "layers_enc": draw(st.integers(1, 2)),
        "layers_dec": draw(st.integers(1, 2)),
        "feedback": draw(st.integers(0, 3)),
    }
    age = [draw(st.integers(0, 5)) for _ in range(B)]
    is_first = torch.tensor([[draw(st.integers(0, 4)) == 0 for _ in range(T)] for _ in range(B)])
    return make_core(draw(st.integers(0, 9)), **settings), age, is_first


anything = hypothesis.settings(max_examples=25, deadline=None)


@anything
@given(cases())
def test_scan_is_step_repeated_with_the_gradients_of_outputs_and_of_the_last_state(case):
    core, age, is_first = case
    state, u = warm(core, age), inputs()
    results = []
    for run in (core.scan, by_steps):
        leaves = {
            key: value.clone().requires_grad_() if value.is_floating_point() else value
            for key, value in {**state, "u": u}.items()
        }
        start = {key: leaves[key] for key in state}
        if run is by_steps:
            h, x, last = by_steps(core, leaves["u"], is_first, start)
        else:
            h, x, last, _ = core.scan(leaves["u"], is_first, start)
        floats = [value for value in last.values() if value.is_floating_point()]
        loss = h.sin().sum() + x.cos().sum() + sum(value.sin().sum() for value in floats)
        wanted = [leaf for leaf in leaves.values() if leaf.requires_grad] + [*core.parameters()]
        grads = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
        results.append([h, x, *last.values(), *grads])
    torch.testing.assert_close(*results, atol=1e-10, rtol=1e-8)


@anything
@given(cases(), st.integers(1, T - 1))
def test_splitting_a_row_anywhere_changes_nothing(case, cut):
    core, age, is_first = case
    state, u = warm(core, age), inputs()
    h, x, last, _ = core.scan(u, is_first, state)
    h1, x1, middle, _ = core.scan(u[:, :cut], is_first[:, :cut], state)
    h2, x2, end, _ = core.scan(u[:, cut:], is_first[:, cut:], middle)
    whole, parts = [h, x, last], [torch.cat([h1, h2], 1), torch.cat([x1, x2], 1), end]
    torch.testing.assert_close(whole, parts)


@anything
@given(cases(), st.integers(1, 6))
def test_imagination_from_every_step_is_the_steps_that_follow(case, horizon):
    core, age, is_first = case
    state, u = warm(core, age), inputs()
    _, _, _, context = core.scan(u, is_first, state)
    roll, imagined = core.imagine(context), torch.randn(horizon, B, T, Z + A).double()
    rolled = [roll.step(part.flatten(0, 1)) for part in imagined]
    for t in range(T):
        _, _, state = core.step(u[:, t], is_first[:, t], state)
        after = state
        for k in range(horizon):
            h, x, after = core.step(imagined[k, :, t], None, after)
            for one, other in zip((h, x), rolled[k], strict=True):
                torch.testing.assert_close(other.unflatten(0, (B, T))[:, t], one)


@anything
@given(cases(), st.sampled_from([1, 2, 6]), st.sampled_from([float("nan"), float("inf")]))
def test_no_number_passes_a_reset_not_even_one_that_is_not_finite(case, reset, poison):
    core, age, is_first = case
    state, u = warm(core, age), inputs()
    is_first[:, reset] = True
    h, _, last, _ = core.scan(u, is_first, state)
    u[:, :reset] = poison
    state = {
        key: value * poison if value.is_floating_point() else 7 for key, value in state.items()
    }
    state.update({key: torch.full_like(last[key], 7) for key in ("known", "age")})
    poisoned, _, poisoned_last, _ = core.scan(u, is_first, state)
    torch.testing.assert_close(poisoned[:, reset:], h[:, reset:])
    torch.testing.assert_close(poisoned_last, last)


def reached(core, length=40):
    """Distances over which an input changes h of the last of `length` steps."""
    u = inputs(length).requires_grad_()
    h, _, _, _ = core.scan(u, never(length), core.initial(B))
    (grad,) = torch.autograd.grad(h[:, -1].sum(), u)
    return grad.abs().sum((0, 2)).flip(0).nonzero().flatten().tolist()


def test_without_feedback_nothing_reaches_past_the_windows_of_all_layers():
    # Each of 2 encoder blocks reaches 3 steps back. The memory is their output: the furthest way
    # is the second decoder block's own window (2 steps), then the first one's view of it (3).
    core = make_core(feedback=0, layers_enc=2, layers_dec=2)
    assert reached(core) == list(range(2 * 3 + 2 + 3 + 1))


@pytest.mark.parametrize("feedback", [1, 3])
def test_with_feedback_everything_reaches_the_last_step(feedback):
    assert reached(make_core(feedback=feedback)) == list(range(40))


def test_one_step_by_hand():
    core = make_core(window=1, window_enc=1, alpha=0.7)
    with torch.no_grad():
        for block in (*core.encoder, *core.decoder):
            block.feed[3].weight.zero_()
            block.feed[3].bias.zero_()
            block.attention.out.weight.zero_()
        core.decoder[0].cross.out.weight.zero_()
    u, s = inputs(2), core.start.expand(B, -1)
    _, x, _, _ = core.scan(u, never(2), core.initial(B))

    def rms(value):
        return value / (value.square().mean(-1, keepdim=True) + 1e-4).sqrt()

    # With blocks that add nothing y_t is e_t + alpha * sigmoid(W_g [e_t; r] + b_g) * (W_s r).
    gate_s, write = core.read.weight.chunk(2)
    for t in range(2):
        e = core.enter(u[:, t])
        r = rms(s) * core.register_norm.weight
        gate = torch.sigmoid(e @ core.gate.weight.T + core.gate.bias + r @ gate_s.T)
        s = e + 0.7 * gate * (r @ write.T)
        torch.testing.assert_close(x[:, t], s)


def test_all_steps_of_a_chunk_read_the_output_at_the_end_of_the_last_complete_one():
    core, u = make_core(feedback=3), inputs()
    age = torch.tensor([0, 2])
    _, x, _, context = core.scan(u, never(), core.initial(B, age))
    start = core.start.expand(T, -1)
    # Ages 0 1 2 | 3 4 5 | ... in the first row, 2 | 3 4 5 | 6 7 8 | ... in the second.
    ends = [[2, 2, 2, 5, 5, 5, 8, 8, 8], [0, 0, 0, 3, 3, 3, 6, 6, 6, 9, 9]]
    for row, held, none in zip(range(B), ends, (2, 0), strict=True):
        torch.testing.assert_close(context["s"][row, none:], x[row, held])
        torch.testing.assert_close(context["s"][row, :none], start[:none])


def test_a_reset_restarts_the_chunk():
    core, u, is_first = make_core(feedback=3), inputs(), never()
    is_first[:, 4] = True
    _, x, _, context = core.scan(u, is_first, core.initial(B))
    for t, held in {4: None, 5: None, 6: 6, 8: 6, 9: 9}.items():
        expected = core.start.expand(B, -1) if held is None else x[:, held]
        torch.testing.assert_close(context["s"][:, t], expected)


@pytest.mark.parametrize("name", ["alpha", "feedback", "window", "window_enc"])
def test_every_setting_changes_the_output(name):
    settings, other = {"feedback": 2}, {"alpha": 0.1, "feedback": 1, "window": 5, "window_enc": 6}
    cores = [make_core(**settings), make_core(**(settings | {name: other[name]}))]
    # The same weights, and biases by distance that are 0, as a window has its own number of them.
    weights = {
        key: value
        for key, value in cores[0].state_dict().items()
        if not key.endswith(("attention.bias", "cross.bias"))
    }
    u, outputs = inputs(), []
    for core in cores:
        core.load_state_dict(weights, strict=False)
        for block in (*core.encoder, *core.decoder):
            block.attention.bias.data.zero_()
        core.decoder[0].cross.bias.data.zero_()
        outputs.append(core.scan(u, never(), core.initial(B))[0])
    assert not torch.allclose(*outputs)


def test_the_gate_depends_on_the_token_and_on_the_register():
    core, u = make_core(), inputs(2)
    u.requires_grad_()
    _, x, _, _ = core.scan(u, never(2), core.initial(B))
    grads = torch.autograd.grad(x[:, 1].sum(), [core.gate.weight, core.read.weight])
    assert all(grad.abs().min() > 0 for grad in grads)


def test_errors_name_the_settings():
    with pytest.raises(ValueError, match="feedback -1"):
        make_core(feedback=-1)
    with pytest.raises(ValueError, match="layers_dec 0"):
        make_core(layers_dec=0)
    with pytest.raises(ValueError, match="width 8 must be a multiple of 3"):
        make_core(heads=3)


def test_a_loop_over_a_window_gives_the_same_gradients_again_from_a_kept_graph():
    torch.manual_seed(0)
    window = CrossAttention(4, 2, 3).double()
    keys = torch.randn(B, 2 + T, 2, 2).double().requires_grad_()
    loop = LoopWindow(window, (keys, keys.cos()), torch.full((B, T), 2))
    value = torch.randn(T, B, 4).double().requires_grad_()
    loss = sum(loop(part).sin().sum() for part in value.unbind())
    first = torch.autograd.grad(loss, [keys, value], retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(loss, [keys, value]), first)


@pytest.mark.parametrize("size", SIZES)
def test_a_size_has_about_the_parameters_of_the_core_gru(size):
    counts = []
    for core in ("gru", "rlt"):
        config = resolve(["--core", core, "--size", size])
        counts.append(sequence_parameters(WorldModel(config, {"vector": Vector(8)}, Vector(4))))
    assert counts[1] == pytest.approx(counts[0], rel=0.05)


@pytest.mark.parametrize("feedback", [0, 2])
def test_flops_of_every_kind_of_feedback_are_those_that_torch_counts(feedback):
    from torch.utils.flop_counter import FlopCounterMode

    core = make_core(feedback=feedback, layers_dec=2)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        core.scan(inputs(), never(), core.initial(B))
    assert core.flops(B, T) == pytest.approx(counter.get_total_flops(), rel=0.02)


def parity_after_training(feedback, seed, updates=800, width=64):
    """Share of right parities at bit 256, after learning all prefixes of 3 to 40 bits."""
    torch.manual_seed(seed)
    sizes = {"layers_enc": 1, "layers_dec": 1, "width": width, "heads": 4, "ffn": 2 * width}
    core = RLT(2, 1, **sizes, window=8, window_enc=16, alpha=0.1, feedback=feedback)
    head = nn.Linear(width, 2)
    params = [*core.parameters(), *head.parameters()]
    optim = torch.optim.AdamW(params, 1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    decay = torch.optim.lr_scheduler.LinearLR(optim, 1.0, 0.0, updates)

    def run(rows, length):
        bits = torch.randint(2, (rows, length))
        u = torch.cat([nn.functional.one_hot(bits, 2), torch.zeros(rows, length, 1)], -1)
        is_first = torch.zeros(rows, length, dtype=torch.bool)
        h, _, _, _ = core.scan(u, is_first, core.initial(rows))
        return head(h), bits.cumsum(1) % 2

    for _ in range(updates):
        logits, parity = run(128, int(torch.randint(3, 41, ())))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), parity.flatten())
        optim.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        optim.step()
        decay.step()
    with torch.no_grad():
        logits, parity = run(1024, 256)
    return (logits.argmax(-1) == parity)[:, -1].float().mean().item()


@pytest.mark.slow
def test_feedback_learns_parity_at_lengths_far_beyond_training():
    assert parity_after_training(feedback=1, seed=0) > 0.995


@pytest.mark.slow
def test_without_feedback_parity_stays_a_guess():
    assert parity_after_training(feedback=0, seed=0) == pytest.approx(0.5, abs=0.06)
