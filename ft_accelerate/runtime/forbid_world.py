"""Refuses the script's own use of torch.distributed's world, which is only its process.

`torch.distributed.all_reduce(x)` in a script would reduce over one process and look as if it had
worked. Libraries that know about process groups of their own are left alone.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ft_accelerate.runtime import process as processes

INSTEAD = {
    "all_reduce": "accelerator.reduce",
    "reduce": "accelerator.reduce",
    "all_gather": "accelerator.gather",
    "all_gather_into_tensor": "accelerator.gather",
    "gather": "accelerator.gather",
    "all_gather_object": "accelerate.utils.gather_object",
    "gather_object": "accelerate.utils.gather_object",
    "broadcast": "accelerate.utils.broadcast",
    "broadcast_object_list": "accelerate.utils.broadcast_object_list",
    "scatter": "accelerate.utils.broadcast",
    "barrier": "accelerator.wait_for_everyone",
    "reduce_scatter": "accelerator.reduce",
    "reduce_scatter_tensor": "accelerator.reduce",
}
_LIBRARIES = ("torch", "accelerate", "transformers", "trl", "peft", "datasets", "ft_accelerate")


def replacements() -> list[tuple[Any, str, Any]]:
    """(torch.distributed, name, guarded function)."""
    return [(dist, name, _guarded(name, getattr(dist, name))) for name in INSTEAD]


def _guarded(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        runtime = processes.active()
        if runtime is not None and runtime.num_processes > 1:
            group = kwargs.get("group")
            groups = [group] if group is not None else [a for a in args if _is_group(a)]
            caller = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
            if not any(g is not dist.group.WORLD for g in groups) and caller not in _LIBRARIES:
                raise RuntimeError(
                    f"torch.distributed.{name} reaches this process only, not the "
                    f"{runtime.num_processes} processes that train together: use {INSTEAD[name]}, or pass "
                    "the group that you mean"
                )
        return original(*args, **kwargs)

    return function


def _is_group(value: Any) -> bool:
    return isinstance(value, dist.ProcessGroup)
