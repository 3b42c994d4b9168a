"""One update: what reaches what, what each setting changes, and what a value converges to."""

import dataclasses

import numpy as np
import pytest
import torch

from agent import seeding
from agent.auto import fake_batch
from agent.checkpoint import check_model
from agent.imagination import imagine
from agent.learner import Compiled, Learner, NonFiniteError
from agent.optim import LaProp
from agent.published import acting_copy
from agent.update import Update
from configs.load import replace_flat, resolve
from envs.env import Space
from envs.testing import ConstantReward
from worldmodels.cores import CORES
from worldmodels.transformer import since_first
from worldmodels.world_model import tree_map

OBS = {"vector": Space("vector", (3,))}
DISCRETE, BOX = Space("discrete", (2,), (3, 2)), Space("vector", (2,))


def make(config, act=DISCRETE):
    torch.manual_seed(0)
    update = Update(config, OBS, act)
    # Zero outputs of reward and value hide what would reach them.
    for head in (update.world.reward, update.critic.mlp, update.slow.mlp):
        torch.nn.init.normal_(head[-1].weight, std=0.01)
    return update


def loss_of(update, seed=0):
    batch = fake_batch(update, 2, 16)
    noise = update.noise(2, 16, seeding.generator(seed, "test"))
    total, metrics, _ = update(batch, noise)
    return total, metrics


@pytest.mark.parametrize("core", ["gru", "s3m"])
@pytest.mark.parametrize("features", ["output", "hidden", "full"])
@pytest.mark.parametrize("act", [DISCRETE, BOX], ids=["discrete", "continuous"])
def test_every_trainable_parameter_gets_a_gradient(tiny, core, features, act):
    config = tiny("--core", core, "--behaviour.features", features, "--loss.free", "0")
    update = make(config, act)
    loss_of(update)[0].backward()
    for name, param in update.trainable():
        assert param.grad is not None, name
        assert param.grad.abs().sum() > 0, name


@pytest.mark.parametrize("actor_grad", ["reinforce", "dynamics"])
@pytest.mark.parametrize("core", CORES)
def test_an_update_stays_on_its_device_and_waits_for_no_number(tiny, monkeypatch, core, actor_grad):
    """On a device whose tensors have no contents: to read one, or to mix devices, raises."""
    autocast, enabled = torch.autocast, torch.is_autocast_enabled
    monkeypatch.setattr(torch, "autocast", lambda kind, **given: autocast("cpu", **given))
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: enabled("cpu"))
    flags = ("--behaviour.actor_grad", actor_grad, "--behaviour.features", "full")
    config = tiny("--core", core, *flags)
    config = replace_flat(config, {"behaviour.horizon": 9})  # across the ends of segments
    update = Update(config, OBS, DISCRETE).to("meta")
    optimizer = LaProp(update.trainable(), config.optim)
    batch = fake_batch(update, 2, 32)
    batch["is_first"][0, 13] = True
    batch["age"] = since_first(batch["is_first"], torch.tensor([3, 0]))
    plan = update.world.core.plan(batch["is_first"].numpy(), batch["age"].numpy())
    del batch["plan"]
    batch = {**{key: value.to("meta") for key, value in batch.items()}, "plan": plan}
    loss, metrics, carry = update(batch, update.noise(2, 32, None))
    loss.backward()
    optimizer.step()
    update.update_slow()
    assert {value.device.type for value in metrics.values()} == {"meta"}
    tree_map(lambda leaf: leaf.device.type == "meta" or pytest.fail("a carry elsewhere"), carry)


