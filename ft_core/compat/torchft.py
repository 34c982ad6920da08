"""torchft's names (of its release 0.2.0) on this project's classes, for scripts that were written for it.

    from ft_core.compat.torchft import DistributedDataParallel, Manager, Optimizer
    from ft_core.compat.torchft.local_sgd import DiLoCo

A script, or a library such as torchtitan, whose imports stay as they are:

    python -m ft_core.compat.torchft train_ddp.py     # torchrun, too, takes -m ft_core.compat.torchft
    import ft_core.compat.torchft as torchft; torchft.install()  # at the top of a script

This file translates names, arguments and defaults, and holds no logic of its own. A name that is
not served can be imported; using it raises `NotImplementedError`, which says what to use instead.
Differences in meaning: docs/torchft.md.
"""

from __future__ import annotations

import importlib
import logging
import runpy
import sys
import types
from collections.abc import Callable, Sequence, Set
from datetime import timedelta
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ReduceOp, Work
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.futures import Future

import ft_core
from ft_core import process_group
from ft_core.diloco.diloco import extract_local_tensor
from ft_core.diloco.fragments import DEFAULT_BUCKET_BYTES
from ft_core.diloco.global_state import drifting, without
from ft_core.environment import torchft_settings
from ft_core.errors import OutsideStep
from ft_core.process_group import parameter_server
from ft_core.process_group.work import completed
from lighthouse import LighthouseConfig
from lighthouse import LighthouseServer as Server
from lighthouse.config import Timeouts

log = logging.getLogger("ft_core")
T = TypeVar("T")


class CheckpointTransport(Generic[T]):
    """Names a transport for states. Here they travel by the heal, whichever is named."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def send_checkpoint(self, *args: Any, **options: Any) -> NoReturn:
        """Raises NotImplementedError."""
        raise NotImplementedError(
            "a transport sends nothing by itself here: give the state to Manager.register_state_dict_fn"
        )

    recv_checkpoint = send_checkpoint

    def shutdown(self, wait: bool = True) -> None:
        """There is nothing to release."""


class HTTPTransport(CheckpointTransport[T]):
    """Takes torchft's `timeout` and `num_chunks`."""


class PGTransport(CheckpointTransport[T]):
    """Takes torchft's `pg`, `timeout`, `device` and `state_dict`."""


class ReducedTensor(Future[Tensor]):
    """What `Manager.allreduce` returns: a future, with what torchft's callers use of a `Work`."""

    def wait(self, timeout: timedelta | None = None) -> Tensor:  # type: ignore[override]
        """`timeout` is ignored: the manager's own timeout bounds each collective."""
        return super().wait()

    def get_future(self) -> ReducedTensor:
        """This future itself, under torchft's name for it."""
        return self


