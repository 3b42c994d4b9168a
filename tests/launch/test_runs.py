"""Runs as arrays: folders, packed files, sweeps and CSV."""

import fcntl
import json

import numpy as np
import pytest

from agent.logger import AXES
from launch import runs
from launch.runs import Run, binned, pack, read_csv, read_folder, read_sweep, unpack

ENTRY = {
    **{"name": "a", "task": "tmaze_9", "core": "gru", "variant": "gru", "seed": 3},
    **{"flags": ["--task", "tmaze_9", "--seed", "3"], "logdir": "runs/a"},
}


def axes(step):
    values = (2 * step, step, step // 2, 10 * step, step / 4)
    return dict(zip(AXES, values, strict=True))


def make_folder(folder, episodes=10, rows=()):
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("task: tmaze_9\nseed: 3\nenv:\n  repeat: 2\n")
    (folder / "model.txt").write_text("trainable parameters  1,234\nFLOPs of one update  56,789\n")
    scores = [{**axes(9 * n), "return": n / 2, "length": 9, "slot": 0} for n in range(episodes)]
    (folder / "scores.jsonl").write_text("".join(json.dumps(row) + "\n" for row in scores))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def write_manifest(folder, entries, version=1):
    folder.mkdir(exist_ok=True)
    text = json.dumps({"version": version, "match": "flops", "runs": entries})
    (folder / "manifest.json").write_text(text)


# A folder


def test_a_folder_becomes_columns(tmp_path):
    rows = [
        {**axes(50), "loss/total": 3.0},
        {**axes(90), "loss/total": None, "usage/ram_gb": 2.0},
        {**axes(60), "eval/greedy/return": 5.0},  # evaluations come late
        {**axes(20), "eval/greedy/return": 4.0},
    ]
    run = read_folder(make_folder(tmp_path / "a", rows=rows), ENTRY)
    assert (run.name, run.task, run.variant, run.seed) == ("a", "tmaze_9", "gru", 3)
    typed = f"python -m agent.train --task tmaze_9 --seed 3 --logdir {tmp_path / 'a'}"
    assert run.command == typed.split()
    assert run.config == {"task": "tmaze_9", "seed": 3, "env.repeat": 2}
    assert run.model == {"parameters": 1234, "update_flops": 56789, "peak_ram_gb": 2.0}
    assert run.scores["return"].tolist() == [n / 2 for n in range(10)]
    assert run.scores["env_step"].tolist() == [18 * n for n in range(10)]
    assert run.scores["episodes"].tolist() == [1] * 10
    assert run.metrics["agent_step"].tolist() == [50, 90]
    np.testing.assert_array_equal(run.metrics["loss/total"], [3, np.nan])
    np.testing.assert_array_equal(run.metrics["usage/ram_gb"], [np.nan, 2])
    assert run.evaluations["eval/greedy/return"].tolist() == [4, 5]
    assert run.end == axes(90)


def test_the_status_is_read_off_the_files(tmp_path):
    folder = tmp_path / "a"
    found = [read_folder(folder, ENTRY)]
    make_folder(folder)
    found.append(read_folder(folder, ENTRY))
    (folder / "error.txt").write_text("Traceback\n  ...\nRuntimeError: loss is nan\n")
    found.append(read_folder(folder, ENTRY))
    with (folder / "lock").open("wb") as lock:  # typed again after a failure
        fcntl.flock(lock, fcntl.LOCK_EX)
        found.append(read_folder(folder, ENTRY))
    (folder / "finished.json").write_text(json.dumps({"by": "stop.flops", **axes(100)}))
    found.append(read_folder(folder, ENTRY))
    assert [(run.status, run.reason) for run in found] == [
        ("missing", "not begun, or its folder is gone"),
        ("unfinished", "stopped at step 81"),
        ("failed", "step 81: RuntimeError: loss is nan"),
        ("unfinished", "runs, step 81"),
        ("finished", "by stop.flops"),
    ]
    assert found[-1].end == axes(100)


def test_a_run_that_failed_before_its_first_step_is_failed(tmp_path):
    (tmp_path / "error.txt").write_text("ValueError: no GPU\n")
    run = read_folder(tmp_path, ENTRY)
    assert (run.status, run.reason) == ("failed", "step 0: ValueError: no GPU")


def test_a_run_whose_process_was_killed_is_failed(tmp_path):
    folder = make_folder(tmp_path / "runs" / "x")
    (tmp_path / "runs" / "a.failed").write_text("exit status -9: step 81\n")
    run = read_folder(folder, ENTRY)
    assert (run.status, run.reason) == ("failed", "step 81: exit status -9: step 81")
    (folder / "error.txt").write_text("")
    assert read_folder(folder, ENTRY).reason == "step 81: error.txt is empty"
    gone = read_folder(tmp_path / "runs" / "y", ENTRY)
    assert (gone.status, gone.reason) == ("failed", "step 0: exit status -9: step 81")


def test_a_line_that_is_being_written_is_left_and_a_broken_one_is_named(tmp_path):
    folder = make_folder(tmp_path / "a")
    with (folder / "scores.jsonl").open("a") as file:
        file.write('{"env_step": 1')
    assert len(read_folder(folder, ENTRY).scores["return"]) == 10
    with (folder / "scores.jsonl").open("a") as file:
        file.write("\n")
    run = read_folder(folder, ENTRY)
    assert run.status == "failed"
    assert "scores.jsonl line 11 is no JSON" in run.reason


def test_bins_are_means_of_what_is_known_and_keep_the_number_of_episodes():
    table = {"return": np.array([1, np.nan, 3, 5, 8.0]), "episodes": np.array([1, 9, 3, 1, 1.0])}
    found = binned(table, 2)
    assert found["return"].tolist() == [1, (9 + 5 + 8) / 5]
    assert found["episodes"].tolist() == [10, 5]
    assert binned(table, 5) is table


# Packed


def long_run(episodes):
    random = np.random.default_rng(0)
    run = Run("a", "tmaze_9", "gru", "gru", 3, "finished", "by stop.flops")
    run.config = {f"group.setting_{n}": "value" * 4 for n in range(300)}
    run.command, run.end = ["python", "-m", "agent.train"], axes(100)
    run.scores = {name: np.sort(random.random(episodes)) * 1e15 for name in runs.COLUMNS}
    run.scores["episodes"] = np.ones(episodes)
    run.metrics = {f"some/metric_{n}": random.standard_normal(500) * 1e-7 for n in range(150)}
    run.evaluations = {f"eval/metric_{n}": random.standard_normal(999) for n in range(20)}
    return run


@pytest.mark.parametrize("episodes", [0, 50, 399, 300_000])
def test_a_packed_run_is_small_and_ends_as_it_did(tmp_path, episodes):
    run = long_run(episodes)
    pack(run, tmp_path / "raw" / "a.json")
    assert (tmp_path / "raw" / "a.json").stat().st_size < runs.LIMIT
    back = unpack(tmp_path / "raw" / "a.json")
    for name in ("name", "task", "status", "reason", "config", "command", "end", "model"):
        assert getattr(back, name) == getattr(run, name)
    assert back.scores["episodes"].sum() == episodes
    for name in runs.COLUMNS:
        np.testing.assert_array_equal(back.scores[name][-100:], run.scores[name][-100:])
    if episodes:
        middle = np.interp(0.5e15, run.scores["env_step"], run.scores["return"])
        found = np.interp(0.5e15, back.scores["env_step"], back.scores["return"])
        assert found == pytest.approx(middle, rel=1e-2 if episodes > 400 else 1e-5)


def test_a_run_packed_twice_is_the_same(tmp_path):
    pack(long_run(5000), tmp_path / "a.json")
    pack(unpack(tmp_path / "a.json"), tmp_path / "b.json")
    assert (tmp_path / "a.json").read_text() == (tmp_path / "b.json").read_text()


def test_a_number_that_is_not_finite_survives(tmp_path):
    run = long_run(3)
    run.scores["return"][1] = np.nan
    pack(run, tmp_path / "a.json")
    assert np.isnan(unpack(tmp_path / "a.json").scores["return"][1])


def test_settings_that_are_too_large_to_pack_are_an_error(tmp_path):
    run = long_run(3)
    run.config = {"a": "x" * runs.LIMIT}
    with pytest.raises(ValueError, match="the limit is 100,000"):
        pack(run, tmp_path / "a.json")
    assert not list(tmp_path.iterdir())


def test_another_file_is_no_packed_run(tmp_path):
    for text in ("[]", "{}", '{"version": 2}', '{"version": 1}', "torn"):
        (tmp_path / "a.json").write_text(text)
        with pytest.raises(ValueError, match="is no packed run of version 1"):
            unpack(tmp_path / "a.json")


# A sweep


def test_every_run_of_the_manifest_is_there(tmp_path):
    names = ("there", "packed", "torn", "absent")
    entries = [{**ENTRY, "name": name, "logdir": f"runs/{name}"} for name in names]
    entries[0]["logdir"] = str(tmp_path / "elsewhere")
    write_manifest(tmp_path, entries)
    make_folder(tmp_path / "elsewhere")
    pack(long_run(3), tmp_path / "raw" / "packed.json")
    (tmp_path / "raw" / "torn.json").write_text("{")
    found = read_sweep(tmp_path)
    assert [run.status for run in found] == ["unfinished", "finished", "failed", "missing"]
    assert found[2].reason.endswith("torn.json is no packed run of version 1")
    assert [run.name for run in found] == ["there", "a", "torn", "absent"]


def test_what_is_packed_counts_before_a_folder_that_has_not_finished(tmp_path):
    write_manifest(tmp_path, [ENTRY])
    pack(long_run(3), tmp_path / "raw" / "a.json")
    folder = make_folder(tmp_path / "runs" / "a")
    (run,) = read_sweep(tmp_path)
    assert (run.status, run.folder, len(run.scores["return"])) == ("finished", folder, 3)
    folder.with_name("a.failed").write_text("exit status 1: old\n")
    assert read_sweep(tmp_path)[0].status == "finished"
    (folder / "finished.json").write_text(json.dumps({"by": "stop.steps", **axes(90)}))
    (run,) = read_sweep(tmp_path)
    assert (run.status, len(run.scores["return"])) == ("finished", 10)


def test_a_packed_run_keeps_its_last_evaluation_and_its_peak(tmp_path):
    run = long_run(3)
    count = np.arange(640.0)
    run.evaluations = {"agent_step": count, "eval/greedy/return": count}
    run.model = {"peak_ram_gb": 50.0}
    pack(run, tmp_path / "a.json")
    packed = unpack(tmp_path / "a.json")
    assert packed.evaluations["eval/greedy/return"][[0, -1]].tolist() == [0, 639]
    assert packed.model["peak_ram_gb"] == 50


def test_what_is_no_sweep_is_said_in_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"holds no sweep: manifest\.json is missing"):
        read_sweep(tmp_path)
    (tmp_path / "manifest.json").write_text("[]")
    with pytest.raises(ValueError, match="no `version` and `runs`"):
        read_sweep(tmp_path)
    write_manifest(tmp_path, [], version=2)
    with pytest.raises(ValueError, match="has version 2; expected 1"):
        read_sweep(tmp_path)
    write_manifest(tmp_path, [{"name": "a", "task": "t"}])
    with pytest.raises(ValueError, match="run 0 has no core, variant, seed, flags, logdir"):
        read_sweep(tmp_path)


