"""Fault tolerance for Lightning Fabric; the strategies for `lightning.fabric` by name.

The names are loaded when they are used: `lightning_fabric` has its own (`ft_lightning.fabric_lf`),
may be installed without `lightning`, and shares the folder's modules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ft_lightning.fabric_lightning import (
        FTDDPStrategy,
        FTDiLoCoStrategy,
        FTFSDPStrategy,
        FTLocalSGDStrategy,
    )

__all__ = ["FTDDPStrategy", "FTDiLoCoStrategy", "FTFSDPStrategy", "FTLocalSGDStrategy"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from ft_lightning import fabric_lightning

        return getattr(fabric_lightning, name)
    raise AttributeError(f"module 'ft_lightning.fabric' has no attribute {name!r}")