class TorchftManager(ft_core.Manager):
    """`ft_core.Manager` with torchft's arguments too; both have the same order.

    Where TORCHFT_TIMEOUT_SEC, TORCHFT_QUORUM_TIMEOUT_SEC or TORCHFT_CONNECT_TIMEOUT_SEC is set, it
    counts in place of the argument. `quorum_retries` has no effect: a lost lighthouse is looked for
    until `connect_timeout` is over.

    Raises NotImplementedError for a `checkpoint_transport` other than `HTTPTransport` and `PGTransport`.
    """

    _asked = False
    _drifting: Callable[[], Set[int]] | None = None

    def __init__(
        self,
        *args: Any,
        checkpoint_transport: CheckpointTransport[Any] | None = None,
        quorum_retries: int = 0,
        **options: Any,
    ) -> None:
        if type(checkpoint_transport) not in (type(None), HTTPTransport, PGTransport):
            raise NotImplementedError(
                "a checkpoint transport of your own is not called here: leave checkpoint_transport "
                "out, the state travels by the heal"
            )
        settings = torchft_settings()
        port = settings.pop("port", None)
        options |= {name: timedelta(seconds=seconds) for name, seconds in settings.items()}
        if port is not None:
            options.setdefault("port", port)
        super().__init__(*args, **options)

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]
    ) -> None:
        """As `ft_core.Manager`'s. Under LocalSGD and DiLoCo, which heal the model, the entries of the model
        and its optimizer stay here: `load_state_dict` finds this member's own."""

        def save() -> Any:
            state = state_dict()
            return state if self._drifting is None else without(state, self._drifting())

        def load(state: Any) -> None:
            local = self._drifting is not None and isinstance(state, dict)
            load_state_dict({**state_dict(), **state} if local else state)

        super().register_state_dict_fn(key, load, save)

    def leave_out(self, model: nn.Module, inner: torch.optim.Optimizer) -> None:
        """The model and its optimizer differ among members: no part of the state holds them."""
        self._drifting = lambda: drifting(model, inner)

    def start_quorum(  # type: ignore[override]
        self,
        allow_heal: bool = True,
        shrink_only: bool = False,
        timeout: timedelta | None = None,
    ) -> None:
        """As `ft_core.Manager`'s, without a room."""
        self._asked = True
        super().start_quorum(allow_heal=allow_heal, shrink_only=shrink_only, timeout=timeout)

    def allreduce(  # type: ignore[override]
        self,
        tensor: Tensor,
        should_quantize: bool = False,
        reduce_op: ReduceOp | ReduceOp.RedOpType = ReduceOp.AVG,
        *,
        divided_by: int = 1,
    ) -> ReducedTensor:
        """As `ft_core.Manager`'s."""
        result = ReducedTensor() if tensor.is_cpu else ReducedTensor(devices=[tensor.device])
        super().allreduce(
            tensor, should_quantize, reduce_op, divided_by=divided_by
        ).add_done_callback(lambda done: result.set_result(done.value()))
        return result

    def num_participants(self) -> int:
        """As `ft_core.Manager`'s; 0 before the first `start_quorum`."""
        return super().num_participants() if self._asked else 0

    def participating_rank(self) -> int | None:
        """As `ft_core.Manager`'s; None before the first `start_quorum`."""
        return super().participating_rank() if self._asked else None


class TorchftManagedProcessGroup(ft_core.ManagedProcessGroup):
    """`ft_core.ManagedProcessGroup`, whose reductions after the vote do not raise `OutsideStep`.

    No quorum vouches for a collective between two steps: its members may have changed. Such a
    reduction (torchtitan's mean of a loss) returns this member's own value, as if all had the same,
    and says so once.
    """

    _said = False

    def issue(self, operation: str, *args: Any, **kwargs: Any) -> Work:
        try:
            return super().issue(operation, *args, **kwargs)
        except OutsideStep:
            pass
        if not self._said:
            self._said = True
            log.warning(
                "a collective after optimizer.step() returns this replica group's own value: reduce "
                "before it for the value of all groups"
            )
        tensors, options = args[0], args[1]
        if options.reduceOp == ReduceOp.SUM:
            for tensor in tensors:
                tensor.mul_(max(1, self.size()))
        return completed(operation, args)


class TorchftDDP(ft_core.DistributedDataParallel):
    """`ft_core.DistributedDataParallel`; a forward pass may leave out parameters, as in torchft."""

    def __init__(self, manager: ft_core.Manager, module: nn.Module, **options: Any) -> None:
        super().__init__(manager, module, **{"find_unused_parameters": True, **options})


class TorchftLocalSGD(ft_core.LocalSGD):
    """`ft_core.LocalSGD`; the manager's state may hold the model."""

    JOINS_AT_ENTRY = False

    def __init__(
        self,
        manager: TorchftManager,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        sync_every: int,
    ) -> None:
        manager.leave_out(model, optimizer)
        super().__init__(manager, model, optimizer, sync_every)