# CSV


def csv(tmp_path, text):
    (tmp_path / "other.csv").write_text(text)
    return read_csv(tmp_path / "other.csv")


def test_a_csv_is_read_by_runs(tmp_path):
    head = "variant,task,seed,train_flops,score\n"
    found = csv(
        tmp_path, head + "ppo,tmaze_9,1,2e9,0.5\nppo,tmaze_9,1,1e9,0\nppo,tmaze_9,2,1e9,1\n"
    )
    assert [(run.name, run.status, run.reason) for run in found] == [
        ("tmaze_9-ppo-s1", "finished", "other.csv"),
        ("tmaze_9-ppo-s2", "finished", "other.csv"),
    ]
    assert found[0].scores["train_flops"].tolist() == [1e9, 2e9]
    assert found[0].scores["return"].tolist() == [0, 0.5]
    assert found[0].scores["episodes"].tolist() == [100, 100]
    assert found[0].end == {"train_flops": 2e9}


def test_a_csv_may_say_of_how_many_episodes_a_score_is(tmp_path):
    found = csv(tmp_path, "task,variant,seed,update,score,episodes\nt,v,0,5,1,1\nt,v,0,6,1,\n")
    assert found[0].scores["episodes"].tolist() == [1, 100]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("task,variant,seed,score\n", "line 1: columns task, variant, seed, score; expected"),
        ("task,variant,seed,update,env_step,score\n", "one of env_step, agent_step, update"),
        ("task,variant,seed,update,score\n", "has no rows"),
        ("task,variant,seed,update,score\nt,v,0,1,1\nt,v,0,2,high\n", "line 3: update, score"),
        ("task,variant,seed,update,score\nt,v,0.5,1,1\n", "line 2: .* seed a whole one"),
        ("task,variant,seed,update,score\nt,v,0,1\n", "line 2"),
        ("task,variant,seed,update,score\nt,v,0,-1,1\n", "line 2: .* update not negative"),
        ("task,variant,seed,update,score\nt,v,0,1,nan\n", "line 2: numbers must be finite"),
        ("task,variant,seed,update,score\nt,,0,1,1\n", "line 2: no task or no variant"),
    ],
)
def test_a_csv_that_cannot_be_read_names_the_line(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        csv(tmp_path, text)
