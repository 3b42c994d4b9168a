"""Episodes as they were played, and windows of them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from agent.diagnostics.recording import Episode, Recorder, Recording
from agent.policy import Categorical


def test_a_recorder_keeps_the_first_episodes_of_each_slot_and_latents_at_some_steps():
    """Slot 0 plays two episodes of 3 steps, of which one is wanted; slot 1 one of 4."""
    world = SimpleNamespace(h=2, groups=1, classes=3)
    actor = SimpleNamespace(update=SimpleNamespace(world=world))
    recorder = Recorder([1, 1], {1, 3})
    for tick in range(6):
        ids = np.array([0, 1]) if tick < 4 else np.array([0])
        age = np.array([tick % 3, tick])[: len(ids)]
        last = np.array([tick % 3 == 2, tick == 3])[: len(ids)]
        obs = {"vector": 10.0 * ids[:, None] + age[:, None], "reward": age.astype(np.float32)}
        obs |= {"is_first": age == 0, "is_last": last, "log/x": age}
        obs["episode"] = np.array([tick // 3, 0])[: len(ids)]
        z = torch.eye(3)[torch.tensor([tick % 3, 1])[: len(ids)]]
        h = torch.tensor([[3.0, 4.0], [0.0, 2.0]])[: len(ids)]
        actor.latents = {"hz": torch.cat([h, z], -1), "x": h * tick}
        recorder(ids, obs, np.array([[tick], [7]])[: len(ids)], actor)
    one, other = recorder.episodes
    assert one.steps["vector"].ravel().tolist() == [0, 1, 2]
    assert other.steps["vector"].ravel().tolist() == [10, 11, 12, 13]
    assert one.steps["action"].ravel().tolist() == [0, 1, 2]
    assert one.steps["z"].ravel().tolist() == [0, 1, 2]
    assert one.steps["h_norm"].tolist() == [5, 5, 5]
    assert other.steps["x_norm"].tolist() == [0, 2, 4, 6]
    assert "log/x" not in one.steps
    assert set(one.latents) == {1}
    assert other.latents[3]["x"].tolist() == [0, 6]
    assert other.latents[1]["z"].tolist() == [0, 1, 0]


def recording(*lengths):
    out = []
    for n, length in enumerate(lengths):
        step = np.arange(length)
        steps = {"reward": 100 * n + step, "is_first": step == 0, "action": step[:, None] % 2}
        steps["z"] = np.stack([step % 3, step % 2], 1)
        out.append(Episode(steps, {}))
    world = SimpleNamespace(groups=2, classes=3)
    update = SimpleNamespace(world=world, policy=Categorical((2,), 0.0))
    return Recording(None, update, {}, out)


def test_windows_lie_within_episodes_and_show_their_ends_first():
    run = recording(5, 3, 7)
    assert run.windows(4, 2)["reward"].tolist() == [[1, 2, 3, 4], [203, 204, 205, 206]]
    found = run.windows(4, 5)["reward"][:, 0].tolist()
    assert sorted(found) == [0, 1, 200, 202, 203]
    assert len(run.windows(5, 9)["reward"]) == len(set(run.windows(5, 9)["reward"][:, 0].tolist()))
    with pytest.raises(ValueError, match="no episode of 8 steps: the longest has 7"):
        run.windows(8, 1)
    assert run.typical() == 4


def test_rows_go_across_the_joins_of_episodes():
    rows = recording(5, 3, 7).rows(6, 9)
    assert rows["reward"].tolist() == [[0, 1, 2, 3, 4, 100], [101, 102, 200, 201, 202, 203]]
    assert rows["is_first"][0].tolist() == [True, False, False, False, False, True]
    with pytest.raises(ValueError, match="have 15 steps, not 16"):
        recording(5, 3, 7).rows(16, 1)


def test_the_core_is_fed_what_came_before_and_nothing_where_an_episode_begins():
    run = recording(3, 2)
    u = run.core_inputs(run.rows(5, 1))[0]
    assert u.shape == (5, 2 * 3 + 2)
    assert u[0].abs().sum() == u[3].abs().sum() == 0
    assert u[1].tolist() == [1, 0, 0, 1, 0, 0, 1, 0]  # z (0, 0) and action 0 of step 0
    assert u[2].tolist() == [0, 1, 0, 0, 1, 0, 0, 1]
