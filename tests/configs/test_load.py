"""Resolving, strictness, saving and help of the configuration."""

import dataclasses
import itertools
import os

import pytest

from configs import load
from configs.load import ConfigError, explicit, help_text, resolve
from configs.schema import Config

TASKS = ["memory_maze_9x9", "bsuite_memory_len_0", "bsuite_catch_0", "tmaze_20", "gym_X", "test_x"]


def refused(*argv: str) -> str:
    """The one line that a wrong command line gets."""
    with pytest.raises(ConfigError) as error:
        resolve(list(argv))
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.fixture
def yaml_file(tmp_path):
    def write(text):
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return path

    return write


def test_no_flags_give_the_defaults_and_the_suite_of_the_default_task():
    config = resolve([])
    assert config.task == "memory_maze_9x9"
    assert (config.batch.size, config.batch.length) == (4, 1024)
    assert config.behaviour.features == "full"
    assert config.optim == Config().optim


def test_later_block_wins(monkeypatch):
    files = {
        "tasks": {"tmaze": {"model": {"units": 1, "hidden": 1, "depth": 1, "classes": 1}}},
        "cores": {"gru": {"model": {"units": 2, "hidden": 2, "depth": 2, "classes": 2}}},
        "sizes": {"debug": {"model": {"units": 3, "hidden": 3, "depth": 3}}},
        "presets": {
            "one": {"model": {"units": 4, "hidden": 4}},
            "two": {"model": {"units": 5}, "tasks": {"tmaze": {"optim": {"lr": 0.5}}}},
        },
    }
    monkeypatch.setattr(load, "blocks", files.__getitem__)
    flags = ["--task", "tmaze_9", "--core", "gru", "--size", "debug", "--preset", "one,two"]
    config = resolve([*flags, "--optim.lr", "0.25"])
    model = config.model
    assert (model.classes, model.depth, model.hidden, model.units) == (2, 3, 4, 5)
    assert config.optim.lr == 0.25
    assert resolve(flags).optim.lr == 0.5


@pytest.mark.parametrize(
    "task", ["atari_tools.env:make", "memory_maze_ext:make", "popgym_arcade.envs:make", "test:make"]
)
def test_a_plug_in_has_no_suites_settings_whatever_its_module_is_called(task):
    found, plain = (load.to_flat(load.resolve(["--task", t])) for t in (task, "any:make"))
    assert {key for key in found if found[key] != plain[key]} == {"task"}


def test_a_suite_is_known_by_whole_words():
    assert load.resolve(["--task", "atari100k_pong"]).stop.steps == 100_000
    assert load.resolve(["--task", "atari_pong"]).stop.steps == Config().stop.steps
    assert load.resolve(["--task", "dmcs_x"]).env.repeat == 1


def test_longer_task_prefix_wins_over_shorter():
    assert resolve(["--task", "bsuite_catch_0"]).behaviour.features == "output"
    memory = resolve(["--task", "bsuite_memory_len_0"])
    assert memory.behaviour.features == "hidden"
    assert memory.batch.length == 256
    assert memory.loop.train_ratio == 1024.0  # from the shorter block


def test_preset_of_a_paper_follows_the_domain():
    maze = resolve(["--preset", "r2i"])
    assert (maze.s3m.layers, maze.s3m.state, maze.s3m.width, maze.s3m.deter) == (5, 512, 1024, 2048)
    assert (maze.loss.dyn, maze.loss.rep, maze.behaviour.entropy) == (0.8, 0.2, 1e-3)
    bsuite = resolve(["--preset", "r2i", "--task", "bsuite_memory_len_0"])
    assert (bsuite.batch.size, bsuite.batch.length, bsuite.s3m.discretisation) == (16, 256, "zoh")
    assert (bsuite.loss.dyn, bsuite.loss.rep) == (0.5, 0.1)


def test_flags_may_use_an_equals_sign():
    assert resolve(["--seed=3", "--logdir="]).seed == 3


def test_flag_beats_the_core_and_size_of_a_preset():
    config = resolve(["--preset", "r2i", "--core", "gru", "--size", "12m"])
    assert (config.core, config.size, config.gru.deter) == ("gru", "12m", 2048)


