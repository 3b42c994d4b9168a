"""Every command that a document shows can be typed: modules, flags, targets and tasks exist."""

import re
import shlex
from pathlib import Path

import pytest

from agent.train import main
from agent.update import Update
from configs.load import resolve
from envs.make import check_task

ROOT = Path(__file__).parent.parent
PACKAGES = ("agent", "configs", "envs", "launch", "replay", "worldmodels")
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *(path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.md"))),
]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^(\w+):", MAKEFILE, re.M))
VARIABLES = dict(re.findall(r"^(\w+) \?= ?(.*)$", MAKEFILE, re.M))
REST = re.compile(r"\.\.\.|\[")  # from here on the reader decides


def commands(text: str) -> list[list[str]]:
    """Words of each `python -m module ...` and `make ...`, in blocks and in single backquotes."""
    text = re.sub(r"<[^<>\s]+>", "1", text.replace("\\\n", " "))  # `--logdir <folder>`, filled in
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", text, re.M | re.S)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    lines += re.findall(r"^(?: {4}|\t)(.*)$", prose, re.M) + re.findall(r"`([^`\n]+)`", prose)
    found = []
    for line in lines:
        line = re.sub(r"^torchrun .*?(?=-m )", "python ", line.strip())
        match = re.search(r"(?:^|[\s/=;&])(python3? -m [\w.]+.*|make(?= |$).*)$", line.strip())
        if match:
            shown = re.split(r"\s+#|\s&&|\s\||;", match[1])[0]
            found.append(shlex.split(REST.split(shown)[0]))
    return found


def check(words: list[str]) -> None:
    """AssertionError or ValueError when the command cannot be typed as shown."""
    if words[0] == "make":
        settings = dict(word.split("=", 1) for word in words[1:] if "=" in word)
        targets = {word for word in words[1:] if "=" not in word}
        assert targets <= TARGETS, f"no such target: {words}"
        assert set(settings) <= set(VARIABLES), f"no such variable of the Makefile: {words}"
        if "train" in targets:
            given = {**VARIABLES, **settings}
            train = ["--task", given["TASK"], "--core", given["CORE"], *shlex.split(given["ARGS"])]
            check(["python", "-m", "agent.train", *train])
        return
    module, flags = words[2], words[3:]
    if module.partition(".")[0] not in PACKAGES:
        return
    file = ROOT / f"{module.replace('.', '/')}.py"
    assert file.exists(), f"no such module: {words}"
    if module == "agent.train":
        if "--help" not in flags:
            check_task(resolve(flags).task)
        return
    for flag in flags:
        if flag.startswith("--"):
            quoted = f'"{flag.partition("=")[0]}"'
            assert quoted in file.read_text(), f"no such flag of {module}: {flag}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_commands_of_a_document_can_be_typed(path):
    for words in commands(path.read_text()):
        check(words)


def test_links_of_documents_lead_to_files():
    for path in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#\s]+)", path.read_text()):
            if not target.startswith(("http://", "https://")):
                assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_commands_are_found_in_blocks_and_in_text():
    text = """Type `make test` or `make train TASK=tmaze_9 ARGS="--seed 1"`; then make coffee.

    MUJOCO_GL=egl .venv/bin/python -m agent.train --task tmaze_9 \\
        --seed 1  # a comment

```bash
python -m agent.train --logdir <folder> --seed 1
python -m envs.rendering && echo good
```
"""
    assert sorted(commands(text)) == [
        ["make", "test"],
        ["make", "train", "TASK=tmaze_9", "ARGS=--seed 1"],
        ["python", "-m", "agent.train", "--logdir", "1", "--seed", "1"],
        ["python", "-m", "agent.train", "--task", "tmaze_9", "--seed", "1"],
        ["python", "-m", "envs.rendering"],
    ]


@pytest.mark.parametrize(
    "words",
    [
        ["make", "tea"],
        ["make", "train", "TASKS=tmaze_9"],
        ["make", "train", "TASK=tmaze"],
        ["make", "train", "ARGS=--sede 1"],
        ["python", "-m", "agent.absent"],
        ["python", "-m", "agent.train", "--sede", "1"],
        ["python", "-m", "agent.train", "--task", "tmazes_9"],
        ["python", "-m", "agent.evaluate", "--absent", "1"],
    ],
)
def test_a_wrong_command_is_noticed(words):
    with pytest.raises((AssertionError, ValueError)):
        check(words)


def test_the_two_commands_of_the_project_exist():
    check(["make", "train"])
    check(["make", "test"])


def test_the_example_from_python_plays_an_episode(tmp_path, monkeypatch):
    text = (ROOT / "agent" / "README.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    small = ["--size", "debug", "--precision", "float32", "--device", "cpu", "--threads", "1"]
    small += ["--batch.size", "2", "--batch.length", "16", "--stop.updates", "1"]
    monkeypatch.chdir(tmp_path)
    assert main(["--task", "test_counter", "--logdir", "logs/c", *small]) == 0
    names: dict = {}
    exec(code, names)
    assert names["score"] == 55  # rewards 1 to 10
    assert names["latents"]["hz"].shape[0] == 1
    whole = Update(names["config"], names["pool"].obs_space, names["pool"].act_space)
    whole.load_state_dict(names["run"]["weights"])
