"""The switch of MKL's path, each time in a process of its own: the answer stays replaced."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
import torch
from configs.mkl import choose_products
print(choose_products(sys.argv[1]))
print(choose_products("auto"))
one, other = torch.randn(2, 300, 300, generator=torch.Generator().manual_seed(0))
exact = one.double() @ other.double()
print(float(((one @ other) - exact).abs().max() / exact.abs().max()))
"""


@pytest.mark.parametrize("products", ["auto", "shipped"])
def test_products_are_switched_once_and_stay_exact(products):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, products],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True, timeout=100,
    )  # fmt: skip
    first, second, error = done.stdout.splitlines()
    assert float(error) < 1e-5
    if products == "shipped":
        assert first == "products as shipped: as asked"
    elif first.startswith("products by MKL's fast path"):
        assert second == "products as shipped: MKL takes its fast path by itself"
    else:
        assert first == second  # nothing to switch on this machine
