"""Process groups whose members can change while they live.

`base` is the contract of such a group. `reconfigurable` implements what backends share; in it,
`rendezvous` is how the members find each other and `work` what a collective returns. `gloo` and
`nccl` hold what is particular to a backend, `gloo_sockets` how a blocked Gloo operation is ended.
`wrappers` stand in for a group in tests and integrations.
"""

from __future__ import annotations

import torch

from ft_core.errors import ProcessGroupError
from ft_core.process_group.base import ProcessGroup
from ft_core.process_group.gloo import ProcessGroupGloo
from ft_core.process_group.nccl import ProcessGroupNCCL
from ft_core.process_group.torch_versions import native_reconfigure_available
from ft_core.process_group.wrappers import (
    ErrorSwallowingProcessGroupWrapper,
    FakeProcessGroupWrapper,
    ManagedProcessGroup,
    ProcessGroupDummy,
    ProcessGroupWrapper,
)
from lighthouse.own_address import choose_address, outgoing_address


def process_group_for(device: torch.device, timeout_s: float) -> ProcessGroup:
    """A new group that reduces tensors on `device`; `timeout_s` bounds a collective in seconds.

    Raises ValueError for a device other than CPU and CUDA.
    """
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
