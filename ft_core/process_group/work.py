"""Work objects: what a collective of a reconfigurable group returns.

Every collective returns a `Work` at once and reports its failure there, not by raising: a group may
be revoked just before a call or just after it, and callers need one path for both. Only mistakes in
the arguments raise at the call (`TypeError`, `ValueError`).
"""

from __future__ import annotations

import faulthandler
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed import Work as TorchWork
from torch.futures import Future

from ft_core.errors import ProcessGroupError
from lighthouse.waits import in_time

_log = logging.getLogger("ft_core")
_IN_BACKEND = timedelta(milliseconds=20)
"""How long a wait for an unwatched work may sit in the backend, whose interruption can fail."""


def start_or_run(thread: threading.Thread) -> None:
    """Start `thread`. Where none can be started (too many are there, or the interpreter is ending, from Python 3.12
    on), do here what it would."""
    try:
        thread.start()
    except RuntimeError:
        thread.run()


def failed_future(error: Exception) -> Future[Any]:
    """A future that has already ended with `error`, for C++ callers too.

    `Future.set_exception` makes only the Python side of that one future raise; a C++ reader (DDP's
    reducer) would see a success. A callback that raises sets the error on both sides.
    """

    def raise_error(_: Future[Any]) -> Any:
        raise error

    start: Future[Any] = Future()
    start.set_result(None)
    return start.then(raise_error)


def copy_of(error: Exception) -> Exception:
    """A copy of a `ProcessGroupError`, to raise instead of one that is kept.

    Raising the kept one would attach the raising frames, and so their tensors, to it and to the
    work, in a reference cycle that only the garbage collector ends. Other errors are returned as
    they are.
    """
    if type(error) is not ProcessGroupError:
        return error
    copy = ProcessGroupError(*error.args)
    copy.__cause__ = error.__cause__
    return copy


def finish_with(work: TorchWork, end: Callable[[Exception | None], Tensor]) -> Future[Tensor]:
    """A future of what `end(error)` returns once `work` has ended. `end` must not raise.

    `end` runs in the backend's thread, or in this one if the work has ended already; on CUDA, once
    the collective is in its stream.
    """
    if isinstance(work, BackendWork) and not isinstance(work, StreamWork):
        return work.finish_with(end)

    def done(finished: Future[Any]) -> Tensor:
        error = None
        try:
            finished.value()
        except Exception as caught:
            error = caught
        return end(error)

    return work.get_future().then(done)


