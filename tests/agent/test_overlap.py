"""Acting beside learning: what stays exact, what is bounded, and how either side ends the other."""

import dataclasses
import json
import threading
import time
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from agent.actor import Actor
from agent.checkpoint import Checkpoints
from agent.environments import env_maker, fields
from agent.learner import Learner, NonFiniteError
from agent.logger import Logger, Terminal
from agent.loop import Loop
from agent.overlap import Overlapped
from agent.published import Published
from agent.update import Update
from configs.schema import StopConfig
from envs.env import Space
from envs.pool import EnvPool
from replay.loader import Loader
from replay.replay import Replay


@pytest.fixture
def make(tiny, tmp_path):
    """A function from flags to a loop that is ready to run, from its checkpoint if there is one."""
    opened = []

    def build(*flags, task="test_counter", folder="run", steps=200):
        folder = tmp_path / folder
        config = tiny("--task", task, "--env.count", "2", "--env.restarts_per_hour", "0", *flags)
        config = dataclasses.replace(config, stop=StopConfig(steps))
        env = config.env
        limit = env.restarts_per_hour
        pool = EnvPool(env_maker(config), env.count, 0, False, restarts_per_hour=limit)
        torch.manual_seed(0)
        update = Update(config, pool.obs_space, pool.act_space)
        replay = Replay(folder / "replay", fields(pool), env.count, 10_000, 10**6)
        overlapped = config.loop.mode == "overlapped"
        loader = Loader(replay, 2, 16, (0, 0), torch.device("cpu"), depth=2, exact=not overlapped)
        checkpoints = Checkpoints(folder / "checkpoints")
        logger = Logger(folder)
        loop = (Overlapped if overlapped else Loop)(
            config, pool, Actor(update, env.count, 0), Learner(update, 0, "float32"), replay,
            loader, logger, Terminal(), checkpoints, 1,
        )  # fmt: skip
        if checkpoints.published():
            loop.restore(Checkpoints.load(checkpoints.published()[-1]))
        opened.extend([loader, logger, pool])
        return loop

    yield build
    for part in opened:
        part.close()


def slow(monkeypatch, thing, name, seconds):
    """Every call of a method takes `seconds` longer."""
    call = getattr(thing, name)
    monkeypatch.setattr(thing, name, lambda *args: (time.sleep(seconds), call(*args))[1])


def watched(monkeypatch, look, *methods):
    """Method name -> the set of what `look()` gave at every call of it."""
    seen = {name: set() for _, name in methods}

    def watch(thing, name):
        call = getattr(thing, name)

        def instead(*args):
            seen[name].add(look())
            return call(*args)

        monkeypatch.setattr(thing, name, instead)

    for method in methods:
        watch(*method)
    return seen


def actors():
    return [thread for thread in threading.enumerate() if thread.name.startswith("actor")]


def test_a_state_has_the_fresh_windows_that_its_waiting_batches_have_not(make, monkeypatch):
    loop = make("--loop.mode", "overlapped")
    loop.weights = lambda: Loop.weights(loop)  # no thread publishes any
    for _ in range(60):
        Loop.tick(loop)
    slow(monkeypatch, loop.replay, "draw", 0.1)
    loop.loader.next(0)
    state = loop.state()
    assert [update for update, _ in state["loader"]["waiting"]] == [1, 2]
    assert state["replay"]["fresh"] == [list(item) for item in loop.replay.fresh]
    drawn = {tuple(pair) for _, pairs in state["loader"]["waiting"] for pair in pairs[:1]}
    assert not drawn & {tuple(pair) for pair in state["replay"]["fresh"]}


def test_a_save_reads_no_checkpoint_and_a_resumed_run_of_each_no_more_than_its_needs(
    make, monkeypatch
):
    read, collected, load = [], [], Checkpoints.load_part
    monkeypatch.setattr(
        Checkpoints, "load_part", lambda path, *more: (read.append(path), load(path, *more))[1]
    )
    loop = make("--loop.mode", "lockstep", steps=60)
    for _ in range(3):
        loop.save()
        loop.tick()
    collect = Replay.collect
    monkeypatch.setattr(
        Replay, "collect", lambda *args: (collected.append(args[1]), collect(*args))[1]
    )
    loop.save()
    assert not read
    again = make("--loop.mode", "lockstep", steps=60)
    # What is being resumed is read whole, and the other one for its needs.
    assert [path.name for path in read] == ["learner.pt", "run.pt", "run.pt", "run.pt"]
    before, after = collected
    assert [need["first"] for need in before] == [need["first"] for need in after]
    assert len(before) == 2
    again.save()
    assert len(read) == 4


