"""What cores cost, by parts, and widths and train ratios that make it equal."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from agent import auto
from agent.update import Update
from configs import load as configs
from configs.load import ConfigError
from envs.env import Space
from launch import budget, cost
from launch.budget import Budget, matched
from launch.solve import Widths
from worldmodels.cores import CORES

ROOT = Path(__file__).parents[2]
OBS, ACT = {"vector": Space("vector", (3,))}, Space("discrete", (1,), (3,))
ALL = ["gru", *sorted(set(CORES) - {"gru"})]
TASK = "test_counter"
SHORT = {"batch.size": 2, "batch.length": 16, "behaviour.horizon": 2}
AS_WIDE = [  # h of 32 numbers
    *("--s3m.deter", "32", "--transformer.width", "32", "--rlt.width", "32"),
    *("--elmur.width", "32", "--rate.width", "32"),
]


@pytest.fixture
def small(tiny):
    return lambda core, *flags: Update(tiny("--core", core, *flags), OBS, ACT)


@pytest.mark.parametrize(
    ("grad", "cores"), [("reinforce", CORES), ("dynamics", ("gru", "s3m", "elmur"))]
)
def test_all_but_the_sequence_part_costs_the_same_where_h_is_as_wide(small, grad, cores):
    flags = (*AS_WIDE, "--behaviour.features", "output", "--behaviour.actor_grad", grad)
    rest = {}
    for core in cores:
        update = small(core, *flags)
        rest[core] = cost.update_flops(update, "total") - cost.update_flops(update, "sequence")
    assert rest["gru"] > 0
    assert all(value == pytest.approx(rest["gru"], rel=1e-3) for value in rest.values()), rest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("features", "cores"),
    [
        ("hidden", ("gru", "transformer", "rlt", "elmur")),  # x is as wide as h
        ("full", ("rlt", "elmur")),
        ("full", ("gru", "transformer")),  # x is h, and is not read twice
    ],
)
def test_that_holds_for_a_policy_that_reads_x_too(small, features, cores):
    rest = []
    flags = (*AS_WIDE, "--behaviour.features", features, "--elmur.memory", "shared")
    for core in cores:
        update = small(core, *flags)
        rest.append(cost.update_flops(update, "total") - cost.update_flops(update, "sequence"))
    assert rest == pytest.approx([rest[0]] * len(cores), rel=1e-3)


@pytest.mark.parametrize("core", sorted(CORES))
def test_the_forward_is_that_of_the_core_with_prior_and_posterior(small, core):
    rows, length = 2, 64
    world = small(core).world
    batch = auto.fake_batch(small(core), rows, length)
    embed, action = torch.randn(rows, length, world.encoder.out), torch.randn(rows, length, 3)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        carry, noise = world.initial(rows, batch["age"][:, 0]), world.noise(rows, length)
        out, _ = world.observe(embed, action, batch["is_first"], carry, noise, batch["plan"])
        world.prior(out["h"])
    parts = [*world.prior.parameters(), *world.posterior.parameters()]
    heads = 2 * rows * length * sum(param.numel() for param in parts if param.dim() > 1)
    expected = world.core.flops(rows, length) + heads
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.02)


def test_a_decision_costs_every_weight_once_and_carries_the_state(small):
    update = small("gru")
    world = update.world
    used = [world.encoder, world.core, world.posterior, update.actor]
    weights = [p for module in used for p in module.parameters() if p.dim() > 1]
    weights = [p for p in weights if p is not world.core.gate_bias]
    assert cost.acting_flops(update) == 2 * sum(param.numel() for param in weights)
    assert cost.state_bytes(update) == 4 * world.core.out


def test_memory_is_weights_and_what_the_backward_keeps():
    value, weight = torch.randn(5, 7), torch.randn(7, 3, requires_grad=True)
    with cost.kept_bytes() as kept:
        torch.tanh(value @ weight + value @ weight)  # values once, and what tanh gave
    assert kept == [4 * (5 * 7 + 5 * 3)]
    updates = [Budget("debug", TASK, {"batch.length": n}).update("s3m", {}) for n in (16, 32)]
    one, two = map(cost.memory_bytes, updates)
    weights = 16 * cost.part_parameters(updates[0], "total")
    assert two - weights == pytest.approx(2 * (one - weights))
    assert one > weights


@pytest.mark.parametrize("core", sorted(CORES))
@pytest.mark.parametrize("match", budget.MEASURES)
def test_the_cost_of_wide_models_is_known_from_small_ones(core, match):
    ways = Budget("1m", TASK, SHORT)
    widths, measure = Widths(ways.config(core, {})), budget.MEASURES[match]
    value = widths.fitted(lambda settings: measure(ways.update(core, settings), "sequence"))
    for settings in ({}, widths.at(6)):
        counted = measure(ways.update(core, settings), "sequence")
        assert value(settings) == pytest.approx(counted, rel=1e-3)


@pytest.mark.parametrize(("match", "cores"), [("params", ALL), ("flops", ["gru", "elmur"])])
def test_every_core_gets_within_2_percent_of_the_first_in_its_sequence_part_and_in_all(
    match, cores
):
    solved = matched(cores, match, "1m", TASK, SHORT)
    assert list(solved) == cores
    assert solved["gru"] == {}
    ways = Budget("1m", TASK, SHORT)
    updates = {core: ways.update(core, solved[core]) for core in cores}
    for part in budget.PARTS:
        counts = [budget.MEASURES[match](updates[core], part) for core in cores]
        assert counts == pytest.approx([counts[0]] * len(cores), rel=0.02), solved
    # Its policy reads h alone: as wide as that of gru, it costs the same in all that reads it.
    assert {update.world.h for update in updates.values()} == {512}


@pytest.mark.slow
@pytest.mark.parametrize("match", budget.MEASURES)
def test_so_it_does_at_12m_with_images(match):
    given = {"batch.size": 4, "batch.length": 64}
    solved = matched(ALL, match, "12m", "test_image", given)
    ways = Budget("12m", "test_image", given)
    updates = [ways.update(core, solved[core]) for core in ALL]
    for part in budget.PARTS:
        counts = [budget.MEASURES[match](update, part) for update in updates]
        assert counts == pytest.approx([counts[0]] * len(ALL), rel=0.02)


@pytest.mark.slow
def test_the_total_is_another_solution():
    cores = ["gru", "transformer"]
    solved = {p: matched(cores, "flops", "1m", TASK, SHORT, part=p) for p in budget.PARTS}
    assert solved["total"] != solved["sequence"]
    ways = Budget("1m", TASK, SHORT)
    total = solved["total"]
    gru, other = (cost.update_flops(ways.update(c, total[c]), "total") for c in cores)
    assert other == pytest.approx(gru, rel=0.02)


def test_another_core_may_be_the_first():
    solved = matched(["transformer", "gru"], "params", "1m", TASK, SHORT)
    ways = Budget("1m", TASK, SHORT)
    counts = [cost.part_parameters(ways.update(c, solved[c]), "sequence") for c in solved]
    assert counts[1] == pytest.approx(counts[0], rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("part", budget.PARTS)
def test_a_train_ratio_makes_an_environment_step_cost_the_same(part):
    cores = ["gru", "s3m", "transformer"]
    solved = matched(cores, "flops", "debug", TASK, SHORT, part=part, adjust="train_ratio")
    ways = Budget("debug", TASK, SHORT)
    costs = [cost.cost(ways.update(core, solved[core])) for core in cores]
    each = [found.per_step(part) for found in costs]
    assert each == pytest.approx([each[0]] * 3, rel=1e-4)
    assert solved["gru"] == {"loop.train_ratio": 32.0}
    # By hand: a step pays for 32 replayed steps, all of an update, and for one decision.
    of = costs[0].of(part).flops * 32 / 32
    assert each[0] == of + (costs[0].acting if part == "total" else 0)


def test_seconds_are_matched_by_the_train_ratio_alone(monkeypatch):
    monkeypatch.setattr(budget, "timed", lambda *_: {"gru": [1.0, 2.0, 9.0], "s3m": [0.5, 1.0]})
    how = {"part": "total", "adjust": "train_ratio"}
    solved = matched(["gru", "s3m"], "seconds", "debug", TASK, SHORT, **how)
    assert solved == {
        "gru": {"loop.train_ratio": 32.0},
        "s3m": {"loop.train_ratio": 85.3333},
    }
    with pytest.raises(ValueError, match="no smooth function of a width"):
        matched(["gru", "s3m"], "seconds", "debug", TASK, SHORT)


@pytest.mark.slow
def test_a_solution_is_a_preset_that_a_run_takes_and_records(tmp_path, capsys):
    words = ["--cores", "gru", "transformer", "--size", "1m", "--task", TASK, "--match", "params"]
    given = ["batch.size=2", "batch.length=16", "behaviour.horizon=3"]
    out = tmp_path / "presets"
    assert budget.main([*words, "--set", *given, "--rounds", "1", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert printed == (out / "table.md").read_text()
    assert "parameters, sequence: within 2 %" in printed
    assert "parameters, total: within 2 %" in printed
    assert sorted(path.name for path in out.iterdir()) == [
        "gru.yaml",
        "table.md",
        "transformer.yaml",
    ]
    run = tmp_path / "run"
    flags = ["--preset", str(out / "transformer.yaml"), "--task", TASK, "--logdir", str(run)]
    done = subprocess.run(
        [sys.executable, "-m", "agent.train", *flags, "--stop.updates", "2"],
        cwd=ROOT, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    saved = configs.load(run / "config.yaml")
    solved = matched(["gru", "transformer"], "params", "1m", TASK, {})["transformer"]
    assert (saved.core, saved.size, saved.batch.length) == ("transformer", "1m", 16)
    assert solved["transformer.width"] == saved.transformer.width
    assert solved["transformer.ffn"] == saved.transformer.ffn


def test_settings_of_a_named_preset_hold_for_all_cores():
    ways = Budget("debug", "bsuite_memory_len_0", {"preset": "bsuite_small", "seed": 3})
    config = ways.config("s3m", {})
    assert (config.size, config.core, config.seed) == ("debug", "s3m", 3)
    assert (config.batch.length, config.loss.repval, config.preset) == (128, 0, "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--size", "auto"], "name a size"),
        (["--match", "params", "--adjust", "train_ratio"], "changes no parameters"),
        (["--match", "seconds"], "needs --adjust train_ratio --part total"),
        (["--match", "flops", "--adjust", "train_ratio"], "one number: --part sequence, or total"),
        (["--set", "behaviour.horizons=3"], "did you mean 'behaviour.horizon'"),
        (["--set", "size=1m"], "size is no setting for all cores"),
        (["--task", "tmaze"], "tmaze"),
    ],
)
def test_a_wrong_command_is_one_line(words, message, capsys):
    assert budget.main(["--cores", "gru", "--size", "debug", "--task", TASK, *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_core_whose_widths_are_not_known_is_named(tiny, monkeypatch):
    monkeypatch.setattr("launch.solve.KNOBS", {})
    with pytest.raises(ValueError, match="no widths of core 'gru' are known"):
        Widths(tiny("--core", "gru"))


def test_size_auto_cannot_be_matched():
    with pytest.raises(ConfigError, match="name a size"):
        matched(["gru"], "flops", "auto", TASK, {})


def test_what_cannot_be_made_equal_is_named():
    lines = budget.misses({"gru": {}, "s3m": {}}, "flops", "debug", "tmaze_9", {})
    assert lines[0].startswith("--match flops, sequence: NOT within 2 %")
    assert not budget.misses({"gru": {}}, "flops", "debug", "tmaze_9", {})
