"""The benchmark counts what a pencil counts, and every flag changes what is measured."""

import dataclasses
import functools
import json
import math

import pytest
import torch

from agent import bench
from agent.profiling import bound, cell, growth, peak, rates
from agent.profiling.cell import PARTS, Cell
from worldmodels.scan import diag_scan

DEBUG = ["--size", "debug", "--batch", "2x8", "--rounds", "2", "--threads", "1"]
DEBUG += ["--products", "shipped"]  # the other choice is for the whole process, and its tests
CELL = Cell("s3m", "debug", "2x8", "no", "float32")


@pytest.fixture
def quick(monkeypatch):
    """Rates from small products, and no process of its own for the peak."""
    monkeypatch.setattr(bound, "measure", functools.partial(bound.measure, size=64, megabytes=1))
    monkeypatch.setattr(bench, "peak_apart", lambda cell, threads, products: 10**6)


def test_flops_are_those_of_a_linear_layer_and_a_scan_counted_by_hand():
    layer = torch.nn.Linear(3, 4, bias=False)
    x = torch.randn(5, 3)
    a, b = torch.full((2, 6), 0.5, requires_grad=True), torch.randn(2, 7, 2, 6)

    def step():
        layer(x).sum().backward()
        diag_scan(a, b, torch.zeros(2, 2, 6)).sum().backward()

    found = bound.cost(step)
    product = 2 * 5 * 3 * 4  # forward; the gradient of the weight is another, x needs none
    scan = 8 * 2 * 7 * 6  # forward; backward is a scan and the product for the gradient of a
    assert found.products == 2 * product
    assert found.flops == 2 * product + 3 * scan


def test_bytes_are_read_and_written_once_and_views_and_products_move_none():
    x, y = torch.ones(10, 10), torch.ones(10)
    number = 4
    for step, read, written in (
        (lambda: x + 1, 100, 100),
        (lambda: x.T, 0, 0),
        (lambda: x @ x, 0, 0),
        (lambda: torch.empty(50), 0, 0),
        (lambda: torch.mul(x, y.expand(10, 10)), 110, 100),
        (lambda: x.relu_(), 100, 100),
        (lambda: torch._foreach_mul_([x, y], 2.0), 110, 110),
    ):
        assert bound.cost(step).bytes == number * (read + written)


def test_the_scan_is_many_operators_on_a_cpu_and_moves_its_inputs_and_outputs():
    a, b, x0 = torch.ones(2, 6), torch.ones(3, 50, 2, 6), torch.ones(3, 2, 6)
    reset, x_reset = torch.zeros(3, 50, dtype=torch.bool), torch.zeros(3, 2, 6)
    found = bound.cost(lambda: torch.ops.worldmodels.diag_scan(a, b, x0, reset, x_reset))
    numbers = 2 * 6 + 2 * (3 * 50 * 2 * 6) + 2 * (3 * 2 * 6)
    assert found.bytes == 4 * numbers + 3 * 50
    assert found.operators > 2 * 50


def test_the_bound_is_products_at_the_fastest_rate_and_bytes_at_that_of_a_copy():
    found = bound.Rates({}, {"float32": 100.0, "bfloat16": 400.0}, {}, copy=10.0)
    cost = bound.Cost(flops=900, products=800, bytes=30, operators=1)
    assert found.bound(cost, "float32") == 800 / 100 + 30 / 10
    assert found.bound(cost, "bfloat16") == 800 / 400 + 30 / 10


def test_the_fastest_route_is_no_slower_than_matmul():
    found = bound.measure(torch.device("cpu"), size=64, megabytes=1)
    for name in ("float32", "bfloat16"):
        assert 0 < found.matmul[name] <= found.best[name]
    assert found.copy > 0


def test_the_machine_is_named_with_threads_and_products(monkeypatch, capsys):
    monkeypatch.setattr(growth, "operators", lambda *args: 1)
    bench.main([*DEBUG, "--operators", "--products", "shipped"])
    out = capsys.readouterr().out
    assert "threads   1" in out
    assert "products as shipped: as asked" in out


