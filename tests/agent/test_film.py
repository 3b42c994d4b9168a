"""Videos of evaluations: whole episodes, the first of each slot, beside their results."""

import numpy as np
import pytest
from PIL import Image

from agent import evaluate as module
from agent.environments import env_maker
from agent.evaluate import evaluate
from agent.film import Film
from agent.update import Update


def step(slots, ids, first, last):
    """Of the slots `ids`: a frame whose pixels are 50 times slot + 1, and the flags."""
    image = np.stack([np.full((4, 4, 3), 50 * (slot + 1), np.uint8) for slot in ids])
    flags = {"is_first": np.isin(ids, first), "is_last": np.isin(ids, last)}
    return np.array(ids), {"vector": np.zeros((len(ids), 2), np.float32), "image": image, **flags}


def test_the_first_episodes_of_each_slot_are_filmed_and_named_with_their_results(tmp_path):
    film = Film([1, 2])
    for ids, first, last in [
        ([0, 1], [0, 1], []),
        ([0, 1], [], [1]),
        ([0, 1], [1], [0]),  # slot 0 is done
        ([0], [0], []),
        ([0, 1], [], [1]),
        ([1], [1], []),  # slot 1 is done
    ]:
        film(*step(2, ids, first, last))
    results = [{"slot": slot, "return": value} for slot, value in [(0, 1), (0, 2), (1, 3), (1, 4)]]
    (tmp_path / "evaluation").mkdir()
    (tmp_path / "evaluation/greedy-7.gif").write_bytes(b"of an evaluation before")
    film.write(tmp_path / "evaluation", "greedy", results)
    paths = [str(tmp_path / f"evaluation/greedy-{n}.gif") for n in range(3)]
    assert [result.get("video") for result in results] == [paths[0], None, paths[1], paths[2]]
    assert sorted(map(str, (tmp_path / "evaluation").iterdir())) == paths
    with Image.open(paths[2]) as video:
        assert np.asarray(video.convert("RGB"))[0, 0].tolist() == [100, 100, 100]
    episodes = [len(frames) for slot in film.episodes for frames in slot]
    assert episodes == [3, 2, 2]


@pytest.fixture
def run(tiny, tmp_path, monkeypatch):
    """A function from a task to a folder whose run, by what is read of it, has random weights."""

    def make(task):
        config = tiny("--task", task)
        env = env_maker(config)()
        weights = Update(config, env.obs_space, env.act_space).state_dict()
        read = {"agent_step": 0, "update": 0, "episodes": 3, "weights": weights}
        monkeypatch.setattr(module, "load_run", lambda folder, repeat: (config, read))
        return tmp_path

    return make


def test_an_evaluation_films_what_its_agent_sees(run):
    result = evaluate(run("test_image"), slots=2, videos=2)
    for mode in ("greedy", "sampled"):
        videos = [played.get("video") for played in result[mode]["results"]]
        assert [bool(video) for video in videos] == [True, False, True]
        for played in (result[mode]["results"][n] for n in (0, 2)):
            with Image.open(played["video"]) as video:
                assert video.n_frames == played["length"] + 1


def test_without_an_image_there_is_no_video(run):
    with pytest.raises(ValueError, match="hold no image"):
        evaluate(run("test_counter"), videos=1)
