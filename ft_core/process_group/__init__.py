"""Process groups whose members can change while they live.

`base` says what such a group promises, `mesh` how its members meet and are revoked, `gloo` and
`nccl` hold what is particular to a backend, `wrappers` and `dummy` what tests and trainers need.
`device_sockets` frees who is blocked in Gloo; `forgotten` sees out, at the process's end, what it can't.
"""

from __future__ import annotations

import torch

from ft_core.process_group.base import ProcessGroup
from ft_core.process_group.dummy import ProcessGroupDummy
from ft_core.process_group.errors import ProcessGroupError
from ft_core.process_group.gloo import ProcessGroupGloo, native_reconfigure_available
from ft_core.process_group.interfaces import choose_address, outgoing_address
from ft_core.process_group.nccl import ProcessGroupNCCL
from ft_core.process_group.wrappers import (
    ErrorSwallowingProcessGroupWrapper,
    FakeProcessGroupWrapper,
    ManagedProcessGroup,
    ProcessGroupWrapper,
)


def process_group_for(device: torch.device, timeout_s: float) -> ProcessGroup:
    """The group that reduces tensors on `device`. Raises ValueError if there is none."""
    if device.type == "cuda":
        return ProcessGroupNCCL(timeout_s)
    if device.type == "cpu":
        return ProcessGroupGloo(timeout_s)
    raise ValueError(f"fault tolerance trains on cpu and cuda, not on {device.type}")


__all__ = [
    "ErrorSwallowingProcessGroupWrapper",
    "FakeProcessGroupWrapper",
    "ManagedProcessGroup",
    "ProcessGroup",
    "ProcessGroupDummy",
    "ProcessGroupError",
    "ProcessGroupGloo",
    "ProcessGroupNCCL",
    "ProcessGroupWrapper",
    "choose_address",
    "native_reconfigure_available",
    "outgoing_address",
    "process_group_for",
]
