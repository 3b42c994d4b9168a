"""Observations to embeddings: e = encoder(obs), the same for acting and training.

Images of all keys, the smaller ones padded, share one convolution stack: four times a 5x5
convolution at full resolution, 2x2 max-pooling, RMSNorm over channels and SiLU (DreamerV3 code,
`rssm.py`), or with 4x4 convolutions of stride 2 as in its version of 2023. Vectors pass symlog,
discrete values become one-hot, and an MLP reads both. Memory is channels-last throughout, the
layout in which uint8 frames arrive and in which convolutions are fastest on a CPU.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worldmodels.dists import symlog
from worldmodels.layers import MLP, RMSNorm, init_weight

MULTIPLES = (2, 3, 4, 4)  # channels of the four stages, times model.depth
SHRINK = 2 ** len(MULTIPLES)


def one_hot(value: Tensor, classes: tuple[int, ...]) -> Tensor:
    """Integers (..., k) to the concatenation of k one-hot vectors (..., sum(classes))."""
    parts = zip(value.long().unbind(-1), classes, strict=True)
    return torch.cat([F.one_hot(part, count) for part, count in parts], -1).float()


def image_grid(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns left after four halvings of an image padded to a multiple of 16."""
    return -(-shape[0] // SHRINK), -(-shape[1] // SHRINK)


def canvas(spaces: dict[str, Any], images: list[str]) -> tuple[int, int]:
    """Height and width in which every image of a task fits."""
    return max(spaces[k].shape[0] for k in images), max(spaces[k].shape[1] for k in images)


def fit(image: Tensor, size: tuple[int, int]) -> Tensor:
    """An image (..., H, W, C) on a grey canvas, at its top left; itself where it fills it."""
    down, right = size[0] - image.shape[-3], size[1] - image.shape[-2]
    return F.pad(image, (0, 0, 0, right, 0, down), value=128) if down or right else image


class Conv(nn.Conv2d):
    """5x5 convolution that keeps height and width, channels-last."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs, 5, padding=2)
        init_weight(self.weight, inputs * 25)
        nn.init.zeros_(self.bias)
        self.to(memory_format=torch.channels_last)


class MaxPool(torch.autograd.Function):
    """2x2 max-pooling of channels-last images that keeps one small index a window.

    PyTorch's own keeps its input, the largest tensor of the whole model, and indices of 64 bits.
    """

    WINDOW = ([2, 2], [2, 2], [0, 0], [1, 1], False)  # size, stride, padding, dilation, ceil mode

    @staticmethod
    def forward(ctx: Any, image: Tensor) -> Tensor:
        out, index = torch.ops.aten.max_pool2d_with_indices(image, *MaxPool.WINDOW)
        pixels = image.shape[2] * image.shape[3]
        ctx.save_for_backward(index.to(torch.int16 if pixels <= 2**15 else torch.int32))
        ctx.shape = image.shape
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (index,) = ctx.saved_tensors
        # Its shape and layout matter, its values do not.
        image = torch.empty(
            ctx.shape, dtype=grad.dtype, device=grad.device, memory_format=torch.channels_last
        )
        grad = grad.contiguous(memory_format=torch.channels_last)
        return torch.ops.aten.max_pool2d_with_indices_backward(
            grad, image, *MaxPool.WINDOW, index.long()
        )


class PooledConv(Conv):
    """5x5 convolution at full resolution, then 2x2 max-pooling: (N, C, H, W) to half of H and W."""

    def forward(self, image: Tensor) -> Tensor:
        return MaxPool.apply(super().forward(image))


class StridedConv(nn.Conv2d):
    """4x4 convolution of stride 2: (N, C, H, W) to half of H and W."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs, 4, stride=2, padding=1)
        init_weight(self.weight, inputs * 16)
        nn.init.zeros_(self.bias)
        self.to(memory_format=torch.channels_last)


class Encoder(nn.Module):
    """Dict of (..., shape) observations -> (..., E). `out` is E."""

    def __init__(self, spaces: dict[str, Any], depth: int, units: int, layers: int, conv: str):
        """`spaces`: name -> space with `kind` (image, vector, discrete), `shape`, `classes`;
        `conv`: pool or strided."""
        super().__init__()
        self.images = sorted(k for k, s in spaces.items() if s.kind == "image")
        self.vectors = sorted(k for k, s in spaces.items() if s.kind != "image")
        self.classes = {k: tuple(s.classes) for k, s in spaces.items() if s.kind == "discrete"}
        self.out = 0
        if self.images:
            self.canvas = canvas(spaces, self.images)
            rows, columns = image_grid(self.canvas)
            channels = [sum(spaces[k].shape[2] for k in self.images)]
            channels += [depth * multiple for multiple in MULTIPLES]
            pairs = list(itertools.pairwise(channels))
            layer = PooledConv if conv == "pool" else StridedConv
            self.convs = nn.ModuleList(layer(a, b) for a, b in pairs)
            self.norms = nn.ModuleList(RMSNorm(b, silu=True) for _, b in pairs)
            self.out += rows * columns * channels[-1]
        if self.vectors:
            width = sum(sum(self.classes.get(k, spaces[k].shape)) for k in self.vectors)
            self.mlp = MLP(width, units, layers)
            self.out += units

    def forward(self, obs: dict[str, Tensor]) -> Tensor:
        parts = []
        if self.images:
            image = torch.cat([fit(obs[k], self.canvas) for k in self.images], -1)
            lead, image = image.shape[:-3], image.flatten(0, -4)
            image = (image.float() / 255 - 0.5).permute(0, 3, 1, 2)
            down, right = -image.shape[2] % SHRINK, -image.shape[3] % SHRINK
            if down or right:
                image = F.pad(image, (0, right, 0, down))
            image = image.contiguous(memory_format=torch.channels_last)
            for conv, norm in zip(self.convs, self.norms, strict=True):
                image = norm(conv(image).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
            parts.append(image.permute(0, 2, 3, 1).reshape(*lead, -1))
        if self.vectors:
            values = [
                one_hot(obs[k], self.classes[k]) if k in self.classes else symlog(obs[k].float())
                for k in self.vectors
            ]
            parts.append(self.mlp(torch.cat(values, -1)))
        return torch.cat([part.to(parts[0].dtype) for part in parts], -1)