@pytest.mark.parametrize("readout", [0, 24])
def test_imagination_starts_from_the_last_steps_of_each_row(tiny, readout):
    """States before the last K change neither the policy's nor the value's loss, given theirs."""
    update = make(tiny("--behaviour.starts", "4", "--model.readout", str(readout)))
    assert update.world.h == (readout or update.world.core.out)
    noise = update.noise(2, 16, seeding.generator(0, "test"))
    assert noise["z"].shape[:2] == (update.config.behaviour.horizon, 2 * 4)
    batch = fake_batch(update, 2, 16)
    batch["action"] = update.policy.encode(batch["action"])
    _, start = update.world.losses(batch, update.world.initial(2), noise["post"])
    trajectory = imagine(update.world, update.actor, update.policy, start, noise, False, 4)
    torch.testing.assert_close(trajectory.hz[0], start["hz"][:, -4:].flatten(0, 1))
    # The roll goes on from the same steps as the features: one step by hand from the context.
    context = {key: value[:, -4:].flatten(0, 1) for key, value in start["context"].items()}
    u = torch.cat([start["z"][:, -4:].flatten(0, 1), trajectory.action[0]], -1)
    h = update.world.readout(update.world.core.step(u, None, context)[0])
    torch.testing.assert_close(trajectory.hz[1, :, : h.shape[-1]], h)
    with pytest.raises(ValueError, match=r"behaviour\.starts 1"):
        make(tiny("--behaviour.starts", "1"))


def test_imagined_actions_are_taken_within_the_bounds_that_replayed_ones_keep(tiny):
    update = make(tiny(), BOX)
    batch, noise = fake_batch(update, 2, 16), update.noise(2, 16, seeding.generator(0, "test"))
    batch["action"] = update.policy.encode(batch["action"].clamp(-1, 1))
    _, start = update.world.losses(batch, update.world.initial(2), noise["post"])
    trajectory = imagine(update.world, update.actor, update.policy, start, noise, False, 16)
    assert trajectory.action.abs().max() > 1
    state = {key: value.flatten(0, 1) for key, value in start["context"].items()}
    action = trajectory.action[0].clamp(-1, 1)
    h, _, _ = update.world.core.step(torch.cat([start["z"].flatten(0, 1), action], -1), None, state)
    torch.testing.assert_close(trajectory.hz[1, :, : h.shape[-1]], h)


def test_feature_widths_are_those_of_their_parts(tiny):
    widths = {}
    for features in ("output", "hidden", "full"):
        update = make(tiny("--behaviour.features", features))
        widths[features] = update.actor.inputs
    core, z = update.world.core, update.world.z
    assert widths == {
        "output": core.out + z,
        "hidden": core.hidden + z,
        "full": core.out + core.hidden + z,
    }


@pytest.mark.parametrize("core", CORES)
def test_a_policy_that_reads_h_does_not_read_it_again_as_x(tiny, core):
    update = make(tiny("--core", core, "--behaviour.features", "full"))
    of, z = update.world.core, update.world.z
    x = 0 if core in ("gru", "transformer") else of.hidden
    assert update.actor.inputs == update.critic.inputs == of.out + x + z


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("grad", ["reinforce", "dynamics"])
@pytest.mark.parametrize(
    ("losses", "who"), [({"policy"}, {"actor"}), ({"policy", "value"}, {"actor", "critic"})]
)
def test_a_policy_moves_itself_alone_and_a_value_of_what_is_imagined_the_critic(
    tiny, core, grad, losses, who
):
    """A gradient through the world model that moved it would teach it to promise more."""
    every = ("dyn", "rep", "rec", "reward", "cont", "policy", "value", "repval")
    scales = {f"loss.{key}": float(key in losses) for key in every}
    flags = ("--core", core, "--behaviour.actor_grad", grad, "--behaviour.features", "full")
    update = make(replace_flat(tiny(*flags), scales), BOX)
    loss_of(update)[0].backward()
    moved = {
        name.split(".")[0]
        for name, param in update.trainable()
        if param.grad is not None and param.grad.abs().sum() > 0
    }
    assert moved == who
    assert all(param.requires_grad for param in update.world.parameters())


