"""What LocalSGD and DiLoCo are asked for, for a Trainer's strategy and for Fabric's alike."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.optim import Optimizer

from ft_core.diloco.diloco import DiLoCo, nesterov
from ft_core.diloco.local_sgd import LocalSGD
from ft_core.manager import Manager

if TYPE_CHECKING:

    class _Base:
        def __init__(self, **kwargs: Any) -> None: ...

else:
    _Base = object

Codec = Literal["int8", "int4", "fp8"]


class LocalSGDArguments(_Base):
    """Strategy for LocalSGD: replica groups train on their own and average their parameters.

    Each process is a replica group: it holds the whole model and may die at any time; the others
    lose nothing, and what dies with it is its own work since the last average.

    Args:
        sync_every: optimizer steps between two averages.
        weighted: weigh each group's parameters by the optimizer steps that it took.
        keep_windows: if an average fails because of somebody else, a group's work is kept and
            goes into the next one. False: it is dropped, and the group returns to the last average.
        bucket_bytes: how much travels in one piece.
        **kwargs: options of :class:`FTDDPStrategy`, such as ``min_replicas``.
    """

    strategy_name = "ft_local_sgd"
    _manager: Manager | None

    def __init__(
        self,
        sync_every: int = 10,
        weighted: bool = False,
        keep_windows: bool = True,
        bucket_bytes: int = 32 << 20,
        **kwargs: Any,
    ) -> None:
        said = locals()
        super().__init__(**kwargs)
        _positive("sync_every", sync_every)
        self._algorithm_options = _taken_by(LocalSGD, said)

    def _make_algorithm(self, module: torch.nn.Module, steps: Optimizer) -> Any:
        assert self._manager is not None
        return LocalSGD(self._manager, module, steps, **self._algorithm_options)


class DiLoCoArguments(_Base):
    """Strategy for DiLoCo and Streaming DiLoCo: replica groups train on their own, and an outer
    optimizer steps on how far they have drifted on average.

    Each process is a replica group: it holds the whole model and may die at any time; the others
    lose nothing, and what dies with it is its own work since the last outer step.

    Args:
        sync_every: optimizer steps in a window, in which each fragment has one outer step (H).
        outer_lr: learning rate of the outer optimizer, SGD with Nesterov momentum.
        outer_momentum: its momentum.
        outer_optimizer: makes another outer optimizer from the parameters, instead of the two
            above.
        fragments: in how many parts of about equal size the model is synchronized; or a list of
            parameter names for each.
        fragment_sync_delay: optimizer steps between sending a fragment and applying it, behind
            which communication hides (tau).
        fragment_update_alpha: how much of its own parameters a group keeps when a fragment is
            applied, 0 to 1.
        codec: what travels: "int8", "int4" or "fp8"; None: as it is.
        error_feedback: send what the codec has lost the next time.
        weighted: weigh each group's drift by the optimizer steps that it took.
        backup_device: where the global parameters are kept, such as "cuda"; None: in CPU memory.
        pin_memory: page-locked, if that is CPU memory and there is a CUDA device.
        keep_windows: if an outer step fails because of somebody else, a group's work is kept and
            goes into the next one. False: it is dropped, and the group returns to the global
            parameters.
        bucket_bytes: how much travels in one piece.
        **kwargs: options of :class:`FTDDPStrategy`, such as ``min_replicas``.
    """

    strategy_name = "ft_diloco"
    _manager: Manager | None

    def __init__(
        self,
        sync_every: int = 50,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        outer_optimizer: Callable[[Iterable[Any]], Optimizer] | None = None,
        fragments: int | list[list[str]] = 1,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float = 0.0,
        codec: Codec | None = None,
        error_feedback: bool = False,
        weighted: bool = False,
        backup_device: str | None = None,
        pin_memory: bool = True,
        keep_windows: bool = True,
        bucket_bytes: int = 32 << 20,
        **kwargs: Any,
    ) -> None:
        said = locals()
        super().__init__(**kwargs)
        _positive("sync_every", sync_every)
        if backup_device is not None:
            torch.device(backup_device)  # raises RuntimeError if there is no such kind
        default = nesterov(outer_lr, outer_momentum)  # checks both
        self._make_outer = outer_optimizer or default
        self._algorithm_options = _taken_by(DiLoCo, said)

    def _make_algorithm(self, module: torch.nn.Module, steps: Optimizer) -> Any:
        assert self._manager is not None
        outer = self._make_outer([p for p in module.parameters() if p.requires_grad])
        return DiLoCo(self._manager, module, steps, outer, **self._algorithm_options)


def _taken_by(algorithm: Any, said: dict[str, Any]) -> dict[str, Any]:
    """Those of the arguments `said` that `algorithm` takes under the same name."""
    names = inspect.signature(algorithm).parameters
    return {name: said[name] for name in names if name in said and name != "outer_optimizer"}


def _positive(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{name} must be positive, got {value}")
