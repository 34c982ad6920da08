"""The strategies for `lightning.fabric`."""

from __future__ import annotations

from lightning.fabric.strategies import DDPStrategy

from ft_lightning.fabric_strategy import FTFabricMixin

__all__ = ["FTDDPStrategy"]


class FTDDPStrategy(FTFabricMixin, DDPStrategy):
    __doc__ = FTFabricMixin.__doc__
    strategy_name = "ft_ddp"
    _namespace = "lightning.fabric"
