"""A process group whose members connect to each other: what Gloo and NCCL have in common.

`configure` runs in two threads. The caller's serves the rendezvous (`Rendezvous.pump`) and watches
the deadline and revocation; a short-lived one (`_Builder`) sits in the backend's blocking connect. So
a revocation never waits for a backend: it sets a flag, ends the rendezvous, and interrupts the
communicator. A third thread destroys the communicator of the previous quorum, which takes Gloo 10
to 30 ms that the caller need not wait for. None of these threads outlives its task.

Orphaned operations. A revoked operation usually ends within a millisecond, when the backend notices
the interrupt. Gloo can lose one (`gloo_sockets` says why). Such an operation is abandoned: its work
ends with an error once the backend no longer touches its tensors, and the communicator is not used
again.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed import AllreduceOptions, Work

from ft_core.environment import abort_dumps
from ft_core.errors import AddressError, ProcessGroupError
from ft_core.process_group.base import ProcessGroup
from ft_core.process_group.device_memory import CopyDevice, first_device
from ft_core.process_group.dialing import connect_limit_s, unreachable
from ft_core.process_group.rendezvous import Listener, Rendezvous
from ft_core.process_group.rendezvous_messages import Address
from ft_core.process_group.work import (
    AbortDump,
    BackendWork,
    DeviceEnd,
    EndedWork,
    PointToPointWork,
    StreamWork,
    start_or_run,
)
from lighthouse.own_address import choose_address
from lighthouse.waits import Overdue

_log = logging.getLogger(__name__)
_INTERRUPT_EVERY_S = 0.005
_INTERRUPT_FOR_S = 5.0
_ABANDON_CHECK_S = 0.005
_ABANDON_CHECKS = 3  # so often in a row the backend must be found quiescent
_ABANDON_WITHIN_S = 1.0
_SHUTDOWN_S = 2.0


class Communicator(ABC):
    """A connected backend and the way to break it. One at a time belongs to a group."""

    backend: Any  # c10d.Backend; set by `connect`
    timeout_s: float  # of a collective; set by the constructor
    has_orphans = False  # an orphaned operation holds one of the backend's threads

    def enter_thread(self) -> None:
        """Called first in each helper thread that uses the communicator, so that it can choose its device."""
        return None

    @abstractmethod
    def handle(self) -> bytes:
        """What the other members need to reach it, b"" if nothing. Any thread."""

    @abstractmethod
    def connect(self, rendezvous: Rendezvous, timeout_s: float) -> None:
        """Connect to all members of the rendezvous. Blocks; may raise anything. Builder thread.

        `timeout_s` is when the group interrupts; the backend's own timeout must come later.
        """

    @abstractmethod
    def interrupt(self) -> None:
        """End pending collectives, or a blocked `connect`, with an error. Returns quickly.

        Any thread, any number of times. Afterwards the communicator can at most be connected
        again. Some operations may be orphaned: they stay in the backend until their timeout.
        """

    @abstractmethod
    def quiescent(self) -> bool:
        """After an interrupt: whether operations that remain are asleep and leave their tensors
        alone. Any thread."""

    def backend_for(self, args: tuple[Any, ...]) -> Any:
        """The backend for a collective with these arguments."""
        return self.backend

    def end_of(self, work: Work) -> DeviceEnd | None:
        """The end on its device of a collective that `backend` has just started; None: works end when
        the collectives do. In the thread that started it."""
        return None

    def unanswered(self) -> set[str]:
        """Hosts that acknowledge nothing of what was sent to them. Any thread."""
        return set()

    def operation_orphaned(self, until: float) -> None:
        """An operation remains in the backend, which ends it at `until` (`time.monotonic()`). Any
        thread."""
        self.has_orphans = True

    @abstractmethod
    def close(self, end_works: Callable[[], None]) -> None:
        """Release everything; may block for tens of milliseconds. Called once, in a thread of the group.

        `end_works` waits for the works of this communicator that are left on a device, and has them let
        go of the backend's."""

    @property
    @abstractmethod
    def reconnectable(self) -> bool:
        """Whether `connect` may be called again after a success and an interrupt."""


