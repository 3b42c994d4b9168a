"""The table of training episodes beside what bsuite's own recorder writes, and over a resume."""

import json

import numpy as np
import pytest

pytest.importorskip("bsuite")

import pandas
from bsuite.logging import csv_load
from bsuite.utils.wrappers import Logging

import agent.run
from agent.episodes import EpisodeTable, bsuite_file
from envs.bsuite import build
from envs.make import make_env


class Rows(list):
    def write(self, row):
        self.append(row)


def score(length, total, **logged):
    return {"length": length, "return": total, **{f"log/{k}": v for k, v in logged.items()}}


@pytest.mark.parametrize(
    "name", ["catch_0", "memory_len_3", "deep_sea_2", "umbrella_length_1", "bandit_noise_2",
             "cartpole_swingup_1", "mountain_car_scale_1", "discounting_chain_1"]
)  # fmt: skip
def test_its_columns_are_those_of_bsuites_own_recorder(tmp_path, name):
    """The same actions in the same episodes, for one that is seeded anew and for ours."""
    task, theirs = f"bsuite_{name}", Rows()
    path = bsuite_file(tmp_path, task)
    table, env = EpisodeTable(path), make_env(task)
    random = np.random.default_rng(0)
    kept = None
    for seed in range(3):
        actions = random.integers(0, env.act_space.classes[0], 2000)
        recorder = Logging(build(name, seed), theirs, log_every=True)
        recorder.reset()
        record, total, length = env.reset(seed), 0.0, 0
        while not record["is_last"]:
            record = env.step(np.array([actions[length]], np.int32))
            recorder.step(int(actions[length]))
            total, length = total + float(record["reward"]), length + 1
        logged = {key: float(value) for key, value in record.items() if key.startswith("log/")}
        table.write({"length": length, "return": total, **logged})
        kept = kept or list(theirs[0])
    table.close()
    ours = pandas.read_csv(path)
    assert list(ours.columns) == kept
    sums = pandas.DataFrame(theirs)
    for column in ours.columns:
        each = sums[column].to_numpy(float)
        if column.startswith("episode_"):
            expected = each
        else:
            expected = np.maximum.accumulate(each) if "best" in column else each.cumsum()
        np.testing.assert_allclose(ours[column], expected, rtol=1e-5, atol=1e-6, err_msg=column)


def test_totals_go_on_after_rows_are_taken_back(tmp_path):
    path = bsuite_file(tmp_path, "bsuite_catch_7")
    assert path.name == "bsuite_id_-_catch-7.csv"
    table = EpisodeTable(path)
    table.write(score(9, 1.0, total_regret=0.0, best_episode=3.0))
    table.write(score(4, -1.0, total_regret=2.0, best_episode=5.0))
    length = table.state()
    table.write(score(100, 50.0, total_regret=70.0, best_episode=70.0))
    table.close()
    with path.open("a") as file:
        file.write("117,4,5")  # a kill within a line
    again = EpisodeTable(path)
    again.restore(length)
    again.write(score(9, 0.5, total_regret=1.0, best_episode=4.0))
    again.close()
    assert path.read_text().splitlines() == [
        "steps,episode,total_return,episode_len,episode_return,total_regret,best_episode",
        "9,1,1,9,1,0,3",
        "13,2,0,4,-1,2,5",
        "22,3,0.5,9,0.5,3,5",
    ]


def test_a_run_writes_what_bsuites_analysis_reads_and_a_resume_continues_it(tmp_path, tiny):
    flags = ("--task", "bsuite_catch_3", "--env.count", "2", "--loop.mode", "lockstep")
    quiet = ("--loop.fill", "100000", "--log.media_every", "0")
    for steps in ("70", "160"):
        config = tiny(*flags, *quiet, "--logdir", str(tmp_path), "--stop.steps", steps)
        assert agent.run.run(config, {"stop.steps"}) == 0
    data = csv_load.load_one_result_set(str(tmp_path / "bsuite"))
    scores = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert set(data["bsuite_id"]) == {"catch/3"}
    assert data["episode"].tolist() == list(range(1, len(scores) + 1))
    assert data["total_return"].iloc[-1] == sum(row["return"] for row in scores)
    # In catch a miss costs 2: the best return is 1, the other -1.
    assert data["total_regret"].iloc[-1] == sum(1 - row["return"] for row in scores)
    assert len(scores) > 15


def test_other_suites_have_no_table(tmp_path):
    assert bsuite_file(tmp_path, "gym_CartPole-v1") is None
