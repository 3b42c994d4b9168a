"""What rows of a batch start from: nothing, a stored state, or the state where a row ended."""

import json
import shutil

import numpy as np
import pytest
import torch

from agent import seeding, staleness
from agent.auto import fake_batch
from agent.carry import Packing, Streamed, spacing
from agent.checkpoint import Checkpoints
from agent.checks import RunError
from agent.learner import Learner
from agent.run import run
from agent.train import main as train
from agent.update import Update
from configs.load import resolve
from envs.env import Space
from replay.states import HEADER
from worldmodels.cores import CORES
from worldmodels.world_model import tree_map

OBS, ACT = {"vector": Space("vector", (3,))}, Space("discrete", (1,), (4,))
MODES = ("zero", "stored", "stream")


def pairs(modes, fast):
    """All pairs (core, mode), slow but for the `fast` ones."""
    return [
        pytest.param(core, mode, marks=[] if (core, mode) in fast else pytest.mark.slow)
        for core in sorted(CORES)
        for mode in modes
    ]


RESUMED = pairs(MODES, [("s3m", "stored"), ("s3m", "stream")])  # zero: test_run.py
MEASURED = pairs(MODES[1:], [("s3m", "stream"), ("elmur", "stored")])
# bsuite's episodes of 32 records; windows of 12: starts at ages 0, 12 and 24.
SMALL = [
    *("--task", "bsuite_memory_len_L30", "--size", "debug", "--precision", "float32"),
    *("--device", "cpu", "--threads", "1", "--batch.size", "3", "--batch.length", "12"),
    *("--behaviour.horizon", "2", "--loop.train_ratio", "6", "--loop.mode", "lockstep"),
    *("--env.count", "2", "--optim.warmup", "0"),
]


def make(tiny, core, *flags):
    torch.manual_seed(0)
    return Update(tiny("--core", core, *flags), OBS, ACT)


def leaves(tree):
    out = []
    tree_map(out.append, tree)
    return out


def lived_in(update, rows=3, length=10):
    """A carry after some steps, with no leaf at its initial value."""
    batch = fake_batch(update, rows, length)
    return update(batch, update.noise(rows, length, seeding.generator(0, "test")))[2]


# -- carried on ---------------------------------------------------------------------------------


@pytest.mark.parametrize("core", sorted(CORES))
def test_two_chunks_carried_on_are_one_scan_and_no_gradient_crosses(tiny, core):
    """From the middle of an episode, with a reset in each chunk, in float64."""
    update = make(tiny, core).double()
    world, length = update.world, 9
    random = torch.Generator().manual_seed(0)
    embed = torch.randn(3, 2 * length, world.encoder.out, dtype=torch.float64, generator=random)
    action = update.policy.encode(fake_batch(update, 3, 2 * length)["action"]).double()
    is_first = torch.zeros(3, 2 * length, dtype=torch.bool)
    is_first[0, 5] = is_first[1, 14] = True
    age = torch.tensor([7, 20, 2])[:, None] + torch.arange(2 * length)
    age[0, 5:], age[1, 14:] = torch.arange(13), torch.arange(4)
    noise = world.noise(3, 2 * length, generator=random)
    whole, _ = world.observe(embed, action, is_first, world.initial(3, age[:, 0]), noise)
    streamed, windows, parts = Streamed(world), [(0, 0), (1, 40), (0, 90)], []
    embed.requires_grad_()
    for at in (0, length):
        inputs = [part[:, at : at + length] for part in (embed, action, is_first, noise)]
        ages = age[:, at : at + length]
        plan = world.core.plan(inputs[2].numpy(), ages.numpy())
        here = [(stream, step + at) for stream, step in windows]
        batch = {"reward": inputs[0], "age": ages, **streamed.ahead(here)}
        out, carry = world.observe(*inputs[:3], update.carry(batch), inputs[3], plan)
        parts.append(out)
        streamed.after(here, length, tree_map(torch.Tensor.detach, carry), 0)
    for key in ("h", "x", "z"):
        joined = torch.cat([part[key] for part in parts], 1)
        torch.testing.assert_close(joined, whole[key], rtol=1e-9, atol=1e-9)
    assert streamed.stats() == {"replay/carried": 0.5}  # none, then all
    parts[1]["h"].sum().backward()
    assert (embed.grad[:, :length] == 0).all()
    assert (embed.grad[:, length:] != 0).any()


