"""What runs a sweep is made of, and what may be added to it."""

import json

import pytest

from launch import manifest
from launch.manifest import Grid, pairs, update
from launch.runs import read_manifest

CORES = ["gru", "elmur:elmur.slots=2"]


def unmatched(*_):
    raise AssertionError("nothing is to be matched")


def make(sweep, matching=unmatched, dry=False, **asked):
    return update(sweep, Grid(**asked), matching, dry)


def small(sweep, matching=unmatched, **more):
    asked = {"tasks": ["tmaze_5"], "variants": CORES, "seeds": [0, 1], **more}
    return make(sweep, matching, **asked)


def test_a_run_for_each_task_variant_and_seed_with_all_its_settings(tmp_path):
    entries = small(tmp_path, settings=["stop.steps=100", "size=debug"])
    assert entries == read_manifest(tmp_path)["runs"]
    assert [entry["name"] for entry in entries] == [
        "tmaze_5-gru-s0",
        "tmaze_5-gru-s1",
        "tmaze_5-elmur_elmur.slots=2-s0",
        "tmaze_5-elmur_elmur.slots=2-s1",
    ]
    assert entries[3] == {
        "name": "tmaze_5-elmur_elmur.slots=2-s1",
        "task": "tmaze_5",
        "core": "elmur",
        "variant": "elmur:elmur.slots=2",
        "seed": 1,
        "flags": [
            *("--task", "tmaze_5", "--core", "elmur", "--seed", "1"),
            *("--stop.steps", "100", "--size", "debug", "--elmur.slots", "2"),
        ],
        "logdir": "runs/tmaze_5-elmur_elmur.slots=2-s1",
    }


def test_the_same_again_changes_nothing_and_the_folder_alone_means_all(tmp_path):
    first = small(tmp_path)
    text = (tmp_path / "manifest.json").read_text()
    assert small(tmp_path) == make(tmp_path) == first
    assert (tmp_path / "manifest.json").read_text() == text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.json"]


def test_tasks_cores_and_seeds_may_be_added_and_those_asked_for_are_returned(tmp_path):
    first = small(tmp_path, settings=["size=debug"])
    assert [entry["seed"] for entry in make(tmp_path, seeds=[2])] == [2, 2]
    added = make(tmp_path, tasks=["tmaze_9"], variants=["s3m"], seeds=[7])
    assert [entry["name"] for entry in added] == ["tmaze_9-s3m-s7"]
    assert added[0]["flags"][-2:] == ["--size", "debug"]
    found = read_manifest(tmp_path)
    assert found["runs"][:4] == first
    assert len(found["runs"]) == 7
    assert (found["tasks"], found["seeds"]) == (["tmaze_5", "tmaze_9"], [0, 1, 2, 7])
    assert found["variants"] == [*CORES, "s3m"]


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"settings": ["size=1m"]}, "  size: debug in the sweep, 1m asked"),
        ({"settings": []}, "  size: debug in the sweep, not set asked"),
        ({"settings": ["size=debug", "compile=yes"]}, "  compile: not set in the sweep, yes asked"),
        ({"match": "flops"}, "  match: none in the sweep, flops asked"),
        ({"logdir": "elsewhere"}, "  logdir: runs in the sweep, elsewhere asked"),
    ],
)
def test_other_settings_are_refused_with_a_diff(tmp_path, more, line):
    small(tmp_path, settings=["size=debug"])
    before = (tmp_path / "manifest.json").read_text()
    with pytest.raises(ValueError, match="other settings") as error:
        small(tmp_path, **more)
    assert line in str(error.value).splitlines()
    assert (tmp_path / "manifest.json").read_text() == before


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"settings": ["sise=1m"]}, "did you mean 'size'"),
        ({"settings": ["size"]}, "expected KEY=VALUE"),
        ({"settings": ["seed=3"]}, "use --seeds"),
        ({"settings": ["logdir=x"]}, "use --runs"),
        ({"settings": ["size=9m"]}, "no size '9m'"),
        ({"variants": ["grus"]}, "did you mean 'gru'"),
        ({"variants": ["gru", "gru"]}, "given twice: gru"),
        ({"variants": ["gru:gru.deter=a"]}, "expected a whole number"),
        ({"variants": ["gru:gru.deter=64", "gru_gru.deter=64"]}, "no core"),
        ({"seeds": None}, "needs --tasks, --cores and --seeds"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(tmp_path, more, words):
    with pytest.raises(ValueError, match=words):
        small(tmp_path / "sweep", **more)
    assert not (tmp_path / "sweep").exists()


def test_a_dry_one_writes_nothing(tmp_path):
    entries = make(tmp_path / "sweep", dry=True, tasks=["tmaze_5"], variants=["gru"], seeds=[0])
    assert len(entries) == 1
    assert not (tmp_path / "sweep").exists()


def equal(asked):
    """Settings by which cores are made equal, and a record of what was asked for."""

    def matching(match, variants, task, given):
        asked.append((match, variants, task, given))
        widths = {variant: {"model.units": 10 * len(variant)} for variant in variants}
        return {variant: widths[variant] for variant in variants}

    return matching


def test_equal_settings_are_found_once_for_each_task_and_stay(tmp_path):
    asked = []
    entries = small(tmp_path, equal(asked), match="flops", settings=["size=debug"])
    assert asked == [("flops", CORES, "tmaze_5", ["size=debug"])]
    assert [entry["flags"][-2:] for entry in entries[:2]] == [["--model.units", "30"]] * 2
    assert "--model.units 190 --elmur.slots 2" in " ".join(entries[2]["flags"])
    small(tmp_path, match="flops", seeds=[0, 1, 2])  # `unmatched`: nothing is asked again
    more = make(tmp_path, equal(asked), variants=["s3m"], tasks=["tmaze_5", "tmaze_9"])
    assert [call[1:3] for call in asked[1:]] == [(["gru", "s3m"], "tmaze_5"), (["s3m"], "tmaze_9")]
    assert {entry["flags"][-1] for entry in more} == {"30"}
    assert json.loads((tmp_path / "manifest.json").read_text())["matched"]["tmaze_5"] == {
        "gru": {"model.units": 30},
        "elmur:elmur.slots=2": {"model.units": 190},
        "s3m": {"model.units": 30},
    }


def test_an_addition_that_would_change_what_is_there_is_refused(tmp_path):
    small(tmp_path, equal([]), match="flops")

    def other(match, variants, task, given):
        return {variant: {"model.units": 999} for variant in variants}

    with pytest.raises(ValueError, match="s3m cannot be made equal to gru"):
        make(tmp_path, other, variants=["s3m"])


def test_runs_added_by_another_command_meanwhile_are_not_lost(tmp_path, monkeypatch):
    small(tmp_path)
    read, late = manifest.read, [lambda: small(tmp_path, seeds=[5])]

    def meanwhile(sweep):
        found = read(sweep)
        if late:
            late.pop()()
        return found

    monkeypatch.setattr(manifest, "read", meanwhile)
    small(tmp_path, seeds=[6])
    assert {entry["seed"] for entry in read_manifest(tmp_path)["runs"]} == {0, 1, 5, 6}


def test_texts_of_settings():
    assert pairs(["stop.steps=1e6", "preset=a=b"]) == {"stop.steps": "1e6", "preset": "a=b"}
    assert [manifest.text(value) for value in (True, 3, 0.5, "a")] == ["true", "3", "0.5", "a"]