class _Builder(threading.Thread):
    """Connects one communicator."""

    def __init__(
        self, communicator: Communicator, rendezvous: Rendezvous, timeout_s: float
    ) -> None:
        super().__init__(name="ft-pg-configure", daemon=True)
        self.communicator = communicator
        self.error: Exception | None = None
        self.connected = threading.Event()  # or failed
        self._rendezvous = rendezvous
        self._timeout_s = timeout_s

    def run(self) -> None:
        try:
            self.communicator.enter_thread()
            self.communicator.connect(self._rendezvous, self._timeout_s)
        except Exception as error:
            self.error = error
        self.connected.set()
        self._rendezvous.wake()


class ReconfigurableProcessGroup(ProcessGroup):
    """See `ProcessGroup`. Subclasses say how a communicator is made.

    Args:
        timeout: seconds or timedelta; bounds a collective that is not revoked.
        hostname, interface: choose the address to bind and to advertise (at most one of them); the
            default is the outgoing address.

    Raises `ValueError` for a timeout that is not positive.
    """

    host_only = False
    """Whether the backend takes tensors in host memory only: those on a device are staged there."""

    def __init__(
        self, timeout: timedelta | float, *, hostname: str | None, interface: str | None
    ) -> None:
        super().__init__()
        self.timeout_s = _positive_s(timeout)
        self._hostname = hostname
        self._interface = interface
        self._listener: Listener | None = None
        self._configure_lock = threading.Lock()  # held through configure
        self._issue_lock = threading.Lock()  # held while a collective is handed to the backend
        self._lock = threading.Lock()  # guards what follows; held for microseconds
        self._quorum_id = -1
        self._rank = 0
        self._size = 1
        self._open = False
        self._error: ProcessGroupError | None = None
        self._rendezvous: Rendezvous | None = None
        self._connecting: Communicator | None = None
        self._communicator: Communicator | None = None
        self._missed: set[int] = set()  # by the configure under way
        self._members: list[Address] = []  # of the last quorum that was configured
        self._previous_error: tuple[int, ProcessGroupError | None] = (
            -1,
            None,
        )  # (quorum, its error)
        # In the order of their issue; each operation on it is atomic.
        self.in_flight: dict[BackendWork, None] = {}
        self._failed_work: tuple[int, Exception] | None = None  # (quorum, error) of the last one
        self._background: list[threading.Thread] = []
        self._abort_dump = AbortDump(folder) if (folder := abort_dumps()) else None
        self._shut_down = False
        # A backend that is alive when the interpreter ends can abort the process.
        self._pid = os.getpid()
        self._exit_hook = partial(_shut_down_at_exit, weakref.ref(self))
        atexit.register(self._exit_hook)

    def __del__(self) -> None:
        """Dropped without `shutdown`, and maybe by a thread of the backend: a work that ends there may hold
        the last reference. Such a thread can't destroy its backend, which waits for it: the process aborts."""
        # Where it was shut down, its interpreter may be all but gone.
        if getattr(self, "_shut_down", True) or self.leave_to_its_process():
            return
        atexit.unregister(self._exit_hook)
        self._close_in_background([self._communicator], None)
        for thread in self._background:
            atexit.register(thread.join, _SHUTDOWN_S)

    def leave_to_its_process(self) -> bool:
        """Whether this is a process that was forked from the group's: it has none of the group's threads, which
        its backend would wait for, and shares the connections. So it keeps the backend as it is to its end."""
        forked = os.getpid() != self._pid
        if forked and self._communicator is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._communicator))
        return forked

    @abstractmethod
    def _new_communicator(self, rank: int, world_size: int) -> Communicator:
        """A communicator that is not connected yet."""

    # --- membership

    @property
    def quorum_id(self) -> int:
        """Of the last `configure`; -1 before the first."""
        return self._quorum_id

    def advertise(self, host: str) -> None:
        with self._lock:
            if self._hostname is None and self._interface is None and self._listener is None:
                self._hostname = host

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout_s = _positive_s(timeout)

    def address(self) -> bytes:
        with self._lock:
            if self._shut_down:
                raise ProcessGroupError("the process group was shut down; make a new one")
            if self._listener is None:
                self._listener = Listener(choose_address(self._hostname, self._interface))
            return self._listener.address.encode()

    def configure(
        self, quorum_id: int, rank: int, addresses: Sequence[bytes], timeout_s: float
    ) -> None:
        deadline = time.monotonic() + timeout_s
        own = self.address()
        # A ValueError must come here, before the previous quorum is revoked.
        if not 0 <= rank < len(addresses) or addresses[rank] != own:
            raise ValueError(f"rank {rank} of the {len(addresses)} addresses is not this group's")
        known, wrong = _decoded(addresses)
        if wrong:
            raise AddressError("; ".join(wrong.values()), missed=wrong)
        members = list(known.values())
        with self._configure_lock:
            previous = self._enter(quorum_id, rank, len(addresses))
            self._missed = set()
            try:
                self._connect(previous, members, timeout_s, deadline)
            except Exception as error:
                failure = self._record_failure(error)
                raise ProcessGroupError(*failure.args, missed=sorted(self._missed)) from error

    def unreachable(self, addresses: Sequence[bytes], timeout_s: float) -> set[int]:
        members, wrong = _decoded(addresses)
        return wrong.keys() | set(unreachable(members, connect_limit_s(timeout_s)))

    def revoke(self, reason: Exception, *, quorum_id: int | None = None) -> None:
        with self._lock:
            if quorum_id is not None and quorum_id != self._quorum_id:
                return
            self._open = False
            if self._error is None:
                self._error = self._as_error(reason)
            error = self._error
            rendezvous, connecting = self._rendezvous, self._connecting
            communicator = self._communicator
        if self._abort_dump is not None and self.in_flight:
            self._abort_dump.write(self._quorum_id, error)
        if rendezvous is not None:
            rendezvous.abort(error)
        if connecting is not None:
            connecting.interrupt()
        if communicator is not None:
            communicator.interrupt()
            self._abandon(communicator, list(self.in_flight), error)

    def unanswered(self) -> set[int]:
        with self._lock:
            communicator, members = self._communicator, self._members
            if not self._open or communicator is None:
                return set()
        hosts = communicator.unanswered()
        ranks = {rank for rank, member in enumerate(members) if member.host in hosts}
        return ranks - {self._rank} or ({self._rank} if hosts else set())

    @property
    def idle(self) -> bool:
        return self._open and not self.under_way

    @property
    def under_way(self) -> bool:
        return not all(work.is_completed() for work in list(self.in_flight))

    def settle(self) -> Exception | None:
        quorum_id = self._quorum_id if self.bound_quorum is None else self.bound_quorum
        for work in list(self.in_flight):
            if isinstance(work, StreamWork) and work.quorum_id == quorum_id:
                work.settle()
        failed = self._failed_work
        return failed[1] if failed is not None and failed[0] == quorum_id else None

    def errored(self) -> Exception | None:
        return self._error

    def shutdown(self) -> None:
        with self._lock:
            if self._shut_down:
                return
            self._shut_down = True
        atexit.unregister(self._exit_hook)
        self.unregister()
        over = ProcessGroupError("the process group was shut down")
        with self._issue_lock:
            gently = self.idle
            with self._lock:
                gently = gently and self._open
                if gently:
                    # Peers may not have read all that they need for collectives which are done here:
                    # connections end after their last byte, not by a reset that throws it away.
                    self._open, self._error = False, over
        if not gently:
            self.revoke(over)
        with self._configure_lock:
            with self._issue_lock:
                communicator, self._communicator = self._communicator, None
            # In a thread: with an orphaned operation, the backend waits for the operation's thread.
            self._close_in_background([communicator], None)
            deadline = time.monotonic() + _SHUTDOWN_S
            for one in self._background:
                one.join(max(0.0, deadline - time.monotonic()))
            self._background.clear()
            if self._listener is not None:
                self._listener.close()

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    # --- collectives

    def start_allreduce(self, tensors: list[Tensor], opts: AllreduceOptions) -> Work:
        if tensors[0].is_cpu:
            return self._issue_here("allreduce", tensors, opts, watched=False)
        return self.issue("allreduce", tensors, opts)

    def issue(self, operation: str, *args: Any, **kwargs: Any) -> Work:
        if self.host_only and (device := first_device(args)) is not None:
            return self._issue_staged(device, operation, *args, **kwargs)
        return self._issue_here(operation, *args, **kwargs)

    def _issue_staged(self, device: CopyDevice, operation: str, *args: Any, **kwargs: Any) -> Work:
        """`issue` for tensors on `device`, where the backend is `host_only`."""
        raise NotImplementedError

    def _issue_here(self, operation: str, *args: Any, watched: bool = True, **kwargs: Any) -> Work:
        self._drop_ended()
        with self._issue_lock:
            # `configure` takes this lock before it gives the communicator other members, so a
            # collective that saw an open group can't run under the next quorum.
            if not self._open or self.bound_quorum not in (None, self._quorum_id):
                return EndedWork(error=self._refusal(operation))
            assert self._communicator is not None
            quorum_id = self._quorum_id
            communicator = self._communicator
            backend = communicator.backend_for(args)
            start = getattr(backend, operation, None)
            try:
                if start is None:
                    raise NotImplementedError(
                        f"{self.getBackendName()} does not support {operation}"
                    )
                native = start(*args, **kwargs)
                end = communicator.end_of(native) if backend is communicator.backend else None
            except (TypeError, ValueError, NotImplementedError):
                raise  # a mistake in the call, which costs no quorum
            except Exception as cause:
                if "does not support" in str(cause):  # torch's words, in a RuntimeError
                    raise NotImplementedError(str(cause)) from cause
                failure = self.collective_failed(operation, quorum_id, cause)
                failure.__cause__ = cause.with_traceback(None)
                return EndedWork(error=failure)
            work: BackendWork
            if end is not None:
                work = StreamWork(self, native, operation, quorum_id, args, end=end)
            else:
                kind = PointToPointWork if operation in ("send", "recv") else BackendWork
                work = kind(self, native, operation, quorum_id, args)
            self.in_flight[work] = None
        if watched:
            work.watch()
        error = self._error
        if not self._open and error is not None:  # revoked before the work was listed
            communicator.interrupt()
            self._abandon(communicator, [work], error)
        return work

    # --- for its works

    def stream_failed(self, quorum_id: int, error: Exception) -> None:
        """A work of a stream has ended with an error. Any thread."""
        # A kernel of an older quorum may end late.
        if self._failed_work is None or self._failed_work[0] <= quorum_id:
            self._failed_work = (quorum_id, error)

    def _drop_ended(self) -> None:
        """Let go of works whose end nothing else announces; the oldest end first."""
        try:
            while (oldest := next(iter(self.in_flight), None)) is not None:
                if not isinstance(oldest, StreamWork) or not oldest.is_completed():
                    return
        except RuntimeError:  # another thread has dropped one at this very moment
            return

    def collective_failed(
        self, operation: str, quorum_id: int, error: Exception
    ) -> ProcessGroupError:
        """The error to raise for a collective of `quorum_id` that failed with `error`.

        The communicator is useless for all members from now on. It is broken on purpose, which
        tells the neighbours at once. Never blocks. Any thread.
        """
        text = f"{operation} of quorum {quorum_id} failed: {error}"
        self.revoke(ProcessGroupError(text), quorum_id=quorum_id)
        with self._lock:
            first = dict([self._previous_error, (self._quorum_id, self._error)]).get(quorum_id)
        if first is None:
            return ProcessGroupError(text)
        if f"of quorum {quorum_id} " in str(first):  # it names the collective itself
            return ProcessGroupError(str(first))
        return ProcessGroupError(f"{operation} of quorum {quorum_id} failed: {first}")

    # --- inside

    def _refusal(self, operation: str) -> ProcessGroupError:
        if self._quorum_id < 0:
            return ProcessGroupError(f"{operation} before the first configure()")
        if self._open:
            return ProcessGroupError(
                f"{operation} belongs to quorum {self.bound_quorum}, but the members are those of "
                f"quorum {self._quorum_id} now"
            )
        return ProcessGroupError(
            f"{operation} after quorum {self._quorum_id} was revoked: {self._error}"
        )

    def _as_error(self, reason: Exception) -> ProcessGroupError:
        if isinstance(reason, ProcessGroupError):
            return reason
        error = ProcessGroupError(f"revoked: {reason!r}")
        error.__cause__ = reason
        return error

    def _abandon(
        self, communicator: Communicator, works: list[BackendWork], error: ProcessGroupError
    ) -> None:
        """Make revoked works end soon, also those that the backend has lost."""
        # A stream's work is never abandoned: its kernel writes to its tensors until it ends, which the
        # abort sees to.
        works = [work for work in works if not isinstance(work, StreamWork)]
        works = [work for work in works if not work.abandoned and not work.watch()]
        for work in works:
            work.abandoned = True
        if works:
            args = communicator, works, error
            revoke = threading.Thread(
                target=self._end_or_abandon, args=args, name="ft-pg-revoke", daemon=True
            )
            start_or_run(revoke)

    def _end_or_abandon(
        self, communicator: Communicator, works: list[BackendWork], error: ProcessGroupError
    ) -> None:
        # Not at once: a caller that sees the end of a work may use its tensors again, so the
        # backend must be done with them. It nearly always is within a millisecond, and then ends
        # the works itself.
        give_up_at, overdue = time.monotonic() + _ABANDON_WITHIN_S, Overdue()
        quiescent = 0
        while works:
            works[-1].ended_within(_ABANDON_CHECK_S)
            works = [work for work in works if not work.is_completed()]
            quiescent = quiescent + 1 if communicator.quiescent() else 0
            if quiescent >= _ABANDON_CHECKS or overdue.passed(give_up_at, time.monotonic()):
                break
        for work in works:
            communicator.operation_orphaned(work.issued_at + self.timeout_s)
            _log.debug("%s of quorum %d is orphaned", work.operation, work.quorum_id)
            work.fail(error)

    def _enter(self, quorum_id: int, rank: int, size: int) -> Communicator | None:
        """Leave the previous quorum; returns its communicator, interrupted."""
        if quorum_id <= self._quorum_id:
            raise ValueError(
                f"quorum {quorum_id} is not newer than {self._quorum_id}; ids must grow, so that "
                "members of two quorums never meet"
            )
        self.revoke(ProcessGroupError(f"superseded by quorum {quorum_id}"))
        with self._issue_lock, self._lock:
            if self._shut_down:
                raise ProcessGroupError("the process group was shut down; make a new one")
            self._previous_error = (self._quorum_id, self._error)
            self._quorum_id, self._rank, self._size = quorum_id, rank, size
            self._error = None
            previous, self._communicator = self._communicator, None
        return previous

    def _connect(
        self,
        previous: Communicator | None,
        members: list[Address],
        timeout_s: float,
        deadline: float,
    ) -> None:
        communicator, replaced = previous, None
        assert self._listener is not None
        try:
            if communicator is None or not self._reusable(communicator):
                communicator, replaced = None, previous
                self._missed = {self._rank}  # unless a communicator can be made here
                communicator = self._new_communicator(self._rank, self._size)
                self._missed = set()
            rendezvous = Rendezvous(
                self._listener,
                self._quorum_id,
                self._rank,
                members,
                communicator.handle(),
                connect_limit_s(timeout_s),
                on_silence=self.silent_listener,
            )
        except BaseException:  # such as an interface that is gone, or no descriptors that are left
            self._close_in_background([replaced, communicator], None)
            raise
        builder = _Builder(communicator, rendezvous, timeout_s)
        connected = False
        try:
            with self._lock:
                self._raise_if_revoked()
                self._rendezvous = rendezvous
            rendezvous.gather(deadline)
            with self._lock:
                self._raise_if_revoked()
                self._connecting = communicator
            builder.start()
            rendezvous.pump(builder.connected.is_set, deadline)
            if builder.error is not None:
                raise builder.error
            with self._issue_lock, self._lock:
                self._raise_if_revoked()
                self._communicator, self._members = communicator, members
                self._open = connected = True
            rendezvous.finish()
        finally:
            with self._lock:
                self._rendezvous = self._connecting = None
            if not connected:
                self._missed = rendezvous.missed(timeout_s)
                if self._missed:
                    self.missed_listener(sorted(self._missed))
            rendezvous.close()
            self._stop_builder(builder)
            if connected:
                self._close_in_background([replaced], None)
            else:
                self._close_in_background([replaced, communicator], rendezvous)

    def _raise_if_revoked(self) -> None:
        if self._error is not None:
            raise self._error

    def _reusable(self, communicator: Communicator) -> bool:
        """Whether it can be connected again: it has our timeout, and no operation of an earlier quorum holds a thread
        of it."""
        if not communicator.reconnectable or communicator.timeout_s != self.timeout_s:
            return False
        for work in list(self.in_flight):
            work.ended_within(_ABANDON_CHECK_S)
        return not communicator.has_orphans and not self.in_flight

    def _stop_builder(self, builder: _Builder) -> None:
        """Interrupt the builder until it has left the backend."""
        give_up_at, overdue = time.monotonic() + _INTERRUPT_FOR_S, Overdue()
        while builder.ident is not None and not builder.connected.is_set():
            # Repeatedly: the backend connects to one peer after the other.
            builder.communicator.interrupt()
            builder.connected.wait(_INTERRUPT_EVERY_S)
            if overdue.passed(give_up_at, time.monotonic()):
                _log.warning(
                    "quorum %d: a connect can't be interrupted here and ends at its own timeout",
                    self._quorum_id,
                )
                break

    def _close_in_background(
        self, replaced: list[Communicator | None], failed: Rendezvous | None
    ) -> None:
        """Close communicators, and tell the members of a failed rendezvous, in a thread."""
        communicators = [one for one in replaced if one is not None]
        notify = failed is not None and failed.must_notify_abort()
        if not communicators and not notify:
            return

        in_flight = self.in_flight  # the group itself may be gone

        def work() -> None:
            try:
                if failed is not None and notify:
                    failed.notify_abort()
                for one in communicators:
                    one.enter_thread()
                    one.close(partial(_end_works_of, one, in_flight))
            except Exception:  # the thread's outer edge: nothing of the next quorum depends on it
                _log.exception("a process group of an earlier quorum could not be closed")

        thread = threading.Thread(target=work, name="ft-pg-retire", daemon=True)
        start_or_run(thread)
        self._background = [one for one in (*self._background, thread) if one.is_alive()]

    def _record_failure(self, error: Exception) -> ProcessGroupError:
        with self._lock:
            self._open = False
            if self._error is None:
                failure = ProcessGroupError(
                    f"configure of quorum {self._quorum_id} failed: {error}"
                )
                self._error = error if isinstance(error, ProcessGroupError) else failure
            return self._error


def _end_works_of(communicator: Communicator, in_flight: dict[BackendWork, None]) -> None:
    for work in list(in_flight):
        if isinstance(work, StreamWork) and work.end.communicator is communicator:
            work.settle()


def _shut_down_at_exit(group: weakref.ref[ReconfigurableProcessGroup]) -> None:
    alive = group()
    if alive is not None and not alive.leave_to_its_process():
        alive.shutdown()


def _positive_s(timeout: timedelta | float) -> float:
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if seconds <= 0:
        raise ValueError(f"timeout must be positive, not {timeout}")
    return seconds


def _decoded(addresses: Sequence[bytes]) -> tuple[dict[int, Address], dict[int, str]]:
    """(those that can be connected to, what is wrong with the others), by number."""
    known: dict[int, Address] = {}
    wrong: dict[int, str] = {}
    seen: set[bytes] = set()
    for number, data in enumerate(addresses):
        try:
            address = Address.decode(data)
        except ValueError as error:
            wrong[number] = str(error)
            continue
        if data in seen:
            wrong[number] = f"member {number} has the same address as another one"
        else:
            known[number] = address
        seen.add(data)
    return known, wrong
