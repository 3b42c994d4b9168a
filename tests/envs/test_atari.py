"""Atari: the two conventions, the last two frames, and what counts as an end."""

import numpy as np
import pytest

pytest.importorskip("ale_py")

from envs import atari
from envs.make import make_env


def env_of(task, repeat=4):
    return make_env(task, repeat=repeat)


def action(number):
    return np.array([number], np.int32)


def test_conventions_differ_in_actions_and_stickiness():
    full, small = env_of("atari_breakout"), env_of("atari100k_breakout")
    assert full.act_space.classes == (18,)
    assert small.act_space.classes == (4,)
    assert full.ale.getFloat("repeat_action_probability") == 0.25
    assert small.ale.getFloat("repeat_action_probability") == 0


@pytest.mark.parametrize("repeat", [1, 4])
def test_the_declared_repeat_is_the_only_one(repeat):
    env = env_of("atari_pong", repeat)
    env.reset(0)
    before = env.ale.getFrameNumber()
    record = env.step(action(0))
    assert env.ale.getFrameNumber() - before == record["env_steps"] == repeat


def test_only_the_small_convention_waits_up_to_thirty_frames():
    env = env_of("atari100k_pong")
    waits = [env.reset(seed)["env_steps"] for seed in range(12)]
    assert len(set(waits)) > 6
    assert 0 <= min(waits) < max(waits) <= 30
    env.reset(3)
    assert env.ale.getEpisodeFrameNumber() == waits[3]
    assert env_of("atari_pong").reset(3)["env_steps"] == 0


def test_the_image_is_the_maximum_of_the_last_two_frames_in_64_by_64():
    import cv2

    env = env_of("atari100k_pong")
    env.reset(5)
    for _ in range(30):  # the ball, which is drawn every other frame or so, is in play
        record = env.step(action(2))
    twin = env_of("atari100k_pong", repeat=1)
    twin.reset(5)
    for _ in range(30 * 4 - 1):
        twin.step(action(2))
    last = twin.ale.getScreenRGB()
    twin.step(action(2))
    merged = np.maximum(last, twin.ale.getScreenRGB())
    assert (merged != last).any()
    expected = cv2.resize(merged, (64, 64), interpolation=cv2.INTER_AREA)
    np.testing.assert_array_equal(record["image"], expected)


def test_a_lost_life_is_no_end_and_a_lost_game_is_terminal():
    env = env_of("atari100k_breakout")
    env.reset(0)
    record, lives = {"is_last": False}, set()
    while not record["is_last"]:
        record = env.step(action(1))  # fire and never move
        lives.add(env.ale.lives())
    assert lives == {0, 1, 2, 3, 4, 5}
    assert record["is_terminal"]


def test_the_limit_of_frames_truncates_and_may_cut_the_last_repeat(monkeypatch):
    assert atari.FRAMES == 108_000
    monkeypatch.setattr(atari, "FRAMES", 42)
    env = env_of("atari_pong")
    record, taken = env.reset(0), []
    while not record["is_last"]:
        record = env.step(action(0))
        taken.append(record["env_steps"])
    assert taken == [4] * 10 + [2]
    assert not record["is_terminal"]