def test_observations_may_be_called_what_losses_are(tiny):
    found = []
    for name in ("vector", "cont", "policy", "rep", "total"):
        torch.manual_seed(0)
        update = Update(tiny(), {name: OBS["vector"]}, DISCRETE)
        total, metrics = loss_of(update)
        assert sum(key.startswith("loss/") for key in metrics) == 9
        found.append([total, metrics["loss/total"], metrics[f"loss/rec/{name}"]])
    assert all(row == found[0] for row in found)


def test_a_replayed_value_loss_that_does_not_count_is_not_computed(tiny):
    _, with_it = loss_of(make(tiny()))
    _, without = loss_of(make(tiny("--loss.repval", "0")))
    assert set(with_it) - set(without) == {"loss/repval"}


SWITCHES = {
    "loss.dyn": 2.0,
    "loss.rep": 2.0,
    "loss.free": 0.1,
    "loss.rec": 2.0,
    "loss.reward": 2.0,
    "loss.cont": 2.0,
    "loss.policy": 2.0,
    "loss.value": 2.0,
    "loss.repval": 2.0,
    "model.unimix": 0.2,
    "behaviour.lam": 0.5,
    "behaviour.starts": 4,
    "behaviour.entropy": 0.1,
    "behaviour.unimix": 0.3,
    "behaviour.discount_horizon": 10.0,
    "behaviour.slow_reg": 3.0,
    "behaviour.return_floor": 1e9,
    "behaviour.actor_grad": "dynamics",
    "behaviour.feature_norm": False,
    "s3m.discretisation": "zoh",
    "s3m.dt_min": 0.01,
    "s3m.dt_max": 0.5,
}


@pytest.mark.parametrize("key", SWITCHES)
def test_every_setting_changes_the_loss_or_its_gradient(tiny, key):
    config = tiny("--behaviour.features", "full", "--loss.free", "0.5")
    results = []
    for settings in (config, replace_flat(config, {key: SWITCHES[key]})):
        update = make(settings)
        total, _ = loss_of(update)
        total.backward()
        grads = [p.grad.flatten() for _, p in update.trainable() if p.grad is not None]
        results.append((total.detach(), torch.cat(grads)))
    (one, g1), (other, g2) = results
    assert not torch.equal(one, other) or g1.shape != g2.shape or not torch.equal(g1, g2)


def test_initial_state_may_be_zeros_or_learned(tiny):
    names = {
        kind: {name for name, _ in make(tiny("--s3m.initial", kind)).trainable()}
        for kind in ("zeros", "learned")
    }
    assert names["learned"] - names["zeros"] == {"world.core.start"}


def test_slow_critic_and_return_range_follow_at_their_rates(tiny):
    config = tiny("--behaviour.slow_rate", "0.5", "--behaviour.return_rate", "0.25")
    update = make(config)
    before = [param.clone() for param in update.slow.parameters()]
    update.update_slow()
    for old, slow, new in zip(
        before, update.slow.parameters(), update.critic.parameters(), strict=True
    ):
        torch.testing.assert_close(slow.data, (old + new.data) / 2)
    loss_of(update)
    assert update.return_range.abs().sum() > 0


def test_a_poisoned_reward_stops_with_module_and_update_named(tiny):
    update = make(tiny())
    learner = Learner(update, 0, "float32")
    batch = fake_batch(update, 2, 16)
    learner.train(batch)
    batch["reward"][0, 5] = float("nan")
    with pytest.raises(NonFiniteError, match=r"update 2 .*loss/reward.*world\.core"):
        learner.train(batch)


