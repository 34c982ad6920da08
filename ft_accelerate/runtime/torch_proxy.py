"""torch.distributed under fault tolerance: for Accelerate's modules the world is made of all replica
groups, and a script's own use of the world, which is only its process, is refused.

Accelerate's functions look up the global name `torch` of their module when they run. Giving four of
its modules another value for that name changes `gather`, `reduce`, `broadcast`, ... for everyone, also
for code that has imported these functions before. torch itself stays as it is, except for the refusal:
`torch.distributed.all_reduce(x)` in a script would reduce over one process and look as if it had
worked. Libraries that know about process groups of their own are left alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ft_accelerate.runtime import process as processes


class TorchProxy:
    """`module`, with `names` in the place of its own while fault tolerance is on."""

    def __init__(self, module: Any, **names: Any) -> None:
        self.__dict__.update(_module=module, _names=names)

    def __getattr__(self, name: str) -> Any:
        if name in self._names and processes.active() is not None:
            return self._names[name]
        return getattr(self._module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)

    def __repr__(self) -> str:
        return f"<{self._module.__name__}, as seen by ft_accelerate>"


def distributed_proxy(**names: Any) -> TorchProxy:
    """torch with `names` in `torch.distributed` replaced."""
    return TorchProxy(torch, distributed=TorchProxy(dist, **names))


def ddp_proxy(ddp_class: Any, **names: Any) -> TorchProxy:
    """As `distributed_proxy`, with `torch.nn.parallel.DistributedDataParallel` replaced, too."""
    parallel = TorchProxy(torch.nn.parallel, DistributedDataParallel=ddp_class)
    nn = TorchProxy(torch.nn, parallel=parallel)
    return TorchProxy(torch, distributed=TorchProxy(dist, **names), nn=nn)


# ---------------------------------------------------------------------- the script's own use


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


def refuse_own_use(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.distributed`'s function `name`, which refuses the script's own use of the world."""

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
