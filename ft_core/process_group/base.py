"""The interface of a reconfigurable process group, and its place in torch.distributed.

A group spans the ranks with one `group_rank` in all replica groups of a quorum. It is made once,
and given other members with every new quorum:

1. `address()` travels to the others in the join message.
2. `configure(quorum_id, rank, addresses, timeout_s)` on every member, with the same addresses.
3. Collectives, each of which returns a `Work`.
4. `revoke(reason)` when a member is lost: all that this member waits for ends with an error now.
   Then 2 again, with a higher `quorum_id`.

Before the first `configure` and after a `revoke` a collective returns a failed `Work`; it does not
raise. `configure` and `revoke` come from a control thread; whoever calls `configure` makes sure
that no other thread issues collectives meanwhile, or they may run under the new quorum.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp, Work
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from ft_core.process_group.registration import register, unregister
from ft_core.process_group.work import CompletedWork

Tensors = list[torch.Tensor] | torch.Tensor


class ProcessGroup(dist.ProcessGroup):
    """A torch.distributed process group whose members can change.

    The collectives have the signatures of c10d's groups, so that `torch.distributed.all_reduce(t,
    group=pg)` and DistributedDataParallel take one. Their number of ranks differs over time:
    don't cache `size()`.
    """

    def __init__(self) -> None:
        super().__init__(0, 1)  # torch's own idea of rank and size; overridden below
        self._group_name = ""
        self._group_desc = ""
        self._registered: tuple[str, str] | None = None  # group name, backend name

    # --- membership

    @abstractmethod
    def address(self) -> bytes:
        """How other members reach this group: opaque, under 300 bytes, stable for its life."""

    @abstractmethod
    def configure(
        self, quorum_id: int, rank: int, addresses: Sequence[bytes], timeout_s: float
    ) -> None:
        """Meet the other members and connect; blocks until collectives can be issued.

        `addresses` are ordered by replica rank and the same on every member; `quorum_id` is higher
        than every one before (`ValueError` otherwise) and the same on every member. Revokes
        whatever was configured before. Raises `ProcessGroupError` when a member is missing at the
        timeout, dies, or when `revoke` is called meanwhile; then the group stays revoked.
        """

    @abstractmethod
    def revoke(self, reason: Exception, *, quorum_id: int | None = None) -> None:
        """End every pending collective of this member with an error, and refuse later ones.

        Any thread, any time, also during `configure`; returns within about a millisecond and may
        be repeated. With `quorum_id`, does nothing if that quorum is not the current one any more.
        """

    def advertise(self, host: str) -> None:
        """Use the address `host` unless the constructor was given one; before `address`."""

    bound_quorum: int | None = None

    def bind(self, quorum_id: int | None) -> None:
        """Refuse collectives under any other quorum, until the next call (None: allow all).

        The members may change between two collectives of one step; one that belongs to the old
        quorum must not meet those of the new one (Gloo aborts the process on a mismatch).
        """
        self.bound_quorum = quorum_id

    @property
    def quorum_id(self) -> int:
        """Of the last `configure`; -1 before the first."""
        return -1

    @abstractmethod
    def errored(self) -> Exception | None:
        """The first error since `configure` began (a revocation counts), or None."""

    @abstractmethod
    def shutdown(self) -> None:
        """Revoke and give back every descriptor and thread. Idempotent; ends the group's life."""

    @abstractmethod
    def _issue(self, operation: str, *args: Any, **kwargs: Any) -> Work:
        """Start a collective."""

    def abort(self) -> None:
        """torch's name for `revoke`."""
        from ft_core.process_group.errors import ProcessGroupError

        self.revoke(ProcessGroupError("abort() was called"))

    # --- torch.distributed's view; the get* names are those that C++ calls

    @abstractmethod
    def size(self) -> int:
        """Members of the current quorum; 1 before the first."""

    @abstractmethod
    def rank(self) -> int:
        """This member's replica rank; 0 before the first quorum."""

    @abstractmethod
    def getBackendName(self) -> str:
        """The backend's name, as torch.distributed prints it."""

    def getSize(self) -> int:
        return self.size()

    def getRank(self) -> int:
        return self.rank()

    def _get_backend_name(self) -> str:
        return self.getBackendName()

    def name(self) -> str:
        return self.getBackendName()

    # torch keeps a group's name in its C++ backends, of which this group has none.

    def _set_group_name(self, name: str) -> None:  # type: ignore[override]
        self._group_name = name

    def getGroupName(self) -> str:
        return self._group_name

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._group_name

    def _set_group_desc(self, desc: str) -> None:
        self._group_desc = desc

    def getGroupDesc(self) -> str:
        return self._group_desc

    @property
    def group_desc(self) -> str:
        return self._group_desc

    def register(self, name: str) -> None:
        """Make the group known to torch.distributed under `name`, for DeviceMesh and the
        functional collectives, which look groups up.

        Needs an initialized default group (that of the replica group). In torch's tables the group
        then has one rank, as a mesh can't change its size; collectives reach all members.
        `unregister` takes it back.
        """
        register(self, name)

    def unregister(self) -> None:
        """Undo `register`; does nothing when not registered."""
        unregister(self)

    # --- collectives (c10d's names and arguments)

    def allreduce(
        self, tensors: Tensors, opts: Any = None, timeout: timedelta | None = None
    ) -> Work:  # type: ignore[override]
        """Reduce in place over all members. `opts`: AllreduceOptions or a ReduceOp (SUM)."""
        options = opts
        if not isinstance(opts, AllreduceOptions):
            options = AllreduceOptions()
            options.reduceOp = ReduceOp.SUM if opts is None else opts
        if timeout is not None:
            options.timeout = timeout
        return self._issue("allreduce", _listed(tensors), options)

    def start_allreduce(self, tensors: list[torch.Tensor], opts: AllreduceOptions) -> Work:
        """`allreduce` for a caller that is sure to call `wait()`, soon and in one thread only, and
        needs no future. A failure may show then, and not before."""
        return self.allreduce(tensors, opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:  # type: ignore[override]
        options = AllreduceCoalescedOptions() if opts is None else opts
        return self._issue("allreduce_coalesced", _listed(tensors), options)

    def broadcast(
        self, tensors: Tensors, opts: Any = None, timeout: timedelta | None = None
    ) -> Work:  # type: ignore[override]
        """Send from one member to all. `opts`: BroadcastOptions or the root's rank (0)."""
        options = opts
        if not isinstance(opts, BroadcastOptions):
            options = BroadcastOptions()
            options.rootRank = 0 if opts is None else opts
        if timeout is not None:
            options.timeout = timeout
        return self._issue("broadcast", _listed(tensors), options)

    def barrier(self, opts: Any = None) -> Work:  # type: ignore[override]
        options = opts
        if not isinstance(opts, BarrierOptions):
            options = BarrierOptions()
            if isinstance(opts, timedelta):
                options.timeout = opts
        return self._issue("barrier", options)

    def reduce(self, tensors: Tensors, opts: Any = None) -> Work:  # type: ignore[override]
        options = ReduceOptions() if opts is None else opts
        return self._issue("reduce", _listed(tensors), options)

    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:  # type: ignore[override]
        options = AllgatherOptions() if opts is None else opts
        if isinstance(input_tensors, torch.Tensor):
            output_tensors, input_tensors = [output_tensors], [input_tensors]
        return self._issue("allgather", output_tensors, input_tensors, options)

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:  # type: ignore[override]
        options = AllgatherOptions() if opts is None else opts
        return self._issue("_allgather_base", output, input, options)

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> Work:  # type: ignore[override]
        return self._allgather_base(output, input, opts)

    def allgather_coalesced(self, output_lists: Any, input_list: Any, opts: Any = None) -> Work:  # type: ignore[override]
        options = AllgatherOptions() if opts is None else opts
        return self._issue("allgather_coalesced", output_lists, input_list, options)

    def gather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:  # type: ignore[override]
        options = GatherOptions() if opts is None else opts
        return self._issue("gather", output_tensors, input_tensors, options)

    def scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:  # type: ignore[override]
        options = ScatterOptions() if opts is None else opts
        return self._issue("scatter", output_tensors, input_tensors, options)

    def reduce_scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:  # type: ignore[override]
        """Reduce and scatter. `opts`: ReduceScatterOptions or a ReduceOp (SUM)."""
        if isinstance(output_tensors, torch.Tensor):
            output_tensors, input_tensors = [output_tensors], [input_tensors]
        return self._issue(
            "reduce_scatter", output_tensors, input_tensors, _reduce_scatter_options(opts)
        )

    def _reduce_scatter_base(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> Work:  # type: ignore[override]
        return self._issue("_reduce_scatter_base", output, input, _reduce_scatter_options(opts))

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> Work:  # type: ignore[override]
        return self._reduce_scatter_base(output, input, opts)

    def alltoall(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:  # type: ignore[override]
        options = AllToAllOptions() if opts is None else opts
        return self._issue("alltoall", output_tensors, input_tensors, options)

    def alltoall_base(  # type: ignore[override]
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any = None,
    ) -> Work:
        options = AllToAllOptions() if opts is None else opts
        return self._issue(
            "alltoall_base", output, input, output_split_sizes, input_split_sizes, options
        )

    def all_to_all_single(self, *args: Any, **kwargs: Any) -> Work:  # type: ignore[override]
        return self.alltoall_base(*args, **kwargs)

    def send(self, tensors: Tensors, dst_rank: int, tag: int = 0) -> Work:  # type: ignore[override]
        return self._issue("send", _listed(tensors), dst_rank, tag)

    def recv(self, tensors: Tensors, src_rank: int, tag: int = 0) -> Work:  # type: ignore[override]
        return self._issue("recv", _listed(tensors), src_rank, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:  # type: ignore[override]
        """Refused: a receive that names no member can't be freed when a member is lost."""
        raise NotImplementedError("recv_anysource can't be revoked; name the source with recv")


def _listed(tensors: Tensors) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _reduce_scatter_options(opts: Any) -> Any:
    if isinstance(opts, ReduceScatterOptions):
        return opts
    options = ReduceScatterOptions()
    options.reduceOp = ReduceOp.SUM if opts is None else opts
    return options


def outputs_of(operation: str, args: tuple[Any, ...]) -> Any:
    """What the future of a collective holds when it is done, from its arguments."""
    if operation == "barrier":
        return []
    if operation in ("_allgather_base", "_reduce_scatter_base", "alltoall_base"):
        return [args[0]]
    return args[0]


def completed(operation: str, args: tuple[Any, ...]) -> Work:
    """A collective that did nothing and is done."""
    return CompletedWork(outputs_of(operation, args))
