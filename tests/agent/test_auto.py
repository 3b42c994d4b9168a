"""Automatic choices: what is asked for is never changed, and a CPU gets what it can train."""

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from agent import auto
from agent.flops import Flops
from agent.update import Update
from configs.schema import BatchConfig
from envs.env import Space
from worldmodels.cores import CORES
from worldmodels.heads import FEATURES

OBS, ACT = {"vector": Space("vector", (3,))}, Space("discrete", (1,), (3,))


def cpu(config, **changes):
    return dataclasses.replace(config, device="cpu", threads=1, size="auto", **changes)


def test_a_slow_cpu_shrinks_width_then_batch_then_length_to_no_less_than_256(tiny, monkeypatch):
    config = cpu(tiny())
    batch = dataclasses.replace(config.batch, size=4, length=1024)
    config = dataclasses.replace(config, batch=batch)
    for each, size, rows, length in (
        (1e-4, "12m", 4, 1024),  # 0.4 s an update of the largest: nothing shrinks
        (1e-3, "1m", 1, 1024),  # 4 s: the width, then the batch to 2 x 1024 = 2.05 s and below
        (5e-3, "1m", 1, 256),  # still 5 s at 1 x 1024: the length, to 1.28 s
        (1e-1, "1m", 1, 256),  # and no further
    ):
        monkeypatch.setattr(auto, "seconds", lambda u, b, p, each=each: each * b["reward"].numel())
        chosen, why = auto.choose_size(config, set(), OBS, ACT)
        assert (chosen.size, chosen.batch.size, chosen.batch.length) == (size, rows, length)
        assert f"{length} steps" in why


def test_what_the_user_gave_is_kept(tiny, monkeypatch):
    config = cpu(tiny())
    batch = dataclasses.replace(config.batch, size=4, length=1024)
    config = dataclasses.replace(config, batch=batch)
    monkeypatch.setattr(auto, "seconds", lambda *args: 1e6)
    chosen, _ = auto.choose_size(config, {"batch.size", "batch.length"}, OBS, ACT)
    assert (chosen.batch.size, chosen.batch.length) == (4, 1024)


def test_bfloat16_must_be_faster_to_be_kept(tiny, monkeypatch):
    config = dataclasses.replace(tiny(), precision="auto")
    update = Update(config, OBS, ACT)
    for times, best in (
        ({"float32": 1.0, "bfloat16": 0.5}, "bfloat16"),
        ({"float32": 1.0, "bfloat16": 0.97}, "float32"),
    ):
        monkeypatch.setattr(auto, "seconds", lambda u, b, precision, times=times: times[precision])
        chosen, why = auto.choose_precision(config, update)
        assert chosen.precision == best
        assert "ms" in why


@pytest.mark.parametrize("core", sorted(CORES))
def test_counted_flops_are_those_of_the_whole_length(tiny, core):
    update = Update(tiny("--core", core, "--behaviour.starts", "3"), OBS, ACT)
    extended = auto.count_flops(update, 2, 96)
    with FlopCounterMode(display=False) as counter:
        auto.dry_update(update, auto.fake_batch(update, 2, 96), "float32")
    assert extended == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_on_a_gpu_precisions_are_timed_by_the_updates_of_a_rank(tiny):
    config = tiny()
    assert auto.timed_shape(config, torch.device("cuda"), 2) == (1, 16)
    assert auto.timed_shape(config, torch.device("cpu"), 2) == (1, 16)
    large = dataclasses.replace(config, batch=BatchConfig(16, 1024))
    assert auto.timed_shape(large, torch.device("cuda"), 4) == (4, 1024)
    assert auto.timed_shape(large, torch.device("cpu"), 4) == (1, 64)


def test_a_precision_that_does_not_fit_is_not_chosen(tiny, monkeypatch):
    config = dataclasses.replace(tiny(), precision="auto")

    def seconds(update, batch, precision):
        if precision == "float32":
            raise torch.OutOfMemoryError
        return 1.0

    monkeypatch.setattr(auto, "seconds", seconds)
    assert auto.choose_precision(config, Update(config, OBS, ACT))[0].precision == "bfloat16"


@pytest.mark.parametrize("core", sorted(CORES))
def test_flops_are_those_of_pytorchs_counter(tiny, core):
    update = Update(tiny("--core", core), OBS, ACT)
    batch = auto.fake_batch(update, 1, 16)
    with FlopCounterMode(display=False) as theirs:
        auto.dry_update(update, batch, "float32")
    with Flops() as ours:
        auto.dry_update(update, batch, "float32")
    assert ours.total == theirs.get_total_flops() > 0
    # In inference composite operators come whole.
    layer, value = torch.nn.Linear(3, 5), torch.ones(2, 3)
    with torch.inference_mode(), Flops() as ours:
        layer(value)
    assert ours.total == 2 * 2 * 3 * 5


@pytest.mark.parametrize("features", FEATURES)
def test_counting_flops_leaves_no_trace_and_scales_with_the_batch(tiny, features):
    update = Update(tiny("--behaviour.features", features), OBS, ACT)
    before = {key: value.clone() for key, value in update.state_dict().items()}
    one, two = auto.count_flops(update, 1, 32), auto.count_flops(update, 2, 32)
    assert two == 2 * one > 0
    assert all((before[key] == value).all() for key, value in update.state_dict().items())
    assert all(param.grad is None for param in update.parameters())
