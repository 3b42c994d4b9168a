"""The widths at which a core costs what is wanted: one search, over feasible multiples.

Widths that belong together are scaled together, in multiples that heads and blocks divide, until
the cost passes the target. Then one setting in which the cost is linear takes up the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from configs.load import to_flat
from configs.schema import Config

MULTIPLE = 8  # of every width: what processors are fast at, and the decoder's blocks divide h by

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
    """The widths of `config.core` that may change, from those of `config` on.

    Raises ValueError for a core of which it is not known what its widths are.
    """

    def __init__(self, config: Config):
        if config.core not in KNOBS:
            raise ValueError(
                f"no widths of core {config.core!r} are known: name them in KNOBS (launch/solve.py)"
            )
        self.core, (self.scaled, self.fine) = config.core, KNOBS[config.core]
        flat = to_flat(getattr(config, config.core))
        self.start = {name: flat[name] for name in (*self.scaled, self.fine) if name}
        self.multiple = math.lcm(MULTIPLE, flat.get("heads", 1), flat.get("blocks", 1))

    def at(self, count: int) -> Settings:
        """Widths with the first at `count` multiples and the others scaled as it is."""
        main = self.scaled[0]
        out = {main: count * self.multiple}
        for name in self.scaled[1:]:
            each = MULTIPLE if name == "ffn" else self.multiple
            wanted = self.start[name] * out[main] / self.start[main]
            out[name] = max(1, round(wanted / each)) * each
        return self.named(out)

    def named(self, widths: Settings) -> Settings:
        return {f"{self.core}.{name}": value for name, value in widths.items()}

    def solve(self, value: Callable[[Settings], float], target: float) -> Settings:
        """Settings whose `value` is nearest to `target`; it must grow with them."""
        below = self.last_below(value, target)
        # The nearer of the two multiples around the target; the fine setting may have to shrink.
        near = sorted((below, below + 1), key=lambda n: abs(value(self.at(n)) - target))
        near = [count for count in near if count]
        if not self.fine:
            return self.at(near[0])
        return next(filter(None, (self.refined(n, value, target) for n in near)), self.at(near[0]))

    def last_below(self, value: Callable[[Settings], float], target: float) -> int:
        """The most multiples whose value is no more than the target, or 0."""
        start = max(1, round(self.start[self.scaled[0]] / self.multiple))
        # Most of the cost grows with the square of the width: a first guess, then in longer steps.
        low = high = max(1, int(start * math.sqrt(target / value(self.at(start)))))
        step = 1
        while value(self.at(high)) <= target:
            low, high, step = high, high + step, 2 * step
        while low and value(self.at(low)) > target:
            low, high, step = max(0, low - step), low, 2 * step
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if value(self.at(middle)) <= target else (low, middle)
        return low

    def refined(
        self, count: int, value: Callable[[Settings], float], target: float
    ) -> Settings | None:
        """`at(count)` with the fine setting solved for; None where it would vanish."""
        settings, name = self.at(count), f"{self.core}.{self.fine}"
        before = settings.get(name, self.start[self.fine])
        other = before + 4 * MULTIPLE
        slope = (value({**settings, name: other}) - value({**settings, name: before})) / (
            other - before
        )
        wanted = before + (target - value({**settings, name: before})) / slope
        found = round(wanted / MULTIPLE) * MULTIPLE
        return {**settings, name: found} if found > 0 else None
