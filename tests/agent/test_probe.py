"""Reading labels from h, x and z of recorded episodes."""

import numpy as np
import pytest
import torch

from agent.diagnostics import probe
from agent.diagnostics.probe import chance, class_label, maze_labels, score, split
from agent.diagnostics.recording import Episode

ROWS = 400
EACH = torch.arange(ROWS)  # every row an episode of its own


def drawn(rows=ROWS, width=6):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_a_label_that_is_there_is_read_and_one_that_is_not_is_chance(kind):
    features = drawn(width=7)
    there, absent = features[:, 2] > 0, features[:, 6] > 0
    assert score(features[:, :6], there.long(), EACH, "class", kind) > 0.95
    assert 0.35 < score(features[:, :6], absent.long(), EACH, "class", kind) < 0.65


def test_only_the_mlp_reads_a_product():
    features = drawn(1000, 3)
    classes = (features[:, 0] * features[:, 1] > 0).long()
    assert score(features, classes, torch.arange(1000), "class", "linear") < 0.65
    assert score(features, classes, torch.arange(1000), "class", "mlp") > 0.9


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_cells_and_places_are_read_too(kind):
    features = drawn()
    cells = (features[:, :3] > 0).float()
    assert score(features, cells, EACH, "cells", kind) > 0.95
    places = torch.stack([features[:, :2], 3 * features[:, 2:4]], 1)
    line = chance(places, EACH, "places")
    assert score(features, places, EACH, "places", kind) < 0.1 * line
    assert line == pytest.approx(2.5, abs=0.4)  # mean length of N(0, 1) and of N(0, 9) in 2-D


def test_rows_of_one_episode_all_learn_or_all_count():
    episode = torch.tensor([3, 3, 5, 5, 7, 7, 8, 8, 9, 9])
    learns, counts = split(episode, 0.2)
    assert counts.tolist() == [False] * 8 + [True] * 2
    assert (learns != counts).all()
    # Rows of an episode share a label and a feature that tells the episode: nothing carries over.
    episode = torch.arange(40).repeat_interleave(10)
    features = torch.eye(40)[episode]
    classes = (episode % 2).long()
    assert score(features, classes, episode, "class", "mlp") == pytest.approx(0.5)


def test_chance_is_the_best_constant_of_the_rows_that_learn():
    assert chance(torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 1, 0]), torch.arange(10), "class") == 0.5
    cells = torch.tensor([[1.0, 0.0]] * 8 + [[1.0, 1.0]] * 2)
    assert chance(cells, torch.arange(10), "cells") == 0.5


def episodes():
    """Three, of 6, 6 and 4 steps; features tell the step and the episode."""
    out = []
    for n, length in enumerate((6, 6, 4)):
        step = np.arange(length)
        steps = {
            "reward": np.zeros(length, np.float32),
            "vector": np.stack([np.full(length, n % 2) + 10 * (step != 1), step], 1),
            "label/agent_pos": np.stack([step, step], 1).astype(np.float32),
            "label/agent_dir": np.tile([0.0, 1.0], (length, 1)).astype(np.float32),
            "label/maze_layout": np.full((length, 2, 2), n, np.float32),
            "label/targets_vec": np.full((length, 3, 2), n, np.float32),
        }
        latents = {t: {part: torch.tensor([n, t]) for part in "hxz"} for t in range(length)}
        out.append(Episode(steps, latents))
    return out


def test_labels_are_those_of_their_steps_and_episodes():
    label = class_label(episodes(), "vector", 0, when=1, age=3)
    assert label.targets.tolist() == [0, 1, 0]
    assert label.where == [(0, 3), (1, 3), (2, 3)]
    assert class_label(episodes(), "vector", 0, when=1, age=5).where == [(0, 5), (1, 5)]
    with pytest.raises(ValueError, match="it took 1 values in 3 episodes of 2 steps or more"):
        class_label(episodes(), "vector", 1, when=1, age=0)


def test_the_layout_is_read_with_the_place_and_the_objects_without():
    labels = maze_labels(episodes(), 1)
    assert labels["layout"].where == [(0, 1), (0, 5), (1, 1), (1, 5), (2, 1)]
    assert labels["layout"].targets[:, 0].tolist() == [0, 0, 1, 1, 2]
    assert labels["layout"].told[1].tolist() == [5, 5, 0, 1]
    assert labels["objects"].told.shape == (5, 0)
    assert labels["objects"].targets.shape == (5, 3, 2)
    assert {1, 5} <= probe.ages_of("memory_maze_9x9", [1])
