"""Reading a label from h, x and z of a trained agent."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from agent import probe
from agent.probe import Recorder, accuracy, chance
from agent.train import main as train


def drawn(rows=400, width=6):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_a_label_that_is_there_is_read_and_one_that_is_not_is_chance(kind):
    features = drawn()
    assert accuracy(features, (features[:, 2] > 0).long(), kind) > 0.95
    other = drawn(width=7)[:, 6]
    assert 0.35 < accuracy(features, (other > 0).long(), kind) < 0.65


def test_only_the_mlp_reads_a_product():
    features = drawn(1000, 3)
    classes = (features[:, 0] * features[:, 1] > 0).long()
    assert accuracy(features, classes, "linear") < 0.65
    assert accuracy(features, classes, "mlp") > 0.9


def test_nothing_is_learned_from_the_rows_that_count():
    features, classes = torch.eye(10), torch.tensor([0, 1] * 5)
    assert accuracy(features, classes, "mlp") in (0.0, 0.5)  # every row has a feature of its own
    assert chance(torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 1, 0])) == 0.5


def test_labels_and_features_are_those_of_their_steps():
    recorder = Recorder("vector", 1, when=1, ages=[2, 4])
    core = SimpleNamespace(out=2)
    actor = SimpleNamespace(update=SimpleNamespace(world=SimpleNamespace(core=core)))
    for age in range(5):
        ends = 3 if age > 2 else 4  # slot 3 ends early
        ids = np.arange(ends)
        obs = {
            "vector": np.stack([ids, ids % 2 + 10 * (age != 1)], 1).astype(np.float32),
            "episode": np.full(ends, 7),
            "age": np.full(ends, age),
        }
        rows = torch.from_numpy(ids).float()[:, None]
        actor.latents = {"hz": rows.repeat(1, 3) + 100 * age, "x": -rows}
        recorder(ids, obs, actor)
    features, classes = recorder.data()
    assert classes.tolist() == [0, 1, 0]
    assert features[4]["h"].tolist() == [[400, 400], [401, 401], [402, 402]]
    assert features[2]["z"].tolist() == [[200], [201], [202]]
    assert features[2]["x"].tolist() == [[0], [-1], [-2]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    flags = ["--task", "bsuite_memory_len_L5", "--core", "gru", "--preset", "bsuite_small"]
    assert train([*flags, "--stop.steps", "20", "--logdir", str(folder)]) == 0
    return folder


def test_the_command_writes_what_it_prints(folder, capsys):
    flags = ["--logdir", str(folder), "--label", "vector:2", "--at", "1", "5", "--episodes", "60"]
    assert probe.main(flags) == 0
    result = json.loads((folder / "probe.json").read_text())
    assert [row["age"] for row in result["rows"]] == [1, 5]
    assert result["episodes"] == 60
    printed = capsys.readouterr().out
    assert "vector:2 at step 0, 60 episodes" in printed
    assert f"{result['rows'][1]['x/mlp']:10.3f}" in printed.splitlines()[-1]


@pytest.mark.parametrize(
    ("label", "words"),
    [
        ("vector", "expected KEY:INDEX"),
        ("vector:9", "the observations are vector (3,)"),
        ("image:0", "the observations are vector (3,)"),
        ("vector:1", "it took 1 values in 8 episodes"),
    ],
)
def test_a_label_that_cannot_be_used_is_one_line(folder, label, words, capsys):
    flags = ["--logdir", str(folder), "--label", label, "--at", "1", "--episodes", "8"]
    assert probe.main(flags) == 2
    assert words in capsys.readouterr().err
