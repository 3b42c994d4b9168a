"""Diagnostic streams that only a memory can answer, made by arithmetic from a random generator.

| task | stream | target |
|---|---|---|
| tmaze | the T-Maze of ELMUR and RATE as an oracle walks it | the oracle's action |
| kcue | `facts` key:value pairs one a step, noise, then a key | its value, at the last step only |
| parity | bits | parity of the bits so far |
| swaps | transpositions of five items (swaps-S5 of RLT) | index of the arrangement so far |
| repeat | tokens of 4 kinds | the token `back` steps ago |

Training rows differ in length where the papers' do; a test row is exactly as long as asked, and
long ones are made a piece at a time. The numbers do not depend on how they are cut.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

IGNORED = -1
RIGHT, UP, DOWN = 0, 1, 3  # the T-Maze's actions; 2 is left


class Piece(NamedTuple):
    """Steps of B streams: inputs (B, T, I) float32, targets (B, T) or IGNORED, is_first (B, T)."""

    inputs: np.ndarray
    targets: np.ndarray
    is_first: np.ndarray

    def cut(self, start: int, stop: int) -> Piece:
        return Piece(*(part[:, start:stop] for part in self))


def first_steps(rows: int, start: int, stop: int) -> np.ndarray:
    """is_first (rows, stop - start): every stream is one episode that begins at step 0."""
    return np.broadcast_to(np.arange(start, stop) == 0, (rows, stop - start)).copy()


def noise(rng: np.random.Generator, rows: int, steps: int) -> np.ndarray:
    """-1, 0 or 1 with equal chance, (rows, steps); drawn step by step, so that cuts do not show."""
    return rng.integers(-1, 2, (steps, rows)).T


def one_hot(index: np.ndarray, classes: int) -> np.ndarray:
    return np.eye(classes, dtype=np.float32)[index]


def spans(steps: int, chunk: int) -> list[tuple[int, int]]:
    """Starts and stops of pieces of at most `chunk` steps; the last step, the query, is alone."""
    return list(itertools.pairwise([*range(0, steps - 1, chunk), steps - 1, steps]))


class Task:
    """`score` names the field of launch/supervised.py's Score that the table shows."""

    inputs: int
    classes: int
    chance: float
    score: str
    length: int  # of training rows, by default
    lengths: tuple[int, ...]  # of test rows, by default

    def steps(self, length: int) -> int:
        """Steps of a test row of that length."""
        return length

    def whole(self, rng: np.random.Generator, rows: int, length: int) -> Piece:
        """`rows` streams of `length` steps in one piece."""
        raise NotImplementedError

    def train(self, rng: np.random.Generator, rows: int, length: int) -> Piece:
        """A training batch of `length` steps; what lies beyond a row's own end is ignored."""
        return self.whole(rng, rows, length)

    def test(self, rng: np.random.Generator, rows: int, length: int, chunk: int) -> Iterator[Piece]:
        """A test batch in pieces as `spans` cuts them; its last step has a target in every row."""
        piece = self.whole(rng, rows, length)
        return (piece.cut(start, stop) for start, stop in spans(length, chunk))


