"""Core `elmur` over its settings; the contract tests cover it at one of them."""

import dataclasses

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from configs.load import resolve
from configs.schema import ElmurConfig
from worldmodels.bench import Vector, sequence_parameters
from worldmodels.elmur import Elmur
from worldmodels.world_model import WorldModel

B, Z, A, H = 3, 6, 2, 7
SMALL = dataclasses.replace(
    ElmurConfig(), layers=2, width=8, heads=2, window=4, ffn=8, segment=3, slots=2
)


def make(provisional=True, **changes):
    torch.manual_seed(0)
    config = dataclasses.asdict(dataclasses.replace(SMALL, **changes))
    core = Elmur(Z, A, provisional=provisional, **config).double()
    for param in core.parameters():  # zero biases would hide errors
        if param.requires_grad:
            param.data += 0.3 * torch.randn_like(param)
    return core


def draw(length, resets=(), seed=1):
    generator = torch.Generator().manual_seed(seed)
    is_first = torch.zeros(B, length, dtype=torch.bool)
    for b, t in resets:
        is_first[b, t] = True
    return torch.randn(B, length, Z + A, dtype=torch.float64, generator=generator), is_first


def by_steps(core, u, is_first, state):
    hs, xs, states = [], [], []
    for t in range(u.shape[1]):
        h, x, state = core.step(u[:, t], is_first[:, t], state)
        hs.append(h)
        xs.append(x)
        states.append(state)
    return torch.stack(hs, 1), torch.stack(xs, 1), states


def assert_same(one, other):
    assert one.keys() == other.keys()
    for key in one:
        assert one[key].dtype == other[key].dtype, key
        torch.testing.assert_close(one[key], other[key], atol=1e-10, rtol=1e-8)


VARIANTS = st.fixed_dictionaries(
    {
        "window": st.integers(1, 6),
        "segment": st.integers(1, 5),
        "slots": st.integers(1, 3),
        "blend": st.sampled_from([0.2, 0.8]),
        "attend": st.sampled_from(["sliding", "segment"]),
        "memory": st.sampled_from(["per_layer", "shared"]),
        "write": st.sampled_from(["lru", "fifo", "all"]),
        "bias": st.booleans(),
        "memory_grad": st.sampled_from(["bptt", "detach"]),
        "initial": st.sampled_from(["learned", "fixed"]),
        "provisional": st.booleans(),
    }
)
ROWS = st.fixed_dictionaries(
    {
        "length": st.integers(1, 14),
        "ages": st.lists(st.integers(0, 9), min_size=B, max_size=B),
        "resets": st.lists(st.tuples(st.integers(0, B - 1), st.integers(0, 13)), max_size=5),
        "before": st.integers(0, 6),  # steps that made the state
    }
)


def make_rows(core, length, ages, resets, before):
    state = core.initial(B, torch.tensor(ages))
    u, is_first = draw(before, seed=2)
    for t in range(before):
        _, _, state = core.step(u[:, t], is_first[:, t], state)
    state = {key: value.detach() for key, value in state.items()}
    return *draw(length, [(b, t) for b, t in resets if t < length]), state


@settings(max_examples=40, deadline=None)
@given(variant=VARIANTS, rows=ROWS)
def test_scan_equals_step_repeated_with_its_gradients(variant, rows):
    core = make(**variant)
    u, is_first, state = make_rows(core, **rows)
    results = []
    for scan in (True, False):
        inputs = u.clone().requires_grad_()
        start = {
            key: value.clone().requires_grad_() if value.is_floating_point() else value
            for key, value in state.items()
        }
        if scan:
            h, x, last, _ = core.scan(inputs, is_first, start)
        else:
            h, x, states = by_steps(core, inputs, is_first, start)
            last = states[-1]
        leaves = [inputs, *(value for value in start.values() if value.requires_grad)]
        leaves += [param for param in core.parameters() if param.requires_grad]
        loss = h.sin().sum() + (x * 0.3).cos().sum()
        grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        grads = [
            torch.zeros_like(leaf) if g is None else g
            for leaf, g in zip(leaves, grads, strict=True)
        ]
        results.append(dict(enumerate([h, x, *last.values(), *grads])))
    assert_same(*results)


@settings(max_examples=30, deadline=None)
@given(variant=VARIANTS, rows=ROWS, data=st.data())
def test_splitting_anywhere_changes_nothing(variant, rows, data):
    core = make(**variant)
    u, is_first, state = make_rows(core, **{**rows, "length": max(2, rows["length"])})
    cut = data.draw(st.integers(1, u.shape[1] - 1))
    h, x, last, _ = core.scan(u, is_first, state)
    h1, x1, middle, _ = core.scan(u[:, :cut], is_first[:, :cut], state)
    h2, x2, end, _ = core.scan(u[:, cut:], is_first[:, cut:], middle)
    torch.testing.assert_close(torch.cat([h1, h2], 1), h)
    torch.testing.assert_close(torch.cat([x1, x2], 1), x)
    assert_same(end, last)


