"""Process groups that stand in for another: swallow errors, use the manager, inject faults, do nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed import ReduceOp, Work
from torch.distributed import Work as TorchWork
from torch.distributed.distributed_c10d import AllreduceCoalescedOptions, AllreduceOptions
from torch.futures import Future

from ft_core.process_group.base import ProcessGroup
from ft_core.process_group.work import EndedWork, completed, outputs_of


class ProcessGroupWrapper(ProcessGroup):
    """Passes every call on to `pg`, its `parent`: a base class for wrappers.

    Meaning, errors and threads of all methods are those of `ProcessGroup`.
    """

    def __init__(self, pg: ProcessGroup) -> None:
        super().__init__()
        self.parent = pg

    def address(self) -> bytes:
        return self.parent.address()

    def configure(
        self, quorum_id: int, rank: int, addresses: Sequence[bytes], timeout_s: float
    ) -> None:
        self.parent.configure(quorum_id, rank, addresses, timeout_s)

    def advertise(self, host: str) -> None:
        self.parent.advertise(host)

    def when_missed(self, listener: Callable[[Sequence[int]], object]) -> None:
        self.parent.when_missed(listener)

    def when_silent(self, listener: Callable[[Sequence[int]], object]) -> None:
        self.parent.when_silent(listener)

    def unreachable(self, addresses: Sequence[bytes], timeout_s: float) -> set[int]:
        return self.parent.unreachable(addresses, timeout_s)

    def revoke(self, reason: Exception, *, quorum_id: int | None = None) -> None:
        self.parent.revoke(reason, quorum_id=quorum_id)

    def set_timeout(self, timeout: timedelta) -> None:
        self.parent.set_timeout(timeout)

    def bind(self, quorum_id: int | None) -> None:
        self.parent.bind(quorum_id)

    @property
    def quorum_id(self) -> int:
        return self.parent.quorum_id

    def unanswered(self) -> set[int]:
        return self.parent.unanswered()

    @property
    def idle(self) -> bool:
        return self.parent.idle

    @property
    def under_way(self) -> bool:
        return self.parent.under_way

    def settle(self) -> Exception | None:
        return self.parent.settle()

    @property
    def capturing(self) -> bool:
        return self.parent.capturing

    def errored(self) -> Exception | None:
        return self.parent.errored()

    def shutdown(self) -> None:
        self.unregister()
        self.parent.shutdown()

    def size(self) -> int:
        return self.parent.size()

    def rank(self) -> int:
        return self.parent.rank()

    def getBackendName(self) -> str:
        return self.parent.getBackendName()

    def issue(self, operation: str, *args: Any, **kwargs: Any) -> Work:
        return self.parent.issue(operation, *args, **kwargs)


class ErrorSwallowingProcessGroupWrapper(ProcessGroupWrapper):
    """After the first error, does nothing until the next `configure`, and reports success.

    A training loop then runs to the end of its step on meaningless numbers, and must ask `error()`
    before it commits. Errors show when a work ends, so ask after waiting. Wrong arguments still raise
    TypeError, ValueError or NotImplementedError. Threads: as `ProcessGroup`.
    """

    def __init__(self, pg: ProcessGroup) -> None:
        super().__init__(pg)
        self._first: Exception | None = None

    def error(self) -> Exception | None:
        """The first error since `configure`, swallowed or not; None if there was none. Any thread."""
        return self._first or self.parent.errored()

    def errored(self) -> Exception | None:
        """As `error`."""
        return self.error()

    def report_error(self, error: Exception) -> None:
        """Record an error; from now on collectives do nothing. Any thread."""
        if self._first is None:
            self._first = error

    def configure(
        self, quorum_id: int, rank: int, addresses: Sequence[bytes], timeout_s: float
    ) -> None:
        """As `ProcessGroup.configure`; forgets the error of the last quorum."""
        self._first = None
        super().configure(quorum_id, rank, addresses, timeout_s)

    def getBackendName(self) -> str:
        return f"swallow-{super().getBackendName()}"

    def issue(self, operation: str, *args: Any, **kwargs: Any) -> Work:
        """As `ProcessGroup.issue`; after an error a work that has ended, and nothing is sent."""
        if self.error() is not None:
            return completed(operation, args)
        try:
            work = super().issue(operation, *args, **kwargs)
        except (TypeError, ValueError, NotImplementedError):
            raise  # a mistake in the call, not a fault
        except Exception as error:
            self.report_error(error)
            return completed(operation, args)
        return _SwallowingWork(self, work, outputs_of(operation, args))


class _WorkAround(TorchWork):
    """A work that delegates to another one; subclasses change its outcome."""

    def __init__(self, work: TorchWork) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: timedelta | None = None) -> bool:
        return self._work.wait() if timeout is None else self._work.wait(timeout)

    def get_future(self) -> Future[Any]:
        return self._work.get_future()

    def result(self) -> Any:
        return self._work.result()

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Any:
        return self._work.exception()

    def synchronize(self) -> None:
        self._work.synchronize()

    def block_current_stream(self) -> None:
        self._work.block_current_stream()


class _SwallowingWork(_WorkAround):
    def __init__(
        self, group: ErrorSwallowingProcessGroupWrapper, work: TorchWork, outputs: Any
    ) -> None:
        super().__init__(work)
        self._group = group
        self._outputs = outputs

    def wait(self, timeout: timedelta | None = None) -> bool:
        try:
            super().wait(timeout)
        except Exception as error:
            self._group.report_error(error)
        return True

    def get_future(self) -> Future[Any]:
        def swallow(future: Future[Any]) -> Any:
            try:
                return future.value()
            except Exception as error:
                self._group.report_error(error)
                return self._outputs

        return super().get_future().then(swallow)

    def result(self) -> Any:
        self.wait()
        return self._outputs

    def exception(self) -> Any:
        return None

    def synchronize(self) -> None:
        self.wait()


class ManagesAllreduce(Protocol):
    """What a `ManagedProcessGroup` needs of a manager."""

    def allreduce(
        self, tensor: torch.Tensor, /, *, reduce_op: ReduceOp.RedOpType = ...
    ) -> Future[torch.Tensor]:
        """Reduce `tensor` in place over the participants; the default is AVG."""

    def num_participants(self) -> int:
        """How many replica groups participate in the step."""

    def participating_rank(self) -> int | None:
        """This group's rank among the participants; None if it does not participate."""


