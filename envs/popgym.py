"""POPGym (Morad et al. 2023): popgym_<Env><Level> by the names of its classes."""

from __future__ import annotations

import functools

import gymnasium

from envs.adapters import FromGymnasium


@functools.cache
def names() -> dict[str, type[gymnasium.Env]]:
    """Classes by name; the Labyrinths are there only with mazelib."""
    from popgym.envs import ALL

    return {kind.__name__: kind for kind in ALL}


def build(name: str) -> FromGymnasium:
    return FromGymnasium(names()[name]())
