"""What an update costs: `python -m agent.bench --size 1m --batch 16x64 --images no`.

One row a core: seconds of the whole update, FLOPs by torch's counter, the matrix-product rate of
this process for comparison, and the latency of acting for 1 and 8 environments.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from configs import process


def main() -> None:
    parser = argparse.ArgumentParser("agent.bench", description=__doc__)
    parser.add_argument("--cores", nargs="*", default=["gru", "s3m"], help="cores to time")
    parser.add_argument("--size", default="1m", help="size preset")
    parser.add_argument("--batch", default="16x64", help="BxT")
    parser.add_argument("--images", default="no", choices=["yes", "no"], help="64x64x3 or 8 floats")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--precision", default="float32", choices=["float32", "bfloat16"])
    args = parser.parse_args()

    import numpy as np
    import torch

    from agent.actor import Actor
    from agent.auto import count_flops, fake_batch
    from agent.learner import Learner
    from agent.update import Update
    from configs.load import resolve
    from envs.env import Space

    torch.set_num_threads(args.threads)
    rows, length = map(int, args.batch.split("x"))
    image = args.images == "yes"
    obs = {"image": Space("image", (64, 64, 3))} if image else {"vector": Space("vector", (8,))}
    act = Space("discrete", (1,), (6,))
    square = torch.randn(1024, 1024)
    start = time.perf_counter()
    for _ in range(10):
        square @ square
    peak = 10 * 2 * 1024**3 / (time.perf_counter() - start)
    print(f"matrix product {peak / 1e9:.0f} GFLOP/s in float32 on {args.threads} threads")
    learners, flops = {}, {}
    for core in args.cores:
        torch.manual_seed(0)
        config = resolve(["--core", core, "--size", args.size])
        update = Update(config, obs, act)
        flops[core] = count_flops(update, rows, length)
        learners[core] = Learner(update, 0, args.precision)
    batch = fake_batch(update, rows, length)
    times: dict[str, list[float]] = {core: [] for core in args.cores}
    for turn in range(args.rounds + 1):
        for core, learner in learners.items():
            start = time.perf_counter()
            learner.train(batch)
            if turn:
                times[core].append(time.perf_counter() - start)
    out = []
    for core, learner in learners.items():
        seconds = statistics.median(times[core])
        acting = {}
        for count in (1, 8):
            actor = Actor(learner.update, count, 0)
            seen = {key: np.zeros((count, *s.shape), s.dtype) for key, s in obs.items()}
            seen |= {"is_first": np.zeros(count, bool), "is_last": np.zeros(count, bool)}
            ids, spent = np.arange(count), []
            for _ in range(60):
                start = time.perf_counter()
                actor.act(ids, seen)
                spent.append(time.perf_counter() - start)
            acting[count] = statistics.median(spent[10:])
        print(
            f"{core:6} {seconds:7.3f} s an update  {flops[core] / 1e9:8.1f} GFLOP  "
            f"{flops[core] / seconds / 1e9:6.1f} GFLOP/s  act 1: {acting[1] * 1e3:.2f} ms  "
            f"act 8: {acting[8] * 1e3:.2f} ms"
        )
        out.append({"core": core, "seconds": times[core], "flops": flops[core], "act": acting})
    print(json.dumps({"size": args.size, "batch": args.batch, "images": image, "rows": out}))


if __name__ == "__main__":
    process.prepare()
    main()
