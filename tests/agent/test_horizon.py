"""Open-loop errors by steps ahead, by length of the context, and by age of what they need."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from agent.diagnostics import horizon, recall
from agent.diagnostics.horizon import errors, powers, references, table
from agent.diagnostics.recall import by_cue, place_ages, queries
from agent.diagnostics.recording import Episode, Recording
from envs.env import Space

SPACES = {"vector": Space("vector", (2,)), "token": Space("discrete", (2,), (2, 3))}
UPDATE = SimpleNamespace(
    world=SimpleNamespace(obs_space=SPACES, encoder=SimpleNamespace(images=[]))
)


def test_errors_by_hand():
    truth = torch.tensor([1.0, 0.0])
    assert errors(truth, torch.tensor([0.5, 0.5]), "reward").tolist() == [0.5, 0.5]
    assert errors(truth, torch.tensor([0.9, 0.5]), "continue").tolist() == pytest.approx(
        [0.01, 0.25]
    )
    assert errors(truth, torch.tensor([0.0, 0.5]), "vector").item() == pytest.approx(0.625)
    picture = torch.zeros(4, 2, 2, 3)
    assert errors(picture, picture + 0.1, "image").tolist() == pytest.approx([0.01] * 4)
    truth, guess = torch.tensor([0.0, 1, 1, 0, 0]), torch.tensor([0.4, 0.6, 0.2, 0.5, 0.3])
    assert errors(truth, guess, "discrete", (2, 3)).item() == 0.5


def test_references_by_hand():
    """One row of rewards 0, 1, 2, 4 after a context of two."""
    batch = {
        "reward": torch.tensor([[0.0, 1, 2, 4]]),
        "is_terminal": torch.tensor([[False, False, False, True]]),
        "vector": torch.zeros(1, 4, 2),
        "token": torch.tensor([[[0, 0], [0, 1], [0, 1], [1, 1]]]),
    }
    repeat, mean = references(UPDATE, batch, 2)
    assert repeat["reward"].tolist() == [[1, 3]]
    assert mean["reward"].tolist() == [[1, 1]]
    assert repeat["continue"].tolist() == [[0, 1]]
    assert repeat["token"].tolist() == [[0, 0.5]]


def test_lengths_of_contexts():
    assert powers(1) == [1]
    assert powers(16) == [1, 4, 16]
    assert powers(20) == [1, 4, 16, 20]


def run_of(*rewards):
    out = []
    for reward in rewards:
        steps = {"reward": np.array(reward, np.float32), "age": np.arange(len(reward))}
        steps |= {"is_terminal": steps["age"] == len(reward) - 1}
        steps |= {"vector": np.zeros((len(reward), 2), np.float32)}
        steps |= {"token": np.zeros((len(reward), 2), np.int32)}
        out.append(Episode(steps, {}))
    return Recording(SimpleNamespace(seed=0), UPDATE, {}, out)


def remembering(monkeypatch):
    """Replace the model by one that errs by the number of context steps; what it was asked."""
    asked = []

    def imagined(update, batch, context, seed):
        asked.append((batch["age"][0].tolist(), context))
        error = torch.full_like(batch["reward"][:, context:], context)
        return ({key: error for key in horizon.kinds(update)},) * 2

    monkeypatch.setattr(horizon, "imagined", imagined)
    monkeypatch.setattr(recall, "imagined", imagined)
    return asked


def test_contexts_of_all_lengths_end_at_the_same_step(monkeypatch):
    asked = remembering(monkeypatch)
    run = run_of([0] * 12, [0] * 12)
    assert list(table(run).after) == [1, 4, 6]
    assert asked == [(list(range(5, 12)), 1), (list(range(2, 12)), 4), (list(range(12)), 6)]
    result = horizon.measure(run)
    assert result["ahead"] == [1, 2, 3, 4, 5, 6]
    assert result["errors"]["reward"]["context"] == {1: [1] * 6, 4: [4] * 6, 6: [6] * 6}
    assert recall.by_context(run)["errors"]["reward"]["ahead"] == {h: [1, 4, 6] for h in (1, 4, 6)}


def test_the_deciding_reward_is_the_last_one_and_its_age_that_of_the_cue(monkeypatch):
    asked = remembering(monkeypatch)
    run = run_of([0, 0, 1], [0, 0, 1, 0, -1], [0, 0, 1], [0, 0, 0], [0, 0, -1, 0])
    assert {age: len(rows) for age, rows in queries(run).items()} == {2: 3, 4: 1}
    rows = by_cue(run)["rows"]
    assert [(row["age"], row["blind"], row["episodes"]) for row in rows] == [
        (2, 1, 3),
        (2, 2, 3),
        (4, 1, 1),
        (4, 4, 1),
    ]
    # All before the reward are seen, or the first alone.
    assert asked == [([0, 1, 2], n) for n in (2, 1)] + [([0, 1, 2, 3, 4], n) for n in (4, 1)]
    assert rows[0]["mean"] == pytest.approx(8 / 9)


def test_ages_of_places_are_since_the_same_cell_and_direction():
    pos = torch.tensor([[[1.2, 1.2], [2.5, 1.5], [1.9, 1.1], [1.5, 1.5], [2.1, 1.9], [5.0, 5.0]]])
    east, west = torch.tensor([1.0, 0.0]), torch.tensor([-1.0, 0.0])
    near = torch.tensor([math.cos(math.radians(29)), math.sin(math.radians(29))])
    direction = torch.stack([east, west, east, near, east, east])[None]
    # Step 3 shows what step 2 did, step 4 was seen from the other side alone, step 5 never.
    assert place_ages(pos, direction, 3).tolist() == [[1, 0, 0]]
    assert place_ages(pos, direction, 2).tolist() == [[2, 3, 0, 0]]


@pytest.mark.parametrize(
    ("task", "where"),
    [
        ("bsuite_memory_len_L10", ("vector", 2)),
        ("tmaze_5", ("vector", 0)),
        ("gym_CartPole-v1", None),
    ],
)
def test_which_tasks_show_a_cue(task, where):
    assert recall.cue(task) == where
