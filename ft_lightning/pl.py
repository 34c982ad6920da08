"""The strategies for `pytorch_lightning`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pytorch_lightning.callbacks import Callback
from pytorch_lightning.strategies import DDPStrategy

from ft_lightning.strategy import FTDDPMixin

__all__ = ["FTDDPStrategy"]


class _AtEpochStart(Callback):
    """Tells the strategy that an epoch starts, for which strategies have no hook."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._action()


class FTDDPStrategy(FTDDPMixin, DDPStrategy):  # type: ignore[misc]  # typed as the other's
    __doc__ = FTDDPMixin.__doc__
    strategy_name = "ft_ddp"
    _namespace = "pytorch_lightning"
    _hook_callback = _AtEpochStart
