"""Make a reconfigurable group known to torch.distributed.

Most functions of `torch.distributed` only call the group they are given and need no registration.
DeviceMesh, the functional collectives and `get_process_group_ranks` look a group up by name or in
torch's tables, so a backend that answers with this group is registered and a one-rank group is
made with it: sizes in those tables are fixed, ours are not.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def register(group: Any, name: str) -> None:
    """See `ProcessGroup.register`. Raises `ValueError` when registered already or the name is
    taken, `RuntimeError` without a default group. Not thread-safe: call it at set-up."""
    if not dist.is_initialized():
        raise RuntimeError(
            "register() needs torch.distributed's default group; call init_process_group first"
        )
    if group._registered is not None:
        raise ValueError("this process group is registered already")
    backend_name = f"{group.getBackendName()}-{name}"
    if backend_name in dist.Backend.backend_list:
        raise ValueError(f"a process group is registered as {backend_name!r}; take another name")

    def this_group(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return group

    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    dist.Backend.register_backend(backend_name, this_group, devices=devices)
    try:
        dist.new_group(
            ranks=[dist.get_rank()],
            backend=backend_name,
            group_desc=backend_name,
            use_local_synchronization=True,  # only this rank makes it
        )
    except BaseException:
        _forget(backend_name)
        raise
    group._registered = (group.group_name, backend_name)


def unregister(group: Any) -> None:
    """See `ProcessGroup.unregister`."""
    if group._registered is None:
        return
    group_name, backend_name = group._registered
    group._registered = None
    # destroy_process_group() would shut the group down, and this one may live on.
    world = dist.distributed_c10d._world
    for table in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config):
        table.pop(group, None)
    tag = world.pg_to_tag.pop(group, None)
    for each in (tag or "", ""):
        if group in world.tags_to_pg.get(each, []):
            world.tags_to_pg[each].remove(group)
    try:
        torch._C._distributed_c10d._unregister_process_group(group_name)  # type: ignore[arg-type]
    except RuntimeError:  # destroy_process_group() was here before
        pass
    _forget(backend_name)


def _forget(backend_name: str) -> None:
    backends = dist.Backend
    if backend_name in backends.backend_list:
        backends.backend_list.remove(backend_name)
    backends._plugins.pop(backend_name.upper(), None)
    backends.backend_type_map.pop(backend_name, None)
    backends.backend_capability.pop(backend_name, None)
    if hasattr(backends, backend_name.upper()):
        delattr(backends, backend_name.upper())
