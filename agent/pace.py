"""How often a run writes rows and pictures: as asked, and more seldom as it grows old. And how long
something takes, in words.

So a run of weeks has tens of thousands of rows and hundreds of pictures, and viewers still open it.
Curves lose nothing: what is one pixel of them grows as well.
"""

from __future__ import annotations

ROWS = 10_000  # in the first so many intervals all are written; then one each 1 / ROWS of the run
PICTURES = 100


def between(every: float, seconds: float, full: int) -> float:
    """Seconds between two of them, in a run of `seconds`, `every` of which are asked for.

    0 stays 0. After t intervals of which the first `full` were even, `full` (1 + ln(t / full)) of
    them have been written.
    """
    return max(every, seconds / full) if every else 0.0


def span(seconds: float) -> str:
    """`5 s`, `12 min`, `3.4 h`, `11.2 days`."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} min" if unit == "min" else f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
