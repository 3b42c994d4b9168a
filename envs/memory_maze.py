"""Memory Maze (Pasukonis et al. 2022) from the package's dm_control tasks, without old gym.

Two patches leave every pixel as it is (tests/envs/test_memory_maze.py) and make it about three
times as fast: contacts are tested on an array instead of in a loop that ends in a C++ exception,
and the wall textures are loaded once instead of ten times.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import sys
import types
from typing import Any

import numpy as np

from envs.adapters import FromDmEnv
from envs.rendering import choose_backend

SIZES = ("9x9", "11x11", "13x13", "15x15")
# The package's sixteen variants: the one without a name, and these.
VARIANTS = (
    *("vis", "hd", "top", "extraobs", "extraobs_vis", "extraobs_top", "oracle", "oracle_top"),
    *("oracle_extraobs", "hifreq", "hifreq_vis", "hifreq_hd", "6cl", "6cl_top", "6cl_extraobs"),
)
NAMES = tuple(
    f"{size}_{variant}" if variant else size for size in SIZES for variant in ("", *VARIANTS)
)
SETTINGS: dict[str, dict[str, Any]] = {
    "vis": {"good_visibility": True},
    "hd": {"camera_resolution": 256},
    "top": {"camera_resolution": 256, "top_camera": True},
    "extraobs": {"global_observables": True, "image_only_obs": False},
    # The path is found in the global observables; they are seen only where asked for.
    "oracle": {"global_observables": True, "show_path": True},
    "hifreq": {"control_freq": 40},
    "6cl": {"randomize_colors": True},
}


# In cells: positions from the corner of the maze, vectors as the agent is turned. In the layout a
# cell without a wall is 1.
LABELS = ("agent_pos", "agent_dir", "targets_pos", "targets_vec", "maze_layout")


def load_tasks() -> Any:
    """The module memory_maze.tasks. The package's own __init__ needs the retired gym: it is
    replaced by an empty package with the same path."""
    if "memory_maze" not in sys.modules:
        spec = importlib.util.find_spec("memory_maze")
        if spec is None:
            raise ImportError("memory_maze is not installed: pip install -e '.[memory-maze]'")
        package = types.ModuleType("memory_maze")
        package.__spec__ = spec
        package.__path__ = list(spec.submodule_search_locations or [])
        sys.modules["memory_maze"] = package
    return importlib.import_module("memory_maze.tasks")


def update_activation(self: Any, physics: Any) -> None:
    """TargetSphere._update_activation on the array of contacts of this instant."""
    data = physics.data.ptr
    if self._activated or not data.ncon:
        return
    pairs = data.contact.geom[: data.ncon]
    touching = (pairs == self._geom_id).any(1)
    wanted = self._specific_collision_geom_ids
    if wanted:
        touching &= (pairs[..., None] == list(wanted)).any((1, 2))
    if touching.any():
        self._activated = True
        physics.bind(self._material).rgba[-1] = 0


@contextlib.contextmanager
def one_wall_texture(tasks: Any) -> Any:
    """Within this context the arena's ten wall styles share one set of textures."""
    real = tasks.labmaze_textures
    shared: dict[Any, Any] = {}

    class Textures:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def WallTextures(self, style: Any) -> Any:  # noqa: N802 - dm_control's name
            if style not in shared:
                shared[style] = real.WallTextures(style)
            return shared[style]

    tasks.labmaze_textures = Textures()
    try:
        yield
    finally:
        tasks.labmaze_textures = real


def build(name: str, seed: int, patched: bool = True, labels: bool = False) -> Any:
    """The dm_control environment of one of NAMES; `labels`: it observes positions and layout too.

    ImportError when the package is missing.
    """
    choose_backend()
    logging.getLogger("absl").setLevel(logging.ERROR)
    tasks = load_tasks()
    size, *variants = name.split("_")
    settings: dict[str, Any] = {"seed": seed, "image_only_obs": True}
    for variant in variants:
        settings.update(SETTINGS[variant])
    if labels:
        settings.update(SETTINGS["extraobs"])
    make = getattr(tasks, f"memory_maze_{size}")
    if not patched:
        return make(**settings)
    with one_wall_texture(tasks):
        env = make(**settings)
    for target in env.task._targets:
        target._update_activation = types.MethodType(update_activation, target)
    return env


def reseed(env: Any, seed: int) -> Any:
    """Make the next episodes those of a fresh environment built with `seed`, in 0.2 ms.

    dm_control's random state alone is not enough: labmaze has its own generator, which the
    constructor seeds with the first number drawn.
    """
    env.random_state.seed(seed)
    first = env.random_state.randint(2**31)
    maze = env.task._maze_arena._maze
    fresh = type(maze)(
        height=maze.height,
        width=maze.width,
        max_rooms=maze.max_rooms,
        room_min_size=maze.room_min_size,
        room_max_size=maze.room_max_size,
        max_variations=maze.max_variations,
        spawns_per_room=maze.spawns_per_room,
        objects_per_room=maze.objects_per_room,
        simplify=True,
        random_seed=first,
    )
    maze._native_maze = fresh._native_maze
    return env


class MemoryMaze(FromDmEnv):
    """image (64, 64, 3); 6 actions; 1000, 2000, 3000 or 4000 of them, then a truncation.

    The variants differ as in the package: `vis` targets that are seen from afar, `hd` 256 pixels,
    `top` seen from above, `extraobs` with vectors of positions, directions and the layout, `oracle`
    with the shortest path drawn, `hifreq` with ten times the steps, `6cl` six colours.
    """

    def __init__(self, name: str, patched: bool = True, labels: bool = False):
        """`labels`: steps also hold LABELS as `label/<name>`, which are no part of `obs_space`."""
        env = build(name, 0, patched, labels)
        from dm_control.rl.control import PhysicsError

        self.diverged = (PhysicsError,)
        super().__init__(env, reseed)
        self.labels = LABELS if labels else ()
        if labels and "extraobs" not in name:
            self.obs_space = {"image": self.obs_space["image"]}

    def observation(self, obs: Any) -> dict[str, np.ndarray]:
        known = {f"label/{key}": np.array(obs[key], np.float32) for key in self.labels}
        return {**super().observation(obs), **known}
