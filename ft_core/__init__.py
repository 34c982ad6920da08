"""Fault tolerance for a PyTorch training loop.

    from ft_core import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    manager = Manager(pg=ProcessGroupGloo(), load_state_dict=..., state_dict=...)
    model = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, torch.optim.AdamW(model.parameters()))

Names are loaded when they are first used: `import ft_core` loads neither torch nor ZeroMQ.

The folders are the map; why they are cut as they are: docs/design.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ft_core.collectives.sharded import replicate
    from ft_core.data import DistributedSampler
    from ft_core.ddp import DistributedDataParallel, PureDistributedDataParallel
    from ft_core.diloco.diloco import DiLoCo, LocalSGD
    from ft_core.errors import (
        FaultToleranceError,
        GroupBroken,
        GroupLeft,
        OutsideStep,
        QuorumUnavailable,
        StepInDoubt,
        TooManyDiscards,
    )
    from ft_core.manager import Manager
    from ft_core.optimizer import Optimizer, OptimizerWrapper
    from ft_core.process_group import (
        ErrorSwallowingProcessGroupWrapper,
        ManagedProcessGroup,
        ProcessGroup,
        ProcessGroupDummy,
        ProcessGroupGloo,
        ProcessGroupNCCL,
    )
    from ft_core.replica.status import WorldSizeMode
    from ft_core.shell.group_store import init_process_group
    from lighthouse.errors import JoinRefused, LighthouseUnavailable, TrainingOver

__version__ = "0.1.0"

_HOMES = {
    "DiLoCo": "ft_core.diloco.diloco",
    "DistributedDataParallel": "ft_core.ddp",
    "DistributedSampler": "ft_core.data",
    "ErrorSwallowingProcessGroupWrapper": "ft_core.process_group",
    "FaultToleranceError": "ft_core.errors",
    "GroupBroken": "ft_core.errors",
    "GroupLeft": "ft_core.errors",
    "JoinRefused": "lighthouse.errors",
    "LighthouseUnavailable": "lighthouse.errors",
    "LocalSGD": "ft_core.diloco.diloco",
    "ManagedProcessGroup": "ft_core.process_group",
    "Manager": "ft_core.manager",
    "Optimizer": "ft_core.optimizer",
    "OptimizerWrapper": "ft_core.optimizer",
    "OutsideStep": "ft_core.errors",
    "ProcessGroup": "ft_core.process_group",
    "ProcessGroupDummy": "ft_core.process_group",
    "ProcessGroupGloo": "ft_core.process_group",
    "ProcessGroupNCCL": "ft_core.process_group",
    "PureDistributedDataParallel": "ft_core.ddp",
    "QuorumUnavailable": "ft_core.errors",
    "StepInDoubt": "ft_core.errors",
    "TooManyDiscards": "ft_core.errors",
    "TrainingOver": "lighthouse.errors",
    "WorldSizeMode": "ft_core.replica.status",
    "init_process_group": "ft_core.shell.group_store",
    "replicate": "ft_core.collectives.sharded",
}

__all__ = [
    "DiLoCo",
    "DistributedDataParallel",
    "DistributedSampler",
    "ErrorSwallowingProcessGroupWrapper",
    "FaultToleranceError",
    "GroupBroken",
    "GroupLeft",
    "JoinRefused",
    "LighthouseUnavailable",
    "LocalSGD",
    "ManagedProcessGroup",
    "Manager",
    "Optimizer",
    "OptimizerWrapper",
    "OutsideStep",
    "ProcessGroup",
    "ProcessGroupDummy",
    "ProcessGroupGloo",
    "ProcessGroupNCCL",
    "PureDistributedDataParallel",
    "QuorumUnavailable",
    "StepInDoubt",
    "TooManyDiscards",
    "TrainingOver",
    "WorldSizeMode",
    "init_process_group",
    "replicate",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'ft_core' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
