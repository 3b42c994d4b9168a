"""Environments that live outside the project, named by module and callable."""

import sys

import numpy as np
import pytest

from envs.make import check_task, make_env

MODULE = '''
import gymnasium
import numpy as np
from envs.env import Space, first
from envs.testing import Counter

VERSION = 3

def make_gym():
    return gymnasium.make("CartPole-v1")

class Own(Counter):
    pass

class Old(Counter):
    """Written before its records counted simulator steps."""

    def reset(self, seed):
        record = super().reset(seed)
        del record["env_steps"]
        return record

class Bright(Counter):
    """Frames in [0, 1], where the contract has bytes."""

    def __init__(self):
        super().__init__(image=True)

    def observation(self):
        return {**super().observation(), "image": np.full((16, 16, 3), 0.7, np.float32)}

class Wanders(Counter):
    """Leaves its space at the second step."""

    def observation(self):
        return {"vector": np.zeros(2 if self.t < 2 else 3, np.float32)}

def make_nothing():
    return 5
'''


@pytest.fixture(autouse=True)
def package(tmp_path, monkeypatch):
    folder = tmp_path / "outside_pkg"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "worlds.py").write_text(MODULE)
    (folder / "broken.py").write_text("import not_there_at_all\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in [name for name in sys.modules if name.startswith("outside_pkg")]:
        del sys.modules[name]


def test_a_callable_may_return_a_gymnasium_environment():
    env = make_env("outside_pkg.worlds:make_gym", repeat=2)
    assert env.obs_space["vector"].shape == (4,)
    env.reset(0)
    assert env.step(np.array([1], np.int32))["env_steps"] == 2


def test_a_class_of_the_contract_is_used_as_it_is():
    env = make_env("outside_pkg.worlds:Own")
    env.reset(5)
    assert env.step(np.array([1], np.int32))["vector"].tolist() == [5, 1]


@pytest.mark.parametrize(
    ("task", "told"),
    [
        ("outside_pgk.worlds:Own", "no module 'outside_pgk'; did you mean 'outside_pkg'"),
        ("outside_pkg.wrlds:Own", "no module 'wrlds' in outside_pkg; did you mean 'worlds'"),
        ("outside_pkg.worlds.x:Own", "no module 'x' in outside_pkg.worlds"),
        ("outside_pkg.worlds:make_gmy", "'make_gmy' does not exist.*did you mean 'make_gym'"),
        ("outside_pkg.worlds:VERSION", "'VERSION' is no callable"),
        ("outside_pkg.worlds:", "'' does not exist"),
        ("outside_pkg.broken:make", "outside_pkg.broken cannot be imported.*not_there_at_all"),
        ("outside-pkg:make", "no module 'outside-pkg'"),
    ],
)
def test_what_cannot_be_found_is_named_with_the_nearest(task, told):
    with pytest.raises(ValueError, match=told):
        check_task(task)


@pytest.mark.parametrize(
    ("task", "told"),
    [
        ("outside_pkg.worlds:make_nothing", "made a int.*lacks obs_space"),
        ("outside_pkg.worlds:Old", "made a Old.*lacks env_steps"),
        ("outside_pkg.worlds:Bright", "'image' is float32 .* its space says uint8"),
    ],
)
def test_what_is_no_environment_is_refused_at_start(task, told):
    with pytest.raises(ValueError, match=told):
        make_env(task)


def test_a_record_that_leaves_its_space_is_refused_when_it_comes():
    env = make_env("outside_pkg.worlds:Wanders")
    env.reset(0)
    env.step(np.array([1], np.int32))
    with pytest.raises(ValueError, match=r"observation 'vector' is float32 \(3,\)"):
        env.step(np.array([1], np.int32))