@settings(max_examples=40, deadline=None)
@given(variant=VARIANTS, rows=ROWS, data=st.data())
def test_imagination_is_steps_from_every_start_across_borders(variant, rows, data):
    core = make(**variant)
    u, is_first, state = make_rows(core, **rows)
    length = u.shape[1]
    last = data.draw(st.integers(1, length))
    imagined, none = draw(H * last, seed=3)
    imagined, none = imagined.unflatten(1, (last, H)), none[:, :H]
    with torch.no_grad():
        _, _, states = by_steps(core, u, is_first, state)
        _, _, _, context = core.scan(u, is_first, state)
        roll = core.imagine(context, last)
        rolled = [roll.step(imagined[:, :, k].flatten(0, 1)) for k in range(H)]
        for start in range(last):
            h, x, _ = by_steps(core, imagined[:, start], none, states[length - last + start])
            for k, parts in enumerate(rolled):
                for want, got in zip((h, x), parts, strict=True):
                    got = got.unflatten(0, (B, last))[:, start]
                    torch.testing.assert_close(got, want[:, k], atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("variant", [{}, {"write": "all"}, {"memory": "shared"}])
@pytest.mark.parametrize("grad", ["bptt", "detach"])
def test_gradient_through_imagination_is_that_of_steps(variant, grad):
    core = make(memory_grad=grad, **variant)
    u, is_first = draw(5)
    _, _, state, context = core.scan(u, is_first, core.initial(B))
    state = {key: value.detach() for key, value in state.items()}
    inputs, none = draw(H)
    inputs.requires_grad_()
    roll, loss = core.imagine(context, 1), 0
    for k in range(H):
        h, x = roll.step(inputs[:, k])
        loss = loss + h.sin().sum() + x.cos().sum()
    h, x, _ = by_steps(core, inputs, none, state)
    one = torch.autograd.grad(loss, inputs)[0]
    other = torch.autograd.grad(h.sin().sum() + x.cos().sum(), inputs)[0]
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_not_even_nan_passes_a_reset(at, poison):
    core = make()
    u, is_first = draw(9, [(b, at) for b in range(B)])
    h, x, last, _ = core.scan(u, is_first, core.initial(B))
    u[:, :at] = poison
    state = {k: v + poison if v.is_floating_point() else v + 1 for k, v in core.initial(B).items()}
    for run in (core.scan, by_steps):
        h2, x2, last2, *_ = (
            run(core, u, is_first, state) if run is by_steps else run(u, is_first, state)
        )
        last2 = last2[-1] if run is by_steps else last2
        torch.testing.assert_close(h2[:, at:], h[:, at:])
        torch.testing.assert_close(x2[:, at:], x[:, at:])
        assert_same(last2, last)


def test_each_segment_changes_one_slot_a_layer_in_turn_and_no_other_bit():
    core = make(slots=3)
    u, is_first = draw(18)
    state, count = core.initial(B), 0
    for t in range(18):
        _, _, after = core.step(u[:, t], is_first[:, t], state)
        changed = (after["memory"] != state["memory"]).any(-1)
        expected = torch.zeros_like(changed)
        if (t + 1) % 3 == 0:
            expected[:, :, count % 3] = True
            count += 1
        assert torch.equal(changed, expected), t
        assert (after["writes"] == count).all()
        state = after


def test_a_segment_cut_short_is_never_written():
    core = make()
    u, is_first = draw(8, [(0, 2), (1, 3), (1, 5)])
    _, _, last, _ = core.scan(u, is_first, core.initial(B))
    assert last["writes"].tolist() == [2, 1, 2]
    fresh, none = u[:1, 2:], is_first[:1, 3:]
    _, _, alone, _ = core.scan(fresh, torch.zeros(1, 6, dtype=torch.bool), core.initial(1))
    torch.testing.assert_close(last["memory"][:1], alone["memory"])
    assert not none.any()


def test_borders_follow_the_age_that_the_state_began_at():
    core = make()
    u, is_first = draw(4)
    _, _, last, _ = core.scan(u, is_first, core.initial(B, torch.tensor([0, 1, 5])))
    assert last["writes"].tolist() == [1, 1, 2]
    assert last["age"].tolist() == [4, 5, 9]
    assert last["known"].tolist() == [4, 4, 4]


def test_slots_stay_within_the_norm_of_candidates_and_initial_slots():
    core = make(blend=0.8)
    u, is_first = draw(60)
    _, _, last, _ = core.scan(1e3 * u, is_first, core.initial(B))
    for number, slots in enumerate(core.memories):
        bound = slots.initial.norm(dim=-1).max()
        bound = torch.maximum(bound, slots.close.weight.abs().max() * SMALL.width**0.5)
        assert (last["memory"][:, number].norm(dim=-1) <= bound).all()


def test_old_content_fades_by_the_share_of_each_write():
    core = make(slots=1, blend=0.25, segment=1)
    for slots in core.memories:  # candidates that do not depend on what the slot held
        slots.close.weight.data.zero_()
    state = core.initial(B)
    state["memory"], state["writes"] = torch.ones_like(state["memory"]), state["writes"] + 1
    u, is_first = draw(5)
    _, _, last, _ = core.scan(u, is_first, state)
    torch.testing.assert_close(last["memory"], torch.full_like(last["memory"], 0.75**5))


def write_grads(core, length):
    u, is_first = draw(length)
    h, _, _, _ = core.scan(u, is_first, core.initial(B))
    h.sin().sum().backward()
    return [
        0.0 if param.grad is None else param.grad.abs().sum().item()
        for memory in core.memories
        for name, param in memory.named_parameters()
        if name != "initial"
    ]


def test_the_writer_learns_from_later_segments_alone_and_not_if_detached():
    assert all(write_grads(make(provisional=False), 7))
    assert not any(write_grads(make(provisional=False), 3))
    assert not any(write_grads(make(provisional=False, memory_grad="detach"), 7))


def test_what_reaches_far_back_is_the_memory():
    core = make(layers=1, window=2, slots=1)
    u, is_first = draw(30)
    u.requires_grad_()
    h, _, _, _ = core.scan(u, is_first, core.initial(B))
    assert torch.autograd.grad(h[:, -1].sin().sum(), u)[0][:, 0].abs().sum() > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"window": 5},
        {"segment": 4},
        {"slots": 3},
        {"blend": 0.7},
        {"attend": "segment"},
        {"memory": "shared"},
        {"write": "fifo"},
        {"write": "all"},
        {"bias": False},
    ],
    ids=str,
)
def test_each_setting_changes_h(changes):
    u, is_first = draw(13)
    one, other = make(provisional=False), make(provisional=False, **changes)
    same = dict(one.named_parameters())
    for name, param in other.named_parameters():
        if param.requires_grad and same[name].shape == param.shape:
            param.data.copy_(same[name].data)
    h1, h2 = (core.scan(u, is_first, core.initial(B))[0] for core in (one, other))
    assert not torch.allclose(h1, h2)


