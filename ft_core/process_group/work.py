"""Work objects: what a collective of a reconfigurable group returns.

Every collective returns a `Work` at once and reports its failure there, never by raising: a group
may be revoked just before a call or just after it, and callers need one path for both. What does
raise at the call are mistakes in the arguments (`TypeError`, `ValueError`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import Work as TorchWork
from torch.futures import Future

if TYPE_CHECKING:
    from ft_core.process_group.mesh import MeshProcessGroup


def failed_future(error: Exception) -> Future[Any]:
    """A future that has already ended with `error`, for C++ callers too.

    `Future.set_exception` only teaches the Python side of that one future to raise; a C++ reader
    (DDP's reducer) would see a success. A callback that raises sets the error on both sides.
    """

    def raise_error(_: Future[Any]) -> Any:
        raise error

    start: Future[Any] = Future()
    start.set_result(None)
    return start.then(raise_error)


class CompletedWork(TorchWork):
    """A collective that is done; `value` is what its future holds."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self._value = value
        self._future: Future[Any] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def get_future(self) -> Future[Any]:
        if self._future is None:
            self._future = Future()
            self._future.set_result(self._value)
        return self._future

    def result(self) -> Any:
        return self._value

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> Exception | None:  # type: ignore[override]
        return None

    def synchronize(self) -> None:
        return None

    def block_current_stream(self) -> None:
        return None


class FailedWork(TorchWork):
    """A collective that failed before it began: `wait()` and the future raise `error`."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error
        self._future: Future[Any] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        raise self._error

    def get_future(self) -> Future[Any]:
        if self._future is None:
            self._future = failed_future(self._error)
        return self._future

    def result(self) -> Any:
        raise self._error

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return False

    def exception(self) -> Exception | None:  # type: ignore[override]
        return self._error

    def synchronize(self) -> None:
        raise self._error

    def block_current_stream(self) -> None:
        raise self._error


class BackendWork(TorchWork):
    """A collective in flight in a backend, tied to the quorum under which it was issued.

    `wait()` turns the backend's errors into `ProcessGroupError` and breaks the group of that quorum
    (a later quorum's group is left alone). The future is the backend's own: callbacks cost nothing
    extra and run in the backend's thread; it ends with the backend's `RuntimeError` on failure.
    Any thread may use one of these.
    """

    def __init__(
        self, group: MeshProcessGroup, work: TorchWork, operation: str, quorum_id: int
    ) -> None:
        super().__init__()
        self._group = group
        self._work = work
        self._operation = operation
        self._quorum_id = quorum_id
        self._future: Future[Any] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until done; `timeout` bounds this wait only, the collective goes on."""
        work = self._work
        try:
            waited = work.wait() if timeout is None else work.wait(timeout)
        except Exception as error:
            over = work.is_completed()
            raise self._group.collective_failed(
                self._operation, self._quorum_id, error, over=over
            ) from error
        self._group.collective_finished()
        return waited

    def get_future(self) -> Future[Any]:
        if self._future is None:
            self._future = self._work.get_future()
        return self._future

    def result(self) -> Any:
        return self._work.result()

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self._work.is_success()

    def exception(self) -> Any:
        return self._work.exception()

    def synchronize(self) -> None:
        self._work.synchronize()

    def block_current_stream(self) -> None:
        self._work.block_current_stream()


class PointToPointWork(BackendWork):
    """A send or a receive, whose backend completes it only inside `wait()` and knows no future.

    The first `get_future()` therefore starts a thread that waits; it ends with the operation.
    """

    def __init__(
        self,
        group: MeshProcessGroup,
        work: TorchWork,
        operation: str,
        quorum_id: int,
        tensors: list[torch.Tensor],
    ) -> None:
        super().__init__(group, work, operation, quorum_id)
        self._tensors = tensors
        self._lock = threading.Lock()
        self._outcome: bool | Exception | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        with self._lock:  # the backend allows one waiter
            if isinstance(self._outcome, Exception):
                raise self._outcome
            if self._outcome is None:
                try:
                    self._outcome = super().wait(timeout)
                except Exception as error:
                    self._outcome = error
                    raise
            return self._outcome

    def get_future(self) -> Future[Any]:
        if self._future is None:
            gate: Future[Any] = Future()
            self._future = gate.then(self._unpack)
            threading.Thread(
                target=self._run, args=(gate.set_result,), name="ft-pg-p2p", daemon=True
            ).start()
        return self._future

    def _run(self, resolve: Callable[[Any], None]) -> None:
        try:
            self.wait()
        except Exception as error:
            resolve(error)
        else:
            resolve(self._tensors)

    @staticmethod
    def _unpack(gate: Future[Any]) -> Any:
        outcome = gate.value()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome
