"""Runs without a sweep: what tells them apart, and the command of each."""

import pytest

from configs.load import replace_flat, resolve, save
from launch.folders import read_folders

pytest.importorskip("matplotlib")
pytest.importorskip("scipy")

from launch import report

LINE = '{"env_step": 9, "agent_step": 9, "update": 3, "train_flops": 6, "wall_seconds": 1, '
END = LINE + '"by": "stop.updates"}'


def run_of(folder, *flags, task="gym_CartPole-v1", **chosen):
    """A finished run with one episode, by its files; `chosen` at start, not given."""
    folder.mkdir(parents=True)
    config = resolve(["--task", task, "--size", "debug", *flags])
    save(replace_flat(config, {"logdir": str(folder), **chosen}), folder / "config.yaml")
    (folder / "scores.jsonl").write_text(LINE + '"return": 5, "length": 5}\n')
    (folder / "finished.json").write_text(END)
    return folder


def test_a_variant_is_a_core_with_the_settings_in_which_its_runs_differ(tmp_path):
    hidden, machine = {"behaviour.features": "hidden"}, {"threads": 3, "precision": "float32"}
    folders = [
        run_of(tmp_path / "a", "--core", "s3m", **machine),
        run_of(tmp_path / "b", "--core", "s3m", "--seed", "1"),
        run_of(tmp_path / "c", "--core", "s3m", **hidden),
        run_of(tmp_path / "d", "--core", "gru", "--log.every", "3"),
        run_of(tmp_path / "e", "--core", "gru", task="bsuite_memory_len_L5"),
    ]
    runs = read_folders(folders)
    output = "s3m:behaviour.features=output"
    assert [run.variant for run in runs] == [
        *(output, output, "s3m:behaviour.features=hidden", "gru", "gru")
    ]
    assert [run.seed for run in runs] == [0, 1, 0, 0, 0]
    assert {run.status for run in runs} == {"finished"}


def test_the_command_of_a_run_gives_its_settings_anew(tmp_path):
    flags = ("--core", "s3m", "--preset", "bsuite_small", "--seed", "4")
    chosen = {"behaviour.features": "full", "env.count": 3, "replay.from": "logs/b"}
    (run,) = read_folders([run_of(tmp_path / "a", *flags, **chosen)])
    anew = resolve(run.command[3:])
    save(anew, tmp_path / "anew.yaml")
    assert (tmp_path / "anew.yaml").read_text() == (tmp_path / "a/config.yaml").read_text()
    assert run.command[3:13:2] == ["--task", "--core", "--seed", "--size", "--preset"]


def test_what_is_no_run_or_the_same_twice_is_refused(tmp_path):
    folder = run_of(tmp_path / "a")
    with pytest.raises(ValueError, match="nowhere is neither a sweep nor a run"):
        read_folders([folder, tmp_path / "nowhere"])
    with pytest.raises(ValueError, match=r"a and .*b are runs of the same settings and seed"):
        read_folders([folder, run_of(tmp_path / "b", "--stop.updates", "5")])


def test_a_report_of_folders_needs_a_place(tmp_path, capsys):
    folders = [str(run_of(tmp_path / core, "--core", core)) for core in ("s3m", "gru")]
    assert report.main(folders) == 2
    assert "needs --out" in capsys.readouterr().err
    assert report.main([*folders, "--out", str(tmp_path / "out")]) == 0
    assert "Comparison of s3m, gru" in (tmp_path / "out/report.md").read_text()
