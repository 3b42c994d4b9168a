"""The report of a sweep with known scores: every number of it, and every run.

Episode i of a run returns slope * i / 100, so all scores have a closed form. `gru` plays 100
episodes of 2 updates, `s3m` 80 of one: at equal steps both have 80, at equal updates 40 and 80.
"""

import itertools
import json
import re
import shlex

import numpy as np
import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("scipy")

from agent.logger import AXES
from launch import report, runs

MEMORY, MAZE, CART = "bsuite_memory_len_L5", "memory_maze_9x9", "gym_CartPole-v1"
SLOPES = {
    (MEMORY, "gru"): {0: 0.4, 1: 0.6, 2: 0.9},  # the last fails at its episode 30
    (MEMORY, "s3m"): {0: 0.8, 1: None, 2: 1.0},  # None: missing
    (MAZE, "gru"): {0: 5.0, 1: 7.0, 2: 9.0},
    (MAZE, "s3m"): {0: 6.0, 1: 8.0, 2: 10.0},
    (CART, "gru"): {0: 100.0},
    (CART, "s3m"): {0: 300.0},
}
USED = {key: [s for s in by.values() if s not in (0.9, None)] for key, by in SLOPES.items()}
EPISODES = {"gru": 100, "s3m": 80}
UPDATES = {"gru": 2, "s3m": 1}  # an episode
FLOPS = 2**20  # an update
HUMAN, ORACLE = 26.4, 34.8
LABELS = {
    "environment steps": (800, {"gru": 80, "s3m": 80}),
    "training FLOPs": (80 * FLOPS, {"gru": 40, "s3m": 80}),
    "updates": (80, {"gru": 40, "s3m": 80}),
    "wall seconds": (40, {"gru": 80, "s3m": 80}),
}
WINDOW = {"environment steps": 16, "training FLOPs": 8, "updates": 8, "wall seconds": 16}


def axes(variant, i):
    updates = UPDATES[variant] * i
    return dict(zip(AXES, (10 * i, 10 * i, updates, updates * FLOPS, i / 2), strict=True))


def final(slope, count, window):
    return slope / 100 * (count - (window - 1) / 2)


def area(slope, count):
    return slope / 100 * (1 + (count**2 - 1) / 2) / count


def rise(slope, count):
    return slope / 100 * count / 5


