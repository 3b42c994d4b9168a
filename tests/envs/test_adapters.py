"""Adapters over unusual spaces: what the agent sees, and what the simulator is told."""

import dm_env
import gymnasium
import numpy as np
import pytest
from dm_env import specs
from gymnasium import spaces

from envs.adapters import FromDmEnv, FromGymnasium
from envs.env import Space, check_spaces

DISCRETE = spaces.Discrete(2)


class Echo(gymnasium.Env):
    """Returns the same observation always and keeps the last action."""

    metadata = None

    def __init__(self, observation_space, action_space, obs, reward=1):
        self.observation_space, self.action_space = observation_space, action_space
        self.obs, self.reward = obs, reward

    def reset(self, seed=None, options=None):
        return self.obs, {}

    def step(self, action):
        self.action = action
        return self.obs, self.reward, False, False, {}


def seen(space, obs):
    env = FromGymnasium(Echo(space, DISCRETE, obs))
    record = env.reset(0)
    return env.obs_space, {key: record[key].tolist() for key in env.obs_space}


def executed(space, action, dtype=np.float32):
    echo = Echo(DISCRETE, space, 0)
    env = FromGymnasium(echo)
    env.reset(0)
    env.step(np.array(action, dtype))
    return env.act_space, echo.action


def test_a_grey_image_gets_a_channel_axis():
    box = spaces.Box(0, 255, (2, 3), np.uint8)
    found, value = seen(box, np.array([[1, 2, 3], [4, 5, 6]], np.uint8))
    assert found == {"image": Space("image", (2, 3, 1))}
    assert value["image"] == [[[1], [2], [3]], [[4], [5], [6]]]


def test_a_matrix_of_float64_becomes_one_float32_vector():
    found, value = seen(spaces.Box(-9, 9, (2, 2), np.float64), np.array([[1.0, 2], [3, 4]]))
    assert found == {"vector": Space("vector", (4,))}
    assert value["vector"] == [1, 2, 3, 4]


def test_a_single_number_is_a_vector_of_one():
    found, value = seen(spaces.Box(0, 9, (), np.float32), np.float32(7))
    assert found == {"vector": Space("vector", (1,))}
    assert value["vector"] == [7]


def test_booleans_become_zeros_and_ones():
    found, value = seen(spaces.Box(0, 1, (2,), bool), np.array([True, False]))
    assert found == {"vector": Space("vector", (2,))}
    assert value["vector"] == [1, 0]


def test_a_discrete_observation_counts_from_zero_and_is_called_token():
    found, value = seen(spaces.Discrete(5, start=10), 12)
    assert found == {"token": Space("discrete", (1,), (5,))}
    assert value["token"] == [2]


def test_multi_discrete_and_multi_binary_are_discrete_numbers():
    found, value = seen(spaces.MultiDiscrete([3, 5], start=[1, 2]), np.array([3, 2]))
    assert found == {"token": Space("discrete", (2,), (3, 5))}
    assert value["token"] == [2, 0]
    found, value = seen(spaces.MultiBinary((2, 2)), np.array([[0, 1], [1, 0]], np.int8))
    assert found == {"token": Space("discrete", (4,), (2, 2, 2, 2))}
    assert value["token"] == [0, 1, 1, 0]


def test_nested_spaces_are_named_by_their_path():
    space = spaces.Dict(
        {"b": spaces.Box(0, 9, (1,)), "a": spaces.Tuple([spaces.Discrete(3), spaces.Discrete(4)])}
    )
    found, value = seen(space, {"b": np.array([5.0], np.float32), "a": (2, 3)})
    assert found == {
        "a/0": Space("discrete", (1,), (3,)),
        "a/1": Space("discrete", (1,), (4,)),
        "b": Space("vector", (1,)),
    }
    assert value == {"a/0": [2], "a/1": [3], "b": [5]}


