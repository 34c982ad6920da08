"""Fault tolerance for a PyTorch training loop.

    from ft_core import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    manager = Manager(pg=ProcessGroupGloo(), load_state_dict=..., state_dict=...)
    model = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, torch.optim.AdamW(model.parameters()))

Names are loaded when they are first used: `import ft_core` loads neither torch nor ZeroMQ.

Modules. The training loop's side:

    manager            what a loop calls: quorum, all-reduce, vote; torchft's interface
    ddp                DistributedDataParallel whose gradients a manager averages
    optimizer          begins a step, and steps if it was committed
    buffers            running statistics that stay equal in all members
    data               DistributedSampler: shards by replica group, resumable
    state              which parts of a state heal, and how each is saved and loaded
    moments            memory for an optimizer's state, made before a process joins
    attempts           what algorithms see of a manager's attempt at a step
    telemetry          events of one rank, for logs, pictures, callbacks
    errors             the errors that a loop may see, by who is to blame

The step, underneath:

    replica            what one rank does next: the state machine (pure)
    standing           where a rank stands: the machine's values (pure)
    effects            what it asks of its shell (pure)
    world              who contributes, how sums are scaled; what ranks of a group hold
    session            one life with a lighthouse: addresses, threads, timers
    control            the machine's socket, clock and threads
    plane              what effects act on: process group, heal transport
    config             options that the environment may fill
    local              a lighthouse on this machine for those who name none

Bytes:

    process_group      Gloo and NCCL groups whose members change
    reduction          one all-reduce of a step, and who waits for it
    allreduce          scaling, neutral elements, futures; no process group
    rows               a row of numbers from each member, before data moves
    codecs             int8, int4, fp8: numbers as bytes
    quantized          all-reduce of those, with the same bits everywhere
    heal               states from peer to peer

Replica groups of several ranks, and processes:

    group              several ranks, one voice: the leader's state machine (pure)
    group_server       its sockets, and how the ranks find it
    in_group           what ranks of a group say to each other outside of steps
    rank_group         starts and ends the ranks of a group on this machine
    supervisor         one child a replica group, started again when it dies
    sigterm            told to end: the step under way is the last one
    import_hook        acts on a module that somebody else imports later

LocalSGD and DiLoCo:

    local_sgd, diloco  the two algorithms
    outer              what both do between inner steps
    outer_flight       one outer step's communication
    diloco_schedule    which fragment is sent and applied when (pure)
    windows            what was done since a fragment's last outer step (pure)
    fragments          parts of a model, and their layout in buckets
    global_state       what all members have in common: the state that heals

A run afterwards:

    run_record         what happened, from the replica groups' events
    timeline           the picture of it

Why they are cut as they are: docs/design.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ft_core.data import DistributedSampler
    from ft_core.ddp import DistributedDataParallel, PureDistributedDataParallel
    from ft_core.diloco.diloco import DiLoCo
    from ft_core.diloco.local_sgd import LocalSGD
    from ft_core.errors import (
        FaultToleranceError,
        GroupBroken,
        GroupLeft,
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
    from ft_core.replica.participation import WorldSizeMode

__version__ = "0.1.0"

_HOMES = {
    "DiLoCo": "ft_core.diloco.diloco",
    "DistributedDataParallel": "ft_core.ddp",
    "DistributedSampler": "ft_core.data",
    "ErrorSwallowingProcessGroupWrapper": "ft_core.process_group",
    "FaultToleranceError": "ft_core.errors",
    "GroupBroken": "ft_core.errors",
    "GroupLeft": "ft_core.errors",
    "LocalSGD": "ft_core.diloco.local_sgd",
    "ManagedProcessGroup": "ft_core.process_group",
    "Manager": "ft_core.manager",
    "Optimizer": "ft_core.optimizer",
    "OptimizerWrapper": "ft_core.optimizer",
    "ProcessGroup": "ft_core.process_group",
    "ProcessGroupDummy": "ft_core.process_group",
    "ProcessGroupGloo": "ft_core.process_group",
    "ProcessGroupNCCL": "ft_core.process_group",
    "PureDistributedDataParallel": "ft_core.ddp",
    "QuorumUnavailable": "ft_core.errors",
    "StepInDoubt": "ft_core.errors",
    "TooManyDiscards": "ft_core.errors",
    "WorldSizeMode": "ft_core.replica.participation",
}

__all__ = [
    "DiLoCo",
    "DistributedDataParallel",
    "DistributedSampler",
    "ErrorSwallowingProcessGroupWrapper",
    "FaultToleranceError",
    "GroupBroken",
    "GroupLeft",
    "LocalSGD",
    "ManagedProcessGroup",
    "Manager",
    "Optimizer",
    "OptimizerWrapper",
    "ProcessGroup",
    "ProcessGroupDummy",
    "ProcessGroupGloo",
    "ProcessGroupNCCL",
    "PureDistributedDataParallel",
    "QuorumUnavailable",
    "StepInDoubt",
    "TooManyDiscards",
    "WorldSizeMode",
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
