"""The interface of a reconfigurable process group, and its place in torch.distributed.

A group spans the ranks with one `group_rank` in all replica groups of a quorum. It is made once,
and gets other members with every new quorum:

1. `address()` travels to the others in the join message.
2. `configure(quorum_id, rank, addresses, timeout_s)` on every member, with the same addresses.
3. Collectives, each of which returns a `Work`.
4. `revoke(reason)` when a member is lost: all collectives that this member waits for end with an
   error now. Then 2 again, with a higher `quorum_id`.

Before the first `configure` and after a `revoke` a collective returns a failed `Work`; it does not
raise. `configure` and `revoke` are called by a control thread. While `configure` runs, no other
thread may issue collectives, or they may run under the new quorum.

Registration. Most functions of `torch.distributed` only call the group they are given. DeviceMesh,
the functional collectives and `get_process_group_ranks` look a group up by name or in torch's
tables. For them `register` registers a backend that answers with this group, and makes a group of
one rank with it: sizes in those tables are fixed, ours are not.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Self

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

from ft_core.errors import ProcessGroupError

Tensors = list[torch.Tensor] | torch.Tensor


class ProcessGroup(dist.ProcessGroup):
    """A torch.distributed process group whose members can change.

    The collectives have the signatures of c10d's groups, so that `torch.distributed.all_reduce(t,
    group=pg)` and DistributedDataParallel take one. The number of members differs over time: don't
    cache `size()`. Collectives may be issued by any thread, in the same order on every member.
    """

    bound_quorum: int | None = None

    def __init__(self) -> None:
        # torch's own idea of rank and size; overridden below
        super().__init__(0, 1)  # type: ignore[call-arg]  # 2.14's stub asks for a store
        self._group_name = ""
        self._group_desc = ""
        self._registered: tuple[str, str] | None = None  # group name, backend name
        self.missed_listener: Callable[[Sequence[int]], object] = lambda missed: None
        self.silent_listener: Callable[[Sequence[int]], object] = lambda silent: None

    # --- membership

    @abstractmethod
    def address(self) -> bytes:
        """How other members reach this group: opaque, under 300 bytes, the same for its whole life.

        Any thread. Raises `ProcessGroupError` after `shutdown`.
        """

    @abstractmethod
    def configure(
        self, quorum_id: int, rank: int, addresses: Sequence[bytes], timeout_s: float
    ) -> None:
        """Connect to the other members; blocks until collectives can be issued. Control thread.

        `addresses` are ordered by replica rank and the same on every member. `quorum_id` is the
        same on every member and higher than all before (`ValueError` otherwise). Revokes the
        previous quorum. Raises `ProcessGroupError` when a member is missing after `timeout_s`
        seconds, when one dies or can't be connected to, or when `revoke` is called meanwhile; the
        group stays revoked then. The error names the members that could not be connected to
        (`missed`); it should come within about a second where that is so.
        """

    def when_missed(self, listener: Callable[[Sequence[int]], object]) -> None:
        """Have `listener` called with the members that a `configure` could not connect to, before the
        others notice that this one gives up: the cause is then known before its consequences. In
        the thread of `configure`."""
        self.missed_listener = listener

    def when_silent(self, listener: Callable[[Sequence[int]], object]) -> None:
        """Have `listener` called again and again while a `configure` takes longer than a connection
        may, with the members that can be connected to and have not been heard from. In the thread of
        `configure`."""
        self.silent_listener = listener

    def unreachable(self, addresses: Sequence[bytes], timeout_s: float) -> set[int]:
        """Indices of those `addresses` (of other groups) that can't be connected to from here.

        Any thread; blocks for about a second. The default does not know, and returns none.
        """
        return set()

    @abstractmethod
    def revoke(self, reason: Exception, *, quorum_id: int | None = None) -> None:
        """End every pending collective of this member with an error, and refuse later ones.

        Any thread, at any time, also during `configure`. Idempotent; returns within about a
        millisecond. With `quorum_id`, does nothing unless that quorum is the current one.
        """

    def advertise(self, host: str) -> None:
        """Use the address `host` unless the constructor was given one. Before `address`."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Bound collectives by `timeout` from the next `configure` on. Any thread. Raises ValueError
        unless it is positive, NotImplementedError where the group has no timeout of its own."""
        raise NotImplementedError(f"{self.getBackendName()} has no timeout of its own")

    def bind(self, quorum_id: int | None) -> None:
        """Refuse collectives under any other quorum, until the next call (None: allow all).

        The members may change between two collectives of one step. A collective of the old quorum
        must not meet those of the new one: Gloo aborts the process on a mismatch. Any thread.
        """
        self.bound_quorum = quorum_id

    @property
    def quorum_id(self) -> int:
        """Of the last `configure`; -1 before the first."""
        return -1

    def unanswered(self) -> set[int]:
        """Members that a collective waits for in vain: their machines acknowledge nothing of what is sent
        to them, so they can no longer be reached. This member itself stands for a machine that can't be
        identified. The default does not know, and returns none. Any thread; quick."""
        return set()

    @property
    def idle(self) -> bool:
        """Whether the group is configured, has not failed, and no collective of it is under way."""
        return False

    @property
    def under_way(self) -> bool:
        """Whether a collective of the group has not ended: on a device, whatever its work and its future
        say. The default does not know. Any thread; quick."""
        return False

    on_device = True
    """Whether collectives may run on a device: only then `capturing` and `settle` have something to say."""

    def settle(self) -> Exception | None:
        """Block until no collective of the bound quorum (`bind`) is under way on its device; returns the
        error of one that has failed there.

        Where works end by stream order, this is what tells whether they have reduced anything. The
        default does nothing: there, works end with their collectives. Any thread.
        """
        return None

    @property
    def capturing(self) -> bool:
        """Whether the calling thread captures a graph, so that a collective would be refused."""
        return False

    @abstractmethod
    def errored(self) -> Exception | None:
        """The first error since `configure` began (a revocation counts), or None."""

    @abstractmethod
    def shutdown(self) -> None:
        """Revoke, and release every descriptor and thread. Idempotent; it can't be used again."""

    @abstractmethod
    def issue(self, operation: str, *args: Any, **kwargs: Any) -> Work:
        """Start the collective `operation` (c10d's name) with c10d's arguments.

        A failure shows in the work. Raises `TypeError` and `ValueError` for bad arguments, and
        `NotImplementedError` for what the backend does not have.
        """

    def abort(self) -> None:
        """torch's name for `revoke`."""
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
        """As `size`."""
        return self.size()

    def getRank(self) -> int:
        """As `rank`."""
        return self.rank()

    def _get_backend_name(self) -> str:
        return self.getBackendName()

    def name(self) -> str:
        """As `getBackendName`."""
        return self.getBackendName()

    # torch keeps a group's name in its C++ backends, of which this group has none.

    def _set_group_name(self, name: str) -> None:  # type: ignore[override]
        self._group_name = name

    def getGroupName(self) -> str:
        """As `group_name`."""
        return self._group_name

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """The name under which torch.distributed knows the group (`register`), or ""."""
        return self._group_name

    def _set_group_desc(self, desc: str) -> None:
        self._group_desc = desc

    def getGroupDesc(self) -> str:
        """As `group_desc`."""
        return self._group_desc

    @property
    def group_desc(self) -> str:
        """A description for logs, as torch's own groups have one."""
        return self._group_desc

    def register(self, name: str) -> Self:
        """Make the group known to torch.distributed under `name`, for DeviceMesh and the
        functional collectives, which look groups up. Returns the group.

        In torch's tables the group has one rank, as a mesh can't change its size; collectives reach
        all members. `unregister` takes it back. Not thread-safe: call it at set-up. Raises
        `RuntimeError` without a default group (that of the replica group), and `ValueError` when
        the group is registered already or the name is taken.
        """
        if not dist.is_initialized():
            raise RuntimeError(
                "register() needs torch.distributed's default group; call init_process_group first"
            )
        if self._registered is not None:
            raise ValueError("this process group is registered already")
        backend_name = f"{self.getBackendName()}-{name}"
        if backend_name in dist.Backend.backend_list:
            raise ValueError(
                f"a process group is registered as {backend_name!r}; take another name"
            )

        def this_group(store: Any, rank: int, size: int, timeout: Any) -> Any:
            return self

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
            _remove_backend(backend_name)
            raise
        self._registered = (self.group_name, backend_name)
        return self

    def unregister(self) -> None:
        """Undo `register`; does nothing when the group is not registered."""
        if self._registered is None:
            return
        group_name, backend_name = self._registered
        self._registered = None
        # destroy_process_group() would shut the group down, and this one may live on.
        world = dist.distributed_c10d._world
        for table in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config):
            table.pop(self, None)  # type: ignore[attr-defined]
        tag = world.pg_to_tag.pop(self, None)
        for each in (tag or "", ""):
            if self in world.tags_to_pg.get(each, []):
                world.tags_to_pg[each].remove(self)
        try:
            torch._C._distributed_c10d._unregister_process_group(group_name)  # type: ignore[arg-type]
        except RuntimeError:  # destroy_process_group() has done it already
            pass
        _remove_backend(backend_name)

    # --- collectives: c10d's names and arguments; each reaches all members, and `opts` left out are
    # c10d's defaults

    def allreduce(
        self, tensors: Tensors, opts: Any = None, timeout: timedelta | None = None
    ) -> Work:  # type: ignore[override]
        """Reduce `tensors` in place over all members. `opts`: AllreduceOptions or a ReduceOp (SUM)."""
        options = opts
        if not isinstance(opts, AllreduceOptions):
            options = AllreduceOptions()
            options.reduceOp = ReduceOp.SUM if opts is None else opts
        if timeout is not None:
            options.timeout = timeout
        return self.issue("allreduce", _listed(tensors), options)

    def start_allreduce(self, tensors: list[torch.Tensor], opts: AllreduceOptions) -> Work:
        """`allreduce` for a caller that is certain to call `wait()` soon, in one thread only, and
        that needs no future. A failure may show in `wait()` and not before."""
        return self.allreduce(tensors, opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:  # type: ignore[override]
        """`allreduce` of several tensors in one operation."""
        options = AllreduceCoalescedOptions() if opts is None else opts
        return self.issue("allreduce_coalesced", _listed(tensors), options)

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
        return self.issue("broadcast", _listed(tensors), options)

    def broadcast_one(self, tensor: torch.Tensor, root: int) -> Work:
        """`broadcast` of one tensor from the member `root`: torchft's name."""
        return self.broadcast([tensor], root)

    def barrier(self, opts: Any = None) -> Work:  # type: ignore[override]
        """Return when every member has come here. `opts`: BarrierOptions or a timeout (timedelta)."""
        options = opts
        if not isinstance(opts, BarrierOptions):
            options = BarrierOptions()
            if isinstance(opts, timedelta):
                options.timeout = opts
        return self.issue("barrier", options)

    def reduce(self, tensors: Tensors, opts: Any = None) -> Work:  # type: ignore[override]
        """Reduce to the member `opts.rootRank`."""
        options = ReduceOptions() if opts is None else opts
        return self.issue("reduce", _listed(tensors), options)

    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:  # type: ignore[override]
        """Gather every member's input into `output_tensors`, a list (of lists) by rank."""
        options = AllgatherOptions() if opts is None else opts
        if isinstance(input_tensors, torch.Tensor):
            output_tensors, input_tensors = [output_tensors], [input_tensors]
        return self.issue("allgather", output_tensors, input_tensors, options)

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:  # type: ignore[override]
        """Gather every member's `input` into `output`, which is `size()` times as large."""
        options = AllgatherOptions() if opts is None else opts
        return self.issue("_allgather_base", output, input, options)

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> Work:  # type: ignore[override]
        """A newer name of `_allgather_base`."""
        return self._allgather_base(output, input, opts)

    def allgather_coalesced(self, output_lists: Any, input_list: Any, opts: Any = None) -> Work:  # type: ignore[override]
        """`allgather` of several tensors in one operation."""
        options = AllgatherOptions() if opts is None else opts
        return self.issue("allgather_coalesced", output_lists, input_list, options)

    def allgather_into_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:  # type: ignore[override]
        """`_allgather_base` of several tensors in one operation."""
        shares = [out.view(self.size(), *i.shape) for out, i in zip(outputs, inputs, strict=True)]
        by_rank = [[share[rank] for share in shares] for rank in range(self.size())]
        return self.allgather_coalesced(by_rank, inputs, opts)

    def gather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:  # type: ignore[override]
        """Gather every member's input at the member `opts.rootRank`."""
        options = GatherOptions() if opts is None else opts
        return self.issue("gather", output_tensors, input_tensors, options)

    def scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:  # type: ignore[override]
        """Scatter a list of tensors of the member `opts.rootRank`."""
        options = ScatterOptions() if opts is None else opts
        return self.issue("scatter", output_tensors, input_tensors, options)

    def reduce_scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:  # type: ignore[override]
        """Reduce and scatter. `opts`: ReduceScatterOptions or a ReduceOp (SUM)."""
        if isinstance(output_tensors, torch.Tensor):
            output_tensors, input_tensors = [output_tensors], [input_tensors]
        return self.issue(
            "reduce_scatter", output_tensors, input_tensors, _reduce_scatter_options(opts)
        )

    def _reduce_scatter_base(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> Work:  # type: ignore[override]
        """Reduce `input` and leave one share of it, by rank, in `output`."""
        return self.issue("_reduce_scatter_base", output, input, _reduce_scatter_options(opts))

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:  # type: ignore[override]
        """`_reduce_scatter_base` of a list with one tensor; no backend here takes several."""
        if len(outputs) != 1:
            raise NotImplementedError("reduce_scatter_tensor_coalesced takes one tensor only")
        return self._reduce_scatter_base(outputs[0], inputs[0], opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> Work:  # type: ignore[override]
        """A newer name of `_reduce_scatter_base`."""
        return self._reduce_scatter_base(output, input, opts)

    def alltoall(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:  # type: ignore[override]
        """Send one input tensor to each member, receive one output tensor from each."""
        options = AllToAllOptions() if opts is None else opts
        return self.issue("alltoall", output_tensors, input_tensors, options)

    def alltoall_base(  # type: ignore[override]
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any = None,
    ) -> Work:
        """`alltoall` with slices of single tensors; empty split sizes mean equal slices."""
        options = AllToAllOptions() if opts is None else opts
        return self.issue(
            "alltoall_base", output, input, output_split_sizes, input_split_sizes, options
        )

    def all_to_all_single(self, *args: Any, **kwargs: Any) -> Work:  # type: ignore[override]
        """A newer name of `alltoall_base`."""
        return self.alltoall_base(*args, **kwargs)

    def send(self, tensors: Tensors, dst_rank: int, tag: int = 0) -> Work:  # type: ignore[override]
        """Send `tensors` to the member `dst_rank`."""
        return self.issue("send", _listed(tensors), dst_rank, tag)

    def recv(self, tensors: Tensors, src_rank: int, tag: int = 0) -> Work:  # type: ignore[override]
        """Receive into `tensors` from the member `src_rank`."""
        return self.issue("recv", _listed(tensors), src_rank, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:  # type: ignore[override]
        """Not supported: a receive that names no member can't be ended when a member is lost."""
        raise NotImplementedError("recv_anysource can't be revoked; name the source with recv")


def _listed(tensors: Tensors) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _reduce_scatter_options(opts: Any) -> Any:
    if isinstance(opts, ReduceScatterOptions):
        return opts
    options = ReduceScatterOptions()
    options.reduceOp = ReduceOp.SUM if opts is None else opts
    return options


def _remove_backend(backend_name: str) -> None:
    """Undo `Backend.register_backend`, which torch has no function for."""
    backends = dist.Backend
    if backend_name in backends.backend_list:
        backends.backend_list.remove(backend_name)
    backends._plugins.pop(backend_name.upper(), None)
    backends.backend_type_map.pop(backend_name, None)
    backends.backend_capability.pop(backend_name, None)
    if hasattr(backends, backend_name.upper()):
        delattr(backends, backend_name.upper())
