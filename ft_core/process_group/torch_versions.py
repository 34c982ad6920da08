"""What differs between the torch versions that this package runs on.

The one place that knows. Each function looks for the thing itself in this torch and compares no numbers:
a build may lack what its number promises. Arguments that ask for what is missing are refused in a
sentence.

| | 2.11, 2.12 | 2.13 | 2.14 and later |
|---|---|---|---|
| argument of torch's DDP for buffers in forward | `broadcast_buffers` | `forward_sync_buffers` | the same |
| a Gloo group that takes other members | no: a new one for each quorum | no | yes |
| groups of parameters in an FSDP module | one at most (2.11) | several | several |
| FSDP drops what a pass that has raised leaves | no | no | `reset_iter_state`; in 2.15 also the gradients that are not reduced |
| NCCL | the classic backend | the classic backend | `nccl2`, or the classic backend |

CONTRIBUTING.md has the command that tests with the oldest.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import parallel

OLDEST = (2, 11)
"""Major and minor number of the oldest version, which pyproject.toml asks for, too."""

_BUFFERS_IN_FORWARD = "forward_sync_buffers"


def native_reconfigure_available() -> bool:
    """Whether this torch can give a Gloo group other members (2.14 and later)."""
    return hasattr(dist.ProcessGroupGloo, "reconfigure")


def nccl2_available() -> bool:
    """Whether this torch has the `nccl2` backend (2.14 and later), whose groups take other members."""
    return hasattr(dist.distributed_c10d, "ProcessGroupNCCL2")


def native_or_not(asked: bool | None, available: bool, what: str) -> bool:
    """What a group's argument `native` comes to: None takes what is available.

    Raises ValueError if it asks for what this torch does not have.
    """
    if asked and not available:
        raise ValueError(
            f"torch {torch.__version__} has no {what} (2.14 and later have it): drop native"
        )
    return available if asked is None else asked


def ddp_arguments() -> list[str]:
    """Names of the arguments that torch's DistributedDataParallel has here, and of those that ours has
    with every torch."""
    named = inspect.signature(parallel.DistributedDataParallel).parameters
    return list(dict.fromkeys([*named, _BUFFERS_IN_FORWARD]))


def ddp_without_buffers() -> dict[str, Any]:
    """Arguments with which torch's DistributedDataParallel leaves buffers alone in forward.

    The old name is a FutureWarning where there is the new one.
    """
    named = inspect.signature(parallel.DistributedDataParallel).parameters
    return {_BUFFERS_IN_FORWARD if _BUFFERS_IN_FORWARD in named else "broadcast_buffers": False}


def forget_raised_passes(module: Any) -> None:
    """If this module is a root of FSDP's: drop what FSDP holds of forwards and backwards that have raised. Gradients
    that it has reduced stay. Call it before a forward."""
    state = module._get_fsdp_state()
    if not state._is_root:
        return
    shared = state._state_ctx
    # One that several modules share may be between forwards of theirs.
    alone = (each for each in shared.all_states if len(each._modules) == 1)
    if not shared.post_backward_final_callback_queued and all(
        each._training_state.name == "IDLE" for each in alone
    ):
        return
    groups = [group for each in shared.all_states for group in _groups_of_parameters(each)]
    parameters = [parameter for group in groups for parameter in group.fsdp_params]
    for parameter in parameters:
        if "unsharded_accumulated_grad" in vars(parameter):  # up to 2.14
            parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None
    if hasattr(module, "reset_iter_state"):
        reduced = [parameter.sharded_param.grad for parameter in parameters]
        module.reset_iter_state()
        for parameter, gradient in zip(parameters, reduced, strict=True):
            parameter.sharded_param.grad = gradient
        return
    for group in groups:
        group._partial_reduce_output = None
        group._training_state = type(group._training_state).POST_BACKWARD  # nothing to reduce
    is_last, shared.is_last_backward = shared.is_last_backward, True
    state._root_post_backward_final_callback()
    shared.is_last_backward, shared.iter_forward_root = is_last, None
    for group in groups:
        group.reshard()


def _groups_of_parameters(state: Any) -> list[Any]:
    """In which FSDP gathers those of a module; one at most up to 2.12."""
    several = getattr(state, "_fsdp_param_groups", None)
    found = [state._fsdp_param_group] if several is None else several
    return [group for group in found if group is not None]