@pytest.mark.parametrize("core", load.blocks("cores"))
@pytest.mark.parametrize("size", [*load.blocks("sizes"), "auto"])
def test_every_preset_resolves_for_every_suite_core_and_size(core, size):
    for task, preset in itertools.product(TASKS, ["", *load.blocks("presets")]):
        config = resolve(["--task", task, "--core", core, "--size", size, "--preset", preset])
        assert (config.task, config.core, config.size) == (task, core, size)
        assert config.s3m.state % config.s3m.blocks == 0
        assert config.gru.deter % config.gru.blocks == 0


def test_no_preset_sets_what_presets_are_chosen_by():
    for name in load.blocks("presets"):
        assert not {"task", "preset", "logdir", "seed"} & set(load.preset(name, "tmaze_9"))


def test_every_block_of_a_suite_in_a_preset_is_read_strictly(monkeypatch):
    blocks = {**{name: load.blocks(name) for name in ("tasks", "cores", "sizes")}}
    blocks["presets"] = {"mine": {"tasks": {"tmaze": {"modle": {"units": 3}}}}}
    monkeypatch.setattr(load, "blocks", blocks.__getitem__)
    message = refused("--task", "tmaze_9", "--preset", "mine")
    assert message.startswith("configs/presets.yaml mine tmaze: no setting 'modle.units'")


def test_unknown_key_suggests_neighbour():
    message = refused("--replay.capactiy", "5")
    assert message.startswith(
        "command line: no setting 'replay.capactiy'; did you mean 'replay.capacity'?; known: "
        "replay.capacity, replay."
    )


def test_key_without_its_group_suggests_the_full_name():
    assert "did you mean 'optim.lr'?" in refused("--lr", "1e-3")
    assert "did you mean 'batch.size'?; known: batch.size, batch.length" in refused(
        "--batch.sise", "4"
    )
    assert "did you mean 'batch.size'?" in refused("--bach.size", "4")
    assert "did you mean 'behaviour.entropy'?" in refused("--optim.entropy", "1")
    assert "'gru' is a group of settings: gru.deter, gru.blocks" in refused("--gru", "{}")
    assert "did you mean 'replay.capacity'?" in refused("--capacity", "5")


@pytest.mark.parametrize(
    ("flag", "name", "suggestion"),
    [("--core", "s3n", "s3m"), ("--size", "13m", "1m"), ("--preset", "r2j", "r2i")],
)
def test_unknown_name_of_a_block_suggests_a_known_one(flag, name, suggestion):
    message = refused(flag, name)
    assert repr(name) in message
    assert f"did you mean {suggestion!r}?; known: " in message


def test_whole_number_may_be_written_with_an_exponent():
    config = resolve(
        ["--replay.capacity", "1e6", "--stop.steps", "2.5e3", "--loop.train_ratio", "0.5"]
    )
    assert (config.replay.capacity, config.stop.steps, config.loop.train_ratio) == (
        1_000_000,
        2500,
        0.5,
    )
    assert type(config.replay.capacity) is int


def test_long_whole_number_keeps_every_digit():
    assert resolve(["--seed", "9007199254740993"]).seed == 9007199254740993


def test_fraction_into_int_is_an_error():
    assert (
        refused("--stop.steps", "1.5")
        == "command line: stop.steps is '1.5'; expected a whole number"
    )
    assert refused("--stop.steps", "15e-1").endswith("expected a whole number")


@pytest.mark.parametrize("value", ["", "many", "inf", "nan", "1e400", "true"])
def test_what_is_not_a_number_is_an_error(value):
    assert "expected a whole number" in refused(f"--stop.steps={value}")
    assert "expected a number" in refused(f"--optim.lr={value}")


def test_number_out_of_range_is_an_error():
    assert refused("--core=").endswith("core is ''; expected a name")
    assert refused("--batch.size", "0").endswith("expected 1 or more")
    assert refused("--batch.length", "1").endswith("expected 2 or more")
    assert refused("--optim.lr", "-1").endswith("expected 0 or more")
    assert refused("--env.count", "-1").endswith("expected 0 or more")
    assert resolve(["--env.count", "0", "--optim.warmup", "0"]).optim.warmup == 0


@pytest.mark.parametrize("value", ["1", "True", "yes", ""])
def test_switch_takes_only_true_and_false(value):
    assert refused(f"--replay.online={value}").endswith("expected true or false")


def test_switch_takes_true_and_false():
    assert resolve(["--replay.online", "false"]).replay.online is False
    assert resolve(["--replay.online", "true"]).replay.online is True


