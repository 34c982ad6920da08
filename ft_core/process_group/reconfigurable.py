"""A process group whose members connect to each other: what Gloo and NCCL have in common.

`configure` runs in two threads: the caller's serves the meeting (`Rendezvous.pump`) and watches the
deadline and revocation; a short-lived one sits in the backend's blocking connect. So a revocation
never waits for a backend: it sets a flag, hangs up, and interrupts the communicator. Another one
destroys the communicator of the quorum before, which takes Gloo 10 to 30 ms that nobody needs to
wait for. None of these threads outlives what it does.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from abc import abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed import AllreduceOptions, Work

from ft_core.process_group.base import ProcessGroup, outputs_of
from ft_core.process_group.communicator import Builder, Communicator
from ft_core.process_group.errors import ProcessGroupError
from ft_core.process_group.interfaces import choose_address
from ft_core.process_group.rendezvous import Listener, Rendezvous
from ft_core.process_group.wire import Address
from ft_core.process_group.work import BackendWork, FailedWork, PointToPointWork, StreamWork

_log = logging.getLogger(__name__)
_INTERRUPT_EVERY_S = 0.005
_INTERRUPT_FOR_S = 5.0
_LET_GO_CHECK_S = 0.005
_LET_GO_CHECKS = 3
_LET_GO_WITHIN_S = 1.0
_SHUTDOWN_S = 2.0


class ReconfigurableProcessGroup(ProcessGroup):
    """See `ProcessGroup`. Subclasses say how a communicator is made."""

    def __init__(
        self, timeout: timedelta | float, *, hostname: str | None, interface: str | None
    ) -> None:
        super().__init__()
        self.timeout_s = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if self.timeout_s <= 0:
            raise ValueError(f"timeout must be positive, not {timeout}")
        self._hostname = hostname
        self._interface = interface
        self._doorbell: Listener | None = None
        self._configure_lock = threading.Lock()  # held through configure
        self._issue_lock = threading.Lock()  # held while a collective is handed to the backend
        self._lock = threading.Lock()  # guards what follows; held for microseconds
        self._quorum_id = -1
        self._rank = 0
        self._size = 1
        self._open = False
        self._error: ProcessGroupError | None = None
        self._meeting: Rendezvous | None = None
        self._connecting: Communicator | None = None
        self._communicator: Communicator | None = None
        self._epitaph: tuple[int, ProcessGroupError | None] = (-1, None)  # of the quorum before
        self._in_flight: set[BackendWork] = set()  # single operations on it are atomic
        self._background: list[threading.Thread] = []
        self._shut_down = False
        # A backend that is alive when the interpreter ends can abort the process.
        self._exit_hook = partial(_shut_down_at_exit, weakref.ref(self))
        atexit.register(self._exit_hook)

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
            if self._hostname is None and self._interface is None and self._doorbell is None:
                self._hostname = host

    def address(self) -> bytes:
        with self._lock:
            if self._shut_down:
                raise ProcessGroupError("the process group was shut down; make a new one")
            if self._doorbell is None:
                self._doorbell = Listener(choose_address(self._hostname, self._interface))
            return self._doorbell.address.encode()

    def configure(
        self, quorum_id: int, rank: int, addresses: Sequence[bytes], timeout_s: float
    ) -> None:
        deadline = time.monotonic() + timeout_s
        own = self.address()
        for address in addresses:
            Address.decode(address)  # a ValueError here, before anything is torn down
        if not 0 <= rank < len(addresses) or addresses[rank] != own:
            raise ValueError(f"rank {rank} of the {len(addresses)} addresses is not this group's")
        if len(set(addresses)) != len(addresses):
            raise ValueError("two members have the same address")
        with self._configure_lock:
            previous = self._begin(quorum_id, rank, len(addresses))
            try:
                self._connect(previous, list(addresses), timeout_s, deadline)
            except Exception as error:
                failure = self._give_up(error)
                if failure is error:
                    raise
                raise failure from error

    def revoke(self, reason: Exception, *, quorum_id: int | None = None) -> None:
        with self._lock:
            if quorum_id is not None and quorum_id != self._quorum_id:
                return
            self._open = False
            if self._error is None:
                self._error = self._as_error(reason)
            error = self._error
            meeting, connecting = self._meeting, self._connecting
            communicator = self._communicator
        if meeting is not None:
            meeting.abort(error)
        if connecting is not None:
            connecting.interrupt()
        if communicator is not None:
            communicator.interrupt()
            self._let_go(communicator, list(self._in_flight), error)

    def errored(self) -> Exception | None:
        return self._error

    def shutdown(self) -> None:
        with self._lock:
            if self._shut_down:
                return
            self._shut_down = True
        atexit.unregister(self._exit_hook)
        self.unregister()
        self.revoke(ProcessGroupError("the process group was shut down"))
        with self._configure_lock:
            with self._issue_lock:
                communicator, self._communicator = self._communicator, None
            # In a thread: the backend may have lost an operation, whose thread it then waits for.
            self._retire([communicator], None)
            deadline = time.monotonic() + _SHUTDOWN_S
            for one in self._background:
                one.join(max(0.0, deadline - time.monotonic()))
            self._background.clear()
            if self._doorbell is not None:
                self._doorbell.close()

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    # --- collectives

    def start_allreduce(self, tensors: list[Tensor], opts: AllreduceOptions) -> Work:
        return self._issue("allreduce", tensors, opts, watched=not tensors[0].is_cpu)

    def _issue(self, operation: str, *args: Any, watched: bool = True, **kwargs: Any) -> Work:
        with self._issue_lock:
            # Inside the lock: configure() waits for it before it gives the communicator other
            # members, so a collective that saw an open group can't run under the next quorum.
            if not self._open or self.bound_quorum not in (None, self._quorum_id):
                return FailedWork(self._refusal(operation))
            assert self._communicator is not None
            quorum_id = self._quorum_id
            try:
                native = getattr(self._communicator.backend, operation)(*args, **kwargs)
            except (TypeError, ValueError):
                raise
            except Exception as cause:
                failure = self.collective_failed(operation, quorum_id, cause)
                failure.__cause__ = cause.with_traceback(None)
                return FailedWork(failure)
            kind = BackendWork
            if self._communicator.backend_futures:
                kind = StreamWork
            elif operation in ("send", "recv"):
                kind = PointToPointWork
            work = kind(self, native, operation, quorum_id, outputs_of(operation, args))
            self._in_flight.add(work)
            communicator = self._communicator
        if watched:
            work.watch()
        error = self._error
        if not self._open and error is not None:  # revoked meanwhile, before the work was listed
            communicator.interrupt()
            self._let_go(communicator, [work], error)
        return work

    # --- for its works

    def work_ended(self, work: BackendWork) -> None:
        self._in_flight.discard(work)

    def collective_failed(
        self, operation: str, quorum_id: int, error: Exception
    ) -> ProcessGroupError:
        """The error to raise for a collective of `quorum_id` that failed with `error`.

        The communicator is of no use any more for anyone: it is broken on purpose, which tells the
        neighbours at once. Never blocks.
        """
        text = f"{operation} of quorum {quorum_id} failed: {error}"
        self.revoke(ProcessGroupError(text), quorum_id=quorum_id)
        with self._lock:
            first = dict([self._epitaph, (self._quorum_id, self._error)]).get(quorum_id)
        if first is None:
            return ProcessGroupError(text)
        if f"of quorum {quorum_id} " in str(first):  # says so itself
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

    def _let_go(
        self,
        communicator: Communicator,
        works: list[BackendWork],
        error: ProcessGroupError,
    ) -> None:
        """See to it that revoked works end soon, also those that stay behind in the backend."""
        works = [work for work in works if not work.watch()]
        if not works:
            return
        threading.Thread(
            target=self._outlast, args=(communicator, works, error), name="ft-pg-revoke", daemon=True
        ).start()

    def _outlast(
        self,
        communicator: Communicator,
        works: list[BackendWork],
        error: ProcessGroupError,
    ) -> None:
        # Not at once: who is told of the end may use the tensors again, so the backend must be
        # done with them. It nearly always is within a millisecond, and then ends the works itself.
        give_up_at = time.monotonic() + _LET_GO_WITHIN_S
        resting = 0
        while works:
            works[-1].ended_within(_LET_GO_CHECK_S)
            works = [work for work in works if not work.is_completed()]
            resting = resting + 1 if communicator.at_rest() else 0
            if resting >= _LET_GO_CHECKS or time.monotonic() > give_up_at:
                break
        for work in works:
            communicator.stayed_behind(work.issued_at + self.timeout_s)
            _log.debug("%s of quorum %d: let go of", work.operation, work.quorum_id)
            work.resolve(None, error)

    def _begin(self, quorum_id: int, rank: int, size: int) -> Communicator | None:
        """Leave the old quorum; returns its communicator, interrupted."""
        if quorum_id <= self._quorum_id:
            raise ValueError(
                f"quorum {quorum_id} is not newer than {self._quorum_id}; ids must grow, so that "
                "members of two quorums never meet"
            )
        self.revoke(ProcessGroupError(f"superseded by quorum {quorum_id}"))
        with self._issue_lock, self._lock:
            if self._shut_down:
                raise ProcessGroupError("the process group was shut down; make a new one")
            self._epitaph = (self._quorum_id, self._error)
            self._quorum_id, self._rank, self._size = quorum_id, rank, size
            self._error = None
            previous, self._communicator = self._communicator, None
        return previous

    def _connect(
        self,
        previous: Communicator | None,
        addresses: list[bytes],
        timeout_s: float,
        deadline: float,
    ) -> None:
        communicator, outworn = previous, None
        if previous is None or not self._reusable(previous):
            communicator, outworn = self._new_communicator(self._rank, self._size), previous
        assert communicator is not None
        assert self._doorbell is not None
        meeting = Rendezvous(
            self._doorbell, self._quorum_id, self._rank, addresses, communicator.handle()
        )
        builder = Builder(communicator, meeting, timeout_s)
        kept = False
        try:
            with self._lock:
                if self._error is not None:
                    raise self._error
                self._meeting = meeting
            meeting.gather(deadline)
            with self._lock:
                if self._error is not None:
                    raise self._error
                self._connecting = communicator
            builder.start()
            meeting.pump(builder.connected.is_set, deadline)
            if builder.error is not None:
                raise builder.error
            with self._issue_lock, self._lock:
                if self._error is not None:
                    raise self._error
                self._communicator = communicator
                self._open = kept = True
            meeting.finish()
        finally:
            with self._lock:
                self._meeting = self._connecting = None
            meeting.close()
            self._wind_up(builder)
            if kept:
                self._retire([outworn], None)
            else:
                self._retire([outworn, communicator], meeting)

    def _reusable(self, communicator: Communicator) -> bool:
        """Whether no operation of an earlier quorum can hold a thread of it for long."""
        if not communicator.reconnectable:
            return False
        for work in list(self._in_flight):
            work.ended_within(_LET_GO_CHECK_S)
        return not communicator.tainted and not self._in_flight

    def _wind_up(self, builder: Builder) -> None:
        """See the builder out of the backend, interrupting it until it is."""
        give_up_at = time.monotonic() + _INTERRUPT_FOR_S
        while builder.ident is not None and not builder.connected.is_set():
            # Once is not enough: the backend connects to one peer after the other.
            builder.communicator.interrupt()
            builder.connected.wait(_INTERRUPT_EVERY_S)
            if time.monotonic() > give_up_at:
                _log.warning("quorum %d: a connect can't be interrupted here and ends at its own "
                             "timeout", self._quorum_id)  # fmt: skip
                break

    def _retire(self, outworn: list[Communicator | None], meeting: Rendezvous | None) -> None:
        """Close communicators, and take leave from a failed meeting, in the background."""
        communicators = [one for one in outworn if one is not None]
        leave = meeting is not None and meeting.leave_owed()
        if not communicators and not leave:
            return

        def work() -> None:
            if meeting is not None and leave:
                meeting.notify_abort()
            for one in communicators:
                one.close()

        thread = threading.Thread(target=work, name="ft-pg-retire", daemon=True)
        thread.start()
        self._background = [one for one in self._background if one.is_alive()] + [thread]

    def _give_up(self, error: Exception) -> ProcessGroupError:
        with self._lock:
            self._open = False
            if self._error is None:
                failure = ProcessGroupError(f"configure of quorum {self._quorum_id} failed: {error}")
                self._error = error if isinstance(error, ProcessGroupError) else failure
            return self._error


def _shut_down_at_exit(group: weakref.ref[ReconfigurableProcessGroup]) -> None:
    alive = group()
    if alive is not None:
        alive.shutdown()