def test_a_row_that_jumped_starts_afresh_and_the_others_do_not(tiny):
    update = make(tiny, "s3m")
    streamed, carry = Streamed(update.world), lived_in(update)
    assert not streamed.ahead([(0, 0)] * 3)["carried"].any()
    streamed.after([(0, 0), (0, 10), (1, 10)], 10, carry, 0)
    batch = {**fake_batch(update, 3, 10), **streamed.ahead([(0, 10), (1, 20), (1, 20)])}
    assert batch["carried"].tolist() == [True, False, True]
    assert streamed.since == [1, 0, 1]
    fresh = update.world.initial(3)
    for got, kept, new in zip(*map(leaves, (update.carry(batch), carry, fresh)), strict=True):
        assert torch.equal(got[[0, 2]], kept[[0, 2]])
        assert torch.equal(got[1], new[1])
    assert streamed.stats() == {"replay/carried": pytest.approx(1 / 3)}  # none, then two in three
    assert streamed.stats() == {}


def test_after_an_update_that_was_left_out_every_row_starts_afresh(tiny):
    update = make(tiny, "gru", "--optim.nonfinite", "skip")
    learner, streamed = Learner(update, 0, "float32"), Streamed(update.world)
    batch = fake_batch(update, 2, 16)
    learner.train(batch)
    assert learner.carry is not None
    batch["reward"][0, 0] = torch.nan
    learner.train(batch)
    streamed.after([(0, 0), (0, 16)], 16, learner.carry, 1)
    assert not streamed.ahead([(0, 16), (0, 32)])["carried"].any()
    assert streamed.since == [0, 0]


def test_the_carry_of_a_checkpoint_is_that_of_the_rows(tiny):
    update = make(tiny, "elmur")
    streamed, windows = Streamed(update.world), [(0, 0), (0, 10), (1, 10)]
    streamed.ahead(windows)
    streamed.after(windows, 10, lived_in(update), 0)
    other = Streamed(update.world)
    other.restore(streamed.state())
    got, expected = (s.ahead([(0, 10), (0, 20), (1, 20)]) for s in (other, streamed))
    assert got["carried"].all()
    assert all(map(torch.equal, leaves(got["carry"]), leaves(expected["carry"])))
    assert other.since == streamed.since == [1, 1, 1]


# -- stored -------------------------------------------------------------------------------------


@pytest.mark.parametrize("core", sorted(CORES))
def test_a_state_as_bytes_and_back_is_the_same_bit_for_bit(tiny, core):
    update = make(tiny, core)
    packing, carry = Packing(update.world), lived_in(update)
    rows = packing.pack(carry)
    assert {len(row) for row in rows} == {packing.bytes}

    def same(got, leaf):
        assert got.dtype == leaf.dtype
        assert torch.equal(got.flip(0), leaf)

    tree_map(same, packing.unpack(rows[::-1]), carry)


@pytest.mark.parametrize(
    ("flags", "segment", "expected"),
    [
        ((), 1, 16),
        ((), 8, 16),
        (("--replay.state_every", "4"), 2, 4),
        ((), 3, None),  # states within segments
        (("--replay.state_every", "5"), 1, None),  # windows end between states
        (("--replay.state_every", "32"), 1, None),
    ],
)
def test_states_stand_where_windows_end_and_segments_begin(tiny, flags, segment, expected):
    config = tiny("--core", "elmur", *flags)
    if expected:
        assert spacing(config, segment) == expected
        return
    with pytest.raises(ValueError, match="must divide batch"):
        spacing(config, segment)


def test_a_spacing_that_does_not_fit_is_refused_before_the_first_step(tmp_path):
    flags = [*SMALL, "--core", "elmur", "--replay.start", "stored", "--logdir", str(tmp_path)]
    config = resolve([*flags, "--replay.state_every", "4"])
    with pytest.raises(RunError, match=r"state_every \(4\) .* multiple of .* of elmur \(3\)"):
        run(config, {"replay.start"})
    assert not (tmp_path / "config.yaml").exists()


# -- whole runs ---------------------------------------------------------------------------------


def newest(folder):
    return Checkpoints.load(Checkpoints(folder / "checkpoints").published()[-1])


