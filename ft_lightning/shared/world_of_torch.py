"""What code asks torch.distributed for that knows nothing of replica groups: there is no process group of all of them.

`DistributedSampler(dataset)`, also one that a library makes, divides as `distributed_sampler_kwargs` says. It asked for a
default process group, and raised an error without one.

What reduces or gathers over `torch.distributed` itself where that `is_initialized()` (a contrastive loss over the samples of
all processes, the centre of DINO's) stays in this process. That can't be mended here, since gradients would flow back
through processes that may be gone by then; but it is said, since other weights come of it.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from ft_core.launch.supervisor import say

_ASK_FOR_THEMSELVES = {
    "ft_core",
    "ft_lightning",
    "lightning",
    "lightning_fabric",
    "lightning_utilities",
    "pytorch_lightning",
    "torch",
    "torchmetrics",
}
"""Packages whose questions are answered elsewhere, or change nothing."""

_newest: list[Callable[[], Any]] = []
"""A reference to the strategy of the newest Trainer or Fabric, if there was one."""
_told: set[str] = set()


def stand_in(strategy: Any) -> None:
    """Answer for `strategy`, as long as it lives. Any thread."""
    _newest[:] = [weakref.ref(strategy)]
    if not hasattr(DistributedSampler.__init__, "__wrapped__"):
        DistributedSampler.__init__ = _dividing(DistributedSampler.__init__)  # type: ignore[method-assign]
        dist.is_initialized = _watched(dist.is_initialized)


def _strategy() -> Any:
    return _newest[0]() if _newest else None


def _dividing(init: Any) -> Any:
    @functools.wraps(init)
    def __init__(
        self: Any,
        dataset: Any,
        num_replicas: Any = None,
        rank: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        strategy = _strategy()
        if num_replicas is None and rank is None and strategy is not None and strategy.divides_now:
            num_replicas, rank = map(
                strategy.distributed_sampler_kwargs.get, ("num_replicas", "rank")
            )
        init(self, dataset, num_replicas, rank, *args, **kwargs)

    return __init__


def _watched(is_initialized: Callable[[], bool]) -> Callable[[], bool]:
    @functools.wraps(is_initialized)
    def asked() -> bool:
        if not torch.compiler.is_compiling():  # which this would end
            strategy = _strategy()
            if strategy is not None and strategy.is_in_step and strategy.scope.num_groups > 1:
                _tell(sys._getframe(1).f_globals.get("__name__", ""), strategy)
        return is_initialized()

    return asked


def _tell(module: str, strategy: Any) -> None:
    package = module.partition(".")[0]
    if package in _ASK_FOR_THEMSELVES or package in _told:
        return
    _told.add(package)
    if strategy.scope.rank == 0:
        say(
            "ft_lightning",
            f"{module} asks torch.distributed for other processes within a step, which knows of none: what it then reduces "
            "or gathers itself (a loss over the samples of all, say) covers this process alone, and the weights are not "
            "those of ddp. all_gather and reduce of the module or of Fabric reach all processes; "
            "self.all_gather(x, sync_grads=True) has gradients, too",
        )


def sharding_sampler(loader: Any, shards: int) -> DistributedSampler[Any] | None:
    """What divides the data of `loader` into this many shards; None: it can't be told."""
    batches = getattr(loader, "batch_sampler", None)
    for sampler in (getattr(loader, "sampler", None), getattr(batches, "sampler", None), batches):
        if isinstance(sampler, DistributedSampler) and sampler.num_replicas == shards:
            return sampler
    return None


def divide_anew(loader: Any, shards: int, place: dict[str, Any]) -> None:
    """Divide data of `loader` that a sampler divides into `shards` as `place` says: an evaluation whose sampler was made for
    the training's processes is one of all the data."""
    sampler = sharding_sampler(loader, shards)
    if sampler is None or place["num_replicas"] == shards:
        return
    epoch = sampler.epoch
    DistributedSampler.__init__(
        sampler,
        sampler.dataset,
        **place,
        shuffle=sampler.shuffle,
        seed=sampler.seed,
        drop_last=sampler.drop_last,
    )
    sampler.epoch = epoch