def test_a_poisoned_update_can_be_left_out_as_if_it_had_not_been(tiny, caplog):
    config = replace_flat(tiny(), {"optim.nonfinite": "skip"})
    kept, states = [], []
    for poisoned in (False, True):
        update = make(config)
        learner = Learner(update, 0, "float32", keep=lambda number, batch: kept.append(number))
        batch = fake_batch(update, 2, 16)
        metrics = learner.train(batch)
        if poisoned:
            bad = {**batch, "reward": torch.full_like(batch["reward"], torch.nan)}
            nothing = learner.train(bad)
            assert nothing.keys() == metrics.keys()
            assert all(value.isnan() for value in nothing.values())
        learner.updates = 2  # noise follows the number
        learner.train(batch)
        states.append({**update.state_dict(), **dict(enumerate(learner.optimizer.momentum))})
    assert (kept, learner.skipped) == ([2], 1)
    assert "update 2 is left out, not finite: losses" in caplog.text
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_twenty_updates_equal_ten_then_a_restored_ten(tiny):
    config = replace_flat(tiny(), {"optim.warmup": 15})
    runs = []
    for split in (False, True):
        learner = Learner(make(config), 3, "float32")
        for step in range(20):
            if split and step == 10:
                state = learner.state()
                learner = Learner(make(config), 3, "float32")
                learner.restore(state)
            batch = fake_batch(learner.update, 2, 16)
            batch["reward"] += step
            learner.train(batch)
        runs.append(learner.update.state_dict())
    assert all(torch.equal(runs[0][key], runs[1][key]) for key in runs[0])


@pytest.mark.parametrize(
    ("truncation", "updates", "atol"),
    [("bootstrap", 500, 0.0), ("terminal", 900, 0.1)],
)
@pytest.mark.slow
def test_value_of_a_constant_reward_under_a_time_limit(truncation, updates, atol):
    """Reward 1, discount 0.9, episodes of 20: the value is within 5% of 10 at every step when the
    limit is a truncation, and the finite sum when it counts as an end."""
    flags = "--core s3m --behaviour.discount_horizon 10 --behaviour.features output"
    flags += " --optim.lr 3e-3 --optim.warmup 50 --model.units 32"
    config = resolve(["--size", "debug", "--precision", "float32", *flags.split()])
    env = ConstantReward()
    steps = [env.reset(0)] + [env.step(np.zeros(1)) for _ in range(20)]
    rows = {key: torch.tensor(np.stack([s[key] for s in steps * 2])) for key in steps[0]}
    if truncation == "terminal":
        rows["is_terminal"] = rows["is_last"].clone()
    # The observation tells the step within the episode, so the model can know what is left.
    rows["age"] = torch.arange(21, dtype=torch.int32).repeat(2)
    batch = {key: value.expand(4, *value.shape) for key, value in rows.items()}
    torch.manual_seed(0)
    update = Update(config, env.obs_space, env.act_space)
    learner = Learner(update, 0, "float32")
    random = torch.Generator().manual_seed(0)
    for _ in range(updates):
        actions = torch.randint(0, 3, (4, 42, 1), generator=random, dtype=torch.int32)
        learner.train({**batch, "action": actions})
    with torch.no_grad():
        full = {**batch, "action": update.policy.encode(actions)}
        _, out = update.world.losses(full, update.world.initial(4), update.world.noise(4, 42))
        value = update.value(update.critic(out["hz"], out["x"])).mean(0)[21:41]
    left = torch.arange(20, 0, -1)
    expected = 10 * torch.ones(20) if truncation == "bootstrap" else 10 * (1 - 0.9**left)
    torch.testing.assert_close(value, expected, rtol=0.05, atol=atol)


@pytest.mark.parametrize("core", sorted(CORES))
def test_the_first_step_of_a_row_does_not_outweigh_all_others(core):
    torch.manual_seed(0)
    update = Update(resolve(["--core", core, "--size", "1m", "--device", "cpu"]), OBS, DISCRETE)
    batch = fake_batch(update, 2, 16)
    update(batch, update.noise(2, 16, seeding.generator(0, "test")))[0].backward()
    norms = {name: p.grad.norm() for name, p in update.trainable() if p.grad is not None}
    assert max(norms.values()) < 1e4, max(norms, key=norms.get)