def test_choice_outside_the_list_is_an_error():
    expected = "command line: env.processes is 'maybe'; expected one of auto, yes, no"
    assert refused("--env.processes", "maybe") == expected


def test_flag_without_value_twice_or_without_dashes_is_an_error():
    assert refused("--stop.steps") == "command line: --stop.steps has no value"
    assert refused("--stop.steps", "--seed", "1") == "command line: --stop.steps has no value"
    assert refused("--seed", "1", "--seed", "2") == "command line: --seed is given twice"
    assert "stands alone" in refused("train")


def test_group_is_not_a_setting():
    assert "'batch' is a group of settings: batch.size" in refused("--batch", "3")


def test_explicit_is_what_flags_and_named_presets_set():
    keys = explicit(["--preset", "maze_1m_cpu", "--seed=4"])
    assert {"preset", "seed", "size", "batch.size", "optim.lr"} <= keys
    assert "model.units" not in keys  # follows from the size
    assert explicit([]) == set()


def test_another_size_leaves_what_the_user_gave():
    argv = ["--model.units", "7"]
    config = load.with_size(resolve(argv), "1m", explicit(argv))
    assert (config.size, config.model.units, config.model.hidden) == ("1m", 7, 64)
    assert config.gru.deter == 512


def test_saved_config_reloads_equal(tmp_path):
    path = tmp_path / "config.yaml"
    for argv in (
        [],
        ["--preset", "r2i,maze_1m_cpu", "--optim.eps", "1e-20", "--replay.online", "false"],
        ["--logdir", "12", "--task", "null", "--optim.lr", "0.1"],
        ["--logdir", "a: b # c"],
    ):
        config = resolve(argv)
        load.save(config, path)
        assert load.load(path) == config
    assert [file.name for file in tmp_path.iterdir()] == ["config.yaml"]


def test_saved_file_is_durable_with_its_name_and_one_without_content_is_refused(
    tmp_path, monkeypatch, yaml_file
):
    synced, sync = [], os.fsync

    def watched(file):
        synced.append(os.readlink(f"/proc/self/fd/{file}"))
        sync(file)

    monkeypatch.setattr(os, "fsync", watched)
    load.save(resolve([]), tmp_path / "config.yaml")
    assert synced == [str(tmp_path / "config.writing"), str(tmp_path)]
    for text in ("", "seed: 3\n"):
        with pytest.raises(ConfigError, match=r"config\.yaml is damaged: it names no task"):
            load.load(yaml_file(text))


def test_saved_file_of_an_earlier_version_has_the_defaults_of_newer_settings(yaml_file, caplog):
    config = resolve(["--seed", "3"])
    text = load.render(config).replace("core: s3m\n", "")
    assert load.load(yaml_file(text)) == config
    assert caplog.messages[0].endswith("is of an earlier version; at their defaults: core")


def test_saved_file_with_a_foreign_setting_is_an_error(yaml_file):
    text = load.render(Config()).replace("seed: 0\n", "sede: 0\n")
    with pytest.raises(ConfigError, match=r"no setting 'sede'; did you mean 'seed'\?"):
        load.load(yaml_file(text))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("seed: 1\nseed: 2\n", "line 2: not proper YAML: found duplicate key"),
        ("batch: {size: 1, size: 2}\n", "not proper YAML: found duplicate key"),
        ("seed: [\n", "not proper YAML"),
        ("- seed\n", "settings were expected"),
        ("batch: 3\n", "'batch' is a group of settings"),
        ("task:\n", "task is 'None'; expected a text"),
        ("seed: true\n", "seed is 'true'; expected a whole number"),
        ("seed: {a: 1}\n", "no setting 'seed.a'"),
    ],
)
def test_damaged_file_is_one_line_that_names_the_file(yaml_file, text, problem):
    with pytest.raises(ConfigError) as error:
        load.load(yaml_file(text))
    message = str(error.value)
    assert "config.yaml" in message
    assert problem in message
    assert "\n" not in message


def test_duplicate_key_in_a_file_of_presets_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "sizes.yaml").write_text("1m: {}\n1m: {}\n")
    monkeypatch.setattr(load, "FOLDER", tmp_path)
    with pytest.raises(ConfigError, match=r"sizes.yaml line 2: not proper YAML: .*duplicate key"):
        load.blocks.__wrapped__("sizes")


