"""Find an OpenGL backend that really draws: `python -m envs.rendering`.

MuJoCo chooses at import and cannot change, so every candidate is tried in a process of its own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

PROBE = """
import os, mujoco
model = mujoco.MjModel.from_xml_string(
    "<mujoco><worldbody><light pos='0 0 3'/><geom size='.5'/></worldbody></mujoco>")
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
renderer = mujoco.Renderer(model, 16, 16)
renderer.update_scene(data)
drawn = renderer.render().std() > 0
from OpenGL import GL
os.write(1, b"drawn by " + GL.glGetString(GL.GL_RENDERER) if drawn else b"blank")
os._exit(0)
"""
DEVICE = "MUJOCO_EGL_DEVICE_ID"
INSTALL = "apt-get install -y libegl1 libegl-mesa0 libgl1-mesa-dri libosmesa6"


def draws(backend: str) -> tuple[bool, str]:
    """Whether `backend` draws here, and by which device, or what it said when not."""
    env = {k: v for k, v in os.environ.items() if k != "PYOPENGL_PLATFORM"}
    env["MUJOCO_GL"] = backend
    try:
        result = subprocess.run(
            [sys.executable, "-c", PROBE], env=env, capture_output=True, text=True, timeout=60
        )
    except subprocess.TimeoutExpired:
        return False, "timed out"
    _, drawn, device = result.stdout.rpartition("drawn by ")
    lines = result.stderr.strip().splitlines()
    return bool(drawn), device if drawn else lines[-1] if lines else "a blank picture"


def gpu() -> str:
    """The number of the GPU that CUDA uses in this process, of several; else nothing."""
    local, visible = os.environ.get("LOCAL_RANK", ""), os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if not visible:
        return local
    numbers = [name.strip() for name in visible.split(",")]
    place = int(local or 0)
    return numbers[place] if place < len(numbers) and numbers[place].isdigit() else ""


def choose_gpu() -> None:
    """Draw by EGL on the GPU of this process: else all draw on the first. OpenGL may know fewer or
    other devices than CUDA, so it is tried; what is set already stays."""
    if DEVICE not in os.environ and (number := gpu()):
        os.environ[DEVICE] = number
        if not draws("egl")[0]:
            del os.environ[DEVICE]


def pick_backend() -> str:
    """Set MUJOCO_GL to the first backend that draws and return it.

    A value that is already set is the only one tried. Raises RuntimeError with the line to type.
    """
    if importlib.util.find_spec("mujoco") is None:
        raise RuntimeError("mujoco is not installed: pip install -e '.[dmc]' or '.[memory-maze]'")
    asked = os.environ.get("MUJOCO_GL")
    if not asked or asked == "egl":
        choose_gpu()
    failures = []
    for backend in [asked] if asked else ["egl", "osmesa"]:
        good, said = draws(backend)
        if good:
            os.environ["MUJOCO_GL"] = backend
            return backend
        failures.append(f"  {backend}: {said}")
    raise RuntimeError(
        f"no OpenGL backend can draw here without a screen. On Debian or Ubuntu: {INSTALL}\n"
        + "\n".join(failures)
    )


def choose_backend() -> None:
    """Before dm_control is imported: keep a backend that is set, as in a child of a process that
    chose one, or find one."""
    if not os.environ.get("MUJOCO_GL"):
        pick_backend()
    elif os.environ["MUJOCO_GL"] == "egl":
        choose_gpu()


if __name__ == "__main__":
    try:
        print(pick_backend())
    except RuntimeError as error:
        sys.exit(str(error))
