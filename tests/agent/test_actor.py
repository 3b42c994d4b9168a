"""The actor's memory: what forgetting replaces, and when an evaluation asks for it."""

import numpy as np
import pytest
import torch

from agent.actor import Actor
from agent.evaluate import play
from agent.update import Update
from envs.env import Space
from worldmodels.cores import CORES

OBS, ACT = {"vector": Space("vector", (3,))}, Space("discrete", (1,), (3,))


@pytest.mark.parametrize("core", sorted(CORES))
def test_forgetting_makes_the_memory_of_a_slot_initial_at_its_age(tiny, core):
    torch.manual_seed(0)
    actor = Actor(Update(tiny("--core", core), OBS, ACT), 3, 0)
    obs = {"vector": np.ones((3, 3), np.float32), "is_last": np.zeros(3, bool)}
    for step in range(4):
        actor.act(np.arange(3), {**obs, "is_first": np.full(3, step == 0)})
    before = {key: value.clone() for key, value in actor.carry["core"].items()}
    actor.forget(np.array([1]))
    start = actor.update.world.core.initial(1, torch.tensor([4]))
    for key, value in actor.carry["core"].items():
        assert torch.equal(value[[0, 2]], before[key][[0, 2]])
        assert torch.equal(value[1], start[key][0])
    assert any(not torch.equal(start[key][0], value[1]) for key, value in before.items())


@pytest.mark.parametrize("posterior", ["parallel", "recurrent"])
@pytest.mark.parametrize("core", ["gru", "s3m"])
def test_what_acting_makes_of_weights_is_kept_until_they_change(tiny, core, posterior):
    config = tiny("--core", core, "--model.posterior", posterior)
    obs = {"vector": np.ones((2, 3), np.float32), "is_last": np.zeros(2, bool)}
    first, ids = {**obs, "is_first": np.ones(2, bool)}, np.arange(2)

    def latents(actor):
        actor.act(ids, first)
        return actor.latents["hz"]

    old, new = (Update(config, OBS, ACT) for _ in range(2))
    actor = Actor(old, 2, 0)
    latents(actor)
    kept = actor.prepared
    actor.use(old, 0)
    actor.act(ids, first)
    assert actor.prepared is kept
    actor.use(new, 1)
    fresh = Actor(new, 2, 0)
    fresh.tick = actor.tick  # of its noise
    assert torch.equal(latents(actor), latents(fresh))
    with torch.no_grad():
        for weight in new.parameters():
            weight.mul_(1.5)
    actor.use(new, 2)
    fresh = Actor(new, 2, 0)
    fresh.tick = actor.tick
    assert torch.equal(latents(actor), latents(fresh))


def test_what_the_next_step_is_told_is_the_action_that_is_sent_and_stored(tiny):
    """Samples of a normal pass the bounds where the environment clips them."""
    actor = Actor(Update(tiny("--core", "gru"), OBS, Space("vector", (2,))), 64, 0)
    obs = {"vector": np.ones((64, 3), np.float32), "is_last": np.zeros(64, bool)}
    sent = actor.act(np.arange(64), {**obs, "is_first": np.ones(64, bool)})
    assert 1 == np.abs(sent).max() == np.sort(np.abs(sent).ravel())[-8]
    stored = actor.update.policy.encode(torch.from_numpy(sent))
    assert torch.equal(actor.carry["action"], stored)


class OneEpisode:
    """A pool of one slot whose episodes last five steps."""

    count = 1

    def __init__(self):
        self.age = -1

    def recv(self):
        self.age = (self.age + 1) % 6
        flags = {"is_first": self.age == 0, "is_last": self.age == 5, "is_terminal": False}
        numbers = {"age": self.age, "episode": 0, "reward": 0.0}
        obs = {key: np.array([value]) for key, value in {**flags, **numbers}.items()}
        return np.array([0]), {**obs, "vector": np.zeros((1, 3), np.float32)}

    def send(self, ids, action):
        pass

    def seed_of(self, slot, episode):
        return 0


@pytest.mark.parametrize(("forget", "times"), [(0, 0), (3, 2)])
def test_an_evaluation_forgets_once_an_episode_when_asked(tiny, monkeypatch, forget, times):
    ids = []
    monkeypatch.setattr(Actor, "forget", lambda self, rows: ids.append(rows.tolist()))
    play(Update(tiny(), OBS, ACT), OneEpisode(), 2, 0, True, forget)
    assert ids == [[0]] * times


@pytest.mark.gpu
def test_norms_of_x_are_on_the_host_as_soon_as_the_action_is(tiny):
    actor = Actor(Update(tiny(), OBS, ACT).cuda(), 64, 0)
    obs = {"vector": np.ones((64, 3), np.float32), "is_last": np.zeros(64, bool)}
    with torch.cuda.stream(torch.cuda.Stream()):
        actor.act(np.arange(64), {**obs, "is_first": np.ones(64, bool)})
    norms = actor.x_norm.clone()
    assert norms.device.type == "cpu"
    torch.cuda.synchronize()
    torch.testing.assert_close(norms, actor.latents["x"].norm(dim=-1).cpu(), rtol=0, atol=0)
