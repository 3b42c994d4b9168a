"""Cores and memory by the limits of control groups, own and above."""

import os

import psutil
import pytest

from envs import machine

GB = 10**9


@pytest.fixture
def group(tmp_path, monkeypatch):
    """A function that writes the files of a group, by its path under the root."""
    own = tmp_path / "cgroup"
    own.write_text("1:name=systemd:/\n0::/job/step\n")
    monkeypatch.setattr(machine, "ROOT", tmp_path / "fs")
    monkeypatch.setattr(machine, "OWN", own)
    (tmp_path / "fs" / "job" / "step").mkdir(parents=True)

    def write(path, **files):
        for name, text in files.items():
            (tmp_path / "fs" / path / name.replace("_", ".")).write_text(text)

    return write


def test_cores_are_those_of_the_narrowest_limit(group, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(64))
    assert machine.cores() == 64
    group("job/step", cpu_max="max 100000\n")
    assert machine.cores() == 64
    group("job", cpu_max="350000 100000\n")
    assert machine.cores() == 4
    group("", cpu_max="50000 100000\n")
    assert machine.cores() == 1


def test_free_memory_is_that_of_the_narrowest_limit_with_what_files_hold(group, monkeypatch):
    whole = psutil.virtual_memory()._replace(available=500 * GB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: whole)
    assert machine.free_ram() == 500 * GB
    stat = "anon 5\ninactive_file 2000000000\nactive_file 7\n"
    group("job", memory_max=str(64 * GB), memory_current=str(30 * GB), memory_stat=stat)
    assert machine.free_ram() == 36 * GB
    group("job/step", memory_max=str(8 * GB), memory_current=str(9 * GB), memory_stat="")
    assert machine.free_ram() == 0


def test_a_machine_without_groups_is_taken_whole(group, monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "OWN", tmp_path / "absent")
    assert machine.groups() == []
    assert machine.cores() == len(os.sched_getaffinity(0))
    assert machine.free_ram() > 0