def test_every_block_of_every_file_is_understood():
    for name in ("tasks", "cores", "sizes"):
        for key, tree in load.blocks(name).items():
            load.flatten(tree, f"{name} {key}")
    for name, tree in load.blocks("presets").items():
        for suite in tree.get("tasks", {}):
            load.preset(name, suite)


def test_resolving_changes_no_shared_state():
    before = repr([load.blocks(name) for name in ("tasks", "cores", "sizes", "presets")])
    first = resolve(["--preset", "r2i"])
    resolve(["--preset", "r2i,bsuite_small", "--size", "1m", "--core", "gru", "--seed", "4"])
    assert resolve(["--preset", "r2i"]) == first
    after = repr([load.blocks(name) for name in ("tasks", "cores", "sizes", "presets")])
    assert after == before


def test_configuration_cannot_be_changed():
    config = resolve([])
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.batch.size = 3


def test_help_names_every_field_with_default_and_meaning():
    text = help_text()
    for key, (_, field) in load.LEAVES.items():
        assert f"--{key} " in text
        assert field.metadata["meaning"] in text
    assert "--optim.lr" in text
    assert "float = 4e-05" in text
    for block in ("sizes", "cores", "presets"):
        for name in load.blocks(block):
            assert name in text


def test_every_field_has_a_meaning_and_every_core_its_settings():
    for key, (_, field) in load.LEAVES.items():
        assert field.metadata["meaning"], key
    groups = {field.name for field in dataclasses.fields(Config)}
    assert set(load.blocks("cores")) <= groups


def test_a_setting_may_be_called_by_a_word_of_python(tmp_path):
    config = resolve(["--replay.from", "logs/a"])
    assert config.replay.from_ == "logs/a"
    load.save(config, tmp_path / "config.yaml")
    assert "  from: logs/a\n" in (tmp_path / "config.yaml").read_text()
    assert load.load(tmp_path / "config.yaml") == config
    assert "--replay.from " in help_text()
    assert "no setting 'replay.from_'; did you mean 'replay.from'" in refused("--replay.from_", "a")


def test_a_preset_may_be_a_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("core: gru\nsize: debug\ngru: {deter: 48}\ntasks: {tmaze: {optim: {lr: 0.5}}}")
    argv = ["--task", "tmaze_9", "--preset", f"vector_small,{path}"]
    config = resolve(argv)
    assert (config.core, config.size, config.gru.deter, config.optim.lr) == (
        "gru",
        "debug",
        48,
        0.5,
    )
    assert config.batch.size == 16  # from vector_small
    assert "gru.deter" in explicit(argv)
    assert resolve([*argv[2:], "--task", "gym_X"]).optim.lr == 1e-3


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("gru: {deterr: 48}", "no setting 'gru.deterr'; did you mean 'gru.deter'"),
        ("- core", "settings were expected"),
        ("task: tmaze_9", "a preset cannot set task"),
        ("seed: 3", "a preset cannot set seed"),
    ],
)
def test_a_file_of_a_preset_is_read_strictly(yaml_file, text, problem):
    message = refused("--preset", str(yaml_file(text)))
    assert "config.yaml" in message
    assert problem in message


def test_a_preset_that_is_no_file_is_one_line():
    assert refused("--preset", "absent/a.yaml") == "--preset: there is no file absent/a.yaml"


def test_settings_that_have_moved_are_read_from_earlier_files_and_named_on_the_command_line(
    yaml_file,
):
    config = resolve(["--stop.steps", "123", "--stop.updates", "7"])
    head, _, _ = load.render(config).partition("stop:\n")
    after = load.render(config).partition("stop:\n")[2]
    after = after[after.index("model:") :]
    assert load.load(yaml_file(f"steps: 123\nupdates: 7\n{head}{after}")) == config
    for old in ("steps", "updates"):
        assert f"did you mean 'stop.{old}'?" in refused(f"--{old}", "5")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("tasks: 3", "tasks is 3; expected settings by the name of a suite"),
        ("tasks: [a]", "expected settings by the name of a suite"),
        ("tasks: {dmcvision: {seed: 1}}", "no suite 'dmcvision'; did you mean 'dmc_vision'"),
        ("tasks: {atari: {optim.rl: 1}}", "no setting 'optim.rl'"),
    ],
)
def test_every_block_of_a_preset_is_checked_whatever_the_task(tmp_path, text, told):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    assert told in refused("--task", "tmaze_5", "--preset", str(file))
