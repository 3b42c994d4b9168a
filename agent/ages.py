"""The size of x by age in the episode: the number that shows whether acting and replay agree.

An actor carries x from the first step of an episode; a replayed row starts from the initial state
wherever it was cut. Where the two sizes part, the policy acts on features it was not trained on.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

AGES = (0, 4, 16, 64, 256, 1024, 4096)


def by_age(value: Tensor, age: Tensor, starts: tuple[int, ...]) -> Tensor:
    """Means of values (N,) for the ages (N,) from each of `starts` up to the next; NaN for none."""
    # Compared with plain numbers: a tensor made here would be copied to the device, which waits.
    spans = zip(starts, (*starts[1:], math.inf), strict=True)
    member = torch.stack([(age >= low) & (age < high) for low, high in spans], -1)
    # No product, by which one infinite value would be in the means of all ages.
    return torch.where(member, value[:, None], 0).sum(0) / member.sum(0)


def norm_by_age(norm: Tensor, age: Tensor, name: str) -> dict[str, Tensor]:
    """Mean of the Euclidean norms of x (N,) for the ages (N,) from each of AGES up to the next.

    Keys are `x_norm/<name>_from_<age>`; the value is NaN where no step has such an age.
    """
    means = by_age(norm.float(), age, AGES)
    return {f"x_norm/{name}_from_{start}": means[i] for i, start in enumerate(AGES)}
