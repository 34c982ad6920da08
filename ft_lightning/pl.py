"""The strategies for `pytorch_lightning`."""

from __future__ import annotations

from pytorch_lightning.callbacks import Callback
from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy

from ft_lightning.diloco.trainer_strategies import FTDiLoCoMixin, FTLocalSGDMixin
from ft_lightning.trainer.reporting import MetricsMixin, TimelineMixin
from ft_lightning.trainer.sharded_strategy import FTFSDPMixin
from ft_lightning.trainer.strategy import FTDDPMixin

__all__ = [
    "FTDDPStrategy",
    "FTDiLoCoStrategy",
    "FTFSDPStrategy",
    "FTLocalSGDStrategy",
    "FTMetricsCallback",
    "FTTimeline",
]


class FTDDPStrategy(FTDDPMixin, DDPStrategy):  # type: ignore[misc]  # typed as the other's
    __doc__ = FTDDPMixin.__doc__


class FTLocalSGDStrategy(FTLocalSGDMixin, DDPStrategy):  # type: ignore[misc]  # typed as the other's
    __doc__ = FTLocalSGDMixin.__doc__


class FTDiLoCoStrategy(FTDiLoCoMixin, DDPStrategy):  # type: ignore[misc]  # typed as the other's
    __doc__ = FTDiLoCoMixin.__doc__


class FTFSDPStrategy(FTFSDPMixin, ModelParallelStrategy):  # type: ignore[misc]  # typed as the other's
    __doc__ = FTFSDPMixin.__doc__


class FTMetricsCallback(MetricsMixin, Callback):  # type: ignore[misc]  # typed as the other's
    __doc__ = MetricsMixin.__doc__


class FTTimeline(TimelineMixin, Callback):  # type: ignore[misc]  # typed as the other's
    __doc__ = TimelineMixin.__doc__