@pytest.mark.parametrize(
    ("space", "obs", "told"),
    [
        (spaces.Box(0, 255, (4, 4, 3), np.uint8), np.zeros((3, 4, 3), np.uint8), r"\(3, 4, 3\)"),
        (spaces.Box(0, 255, (4, 4, 3), np.uint8), np.zeros((4, 4, 3)), "float64"),
        (spaces.Box(0, 255, (4, 4, 3), np.uint8), np.full((4, 4, 3), 300, np.uint16), "uint16"),
        (spaces.Box(0, 1, (3,)), np.zeros(2), r"'vector'.*\(2,\).*\(3,\)"),
        (spaces.Discrete(3), 3, r"'token' is \[3\]"),
        (spaces.Discrete(3), 0.5, "float64"),
    ],
)
def test_an_observation_unlike_its_space_is_one_clear_error(space, obs, told):
    with pytest.raises(ValueError, match=told):
        seen(space, obs)


@pytest.mark.parametrize(
    ("box", "action", "value"),
    [
        (spaces.Box(-3, 7, (3,)), [-1, 0, 1], [-3, 2, 7]),
        (spaces.Box(0, 1000, (2,)), [-0.5, 5], [250, 1000]),
        (spaces.Box(-np.inf, np.inf, (2,)), [-40, 0.5], [-40, 0.5]),
        (spaces.Box(0, np.inf, (2,)), [-1, 3], [0, 3]),
        (spaces.Box(-np.inf, 2, (2,)), [-9, 3], [-9, 2]),
        (spaces.Box(5, np.inf, (2,)), [-1, 0.5], [5, 6.5]),
        (spaces.Box(-np.inf, -5, (2,)), [-0.5, 1], [-6.5, -5]),
        (spaces.Box(-3e38, 3e38, (2,)), [-1, 0.5], [-1, 0.5]),
        (spaces.Box(-(2**63), 2**63 - 1, (2,), np.int64), [-1, 1], [-1, 1]),
        (spaces.Box(np.array([0, -np.inf], np.float32), np.inf), [-1, -1], [0, -1]),
        (spaces.Box(0, 10, (3,), np.int64), [-1, 0.1, 0.17], [0, 6, 6]),
        (spaces.Box(-2, 2, (2, 2)), [-1, -0.5, 0.5, 1], [[-2, -1], [1, 2]]),
        (spaces.Box(0, 255, (1, 2), np.uint8), [-1, 1], [[0, 255]]),
    ],
)
def test_box_actions_are_rescaled_from_one_to_finite_bounds_only(box, action, value):
    space, told = executed(box, action)
    assert space == Space("vector", (len(action),))
    assert told.dtype == box.dtype
    assert told.shape == box.shape
    np.testing.assert_allclose(told, value)


def test_discrete_actions_are_shifted_and_shaped():
    space, told = executed(spaces.Discrete(3, start=-1), [2], np.int32)
    assert (space, told) == (Space("discrete", (1,), (3,)), 1)
    space, told = executed(spaces.MultiDiscrete([[3], [5]], start=[[1], [0]]), [2, 4], np.int32)
    assert space == Space("discrete", (2,), (3, 5))
    assert told.tolist() == [[3], [4]]
    space, told = executed(spaces.MultiBinary(3), [1, 0, 1], np.int32)
    assert space == Space("discrete", (3,), (2, 2, 2))
    assert told.tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    ("observation", "action", "told"),
    [
        (spaces.Text(3), DISCRETE, "observation: a space of type Text"),
        (spaces.Dict({"x": spaces.Sequence(DISCRETE)}), DISCRETE, "x: a space of type Sequence"),
        (spaces.Box(0, 255, (4, 84, 84), np.uint8), DISCRETE, "has its channels first"),
        (
            spaces.Dict({"a/b": DISCRETE, "a": spaces.Dict({"b": DISCRETE})}),
            DISCRETE,
            "two observations would both be called 'a/b'",
        ),
        (DISCRETE, spaces.Tuple([DISCRETE]), "action: a space of type Tuple"),
        (DISCRETE, spaces.Dict({"x": DISCRETE}), "action: a space of type Dict"),
    ],
)
def test_other_spaces_are_refused_by_name_at_construction(observation, action, told):
    with pytest.raises(ValueError, match=told):
        FromGymnasium(Echo(observation, action, None))