class TorchftDiLoCo(ft_core.DiLoCo):
    """`ft_core.DiLoCo` with torchft's arguments: a list of fragments, one outer optimizer or one for each.

    The manager's state may hold the model. Values always travel in buckets, of `bucket_cap_mb` MiB.
    `should_quantize`: as int8 with a scale for each block.
    """

    JOINS_AT_ENTRY = False

    def __init__(
        self,
        manager: TorchftManager,
        model_fragments: list[nn.Module],
        inner_optimizer: torch.optim.Optimizer,
        outer_optimizer: torch.optim.Optimizer | list[torch.optim.Optimizer],
        sync_every: int,
        backup_device: torch.device | None = None,
        pin_memory: bool = True,
        use_bucketization: bool = False,
        bucket_cap_mb: int | None = None,
        should_quantize: bool = False,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float = 0.0,
    ) -> None:
        model = nn.ModuleList(model_fragments)
        manager.leave_out(model, inner_optimizer)
        super().__init__(
            manager,
            model,
            inner_optimizer,
            outer_optimizer,
            sync_every,
            backup_device,
            pin_memory,
            fragments=model_fragments,
            fragment_sync_delay=fragment_sync_delay,
            fragment_update_alpha=fragment_update_alpha,
            codec="int8" if should_quantize else None,
            bucket_bytes=DEFAULT_BUCKET_BYTES if bucket_cap_mb is None else bucket_cap_mb << 20,
        )


def ft_init_device_mesh(
    *,
    device_type: str,
    mesh_shape: Sequence[int],
    mesh_dim_names: Sequence[str],
    replicate_dim: int,
    manager: ft_core.Manager,
) -> DeviceMesh:
    """A mesh over the ranks of this replica group, of whose dimensions `replicate_dim` is the quorum.

    In torch's tables that dimension has one rank, whatever `mesh_shape` says of it, since a mesh can't
    change its size; collectives over it reach all participants. torch.distributed's default group
    must be that of the replica group.
    """
    sizes, names = list(mesh_shape), list(mesh_dim_names)
    replicate = names[replicate_dim]
    del sizes[replicate_dim], names[replicate_dim]
    local = init_device_mesh(device_type, tuple(sizes), mesh_dim_names=tuple(names))
    groups: list[dist.ProcessGroup] = [local.get_group(name) for name in names]
    groups.insert(replicate_dim, TorchftManagedProcessGroup(manager).register(replicate))
    ranks = local.mesh.unsqueeze(replicate_dim)
    return DeviceMesh.from_group(
        groups, device_type, mesh=ranks, mesh_dim_names=tuple(mesh_dim_names)
    )


class TorchftLighthouseServer(Server):
    """The lighthouse with torchft's arguments. `quorum_tick_ms` has no effect: nothing is polled."""

    def __init__(
        self,
        bind: str,
        min_replicas: int,
        join_timeout_ms: int | None = None,
        quorum_tick_ms: int | None = None,
        heartbeat_timeout_ms: int | None = None,
    ) -> None:
        given = {"join_timeout_s": join_timeout_ms, "heartbeat_timeout_s": heartbeat_timeout_ms}
        seconds = {name: ms / 1000 for name, ms in given.items() if ms is not None}
        timeouts = Timeouts.derive(Timeouts().timeout_s, **seconds)
        super().__init__(
            bind, config=LighthouseConfig(min_replicas=min_replicas, timeouts=timeouts)
        )


class TorchftParameterServer(parameter_server.ParameterServer):
    """`ParameterServer` with torchft's arguments. `store_port` has no effect: sessions need no store."""

    def __init__(self, port: int, store_port: int = 0) -> None:
        super().__init__(port)


class _NotServed:
    """A torchft name that is not here; `instead` says what is."""

    instead = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"torchft's {cls.__name__} is not here: {cls.instead}")


Manager, LocalSGD, DiLoCo = TorchftManager, TorchftLocalSGD, TorchftDiLoCo
DistributedDataParallel, ManagedProcessGroup = TorchftDDP, TorchftManagedProcessGroup
LighthouseServer, ManagedDeviceMesh = TorchftLighthouseServer, DeviceMesh
ParameterServer = TorchftParameterServer

