"""DeepMind Control: reseeding, actions, the repeat, pixels."""

import numpy as np
import pytest

pytest.importorskip("dm_control")

from envs import table
from envs.dmc import DMC, build
from envs.make import make_env


def episode(env, seed, steps=12):
    random = np.random.default_rng(1)
    records = [env.reset(seed)]
    for _ in range(steps):
        records.append(env.step(random.uniform(-1, 1, env.act_space.shape)))
    return [np.concatenate([r[key].ravel() for key in env.obs_space]) for r in records]


QUICK = ("acrobot_swingup", "finger_turn_hard", "lqr_lqr_6_2", "reacher_easy", "stacker_stack_2")
OTHERS = sorted(set(table.names("dmc")) - set(QUICK))


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_a_reset_after_other_episodes_is_that_of_a_fresh_build(name):
    used, fresh = DMC(name, 1), DMC(name, 1)
    other = episode(used, 7)
    episode(used, 8)
    again, expected = episode(used, 5), episode(fresh, 5)
    np.testing.assert_array_equal(again, expected)
    assert (np.array(other) != np.array(expected)).any()
    # The adapter's own first build had another seed: the reset alone decides.
    raw = build(name, 5).reset().observation
    first = np.concatenate([np.ravel(raw[key]) for key in fresh.obs_space])
    np.testing.assert_array_equal(expected[0], first.astype(np.float32))


def test_observations_of_any_shape_are_vectors_by_their_names():
    fish = make_env("dmc_fish_upright").obs_space
    assert {key: space.shape for key, space in fish.items()} == {
        "joint_angles": (7,),
        "upright": (1,),
        "velocity": (13,),
    }
    assert make_env("dmc_manipulator_bring_ball").obs_space["arm_pos"].shape == (16,)


def told(env, action):
    """What the simulator is told for an action."""
    env.reset(0)
    seen = []
    env.env.step, real = lambda value: seen.append(value) or real(value), env.env.step
    env.step(np.full(env.act_space.shape, action, np.float32))
    return seen


def test_actions_fill_finite_bounds_and_leave_infinite_ones():
    assert told(DMC("quadruped_walk", 1), 1)[0].max() == pytest.approx(1.1)
    assert told(DMC("quadruped_walk", 1), -1)[0].min() == pytest.approx(-1)
    # lqr says +-1e10, MuJoCo's word for no bound.
    assert told(DMC("lqr_lqr_6_2", 1), 0.5)[0].tolist() == [0.5, 0.5]


def test_the_repeat_sums_rewards_and_is_cut_by_the_end():
    env, single = make_env("dmc_cartpole_balance", repeat=3), make_env("dmc_cartpole_balance")
    for each in (env, single):
        each.reset(2)
        each.env._step_limit = 8
    action = np.array([0.3], np.float32)
    records = [env.step(action) for _ in range(3)]
    singles = [single.step(action) for _ in range(8)]
    assert [record["env_steps"] for record in records] == [3, 3, 2]
    assert [record["is_last"] for record in records] == [False, False, True]
    assert not records[-1]["is_terminal"]
    np.testing.assert_array_equal(records[-1]["position"], singles[-1]["position"])
    total = sum(float(record["reward"]) for record in singles[:3])
    assert records[0]["reward"] == pytest.approx(total, rel=1e-6)


def test_pixels_are_drawn_once_an_action_from_the_usual_camera():
    env = make_env("dmc_vision_cartpole_swingup", repeat=2)
    physics, cameras = env.env.physics, []
    real = physics.render
    physics.render = lambda *size, camera_id: (
        cameras.append(camera_id) or real(*size, camera_id=camera_id)
    )
    first = env.reset(0)
    second = env.step(np.array([1], np.float32))
    assert env.obs_space["image"].shape == first["image"].shape == (64, 64, 3)
    assert (first["image"] != second["image"]).any()
    assert cameras == [0, 0]
    assert make_env("dmc_vision_quadruped_walk").camera == 2
