"""Processes of environments end with what began them; records are told apart."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from envs.slots import checksum
from envs.testing import Counter


def test_the_checksum_sees_every_value_of_a_record():
    record = Counter(image=True).reset(1)
    other = {**record, "image": record["image"].copy()}
    assert checksum(other) == checksum(record)
    other["image"][3, 4, 0] += 1
    assert checksum(other) != checksum(record)


SCRIPT = """
import sys, time
import numpy as np
from envs.pool import EnvPool
from envs.testing import Counter

class Hang(Counter):
    def step(self, action):
        print("hanging", flush=True)
        time.sleep(3600)

if __name__ == "__main__":
    pool = EnvPool({env}, 2, 0, True)
    ids, _ = pool.recv()
    print(*[slot.process.pid for slot in pool.slots], flush=True)
    {then}
"""


def start_parent(tmp_path, env, then):
    script = tmp_path / "parent.py"
    script.write_text(SCRIPT.format(env=env, then=then))
    process = subprocess.Popen(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return process, [int(pid) for pid in process.stdout.readline().split()]


def gone(pids, seconds=10):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not any(psutil.pid_exists(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("env", ["Counter", "Hang"])
def test_a_killed_parent_leaves_no_worker_behind(tmp_path, env):
    then = "pool.send(ids, np.zeros((2, 1), np.int32)); time.sleep(60)"
    parent, workers = start_parent(tmp_path, env, then)
    if env == "Hang":
        parent.stdout.readline()
    assert len(workers) == 2
    parent.send_signal(signal.SIGKILL)
    parent.communicate(timeout=20)
    assert gone(workers)


def test_a_parent_that_ends_without_closing_its_pool_ends(tmp_path):
    parent, workers = start_parent(tmp_path, "Counter", "sys.exit(5)")
    _, stderr = parent.communicate(timeout=20)
    assert (parent.returncode, stderr) == (5, "")
    assert gone(workers)
