"""MKL's fast float32 products on processors that are not Intel's.

The MKL inside PyTorch asks `mkl_serv_intel_cpu_true` who made the processor and, when it was not
Intel, takes kernels of half the speed. Its AVX2 and AVX-512 kernels give the same accuracy on other
processors, so the answer is replaced in this process's memory; no file changes. Whatever is not as
expected leaves the library as it was shipped.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import sys
from pathlib import Path

ANSWER_TRUE = b"\xb8\x01\x00\x00\x00\xc3"  # mov eax, 1; ret
READ, WRITE, EXECUTE = 1, 2, 4


def choose_products(products: str) -> str:
    """Apply the setting `products`; after torch is imported and before its first product.

    Returns one line for the record: what was done, or why nothing was.
    """
    if products == "shipped":
        return "products as shipped: as asked"
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "products as shipped: not Linux on x86-64"
    package = Path(sys.modules["torch"].__file__ or "").parent
    library = package / "lib" / "libtorch_cpu.so"
    try:
        question = ctypes.CDLL(str(library)).mkl_serv_intel_cpu_true
    except (OSError, AttributeError):
        return "products as shipped: this PyTorch has no MKL that asks for the processor's maker"
    if question():
        return "products as shipped: MKL takes its fast path by itself"
    address = ctypes.cast(question, ctypes.c_void_p).value
    assert address is not None
    start = address - address % mmap.PAGESIZE
    length = address + len(ANSWER_TRUE) - start
    protect = ctypes.CDLL(None).mprotect
    protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if protect(start, length, READ | WRITE):
        return "products as shipped: the system does not let a program change its own code"
    ctypes.memmove(address, ANSWER_TRUE, len(ANSWER_TRUE))
    protect(start, length, READ | EXECUTE)
    return "products by MKL's fast path, which it does not take by itself on this processor"
