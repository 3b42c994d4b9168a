"""The doctor: every suite has something to try, and every fault has the line that mends it."""

import configparser
import dataclasses
import types
from pathlib import Path

import numpy as np
import pytest

from envs import doctor
from envs.doctor import KITS, Doctor, main, speed, uniform
from envs.env import Space
from envs.make import PACKAGES, SUITES, check_task
from envs.rendering import INSTALL

ROOT = Path(__file__).parents[2]


@pytest.fixture
def only(monkeypatch):
    """A function that leaves one suite, with changes to its kit, and a backend that draws."""

    def leave(suite, **changes):
        monkeypatch.setattr(doctor, "SUITES", {suite: SUITES[suite]})
        monkeypatch.setitem(KITS, suite, dataclasses.replace(KITS[suite], **changes))
        monkeypatch.setattr(doctor, "draws", lambda name: (True, "a card"))
        monkeypatch.setattr(Doctor, "gpus", lambda self: "")

    return leave


def test_every_suite_has_a_task_that_exists_and_an_extra_that_can_be_installed():
    assert set(SUITES) - {"test"} <= set(KITS)
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    for suite in set(SUITES) - {"test"}:
        kit = KITS[suite]
        assert kit.task.startswith(f"{suite}_")
        _, extra = PACKAGES.get(suite, ("", ""))
        assert not extra or kit.wheel in setup["options.extras_require"][extra]
        check_task(kit.task)


def test_a_suite_that_works_is_no_fault(only, capsys):
    only("tmaze")
    assert main(["--quick"]) == 0
    said = capsys.readouterr().out
    assert "tmaze_20                   works" in said
    assert "nothing is wrong" in said
    assert "10,000,000 steps of 64x64 images take 36" in said


def test_a_suite_that_is_not_installed_is_told_and_is_no_fault(only, monkeypatch, capsys):
    only("bsuite")
    monkeypatch.setitem(PACKAGES, "bsuite", ("absent_package", "bsuite"))
    assert main(["--quick"]) == 0
    assert "bsuite       not installed: pip install -e '.[bsuite]'" in capsys.readouterr().out


def test_a_suite_that_is_installed_and_fails_is_a_fault_with_the_line_that_mends_it(only, capsys):
    only("bsuite", task="bsuite_memory_len_77")
    assert main(["--quick"]) == 1
    said = capsys.readouterr().out
    assert "wrong: bsuite_memory_len_77: " in said
    assert "    pip install -e '.[bsuite]'" in said
    assert "nothing is wrong" not in said


def test_no_backend_is_one_fault_and_what_draws_is_not_told_again(only, monkeypatch, capsys):
    only("memory_maze")
    monkeypatch.setattr(doctor, "draws", lambda name: (False, "no such library"))
    monkeypatch.setattr(doctor, "speed", lambda *args: 1 / 0)
    assert main(["--quick"]) == 1
    said = capsys.readouterr().out
    assert "egl does not draw: no such library" in said
    assert said.count("wrong: ") == 1
    assert f"as is needed by memory_maze\n    {INSTALL}" in said


def test_a_chosen_backend_is_the_only_one_tried(only, monkeypatch, capsys):
    only("memory_maze")
    monkeypatch.setattr(doctor, "speed", lambda *args: 1.0)
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    main(["--quick"])
    said = capsys.readouterr().out
    assert "runs use osmesa" in said
    assert "egl" not in said


def test_drawing_on_the_cpu_beside_a_gpu_is_a_fault(only, monkeypatch, capsys):
    only("tmaze")
    monkeypatch.setattr(Doctor, "gpus", lambda self: "0, a card")
    assert main(["--quick"]) == 0
    monkeypatch.setattr(doctor, "draws", lambda name: (True, "llvmpipe (256 bits)"))
    assert main(["--quick"]) == 1
    assert "NVIDIA_DRIVER_CAPABILITIES" in capsys.readouterr().out


@pytest.mark.parametrize(("ram", "disk", "faults"), [(30, 99, 0), (2, 99, 1), (30, 4, 1)])
def test_ram_and_disk_are_held_against_a_default_run(monkeypatch, capsys, ram, disk, faults):
    monkeypatch.setattr(doctor.machine, "free_ram", lambda: ram * 10**9)
    usage = types.SimpleNamespace(free=disk * 1e9)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: usage)
    patient = Doctor()
    patient.room(ROOT)
    assert len(patient.wrong) == faults
    # 12,288 bytes an image at 3.4 to 1: 4 GB hold a million, of which a tenth is kept free.
    assert ("keeps the newest 995,1" in capsys.readouterr().out) == (disk == 4)


def test_speed_counts_actions_of_every_worker():
    alone, both = (speed("test_counter", count, False, 0.2) for count in (1, 2))
    assert alone > 100
    assert both > 100


def test_actions_are_in_their_space():
    random = np.random.default_rng(0)
    drawn = uniform(Space("discrete", (2,), (3, 7)), 500, random)
    assert (drawn.shape, drawn.dtype) == ((500, 2), np.int32)
    assert drawn.min(0).tolist() == [0, 0]
    assert drawn.max(0).tolist() == [2, 6]
    drawn = uniform(Space("vector", (3,)), 500, random)
    assert (drawn.shape, drawn.dtype) == ((500, 3), np.float32)
    assert -1 <= drawn.min() < -0.9 < 0.9 < drawn.max() <= 1