def write_run(folder, task, variant, seed, slope):
    failed = slope == 0.9
    last = 30 if failed else EPISODES[variant]
    folder.mkdir(parents=True)
    setting = f"gru:\n  deter: {64 if variant == 'gru' else 32}\n"
    head = f"task: {task}\ncore: {variant}\nseed: {seed}\ndevice: cpu\n"
    (folder / "config.yaml").write_text(head + setting + f"env:\n  repeat: {1 + (task == MAZE)}\n")
    size = {"gru": "1,000", "s3m": "2,000"}[variant]
    (folder / "model.txt").write_text(f"trainable parameters {size}\nFLOPs of one update {FLOPS}\n")
    scores = [{**axes(variant, i), "return": slope * i / 100} for i in range(1, last + 1)]
    (folder / "scores.jsonl").write_text("".join(json.dumps(row) + "\n" for row in scores))
    rows = [{**axes(variant, i), "usage/ram_gb": 1 + seed - i / 100} for i in (10, last)]
    if (task, variant) == (MAZE, "gru"):
        rows += [{**axes(variant, i), "eval/greedy/return": i / 10} for i in (30, 90)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if failed:
        (folder / "error.txt").write_text("Traceback\nRuntimeError: loss is not finite\n")
    else:
        end = {"by": "stop.steps", **axes(variant, last)}
        (folder / "finished.json").write_text(json.dumps(end))


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """A sweep with a failed, a missing and a packed run, and the CSV of another program."""
    folder = tmp_path_factory.mktemp("sweep")
    entries = []
    for (task, variant), by_seed in SLOPES.items():
        for seed, slope in by_seed.items():
            name = f"{task}-{variant}-s{seed}"
            flags = ["--task", task, "--core", variant, "--seed", str(seed)]
            entry = {"name": name, "task": task, "core": variant, "variant": variant, "seed": seed}
            entries.append({**entry, "flags": flags, "logdir": f"runs/{name}"})
            if slope is not None:
                write_run(folder / "runs" / name, task, variant, seed, slope)
    manifest = {"version": 1, "match": "steps", "runs": entries}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    packed = runs.read_folder(folder / entries[0]["logdir"], entries[0])
    runs.pack(packed, folder / "raw" / f"{packed.name}.json")
    (folder / entries[0]["logdir"]).rename(folder / "gone")
    shown = folder / entries[1]["logdir"] / "diagnostics"
    shown.mkdir()
    (shown / "recall.json").write_text('{"half_life": 23.5}')
    (shown / "norm.json").write_text('{"norm": 3}')
    (shown / "norm.txt").write_text("the norm is 3\n")
    rows = f"{MAZE},ppo,0,400,3\n{MAZE},ppo,0,800,5\n{MAZE},ppo,0,1600,9\ntmaze_9,ppo,0,1,1\n"
    (folder / "ppo.csv").write_text("task,variant,seed,env_step,score\n" + rows)
    return folder


@pytest.fixture(scope="module")
def text(sweep):
    out = sweep / "out"
    assert report.main([str(sweep), "--csv", str(sweep / "ppo.csv"), "--out", str(out)]) == 0
    return (out / "report.md").read_text()


def table(text, heading, first):
    """The rows, as dicts, of the table after a heading whose first column is named `first`."""
    part = text.split(f"\n## {heading}\n")[1].split("\n## ")[0] if heading else text
    lines = part[part.index(f"\n| {first} |") + 1 :].split("\n\n")[0].splitlines()
    cells = [[cell.strip(" `*") for cell in line.strip("|").split(" | ")] for line in lines]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def numbers(cell):
    return [float(word.replace(",", "")) for word in re.findall(r"-?[\d.,]*\d(?:e[+-]\d+)?", cell)]


def same(cell, values):
    """A cell shows the mean of values and, of several, their extremes: with two or three seeds the
    2.5th percentile of all resamples is that of the least seed alone."""
    expected = [np.mean(values), min(values), max(values)] if len(values) > 1 else list(values)
    assert ("no interval" in cell) == (len(values) == 1), cell
    assert numbers(cell) == pytest.approx(expected, rel=5e-3), cell


def test_the_top_says_what_is_compared_and_what_is_not_there(text):
    top = text.split("\n## ")[0]
    assert "3 variants (`gru`, `s3m`, `ppo`) on 3 tasks, seeds 0, 1, 2" in top
    assert "at equal environment steps" in top
    assert "14 planned: 12 finished, 0 unfinished, 1 failed, 1 missing" in top
    assert f"**Failed:** `{MEMORY}-gru-s2`: step 300: RuntimeError: loss is not finite." in top
    assert f"**Missing:** `{MEMORY}-s3m-s1`: not begun" in top
    assert "1 run from `ppo.csv`" in top
    assert "1 run of other tasks: `tmaze_9`" in top
    assert "Interim" not in top


def test_the_top_says_what_still_rises_and_what_cannot_be_told(text):
    lines = [line for line in text.splitlines() if "still rising are" in line]
    assert [MEMORY in lines[0], MAZE in lines[1], len(lines)] == [True, True, 2]
    found = numbers(lines[1].split("`gru` by")[1].split("`s3m` by")[0])
    assert found == pytest.approx([rise(s, 80) for s in (7, 5, 9)], rel=5e-3)
    assert "**Not told:** whether 3 curves of fewer than two seeds still rise" in text


def test_the_budget_is_where_the_first_finished_run_ended(text):
    rows = table(text, "", "task")
    assert [row["task"] for row in rows] == [MEMORY, MAZE, CART]
    for row in rows:
        for label, (budget, _) in LABELS.items():
            assert numbers(row[label]) == pytest.approx([budget], rel=5e-3)


@pytest.mark.parametrize("task", [MEMORY, MAZE, CART])
def test_scores_of_a_task_are_those_of_its_slopes(text, task):
    rows = {(row["at equal"], row["variant"]): row for row in table(text, f"`{task}`", "at equal")}
    assert len(rows) == 4 * (3 if task == MAZE else 2)
    for (label, (budget, counts)), variant in itertools.product(LABELS.items(), EPISODES):
        row, slopes = rows[label, variant], USED[task, variant]
        count, window = counts[variant], WINDOW[label]
        assert numbers(row["budget"]) == pytest.approx([budget], rel=5e-3)
        assert row["seeds"] == f"{len(slopes)} of {len(SLOPES[task, variant])}"
        finals = [final(slope, count, window) for slope in slopes]
        same(row["final"], finals)
        same(row["area"], [area(slope, count) for slope in slopes])
        same(row["rise at the end"], [rise(slope, count) for slope in slopes])
        rising = "limited by the budget" if len(slopes) > 1 else "one seed: cannot be told"
        assert row["note"].startswith(rising)
        of = {MEMORY: {"best": 1}, MAZE: {"human": HUMAN, "oracle": ORACLE}, CART: {}}[task]
        for line, score in of.items():
            expected = pytest.approx([np.mean(finals) / score], rel=5e-3)
            assert numbers(row[f"final of {line}"]) == expected
        if (task, variant) == (MAZE, "gru"):
            same(row["greedy evaluation"], [3, 3, 3])
    window = f"environment steps: 16 (`{task}-s3m-s0` ends first)"
    assert window in text
    assert f"updates: 8 (`{task}-s3m-s0` ends first)" in text


def test_runs_of_another_program_stand_beside_ours_on_their_axis(text):
    rows = [row for row in table(text, f"`{MAZE}`", "at equal") if row["variant"] == "ppo"]
    there, *absent = rows
    assert [there["at equal"], there["seeds"]] == ["environment steps", "1 of 1"]
    same(there["final"], [5])  # a published score is a mean already
    same(there["area"], [3.5])
    assert there["note"] == "too few episodes to tell whether it rises"
    assert {row["note"] for row in absent} == {"no run with this axis came so far"}


def test_references_have_their_source(text):
    rows = table(text, f"`{MAZE}`", "reference")
    assert [(row["reference"], row["score"]) for row in rows] == [
        ("human", "26.4"),
        ("oracle", "34.8"),
    ]
    assert "Pasukonis" in rows[0]["source"]


def iqm(values):
    values, cut = sorted(values), len(values) // 4
    return np.mean(values[cut : len(values) - cut])


def both(memory, maze):
    """Of the scores of two tasks, which count the same."""
    return iqm([*memory] * len(maze) + [*maze] * len(memory))


def test_the_interquartile_mean_is_of_normalised_scores(text):
    rows = {(r["at equal"], r["variant"]): r for r in table(text, "Over all tasks", "at equal")}
    for (label, (_, counts)), variant in itertools.product(LABELS.items(), EPISODES):
        row, count = rows[label, variant], counts[variant]
        for name, score in (
            ("final", lambda s, n=count, w=WINDOW[label]: final(s, n, w)),
            ("area", lambda s, n=count: area(s, n)),
        ):
            memory = [score(slope) for slope in USED[MEMORY, variant]]
            maze = [score(slope) / HUMAN for slope in USED[MAZE, variant]]
            value, low, high = numbers(row[f"IQM of {name}"])
            assert value == pytest.approx(both(memory, maze), rel=5e-3)
            draws = itertools.product(
                itertools.product(memory, repeat=len(memory)),
                itertools.product(maze, repeat=len(maze)),
            )
            every = [both(*draw) for draw in draws]
            limits = np.percentile(every, [2.5, 97.5], method="inverted_cdf")
            assert [low, high] == pytest.approx(limits, rel=5e-3)
        assert row["runs"] == "5"
    assert rows["environment steps", "ppo"]["IQM of final"] == f"no score of `{MEMORY}"
    assert f"`{CART}`: no reference, not aggregated" in text


def test_the_probability_of_improvement_counts_pairs_of_runs_of_a_task(text):
    rows = {(row["X"], row["Y"]): row for row in table(text, "Over all tasks", "X")}
    expected = {("gru", "s3m"): (3, (0 + 3 / 9 + 0) / 3), ("gru", "ppo"): (1, 2 / 3)}
    expected["s3m", "ppo"] = (1, 2 / 3)
    assert rows.keys() == expected.keys()
    for pair, (tasks, value) in expected.items():
        assert rows[pair]["tasks"] == str(tasks)
        same(rows[pair]["P(X > Y)"], [value])  # a task with one run: no interval


def test_compute_is_that_of_finished_runs(text):
    rows = {(row["task"], row["variant"]): row for row in table(text, "Compute", "task")}
    assert len(rows) == 6
    for (task, variant), row in rows.items():
        last = axes(variant, EPISODES[variant])
        seeds = [seed for seed, s in SLOPES[task, variant].items() if s not in (0.9, None)]
        expected = {
            "runs": len(seeds),
            "parameters": {"gru": 1000, "s3m": 2000}[variant],
            "FLOPs an update": FLOPS,
            "environment steps": last["env_step"],
            "updates": last["update"],
            "training FLOPs": last["train_flops"],
            "wall seconds": last["wall_seconds"],
            "agent steps/s": 20,
            "updates/s": 2 * UPDATES[variant],
            "peak RAM (GB)": np.mean(seeds) + 0.9,
        }
        for name, value in expected.items():
            assert numbers(row[name]) == pytest.approx([value], rel=5e-3), name
        assert row["device"] == "cpu"


def test_every_run_is_listed_with_how_it_ended(text):
    rows = {row["run"]: row for row in table(text, "Runs", "run")}
    assert len(rows) == 15
    for (task, variant), by_seed in SLOPES.items():
        for seed, slope in by_seed.items():
            row = rows[f"{task}-{variant}-s{seed}"]
            assert [row["variant"], row["seed"]] == [variant, str(seed)]
            if slope is None:
                assert [row["status"], row["last score"]] == ["missing", "–"]
                continue
            last = 30 if slope == 0.9 else EPISODES[variant]
            assert row["status"] == ("failed" if slope == 0.9 else "finished")
            expected = [*axes(variant, last).values(), final(slope, last, last / 5)]
            names = (*LABELS, "last score")
            found = [numbers(row[name])[0] for name in names]
            del expected[1]  # agent steps
            expected = [expected[0], expected[2], expected[1], *expected[3:]]
            assert found == pytest.approx(expected, rel=5e-3)
    assert rows[f"{MEMORY}-gru-s2"]["reason"] == "step 300: RuntimeError: loss is not finite"


def test_settings_that_differ_and_commands_are_shown(sweep, text):
    between = {row["setting"]: row for row in table(text, "Settings that differ", "setting")}
    assert {name: (row["gru"], row["s3m"]) for name, row in between.items()} == {
        "core": ("gru", "s3m"),
        "gru.deter": ("64", "32"),
    }
    assert "| `env.repeat` | 1 | 2 | 1 |" in text
    for entry in json.loads((sweep / "manifest.json").read_text())["runs"]:
        logdir = sweep / entry["logdir"]
        assert f"    python -m agent.train {shlex.join(entry['flags'])} --logdir {logdir}\n" in text
    assert f"`python -m launch.report {sweep} --csv" in text


def test_diagnostics_of_a_run_are_shown(text):
    part = text.split("## Memory diagnostics")[1].split("\n## ")[0]
    assert f"{MEMORY}-gru-s1" in part
    assert '{"half_life": 23.5}' in part
    assert "the norm is 3" in part
    assert '"norm": 3' not in part


def test_the_page_needs_nothing_else(sweep, text):
    page = (sweep / "out" / "report.html").read_text()
    plots = sorted((sweep / "out" / "plots").glob("*.png"))
    assert len(plots) == 3 * 4 + 4
    sources = re.findall(r'<img [^>]*src="([^"]*)"', page)
    assert len(sources) == len(plots)
    assert all(source.startswith("data:image/png;base64,iVBOR") for source in sources)
    assert not re.search(r"<script|<link|https?://", page)
    for row in table(text, "Runs", "run"):
        assert f"<code>{row['run']}</code>" in page
    for name in re.findall(r"\]\((plots/[^)]*)\)", text):
        assert (sweep / "out" / name).exists()


def test_text_of_a_run_cannot_break_the_page(sweep):
    from launch.document import Code, Table, to_html, to_markdown

    blocks = [Table(["a"], [["<b>|`x`"]]), Code("c", ["1 < 2"])]
    page = to_html("<t>", blocks)
    assert "<td>&lt;b&gt;|<code>x</code></td>" in page
    assert "<pre>1 &lt; 2</pre>" in page
    assert "<title>&lt;t&gt;</title>" in page
    assert r"| <b>\|`x` |" in to_markdown(blocks, sweep)


# The command


def test_a_sweep_without_a_score_is_shown(tmp_path):
    entry = {"name": "a", "task": CART, "core": "gru", "variant": "gru", "seed": 0}
    manifest = {"version": 1, "runs": [{**entry, "flags": [], "logdir": "runs/a"}]}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert report.main([str(tmp_path)]) == 0
    text = (tmp_path / "report.md").read_text()
    assert "1 planned: 0 finished, 0 unfinished, 0 failed, 1 missing" in text
    assert "No run of this task has a score yet" in text


def test_wrong_commands_end_with_one_line(tmp_path, sweep, capsys):
    assert report.main([str(tmp_path)]) == 2
    assert f"{tmp_path} is neither a sweep nor a run" in capsys.readouterr().err
    assert report.main([str(sweep), "--csv", str(tmp_path / "absent.csv")]) == 2
    assert "absent.csv" in capsys.readouterr().err
    other = tmp_path / "other.csv"
    other.write_text(f"task,variant,seed,update,score\n{MAZE},gru,0,1,1\n")
    assert report.main([str(sweep), "--csv", str(other)]) == 2
    assert "variant 'gru' is there already; rename it" in capsys.readouterr().err


def test_a_missing_package_is_named_with_the_line_that_installs_it(sweep, monkeypatch, capsys):
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda name: None)
    assert report.main([str(sweep)]) == 2
    assert "matplotlib is not installed: pip install -e '.[launch]'" in capsys.readouterr().err
