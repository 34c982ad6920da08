"""The strategies for `lightning.fabric`; their public home is `ft_lightning.fabric`."""

from __future__ import annotations

from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy

from ft_lightning.diloco.fabric_strategies import FTFabricDiLoCoMixin, FTFabricLocalSGDMixin
from ft_lightning.fabric.fabric_sharded import FTFabricFSDPMixin
from ft_lightning.fabric.fabric_strategy import FTFabricMixin

__all__ = ["FTDDPStrategy", "FTDiLoCoStrategy", "FTFSDPStrategy", "FTLocalSGDStrategy"]


class FTDDPStrategy(FTFabricMixin, DDPStrategy):
    __doc__ = FTFabricMixin.__doc__
    __module__ = "ft_lightning.fabric"


class FTLocalSGDStrategy(FTFabricLocalSGDMixin, DDPStrategy):
    __doc__ = FTFabricLocalSGDMixin.__doc__
    __module__ = "ft_lightning.fabric"


class FTDiLoCoStrategy(FTFabricDiLoCoMixin, DDPStrategy):
    __doc__ = FTFabricDiLoCoMixin.__doc__
    __module__ = "ft_lightning.fabric"


class FTFSDPStrategy(FTFabricFSDPMixin, ModelParallelStrategy):
    __doc__ = FTFabricFSDPMixin.__doc__
    __module__ = "ft_lightning.fabric"
