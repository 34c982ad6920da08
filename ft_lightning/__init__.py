"""Fault-tolerant training for PyTorch Lightning: `Trainer(strategy="ft_ddp")`.

    trainer = Trainer(strategy="ft_ddp", devices=4)     # the name is known where this is installed
    fabric = Fabric(strategy="ft_ddp", devices=4)

or by object, with options: `Trainer(strategy=ft_lightning.FTDDPStrategy(min_replicas=2))`. A Fabric takes
that of `ft_lightning.fabric`.

Lightning's two namespaces have different classes, and a Trainer takes only those of its own.
`ft_lightning.FTDDPStrategy` is the class for the namespace that is imported already.

docs/design.md says why the folders are divided as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ft_lightning.shared.registration import install

if TYPE_CHECKING:
    from ft_lightning.pytorch import (
        FTDDPStrategy,
        FTDiLoCoStrategy,
        FTFSDPStrategy,
        FTLocalSGDStrategy,
        FTMetricsCallback,
        FTTimeline,
    )

__all__ = [
    "FTDDPStrategy",
    "FTDiLoCoStrategy",
    "FTFSDPStrategy",
    "FTLocalSGDStrategy",
    "FTMetricsCallback",
    "FTTimeline",
]

# All that importing this package does: the name must be known before a Trainer is made.
install()


def __getattr__(name: str) -> Any:
    if name in __all__:
        import importlib

        from ft_lightning.shared.registration import preferred_module

        return getattr(importlib.import_module(preferred_module()), name)
    raise AttributeError(f"module 'ft_lightning' has no attribute {name!r}")
