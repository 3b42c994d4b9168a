"""The sequence cores by name. A new core is one file and one line here (README.md)."""

from __future__ import annotations

import dataclasses

from configs.schema import Config
from worldmodels.core import SequenceCore
from worldmodels.elmur import Elmur
from worldmodels.gru import GRU
from worldmodels.rate import Rate
from worldmodels.rlt import RLT
from worldmodels.s3m import S3M
from worldmodels.transformer import Transformer

CORES = {
    "gru": lambda config, z, action: GRU(
        z, action, config.model.hidden, **dataclasses.asdict(config.gru)
    ),
    "s3m": lambda config, z, action: S3M(z, action, **dataclasses.asdict(config.s3m)),
    "elmur": lambda config, z, action: Elmur(
        z,
        action,
        provisional=config.behaviour.features != "output",
        **dataclasses.asdict(config.elmur),
    ),
    "rate": lambda config, z, action: Rate(z, action, **dataclasses.asdict(config.rate)),
    "rlt": lambda config, z, action: RLT(z, action, **dataclasses.asdict(config.rlt)),
    "transformer": lambda config, z, action: Transformer(
        z, action, **dataclasses.asdict(config.transformer)
    ),
}


def make_core(config: Config, z: int, action: int) -> SequenceCore:
    """The core `config.core` for inputs of `z` + `action` numbers.

    Raises ValueError for an unknown name.
    """
    if config.core not in CORES:
        known = ", ".join(CORES)
        raise ValueError(f"unknown core {config.core!r}; known: {known} (worldmodels/cores.py)")
    return CORES[config.core](config, z, action)