@pytest.mark.parametrize("ratio", ["0.5", "8", "64"])
def test_a_run_makes_exactly_the_updates_of_lockstep(make, ratio):
    runs = {}
    for mode in ("lockstep", "overlapped"):
        loop = make("--loop.mode", mode, "--loop.train_ratio", ratio, folder=mode, steps=100)
        loop.run()
        runs[mode] = (loop.agent_step, loop.fill_step, loop.replay.added, loop.learner.updates)
    assert runs["overlapped"] == runs["lockstep"]
    step, fill, _, updates = runs["overlapped"]
    assert updates == 1 + int((step - fill) * float(ratio) / 32)  # a batch is 2 x 16 steps


@pytest.mark.parametrize("lead", [1, 3])
def test_acting_weights_lack_at_most_lead_updates(make, monkeypatch, lead):
    loop = make("--loop.lead", str(lead), "--loop.train_ratio", "16")
    slow(monkeypatch, loop.learner, "train", 0.005)  # so that acting gets as far ahead as it may
    loop.run()
    rows = (loop.logger.folder / "metrics.jsonl").read_text().splitlines()
    last = json.loads(rows[-1])
    assert last["acting/staleness_max"] == lead
    assert 0 <= last["acting/staleness"] <= lead


@pytest.mark.parametrize("mode", ["lockstep", "overlapped"])
def test_the_mode_decides_which_threads_act_draw_and_learn(make, monkeypatch, mode):
    loop = make("--loop.mode", mode, steps=60)
    seen = watched(
        monkeypatch,
        lambda: threading.current_thread().name.split("_")[0],
        *((loop.actor, "act"), (loop.replay, "draw"), (loop.learner, "train")),
    )
    loop.run()
    own = {"lockstep": ("MainThread", "MainThread"), "overlapped": ("actor", "replay")}[mode]
    assert seen == {"act": {own[0]}, "draw": {own[1]}, "train": {"MainThread"}}


def test_environments_go_on_during_an_update(make, monkeypatch):
    loop = make("--loop.lead", "2", "--loop.train_ratio", "1", steps=200)
    train, during = loop.learner.train, []

    def long_update(batch):
        before, deadline = loop.agent_step, time.monotonic() + 10
        # The 32 steps of one more update: `lead` allows for two.
        while loop.agent_step < before + 32 and time.monotonic() < deadline and not during:
            time.sleep(0.001)
        during.append(loop.agent_step - before)
        return train(batch)

    monkeypatch.setattr(loop.learner, "train", long_update)
    loop.run()
    assert during[0] >= 32


@pytest.mark.parametrize("mode", ["lockstep", "overlapped"])
def test_a_failure_while_acting_ends_the_run_with_its_own_words(make, mode):
    # Checkpoints all the time: none may be tried on what the failure left half done.
    loop = make("--loop.mode", mode, "--checkpoint.every", "0", task="test_crash")
    with pytest.raises(RuntimeError, match=r"more than env\.restarts_per_hour 0"):
        loop.run()
    assert not actors()
    if mode == "overlapped":
        with pytest.raises(RuntimeError, match="restarts_per_hour"):
            loop.save()


def test_a_failure_of_the_learner_ends_acting(make, monkeypatch):
    loop = make()

    def fail(batch):
        raise NonFiniteError("update 1 is not finite")

    monkeypatch.setattr(loop.learner, "train", fail)
    with pytest.raises(NonFiniteError):
        loop.run()
    assert not actors()
    ids, _ = loop.pool.recv()  # the last tick was a whole one: its actions were sent
    assert len(ids)


def test_a_request_to_stop_ends_while_acting_waits_for_the_learner(make, monkeypatch):
    loop = make("--loop.lead", "1", "--loop.train_ratio", "100")
    train = loop.learner.train

    def stop(batch):
        if loop.learner.updates == 5:
            loop.stop = "SIGTERM"
        return train(batch)

    monkeypatch.setattr(loop.learner, "train", stop)
    loop.run()
    assert loop.learner.updates == 6
    assert loop.due() > 6
    assert not actors()