def test_behaviour_ends_where_its_gradients_are_done_and_the_worlds_are_to_come(
    tmp_path, monkeypatch
):
    learner = CELL.learner()
    laps = []

    def lap(clock, part):
        grads = [
            {param.grad is not None for param in module.parameters()}
            for module in (learner.update.actor, learner.update.world.encoder)
        ]
        laps.append((part, *grads))

    monkeypatch.setattr(cell.Clock, "lap", lap)
    cell.split(learner, CELL.loader(tmp_path, learner), 0)
    no, yes = {False}, {True}
    assert laps == [
        ("data", no, no),
        ("noise", no, no),
        ("world", no, no),
        ("imagination", no, no),
        ("behaviour", yes, no),
        ("world", yes, yes),
        ("optimiser", no, no),
    ]


def test_a_row_has_every_column_and_the_file_all_rounds(quick, tmp_path, capsys):
    file = tmp_path / "new.json"
    bench.main([*DEBUG, "--images", "yes", "no", "--json", str(file)])
    found = json.loads(file.read_text())
    assert [(row["core"], row["images"]) for row in found["cells"]] == [
        ("gru", "yes"),
        ("s3m", "yes"),
        ("gru", "no"),
        ("s3m", "no"),
    ]
    for row in found["cells"]:
        times = [*row["seconds"], *row["act"].values(), row["bound"]]
        assert set(row["parts"]) == set(PARTS)
        for rounds in row["parts"].values():
            assert len(rounds) == len(row["seconds"]) == 2
            times += rounds
        assert all(math.isfinite(value) and value > 0 for value in times)
        assert row["flops"] >= row["products"] > 0
        assert row["bytes"] > row["operators"] > 0
    header = capsys.readouterr().out.splitlines()[-5]
    for word in ("update s", "sum s", *PARTS, "x bound", "peak MB", "act 32 ms"):
        assert word in header


@pytest.mark.slow
def test_size_batch_and_precision_are_of_the_cell_and_change_the_update(quick, tmp_path):
    file = tmp_path / "new.json"
    sizes = ["--size", "debug", "1m", "--batch", "2x8", "4x8", "--precision", "float32", "bfloat16"]
    bench.main([*DEBUG, *sizes, "--cores", "s3m", "--rounds", "1", "--json", str(file)])
    rows = {
        tuple(row[key] for key in bench.KEY): row for row in json.loads(file.read_text())["cells"]
    }
    flops = {key[1:3] + key[4:]: row["flops"] for key, row in rows.items()}
    assert flops["1m", "2x8", "float32"] > flops["debug", "2x8", "float32"]
    assert flops["debug", "4x8", "float32"] > flops["debug", "2x8", "float32"]
    moved = [rows["s3m", "debug", "2x8", "no", kind]["bytes"] for kind in ("float32", "bfloat16")]
    assert moved[0] != moved[1]


@pytest.mark.slow
def test_a_larger_batch_has_a_higher_peak_in_a_process_of_its_own():
    small = peak.peak_apart(dataclasses.replace(CELL, batch="1x64"), 1, "shipped")
    assert 0 < small < peak.peak_apart(dataclasses.replace(CELL, batch="16x64"), 1, "shipped")


def result(seconds, world, rate):
    row = {**dataclasses.asdict(CELL), "seconds": seconds, "parts": {"world": world}}
    return {"rates": {"matmul": {"float32": rate}, "copy": rate / 2}, "cells": [row]}


def test_ratios_are_of_medians_with_the_extremes_of_all_pairs_of_rounds():
    old = result([4.0, 6.0, 5.0], [3.0, 3.0, 3.0], 100.0)
    new = result([2.0, 2.5, 3.0], [1.0, 2.0, 3.0], 90.0)
    machine, line = bench.compare(old, new)
    assert "float32 0.90x  copy 0.90x" in machine
    assert "update 2.00x (1.33..3.00)" in line
    assert "world 1.50x" in line
    new["cells"][0]["core"] = "gru"
    assert bench.compare(old, new) == [machine]


