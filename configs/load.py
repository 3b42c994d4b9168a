"""From presets and flags to one frozen `Config`, strictly: what is not understood is an error.

Order, later wins: schema defaults, tasks.yaml, cores.yaml, sizes.yaml, presets.yaml, flags.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import io
import keyword
import logging
import math
import os
import typing
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from configs.schema import Config

log = logging.getLogger("configs")
FOLDER = Path(__file__).parent
AUTO_SIZE = "auto"
# What the blocks that apply are chosen by, and what tells runs apart: no business of a preset.
CHOSEN_BY = ("task", "preset", "logdir", "seed")
# What settings are called in the files of earlier runs, and today.
RENAMED = {"steps": "stop.steps", "updates": "stop.updates"}
# The least value of counts for which it is not 1, or 0 where their default is 0.
LEAST = {"optim.warmup": 0, "env.restarts_per_hour": 0, "rlt.feedback": 0, "batch.length": 2}
LEAST |= {"env.timeout": 1, "behaviour.discount_horizon": 1}


class ConfigError(ValueError):
    """A setting that cannot be used: what, where, what was expected."""


def nearest(word: str, known: list[str]) -> str:
    """`; did you mean 'x'?` for the closest known name, and the names when they are few."""
    last = word.rpartition(".")[2]
    ends = {name.rpartition(".")[2]: name for name in reversed(known)}
    # A right name at the wrong level is as common as a misspelt one.
    ways = ((word, known, 0.85), (last, list(ends), 0.6), (word, known, 0.6))
    close = [m for text, of, least in ways for m in difflib.get_close_matches(text, of, 1, least)]
    hint = f"; did you mean {ends.get(close[0], close[0])!r}?" if close else ""
    return hint + (f"; known: {', '.join(known)}" if len(known) < 20 else "; --help lists them")


def shown(name: str) -> str:
    """A field's name as users write it: `from`, which Python reserves, is the field `from_`."""
    return name.removesuffix("_")


def attribute(name: str) -> str:
    return f"{name}_" if keyword.iskeyword(name) else name


def leaves(cls: type = Config, prefix: str = "") -> dict[str, tuple[Any, dataclasses.Field]]:
    """Dotted name -> (type, field) of every setting."""
    out: dict[str, tuple[Any, dataclasses.Field]] = {}
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            out.update(leaves(kind, f"{prefix}{field.name}."))
        else:
            out[prefix + shown(field.name)] = (kind, field)
    return out


LEAVES = leaves()


def convert(key: str, value: Any, where: str) -> Any:
    """`value` (a flag's text or a YAML value) as the type of setting `key`."""
    kind, field = LEAVES[key]
    text = str(value).lower() if isinstance(value, bool) else str(value)

    def fail(expected: str) -> ConfigError:
        return ConfigError(f"{where}: {key} is {text!r}; expected {expected}")

    if typing.get_origin(kind) is typing.Literal:
        choices = [str(choice) for choice in typing.get_args(kind)]
        if text not in choices:
            raise fail(f"one of {', '.join(choices)}")
        return text
    if kind is bool:
        if text not in ("true", "false"):
            raise fail("true or false")
        return text == "true"
    if kind is str:
        if not isinstance(value, str):
            raise fail("a text")
        if key in ("task", "core", "size") and not text:
            raise fail("a name")
        return text
    whole = kind is int
    try:
        number = math.nan if isinstance(value, bool) else float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or (whole and number != int(number)):
        raise fail("a whole number" if whole else "a number")
    least = LEAST.get(key, 1 if whole and field.default > 0 else 0)
    if number < least:
        raise fail(f"{least} or more")
    if not whole:
        return number
    return int(number) if "e" in text.lower() or "." in text else int(text)


def check_key(key: str, where: str) -> None:
    """ConfigError for what is no setting, with the nearest of its own group, or else of all."""
    if key in LEAVES:
        return
    group, _, last = key.partition(".")
    inside = {name.partition(".")[2]: name for name in LEAVES if name.startswith(f"{group}.")}
    if inside and not last:
        names = ", ".join(inside.values())
        raise ConfigError(f"{where}: {key!r} is a group of settings: {names}")
    close = difflib.get_close_matches(last, list(inside), 1, 0.6)
    known = list(inside.values() if close else LEAVES)
    raise ConfigError(f"{where}: no setting {key!r}" + nearest(key, known))


