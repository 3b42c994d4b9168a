"""Memory Maze: the patches change no pixel, reseeding equals a fresh build."""

import logging

import numpy as np
import pytest

pytest.importorskip("dm_control")

from envs.memory_maze import MemoryMaze, build, reseed
from envs.rendering import pick_backend

WALK = [1, 1, 4, 1, 5, 1, 1, 2, 4, 1, 1, 3, 5, 1, 1, 1, 0, 4, 4, 1]


@pytest.fixture(scope="module", autouse=True)
def backend():
    pick_backend()


def walk(env, actions=WALK):
    """Images and rewards of one dm_env episode's first steps."""
    steps = [env.reset(), *[env.step(action) for action in actions]]
    return np.stack([s.observation for s in steps]), [s.reward or 0.0 for s in steps]


def test_an_episode_opens_goes_on_and_follows_its_seed(caplog):
    env = MemoryMaze("9x9")
    caplog.set_level(logging.WARNING)
    first = env.reset(3)
    step = env.step(np.array([1], np.int32))
    again = env.reset(3)
    other = env.reset(4)
    env.close()
    assert {key: (s.kind, s.shape) for key, s in env.obs_space.items()} == {
        "image": ("image", (64, 64, 3))
    }
    assert env.act_space.classes == (6,)
    assert (first["is_first"], step["is_first"], step["is_last"]) == (True, False, False)
    assert first["image"].std() > 10
    np.testing.assert_array_equal(first["image"], again["image"])
    assert (first["image"] != other["image"]).any()
    assert (first["image"] != step["image"]).any()
    assert "Cannot set velocity" not in caplog.text


def test_a_simulation_that_diverges_is_a_truncation(monkeypatch):
    env = MemoryMaze("9x9")
    first = env.reset(0)

    def diverge(action):
        raise env.diverged[0]("the solver failed")

    monkeypatch.setattr(env.env, "step", diverge)
    last = env.step(np.array([1], np.int32))
    np.testing.assert_array_equal(last["image"], first["image"])
    assert (last["reward"], last["is_last"], last["is_terminal"]) == (0, True, False)
    with pytest.raises(AssertionError, match="reset first"):
        env.step(np.array([1], np.int32))
    env.close()


@pytest.mark.slow
@pytest.mark.parametrize("size", ["9x9", "15x15"])
def test_the_patches_change_no_pixel_and_no_reward(size):
    env = build(size, 5, patched=False)
    images, rewards = walk(env)
    env.close()
    env = build(size, 5)
    patched_images, patched_rewards = walk(env)
    env.close()
    np.testing.assert_array_equal(images, patched_images)
    assert rewards == patched_rewards


@pytest.mark.slow
def test_touching_a_target_pays_with_and_without_the_patches():
    """The ball is put on the current target by hand; a step later the reward is there."""
    for patched in (False, True):
        env = build("9x9", 1, patched)
        env.reset()
        task, physics = env.task, env.physics
        index = task._current_target_ix
        x, y, _ = physics.bind(task._targets[index].geom).xpos
        task._walker.set_pose(physics, position=(x, y, 0))
        assert env.step(0).reward == 1, f"patched={patched}"
        assert task._current_target_ix != index
        assert env.step(0).reward == 0
        env.close()


@pytest.mark.slow
def test_reseeding_gives_the_episodes_of_a_fresh_build():
    env = build("9x9", 5)
    fresh = [walk(env)[0], walk(env)[0]]
    env.close()
    env = build("9x9", 99)
    walk(env)
    reseed(env, 5)
    reseeded = [walk(env)[0], walk(env)[0]]
    env.close()
    np.testing.assert_array_equal(fresh, reseeded)
    assert (fresh[0] != fresh[1]).any()


@pytest.mark.parametrize("name", ["9x9", "9x9_extraobs"])
def test_labels_leave_what_the_agent_sees_as_it_is(name):
    plain, labelled = MemoryMaze(name), MemoryMaze(name, labels=True)
    assert labelled.obs_space == plain.obs_space
    for seen, more in [
        (plain.reset(3), labelled.reset(3)),
        *((plain.step(np.array([a])), labelled.step(np.array([a]))) for a in WALK[:4]),
    ]:
        assert {key for key in more if not key.startswith("label/")} == set(seen)
        for key, value in seen.items():
            np.testing.assert_array_equal(more[key], value)
    shapes = {key: value.shape for key, value in more.items() if key.startswith("label/")}
    assert shapes == {
        "label/agent_pos": (2,),
        "label/agent_dir": (2,),
        "label/targets_pos": (3, 2),
        "label/targets_vec": (3, 2),
        "label/maze_layout": (9, 9),
    }
    layout, (x, y) = more["label/maze_layout"], more["label/agent_pos"]
    assert set(np.unique(layout)) == {0, 1}
    assert layout[int(y), int(x)] == 1  # it stands where there is no wall
    plain.close()
    labelled.close()
