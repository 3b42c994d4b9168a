"""Shared by all tests: one thread, and small configurations."""

import signal

import pytest
import torch

from configs.load import resolve

torch.set_num_threads(1)

TINY = [
    *("--size", "debug", "--precision", "float32", "--device", "cpu", "--threads", "1"),
    *("--batch.size", "2", "--batch.length", "16"),
    *("--optim.warmup", "0", "--behaviour.horizon", "4"),
]


@pytest.fixture
def tiny():
    """A function from flags to a tiny configuration."""
    return lambda *flags: resolve([*flags, *TINY])


@pytest.fixture(autouse=True)
def signals():
    """A run in this process takes the signals that stop it: Ctrl-C is for the tests again."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
