"""Cores alone on diagnostic streams: training, streaming, interventions, and the command."""

import dataclasses
import functools
import json

import numpy as np
import pytest
import torch

from configs.load import resolve
from launch import recall, supervised
from launch.streams import RIGHT, UP, KCue, TMaze
from launch.supervised import Probe, check_against_step, disturb, evaluate, train
from worldmodels.cores import CORES

SMALL = ["--size", "debug", "--gru.deter", "32", "--model.units", "32", "--model.hidden", "32"]
FAST = ["--optim.lr", "1e-3", "--optim.warmup", "20"]


def rng(seed=0):
    return np.random.default_rng(seed)


def joined(pieces):
    return [np.concatenate(parts, 1) for parts in zip(*pieces, strict=True)]


def probe_of(core, task, seed=0):
    torch.manual_seed(seed)
    config = resolve(["--core", core, *SMALL, *FAST])
    return Probe(config, task.inputs, task.classes), config


def learned(task, length, updates=300, windows=1):
    probe, config = probe_of("gru", task)
    settings = {"rows": 32, "length": length, "windows": windows, "updates": updates}
    return probe, train(probe, task, config, rng(), **settings)


# Cores on streams


@pytest.mark.parametrize("kind", ["same", "turned", "halved"])
def test_drift_is_that_of_memories_one_segment_apart(kind):
    class Core:
        def initial(self, batch):
            return {"memory": torch.tensor([[3.0, 4.0]]).expand(batch, 2)}

    turns = {"same": torch.eye(2), "turned": torch.tensor([[0.0, 1.0], [-1.0, 0.0]])}

    def probe(piece, state, start):
        return None, {"memory": state["memory"] @ turns.get(kind, torch.eye(2) / 2)}

    probe.core = Core()
    cosine, ratio, change = {
        "same": (1, 1, 0), "turned": (0, 1, 2**0.5), "halved": (1, 0.5, 0.5)
    }[kind]  # fmt: skip
    piece = next(TMaze().walk(rng(), np.full(3, 9), np.ones(3), [(0, 10)]))
    pieces = [piece.cut(0, 5), piece.cut(5, 10), piece.cut(5, 10), piece.cut(9, 10)]
    found = supervised.drift(probe, pieces, 5)
    assert len(found) == 2  # nothing was written before the first, and the last is no segment
    for step in found:
        assert step == pytest.approx((cosine, ratio, change), abs=1e-6)


