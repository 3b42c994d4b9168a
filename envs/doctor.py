"""What works here, and the line that mends what does not: `python -m envs.doctor [--quick]`.

Suites and their versions, steps a second of each, the OpenGL backend and the device that it draws
with, and memory and disk beside what a run takes by default. Exit status 1 when something that is
installed does not work; a suite that is not installed is no fault.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from configs.command import command_line
from configs.schema import Config
from envs import machine
from envs.env import Space
from envs.make import PACKAGES, SUITES, cheap, check_task, make_env
from envs.pool import EnvPool
from envs.rendering import INSTALL, draws

SECONDS = 2.0  # of a timed window
WORKER_GB = 0.8  # RAM of one worker that draws
STEP_KB = 12.3 / 3.4  # of an image 64x64x3 on disk, at the ratio of frames of a maze under zstd


@dataclass(frozen=True)
class Kit:
    """The `wheel` that brings a suite's package (envs/make.py), and a task to try."""

    wheel: str
    task: str
    draws: bool = False


KITS = {
    "memory_maze": Kit("memory-maze", "memory_maze_9x9", True),
    "dmc": Kit("dm-control", "dmc_walker_walk"),
    "dmc_vision": Kit("dm-control", "dmc_vision_walker_walk", True),
    "atari": Kit("ale-py", "atari_pong"),
    "atari100k": Kit("ale-py", "atari100k_pong"),
    "popgym": Kit("popgym", "popgym_RepeatPreviousEasy"),
    "bsuite": Kit("bsuite", "bsuite_memory_len_5"),
    "gym": Kit("gymnasium", "gym_CartPole-v1"),
    "tmaze": Kit("", "tmaze_20"),
}


def uniform(space: Space, rows: int, random: np.random.Generator) -> np.ndarray:
    """Actions (rows, ...) drawn uniformly."""
    if space.kind == "vector":
        return random.uniform(-1, 1, (rows, *space.shape)).astype(space.dtype)
    return random.integers(0, space.classes, (rows, *space.shape)).astype(space.dtype)


def speed(task: str, workers: int, processes: bool, seconds: float = SECONDS) -> float:
    """Steps a second of all workers together after a warm-up, actions uniform."""
    pool = EnvPool(functools.partial(make_env, task), workers, 0, processes, timeout=60.0)
    random = np.random.default_rng(0)
    try:
        for window in (seconds / 4, seconds):
            start, steps = time.perf_counter(), 0
            while time.perf_counter() - start < window:
                ids, obs = pool.recv()
                steps += int((~obs["is_first"]).sum())
                pool.send(ids, uniform(pool.act_space, len(ids), random))
        return steps / (time.perf_counter() - start)
    finally:
        pool.close()


