"""Core rate: what a segment may read, when memory is written, and what may be imagined."""

import dataclasses
import typing

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs import load
from configs.load import resolve
from configs.schema import RateConfig
from worldmodels.cores import make_core
from worldmodels.layers import MLP
from worldmodels.rate import Rate
from worldmodels.world_model import Posterior

B, Z, A = 3, 5, 2
SMALL = {"layers": 2, "width": 8, "heads": 2, "window": 4, "ffn": 8, "segment": 3, "tokens": 2}
DEFAULT = dataclasses.asdict(RateConfig())
WORDS = {
    name: typing.get_args(kind)
    for name, kind in typing.get_type_hints(RateConfig).items()
    if typing.get_origin(kind) is typing.Literal
}


def make(**changes):
    torch.manual_seed(0)
    core = Rate(Z, A, **{**DEFAULT, **SMALL, **changes}).double()
    for param in core.parameters():  # zero biases would hide errors
        param.data += 0.2 * torch.randn_like(param)
    return core


def none(length):
    return torch.zeros(B, length, dtype=torch.bool)


def inputs(length):
    torch.manual_seed(1)
    return torch.randn(B, length, Z + A).double()


def by_steps(core, u, is_first, state):
    hs, xs = [], []
    for one, first in zip(u.unbind(1), is_first.unbind(1), strict=True):
        h, x, state = core.step(one, first, state)
        hs.append(h)
        xs.append(x)
    return torch.stack(hs, 1), torch.stack(xs, 1), state


def close(one, other):
    torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-8)


cores = st.fixed_dictionaries(
    {
        "segment": st.integers(1, 5),
        "tokens": st.integers(1, 3),
        "window": st.integers(1, 7),
        **{name: st.sampled_from(words) for name, words in WORDS.items()},
    }
)
ages = st.lists(st.integers(0, 9), min_size=B, max_size=B)
lengths = st.integers(1, 12)


@st.composite
def cases(draw, resets=True):
    """A core, its inputs, resets, and a state reached by `warm` steps from some ages."""
    core, u = make(**draw(cores)), inputs(draw(lengths))
    is_first = none(u.shape[1])
    if resets:
        places = st.tuples(st.integers(0, B - 1), st.integers(0, u.shape[1] - 1))
        for b, t in draw(st.lists(places, max_size=6)):
            is_first[b, t] = True
    state = core.initial(B, torch.tensor(draw(ages)))
    for _ in range(draw(st.integers(0, 7))):
        _, _, state = core.step(torch.randn(B, Z + A).double(), None, state)
    return core, u, is_first, {key: value.detach() for key, value in state.items()}


@settings(max_examples=30, deadline=None)
@given(cases())
def test_scan_equals_step_repeated_with_its_gradients(case):
    core, u, is_first, state = case
    results = []
    for run in (core.scan, lambda *args: by_steps(core, *args)):
        given = u.clone().requires_grad_()
        start = {k: v.clone().requires_grad_(v.is_floating_point()) for k, v in state.items()}
        h, x, last = run(given, is_first, start)[:3]
        leaves = [given, *(v for v in start.values() if v.requires_grad), *core.parameters()]
        loss = h.sin().sum() + (0.3 * x).cos().sum()
        grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        results.append([h, x, *last.values(), *grads])
    for one, other in zip(*results, strict=True):
        close(one, other)


@settings(max_examples=20, deadline=None)
@given(cases(), st.data())
def test_splitting_anywhere_changes_nothing(case, data):
    core, u, is_first, state = case
    cut = data.draw(st.integers(0, u.shape[1]))
    whole_h, whole_x, whole, _ = core.scan(u, is_first, state)
    hs, xs = [], []
    for part in (slice(0, cut), slice(cut, None)):
        if len(u[0, part]):
            h, x, state, _ = core.scan(u[:, part], is_first[:, part], state)
            hs.append(h)
            xs.append(x)
    close(torch.cat(hs, 1), whole_h)
    close(torch.cat(xs, 1), whole_x)
    for key, value in whole.items():
        close(state[key], value)