def ran(folder, *flags):
    assert train([*SMALL, *flags, "--logdir", str(folder)]) == 0
    return newest(folder)


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("core", "mode"), RESUMED)
def test_every_start_resumes_bit_for_bit(tmp_path, core, mode):
    """Also after steps and their states were evicted, and states refreshed and written over."""
    flags = ("--core", core, "--replay.start", mode, "--replay.capacity", "176")
    whole = ran(tmp_path / "whole", *flags, "--stop.steps", "260")
    for steps in ("200", "260"):
        parts = ran(tmp_path / "parts", *flags, "--stop.steps", steps)
    assert whole["learner"]["updates"] == parts["learner"]["updates"] > 15
    for key, value in whole["learner"]["model"].items():
        assert torch.equal(value, parts["learner"]["model"][key]), key
    assert rows(tmp_path / "whole")[-1].get("replay/states_damaged", 0) == 0


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of a run of each start."""
    folder = tmp_path_factory.mktemp("runs")
    for mode in MODES:
        ran(folder / mode, "--core", "s3m", "--replay.start", mode, "--stop.steps", "150")
    return {mode: folder / mode for mode in MODES}


def test_each_start_trains_otherwise_and_only_stored_writes_states(runs):
    weights = {}
    for mode, folder in runs.items():
        model = newest(folder)["learner"]["model"]
        weights[mode] = torch.cat([value.flatten() for value in model.values()])
        assert (folder / "replay" / "states").exists() == (mode == "stored")
        last = rows(folder)[-1]
        assert ("replay/carried" in last) == (mode != "zero")
        assert last.get("replay/carried", 0.5) > 0.3
    assert not torch.equal(weights["zero"], weights["stored"])
    assert not torch.equal(weights["zero"], weights["stream"])


def versions(folder):
    """The update that wrote each state on disk."""
    data = (folder / "replay" / "states").read_bytes()
    index = newest(folder)["run"]["replay"]["states"]
    slots = [int(slot) for _, found in index for slot in found if slot >= 0]
    size = len(data) // (max(slots) + 1)
    return [HEADER.unpack_from(data, slot * size)[4] for slot in slots]


def test_states_are_refreshed_by_training(runs):
    """The actor wrote them evenly over the run, half of them by the first half of updates."""
    found, updates = versions(runs["stored"]), newest(runs["stored"])["learner"]["updates"]
    assert len(found) > 8
    assert sum(update >= updates // 2 for update in found) > 0.7 * len(found)


def test_a_run_whose_states_are_damaged_goes_on_from_the_initial_state(runs, tmp_path):
    shutil.copytree(runs["stored"], tmp_path / "run")
    states = tmp_path / "run" / "replay" / "states"
    states.write_bytes(bytes(byte ^ 1 for byte in states.read_bytes()))
    ran(tmp_path / "run", "--core", "s3m", "--replay.start", "stored", "--stop.steps", "180")
    last = rows(tmp_path / "run")[-1]
    assert last["replay/states_damaged"] > 0
    assert np.isfinite(last["loss/total"])


def test_offline_states_come_from_training(runs, tmp_path):
    flags = ("--core", "s3m", "--replay.start", "stored", "--replay.from", str(runs["zero"]))
    settings = [word for word in SMALL if word not in ("--loop.mode", "lockstep")]
    settings += ["--loop.mode", "offline", "--stop.updates", "40", "--logdir", str(tmp_path)]
    assert train([*settings, *flags]) == 0
    assert len(versions(tmp_path)) > 3


# -- how wrong they are -------------------------------------------------------------------------

EXACT = (
    "--optim.lr",
    "1e-30",
    "--model.groups",
    "1",
    "--model.classes",
    "1",
    "--stop.steps",
    "150",
)


@pytest.mark.parametrize(("core", "mode"), MEASURED)
def test_states_of_weights_that_stay_and_z_without_chance_have_no_error(
    tmp_path, capsys, core, mode
):
    ran(tmp_path, "--core", core, "--replay.start", mode, *EXACT)
    assert staleness.main(["--logdir", str(tmp_path)]) == 0
    table = json.loads((tmp_path / "staleness.json").read_text())["rows"]
    assert sum(row["states"] for row in table) >= (1 if mode == "stream" else 5)
    for row in table:
        assert row["redrawn/first"] < 1e-5
        assert row["zero/first"] > 1e-3
        if mode == "stored":
            assert row["state/first"] < 1e-4
            assert row["state/last"] < 1e-4
        else:  # rows that jumped into an episode know only its end
            assert row["state/first"] < row["zero/first"]
    assert f"replay.start {mode}" in capsys.readouterr().out


def test_a_run_without_states_has_none_to_look_at(runs, capsys):
    assert staleness.main(["--logdir", str(runs["zero"])]) == 2
    assert "start from the initial state" in capsys.readouterr().err
