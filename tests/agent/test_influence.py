"""Gradients through the core of what it said with respect to what it was told."""

import math

import pytest
import torch

from agent.diagnostics.influence import bins, norms
from agent.diagnostics.norms import measure as measure_norms
from configs.load import resolve
from worldmodels.core import SequenceCore
from worldmodels.cores import CORES, make_core


class Decay(SequenceCore):
    """h_t = a h_{t-1} + u_t, put back to 0 where an episode begins, or, if `leaky`, not."""

    def __init__(self, a, leaky=False):
        super().__init__()
        self.a, self.leaky = a, leaky

    def initial(self, batch, age=None):
        return {"h": torch.zeros(batch, 2)}

    def scan(self, u, is_first, state, plan=None):
        h, out = state["h"], []
        for t in range(u.shape[1]):
            if not self.leaky:
                h = torch.where(is_first[:, t, None], 0.0, h)
            h = self.a * h + u[:, t]
            out.append(h)
        h = torch.stack(out, 1)
        return h, h, {"h": h[:, -1]}, {"h": h}


def total(h, t):
    return {"h": h.sum(-1)}


def influence(core, resets, steps, length=6, rows=2):
    u = torch.randn(rows, length, 2, generator=torch.Generator().manual_seed(0))
    is_first = torch.zeros(rows, length, dtype=torch.bool)
    for b, t in resets:
        is_first[b, t] = True
    return norms(core, u, is_first, torch.zeros(rows), steps, total)


def test_a_decay_by_half_is_seen_as_such():
    found, leak = influence(Decay(0.5), [], [3, 5])
    expected = [math.sqrt(2) * 0.5**k for k in range(6)]
    assert found["h"].tolist() == pytest.approx(expected)
    assert leak == {"h": 0}


def test_pairs_across_a_reset_are_left_out_and_what_leaks_is_told():
    found, leak = influence(Decay(0.5), [(0, 3), (1, 3)], [5])
    assert found["h"][:3].tolist() == pytest.approx([math.sqrt(2) * 0.5**k for k in range(3)])
    assert found["h"][3:].isnan().all()
    assert leak["h"] == 0
    found, leak = influence(Decay(0.5, leaky=True), [(0, 3), (1, 3)], [5])
    assert leak["h"] == pytest.approx(math.sqrt(2) * 0.5**3)
    assert found["h"][3:].isnan().all()


def test_a_reset_in_one_row_leaves_the_other_alone():
    found, _ = influence(Decay(0.5), [(0, 4)], [5])
    assert found["h"].tolist() == pytest.approx([math.sqrt(2) * 0.5**k for k in range(6)])


@pytest.mark.parametrize("name", list(CORES))
def test_no_core_passes_anything_across_a_reset(name):
    torch.manual_seed(0)
    flags = ["--core", name, "--preset", "bsuite_small", "--task", "bsuite_memory_len_L5"]
    core = make_core(resolve(flags), 4, 2).requires_grad_(False)
    u = torch.randn(2, 24, 6)
    is_first = torch.zeros(2, 24, dtype=torch.bool)
    is_first[0, 11] = is_first[1, 16] = True
    age = torch.tensor([0, 3])
    found, leak = norms(core, u, is_first, age, [20], total)
    assert leak["h"] == 0
    assert found["h"][0] > 0
    assert found["h"][1] > 0


def test_lags_are_averaged_up_to_the_next():
    values = torch.tensor([1.0, 2.0, 3.0, 5.0, math.nan])
    assert bins(values, (0, 1, 2)) == pytest.approx([1, 2, 4])


def test_norms_are_those_of_their_ages():
    from types import SimpleNamespace as Simple

    from agent.diagnostics.recording import Episode

    def episode(values):
        norm = torch.tensor(values).numpy()
        steps = {"age": torch.arange(len(values)).numpy(), "h_norm": norm, "x_norm": 2 * norm}
        return Episode({**steps, "reward": norm}, {})

    config = Simple(batch=Simple(length=4))
    run = Simple(config=config, episodes=[episode([1.0, 2.0, 4.0]), episode([3.0, 2.0])])
    found = measure_norms(run)
    assert found["ages"] == [0, 1, 2]
    assert found["h"] == pytest.approx([2, 2, 4])
    assert found["h_std"] == pytest.approx([1, 0, 0])
    assert found["x"] == pytest.approx([4, 4, 8])
