"""Random numbers by counter: every stream is a pure function of (seed, purpose, counter).

Nothing has a hidden state, so a resumed run draws what the uninterrupted one would have drawn.
"""

from __future__ import annotations

import hashlib

import torch


def key(seed: int, purpose: str, counter: int = 0, rank: int = 0) -> int:
    """A 63-bit integer that no other arguments give, for practical purposes.

    `rank` numbers the processes of one run; those of a run alone are rank 0.
    """
    text = (f"{seed}/{purpose}/{counter}" + (f"/{rank}" if rank else "")).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def generator(
    seed: int,
    purpose: str,
    counter: int = 0,
    device: torch.device | str = "cpu",
    rank: int = 0,
) -> torch.Generator:
    """A torch generator on `device` at the start of the stream (seed, purpose, counter, rank)."""
    return torch.Generator(device).manual_seed(key(seed, purpose, counter, rank))