@pytest.mark.parametrize("flags", [("elmur", "dropout"), ("rate", "dropout_memory")])
def test_what_dropout_drops_is_a_function_of_seed_and_update(tiny, flags):
    """So that a resumed run drops what the uninterrupted one would have dropped."""
    core, name = flags
    config = tiny("--core", core, f"--{core}.{name}", "0.5")
    whole = Learner(make(config), 0, "float32")
    batch = fake_batch(whole.update, 2, 16)
    whole.train(batch)
    state = tree_map(torch.clone, whole.state()["model"]), whole.optimizer.state_dict()
    expected = whole.train(batch)["loss/total"]
    resumed = Learner(make(config), 0, "float32")
    resumed.restore({**whole.state(), "model": state[0], "optimizer": state[1], "updates": 1})
    torch.manual_seed(99)
    assert resumed.train(batch)["loss/total"] == expected
    plain = Learner(make(tiny("--core", core)), 0, "float32")
    assert not plain.drops
    assert plain.train(batch)["loss/total"] != whole.train(batch)["loss/total"]


def test_the_state_after_a_batch_holds_its_last_steps_alone(tiny):
    update = make(tiny("--core", "s3m"))
    batch = fake_batch(update, 2, 16)
    _, _, carry = update(batch, update.noise(2, 16, seeding.generator(0, "test")))
    sizes = []
    tree_map(lambda leaf: sizes.append((leaf.untyped_storage().nbytes(), leaf.nbytes)), carry)
    assert all(held == needed for held, needed in sizes)


@pytest.mark.slow
@pytest.mark.parametrize("core", ["gru", "s3m"])
def test_a_compiled_update_is_the_plain_one_and_is_compiled_once(tiny, core):
    config = replace_flat(tiny("--core", core), {"behaviour.horizon": 2})
    metrics = []
    for compiled in (False, True):
        learner = Learner(make(config), 0, "float32", compiled)
        batch = fake_batch(learner.update, 2, 4)
        learner.train(batch)
        count = torch._dynamo.utils.counters["frames"]["total"]
        metrics.append(learner.train(batch))
        assert torch._dynamo.utils.counters["frames"]["total"] == count
        assert isinstance(learner.forward, Compiled) == compiled
    assert count > 0
    # Ages that no step has give a norm of NaN.
    torch.testing.assert_close(*metrics, atol=1e-4, rtol=1e-3, equal_nan=True)


def test_an_update_that_cannot_be_compiled_goes_on_without(tiny, monkeypatch, caplog):
    def refuse(*args):
        raise RuntimeError("no compiler found")

    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: refuse)
    learner = Learner(make(tiny()), 0, "float32", True)
    for _ in range(2):
        learner.train(fake_batch(learner.update, 2, 16))
    assert learner.updates == 2
    assert [r.message for r in caplog.records if r.levelname == "WARNING"] == [
        "not compiled, going on without: no compiler found"
    ]


def test_configuration_is_never_changed_by_an_update(tiny):
    config = tiny()
    before = dataclasses.asdict(config)
    loss_of(make(config))
    assert dataclasses.asdict(config) == before


def test_weights_of_another_model_are_refused(tiny):
    """What is left over counts too: acting would do without it, and play something else."""
    one, other = (
        Learner(make(tiny("--behaviour.features", features)), 0, "float32")
        for features in ("output", "full")
    )
    for held, by in ((one.state(), other), (other.state(), one)):
        with pytest.raises(ValueError, match="weights differ, such as actor"):
            by.restore(held)
        acting, whole = acting_copy(by.update).state_dict(), by.update.state_dict()
        with pytest.raises(ValueError, match="weights differ, such as actor"):
            check_model(held["model"], acting, whole)
        check_model(whole, acting, whole)
        check_model(acting, acting, whole)
    one.restore(one.state())