_SERVED = {
    "checkpointing": "CheckpointTransport HTTPTransport",
    "checkpointing.http_transport": "HTTPTransport",
    "checkpointing.pg_transport": "PGTransport",
    "checkpointing.transport": "CheckpointTransport",
    "coordination": "LighthouseServer",
    "data": "DistributedSampler",
    "ddp": "DistributedDataParallel PureDistributedDataParallel",
    "device_mesh": "ManagedDeviceMesh ft_init_device_mesh",
    "local_sgd": "DiLoCo LocalSGD",
    "manager": "Manager WorldSizeMode",
    "optim": "Optimizer OptimizerWrapper",
    "parameter_server": "ParameterServer",
    "process_group": (
        "ErrorSwallowingProcessGroupWrapper FakeProcessGroupWrapper ManagedDeviceMesh ManagedProcessGroup "
        "ProcessGroup ProcessGroupDummy ProcessGroupGloo ProcessGroupNCCL ProcessGroupWrapper "
        "ft_init_device_mesh"
    ),
}
"""Modules of torchft, with their names that are here: in this file, or else in `ft_core`."""

_INSTEAD = {
    "coordination": {
        "groups coordinate through Manager": (
            "LighthouseClient ManagerClient ManagerServer Quorum QuorumMember"
        ),
    },
    "futures": {
        "Manager.wrap_future gives a future a timeout": (
            "context_timeout future_timeout future_wait stream_timeout"
        ),
    },
    "otel": {"FT_EVENT_LOG names a file for a run's events": "setup_logger"},
    "process_group": {
        "use ProcessGroupGloo or ProcessGroupNCCL, whose blocked operations end without a child, and "
        "whose group restarts if its process crashes": (
            "ProcessGroupBaby ProcessGroupBabyGloo ProcessGroupBabyNCCL ProcessGroupBabyXCCL"
        ),
        "use ProcessGroupGloo": "ProcessGroupXCCL",
    },
    "torchcomms": {"use ProcessGroupNCCL or ProcessGroupGloo": "ProcessGroupTorchComms"},
}
"""Modules of torchft, with what to use in place of names that this module lacks."""


def _ours(name: str) -> Any:
    home = ft_core if hasattr(ft_core, name) else process_group
    return globals().get(name) or getattr(home, name)


_names: dict[str, dict[str, Any]] = {
    module: {name: _ours(name) for name in names.split()} for module, names in _SERVED.items()
}
_names["local_sgd"]["extract_local_tensor"] = extract_local_tensor
for _module, _sentences in _INSTEAD.items():
    _names.setdefault(_module, {}).update(
        (name, type(name, (_NotServed,), {"instead": instead}))
        for instead, names in _sentences.items()
        for name in names.split()
    )


def __getattr__(name: str) -> Any:
    """`from ft_core.compat.torchft import NAME`: whichever module of torchft has it."""
    for names in _names.values():
        if name in names:
            return names[name]
    raise AttributeError(f"torchft has no {name!r} that this project knows: docs/torchft.md")


def _register(root: str) -> None:
    """Let `import root.local_sgd`, and so on, find the modules of this file, once `root` is imported."""
    for name, values in _names.items():
        module = types.ModuleType(f"{root}.{name}", "See `ft_core.compat.torchft`.")
        module.__dict__.update(values)
        sys.modules[module.__name__] = module
        parent, _, last = module.__name__.rpartition(".")
        setattr(sys.modules[parent], last, module)


def install() -> None:
    """Put these names in place of torchft, for all imports of this process from now on.

    Raises RuntimeError if torchft itself is imported already.
    """
    here = sys.modules[__name__]
    if sys.modules.get("torchft", here) is not here:
        raise RuntimeError("torchft is imported already: call install() before its first import")
    sys.modules["torchft"] = here
    _register("torchft")


def run(words: list[str]) -> None:
    """Run a script (`FILE ARGUMENT...`) or a module (`-m MODULE ARGUMENT...`) with torchft's names."""
    module = words[:1] == ["-m"]
    sys.argv = words[1:] if module else list(words)
    if not sys.argv:
        sys.exit("python -m ft_core.compat.torchft [-m MODULE | FILE] [ARGUMENT...]")
    install()
    if module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    importlib.import_module("ft_core.compat.torchft").run(sys.argv[1:])
else:
    _register(__name__)