@dataclass(frozen=True)
class TMaze(Task):
    """Observation only: [y, clue, flag, noise], as in the released RATE code (`envs/tmaze`).

    A corridor of Lc steps starts at x = 0, where the clue (-1 or 1) is seen once, and ends at the
    junction, where the flag is 1. The oracle goes right Lc times and turns: up for 1, down for -1.
    y is 0 all along. A length T stands for Lc = T - 2, which the oracle walks in T - 1 steps; a
    training batch of length T has corridors of 1 to T - 2 steps.

    As long as a policy goes right, what it sees is what the oracle saw: a row whose actions are all
    right is a success in the maze. The maze forgives one blocked move (its limit is T steps) and
    this test none, so success here is at most that of the maze.
    """

    inputs: ClassVar = 4
    classes: ClassVar = 4
    chance: ClassVar = 0.5
    score: ClassVar = "row"
    length: ClassVar = 30
    lengths: ClassVar = (9, 30, 90, 150, 300, 600, 900, 1200, 2400, 4800, 9600)

    def steps(self, length: int) -> int:
        return length - 1

    def train(self, rng: np.random.Generator, rows: int, length: int) -> Piece:
        corridors, goals = rng.integers(1, length - 1, rows), rng.choice((-1, 1), rows)
        return next(self.walk(rng, corridors, goals, [(0, length)]))

    def test(self, rng: np.random.Generator, rows: int, length: int, chunk: int) -> Iterator[Piece]:
        """Goals are balanced: odd rows up, even rows down."""
        goals = np.where(np.arange(rows) % 2, 1, -1)
        pieces = spans(self.steps(length), chunk)
        return self.walk(rng, np.full(rows, length - 2), goals, pieces)

    def walk(
        self,
        rng: np.random.Generator,
        corridors: np.ndarray,
        goals: np.ndarray,
        pieces: list[tuple[int, int]],
    ) -> Iterator[Piece]:
        """Pieces of walks through `corridors` (B,) to `goals` (B,) of -1 or 1."""
        rows, ends, signs = len(goals), corridors[:, None], goals[:, None]
        for start, stop in pieces:
            now = np.arange(start, stop)
            inputs = np.zeros((rows, stop - start, self.inputs), np.float32)
            inputs[..., 1] = np.where(now == 0, signs, 0)
            inputs[..., 2] = now == ends
            inputs[..., 3] = noise(rng, rows, stop - start)
            turns = np.where(signs > 0, UP, DOWN)
            targets = np.select([now < ends, now == ends], [RIGHT, turns], IGNORED)
            yield Piece(inputs, targets, first_steps(rows, start, stop))


@dataclass(frozen=True)
class KCue(Task):
    """Inputs: key (facts), value (values), whether this is the query, noise.

    Keys are the numbers below `facts`, each shown once, in random order. The query is the last step
    of a row; training rows are of `facts` + 1 to `length` steps.
    """

    facts: int
    values: int
    score: ClassVar = "last"
    length: ClassVar = 30
    lengths: ClassVar = (15, 30, 90, 300, 900)

    @property
    def inputs(self) -> int:
        return self.facts + self.values + 2

    @property
    def classes(self) -> int:
        return self.values

    @property
    def chance(self) -> float:
        return 1 / self.values

    def train(self, rng: np.random.Generator, rows: int, length: int) -> Piece:
        return next(self.tell(rng, rng.integers(self.facts, length, rows), [(0, length)]))

    def test(self, rng: np.random.Generator, rows: int, length: int, chunk: int) -> Iterator[Piece]:
        return self.tell(rng, np.full(rows, length - 1), spans(length, chunk))

    def tell(
        self, rng: np.random.Generator, queries: np.ndarray, pieces: list[tuple[int, int]]
    ) -> Iterator[Piece]:
        """Pieces of streams that ask at the steps `queries` (B,)."""
        if queries.min() < self.facts:
            raise ValueError(f"kcue: {self.facts} facts and a query need {self.facts + 1} steps")
        rows, every = len(queries), np.arange(len(queries))
        keys = rng.permuted(np.tile(np.arange(self.facts), (rows, 1)), axis=1)
        values = rng.integers(self.values, size=(rows, self.facts))
        asked = rng.integers(self.facts, size=rows)
        for start, stop in pieces:
            inputs = np.zeros((rows, stop - start, self.inputs), np.float32)
            targets = np.full((rows, stop - start), IGNORED)
            for at in range(start, min(stop, self.facts)):
                inputs[every, at - start, keys[:, at]] = 1
                inputs[every, at - start, self.facts + values[:, at]] = 1
            here = every[(queries >= start) & (queries < stop)]
            at, fact = queries[here] - start, asked[here]
            inputs[here, at, keys[here, fact]] = 1
            inputs[here, at, -2] = 1
            targets[here, at] = values[here, fact]
            inputs[..., -1] = noise(rng, rows, stop - start)
            yield Piece(inputs, targets, first_steps(rows, start, stop))


