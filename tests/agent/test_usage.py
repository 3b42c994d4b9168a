"""Memory and disk in the metrics, and the warning before they run out."""

import subprocess
import sys

import pytest
import torch

from agent.usage import LEAST, Usage


@pytest.fixture
def usage(tmp_path):
    return Usage(tmp_path, torch.device("cpu"))


def test_children_count_apart_from_the_process(usage):
    before = usage.measure()
    code = "x = bytearray(200_000_000); print(flush=True); input()"
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    child.stdout.readline()
    after = usage.measure()
    child.communicate(b"\n")
    assert after["usage/workers_ram_gb"] - before["usage/workers_ram_gb"] > 0.2
    assert after["usage/ram_gb"] - before["usage/ram_gb"] < 0.1
    assert {"usage/ram_free_gb", "usage/disk_free_gb"} <= set(after)


@pytest.mark.parametrize("name", LEAST)
def test_a_warning_once_each_time_that_something_gets_scarce(usage, name, caplog):
    least, advice = LEAST[name]
    for free in (3 * least, 0.9 * least, 0.5 * least, 1.5 * least, 0.9 * least):
        usage.warn({name: free})
    assert len(caplog.messages) == 1
    assert advice in caplog.messages[0]
    for free in (3 * least, 0.9 * least):
        usage.warn({name: free})
    assert len(caplog.messages) == 2
