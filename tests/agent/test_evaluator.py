"""Evaluation beside training: the same numbers as apart, never in the way, gone with its parent."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from agent.environments import env_maker
from agent.evaluate import NICE, SLOTS, evaluate, logged, main, weights_file
from agent.evaluator import Evaluator
from agent.logger import Logger
from agent.published import acting_copy, acting_weights
from agent.scores import lines, normalised
from agent.update import Update
from configs.load import blocks
from envs.pool import episode_seed

LOW = min(19, os.nice(0) + NICE)
ROOT = Path(__file__).parents[2]
SMALL = [
    *("--size", "debug", "--precision", "float32", "--device", "cpu", "--threads", "1"),
    *("--batch.size", "2", "--batch.length", "16", "--behaviour.horizon", "3"),
    *("--loop.train_ratio", "8", "--log.every", "0.2", "--eval.episodes", "5"),
]


def start(logdir, *flags):
    command = [sys.executable, "-m", "agent.train", "--logdir", str(logdir), *SMALL, *flags]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def until(true, seconds=60):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def axes(step):
    names = ("env_step", "update", "train_flops", "wall_seconds")
    return {"agent_step": step, **dict.fromkeys(names, step)}


@pytest.fixture
def beside(tiny, tmp_path):
    """A function from flags to an evaluator with its logger and the weights to evaluate."""
    opened = []

    def build(*flags, task="test_counter", agent_step=0):
        config = tiny("--task", task, "--eval.every", "100", "--eval.episodes", "3", *flags)
        env = env_maker(config)()
        torch.manual_seed(0)
        update = Update(config, env.obs_space, env.act_space)
        logger = Logger(tmp_path)
        evaluator = Evaluator(config, tmp_path, logger, agent_step)
        opened.extend([evaluator, logger])
        return evaluator, update

    yield build
    for part in opened:
        part.close()


def results(evaluator, update, step):
    """The rows once the evaluation that is under way is done, looked for at agent step `step`."""

    def done():
        evaluator.look(axes(step), update)
        return evaluator.asked is None

    until(done)
    return logged(evaluator.logger.folder)


@pytest.mark.parametrize("mode", [pytest.param("lockstep", marks=pytest.mark.slow), "overlapped"])
def test_what_a_run_logs_is_what_the_command_gives_for_the_same_weights(tmp_path, mode, capsys):
    flags = ("--task", "gym_CartPole-v1", "--eval.every", "150", "--loop.mode", mode)
    process = start(tmp_path, *flags, "--stop.steps", "400")
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    rows = logged(tmp_path)
    assert 150 <= rows[0]["agent_step"] < 300  # overlapped, acting is some steps further
    assert rows[-1]["agent_step"] >= 400  # the run's last weights are evaluated before it ends
    for repeat in (True, False):
        result = evaluate(tmp_path, repeat=repeat)
        assert result["agent_step"] == rows[-1]["agent_step"]
        for how in ("greedy", "sampled"):
            assert result[how]["mean"] == rows[-1][f"eval/{how}/return"]
            assert result[how]["interval_95"] == rows[-1][f"eval/{how}/interval_95"]
    assert result["greedy"]["episodes"] == rows[-1]["eval/episodes"] == 5
    seen = {json.loads(row)["seed"] for row in (tmp_path / "scores.jsonl").open()}
    assert not seen & {row["seed"] for row in result["sampled"]["results"]}
    assert main(["--logdir", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count(f"step {rows[-1]['agent_step']}, the same; highest") == 2


def test_repeating_without_an_evaluation_says_how_to_have_one(tmp_path, capsys):
    process = start(tmp_path, "--task", "test_counter", "--stop.steps", "40")
    process.communicate(timeout=100)
    assert main(["--logdir", str(tmp_path), "--repeat"]) == 2
    assert "--eval.every" in capsys.readouterr().err


def test_the_row_stands_at_the_step_of_the_weights_not_of_the_result(beside):
    evaluator, update = beside()
    evaluator.look(axes(99), update)
    assert evaluator.asked is None  # not due yet
    evaluator.look(axes(103), update)
    rows = results(evaluator, update, 180)
    assert [row["agent_step"] for row in rows] == [103]
    assert rows[0]["eval/greedy/return"] == rows[0]["eval/sampled/return"] == 55
    assert rows[0]["eval/episodes"] == 3


def test_a_resumed_run_evaluates_when_the_next_is_due(beside):
    evaluator, update = beside(agent_step=250)
    evaluator.look(axes(260), update)
    assert evaluator.asked is None
    evaluator.look(axes(300), update)
    assert evaluator.asked


def test_the_last_weights_of_a_run_are_evaluated_once_and_not_after_a_request_to_stop(beside):
    evaluator, update = beside()
    for stopped, steps in ((True, []), (False, [150]), (False, [150])):
        evaluator.finish(axes(150), update, lambda stopped=stopped: stopped)
        assert [row["agent_step"] for row in logged(evaluator.logger.folder)] == steps


def test_a_busy_process_holds_up_nobody_and_what_falls_due_is_skipped(beside, caplog):
    evaluator, update = beside()
    until(lambda: psutil.Process(evaluator.process.pid).nice() == LOW)
    os.kill(evaluator.process.pid, signal.SIGSTOP)
    began = time.monotonic()
    for step in range(100, 400):
        evaluator.look(axes(step), update)
    assert time.monotonic() - began < 1
    assert evaluator.stats() == {"eval/skipped": 2, "eval/failed": 0}
    assert "step 200 is skipped: the one of step 100 is not done" in caplog.text
    os.kill(evaluator.process.pid, signal.SIGCONT)
    assert [row["agent_step"] for row in results(evaluator, update, 399)] == [100]


def test_weights_are_those_of_the_moment_at_which_it_was_due(beside):
    evaluator, update = beside()
    before = acting_weights(update)
    evaluator.begin(axes(100), update)
    with torch.no_grad():
        for parameter in update.parameters():
            parameter.zero_()
    results(evaluator, update, 100)
    saved = torch.load(weights_file(evaluator.logger.folder), weights_only=True)
    assert saved["agent_step"] == 100
    assert set(saved["weights"]) == set(before) == set(acting_copy(update).state_dict())
    assert all(torch.equal(saved["weights"][name], before[name]) for name in before)


def test_a_failed_evaluation_is_told_and_the_next_one_is_made(beside, monkeypatch, caplog):
    evaluator, update = beside()
    with monkeypatch.context() as patch:
        patch.setattr("agent.evaluator.acting_weights", lambda update: {})
        evaluator.begin(axes(100), update)
    assert not results(evaluator, update, 100)
    assert "evaluation at step 100 failed" in caplog.text
    assert "the checkpoint is of another model" in caplog.text
    evaluator.begin(axes(200), update)
    evaluator.process.kill()
    assert not results(evaluator, update, 200)
    assert "its process ended" in caplog.text
    assert evaluator.stats()["eval/failed"] == 2
    evaluator.look(axes(300), update)
    assert [row["agent_step"] for row in results(evaluator, update, 300)] == [300]


def test_a_run_waits_for_its_last_evaluation_only_so_long(beside, monkeypatch, caplog):
    monkeypatch.setattr("agent.evaluator.LONGEST", 0.2)
    evaluator, update = beside()
    monkeypatch.setattr(evaluator, "hand_over", lambda content: None)  # it never answers
    evaluator.finish(axes(150), update, lambda: False)
    assert (evaluator.asked, evaluator.failed, evaluator.process) == (None, 1, None)
    assert "not done within 0.2 s" in caplog.text


def test_one_that_hangs_is_given_up_for_those_after_it_and_skips_are_told_once(
    beside, monkeypatch, caplog
):
    evaluator, update = beside()
    monkeypatch.setattr(evaluator, "hand_over", lambda content: None)  # it never answers
    for step in (150, 250, 350):
        evaluator.look(axes(step), update)
    assert (evaluator.skipped, evaluator.failed) == (2, 0)
    assert caplog.text.count("is skipped") == 1
    monkeypatch.setattr("agent.evaluator.HUNG", -1.0)
    evaluator.look(axes(450), update)
    assert (evaluator.skipped, evaluator.failed) == (2, 1)
    assert evaluator.asked["agent_step"] == 450


def test_what_is_left_without_memory_is_told_apart(tmp_path, capsys):
    start(tmp_path, "--task", "test_counter", "--stop.steps", "40").communicate(timeout=100)
    assert main(["--logdir", str(tmp_path), "--episodes", "1", "--forget", "3"]) == 0
    assert "without memory from step 3" in capsys.readouterr().out
    assert json.loads((tmp_path / "evaluation.json").read_text())["forget"] == 3
    with pytest.raises(SystemExit):
        main(["--logdir", str(tmp_path), "--forget", "-3"])


def test_a_full_disk_fails_the_evaluation_alone(beside, monkeypatch, caplog):
    evaluator, update = beside()

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    evaluator.look(axes(100), update)
    assert not results(evaluator, update, 100)
    assert "No space left" in caplog.text


@pytest.mark.parametrize(
    ("how", "task", "count"),
    [
        ("kill", "test_hang", 1 + SLOTS),
        pytest.param("terminate", "test_counter", 1, marks=pytest.mark.slow),
    ],
)
def test_nothing_is_left_of_it_when_its_run_ends(tmp_path, how, task, count):
    # Every third episode hangs. Here not the first of training, but all of evaluation at once:
    # killed, it is inside a simulator that does not answer.
    seed = next(
        seed
        for seed in range(10_000)
        if all(episode_seed(seed, 0, n) % 3 for n in range(5))
        and not any(episode_seed(seed, slot, 0, "eval") % 3 for slot in range(SLOTS))
    )
    flags = ("--task", task, "--eval.every", "30", "--env.count", "1", "--seed", str(seed))
    run = start(tmp_path, *flags, "--stop.steps", "1000000", "--env.timeout", "1000")
    parent = psutil.Process(run.pid)

    def family():
        found = parent.children(recursive=True)
        nice = [process for process in found if process.nice() == LOW]  # evaluation, its slots
        return found if len(nice) == count else []

    try:
        until(family)
        members = family()
        getattr(run, how)()
        run.communicate(timeout=60)
    finally:
        run.kill()
    psutil.wait_procs(members, timeout=10)
    alive = [p for p in members if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert not alive


def test_scores_are_set_beside_those_of_others():
    assert normalised("atari_pong", 14.6) == {"human": 1.0}
    assert normalised("atari100k_private_eye", 24.9) == {"human": 0.0}
    assert normalised("atari_freeway", 14.8) == {"human": pytest.approx(0.5)}
    maze = normalised("memory_maze_9x9", 34.8)
    assert maze == {"human": pytest.approx(34.8 / 26.4), "oracle": 1.0}
    # Catch pays 1 or -1: without regret 1, and -0.6 with the baseline's of 1.6 an episode.
    assert normalised("bsuite_catch_3", 1.0) == {"best": 1.0}
    assert normalised("bsuite_catch_3", 0.2) == {"best": pytest.approx(0.5)}
    assert normalised("bsuite_memory_len_L30", -0.3) == {"best": 0.0}
    assert normalised("bsuite_memory_len_5", 0.5) == {"best": 0.5}
    for unknown in ("atari_Pitfall2", "popgym_AutoencodeEasy", "dmc_walker_walk", "tmaze_5"):
        assert normalised(unknown, 1.0) == {}


def test_every_suite_of_references_names_its_source_and_lines_above_random():
    assert {name: len(block["tasks"]) for name, block in blocks("references").items()} == {
        "memory_maze": 4,
        "bsuite": 7,
        "atari": 56,
        "atari100k": 56,
    }
    for suite, block in blocks("references").items():
        assert block["source"]
        for name in block["tasks"]:
            known = dict(lines(f"{suite}_{name}"))
            low = known.pop("random", 0.0)
            assert known
            assert all(line > low for line in known.values()), name