@settings(max_examples=30, deadline=None)
@given(cases(), st.data())
def test_a_roll_from_any_step_is_step_repeated_across_the_ends_of_segments(case, data):
    core, u, is_first, state = case
    length, horizon = u.shape[1], 7
    last = data.draw(st.integers(1, length))
    imagined = torch.randn(horizon, B, length, Z + A).double()
    _, _, _, context = core.scan(u, is_first, state)
    roll = core.imagine(context, last)
    rolled = [roll.step(part[:, -last:].flatten(0, 1)) for part in imagined]
    for t in range(length):
        _, _, state = core.step(u[:, t], is_first[:, t], state)
        if t < length - last:
            continue
        after = state
        for part, (h, x) in zip(imagined, rolled, strict=True):
            step_h, step_x, after = core.step(part[:, t], None, after)
            close(h.unflatten(0, (B, last))[:, t - length + last], step_h)
            close(x.unflatten(0, (B, last))[:, t - length + last], step_x)


@pytest.mark.parametrize("at", [0, 1, 2, 3, 4])  # segments end after steps 2 and 5
@pytest.mark.parametrize("x", WORDS["x"])
def test_nothing_of_another_episode_passes_a_reset_be_it_nan(at, x):
    core, u = make(x=x, window=5), inputs(7)
    is_first = none(7)
    is_first[:, at] = True
    nan = {k: v * torch.nan if v.is_floating_point() else v for k, v in core.initial(B).items()}
    poisoned = u.clone()
    poisoned[:, :at] = torch.nan
    fresh = core.scan(u[:, at:], none(7 - at), core.initial(B))
    for run in (core.scan, lambda *args: by_steps(core, *args)):
        for one, other in zip(run(poisoned, is_first, nan)[:2], fresh[:2], strict=True):
            close(one[:, at:], other)
    context = core.scan(poisoned, is_first, nan)[3]
    rolls = core.imagine(context, 7 - at), core.imagine(fresh[3])
    for part in torch.randn(5, B * (7 - at), Z + A).double():
        for one, other in zip(*(roll.step(part) for roll in rolls), strict=True):
            close(one, other)


def memory_of(x, core):
    return x[..., : -core.out]


def test_memory_is_written_after_the_last_step_of_each_segment_and_at_no_other():
    core = make(segment=3)
    _, x, _, _ = core.scan(inputs(8), none(8), core.initial(B, torch.tensor([0, 1, 5])))
    memory = memory_of(x, core)
    changed = (memory[:, 1:] != memory[:, :-1]).any(-1)
    # Row 0 has ages 0-7, row 1 has 1-8, row 2 has 5-12: written after ages 2, 5, 8 and 11.
    assert changed[0].nonzero().flatten().tolist() == [1, 4]
    assert changed[1].nonzero().flatten().tolist() == [0, 3, 6]
    assert changed[2].nonzero().flatten().tolist() == [2, 5]  # step 0, age 5, has no step before


@pytest.mark.parametrize("before", [1, 2])
def test_a_segment_that_an_episode_cuts_short_is_never_written(before):
    core = make(segment=3, window=5)
    is_first = none(before + 3)
    is_first[:, before] = True
    _, x, _, _ = core.scan(inputs(before + 3), is_first, core.initial(B))
    memory = memory_of(x, core)
    initial = core.memory.flatten().expand(B, -1)
    for t in range(before + 2):
        assert torch.equal(memory[:, t], initial)
    assert not torch.allclose(memory[:, before + 2], initial)


def test_the_provisional_memory_is_the_one_written_when_the_segment_ends():
    shown, committed = (make(x=x) for x in ("provisional", "committed"))
    shown.load_state_dict(committed.state_dict())
    u = inputs(6)
    provisional = memory_of(shown.scan(u, none(6), shown.initial(B))[1], shown)
    written = memory_of(committed.scan(u, none(6), committed.initial(B))[1], committed)
    close(provisional[:, 2::3], written[:, 2::3])
    assert all((provisional[:, t] != provisional[:, t - 1]).all() for t in range(1, 6))


def test_one_layer_and_a_window_of_one_remember_through_memory_alone():
    core = make(layers=1, window=1, segment=3)
    u = inputs(9)
    changed = u.clone()
    changed[:, 1] += 1
    h, h2 = (core.scan(given, none(9), core.initial(B))[0] for given in (u, changed))
    same = (h == h2).all(-1).all(0)
    # Step 1 is written after step 2, and read from step 3 on.
    assert same.tolist() == [True, False, True] + [False] * 6


@pytest.mark.parametrize(
    ("attend", "window", "segment", "age", "known", "near", "far"),
    [
        ("sliding", 4, 3, 7, 7, 3, 3),  # a write sees the window of its last step
        ("sliding", 2, 5, 8, 8, 1, 3),  # and all steps of its segment: ages 5-8
        ("sliding", 2, 5, 8, 2, 1, 2),  # of which those before the row are not at hand
        ("segment", 4, 3, 7, 7, 1, 1),
        ("segment", 2, 5, 8, 8, 1, 3),
        ("segment", 2, 5, 5, 5, 0, 0),
    ],
)
def test_a_step_sees_its_window_and_a_write_its_segment(
    attend, window, segment, age, known, near, far
):
    core = make(attend=attend, window=window, segment=segment)
    reaches = core.reaches(torch.tensor([age]), torch.tensor([known]))
    assert [int(part) for part in reaches] == [near, far]


