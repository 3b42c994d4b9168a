"""The contract of an environment, over every suite: a new task is one line of TASKS."""

import numpy as np
import pytest

from envs.env import FLAGS
from envs.make import make_env

TASKS = [
    "bsuite_bandit_3",
    "bsuite_bandit_noise_1",
    "bsuite_cartpole_0",
    "bsuite_cartpole_swingup_2",
    "bsuite_catch_0",
    "bsuite_catch_scale_4",
    "bsuite_deep_sea_1",
    "bsuite_deep_sea_stochastic_1",
    "bsuite_discounting_chain_0",
    "bsuite_memory_len_5",
    "bsuite_memory_len_L30",
    "bsuite_memory_size_4",
    "bsuite_mountain_car_0",
    "bsuite_umbrella_distract_3",
    "bsuite_umbrella_length_3",
    "atari_pong",
    "atari100k_breakout",
    "dmc_cartpole_swingup",
    "dmc_fish_upright",
    "dmc_lqr_lqr_2_1",
    "dmc_manipulator_bring_ball",
    "gym_CartPole-v1",
    "gym_Pendulum-v1",
    "gym_gymnasium.envs.classic_control:Acrobot-v1",
    "gymnasium.envs.classic_control:CartPoleEnv",
    "popgym_AutoencodeEasy",
    "popgym_BattleshipHard",
    "popgym_ConcentrationMedium",
    "popgym_CountRecallHard",
    "popgym_LabyrinthEscapeEasy",
    "popgym_MineSweeperMedium",
    "popgym_NoisyPositionOnlyPendulumEasy",
    "popgym_VelocityOnlyCartPoleEasy",
    "tmaze_5",
    "test_constant",
    "test_counter",
    "test_odd",
    pytest.param("dmc_quadruped_escape", marks=pytest.mark.slow),
    pytest.param("dmc_vision_cartpole_swingup", marks=pytest.mark.slow),
    pytest.param("dmc_vision_quadruped_walk", marks=pytest.mark.slow),
    pytest.param("memory_maze_9x9_extraobs", marks=pytest.mark.slow),
    pytest.param("memory_maze_11x11_oracle_top", marks=pytest.mark.slow),
    pytest.param("memory_maze_9x9", marks=pytest.mark.slow),
    pytest.param("memory_maze_15x15", marks=pytest.mark.slow),
]
# These draw nothing, or nothing that can be seen, from their seed.
UNSEEDED = ("bandit_3", "deep_sea_1", "discounting_chain")


@pytest.fixture(params=TASKS)
def task(request):
    return request.param


@pytest.fixture
def env(task):
    env = make_env(task)
    yield env
    env.close()


def draw(space, random):
    if space.kind == "discrete":
        return random.integers(0, space.classes).astype(np.int32)
    return random.uniform(-1, 1, space.shape).astype(np.float32)


def play(env, seed, limit=60):
    """Records of at most `limit` actions, the same ones whatever the seed."""
    random = np.random.default_rng(0)
    records = [env.reset(seed)]
    while not records[-1]["is_last"] and len(records) <= limit:
        records.append(env.step(draw(env.act_space, random)))
    return records


def same(left, right):
    return len(left) == len(right) and all(
        np.array_equal(a[key], b[key]) for a, b in zip(left, right, strict=True) for key in a
    )


def test_records_match_the_spaces_and_flags_open_and_close_an_episode(task, env):
    records = play(env, 1)
    for t, record in enumerate(records):
        logged = {key for key in record if key.startswith("log/")}
        assert set(record) - logged == {*env.obs_space, *FLAGS}
        for key, space in env.obs_space.items():
            assert record[key].shape == space.shape
            assert record[key].dtype == space.dtype
        assert isinstance(record["reward"], np.float32)
        assert record["is_first"] is (t == 0)
        assert all(type(record[key]) is bool for key in ("is_last", "is_terminal"))
        assert record["is_last"] or not record["is_terminal"]
        assert type(record["env_steps"]) is int
        assert record["env_steps"] == (t > 0) or "atari100k" in task
    assert records[0]["reward"] == 0
    assert not records[0]["is_last"]


def test_the_same_seed_gives_the_same_episode_after_another_one(env):
    first = play(env, 5)
    play(env, 6)
    assert same(play(env, 5), first)


def test_other_seeds_give_other_episodes(task, env):
    first = play(env, 0)
    differ = any(not same(first, play(env, seed)) for seed in range(1, 12))
    assert differ or any(name in task for name in UNSEEDED)


def test_records_are_not_changed_by_later_steps(env):
    random = np.random.default_rng(0)
    record = env.reset(3)
    for _ in range(5):
        kept = {key: np.array(record[key]) for key in env.obs_space}
        previous = record
        record = env.step(draw(env.act_space, random))
        for key, value in kept.items():
            np.testing.assert_array_equal(previous[key], value)
            previous[key][...] = 0
        if record["is_last"]:
            break


def test_an_episode_may_be_reset_while_it_runs(env):
    env.reset(1)
    env.step(draw(env.act_space, np.random.default_rng(0)))
    assert env.reset(2)["is_first"] is True


def test_a_step_after_the_end_is_an_assertion_error(task):
    env = make_env(task, time_limit=3)
    records = play(env, 4)
    assert len(records) <= 4
    assert records[-1]["is_last"]
    with pytest.raises(AssertionError, match="reset first"):
        env.step(draw(env.act_space, np.random.default_rng(0)))
    env.close()


@pytest.mark.parametrize(
    ("task", "actions", "is_terminal"),
    [
        ("bsuite_memory_len_5", 7, True),  # bsuite's id 5 is length 6
        ("bsuite_memory_len_L30", 31, True),
        ("bsuite_discounting_chain_0", 100, True),
        ("bsuite_deep_sea_0", 10, True),
        ("dmc_cartpole_swingup", 1000, False),
        ("gym_Pendulum-v1", 200, False),
        ("popgym_ConcentrationEasy", 104, False),
        ("popgym_LabyrinthExploreHard", 1023, False),
        ("popgym_RepeatFirstHard", 831, True),
        pytest.param("dmc_vision_cartpole_swingup", 1000, False, marks=pytest.mark.slow),
        pytest.param("memory_maze_9x9", 1000, False, marks=pytest.mark.slow),
        pytest.param("memory_maze_15x15", 4000, False, marks=pytest.mark.slow),
        ("tmaze_5", 21, False),  # going forward only: 3 (5 + 2)
        ("test_counter", 10, True),
        ("test_constant", 20, False),
        ("test_odd", 4, True),
    ],
)
def test_episodes_have_their_exact_length(task, actions, is_terminal):
    env = make_env(task)
    records = [env.reset(0)]
    while not records[-1]["is_last"]:
        records.append(env.step(np.zeros(env.act_space.shape, env.act_space.dtype)))
    assert len(records) == actions + 1
    assert records[-1]["is_terminal"] is is_terminal
