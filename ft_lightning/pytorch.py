"""The strategies for `lightning.pytorch`."""

from __future__ import annotations

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

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


class FTDDPStrategy(FTDDPMixin, DDPStrategy):
    __doc__ = FTDDPMixin.__doc__


class FTLocalSGDStrategy(FTLocalSGDMixin, DDPStrategy):
    __doc__ = FTLocalSGDMixin.__doc__


class FTDiLoCoStrategy(FTDiLoCoMixin, DDPStrategy):
    __doc__ = FTDiLoCoMixin.__doc__


class FTFSDPStrategy(FTFSDPMixin, ModelParallelStrategy):
    __doc__ = FTFSDPMixin.__doc__


class FTMetricsCallback(MetricsMixin, Callback):
    __doc__ = MetricsMixin.__doc__


class FTTimeline(TimelineMixin, Callback):
    __doc__ = TimelineMixin.__doc__