@pytest.mark.parametrize(
    ("observations", "action", "told"),
    [
        ({"reward": Space("vector", (1,))}, Space("vector", (1,)), r"\['reward'\] are taken"),
        ({"log/x": Space("vector", (1,))}, Space("vector", (1,)), r"\['log/x'\] are taken"),
        ({}, Space("vector", (1,)), "there is no observation"),
        (
            {"x": Space("image", (8, 8, 0))},
            Space("vector", (1,)),
            "x: a space of shape .* holds no",
        ),
        (
            {"x": Space("vector", (1,))},
            Space("vector", (0,)),
            "action: a space of shape .* holds no",
        ),
        ({"x": Space("vector", (1,))}, Space("image", (8, 8, 3)), "the action space is an image"),
    ],
)
def test_spaces_that_no_agent_can_use_are_refused(observations, action, told):
    with pytest.raises(ValueError, match=told):
        check_spaces(observations, action)


@pytest.mark.parametrize("reward", [None, np.nan, np.inf, 1e300, np.ones(2)])
def test_a_reward_that_is_not_one_finite_number_is_named(reward):
    env = FromGymnasium(Echo(DISCRETE, DISCRETE, 0, reward=reward))
    env.reset(0)
    with pytest.raises(ValueError, match=r"the reward is .* expected one finite number"):
        env.step(np.array([1], np.int32))


@pytest.mark.parametrize("number", [np.nan, -np.inf])
def test_an_observation_that_is_not_finite_is_named(number):
    env = FromGymnasium(Echo(spaces.Box(-1, 1, (2,)), DISCRETE, np.array([0, number], np.float32)))
    with pytest.raises(ValueError, match="observation 'vector' is not finite"):
        env.reset(0)


def test_observations_are_copies_of_the_simulators_arrays():
    obs = np.array([1.0, 2.0], np.float32)
    record = FromGymnasium(Echo(spaces.Box(0, 9, (2,)), DISCRETE, obs)).reset(0)
    obs[:] = 9
    assert record["vector"].tolist() == [1, 2]


def test_a_reward_in_an_array_of_one_is_a_number():
    env = FromGymnasium(Echo(DISCRETE, DISCRETE, 0, reward=np.array([2.5])))
    env.reset(0)
    assert env.step(np.array([1], np.int32))["reward"] == 2.5


class Script(dm_env.Environment):
    """Two steps with the given last discount; its dict comes in another order than its spec."""

    def __init__(self, discount, action_spec):
        self.discount, self.spec = discount, action_spec

    def observation_spec(self):
        return {"x": specs.Array((2, 1), np.float64), "y": specs.Array((), np.float64)}

    def action_spec(self):
        return self.spec

    def observation(self):
        return {"y": np.float64(3), "x": np.array([[1.0], [2.0]])}

    def reset(self):
        self.taken = 0
        return dm_env.restart(self.observation())

    def step(self, action):
        self.taken += 1
        self.action = action
        if self.taken < 2:
            return dm_env.transition(1.0, self.observation())
        return dm_env.TimeStep(dm_env.StepType.LAST, None, self.discount, self.observation())


@pytest.mark.parametrize(("discount", "is_terminal"), [(0.0, True), (0.9, False), (1.0, False)])
def test_a_dm_env_end_is_terminal_only_with_discount_zero(discount, is_terminal):
    env = FromDmEnv(Script(discount, specs.DiscreteArray(3)), lambda env, seed: env)
    assert env.act_space == Space("discrete", (1,), (3,))
    records = [env.reset(0), *[env.step(np.array([2], np.int32)) for _ in range(2)]]
    assert [record["reward"] for record in records] == [0, 1, 0]
    assert [record["is_last"] for record in records] == [False, False, True]
    assert records[-1]["is_terminal"] is is_terminal
    assert env.env.action == 2


@pytest.mark.parametrize(
    ("spec", "value"),
    [
        (specs.BoundedArray((2,), np.float64, -2, [2, 6]), [2, 6]),
        (specs.BoundedArray((2,), np.float64, -np.inf, np.inf), [1, 1]),
        (specs.Array((2,), np.float64), [1, 1]),
    ],
)
def test_dm_env_actions_are_rescaled_and_observations_matched_by_name(spec, value):
    env = FromDmEnv(Script(1.0, spec), lambda env, seed: env)
    record = env.reset(0)
    env.step(np.ones(2, np.float32))
    assert env.act_space == Space("vector", (2,))
    assert env.env.action.tolist() == value
    assert (record["x"].tolist(), record["y"].tolist()) == ([1, 2], [3])
