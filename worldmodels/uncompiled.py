"""Methods that a compiled update calls as they are.

They are marked where they stand and handed to the compiler only where there is one: as a decorator
`torch.compiler.disable` imports it, for as long as PyTorch itself takes, in every process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(method: F) -> F:
    """Marks a method of a module, for `leave_uncompiled`."""
    method.uncompiled = True  # type: ignore[attr-defined]
    return method


def leave_uncompiled(module: nn.Module) -> None:
    """Keep the marked methods of `module` and its parts, and of all others of their classes, out of
    what torch.compile traces."""
    for kind in {type(part) for part in module.modules()}:
        for name, method in list(vars(kind).items()):
            if getattr(method, "uncompiled", False):
                setattr(kind, name, torch.compiler.disable(method))