def flatten(
    tree: Any, where: str, prefix: str = "", renamed: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    """A nested YAML block as dotted settings, checked and converted; of those `renamed`, old name
    to new, it may have the old one."""
    if not isinstance(tree, dict):
        raise ConfigError(f"{where}: {tree!r} stands where settings were expected (key: value)")
    out: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            out.update(flatten(value, where, f"{name}.", renamed))
        else:
            name = renamed.get(name, name)
            check_key(name, where)
            out[name] = convert(name, value, where)
    return out


def read_yaml(path: Path) -> Any:
    try:
        return YAML(typ="safe").load(path) or {}
    except YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", error)
        line = f" line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{line}: not proper YAML: {problem}") from None


@functools.cache
def blocks(name: str) -> dict[str, Any]:
    """The named blocks of configs/<name>.yaml."""
    return read_yaml(FOLDER / f"{name}.yaml")


def pick(name: str, key: str, kind: str) -> dict[str, Any]:
    known = blocks(name)
    if key not in known:
        names = [*known, AUTO_SIZE] if kind == "size" else list(known)
        raise ConfigError(f"--{kind}: no {kind} {key!r}" + nearest(key, names))
    return flatten(known[key] or {}, f"configs/{name}.yaml {key}")


def by_prefix(tree: Any, task: str, where: str) -> dict[str, Any]:
    """Blocks whose name is the task's or its first words, the shorter names first. A plug-in,
    `module:callable`, has no suite: for it a block needs its whole name. All blocks are checked."""
    if not isinstance(tree, dict):
        raise ConfigError(f"{where}: tasks is {tree!r}; expected settings by the name of a suite")
    plugin = ":" in task and not task.startswith("gym_")
    suites = list(blocks("tasks"))
    out: dict[str, Any] = {}
    for prefix in sorted(map(str, tree), key=len):
        if ":" not in prefix and not any(f"{prefix}_".startswith(f"{s}_") for s in suites):
            raise ConfigError(f"{where}: no suite {prefix!r}" + nearest(prefix, suites))
        block = flatten(tree.get(prefix) or {}, f"{where} {prefix}")
        if task == prefix or (not plugin and task.startswith(f"{prefix}_")):
            out.update(block)
    return out


def preset(name: str, task: str) -> dict[str, Any]:
    """A named preset, or that of a file, NAME.yaml; its block `tasks` holds what applies to tasks
    by the first words of their name."""
    known = blocks("presets")
    where = f"configs/presets.yaml {name}"
    if name.endswith((".yaml", ".yml")):
        if not Path(name).is_file():
            raise ConfigError(f"--preset: there is no file {name}")
        where, tree = name, read_yaml(Path(name))
    elif name in known:
        tree = known[name] or {}
    else:
        raise ConfigError(f"--preset: no preset {name!r}" + nearest(name, list(known)))
    suites = {}
    if isinstance(tree, dict):
        tree = dict(tree)
        suites = tree.pop("tasks", {})
    found = {**flatten(tree, where), **by_prefix(suites, task, where)}
    for key in CHOSEN_BY:
        if key in found:
            raise ConfigError(f"{where}: a preset cannot set {key}, which the command line does")
    return found


def parse_flags(argv: list[str]) -> dict[str, str]:
    """`--key value` and `--key=value` to texts, keys checked."""
    flags: dict[str, str] = {}
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise ConfigError(f"command line: {word!r} stands alone; expected --setting value")
        key, given, value = word[2:].partition("=")
        check_key(key, "command line")
        if not given:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"command line: --{key} has no value")
            value = rest.pop(0)
        if key in flags:
            raise ConfigError(f"command line: --{key} is given twice")
        flags[key] = value
    return flags


def replace_flat(config: Config, changes: dict[str, Any]) -> Config:
    """A copy of `config` with dotted settings replaced."""
    groups: dict[str, dict[str, Any]] = {}
    top: dict[str, Any] = {}
    for key, value in changes.items():
        group, dot, name = key.partition(".")
        if dot:
            groups.setdefault(group, {})[attribute(name)] = value
        else:
            top[key] = value
    for group, values in groups.items():
        top[group] = dataclasses.replace(getattr(config, group), **values)
    return dataclasses.replace(config, **top)


