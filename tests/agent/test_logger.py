"""What a log keeps, what it leaves out, and what it survives."""

import json

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from agent.logger import AXES, Lines, Logger

FRAMES = np.zeros((2, 8, 8, 3), np.uint8)


def axes(step):
    return {**dict.fromkeys(AXES, 0), "env_step": step}


def events(folder):
    found = EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return found


@pytest.fixture
def logger(tmp_path):
    logger = Logger(tmp_path)
    yield logger
    logger.close()


def test_tensorboard_has_the_mean_of_the_episodes_between_two_rows(logger, tmp_path):
    for step, value in ((3, 1.0), (5, 3.0), (7, 8.0)):
        if step == 7:
            logger.row(axes(6), {"loss/total": 1.0})
        logger.score(axes(step), {"return": value, "length": 10 * value})
    logger.row(axes(9), {"loss/total": 1.0})
    logger.row(axes(12), {"loss/total": 1.0})  # no episode ended since
    logger.close()
    found = events(tmp_path)
    for key, scale in (("return", 1), ("length", 10)):
        seen = [(event.step, event.value) for event in found.Scalars(f"episode/{key}")]
        assert seen == [(6, 2 * scale), (9, 8 * scale)]
    assert len((tmp_path / "scores.jsonl").read_text().splitlines()) == 3


def test_media_that_cannot_be_written_cost_a_warning_and_no_row(logger, tmp_path, caplog):
    (tmp_path / "media").rmdir()
    for step in (1, 2):
        logger.video("policy", FRAMES, step)
        logger.picture("prediction", FRAMES[0], step)
    assert [record.args[0] for record in caplog.records] == ["video", "picture"]
    (tmp_path / "media").mkdir()
    logger.video("policy", FRAMES, 3)
    assert (tmp_path / "media" / "policy.gif").exists()
    logger.row(axes(4), {"loss/total": 1.0})
    logger.close()
    found = events(tmp_path)
    assert [event.step for event in found.Scalars("loss/total")] == [4]
    assert [event.step for event in found.Images("policy")] == [1, 2, 3]


def test_a_tensorboard_that_fails_is_left_out_and_files_go_on(logger, tmp_path, caplog):
    def fail(*args):
        raise RuntimeError("its thread died")

    logger.board.scalars = logger.board.gif = fail
    logger.video("policy", FRAMES, 1)
    for step in (1, 2):
        logger.row(axes(step), {"loss/total": 1.0})
    assert len(caplog.records) == 1
    assert "TensorBoard failed and is left out" in caplog.text
    assert (tmp_path / "media" / "policy.gif").exists()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_log_is_cut_to_its_checkpoint_and_never_made_longer(tmp_path, caplog):
    lines = Lines(tmp_path / "rows.jsonl")
    lines.write({"a": 1})
    length = lines.state()
    lines.write({"a": 2})
    lines.restore(length)
    assert not caplog.records
    lines.restore(length + 100)
    assert "has lost rows" in caplog.text
    lines.write({"a": 3})
    lines.close()
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert rows == [{"a": 1}, {"a": 3}]
