"""Simulators that draw share one process here: a backend is chosen before the first import."""

import contextlib

import pytest

from envs.rendering import choose_backend


@pytest.fixture(scope="session", autouse=True)
def backend():
    with contextlib.suppress(RuntimeError):  # without one, what draws will say so itself
        choose_backend()