class Doctor:
    """Prints what is found and keeps what is wrong, with the line that mends it."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.blind = False  # no OpenGL backend draws

    def fault(self, what: str, line: str) -> None:
        self.wrong.append(f"{what}\n    {line}")

    def machine(self) -> None:
        cores = machine.cores()
        print(f"Python {platform.python_version()}, {platform.platform()}, {cores} cores\n")

    def suites(self, quick: bool) -> None:
        rates = f"{'1 worker':>9} {'2 workers':>9} in process"
        print(f"\n{'suite':12} {'package':20} {'task':26} {rates}")
        for suite in SUITES:
            if suite == "test":
                continue
            kit = KITS.get(suite)
            # The project itself brings what is not in PACKAGES.
            package, extra = PACKAGES.get(suite, ("", ""))
            install = f"pip install -e '.[{extra}]'" if extra else "pip install -e ."
            if kit is None:
                print(f"{suite:12} no task to try is known")
            elif package and importlib.util.find_spec(package) is None:
                print(f"{suite:12} not installed: {install}")
            else:
                print(f"{suite:12} {self.version(kit):20} {kit.task:26}", end=" ", flush=True)
                try:
                    check_task(kit.task)
                    print(self.rates(kit.task, quick))
                except Exception as error:
                    # Whatever a suite raises is what is to be told here.
                    print("does not work")
                    last = str(error).strip().splitlines()[-1:] or [repr(error)]
                    if not (self.blind and kit.draws):  # that has been told
                        self.fault(f"{kit.task}: {last[0]}", install)

    def version(self, kit: Kit) -> str:
        if not kit.wheel:
            return "of its own"
        try:
            return f"{kit.wheel} {importlib.metadata.version(kit.wheel)}"
        except importlib.metadata.PackageNotFoundError:  # found on the path, not installed
            return f"{kit.wheel} ?"

    def rates(self, task: str, quick: bool) -> str:
        """Speeds; with `quick` only whether a worker steps, or this process if that is usual."""
        if quick:
            speed(task, 1, not cheap(task), 0.1)
            return "works"
        rates = [speed(task, 1, True), speed(task, 2, True)]
        # What a run uses where a step costs less than a message.
        rates += [speed(task, 1, False)] if cheap(task) else []
        return " ".join(f"{rate:9,.0f}" for rate in rates) + " steps/s"

    def rendering(self) -> None:
        needed = [name for name, kit in KITS.items() if kit.draws and name in SUITES]
        if importlib.util.find_spec("mujoco") is None:
            print("rendering: mujoco is not installed, and nothing else needs OpenGL")
            return
        asked = os.environ.get("MUJOCO_GL")
        results = {name: draws(name) for name in ([asked] if asked else ["egl", "osmesa"])}
        for name, (good, said) in results.items():
            print(f"rendering: {name} {'draws with ' if good else 'does not draw: '}{said}")
        working = [name for name, (good, _) in results.items() if good]
        self.blind = not working
        if not working:
            self.fault(f"no OpenGL backend draws, as is needed by {', '.join(needed)}", INSTALL)
            return
        device = results[working[0]][1]
        card = self.gpus()
        number = os.environ.get("MUJOCO_EGL_DEVICE_ID", "")
        print(
            f"rendering: runs use {working[0]}"
            f"{f', MUJOCO_EGL_DEVICE_ID {number}' if number else ''}; GPUs: {card or 'none'}"
        )
        if card and any(word in device.lower() for word in ("llvmpipe", "softpipe", "swrast")):
            self.fault(
                "OpenGL draws on the CPU although there is a GPU",
                "in a container: NVIDIA_DRIVER_CAPABILITIES=all; else the driver's libraries, "
                "for example apt-get install libnvidia-gl-<version of the driver>",
            )

    def gpus(self) -> str:
        """Names of NVIDIA GPUs; CUDA_VISIBLE_DEVICES hides none of them from OpenGL."""
        if not shutil.which("nvidia-smi"):
            return ""
        command = ["nvidia-smi", "--query-gpu=index,name", "--format=csv,noheader"]
        result = subprocess.run(command, capture_output=True, text=True)
        return "; ".join(result.stdout.strip().splitlines()) if not result.returncode else ""

    def room(self, folder: Path) -> None:
        """RAM and disk beside a default run of images; `folder` will hold the runs."""
        replay = Config().replay
        ram = machine.free_ram() / 1e9
        disk = shutil.disk_usage(folder).free / 1e9
        full = replay.disk_gb or replay.capacity * STEP_KB / 1e6
        print(
            f"\nRAM:  {ram:6.1f} GB free; a run takes {replay.ram_gb:g} for replay.ram_gb, "
            f"{WORKER_GB:g} a worker that draws, and the model"
            f"\ndisk: {disk:6.1f} GB free in {folder.resolve()}; replay.capacity "
            f"{replay.capacity:,} steps of 64x64 images take {full:.0f}"
        )
        if ram < replay.ram_gb + 2 * WORKER_GB:
            self.fault("too little RAM for a default run", "add --replay.ram_gb 0.2 --env.count 1")
        if disk < full:
            steps = int(disk * 0.9e6 / STEP_KB)
            print(f"      a run of more than {steps:,} steps keeps the newest {steps:,}")
        if disk < 5:
            self.fault("too little disk for a run", "free some, or --logdir on another disk")


def main(argv: list[str] | None = None) -> int:
    parser = command_line("envs.doctor", __doc__)
    parser.add_argument("--quick", action="store_true", help="try every suite, time none")
    args = parser.parse_args(argv)
    doctor = Doctor()
    doctor.machine()
    doctor.rendering()
    doctor.suites(args.quick)
    doctor.room(Path())
    for what in doctor.wrong:
        print(f"\nwrong: {what}")
    print("\nnothing is wrong with what is installed" if not doctor.wrong else "")
    return bool(doctor.wrong)


if __name__ == "__main__":
    sys.exit(main())
