"""Sequence part of the world-model update, core against core, in one run.

`python -m worldmodels.bench` times inputs -> h, x, prior and posterior, forward and backward, for
`s3m` (one scan) against `gru` (its loop, with DreamerV3's recurrent posterior) at about equal
parameters. Rounds are interleaved; medians and their ratio are printed, and a JSON line.
"""

from __future__ import annotations

import json
import statistics
import time

from configs import process

if __name__ == "__main__":
    process.prepare()  # before torch is imported

import torch

from configs.command import command_line
from configs.load import resolve
from configs.mkl import choose_products
from worldmodels import latent
from worldmodels.world_model import WorldModel


class Vector:
    """A vector space of `size` numbers, as the models read spaces."""

    def __init__(self, size: int):
        self.kind, self.shape, self.classes = "vector", (size,), ()


def sequence_parameters(world: WorldModel) -> int:
    parts = (world.core, world.readout, world.prior, world.posterior)
    return sum(param.numel() for part in parts for param in part.parameters())


def once(world: WorldModel, inputs: tuple[torch.Tensor, ...], dtype: torch.dtype) -> float:
    """Seconds of one forward and backward of the sequence part."""
    embed, action, is_first, noise = inputs
    start = time.perf_counter()
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        out, _ = world.observe(embed, action, is_first, world.initial(len(embed)), noise)
        dyn, rep = latent.kl_losses(out["post"], world.log_probs(world.prior(out["h"])), 1.0)
        loss = dyn.mean() + rep.mean() + out["x"].square().mean() + out["h"].square().mean()
    loss.backward()
    world.zero_grad(set_to_none=True)
    return time.perf_counter() - start


def main() -> None:
    parser = command_line("worldmodels.bench", __doc__)
    parser.add_argument("--size", default="12m", help="size preset")
    parser.add_argument("--shapes", nargs="*", default=["16x64", "4x256", "4x1024"], help="BxT")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--precision", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--products", default="auto", choices=["auto", "shipped"])
    args = parser.parse_args()
    print(choose_products(args.products))
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    dtype = getattr(torch, args.precision)
    spaces = {"vector": Vector(8)}
    worlds = {
        core: WorldModel(resolve(["--core", core, "--size", args.size]), spaces, Vector(4))
        for core in ("gru", "s3m")
    }
    counts = {core: sequence_parameters(world) for core, world in worlds.items()}
    print(f"size {args.size}, {args.precision}, {args.threads} threads; parameters {counts}")
    rows = []
    for shape in args.shapes:
        batch, length = map(int, shape.split("x"))
        times: dict[str, list[float]] = {core: [] for core in worlds}
        for turn in range(args.rounds + 1):
            for core, world in worlds.items():
                inputs = (
                    torch.randn(batch, length, world.encoder.out, requires_grad=True),
                    torch.randn(batch, length, 4),
                    torch.rand(batch, length) < 0.01,
                    world.noise(batch, length),
                )
                spent = once(world, inputs, dtype)
                if turn:  # the first round warms up
                    times[core].append(spent)
        median = {core: statistics.median(values) for core, values in times.items()}
        ratio = median["gru"] / median["s3m"]
        print(
            f"{shape:>8}  gru {median['gru'] * 1e3:9.1f} ms  s3m {median['s3m'] * 1e3:9.1f} ms  "
            f"{ratio:5.2f}x"
        )
        rows.append({"shape": shape, "times": times, "ratio": ratio})
    print(json.dumps({"size": args.size, "precision": args.precision, "rows": rows}))


if __name__ == "__main__":
    main()
