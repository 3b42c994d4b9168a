"""Open-loop prediction: the model sees a context, then goes on from the actions alone.

The errors answer "does the world model know this world": a squared error per pixel by horizon,
beside two references that know nothing of dynamics, the last seen frame and the mean image.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from agent.update import Update
from worldmodels.world_model import tree_map

HORIZONS = (1, 5, 15, 45)
ROWS = 16
DRAWS = 4


def repeat(value: Tensor) -> Tensor:
    """(B, ...) to (DRAWS * B, ...)."""
    return value.repeat(DRAWS, *[1] * (value.dim() - 1))


@torch.no_grad()
def roll(
    update: Update, batch: dict[str, Tensor], context: int, random: torch.Generator
) -> tuple[Tensor, Tensor]:
    """h (DRAWS, B, T, D) and z (DRAWS, B, T, S*C) of a batch as the replay gives it, (B, T, ...).

    The first `context` steps are posteriors; after them every z is drawn from the prior.
    """
    world = update.world
    action = update.policy.encode(batch["action"])
    rows, length = batch["reward"].shape
    obs = {key: batch[key][:, :context] for key in world.obs_space}
    noise = world.noise(rows, context, generator=random)
    seen, carry = world.observe(
        world.encoder(obs), action[:, :context], batch["is_first"][:, :context],
        world.initial(rows, batch["age"][:, 0]), noise,
    )  # fmt: skip
    hs, zs = [repeat(seen["h"])], [repeat(seen["z"])]
    state, z = tree_map(repeat, carry["core"]), repeat(carry["z"])
    action, is_first = repeat(action), repeat(batch["is_first"])
    prepared = world.core.prepare()
    for t in range(context, length):
        first = is_first[:, t]
        u = torch.cat([z, action[:, t - 1]], -1)
        u = torch.where(first[:, None], 0.0, u)
        h, _, state = world.core.step(u, first, state, prepared)
        h = world.readout(h)
        noise = world.noise(DRAWS * rows, generator=random)
        z = world.sample(world.prior(h), noise)
        hs.append(h[:, None])
        zs.append(z[:, None])
    h, z = (torch.cat(parts, 1).unflatten(0, (DRAWS, rows)) for parts in (hs, zs))
    return h, z


@torch.no_grad()
def open_loop(
    update: Update, batch: dict[str, Tensor], context: int, random: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Truth (B, T, H, W, C) and DRAWS predictions (DRAWS, B, T, H, W, C) of the first image key.

    Pixels are in [0, 1]. The first `context` steps are reconstructions; see `roll`.
    """
    world = update.world
    key = world.encoder.images[0]
    h, z = roll(update, batch, context, random)
    # One draw at a time: the decoder's activations are the largest tensors of all.
    prediction = torch.stack([world.decoder(*pair)[key] for pair in zip(h, z, strict=True)])
    return batch[key].float() / 255, prediction


def errors(truth: Tensor, prediction: Tensor, context: int) -> dict[str, float]:
    """Mean squared error a pixel at each horizon of predictions (DRAWS, B, T, ...) and references.

    `model` is a single draw, `expected` the mean of the draws (the better guess where the future
    is uncertain), `repeat` the last seen frame, `mean` the mean image of the batch itself.
    """
    last, mean = truth[:, context - 1], truth.mean((0, 1))
    out = {}
    for horizon in HORIZONS:
        t = context - 1 + horizon
        if t < truth.shape[1]:
            guesses = {
                "model": prediction[:, :, t],
                "expected": prediction[:, :, t].mean(0),
                "repeat": last,
                "mean": mean,
            }
            for name, guess in guesses.items():
                out[f"openloop/{name}_{horizon}"] = (truth[:, t] - guess).square().mean().item()
    return out


def to_uint8(image: Tensor) -> np.ndarray:
    return (image.clamp(0, 1) * 255).round().to(torch.uint8).cpu().numpy()


def video(truth: Tensor, prediction: Tensor, context: int, rows: int = 4) -> np.ndarray:
    """Frames (T, 3H, rows * W, 3): truth, model and their difference, one above the other.

    A green edge marks the context, a red one what is predicted from actions alone.
    """
    truth, prediction = truth[:rows], prediction[:rows]
    if truth.shape[-1] not in (1, 3):
        truth, prediction = truth[..., :1], prediction[..., :1]
    truth, prediction = (part.expand(*part.shape[:-1], 3).clone() for part in (truth, prediction))
    difference = (prediction - truth + 1) / 2
    for t in range(prediction.shape[1]):
        colour = prediction.new_tensor([0.0, 1.0, 0.0] if t < context else [1.0, 0.0, 0.0])
        prediction[:, t, :2] = colour
    columns = torch.cat([truth, prediction, difference], 2)
    return to_uint8(torch.cat(columns.unbind(0), 2))


def strip(truth: Tensor, prediction: Tensor, context: int) -> np.ndarray:
    """One picture (2H * rows, W * columns, 3): truth above model at the context's end and at
    growing horizons."""
    steps = [0, context - 1, *(context - 1 + h for h in (1, 2, 5, 10, 15, 20, 30, 45))]
    steps = [t for t in steps if t < truth.shape[1]]
    rows = []
    for b in range(min(3, len(truth))):
        for part in (truth, prediction):
            rows.append(torch.cat([part[b, t] for t in steps], 1))
    image = torch.cat(rows, 0)
    return to_uint8(image[..., :1].expand(*image.shape[:-1], 3) if image.shape[-1] != 3 else image)
