"""Maps of reads and writes, and decays, of cores whose memory is worked out by hand."""

import dataclasses
import math

import pytest
import torch

from agent.diagnostics.memory_maps import maps_of, watched
from agent.diagnostics.spectrum import half_life, initial_range, layer_spectrum
from configs.schema import ElmurConfig, RateConfig
from worldmodels.elmur import Elmur
from worldmodels.rate import Rate
from worldmodels.s3m import SSM

B, T, Z, A = 2, 17, 6, 2
SEGMENT = 4


def inputs():
    is_first = torch.zeros(B, T, dtype=torch.bool)
    is_first[:, 0] = True
    return torch.randn(B, T, Z + A, generator=torch.Generator().manual_seed(1)), is_first


def elmur(**changes):
    torch.manual_seed(0)
    small = {"layers": 2, "width": 8, "heads": 2, "window": 4, "ffn": 8, "segment": SEGMENT}
    config = dataclasses.replace(ElmurConfig(), **{**small, "slots": 3, **changes})
    core = Elmur(Z, A, provisional=False, **dataclasses.asdict(config))
    for param in core.parameters():  # biases begin at zero
        param.data += 0.3 * torch.randn_like(param)
    return core.requires_grad_(False)


def rate(**changes):
    torch.manual_seed(0)
    small = {"layers": 2, "width": 8, "heads": 2, "window": 4, "ffn": 8, "segment": SEGMENT}
    config = dataclasses.replace(RateConfig(), **{**small, "tokens": 3, **changes})
    core = Rate(Z, A, **dataclasses.asdict(config))
    for param in core.parameters():
        param.data += 0.3 * torch.randn_like(param)
    return core.requires_grad_(False)


@pytest.mark.parametrize(
    "changes", [{}, {"memory": "shared"}, {"write": "all"}, {"write": "fifo"}], ids=str
)
def test_slots_are_written_in_turn_at_the_ends_of_segments(changes):
    core = elmur(**changes)
    maps = maps_of(core, *inputs())
    memories = len(core.memories)
    assert maps["changed"].shape == (T, memories, 3)
    moved = maps["changed"] > 0
    for t in range(T):
        writes = t // SEGMENT  # before this step's
        slots = {writes % 3} if changes.get("write") != "all" else {0, 1, 2}
        expected = [slot in slots and t % SEGMENT == SEGMENT - 1 for slot in range(3)]
        assert moved[t].tolist() == [expected] * memories, t
    assert maps["reads"].shape == (T, 2, 3)
    torch.testing.assert_close(maps["reads"].sum(-1), torch.ones(T, 2))
    assert maps["reads"].std() > 0.01
    writes = maps["writes"][: T - 1].unflatten(0, (-1, SEGMENT))
    torch.testing.assert_close(writes.sum(1), torch.ones(4, memories))
    assert (writes > 0).all()
    assert maps["writes"][T - 1 :].isnan().all()


def test_a_write_goes_where_its_bias_says():
    core = elmur()
    for memory in core.memories:
        memory.bias.data.zero_()
        memory.bias.data[2] = 30
    maps = maps_of(core, *inputs())
    assert (maps["writes"][2 : T - 1 : SEGMENT] > 0.99).all()


@pytest.mark.parametrize("x", ["committed", "provisional"])
def test_memory_tokens_change_at_the_ends_of_segments(x):
    maps = maps_of(rate(x=x), *inputs())
    ends = torch.arange(T) % SEGMENT == SEGMENT - 1
    assert ((maps["changed"] > 0) == ends[:, None, None]).all()
    assert maps["reads"].shape == (T, 2, 3)
    shares = maps["reads"].sum(-1)
    assert (shares > 0).all()
    assert (shares < 1).all()  # steps see steps too
    writes = maps["writes"][: T - 1].unflatten(0, (-1, SEGMENT)).sum(1)
    assert ((writes > 0) & (writes < 1)).all()  # memory sees memory too
    assert maps["writes"][T - 1 :].isnan().all()


def test_the_first_step_of_rate_reads_memory_and_itself_alone():
    core = rate()
    u, is_first = inputs()
    with watched([core.blocks[0].attention], "weights") as kept:
        core.step(u[:, 0], is_first[:, 0], core.initial(B))
    read = maps_of(core, u, is_first)["reads"][0, 0]
    (weights,) = kept
    own = weights[:, 0, :, 3, -1].mean()
    assert (read.sum() + own).item() == pytest.approx(1)
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))


def test_the_shares_of_a_write_of_rate_are_those_of_its_own_segment():
    """A window as long as a segment: a write sees its segment, the old memory and the new one."""
    core = rate()
    u, is_first = inputs()
    state = core.initial(B)
    with watched([core.blocks[1].attention], "weights") as kept:
        for t in range(SEGMENT):
            _, _, state = core.step(u[:, t], is_first[:, t], state)
    write = kept[-1][:, 0, :, 4:].mean((0, 1, 2))
    memory = write[:3].sum() + write[-3:].sum()
    share = maps_of(core, u, is_first)["writes"][:SEGMENT, 1]
    assert (share.sum() + memory).item() == pytest.approx(1)
    assert share[-1].item() == pytest.approx(write[-4].item())


def test_watching_ends_with_its_context():
    core = elmur()
    with watched([core.layers[0].read], "weights"):
        pass
    assert "weights" not in vars(core.layers[0].read)


@pytest.mark.parametrize("discretisation", ["zoh", "bilinear"])
def test_half_life_of_a_known_lambda_and_dt(discretisation):
    layer = SSM(4, 2, 1, discretisation, (0.01, 0.1))
    layer.lambda_re.data = torch.tensor([-0.5, -2.0])
    layer.lambda_im.data = torch.tensor([0.0, 3.0])
    layer.log_dt.data = torch.tensor([0.01, 0.002]).log()
    found = layer_spectrum(layer)
    # |exp(dt lambda)| = exp(dt Re(lambda)); the bilinear form differs in the third order of dt.
    expected = [math.log(2) / 0.005, math.log(2) / 0.004]
    assert found["half_life"].tolist() == pytest.approx(expected, rel=1e-4)
    assert found["dt"].tolist() == pytest.approx([0.01, 0.002])
    assert found["period"][1].item() == pytest.approx(2 * math.pi / 0.006, rel=1e-4)
    assert math.isinf(found["period"][0])


def test_half_lives_and_their_range_at_the_start():
    assert half_life(torch.tensor([0.5, 0.25, 1.0])).tolist() == [1, 0.5, math.inf]
    assert initial_range(0.001, 0.1) == pytest.approx([13.86, 1386], rel=1e-3)