def preset_keys(names: str, task: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name in filter(None, names.split(",")):
        out.update(preset(name.strip(), task))
    return out


def layers(flags: dict[str, Any]) -> dict[str, Any]:
    """All settings that differ from the defaults, presets merged in order."""
    task = flags.get("task", Config().task)
    named = preset_keys(flags.get("preset", ""), task)
    known = flags.get("size") or named.get("size") or Config().size
    core = flags.get("core") or named.get("core") or Config().core
    merged = by_prefix(blocks("tasks"), task, "configs/tasks.yaml")
    merged.update(pick("cores", core, "core"))
    if known != AUTO_SIZE:
        merged.update(pick("sizes", known, "size"))
    merged.update(named)
    merged.update(flags)
    return merged


def resolve(argv: list[str]) -> Config:
    """The configuration of a command line. Raises ConfigError with one line."""
    flags = {k: convert(k, v, "command line") for k, v in parse_flags(argv).items()}
    return replace_flat(Config(), layers(flags))


def explicit(argv: list[str]) -> set[str]:
    """Settings that the user gave, by flag or by named preset; automatic choices leave them."""
    flags = parse_flags(argv)
    named = preset_keys(flags.get("preset", ""), flags.get("task", Config().task))
    return set(flags) | set(named)


def with_size(config: Config, size: str, given: set[str]) -> Config:
    """`config` at another size; settings in `given` stay."""
    changes = pick("sizes", size, "size")
    changes = {key: value for key, value in changes.items() if key not in given}
    return replace_flat(config, {**changes, "size": size})


def to_flat(config: Any, prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            out.update(to_flat(value, f"{prefix}{field.name}."))
        else:
            out[prefix + shown(field.name)] = value
    return out


def render(config: Config) -> str:
    """YAML text of the whole configuration, groups in the order of the schema."""
    return render_flat(to_flat(config))


def render_flat(flat: dict[str, Any]) -> str:
    """YAML text of dotted settings; groups stand in the order of their first one."""
    buffer = io.StringIO()
    yaml = YAML()
    yaml.default_flow_style = False
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        group, dot, name = key.rpartition(".")
        (tree.setdefault(group, {}) if dot else tree)[name] = value
    yaml.dump(tree, buffer)
    return buffer.getvalue()


def save(config: Config, path: Path) -> None:
    """Write all settings; the file is durable and whole, or the one before it."""
    aside = path.with_suffix(".writing")
    with aside.open("w") as file:
        file.write(render(config))
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def load(path: Path) -> Config:
    """The configuration that `save` wrote; strict about names it does not know.

    A setting that is newer than the file has its default, which is to leave things as they were.
    Raises ConfigError for what `save` did not write, such as a file that lost its content.
    """
    flat = flatten(read_yaml(path), str(path), renamed=RENAMED)
    if "task" not in flat:
        raise ConfigError(
            f"{path} is damaged: it names no task; restore it from a copy, or train anew with "
            f"another --logdir"
        )
    newer = sorted(set(LEAVES) - set(flat))
    if newer:
        log.warning("%s is of an earlier version; at their defaults: %s", path, ", ".join(newer))
    return replace_flat(Config(), flat)


def type_name(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return "|".join(typing.get_args(kind))
    return kind.__name__


def help_text() -> str:
    """Every setting: name, type, default and meaning, grouped as in the schema."""
    lines = ["usage: python -m agent.train [--setting value ...]", "", "main settings"]
    group = ""
    meanings = {field.name: field.metadata["meaning"] for field in dataclasses.fields(Config)}
    defaults = to_flat(Config())
    for key, (kind, field) in LEAVES.items():
        head = key.rpartition(".")[0]
        if head != group:
            group = head
            lines += ["", f"{group}: {meanings[group]}"]
        default = defaults[key]
        shown = "''" if default == "" else str(default).lower() if kind is bool else default
        lines.append(f"  --{key:27} {type_name(kind)} = {shown}")
        lines.append(f"      {field.metadata['meaning']}")
    lines += ["", "sizes:   " + " ".join(blocks("sizes")) + " auto"]
    lines += ["cores:   " + " ".join(blocks("cores")), "presets: " + " ".join(blocks("presets"))]
    return "\n".join(lines)
