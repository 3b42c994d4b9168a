"""The GPU that environments draw on is that of their process, where OpenGL knows it."""

import pytest

from envs import rendering


@pytest.fixture
def environment(monkeypatch):
    """A function that sets variables of the environment; those in question are gone before."""
    for name in ("LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "MUJOCO_GL", rendering.DEVICE):
        monkeypatch.delenv(name, raising=False)

    def put(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return put


@pytest.mark.parametrize(
    ("variables", "number"),
    [
        ({}, ""),
        ({"LOCAL_RANK": "2"}, "2"),
        ({"CUDA_VISIBLE_DEVICES": "5"}, "5"),
        ({"CUDA_VISIBLE_DEVICES": "4, 5, 7", "LOCAL_RANK": "2"}, "7"),
        ({"CUDA_VISIBLE_DEVICES": "4", "LOCAL_RANK": "2"}, ""),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8a3f", "LOCAL_RANK": "0"}, ""),
        ({"CUDA_VISIBLE_DEVICES": "", "LOCAL_RANK": "1"}, "1"),
    ],
)
def test_the_gpu_of_a_process_is_that_of_its_rank_among_the_visible(environment, variables, number):
    environment(**variables)
    assert rendering.gpu() == number


@pytest.mark.parametrize(("known", "chosen"), [(4, "3"), (1, None)])
def test_a_gpu_that_opengl_does_not_know_is_left_out(environment, monkeypatch, known, chosen):
    environment(MUJOCO_GL="egl", CUDA_VISIBLE_DEVICES="3")
    tried = []

    def draws(backend):
        tried.append(rendering.os.environ[rendering.DEVICE])
        return int(tried[-1]) < known, ""

    monkeypatch.setattr(rendering, "draws", draws)
    rendering.choose_backend()
    assert rendering.os.environ.get(rendering.DEVICE) == chosen
    assert tried == ["3"]


def test_a_gpu_that_is_set_stays(environment, monkeypatch):
    environment(MUJOCO_GL="egl", LOCAL_RANK="3", **{rendering.DEVICE: "1"})
    monkeypatch.setattr(rendering, "draws", lambda backend: pytest.fail("nothing is tried"))
    rendering.choose_backend()
    assert rendering.os.environ[rendering.DEVICE] == "1"