def test_results_of_another_version_are_refused(tmp_path):
    file = tmp_path / "old.json"
    file.write_text(json.dumps({"schema": bench.SCHEMA - 1, "cells": []}))
    with pytest.raises(ValueError, match="version"):
        bench.earlier(file)


def test_against_prints_ratios_and_trace_writes_one(quick, tmp_path, capsys):
    old, chrome = tmp_path / "old.json", tmp_path / "trace.json"
    flags = [*DEBUG, "--cores", "s3m"]
    bench.main([*flags, "--json", str(old)])
    assert "x (" not in capsys.readouterr().out
    bench.main([*flags, "--against", str(old), "--trace", str(chrome)])
    assert "x (" in capsys.readouterr().out
    assert "aten::addmm" in chrome.read_text()


def test_the_exponent_of_a_known_power_is_found():
    assert growth.exponent({x: 3 * x**1.5 for x in (2, 8, 32)}) == pytest.approx(1.5)


@pytest.mark.slow
def test_scaling_measures_lengths_horizons_and_environments_and_plots_them(
    monkeypatch, tmp_path, capsys
):
    for name, values in (("LENGTHS", (4, 8)), ("HORIZONS", (1, 2)), ("ENVIRONMENTS", (1, 2))):
        monkeypatch.setattr(growth, name, values)
    file = tmp_path / "out.json"
    bench.main([*DEBUG, "--scaling", "--json", str(file)])
    assert not list(tmp_path.glob("**/*.png"))
    found = json.loads(file.read_text())["scaling"]
    assert {name: list(by_core["gru"]) for name, by_core in found.items()} == {
        "T": ["4", "8"],
        "horizon": ["1", "2"],
        "environments": ["1", "2"],
    }
    assert "horizon^" in capsys.readouterr().out
    pytest.importorskip("matplotlib")
    bench.main([*DEBUG, "--scaling", "--plots", str(tmp_path)])
    assert {path.stem for path in tmp_path.glob("*.png")} == {"T", "horizon", "environments"}


def test_on_a_gpu_operators_of_s3m_do_not_grow_with_t_and_those_of_gru_do(capsys):
    device = growth.accelerator()
    count = {
        (core, where, length): growth.operators(core, "debug", length, where)
        for core in ("gru", "s3m")
        for where in ("cpu", device)
        for length in (8, 16)
    }
    assert count["s3m", device, 8] == count["s3m", device, 16]
    assert count["s3m", "cpu", 8] < count["s3m", "cpu", 16]
    assert count["gru", device, 8] < count["gru", device, 16]
    assert count["gru", "cpu", 8] < count["gru", "cpu", 16]


def test_a_flag_for_another_measurement_replaces_the_table(monkeypatch, capsys):
    monkeypatch.setattr(growth, "operators", lambda core, size, length, device: length)
    monkeypatch.setattr(rates, "env_rates", lambda steps: {"maze": 2.0})
    monkeypatch.setattr(rates, "replay_rates", lambda shape, steps: {"replay": 3.0})
    monkeypatch.setattr(rates, "loop_rate", lambda task, cell, threads, products, seconds: seconds)
    bench.main([*DEBUG, "--operators", "--rates", "--loop", "dmc_x", "--seconds", "7"])
    out = capsys.readouterr().out
    assert "T 1024: 1,024" in out
    assert "maze: 2.0" in out
    assert "replay: 3.0" in out
    assert "dmc_x, s3m, environment steps/s: 7.0" in out
    assert "x bound" not in out


def test_the_rate_of_a_run_begins_at_its_first_row_with_an_update():
    rows = [(0, 0, 1.0), (100, 1, 2.0), (150, 2, 3.0), (300, 3, 6.0)]
    keys = ("env_step", "update", "wall_seconds")
    lines = [json.dumps(dict(zip(keys, row, strict=True))) for row in rows]
    assert rates.read_rate("\n".join(lines)) == 200 / 4
    with pytest.raises(RuntimeError, match="too short"):
        rates.read_rate("\n".join(lines[:2]))


def test_replay_rates_are_of_both_kinds():
    found = rates.replay_rates((2, 8), 256)
    assert len(found) == 4
    assert all(value > 0 for value in found.values())