def test_checkpoints_during_a_run_are_whole_and_can_be_gone_on_from(make, monkeypatch):
    flags = ("--checkpoint.every", "0", "--loop.train_ratio", "8")
    loop = make(*flags, steps=120)
    saved = []
    save = loop.checkpoints.save

    def keep(step, parts):
        saved.append((parts["run"], parts["learner"]["updates"]))
        return save(step, parts)

    monkeypatch.setattr(loop.checkpoints, "save", keep)
    loop.run()
    assert len(saved) > 10
    for run, updates in saved:
        # Every record is an observation that was acted on, or the last one of an episode.
        assert sum(run["replay"]["count"]) == run["agent_step"] + sum(run["pool"]["episode"])
        assert len(run["loader"]["waiting"]) == (2 if updates else 0)
    again = make(*flags, steps=160)
    assert again.agent_step == loop.agent_step
    assert again.replay.added == loop.replay.added
    assert again.learner.updates == loop.learner.updates
    assert torch.equal(again.learner.update.return_range, loop.learner.update.return_range)
    again.run()
    assert again.agent_step >= 160
    assert again.learner.updates == again.due()


def test_a_checkpoint_waits_for_one_tick_only(make, monkeypatch):
    loop = make("--checkpoint.every", "0", "--loop.train_ratio", "0.1", steps=100)
    slow(monkeypatch, loop.pool, "recv", 0.005)
    passed = []
    save, write = loop.save, loop.checkpoints.save

    def ask():
        asked = loop.agent_step
        monkeypatch.setattr(
            loop.checkpoints,
            "save",
            lambda step, parts: (passed.append(step - asked), write(step, parts))[1],
        )
        save()

    monkeypatch.setattr(loop, "save", ask)
    loop.run()
    assert len(passed) > 5
    assert max(passed) <= 2  # two environments: no more than the tick that was under way


def test_the_learner_keeps_its_threads_and_the_actor_has_one(make, monkeypatch):
    loop = make("--loop.train_ratio", "8", steps=40)
    methods = (loop.actor, "act"), (loop.learner, "train")
    counts = watched(monkeypatch, torch.get_num_threads, *methods)
    torch.set_num_threads(2)
    try:
        loop.run()
    finally:
        torch.set_num_threads(1)
    assert counts == {"act": {1}, "train": {2}}


OBS, ACT = {"vector": Space("vector", (3,))}, Space("discrete", (1,), (3,))


@pytest.mark.parametrize("core", ["gru", "s3m"])
def test_published_weights_act_like_the_learners(tiny, core):
    update = Update(tiny("--core", core), OBS, ACT)
    published = Published(update, 0)
    for param in update.parameters():
        param.data += 0.01
    published.publish(1)
    copied, number = published.take()
    assert number == 1
    assert copied.world.decoder is copied.critic is None  # acting has no use for them
    random = np.random.default_rng(0)
    actors = Actor(update, 4, 0), Actor(copied, 4, 0)
    for _ in range(5):
        obs = {"vector": random.normal(size=(4, 3)).astype(np.float32)}
        obs |= {"is_first": np.zeros(4, bool), "is_last": np.zeros(4, bool)}
        left, right = (actor.act(np.arange(4), obs) for actor in actors)
        np.testing.assert_array_equal(left, right)
        torch.testing.assert_close(actors[0].x_norm, actors[1].x_norm, rtol=0, atol=0)


def test_an_actor_that_is_overtaken_looks_again(tiny):
    class Overtaken(Published):
        """The next look at `latest` is followed by an update, before anything else happens."""

        soon = None

        @property
        def latest(self):
            found, soon, self.soon = self.named, self.soon, None
            if soon:
                self.publish(soon)
            return found

        @latest.setter
        def latest(self, index):
            self.named = index

    published = Overtaken(Update(tiny(), OBS, ACT), 0)
    published.publish(1)
    published.soon = 2
    assert published.take()[1] == 2


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_is_taken_is_of_one_update_and_does_not_change(tiny, device):
    update = Update(tiny(), OBS, ACT).to(device)
    published = Published(update, 0)
    done = threading.Event()

    def learn():
        number = 0
        while not done.is_set():
            number += 1
            for param in update.parameters():
                param.data.fill_(number)
            published.publish(number)

    learner = threading.Thread(target=learn)
    learner.start()
    numbers = []
    try:
        while published.number == 0:
            time.sleep(0.001)
        deadline = time.monotonic() + 1
        stream = torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else nullcontext()
        with stream:
            while time.monotonic() < deadline:
                copied, number = published.take()
                for _ in range(2):
                    ends = [param.flatten()[[0, -1]] for param in copied.parameters()]
                    assert (torch.stack(ends) == number).all()
                numbers.append(number)
    finally:
        done.set()
        learner.join()
    assert numbers == sorted(numbers)
    assert len(set(numbers)) > 20
