"""Wrappers over the counter, whose reward at step t is t."""

import numpy as np
import pytest

from envs.testing import ConstantReward, Counter
from envs.wrappers import ActionRepeat, TimeLimit, TruncationAsTerminal

ACTION = np.zeros(1, np.int32)


def play(env):
    records = [env.reset(0)]
    while not records[-1]["is_last"]:
        records.append(env.step(ACTION))
    return records


def test_action_repeat_sums_rewards_and_stops_at_the_end():
    env = ActionRepeat(Counter(length=5), 2)
    records = play(env)
    assert env.repeat == 2
    assert [record["reward"] for record in records] == [0, 1 + 2, 3 + 4, 5]
    assert [record["vector"][1] for record in records] == [0, 2, 4, 5]
    assert records[-1]["is_terminal"]


def test_a_time_limit_truncates_after_its_number_of_actions():
    records = play(TimeLimit(Counter(length=10), 4))
    assert len(records) == 5
    assert not records[-1]["is_terminal"]


@pytest.mark.parametrize("limit", [5, 6])
def test_a_time_limit_leaves_an_earlier_end_terminal(limit):
    records = play(TimeLimit(Counter(length=5), limit))
    assert len(records) == 6
    assert records[-1]["is_terminal"]


def test_a_time_limit_counts_anew_after_a_reset():
    env = TimeLimit(Counter(length=10), 4)
    env.reset(0)
    env.step(ACTION)
    assert len(play(env)) == 5


def test_truncation_as_terminal_marks_the_last_step_only():
    records = play(TruncationAsTerminal(ConstantReward(length=3)))
    assert [record["is_terminal"] for record in records] == [False, False, False, True]