def outputs_of(operation: str, args: tuple[Any, ...]) -> Any:
    """What the future of a collective holds at its end, given the collective's arguments."""
    if operation == "barrier":
        return []
    if operation in ("_allgather_base", "_reduce_scatter_base", "alltoall_base"):
        return [args[0]]
    return args[0]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Those in (nested) lists, or the one that it is."""
    if isinstance(value, Tensor):
        yield value
    else:
        for each in value:
            yield from tensors_in(each)


def fills_its_memory(tensor: Tensor) -> bool:
    """Whether its values lie side by side, in whatever order: a backend takes as many as there are, from its first
    one on. Of a view with gaps or an expanded one that is other memory."""
    if tensor.is_sparse or tensor.is_contiguous():
        return True
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).is_contiguous()


def future_for(tensor: Tensor) -> Future[Any]:
    """A future that may hold `tensor`: torch must know a device that has streams."""
    return Future() if tensor.is_cpu else Future(devices=[tensor.device])


def completed(operation: str, args: tuple[Any, ...]) -> TorchWork:
    """The work of a collective that did nothing and has ended."""
    return EndedWork(outputs_of(operation, args))


class PlainWork(TorchWork):
    """What c10d asks of a collective, answered from its subclass's `wait` and `is_completed`.

    `_value`: what its future holds at its end; `_error`: with which it has failed.
    """

    _value: Any = None
    _error: Exception | None = None

    def result(self) -> Any:
        self.wait()
        return self._value

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:  # type: ignore[override]
        return self._error

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()


class EndedWork(PlainWork):
    """A collective that has ended: well, or with an `error`, which `wait()` and the future raise."""

    def __init__(self, value: Any = None, *, error: Exception | None = None) -> None:
        super().__init__()
        self._value, self._error = value, error
        self._future: Future[Any] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._error is not None:
            raise copy_of(self._error)
        return True

    def get_future(self) -> Future[Any]:
        if self._future is None and self._error is not None:
            self._future = failed_future(self._error)
        elif self._future is None:
            self._future = Future()
            self._future.set_result(self._value)
        return self._future

    def is_completed(self) -> bool:
        return True


class WorksOwner(Protocol):
    """What a work needs of its process group."""

    @property
    def timeout_s(self) -> float:
        """Bounds a collective."""

    @property
    def in_flight(self) -> dict[Any, None]:
        """The works under way, in the order of their issue."""

    def stream_failed(self, quorum_id: int, error: Exception, /) -> None:
        """A work of a stream has ended with `error`. Any thread."""

    def collective_failed(
        self, operation: str, quorum_id: int, error: Exception
    ) -> ProcessGroupError:
        """Break the group; returns the error that the work raises. Any thread; never blocks."""


class DeviceEnd(Protocol):
    """The end of one collective on its device. Any thread."""

    communicator: Any
    """The one whose backend has started it."""

    def passed(self) -> bool:
        """Whether the device is done with it, well or not. Quick."""
        ...

    def wait(self) -> None:
        """Block the host until the device is done with it. A revocation ends that, too."""
        ...

    def error(self) -> Exception | None:
        """After the end: why its tensors hold no result; None: they hold it. Before: what is known."""
        ...

    def aside(self) -> AbstractContextManager[Any]:
        """A context in which the thread's stream is not the model's."""
        ...


class BackendWork(PlainWork):
    """A collective in flight in a backend, bound to the quorum under which it was issued.

    It ends when the backend's work ends, or when the group abandons it (`resolve`): Gloo can lose
    an operation (see `gloo_sockets`), and a wait for that one would last until its timeout. Its
    failure breaks the group of its quorum at once, whether or not a thread waits; the group of a
    later quorum is left alone. Futures end in the backend's thread, or in a thread of the group
    after a revocation. Any thread.

    A work that is not watched from the start (`ReconfigurableProcessGroup.start_allreduce`) runs no
    Python in the backend's thread, which would take the interpreter away from the waiting thread.
    Its end is noticed by `wait`, by a query, and when the group is revoked.

    Popping the only element of a list is atomic, and decides which thread ends the work
    (`_resolve_once`), starts to watch it (`_watch_once`) and completes its future (`_future_once`).
    """

    def __init__(
        self,
        group: WorksOwner,
        work: TorchWork,
        operation: str,
        quorum_id: int,
        args: tuple[Any, ...],
    ) -> None:
        super().__init__()
        self.operation = operation
        self._outputs = outputs_of(operation, args)
        self.quorum_id = quorum_id
        self.issued_at = time.monotonic()
        self.abandoned = False  # a thread of the group sees to its end
        self._group = group
        self._work: TorchWork | None = work
        self._finished = False
        self._ended = threading.Lock()  # held until the end; a lock is the cheapest thing to await
        self._ended.acquire()
        self._resolve_once = [None]
        self._watch_once = [None]
        self._future: Future[Any] | None = None
        self._gate: Future[Any] | None = None  # its end runs `_unpack`, which completes `_future`
        self._future_once = [None]
        self._endings: list[tuple[Callable[[Exception | None], Tensor], Future[Tensor]]] = []

    def watch(self) -> bool:
        """Follow the backend's work; returns whether it has ended. Idempotent. Hold no lock: it may end
        the work here and now."""
        try:
            self._watch_once.pop()
        except IndexError:
            return self._finished
        work = self._work
        if work is not None:
            self._follow(work)
        return self._finished

    def _follow(self, work: TorchWork) -> None:
        try:
            future = work.get_future()
        except RuntimeError:  # some of Gloo's works have none
            self._watch_by_thread(None)
        else:
            future.add_done_callback(self._backend_done)

    def _watch_by_thread(self, timeout: timedelta | None) -> None:
        thread = threading.Thread(
            target=self._await_backend, args=(timeout,), name="ft-pg-work", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:
            # No threads are left, and the caller may have more to start first.
            self.fail(error)

    def _await_backend(self, timeout: timedelta | None) -> None:
        work = self._work
        if work is None:
            return
        try:
            if timeout is None:
                work.wait()
            else:
                work.wait(timeout)
        except Exception as error:
            self.fail(error)
        else:
            self.resolve(self._outputs, None)

    def _backend_done(self, future: Future[Any]) -> None:
        try:
            value = future.value()
        except Exception as error:
            self.fail(error)
        else:
            self.resolve(value, None)

    def fail(self, error: Exception) -> None:
        """End the work with `error`, which then names its operation and quorum, and break the group."""
        failure = self._group.collective_failed(self.operation, self.quorum_id, error)
        failure.__cause__ = error.with_traceback(None)
        self.resolve(None, failure)

    def resolve(self, value: Any, error: Exception | None) -> None:
        """End the work with a value or an error; the first call counts."""
        try:
            self._resolve_once.pop()
        except IndexError:
            return
        self._value, self._error = value, error
        # Drops the references to the backend and to the tensors.
        self._work = self._outputs = None
        self._finished = True
        self._leave_group()
        self._ended.release()
        if self._gate is not None:
            self._open_gate(self._gate)
        self._run_endings()

    def _leave_group(self) -> None:
        self._group.in_flight.pop(self, None)

    def finish_with(self, end: Callable[[Exception | None], Tensor]) -> Future[Tensor]:
        """See the function of this name. It makes one future where `get_future().then` makes three."""
        self.watch()
        future: Future[Tensor] = Future()
        self._endings.append((end, future))
        if self._finished:
            self._run_endings()
        return future

    def _run_endings(self) -> None:
        while True:
            try:
                end, future = self._endings.pop()  # atomic: each runs once
            except IndexError:
                return
            future.set_result(end(self._error))

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the end. Raises the error of the collective, a `ProcessGroupError`.

        `timeout` bounds this wait only: afterwards the collective goes on. Zero: no timeout.
        """
        if self._watch_once and not self._finished:
            self._wait_in_backend(timeout)
        seconds = 0.0 if timeout is None else max(0.0, timeout.total_seconds())
        if not seconds:  # torch's "no timeout"
            with self._ended:
                pass
        elif not self.ended_within(seconds):
            raise ProcessGroupError(
                f"{self.operation} of quorum {self.quorum_id} has not ended after {seconds} s"
            )
        if self._error is not None:
            raise copy_of(self._error)
        return True

    def _wait_in_backend(self, timeout: timedelta | None) -> None:
        """Wait in the backend, where a revocation can't end the wait: so only for a moment."""
        work = self._work
        if work is None:
            return
        try:
            work.wait(min(timeout or _IN_BACKEND, _IN_BACKEND))
        except Exception:
            pass
        else:
            self.resolve(self._outputs, None)
            return
        # It has failed, or is late; the future knows which. Not in the handler above: its exception
        # would become the context of the kept error, and attach this frame to it.
        self.watch()

    def ended_within(self, seconds: float) -> bool:
        """Wait up to `seconds`; returns whether it has ended, well or not."""

        def wait(left_s: float | None) -> bool:
            return self._ended.acquire(timeout=-1 if left_s is None else left_s)

        if in_time(wait, time.monotonic() + seconds):
            self._ended.release()
        return self._finished

    def get_future(self) -> Future[Any]:
        self.watch()
        with _future_lock:
            if self._future is None:
                self._gate = Future()
                self._future = self._gate.then(self._unpack)
        if self.is_completed():
            assert self._gate is not None
            self._open_gate(self._gate)
        return self._future

    def _open_gate(self, gate: Future[Any]) -> None:
        try:
            self._future_once.pop()
        except IndexError:
            return
        gate.set_result(None)

    def _unpack(self, gate: Future[Any]) -> Any:
        # Raising here, unlike set_exception(), makes the future fail for C++ readers too.
        if self._error is not None:
            raise copy_of(self._error)
        return self._value

    def is_completed(self) -> bool:
        work = self._work
        if self._watch_once and work is not None and work.is_completed():
            self.watch()  # ends the work in this thread
        return self._finished

    def synchronize(self) -> None:
        return None

    def block_current_stream(self) -> None:
        return None