_MANAGED = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)


class ManagedProcessGroup(ProcessGroup):
    """A process group whose allreduce is the manager's: for DDP and HSDP's replicate dimension.

    The manager averages over the participants, and keeps errors until the vote. So `address`,
    `configure` and `revoke` raise NotImplementedError, as do all collectives but allreduce, barrier and
    broadcast. `size()` is `manager.num_participants()`. Barriers and broadcasts do nothing: a joining
    member is healed by the manager, not by the first rank.

    DDP divides the gradients by `size()` itself, so SUM returns the average times `size()`; AVG
    returns the average. MIN, MAX and PRODUCT are those of the participants: a member that heals adds
    what is neutral. Tensors may have any shape, and must be contiguous.

    Allreduce belongs to a step: between `should_commit` and the next `start_quorum` it raises
    `OutsideStep` (reduce a loss before `optimizer.step()`, not after it). An error within a step is kept
    for the vote: the result is undefined then, and `Manager.errored` tells.

    Args:
        manager: reduces. Its constructor was given the process group that moves the bytes.

    Thread: any thread may issue collectives, in the same order on every member.
    """

    def __init__(self, manager: ManagesAllreduce) -> None:
        super().__init__()
        self._manager = manager

    def size(self) -> int:
        """The number of participants. Waits for the quorum."""
        return self._manager.num_participants()

    def rank(self) -> int:
        """This member's rank among the participants; 0 also if it does not participate."""
        return self._manager.participating_rank() or 0

    def getBackendName(self) -> str:
        return "ft-managed"

    def address(self) -> bytes:
        raise NotImplementedError("the manager configures its own process group")

    def configure(
        self, quorum_id: int, rank: int, addresses: Sequence[bytes], timeout_s: float
    ) -> None:
        raise NotImplementedError("the manager configures its own process group")

    def revoke(self, reason: Exception, *, quorum_id: int | None = None) -> None:
        raise NotImplementedError("the manager revokes its own process group")

    def errored(self) -> Exception | None:
        """None: the manager keeps errors for the vote (`Manager.errored`)."""
        return None

    def shutdown(self) -> None:
        """Undo `register`. The manager shuts down the process group that it was given."""
        self.unregister()

    def issue(self, operation: str, *args: Any, **kwargs: Any) -> Work:
        """Start `operation`. Raises NotImplementedError for those that the manager does not have."""
        if operation in ("barrier", "broadcast"):
            return completed(operation, args)
        if operation not in ("allreduce", "allreduce_coalesced"):
            raise NotImplementedError(f"{operation} does not go through the manager")
        tensors, options = args[0], args[1]
        assert isinstance(options, AllreduceOptions | AllreduceCoalescedOptions)
        op = next((known for known in _MANAGED if options.reduceOp == known), None)
        if op is None:
            raise NotImplementedError(
                f"{options.reduceOp} does not go through the manager: SUM, AVG, MIN, MAX and PRODUCT do"
            )
        scale = 1
        if op == ReduceOp.SUM and all(tensor.is_floating_point() for tensor in tensors):
            op, scale = ReduceOp.AVG, max(1, self.size())  # its weights count, if it has any
        futures = [self._manager.allreduce(tensor, reduce_op=op) for tensor in tensors]
        return _ManagedWork(futures, list(tensors), scale)