def test_long_trainings_tell_of_their_progress(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(supervised, "REPORT", 0)
    out = ["--out", str(tmp_path), "--cores", "gru", "--seeds", "0"]
    assert recall.main([*COMMAND, *out]) == 0
    assert "gru seed 0: update 3 of 3, loss " in capsys.readouterr().out


def test_drift_is_reported_for_cores_with_segments(tmp_path):
    out = ["--out", str(tmp_path), "--cores", "gru", "rate", "--seeds", "0", "--drift", "4"]
    assert recall.main([*COMMAND, *out]) == 0
    found = {row["core"]: row.get("drift") for row in results(tmp_path)}
    assert found["gru"] is None
    assert len(found["rate"]) == 3
    assert "| rate | 0 |" in (tmp_path / "table.md").read_text().split("from segment to segment")[1]


@pytest.mark.parametrize("core", sorted(CORES))
def test_streaming_in_pieces_equals_one_scan(core):
    task = TMaze()
    probe = probe_of(core, task)[0].double()
    piece = next(task.walk(rng(), np.full(4, 40), np.array([1, -1, 1, -1]), [(0, 41)]))
    with torch.no_grad():
        whole, _ = probe(piece, probe.core.initial(4), 0)
        state, parts = probe.core.initial(4), []
        for start in range(0, 41, 7):
            logits, state = probe(piece.cut(start, start + 7), state, start)
            parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("core", sorted(CORES))
def test_scan_is_checked_against_step(core, monkeypatch):
    probe, _ = probe_of(core, TMaze())
    piece = TMaze().train(rng(), 4, 30)
    assert check_against_step(probe, piece) < 1e-5
    step = probe.core.step
    monkeypatch.setattr(probe.core, "step", lambda u, first, state: step(-u, first, state))
    with pytest.raises(RuntimeError, match="by scan and by step differ"):
        check_against_step(probe, piece)


class Answers:
    """A probe that gives the answers (B, T) it was made with, and counts steps in its state."""

    class core:  # noqa: N801
        @staticmethod
        def initial(batch):
            return {"step": torch.zeros(batch)}

    def __init__(self, answers):
        self.answers = torch.as_tensor(answers)

    def __call__(self, piece, state, start):
        stop = start + piece.is_first.shape[1]
        assert (state["step"] == start).all()
        logits = torch.nn.functional.one_hot(self.answers[:, start:stop], 4).float()
        return logits, {"step": torch.full((len(logits),), float(stop))}


def test_a_success_needs_every_corridor_action_and_the_turn():
    _, targets, _ = joined(TMaze().test(rng(), 4, 12, 4))
    answers = targets.copy()
    answers[0, 5] = UP  # one wrong in the corridor
    answers[1, -1] = RIGHT  # a wrong turn
    score = evaluate(Answers(answers), TMaze().test(rng(), 4, 12, 4))
    assert score.row == 2 / 4
    assert score.last == 3 / 4
    assert score.each == pytest.approx(1 - 2 / 44)


def test_ignored_steps_do_not_count():
    pieces = [KCue(3, 4).train(rng(), 6, 9)]
    answers = np.maximum(pieces[0].targets, 0)
    assert evaluate(Answers(answers), pieces).each == 1
    assert evaluate(Answers(answers), pieces).row == 1


def test_change_is_asked_for_the_state_before_each_piece():
    starts = []

    def change(step, state):
        starts.append(step)
        return state

    targets = joined(TMaze().test(rng(), 4, 12, 4))[1]
    evaluate(Answers(targets), TMaze().test(rng(), 4, 12, 4), change)
    assert starts == [0, 4, 8, 10]  # of 11 steps; the query is alone


def test_disturbing_spares_phases():
    probe, _ = probe_of("s3m", TMaze())
    state = {"x": torch.ones(3, 2, 2, 16), "phase": torch.tensor([4, 5, 6])}
    gone = disturb(probe.core, "initial", 8, 8, state)
    assert torch.equal(gone["x"], probe.core.initial(3)["x"])
    noisy = disturb(probe.core, "noise", 8, 8, state)
    assert (noisy["x"] - 1).std() == pytest.approx(supervised.NOISE, rel=0.2)
    for after in (gone, noisy):
        assert torch.equal(after["phase"], state["phase"])


@pytest.mark.parametrize(("how", "step"), [("kept", 8), ("noise", 7), ("initial", 0)])
def test_only_the_query_is_disturbed(how, step):
    probe, _ = probe_of("s3m", TMaze())
    state = {"x": torch.ones(3, 2, 2, 16)}
    assert disturb(probe.core, how, 8, step, state) is state


@pytest.fixture(scope="module")
def walker():
    """A small gru that was trained on tmaze of length 9."""
    return learned(TMaze(), 9)[0]


def test_gru_learns_tmaze(walker):
    assert evaluate(walker, TMaze().test(rng(1), 100, 9, 960)).row == 1


@dataclasses.dataclass(frozen=True)
class Blind(TMaze):
    """The T-Maze without its cue."""

    def walk(self, *args):
        for piece in super().walk(*args):
            piece.inputs[..., 1] = 0
            yield piece


def test_without_the_cue_success_is_chance(walker):
    blind, _ = learned(Blind(), 9)
    assert 0.3 < evaluate(blind, Blind().test(rng(1), 100, 9, 960)).row < 0.7
    assert evaluate(walker, Blind().test(rng(1), 100, 9, 960)).row <= 0.7


@pytest.mark.parametrize("how", ["noise", "initial"])
def test_without_its_memory_the_gru_fails_at_the_turn(walker, how):
    change = functools.partial(disturb, walker.core, how, 7)
    score = evaluate(walker, TMaze().test(rng(1), 100, 9, 960), change)
    assert score.last < 0.8
    assert score.each > 0.85  # the corridor was walked with the memory


class AskedLast(KCue):
    """Every query at the last step, training too."""

    def train(self, rng, rows, length):
        return next(self.tell(rng, np.full(rows, length - 1), [(0, length)]))


@pytest.mark.parametrize("windows", [1, 2])
def test_no_gradient_goes_from_one_window_to_another(windows):
    task = AskedLast(facts=2, values=4)
    probe, config = probe_of("gru", task)
    of_values = probe.embed.weight[:, 2:6]
    before = of_values.clone()
    train(probe, task, config, rng(), rows=8, length=4, windows=windows, updates=1)
    # Told in the first half of a row, asked in the second.
    assert torch.equal(of_values, before) == (windows == 2)


def test_windows_must_fit_the_rows():
    with pytest.raises(ValueError, match="rows of 9 steps cannot be cut into 2 equal windows"):
        learned(TMaze(), 9, windows=2)


def test_a_budget_of_flops_ends_the_training():
    probe, config = probe_of("gru", TMaze())
    settings = {"rows": 4, "length": 9, "windows": 1}
    two = train(probe, TMaze(), config, rng(), updates=2, **settings)
    assert two.updates == 2
    forward = 2 * 4 * 9 * sum(layer.weight.numel() for layer in (probe.embed, probe.classify))
    forward += probe.core.flops(4, 9)
    assert 2 * forward < two.flops / 2 <= 3 * forward
    spent = train(probe, TMaze(), config, rng(), updates=9, flops=2.5 * two.flops, **settings)
    assert spent.updates == 5
    assert spent.flops == 2.5 * two.flops


# The command

COMMAND = [
    *("--task", "tmaze", "--size", "debug", "--length", "9", "--lengths", "9", "20"),
    *("--updates", "3", "--batch", "4", "--rows", "4"),
]


def results(folder):
    return [json.loads(line) for line in (folder / "results.jsonl").open()]


def test_the_command_writes_results_table_and_plot(tmp_path):
    out = ["--out", str(tmp_path), "--intervene", "noise", "initial"]
    assert recall.main([*COMMAND, *out, "--cores", "gru", "s3m", "--seeds", "0", "1"]) == 0
    rows = results(tmp_path)
    assert [(r["core"], r["seed"]) for r in rows[::6]] == [
        ("gru", 0),
        ("s3m", 0),
        ("gru", 1),
        ("s3m", 1),
    ]
    assert [(r["intervene"], r["length"]) for r in rows[:6]] == [
        ("kept", 9),
        ("kept", 20),
        ("noise", 9),
        ("noise", 20),
        ("initial", 9),
        ("initial", 20),
    ]
    assert all(0 <= r[key] <= 1 for r in rows for key in ("row", "last", "each"))
    table = (tmp_path / "table.md").read_text()
    assert table.count("| gru | kept |") == 3  # two seeds and the mean
    assert "| chance |  |  | 0.500 | 0.500 |" in table
    assert (tmp_path / "plot.png").exists()


def test_the_same_command_goes_on_where_it_stopped(tmp_path, monkeypatch):
    out = ["--out", str(tmp_path), "--cores", "gru", "s3m"]
    recall.main([*COMMAND, *out, "--seeds", "0"])
    before, made = (tmp_path / "results.jsonl").read_text(), []
    real = recall.one
    monkeypatch.setattr(recall, "one", lambda *a: made.append(a[2:]) or real(*a))
    recall.main([*COMMAND, *out, "--seeds", "0", "1"])
    assert made == [("gru", 1), ("s3m", 1)]
    assert (tmp_path / "results.jsonl").read_text().startswith(before)
    # A seed gives the same numbers whatever else is in the grid.
    recall.main([*COMMAND, "--out", str(tmp_path / "other"), "--cores", "s3m", "--seeds", "1"])
    last = results(tmp_path)[-2:]
    assert [row["loss"] for row in results(tmp_path / "other")] == [row["loss"] for row in last]


def test_a_folder_holds_one_set_of_settings(tmp_path, capsys):
    out = ["--out", str(tmp_path), "--cores", "gru", "--seeds", "0"]
    assert recall.main([*COMMAND, *out]) == 0
    assert recall.main([*COMMAND, *out, "--lr", "0.1"]) == 2
    assert "another lr" in capsys.readouterr().err


def test_a_wrong_setting_is_one_line(tmp_path, capsys):
    assert recall.main([*COMMAND, "--out", str(tmp_path), "--set", "gru.detr=8"]) == 2
    assert "did you mean 'gru.deter'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())  # so that the right one can be given


def test_variants_of_a_core_stand_side_by_side(tmp_path):
    out = [
        "--out",
        str(tmp_path),
        "--cores",
        "gru",
        "gru:gru.deter=16:gru.blocks=2",
        "--seeds",
        "0",
    ]
    assert recall.main([*COMMAND, *out]) == 0
    counts = {row["core"]: row["parameters"] for row in results(tmp_path)}
    assert list(counts) == ["gru", "gru:gru.deter=16:gru.blocks=2"]
    assert len(set(counts.values())) == 2


@pytest.mark.parametrize(
    "flags",
    [
        ["--set", "gru.deter=16"],
        ["--size", "1m"],
        ["--length", "12"],
        ["--updates", "4"],
        ["--flops", "1"],
        ["--batch", "5"],
        ["--windows", "3"],
        ["--lr", "0.01"],
        ["--warmup", "1"],
        ["--smoothing", "0.1"],
        ["--decay", "1"],
    ],
    ids=lambda flags: flags[0],
)
def test_each_option_of_training_changes_the_result(flags, tmp_path):
    losses = []
    for name, more in (("plain", []), ("changed", flags)):
        out = ["--out", str(tmp_path / name), "--cores", "gru", "--seeds", "0"]
        assert recall.main([*COMMAND, *out, *more]) == 0
        losses.append(results(tmp_path / name)[0]["loss"])
    assert losses[0] != losses[1]