@pytest.mark.parametrize("name", ["dropout", "dropout_attention", "dropout_memory"])
def test_dropout_disturbs_training_and_nothing_else(name):
    u, is_first = draw(13)
    core, plain = make(**{name: 0.5}), make()
    state = core.initial(B)

    def scan(core):
        return core.scan(u, is_first, state)[0]

    assert not torch.equal(scan(core), scan(core))
    with torch.no_grad():
        torch.testing.assert_close(scan(core), scan(plain))
        stepped, _, _ = by_steps(core, u, is_first, state)
        torch.testing.assert_close(stepped, scan(plain))


def test_fixed_slots_are_saved_and_not_trained():
    core = make(initial="fixed")
    names = {name for name, param in core.named_parameters() if not param.requires_grad}
    assert names == {"memories.0.initial", "memories.1.initial"}
    assert names <= set(core.state_dict())


def test_x_is_the_slot_that_a_segment_ending_there_would_write():
    core = make()
    u, is_first = draw(9)
    _, x, states = by_steps(core, u, is_first, core.initial(B))
    for t, slot in ((2, 0), (5, 1), (8, 0)):
        torch.testing.assert_close(x[:, t], states[t]["memory"][:, :, slot].flatten(1))


def test_x_is_h_where_the_policy_does_not_read_x():
    def x_and_h(features):
        flags = ["--core", "elmur", "--size", "debug", "--behaviour.features", features]
        world = WorldModel(resolve(flags), {"vector": Vector(8)}, Vector(4))
        u, is_first = torch.randn(B, 4, world.z + 4), torch.zeros(B, 4, dtype=torch.bool)
        h, x, _, _ = world.core.scan(u, is_first, world.core.initial(B))
        return h, x

    h, x = x_and_h("output")
    assert h is x
    for features in ("hidden", "full"):
        h, x = x_and_h(features)
        assert x.shape[-1] == 2 * h.shape[-1]


SIZES = ["1m", "12m", "25m", "50m", "100m", "200m", "400m"]


@pytest.mark.parametrize("size", SIZES)
def test_parameters_are_those_of_gru_within_5_percent(size, monkeypatch):
    monkeypatch.setattr("worldmodels.world_model.make_bins", lambda: torch.zeros(255))
    counts = {}
    with torch.device("meta"):
        for core in ("gru", "elmur"):
            config = resolve(["--core", core, "--size", size])
            counts[core] = sequence_parameters(WorldModel(config, {"vector": Vector(8)}, Vector(4)))
    assert counts["elmur"] == pytest.approx(counts["gru"], rel=0.05)
