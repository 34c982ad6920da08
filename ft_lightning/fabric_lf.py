"""The strategies for `lightning_fabric`."""

from __future__ import annotations

from lightning_fabric.strategies import DDPStrategy, ModelParallelStrategy

from ft_lightning.diloco.fabric_strategies import FTFabricDiLoCoMixin, FTFabricLocalSGDMixin
from ft_lightning.fabric.fabric_sharded import FTFabricFSDPMixin
from ft_lightning.fabric.fabric_strategy import FTFabricMixin

__all__ = ["FTDDPStrategy", "FTDiLoCoStrategy", "FTFSDPStrategy", "FTLocalSGDStrategy"]


class FTDDPStrategy(FTFabricMixin, DDPStrategy):  # type: ignore[misc]  # typed as the other's
    __doc__ = FTFabricMixin.__doc__


class FTLocalSGDStrategy(FTFabricLocalSGDMixin, DDPStrategy):  # type: ignore[misc]  # typed as the other's
    __doc__ = FTFabricLocalSGDMixin.__doc__


class FTDiLoCoStrategy(FTFabricDiLoCoMixin, DDPStrategy):  # type: ignore[misc]  # typed as the other's
    __doc__ = FTFabricDiLoCoMixin.__doc__


class FTFSDPStrategy(FTFabricFSDPMixin, ModelParallelStrategy):  # type: ignore[misc]  # typed as the other's
    __doc__ = FTFabricFSDPMixin.__doc__
