"""Rows of metrics to metrics.jsonl, TensorBoard and the terminal; one line an episode to
scores.jsonl, of which TensorBoard has the means between two rows. What fails of TensorBoard or of
the files of media is reported once and never stops training.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

log = logging.getLogger("agent")

AXES = ("env_step", "agent_step", "update", "train_flops", "wall_seconds")


class Lines:
    """A JSON-lines file whose length can be put back to that of a checkpoint."""

    def __init__(self, path: Path):
        self.file = path.open("ab")

    def write(self, row: dict[str, Any]) -> None:
        clean = {
            k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()
        }
        self.file.write(json.dumps(clean).encode() + b"\n")
        self.file.flush()

    def state(self) -> int:
        os.fsync(self.file.fileno())
        return self.file.tell()

    def restore(self, length: int) -> None:
        """Cut the file to `length` bytes; one that has fewer stays, with a warning."""
        size = self.file.seek(0, os.SEEK_END)
        if size < length:
            log.warning("%s has lost rows: %d bytes of %d", self.file.name, size, length)
        self.file.truncate(min(length, size))
        self.file.seek(0, os.SEEK_END)

    def close(self) -> None:
        self.file.close()


class TensorBoard:
    def __init__(self, folder: Path, step: int):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder), purge_step=step)

    def scalars(self, row: dict[str, float], step: int) -> None:
        for key, value in row.items():
            self.writer.add_scalar(key, value, step)

    def gif(self, name: str, frames: np.ndarray, encoded: bytes, step: int) -> None:
        """An animated picture as TensorBoard shows it, without moviepy."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        height, width = frames.shape[1:3]
        image = Summary.Image(
            height=height, width=width, colorspace=3, encoded_image_string=encoded
        )
        value = Summary.Value(tag=name, image=image)
        self.writer._get_file_writer().add_summary(Summary(value=[value]), step)

    def picture(self, name: str, image: np.ndarray, step: int) -> None:
        self.writer.add_image(name, image, step, dataformats="HWC")

    def close(self) -> None:
        self.writer.close()


def encode_gif(frames: np.ndarray, milliseconds: int = 100) -> bytes:
    """Frames (T, H, W, C) uint8 as an animated GIF: colours, or the first of other channels."""
    images = [Image.fromarray(frame if frame.shape[-1] == 3 else frame[..., 0]) for frame in frames]
    buffer = io.BytesIO()
    images[0].save(
        buffer, "GIF", save_all=True, append_images=images[1:], duration=milliseconds, loop=0
    )
    return buffer.getvalue()


class Logger:
    def __init__(self, folder: Path, step: int = 0, episodes: Lines | None = None):
        """`step`: where a resumed run's axis begins; `episodes`: one more file of scores."""
        self.media = folder / "media"
        self.media.mkdir(exist_ok=True)
        self.metrics = Lines(folder / "metrics.jsonl")
        self.scores = Lines(folder / "scores.jsonl")
        self.episodes = episodes
        self.board: TensorBoard | None = None
        self.ended: list[dict[str, Any]] = []  # episodes since the last row
        self.failed: set[str] = set()
        self.folder, self.step = folder, step
        self.guard(self.open_board)

    def open_board(self) -> None:
        self.board = TensorBoard(self.folder / "tensorboard", self.step)

    def guard(self, function: Any, *args: Any) -> None:
        """Call something of TensorBoard: its failure is a warning and switches it off."""
        try:
            function(*args)
        except Exception as error:
            log.warning("TensorBoard failed and is left out from here: %r", error)
            self.board = None

    @contextlib.contextmanager
    def optional(self, kind: str) -> Iterator[None]:
        """What fails inside is a warning, the first time of a `kind`."""
        try:
            yield
        except Exception as error:
            if kind not in self.failed:
                log.warning("a %s could not be written; the next is tried: %r", kind, error)
            self.failed.add(kind)

    def row(self, axes: dict[str, float], metrics: dict[str, float]) -> None:
        """One row; `axes` holds every name of AXES."""
        assert set(axes) == set(AXES), axes
        self.metrics.write({**axes, **metrics})
        if self.board:
            step = int(axes["env_step"] or axes["update"])  # offline no step is ever made
            self.guard(self.board.scalars, {**self.episode_means(), **metrics, **axes}, step)

    def episode_means(self) -> dict[str, float]:
        """Of the episodes that ended since this was asked, if there were any."""
        ended, self.ended = self.ended, []
        keys = ("return", "length") if ended else ()
        return {f"episode/{key}": float(np.mean([score[key] for score in ended])) for key in keys}

    def evaluation(self, axes: dict[str, float], metrics: dict[str, float]) -> None:
        """A row whose axes are those of the weights that were evaluated, which lie behind."""
        self.metrics.write({**axes, **metrics})
        if self.board:
            # Without the axes: TensorBoard draws a tag in the order in which it is written.
            self.guard(self.board.scalars, metrics, int(axes["env_step"]))

    def score(self, axes: dict[str, float], score: dict[str, Any]) -> None:
        """One finished episode."""
        self.scores.write({**axes, **score})
        if self.episodes:
            self.episodes.write(score)
        if self.board:
            self.ended.append(score)

    def video(self, name: str, frames: np.ndarray, step: int) -> None:
        """Frames (T, H, W, C) to media/<name>.gif and TensorBoard; failures are warnings."""
        with self.optional("video"):
            encoded = encode_gif(frames)
            if self.board:
                self.guard(self.board.gif, name, frames, encoded, step)
            (self.media / f"{name}.gif").write_bytes(encoded)

    def picture(self, name: str, image: np.ndarray, step: int) -> None:
        """An image (H, W, 3) to media/<name>-<step>.png and TensorBoard; failures are warnings."""
        with self.optional("picture"):
            if self.board:
                self.guard(self.board.picture, name, image, step)
            Image.fromarray(image).save(self.media / f"{name}-{step:010d}.png")

    def state(self) -> dict[str, int]:
        episodes = self.episodes.state() if self.episodes else 0
        return {
            "metrics": self.metrics.state(),
            "scores": self.scores.state(),
            "episodes": episodes,
        }

    def restore(self, state: dict[str, int]) -> None:
        self.metrics.restore(state["metrics"])
        self.scores.restore(state["scores"])
        if self.episodes:
            self.episodes.restore(state["episodes"])

    def close(self) -> None:
        self.metrics.close()
        self.scores.close()
        if self.episodes:
            self.episodes.close()
        if self.board:
            self.guard(self.board.close)


class Terminal:
    """One live line on a terminal, plain lines every `quiet` seconds elsewhere."""

    def __init__(self, quiet: float = 30.0):
        self.live = sys.stdout.isatty()
        self.quiet, self.last = quiet, 0.0
        if self.live:
            from rich.live import Live

            self.view = Live(auto_refresh=False)
            self.view.start()

    def show(self, line: str, force: bool = False) -> None:
        now = time.monotonic()
        if self.live:
            self.view.update(line, refresh=True)
        elif force or now - self.last >= self.quiet:
            print(line, flush=True)
            self.last = self.last if force else now

    def close(self) -> None:
        if self.live:
            self.view.stop()