class _ManagedWork(TorchWork):
    """All futures of one call, and the average turned into a sum where one was asked for."""

    def __init__(
        self, futures: list[Future[torch.Tensor]], tensors: list[torch.Tensor], scale: int
    ) -> None:
        super().__init__()
        self._tensors = tensors
        self._scale = scale
        self._future: Future[Any] = torch.futures.collect_all(futures).then(self._finish)

    def _finish(self, futures: Future[Any]) -> list[torch.Tensor]:
        for future in futures.value():
            future.value()  # raises what a work failed with
        if self._scale != 1:
            for tensor in self._tensors:
                tensor.mul_(self._scale)
        return self._tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        """`timeout` is ignored: the manager's own timeout bounds every collective."""
        self._future.wait()
        return True

    def get_future(self) -> Future[Any]:
        return self._future

    def result(self) -> Any:
        return self._future.wait()

    def is_completed(self) -> bool:
        return self._future.done()

    def synchronize(self) -> None:
        return None


@dataclass(frozen=True, slots=True)
class _Fault:
    kind: str
    error: Exception = field(default_factory=lambda: RuntimeError("injected"))
    delay_s: float = 0.0


class FakeProcessGroupWrapper(ProcessGroupWrapper):
    """Injects faults, for tests of code that uses a process group.

    Each of `report_future_error`, `raise_next`, `fail_next` and `delay_next` plans the fault of one later
    collective; faults occur in the order in which they were planned. Any thread.
    """

    def __init__(self, pg: ProcessGroup) -> None:
        super().__init__(pg)
        self._lock = threading.Lock()
        self._faults: list[_Fault] = []
        self._configure_error: Exception | None = None

    def report_future_error(self, error: Exception) -> None:
        """The next collective is issued, but its work and future end with `error`."""
        self._plan(_Fault("future", error))

    def raise_next(self, error: Exception) -> None:
        """The next collective raises `error` at the call and is not issued."""
        self._plan(_Fault("raise", error))

    def fail_next(self, error: Exception) -> None:
        """The next collective returns a failed work and is not issued: peers wait for it."""
        self._plan(_Fault("fail", error))

    def delay_next(self, delay_s: float) -> None:
        """The next collective is issued after `delay_s` seconds, for which the caller waits."""
        self._plan(_Fault("delay", delay_s=delay_s))

    def report_configure_error(self, error: Exception) -> None:
        """The next `configure` raises `error` and does nothing else."""
        with self._lock:
            self._configure_error = error

    def configure(
        self, quorum_id: int, rank: int, addresses: Sequence[bytes], timeout_s: float
    ) -> None:
        """As `ProcessGroup.configure`, or raises the error that was planned."""
        with self._lock:
            error, self._configure_error = self._configure_error, None
        if error is not None:
            raise error
        super().configure(quorum_id, rank, addresses, timeout_s)

    def getBackendName(self) -> str:
        return f"fake-{super().getBackendName()}"

    def _plan(self, fault: _Fault) -> None:
        with self._lock:
            self._faults.append(fault)

    def issue(self, operation: str, *args: Any, **kwargs: Any) -> Work:
        """As `ProcessGroup.issue`, with the next fault that was planned."""
        with self._lock:
            fault = self._faults.pop(0) if self._faults else _Fault("none")
        if fault.kind == "raise":
            raise fault.error
        if fault.kind == "fail":
            return EndedWork(error=fault.error)
        if fault.kind == "delay":
            time.sleep(fault.delay_s)
        work = super().issue(operation, *args, **kwargs)
        return _FailingWork(work, fault.error) if fault.kind == "future" else work


