"""The strategies for `lightning.pytorch`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy

from ft_lightning.strategy import FTDDPMixin

__all__ = ["FTDDPStrategy"]


class _AtEpochStart(Callback):
    """Tells the strategy that an epoch starts, for which strategies have no hook."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._action()


class FTDDPStrategy(FTDDPMixin, DDPStrategy):
    __doc__ = FTDDPMixin.__doc__
    strategy_name = "ft_ddp"
    _namespace = "lightning.pytorch"
    _hook_callback = _AtEpochStart
