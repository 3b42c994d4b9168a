"""The T-maze, step by step."""

import numpy as np
import pytest

from envs.make import make_env

FORWARD, LEFT, RIGHT = ([np.array([n], np.int32)] for n in range(3))


def walk(seed, actions):
    env = make_env("tmaze_3")
    return [env.reset(seed), *[env.step(action) for action in actions]]


def cue_of(seed):
    return walk(seed, [])[0]["vector"][:2].tolist()


LEFT_SEED = next(seed for seed in range(20) if cue_of(seed) == [1, 0])
RIGHT_SEED = next(seed for seed in range(20) if cue_of(seed) == [0, 1])


def test_the_cue_is_seen_at_the_first_step_only():
    seen = [record["vector"].tolist() for record in walk(LEFT_SEED, FORWARD * 3)]
    assert seen == [[1, 0, 0, 1], [0, 0, 0, 1], [0, 0, 0, 1], [0, 0, 1, 0]]


@pytest.mark.parametrize(
    ("seed", "choice", "reward"),
    [(LEFT_SEED, LEFT, 1), (LEFT_SEED, RIGHT, -1), (RIGHT_SEED, LEFT, -1), (RIGHT_SEED, RIGHT, 1)],
)
def test_the_choice_at_the_junction_pays_by_the_cue(seed, choice, reward):
    records = walk(seed, FORWARD * 3 + choice)
    assert [record["reward"] for record in records] == [0, 0, 0, 0, reward]
    assert records[-1]["is_terminal"] is True


def test_turns_in_the_corridor_and_forward_at_the_junction_do_nothing():
    records = walk(LEFT_SEED, LEFT + RIGHT + FORWARD * 4 + LEFT)
    assert records[2]["vector"].tolist() == [0, 0, 0, 1]
    assert records[6]["vector"].tolist() == [0, 0, 1, 0]
    assert records[7]["reward"] == 1