def test_reach_segment_sees_no_step_of_the_segment_before():
    for reach, equal in (("segment", True), ("sliding", False)):
        core = make(attend=reach)
        state = core.initial(B, torch.full((B,), 2))
        _, _, state = core.step(inputs(1)[:, 0], None, state)
        other = {**state, "key": state["key"] + 1, "value": state["value"] + 1}
        h, h2 = (core.step(inputs(2)[:, 1], None, start)[0] for start in (state, other))
        assert torch.equal(h, h2) == equal


def test_noise_on_the_memory_changes_every_later_output():
    core = make()
    state = core.initial(B)
    noisy = {**state, "memory": state["memory"] + 0.1 * torch.randn(B, 2, 8).double()}
    h, h2 = (core.scan(inputs(8), none(8), start)[0] for start in (state, noisy))
    assert (h != h2).any(-1).all()


def test_each_valve_writes_another_memory():
    written = []
    for valve in WORDS["valve"]:
        core = make(valve=valve)
        core.load_state_dict(
            {k: v for k, v in make().state_dict().items() if not k.startswith("valve")},
            strict=False,
        )
        written.append(core.scan(inputs(3), none(3), core.initial(B))[2]["memory"])
    for i, one in enumerate(written):
        assert all(not torch.allclose(one, other) for other in written[:i])


def test_valve_none_keeps_what_was_written_and_a_shut_gate_keeps_what_was_there():
    old, new = torch.randn(2, 4, 2, 8)
    assert torch.equal(make(valve="none").float().valve(old, new), new)
    gate = make(valve="gate").float().valve
    gate.shut.data.fill_(1e3)
    torch.testing.assert_close(gate(old, new), old)


def test_dropout_of_memory_disturbs_training_and_nothing_else():
    core, plain, u = make(dropout_memory=0.5), make(), inputs(9)

    def scan(core):
        return core.scan(u, none(9), core.initial(B))[0]

    first, again = scan(core), scan(core)
    assert torch.equal(first[:, : core.segment], again[:, : core.segment])  # nothing is written yet
    assert not torch.equal(first, again)
    with torch.no_grad():
        torch.testing.assert_close(scan(core), scan(plain))


@pytest.mark.parametrize("valve", WORDS["valve"])
def test_the_gradient_of_a_later_segment_reaches_the_writer_unless_memory_is_detached(valve):
    for memory_grad in ("bptt", "detach"):
        core = make(valve=valve, memory_grad=memory_grad, attend="segment", layers=1)
        u = inputs(6).requires_grad_()
        h, _, _, _ = core.scan(u, none(6), core.initial(B))
        leaves = [u, *core.valve.parameters()]
        grads = torch.autograd.grad(
            h[:, 3:].sin().sum(), leaves, allow_unused=True, materialize_grads=True
        )
        reached = [bool((grad != 0).any()) for grad in (grads[0][:, :3], *grads[1:])]
        assert set(reached) == {memory_grad == "bptt"}


def test_the_initial_memory_is_m_distinct_vectors_learned_or_fixed():
    learned, fixed = (make(initial=kind) for kind in ("learned", "fixed"))
    for core in (learned, fixed):
        one, other = core.memory
        assert not torch.allclose(one, other)
        assert "memory" in core.state_dict()
    assert "memory" in dict(learned.named_parameters())
    assert "memory" not in dict(fixed.named_parameters())


@pytest.mark.parametrize("size", load.blocks("sizes"))
def test_every_size_has_about_the_parameters_of_the_core_gru(size):
    counts = {}
    for name in ("gru", "rate"):
        config = resolve(["--core", name, "--size", size])
        model, z = config.model, config.model.groups * config.model.classes
        with torch.device("meta"):
            core = make_core(config, z, 4)
            prior = MLP(core.out, model.hidden, 2, z)
            posterior = Posterior(model.units, core.out * core.markov, model.hidden, z)
        parts = (core, prior, posterior)
        counts[name] = sum(p.numel() for part in parts for p in part.parameters())
    assert counts["rate"] == pytest.approx(counts["gru"], rel=0.05)
