"""Weeks in small: neither RAM nor disk grows with steps and updates."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEPS, CAPACITY, UPDATES = 20_000, 2_000, 5_000
FLAGS = [
    *("--task", "test_counter", "--core", "s3m", "--size", "debug", "--device", "cpu"),
    *("--precision", "float32", "--threads", "1", "--env.count", "4", "--env.processes", "yes"),
    *("--batch.size", "2", "--batch.length", "16", "--behaviour.horizon", "3"),
    *("--loop.train_ratio", str(UPDATES * 2 * 16 / STEPS), "--replay.capacity", str(CAPACITY)),
    *("--log.every", "1", "--log.media_every", "0", "--checkpoint.every", "5"),
    *("--steps", str(STEPS)),
]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lockstep", "overlapped"])
def test_ram_and_disk_stay_flat_over_20000_steps_and_5000_updates(tmp_path, mode):
    command = [sys.executable, "-m", "agent.train", "--logdir", str(tmp_path), *FLAGS]
    subprocess.run([*command, "--loop.mode", mode], cwd=ROOT, check=True, timeout=900)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["update"] >= UPDATES - 100
    # From three capacities on: caches are full, every kind of work has been done.
    settled = [row for row in rows if row["agent_step"] > 3 * CAPACITY]
    half = len(settled) // 2
    assert half >= 5
    for key, room in (
        *(("usage/ram_gb", 0.01), ("usage/workers_ram_gb", 0.01)),
        ("replay/disk_gb", 2e-4),
    ):
        early, late = (max(row[key] for row in part) for part in (settled[:half], settled[half:]))
        assert late <= early + room, (key, early, late)
