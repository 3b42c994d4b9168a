"""Rows cut into segments, and the plan that says into how many."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from configs.load import resolve
from worldmodels.cores import make_core
from worldmodels.segments import Pieces, Plan
from worldmodels.transformer import since_first

B = 3


def rows(length, ages, resets):
    is_first = torch.zeros(B, length, dtype=torch.bool)
    for b, t in resets:
        is_first[b, t % length] = True
    return since_first(is_first, torch.tensor(ages)), is_first


ROWS = {
    "length": st.integers(1, 14),
    "ages": st.lists(st.integers(0, 9), min_size=B, max_size=B),
    "resets": st.lists(st.tuples(st.integers(0, B - 1), st.integers(0, 13)), max_size=9),
    "segment": st.integers(1, 5),
}


@given(**ROWS, packed=st.booleans())
def test_every_step_has_a_place_of_its_own_within_the_plan(length, ages, resets, segment, packed):
    age, is_first = rows(length, ages, resets)
    plan = Plan.of(is_first.numpy(), age.numpy(), segment)
    pieces = Pieces(age, is_first, segment, plan, packed)
    free = Pieces(age, is_first, segment, None, packed)
    assert free.pieces <= pieces.pieces == plan.pieces
    assert np.array_equal(plan.after, pieces.after)
    assert len(set(pieces.place.tolist())) == B * length
    steps = torch.arange(B * length).view(B, length)
    assert torch.equal(pieces.pick(pieces.lay(steps)), steps)
    assert not pieces.taken[:, free.pieces :].any()


@pytest.mark.parametrize("packed", [False, True])
def test_a_row_by_hand(packed):
    # Ages 4, 5 | reset 0 1 2 | 3 | reset 0, in segments of 3: 4 and 5 end one, so the reset that
    # follows leaves an empty piece; the last reset cuts the segment of 3 short.
    is_first = torch.tensor([[False, False, True, False, False, False, True]])
    age = torch.tensor([[4, 5, 0, 1, 2, 3, 0]])
    pieces = Pieces(age, is_first, 3, None, packed)
    assert pieces.piece.tolist() == [[0, 0, 2, 2, 2, 3, 4]]
    assert pieces.after.tolist() == [[0, 1, 2, 2, 3, 3, 4]]
    assert pieces.taken.sum(2).tolist() == [[2, 0, 3, 1, 1]]
    assert pieces.begins.tolist() == [[False, False, True, False, True]]
    assert pieces.ends.tolist() == [[True, False, True, False, False]]
    first = [0, 1] if packed else [1, 2]
    assert pieces.lay(torch.ones_like(age))[0, 0].nonzero().flatten().tolist() == first


def test_plans_are_few():
    random = np.random.default_rng(0)
    plans = set()
    for _ in range(300):
        is_first = random.random((4, 64)) < random.random() * 0.5
        age = since_first(torch.from_numpy(is_first), torch.from_numpy(random.integers(0, 8, 4)))
        plans.add(Plan.of(is_first, age.numpy(), 8).pieces)
    assert plans <= {9, 10, 11, 13, 17, 25, 41, 73}


@settings(deadline=None, max_examples=30)
@given(**ROWS)
@pytest.mark.parametrize("core", ["elmur", "rate"])
def test_a_plan_changes_no_number(core, length, ages, resets, segment):
    torch.manual_seed(0)
    config = resolve(["--core", core, "--size", "debug", f"--{core}.segment", str(segment)])
    made = make_core(config, 3, 2).double()
    age, is_first = rows(length, ages, resets)
    u, state = torch.randn(B, length, 5, dtype=torch.float64), made.initial(B, torch.tensor(ages))
    one = made.scan(u, is_first, state)
    other = made.scan(u, is_first, state, made.plan(is_first.numpy(), age.numpy()))
    for a, b in zip(one[:2], other[:2], strict=True):
        torch.testing.assert_close(a, b)
    for key, value in one[2].items():
        torch.testing.assert_close(value, other[2][key])
    rolls = [made.imagine(result[3]) for result in (one, other)]
    for _ in range(4):
        u = torch.randn(B * length, 5, dtype=torch.float64)
        (h, x), (h2, x2) = (roll.step(u) for roll in rolls)
        torch.testing.assert_close(h, h2)
        torch.testing.assert_close(x, x2)
