"""The strategies for `lightning_fabric`."""

from __future__ import annotations

from lightning_fabric.strategies import DDPStrategy

from ft_lightning.fabric_strategy import FTFabricMixin

__all__ = ["FTDDPStrategy"]


class FTDDPStrategy(FTFabricMixin, DDPStrategy):  # type: ignore[misc]  # typed as the other's
    __doc__ = FTFabricMixin.__doc__
    strategy_name = "ft_ddp"
    _namespace = "lightning_fabric"