@dataclass(frozen=True)
class Parity(Task):
    """Training rows have 3 to `length` bits (40 in the RLT paper), and each its own share of ones:
    long runs without a change, which half ones hardly show, are where a memory fades.
    """

    inputs: ClassVar = 2
    classes: ClassVar = 2
    chance: ClassVar = 0.5
    score: ClassVar = "last"
    length: ClassVar = 40
    lengths: ClassVar = (40, 64, 256, 1024)
    shortest: ClassVar = 3

    def train(self, rng: np.random.Generator, rows: int, length: int) -> Piece:
        ends = rng.integers(self.shortest, length + 1, rows)[:, None]
        ones = rng.random((rows, length)) < rng.random((rows, 1))
        inputs, targets, is_first = self.stream(ones.astype(np.int64))
        return Piece(inputs, np.where(np.arange(length) < ends, targets, IGNORED), is_first)

    def whole(self, rng: np.random.Generator, rows: int, length: int) -> Piece:
        return self.stream(rng.integers(2, size=(rows, length)))

    def stream(self, bits: np.ndarray) -> Piece:
        """All targets of bits (B, T)."""
        return Piece(one_hot(bits, 2), bits.cumsum(1) % 2, first_steps(len(bits), 0, bits.shape[1]))


@dataclass(frozen=True)
class Swaps(Task):
    """Each step swaps what lies at two of five places; targets number the arrangements in order.

    Chance is 1/120; who also knows whether the step is odd or even can reach 1/60.
    """

    places: ClassVar = list(itertools.combinations(range(5), 2))
    arrangements: ClassVar = list(itertools.permutations(range(5)))
    inputs: ClassVar = len(places)
    classes: ClassVar = len(arrangements)
    chance: ClassVar = 1 / len(arrangements)
    score: ClassVar = "last"
    length: ClassVar = 32
    lengths: ClassVar = (32, 48, 64, 256)

    def whole(self, rng: np.random.Generator, rows: int, length: int) -> Piece:
        return self.stream(rng.integers(self.inputs, size=(rows, length)))

    def stream(self, swaps: np.ndarray) -> Piece:
        """All targets of swaps (B, T), numbers in `places`."""
        rows, every = len(swaps), np.arange(len(swaps))
        items, targets = np.tile(np.arange(5), (rows, 1)), np.empty_like(swaps)
        number = {order: index for index, order in enumerate(self.arrangements)}
        for step, (one, other) in enumerate(np.array(self.places)[swaps.T].transpose(0, 2, 1)):
            items[every, one], items[every, other] = items[every, other], items[every, one]
            targets[:, step] = [number[order] for order in map(tuple, items.tolist())]
        return Piece(one_hot(swaps, self.inputs), targets, first_steps(rows, 0, swaps.shape[1]))


@dataclass(frozen=True)
class Repeat(Task):
    """The first `back` steps have no target."""

    back: int
    inputs: ClassVar = 4
    classes: ClassVar = 4
    chance: ClassVar = 0.25
    score: ClassVar = "each"
    length: ClassVar = 32
    lengths: ClassVar = (32, 64, 256, 1024)

    def whole(self, rng: np.random.Generator, rows: int, length: int) -> Piece:
        return self.stream(rng.integers(4, size=(rows, length)))

    def stream(self, tokens: np.ndarray) -> Piece:
        """All targets of tokens (B, T)."""
        targets = np.full_like(tokens, IGNORED)
        targets[:, self.back :] = tokens[:, : -self.back]
        return Piece(one_hot(tokens, 4), targets, first_steps(len(tokens), 0, tokens.shape[1]))


TASKS = ("tmaze", "kcue", "parity", "swaps", "repeat")


def make_task(name: str, facts: int, values: int, back: int) -> Task:
    """The task of that name; `facts` and `values` are of kcue, `back` of repeat."""
    tasks = (TMaze(), KCue(facts, values), Parity(), Swaps(), Repeat(back))
    return dict(zip(TASKS, tasks, strict=True))[name]
