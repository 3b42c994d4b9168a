"""`python -m agent.diagnose`: what it writes, what it prints, and what it refuses."""

import json

import numpy as np
import pytest
import torch

from agent import diagnose
from agent.diagnostics import influence
from agent.diagnostics.recording import record
from agent.evaluate import load_run
from agent.train import main as train

SMALL = ["--preset", "bsuite_small", "--batch.size", "4", "--batch.length", "16"]
SMALL += ["--loop.train_ratio", "8"]
FILES = {"horizon", "recall", "probe", "influence", "norm", "memory"}


def trained(folder, core, task="bsuite_memory_len_L9", *more):
    flags = ["--task", task, "--core", core, *SMALL, "--stop.steps", "80", *more]
    assert train([*flags, "--logdir", str(folder)]) == 0
    return folder


@pytest.fixture(autouse=True)
def few_gradients(monkeypatch):
    monkeypatch.setattr(influence, "LENGTH", 48)
    monkeypatch.setattr(influence, "STEPS", 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("run"), "elmur")


def result_of(folder):
    return json.loads((folder / "diagnostics" / "diagnostics.json").read_text())


def names(folder):
    return {path.stem for path in (folder / "diagnostics").glob("*.png")}


def test_the_command_writes_and_prints_every_diagnostic_of_the_core(folder, capsys):
    pytest.importorskip("matplotlib")
    assert diagnose.main(["--logdir", str(folder), "--episodes", "20", "--at", "8"]) == 0
    result = result_of(folder)
    assert set(result["diagnostics"]) == FILES
    assert set(result["skipped"]) == {"spectrum"}
    assert (result["episodes"], result["actions"], result["explore"]) == (20, [10, 10], 0.5)
    assert all(found["about"] for found in result["diagnostics"].values())
    assert names(folder) == FILES
    text = (folder / "diagnostics" / "diagnostics.json").read_text()
    assert text.count("\n") < 500  # a list of numbers is one line
    printed = capsys.readouterr().out
    assert (folder / "diagnostics" / "diagnostics.txt").read_text() == printed
    for name in FILES:
        assert f"\n{name}\n" in printed
    assert "spectrum: left out, core elmur has none: only s3m" in printed
    # Half of the actions are drawn uniformly, so some answers are right and some are not.
    row = result["diagnostics"]["recall"]["reward"]["rows"][0]
    assert row["age"] == 10
    assert 0.5 < row["mean"] <= 1
    read = result["diagnostics"]["probe"]["labels"]["vector:2 at step 0"]["rows"]
    assert [row["age"] for row in read] == [8]
    assert result["diagnostics"]["influence"]["leak"] == {"loss": 0, "h": 0}


def test_a_share_of_actions_is_drawn_uniformly(folder):
    config, run = load_run(folder)
    (last,) = (
        key for key, value in run["weights"].items() if key[:5] == "actor" and value.shape == (2,)
    )
    run["weights"][last] = torch.tensor([50.0, -50.0])
    seen = {}
    for explore in (0.0, 1.0):
        episodes = record(config, run, 8, set(), explore=explore).episodes
        seen[explore] = np.mean([episode.steps["action"].mean() for episode in episodes])
    assert seen[0.0] < 0.1
    assert 0.25 < seen[1.0] < 0.6  # the last action of an episode is none


def test_some_are_made_again_and_the_others_stay(folder):
    flags = ["--logdir", str(folder), "--episodes", "12", "--only"]
    assert diagnose.main([*flags, "norm"]) == 0
    before = result_of(folder)["diagnostics"]
    assert diagnose.main([*flags, "influence", "--steps", "3"]) == 0
    after = result_of(folder)
    assert after["actions"] == [3, 3]
    assert set(before) | {"influence"} == set(after["diagnostics"])
    assert before["norm"] == after["diagnostics"]["norm"]


def test_what_was_made_of_other_weights_goes(folder, tmp_path):
    file = folder / "diagnostics" / "diagnostics.json"
    assert diagnose.main(["--logdir", str(folder), "--episodes", "4", "--only", "norm"]) == 0
    file.write_text(json.dumps({**result_of(folder), "update": -1}))
    (folder / "diagnostics" / "probe.png").write_text("old")
    assert diagnose.main(["--logdir", str(folder), "--episodes", "4", "--only", "influence"]) == 0
    assert set(result_of(folder)["diagnostics"]) == {"influence"}
    assert "probe" not in names(folder)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--only", "spectrum"], "--only spectrum: core elmur has none: only s3m"),
        (["--only", "probe", "--label", "vector:9"], "the observations are vector (3,)"),
        (["--only", "probe", "--label", "image:0"], "the observations are vector (3,)"),
        (["--only", "probe", "--label", "vector:1"], "it took 1 values in 12 episodes"),
        (["--only", "probe", "--at", "99"], "episodes reach the steps 99: give more --episodes"),
    ],
)
def test_what_cannot_be_made_is_one_line(folder, flags, words, capsys):
    assert diagnose.main(["--logdir", str(folder), "--episodes", "12", *flags]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_a_folder_without_a_run_is_one_line(tmp_path, capsys):
    assert diagnose.main(["--logdir", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--label", "vector"], ["--explore", "2"], ["--steps", "-1"]])
def test_a_wrong_flag_is_refused(flags, capsys):
    with pytest.raises(SystemExit) as stop:
        diagnose.main(["--logdir", "none", *flags])
    assert stop.value.code == 2
    assert flags[0] in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("core", ["gru", "rate", "rlt", "s3m", "transformer"])
def test_every_core_is_diagnosed(tmp_path, core):
    folder = trained(tmp_path, core, "tmaze_4")
    assert diagnose.main(["--logdir", str(folder), "--episodes", "40"]) == 0
    own = {"s3m": {"spectrum"}, "rate": {"memory"}}.get(core, set())
    assert set(result_of(folder)["diagnostics"]) == FILES - {"memory"} | own
    ages = {row["age"] for row in result_of(folder)["diagnostics"]["recall"]["reward"]["rows"]}
    assert len(ages) > 1


@pytest.mark.slow
def test_memory_maze_has_places_layout_and_objects(tmp_path):
    pytest.importorskip("dm_control")
    more = ["--size", "debug", "--env.count", "1", "--env.time_limit", "30"]
    flags = ["--task", "memory_maze_9x9", "--core", "elmur", "--stop.steps", "200", *more]
    flags += ["--batch.size", "4", "--batch.length", "16", "--loop.train_ratio", "4"]
    assert train([*flags, "--logdir", str(tmp_path)]) == 0
    asked = ["--logdir", str(tmp_path), "--episodes", "12", "--steps", "40", "--at", "4"]
    assert diagnose.main([*asked, "--only", "recall", "probe"]) == 0
    found = result_of(tmp_path)["diagnostics"]
    assert set(found["probe"]["labels"]) == {"layout", "objects"}
    assert found["probe"]["labels"]["layout"]["rows"][0]["chance"] > 0.5
    assert sum(row["pictures"] for row in found["recall"]["place"]["rows"]) > 0
