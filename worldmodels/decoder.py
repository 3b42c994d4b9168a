"""Reconstruction of observations from (h, z), and its losses (DreamerV3 code, `rssm.py`)."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worldmodels.dists import symlog
from worldmodels.encoder import MULTIPLES, Conv, canvas, image_grid
from worldmodels.layers import (
    MLP,
    BlockLinear,
    Dense,
    Linear,
    RMSNorm,
    init_weight,
    without_autocast,
)

# Where the five taps of a kernel fall among the three coarse pixels around one coarse pixel, for
# the even and the odd fine pixel that it becomes.
TAPS = (
    ((1, 1, 0, 0, 0), (0, 0, 1, 1, 0), (0, 0, 0, 0, 1)),
    ((1, 0, 0, 0, 0), (0, 1, 1, 0, 0), (0, 0, 0, 1, 1)),
)


class RepeatConv(Conv):
    """Nearest-neighbour upsampling by 2, then a 5x5 convolution, without the large image between.

    Of 25 taps on repeated pixels 9 are distinct: each of the four fine pixels of a coarse one is a
    3x3 convolution of the coarse image with sums of taps, the same function at 9/25 of the products
    (the sub-pixel form of Shi et al. 2016).
    """

    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs)
        self.register_buffer("taps", torch.tensor(TAPS, dtype=torch.float32), persistent=False)

    def forward(self, image: Tensor) -> Tensor:
        """(N, I, H, W) to (N, H, W, 2, 2, O), row and column within the coarse pixel apart."""
        with without_autocast(image.device.type):
            weight = torch.einsum("pak,qbl,oikl->pqoiab", self.taps, self.taps, self.weight)
        out = F.conv2d(image, weight.flatten(0, 2), self.bias.repeat(4), padding=1)
        return out.permute(0, 2, 3, 1).unflatten(-1, (2, 2, -1))


class TransposedConv(nn.ConvTranspose2d):
    """4x4 transposed convolution of stride 2."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs, 4, stride=2, padding=1)
        init_weight(self.weight, inputs * 4)
        nn.init.zeros_(self.bias)
        self.to(memory_format=torch.channels_last)

    def forward(self, image: Tensor) -> Tensor:
        """(N, I, H, W) to (N, 2H, 2W, O)."""
        return super().forward(image).permute(0, 2, 3, 1)


def interleave(image: Tensor) -> Tensor:
    """(N, H, W, 2, 2, C), or (N, 2H, 2W, C) as it is, to channels-last images (N, C, 2H, 2W)."""
    if image.dim() == 6:
        image = image.transpose(2, 3).flatten(3, 4).flatten(1, 2)
    return image.permute(0, 3, 1, 2)


class Decoder(nn.Module):
    """(h (..., D), z (..., Z)) -> dict of predictions; images in [0, 1], vectors in symlog."""

    def __init__(
        self,
        spaces: dict[str, Any],
        h: int,
        z: int,
        depth: int,
        units: int,
        layers: int,
        conv: str,
    ):
        """As `Encoder`; widths of `h` and flat `z`."""
        super().__init__()
        self.spaces = spaces
        self.images = sorted(k for k, s in spaces.items() if s.kind == "image")
        self.vectors = sorted(k for k, s in spaces.items() if s.kind != "image")
        if self.images:
            self.grid = image_grid(canvas(spaces, self.images))
            self.channels = depth * MULTIPLES[-1]
            size = self.grid[0] * self.grid[1] * self.channels
            blocks = 8 if h % 8 == 0 and self.channels % 8 == 0 else 1
            self.from_h = BlockLinear(blocks, h // blocks, size // blocks)
            self.from_z = nn.Sequential(Dense(z, 2 * units), Linear(2 * units, size))
            self.enter = RMSNorm(self.channels, silu=True)
            widths = [depth * multiple for multiple in reversed(MULTIPLES)]
            pairs = list(itertools.pairwise(widths))
            layer = RepeatConv if conv == "pool" else TransposedConv
            self.convs = nn.ModuleList(layer(a, b) for a, b in pairs)
            self.norms = nn.ModuleList(RMSNorm(b, silu=True) for _, b in pairs)
            self.leave = layer(widths[-1], sum(spaces[k].shape[2] for k in self.images))
        if self.vectors:
            self.mlp = MLP(h + z, units, layers)
            self.heads = nn.ModuleList(
                Linear(units, sum(spaces[k].classes or spaces[k].shape)) for k in self.vectors
            )

    def forward(self, h: Tensor, z: Tensor) -> dict[str, Tensor]:
        out: dict[str, Tensor] = {}
        if self.images:
            out.update(self.decode_images(h, z))
        if self.vectors:
            hidden = self.mlp(torch.cat([h, z], -1))
            for key, head in zip(self.vectors, self.heads, strict=True):
                out[key] = head(hidden).float()
        return out

    def decode_images(self, h: Tensor, z: Tensor) -> dict[str, Tensor]:
        lead, (rows, columns) = h.shape[:-1], self.grid
        h, z = h.flatten(0, -2), z.flatten(0, -2)
        # Every block of h owns a slice of the channels of the coarsest grid.
        from_h = self.from_h(h).unflatten(-1, (rows, columns, -1))
        from_h = from_h.permute(0, 2, 3, 1, 4).flatten(-2)
        image = from_h + self.from_z(z).unflatten(-1, (rows, columns, self.channels))
        image = interleave(self.enter(image))
        for conv, norm in zip(self.convs, self.norms, strict=True):
            image = interleave(norm(conv(image)))
        image = interleave(self.leave(image))
        image = torch.sigmoid(image.float()).permute(0, 2, 3, 1)
        shapes = [self.spaces[k].shape for k in self.images]
        parts = image.split([channels for _, _, channels in shapes], -1)
        return {
            key: part[:, :height, :width].unflatten(0, lead)
            for key, part, (height, width, _) in zip(self.images, parts, shapes, strict=True)
        }

    def losses(self, prediction: dict[str, Tensor], obs: dict[str, Tensor]) -> dict[str, Tensor]:
        """One loss (...) a key, `rec/<key>`: squared error summed over an image in [0, 1] or over a
        symlog vector, cross-entropy of discrete values."""
        out = {}
        for key, space in self.spaces.items():
            name, value, target = f"rec/{key}", prediction[key], obs[key]
            if space.kind == "image":
                out[name] = (value - target.float() / 255).square().sum((-3, -2, -1))
            elif space.kind == "vector":
                out[name] = (value - symlog(target.float())).square().sum(-1)
            else:
                parts = zip(value.split(list(space.classes), -1), target.unbind(-1), strict=True)
                out[name] = sum(
                    F.cross_entropy(
                        logits.flatten(0, -2), index.long().flatten(), reduction="none"
                    ).view(index.shape)
                    for logits, index in parts
                )
        return out
