"""Rows that follow their streams, window after window: `replay.start stream`.

Truncated back-propagation through time, as the baseline "Dreamer (TBTT)" of the Memory Maze paper
(arXiv 2210.13383): each row of a batch begins where that of the batch before ended, so the state
there is the state here, and no gradient crosses.
"""

from __future__ import annotations

from replay.replay import Draw, Replay


class Rows:
    def __init__(self, replay: Replay):
        self.replay = replay
        self.next: list[tuple[int, int]] = []  # where the row goes on: (stream, step)

    def draw(self, count: int, length: int, key: tuple[int, ...]) -> Draw:
        """The next window of each of `count` rows. Calls must come in the order of training.

        A row whose next window is not whole yet, or evicted, jumps to a window drawn as `Replay`
        draws, a function of `key` and of what is stored. Raises ValueError when there is none.
        """
        replay = self.replay
        with replay.cursor:
            jumps = replay.choose(count, length, key, online=False)
            follow = self.next or jumps
            positions = [
                here if replay.holds(*here, length) else jump
                for here, jump in zip(follow, jumps, strict=True)
            ]
            self.next = [(stream, start + length) for stream, start in positions]
            return replay.locate(positions, length, key)
