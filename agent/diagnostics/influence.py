"""Diagnostic `influence`: how much what entered the core k steps ago moves what it says now.

The norm of the gradient, with respect to the core's input u at step t - k, of the world model's
loss at t, and of h at t (along random directions of unit variance, so that its root mean square is
the Frobenius norm of the Jacobian). z is held as it was drawn: only paths through the core count.
Pairs of steps with the start of an episode between them are left out; `leak` is the largest norm
among those, which must be 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from agent import seeding
from agent.diagnostics.recording import Recording
from worldmodels.core import SequenceCore
from worldmodels.dists import twohot_loss
from worldmodels.encoder import one_hot

LENGTH, ROWS, STEPS = 256, 16, 16

Outputs = Callable[[Tensor, int], dict[str, Tensor]]  # h (B, D) at step t to values (B,)


def norms(
    core: SequenceCore, u: Tensor, is_first: Tensor, age: Tensor, steps: list[int], outputs: Outputs
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Mean norms (T,) by lag k, and the largest across a reset, of each of `outputs`.

    u (B, T, U), is_first (B, T), age (B,) of the rows' first steps; `steps`: the t. NaN where no
    pair of steps has a lag.
    """
    u = u.detach().clone().requires_grad_(True)
    with torch.enable_grad():
        h = core.scan(u, is_first, core.initial(len(u), age))[0]
    episode = is_first.long().cumsum(1)
    length = u.shape[1]
    totals: dict[str, Tensor] = {}
    leak: dict[str, float] = {}
    counts = torch.zeros(length)
    for t in steps:
        same = (episode == episode[:, t : t + 1])[:, : t + 1]
        counts[: t + 1] += same.sum(0).flip(0)
        with torch.enable_grad():
            values = outputs(h[:, t], t)
        for name, value in values.items():
            (grad,) = torch.autograd.grad(value.sum(), u, retain_graph=True)
            size = grad[:, : t + 1].norm(dim=-1)
            total = totals.setdefault(name, torch.zeros(length))
            total[: t + 1] += torch.where(same, size, 0.0).sum(0).flip(0).float()
            across = size[~same].max().item() if (~same).any() else 0.0
            leak[name] = max(leak.get(name, 0.0), across)
    return {name: total / counts for name, total in totals.items()}, leak


def bins(values: Tensor, counts_from: tuple[int, ...]) -> list[float]:
    """Means of `values` (T,) by lag, NaN left out, from each of `counts_from` up to the next."""
    ends = (*counts_from[1:], len(values))
    return [values[low:high].nanmean().item() for low, high in zip(counts_from, ends, strict=True)]


def outputs_of(run: Recording, batch: dict[str, Tensor]) -> Outputs:
    """The loss at t, and h at t along a random direction."""
    update = run.update
    world = update.world
    z = one_hot(batch["z"], (world.classes,) * world.groups)
    random = seeding.generator(run.config.seed, "influence")

    def outputs(h: Tensor, t: int) -> dict[str, Tensor]:
        obs = {key: batch[key][:, t] for key in world.obs_space}
        hz = torch.cat([h, z[:, t]], -1)
        losses = {"dyn": -(world.log_probs(world.prior(h)).flatten(-2) * z[:, t]).sum(-1)}
        losses["reward"] = twohot_loss(world.reward(hz), batch["reward"][:, t], world.bins)
        target = (1 - batch["is_terminal"][:, t].float()) * world.discount
        losses["cont"] = F.binary_cross_entropy_with_logits(
            world.cont(hz).float().squeeze(-1), target, reduction="none"
        )
        losses.update(world.decoder.losses(world.decoder(h, z[:, t]), obs))
        scales = update.scales(losses)
        direction = torch.randn(h.shape, generator=random)
        total = sum(scales[key] * value for key, value in losses.items())
        return {"loss": total, "h": (h * direction).sum(-1)}

    return outputs


def measure(run: Recording) -> dict[str, Any]:
    length = min(LENGTH, sum(map(len, run.episodes)))
    batch = run.rows(length, ROWS)
    # The later half, so that long lags are as well measured as short ones; not in step with any
    # segment.
    steps = sorted({round(length / 2 + (length / 2 - 1) * n / STEPS) for n in range(1, STEPS + 1)})
    u = run.core_inputs(batch)
    sizes, leak = norms(
        run.update.world.core,
        u,
        batch["is_first"],
        batch["age"][:, 0],
        steps,
        outputs_of(run, batch),
    )
    lags = (0, *(2**n for n in range((length - 1).bit_length())))
    means = {name: bins(values, lags) for name, values in sizes.items()}
    seen = [n for n, lag in enumerate(lags) if any(m[n] == m[n] for m in means.values())]
    return {
        "about": "mean norm of the gradient, with respect to the core's input k steps before, of "
        "the world model's loss at a step and of h along a random direction; by k, from each lag "
        "up to the next, within an episode; leak: the largest across the start of an episode",
        "rows": len(u),
        "steps": len(steps),
        "trained_length": run.config.batch.length,
        "lags": [lags[n] for n in seen],
        **{name: [values[n] for n in seen] for name, values in means.items()},
        "leak": leak,
    }


def plot(figure: Any, result: dict[str, Any]) -> None:
    figure.set_size_inches(6, 4)
    axes = figure.subplots()
    for name, label in (("loss", "world model's loss"), ("h", "h, along a random direction")):
        shown = [value if value > 0 else float("nan") for value in result[name]]
        axes.plot(result["lags"], shown, marker="o", ms=3, label=label)
    axes.axvline(result["trained_length"], color="grey", lw=1, ls=":", label="length of training")
    axes.set(xlabel="steps since the input", ylabel="mean norm of the gradient", yscale="log")
    axes.set_xscale("symlog", base=2, linthresh=1)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlim(left=-0.2)
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.15), fontsize="small", ncols=3)


def lines(result: dict[str, Any]) -> list[str]:
    out = [f"{'from lag':10}" + "".join(f"{lag:>9}" for lag in result["lags"])]
    for name in ("loss", "h"):
        out.append(f"{name:10}" + "".join(f"{value:9.1e}" for value in result[name]))
    out.append(f"across a reset: {max(result['leak'].values()):g}")
    return out