class _FailingWork(_WorkAround):
    """Ends when its work does, with an error of its own."""

    def __init__(self, work: TorchWork, error: Exception) -> None:
        super().__init__(work)
        self._error = error

    def wait(self, timeout: timedelta | None = None) -> bool:
        super().wait(timeout)
        raise self._error

    def get_future(self) -> Future[Any]:
        def fail(_: Future[Any]) -> Any:
            raise self._error

        return super().get_future().then(fail)

    def result(self) -> Any:
        raise self._error

    def exception(self) -> Any:
        return self._error if self.is_completed() else None


class ProcessGroupDummy(ProcessGroup):
    """A group in which only this member does anything. Every work has ended when it is
    returned: tensors that are reduced in place stay as they are, and outputs of their own take this
    member's input, in every member's place that has room for it.

    For tests, dry runs and members that do not participate. `rank` and `world` are what `rank()` and
    `size()` return until `configure` changes them. After `revoke` collectives still succeed: there
    is no member to lose. `configure_count` and `collective_count` count the calls. Raises
    ValueError unless `rank` is from 0 to `world` - 1. Threads: as `ProcessGroup`.
    """

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        super().__init__()
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} is not one of {world}")
        self._rank = rank
        self._size = world
        self._error: Exception | None = None
        self._quorum_id = -1
        self.configure_count = 0
        self.collective_count = 0

    @property
    def quorum_id(self) -> int:
        return self._quorum_id

    def address(self) -> bytes:
        return b"dummy/%x" % id(self)

    def configure(
        self, quorum_id: int, rank: int, addresses: Sequence[bytes], timeout_s: float
    ) -> None:
        self._quorum_id, self._rank, self._size = quorum_id, rank, len(addresses)
        self._error = None
        self.configure_count += 1

    def revoke(self, reason: Exception, *, quorum_id: int | None = None) -> None:
        if quorum_id in (None, self.quorum_id) and self._error is None:
            self._error = reason

    def errored(self) -> Exception | None:
        return self._error

    def shutdown(self) -> None:
        self.unregister()

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def getBackendName(self) -> str:
        return "ft-dummy"

    def issue(self, operation: str, *args: Any, **kwargs: Any) -> Work:
        self.collective_count += 1
        if operation in _WITH_OUTPUTS:
            with torch.no_grad():
                _take_inputs(args[0], args[1])
        return completed(operation, args)


_WITH_OUTPUTS = frozenset(
    {
        "_allgather_base",
        "_reduce_scatter_base",
        "allgather",
        "allgather_coalesced",
        "alltoall",
        "alltoall_base",
        "gather",
        "reduce_scatter",
        "scatter",
    }
)


def _take_inputs(output: Any, value: Any) -> None:
    """Fill the tensors in `output` with those in `value`: tensors or (nested) lists of them."""
    if isinstance(output, torch.Tensor) and isinstance(value, torch.Tensor):
        if value.numel():
            times = -(-output.numel() // value.numel())
            output.view(-1).copy_(value.reshape(-1).repeat(times)[: output.numel()])
    elif isinstance(output, torch.Tensor):
        _take_inputs(output, value[0])
    elif isinstance(value, torch.Tensor):
        for each in output:
            _take_inputs(each, value)
    else:
        for each, its in zip(output, value, strict=False):  # only a root has all inputs or outputs
            _take_inputs(each, its)
