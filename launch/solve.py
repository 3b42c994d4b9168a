"""The widths at which a core costs what is wanted: one search, over feasible multiples.

Weights are matrices between widths, so parameters and FLOPs are quadratic in them: a few small
models give the whole function. Widths that belong together are scaled together, in multiples that
heads and blocks divide, until the cost passes the target. Then one setting in which the cost is
linear takes up the rest. Where two costs are to be met, that of a part and that of the whole, the
width at which the rest reads h is searched around that.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from configs.load import to_flat
from configs.schema import Config

MOST = 1000  # multiples of a fine setting
MULTIPLE = 8  # of every width: what processors are fast at, and the decoder's blocks divide h by
READOUT = "model.readout"

Settings = dict[str, int]


class Knobs(NamedTuple):
    """`scaled`: settings that grow together, the first in whole multiples; `fine`: the last."""

    scaled: tuple[str, ...]
    fine: str = ""


KNOBS = {
    "gru": Knobs(("deter",)),
    "s3m": Knobs(("width", "state"), "deter"),
    **dict.fromkeys(("elmur", "rate", "rlt", "transformer"), Knobs(("width", "ffn"), "ffn")),
}


class Widths:
    """The widths of `config.core` that may change, from those of `config` on; `readout`: that of h
    behind it too.

    Raises ValueError for a core of which it is not known what its widths are.
    """

    def __init__(self, config: Config, readout: bool = False):
        if config.core not in KNOBS:
            raise ValueError(
                f"no widths of core {config.core!r} are known: name them in KNOBS (launch/solve.py)"
            )
        core, flat = config.core, to_flat(config)
        scaled, fine = KNOBS[core]
        self.scaled, self.fine = [f"{core}.{name}" for name in scaled], fine and f"{core}.{fine}"
        self.start = {name: flat[name] for name in (*self.scaled, self.fine) if name}
        if readout:
            self.start[READOUT] = MULTIPLE
        by = (flat.get(f"{core}.{name}", 1) for name in ("heads", "blocks"))
        self.multiple = math.lcm(MULTIPLE, *by)

    def step(self, name: str) -> int:
        return MULTIPLE if name == READOUT or name.endswith(".ffn") else self.multiple

    def fitted(self, measure: Callable[[Settings], float]) -> Callable[[Settings], float]:
        """`measure` as a function of all widths, from as many small models as it has terms."""
        names = list(self.start)
        # A quadratic of n variables is known from its values at these (n + 1)(n + 2) / 2 points.
        counts = [
            c for c in itertools.product((1, 2, 3), repeat=len(names)) if sum(c) <= len(c) + 2
        ]

        def terms(counts: list[float]) -> list[float]:
            return [math.prod(pair) for pair in itertools.combinations_with_replacement(counts, 2)]

        def settings(counts: tuple[int, ...]) -> Settings:
            return {n: k * self.step(n) for n, k in zip(names, counts, strict=True)}

        rows = [terms([1.0, *map(float, each)]) for each in counts]
        found = np.linalg.solve(rows, [float(measure(settings(each))) for each in counts])

        def value(settings: Settings) -> float:
            whole = {**self.start, **settings}
            widths = [whole[name] / self.step(name) for name in names]
            return float(np.dot(found, terms([1.0, *widths])))

        return value

    def at(self, count: int) -> Settings:
        """Widths with the first at `count` multiples and the others scaled as it is."""
        main = self.scaled[0]
        out = {main: count * self.multiple}
        for name in self.scaled[1:]:
            each = self.step(name)
            wanted = self.start[name] * out[main] / self.start[main]
            out[name] = max(1, round(wanted / each)) * each
        return out

    def solve(self, value: Callable[[Settings], float], target: float) -> Settings:
        """Settings whose `value` is nearest to `target`; it must grow with them."""
        below = next(n for n in itertools.count() if value(self.at(n + 1)) > target)

        def off(settings: Settings) -> float:
            return abs(value(settings) / target - 1)

        def refined(settings: Settings) -> Settings:
            if not self.fine:
                return settings
            ways = range(MULTIPLE, MULTIPLE * MOST, MULTIPLE)
            return min(({**settings, self.fine: width} for width in ways), key=off)

        # The nearer of the multiples around the target; the other, where it is better by 1 %.
        near = sorted((self.at(n) for n in (below, below + 1) if n), key=off)
        return min(map(refined, near), key=lambda settings: round(off(settings), 2))

    def solve_both(
        self,
        part: Callable[[Settings], float],
        whole: Callable[[Settings], float],
        part_target: float,
        whole_target: float,
    ) -> Settings:
        """Settings that bring `part` nearest to its target and, with that, `whole` to its own, by
        the width at which all else reads h."""

        def at(count: int) -> Settings:
            readout = {READOUT: count * MULTIPLE}
            return {**self.solve(lambda more: part({**more, **readout}), part_target), **readout}

        counts = range(1, MOST)
        first = bisect.bisect_left(counts, whole_target, key=lambda count: whole(at(count)))
        near = (at(count) for count in (first, first + 1) if count)
        return min(near, key=lambda settings: abs(whole(settings) - whole_target))
