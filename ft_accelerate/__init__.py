"""Fault-tolerant training for Accelerate and transformers' Trainer, by configuration alone.

    accelerate config                      # asks whether to train fault-tolerantly
    accelerate launch train.py             # the same script as before

or, in code, `Accelerator(kwargs_handlers=[FaultToleranceKwargs(min_replicas=2)])`.

Names are loaded when they are first used: importing the package loads neither torch nor
Accelerate.

The folders are the map; why they are cut as they are: docs/design.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ft_accelerate.install import FaultToleranceKwargs
    from ft_accelerate.options import FaultTolerancePlugin
    from ft_accelerate.runtime.loaders import epochs
    from ft_accelerate.runtime.periodic import DiLoCo, LocalSGD

_HOMES = {
    "DiLoCo": "ft_accelerate.runtime.periodic",
    "FaultToleranceKwargs": "ft_accelerate.install",
    "FaultTolerancePlugin": "ft_accelerate.options",
    "LocalSGD": "ft_accelerate.runtime.periodic",
    "epochs": "ft_accelerate.runtime.loaders",
}

__all__ = ["DiLoCo", "FaultToleranceKwargs", "FaultTolerancePlugin", "LocalSGD", "epochs"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'ft_accelerate' has no attribute {name!r}")
    import importlib

    if home != "ft_accelerate.options":
        # First, and alone: the package's entry point acts at the end of this import.
        importlib.import_module("accelerate")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
