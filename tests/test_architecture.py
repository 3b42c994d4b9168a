"""The shape of the tree: which way imports go, what files are called, how long they are."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "configs": set(),
    "envs": {"configs"},
    "replay": {"configs"},
    "worldmodels": {"configs"},
    "agent": {"configs", "envs", "replay", "worldmodels"},
    "launch": {"configs", "envs", "replay", "worldmodels", "agent"},
}
SOURCES = [path for package in MAY_IMPORT for path in sorted((ROOT / package).rglob("*.py"))]
SAY_NOTHING = {"utils", "util", "tools", "helpers", "misc", "common"}


def imported(source: str) -> set[str]:
    """Top-level modules that a source imports anywhere, inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports hide which package is meant"
            names.add(node.module.partition(".")[0])
    return names


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_imports_are_found_wherever_they_stand():
    source = "import os.path as p\ndef f():\n    from agent.run import run\n    import numpy"
    assert imported(source) == {"os", "agent", "numpy"}


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_imports_go_one_way(path):
    package = path.relative_to(ROOT).parts[0]
    wrong = imported(path.read_text()) & set(MAY_IMPORT) - MAY_IMPORT[package] - {package}
    assert not wrong, f"{package} must not import {', '.join(sorted(wrong))}"


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_torch_is_imported_only_where_tensors_are_made(path):
    package = path.relative_to(ROOT).parts[0]
    if package in ("configs", "envs", "replay") and name(path) != "replay/loader.py":
        assert "torch" not in imported(path.read_text())


def test_configs_needs_only_the_standard_library_and_a_yaml_reader():
    allowed = sys.stdlib_module_names | {"configs", "ruamel"}
    for path in (ROOT / "configs").glob("*.py"):
        assert imported(path.read_text()) <= allowed, name(path)


def test_no_file_has_a_name_that_says_nothing():
    assert not [name(path) for path in SOURCES if path.stem in SAY_NOTHING]


def test_no_file_is_too_long_to_hold_one_idea():
    tests = sorted((ROOT / "tests").rglob("*.py"))
    lengths = {name(path): len(path.read_text().splitlines()) for path in [*SOURCES, *tests]}
    assert not {file: lines for file, lines in lengths.items() if lines > 450}


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_every_module_says_what_it_is_for(path):
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_tests_are_no_packages():
    # A tests/agent/__init__.py would compete with the package `agent`.
    assert not list((ROOT / "tests").rglob("__init__.py"))