class StreamWork(BackendWork):
    """A collective on a device's stream, which ends when the device is done with it.

    `wait` and futures are the backend's: they order streams, do not block the host, and tell nothing
    of errors that come later. So the work is kept, with its tensors, until the device is done with
    it, and only then asked for an error. An error that shows earlier breaks the group, which frees a
    kernel that hangs. Any thread.
    """

    def __init__(
        self,
        group: WorksOwner,
        work: TorchWork,
        operation: str,
        quorum_id: int,
        args: tuple[Any, ...],
        *,
        end: DeviceEnd,
    ) -> None:
        super().__init__(group, work, operation, quorum_id, args)
        self.end = end
        self._native: TorchWork | None = work
        self._held = args
        self._told: Exception | None = None  # the group was broken for it
        self._tell_once = [None]

    def watch(self) -> bool:
        """Nothing: the backend calls nothing when the device is done. `is_completed` looks."""
        return self._finished

    def is_completed(self) -> bool:
        if not self._finished:
            passed, error = self.end.passed(), self.end.error()  # in this order
            if passed:
                self._conclude(error)
            elif error is not None:
                self._tell(error)
        return self._finished

    def settle(self) -> None:
        """Block the host until the device is done with it."""
        if not self._finished:
            self.end.wait()
            self._conclude(self.end.error())

    def _conclude(self, error: Exception | None) -> None:
        if error is None:
            self.resolve(self._outputs, None)
        else:
            self.resolve(None, self._tell(error))

    def _tell(self, error: Exception) -> Exception:
        """Break the group for `error`, once; returns the error to raise."""
        try:
            self._tell_once.pop()
        except IndexError:
            return self._told or error
        failure = self._group.collective_failed(self.operation, self.quorum_id, error)
        failure.__cause__ = error.with_traceback(None)
        self._told = failure
        return failure

    def resolve(self, value: Any, error: Exception | None) -> None:
        super().resolve(value, error)
        self._native, self._held = None, ()

    def _leave_group(self) -> None:
        if self._error is not None:
            # Before it is gone: see `settle`.
            self._group.stream_failed(self.quorum_id, self._error)
        super()._leave_group()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Make the current stream wait for the collective. Raises what is known to have gone wrong."""
        native = self._native  # None: the device is done, and no stream needs to wait
        _backend = self.end.communicator.backend  # until this returns: its work asks it
        if self._error is not None:
            raise copy_of(self._error)
        try:
            if native is None:
                return True
            return native.wait() if timeout is None else native.wait(timeout)
        except Exception as error:
            failure = self._tell(error)
        raise copy_of(failure)

    def get_future(self) -> Future[Any]:
        native, _backend = self._native, self.end.communicator.backend
        if native is not None:
            with self.end.aside():  # a future of NCCL makes the current stream wait when it is made
                return native.get_future()
        if self._error is not None:
            return failed_future(self._error)
        future = future_for(next(tensors_in(self._value)))
        future.set_result(self._value)
        return future

    def result(self) -> Any:
        self.wait()
        native = self._native
        return self._value if native is None else native.result()

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        native = self._native
        if native is not None:
            native.block_current_stream()


class PointToPointWork(BackendWork):
    """A send or a receive, which Gloo completes only inside `wait()`.

    A thread waits for each one; they are rare between replica groups.
    """

    def _follow(self, work: TorchWork) -> None:
        self._watch_by_thread(timedelta(seconds=self._group.timeout_s))


_future_lock = threading.Lock()


# ---------------------------------------------------------------- what aborted ones leave

_MOST_DUMPS = 20
"""Quorums for which a group writes: a job that loses one every second must not fill a disk."""


class AbortDump:
    """What a process group leaves in `folder` (FT_ABORT_DUMPS) of collectives that it aborts.

    To find the rank that did not call one. For each quorum that ends with collectives in
    flight, `abort-HOST-PID-qID.txt`: why, and the stack of each thread of this process at that moment. Where
    torch's flight recorder is on (TORCH_FR_BUFFER_SIZE=2000, say), also `abort-HOST-PID-qID.fr` and, with CUDA,
    `abort-HOST-PID-qID.nccl`: the newest collectives, with sizes and states, pickled as torch's own dumps are.
    Gloo and "nccl2" record in the first, classic NCCL in the second.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._quorums = set[int]()

    def write(self, quorum_id: int, reason: Exception) -> None:
        """Takes some milliseconds, once for each of the first 20 quorums. Any thread. A folder that can't be
        written to is one line in the log."""
        if quorum_id in self._quorums or len(self._quorums) >= _MOST_DUMPS:
            return
        self._quorums.add(quorum_id)
        name = self._folder / f"abort-{socket.gethostname()}-{os.getpid()}-q{quorum_id}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with open(f"{name}.txt", "w") as text:
                text.write(f"quorum {quorum_id}: {reason}\n\n")
                text.flush()
                faulthandler.dump_traceback(text)
            if os.environ.get("TORCH_FR_BUFFER_SIZE", "0") != "0":
                for ending, record in _flight_records().items():
                    Path(f"{name}.{ending}").write_bytes(record)
        except OSError as error:
            _log.warning("no dump of the aborted collectives of quorum %d: %s", quorum_id, error)


def _flight_records() -> dict[str, bytes]:
    dumps = {"fr": "_dump_fr_trace", "nccl": "_dump_nccl_trace"}
    if not torch.cuda.is_available():
        del dumps["nccl"]
    return {end: getattr(c10d, dump)() for end, dump in dumps.items() if hasattr(c10d, dump)}
