"""A process group whose members connect to each other: what Gloo and NCCL have in common.

`configure` runs in two threads: the caller's serves the meeting (`Meeting.pump`) and watches the
deadline and revocation; a short-lived one sits in the backend's blocking connect. So a revocation
never waits for a backend: it sets a flag, hangs up, and interrupts the communicator. The short-lived
thread then also destroys the communicator of the quorum before, which takes Gloo 10 to 30 ms that
nobody needs to wait for.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any

from torch.distributed import Work

from ft_core.process_group.base import ProcessGroup
from ft_core.process_group.errors import ProcessGroupError
from ft_core.process_group.interfaces import choose_address
from ft_core.process_group.meeting import Doorbell, Meeting
from ft_core.process_group.wire import Address
from ft_core.process_group.work import BackendWork, FailedWork, PointToPointWork

_log = logging.getLogger(__name__)
_INTERRUPT_EVERY_S = 0.005
_INTERRUPT_FOR_S = 5.0
_BUILDERS_MAX = 4


class Communicator(ABC):
    """A connected backend and the way to break it. One at a time belongs to a group."""

    backend: Any  # c10d.Backend; set by connect()

    @abstractmethod
    def handle(self) -> bytes:
        """What the other members need to reach it, b"" if nothing; any thread."""

    @abstractmethod
    def connect(self, meeting: Meeting, timeout_s: float) -> None:
        """Connect all members of the meeting; blocks; may raise anything. Builder thread.

        `timeout_s` is when the group interrupts; the backend's own timeout must come later.
        """

    @abstractmethod
    def interrupt(self) -> None:
        """End pending collectives, or a blocked `connect`, with an error. Any thread, any number
        of times, quick. Afterwards the communicator can at most be connected again."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back; may block for tens of milliseconds. Called once."""

    @property
    @abstractmethod
    def reconnectable(self) -> bool:
        """Whether `connect` may be called again after a success and an interrupt."""


class _Builder(threading.Thread):
    """Connects one communicator; afterwards closes `outworn` ones."""

    def __init__(self, communicator: Communicator, meeting: Meeting, timeout_s: float) -> None:
        super().__init__(name="ft-pg-configure", daemon=True)
        self.communicator = communicator
        self.error: Exception | None = None
        self.connected = threading.Event()
        self.outworn: list[Communicator] = []
        self._released = threading.Event()
        self._meeting = meeting
        self._timeout_s = timeout_s

    def run(self) -> None:
        try:
            self.communicator.connect(self._meeting, self._timeout_s)
        except Exception as error:
            self.error = error
        self.connected.set()
        self._meeting.wake()
        self._released.wait()
        for communicator in self.outworn:
            communicator.close()
        self.outworn.clear()

    def release(self, outworn: Sequence[Communicator | None]) -> None:
        """Let the thread go on to close these and end."""
        self.outworn.extend(one for one in outworn if one is not None)
        self._released.set()


class MeshProcessGroup(ProcessGroup):
    """See `ProcessGroup`. Subclasses say how a communicator is made."""

    def __init__(self, *, hostname: str | None, interface: str | None) -> None:
        super().__init__()
        self._hostname = hostname
        self._interface = interface
        self._doorbell: Doorbell | None = None
        self._configure_lock = threading.Lock()  # held through configure
        self._issue_lock = threading.Lock()  # held while a collective is handed to the backend
        self._lock = threading.Lock()  # guards what follows; held for microseconds
        self._quorum_id = -1
        self._rank = 0
        self._size = 1
        self._open = False
        self._error: ProcessGroupError | None = None
        self._meeting: Meeting | None = None
        self._connecting: Communicator | None = None
        self._communicator: Communicator | None = None
        self._epitaph: tuple[int, ProcessGroupError | None] = (-1, None)  # of the quorum before
        self._in_flight: deque[tuple[Work, str]] = deque()
        self._builders: list[_Builder] = []
        self._shut_down = False

    @abstractmethod
    def _new_communicator(self, rank: int, world_size: int) -> Communicator:
        """A communicator that is not connected yet."""

    # --- membership

    @property
    def quorum_id(self) -> int:
        """Of the last `configure`; -1 before the first."""
        return self._quorum_id

    def address(self) -> bytes:
        with self._lock:
            if self._shut_down:
                raise ProcessGroupError("the process group was shut down; make a new one")
            if self._doorbell is None:
                self._doorbell = Doorbell(choose_address(self._hostname, self._interface))
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
        for one in (connecting, communicator):
            if one is not None:
                one.interrupt()

    def errored(self) -> Exception | None:
        with self._issue_lock:
            self._note_finished()
        return self._error

    def collective_finished(self) -> None:
        """A work was waited for: let go of the tensors of those that are done."""
        if self._issue_lock.acquire(blocking=False):
            try:
                self._note_finished()
            finally:
                self._issue_lock.release()

    def shutdown(self) -> None:
        with self._lock:
            if self._shut_down:
                return
            self._shut_down = True
        self.unregister()
        self.revoke(ProcessGroupError("the process group was shut down"))
        with self._configure_lock:
            with self._issue_lock:
                communicator, self._communicator = self._communicator, None
                self._in_flight.clear()
            if communicator is not None:
                communicator.close()
            for builder in self._builders:
                builder.join()
            self._builders.clear()
            if self._doorbell is not None:
                self._doorbell.close()

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    # --- collectives

    def _issue(self, operation: str, *args: Any, **kwargs: Any) -> Work:
        with self._issue_lock:
            # Inside the lock: configure() waits for it before it gives the communicator other
            # members, so a collective that saw an open group can't run under the next quorum.
            if not self._open:
                return FailedWork(self._refusal(operation))
            assert self._communicator is not None
            self._note_finished()
            try:
                work = getattr(self._communicator.backend, operation)(*args, **kwargs)
            except (TypeError, ValueError):
                raise
            except Exception as error:
                failure = self.collective_failed(operation, self._quorum_id, error, over=True)
                failure.__cause__ = error
                return FailedWork(failure)
            if operation in ("send", "recv"):
                return PointToPointWork(self, work, operation, self._quorum_id, args[0])
            self._in_flight.append((work, operation))
            return BackendWork(self, work, operation, self._quorum_id)

    def collective_failed(
        self, operation: str, quorum_id: int, error: Exception, *, over: bool
    ) -> ProcessGroupError:
        """The error to raise for a collective of `quorum_id` that failed with `error`.

        If it is `over` (not merely waited for too briefly), the communicator is of no use any more
        for anyone: it is broken on purpose, which tells the neighbours at once.
        """
        if over:
            text = f"{operation} of quorum {quorum_id} failed: {error}"
            self.revoke(ProcessGroupError(text), quorum_id=quorum_id)
        with self._lock:
            epitaphs = dict([self._epitaph, (self._quorum_id, self._error)])
            first = epitaphs.get(quorum_id)
        if first is None:
            return ProcessGroupError(f"{operation} of quorum {quorum_id}: {error}")
        return ProcessGroupError(f"{operation} of quorum {quorum_id} failed: {first}")

    # --- inside

    def _refusal(self, operation: str) -> ProcessGroupError:
        if self._quorum_id < 0:
            return ProcessGroupError(f"{operation} before the first configure()")
        return ProcessGroupError(
            f"{operation} after quorum {self._quorum_id} was revoked: {self._error}"
        )

    def _as_error(self, reason: Exception) -> ProcessGroupError:
        if isinstance(reason, ProcessGroupError):
            return reason
        error = ProcessGroupError(f"revoked: {reason!r}")
        error.__cause__ = reason
        return error

    def _note_finished(self) -> None:
        """Forget collectives that are done, and notice those that failed. Issue lock held."""
        while self._in_flight and self._in_flight[0][0].is_completed():
            work, operation = self._in_flight.popleft()
            try:
                work.wait()  # returns at once; is_success() prints a deprecation warning
            except Exception as error:
                self.collective_failed(operation, self._quorum_id, error, over=True)

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
            self._in_flight.clear()
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
        if previous is None or not previous.reconnectable:
            communicator, outworn = self._new_communicator(self._rank, self._size), previous
        assert communicator is not None and self._doorbell is not None
        meeting = Meeting(
            self._doorbell, self._quorum_id, self._rank, addresses, communicator.handle()
        )
        builder = _Builder(communicator, meeting, timeout_s)
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
            self._wind_up(builder, [outworn] if kept else [outworn, communicator])

    def _wind_up(self, builder: _Builder, outworn: list[Communicator | None]) -> None:
        """See the builder out of the backend, interrupting it until it is."""
        if builder.ident is None:  # never started: there is nothing that could block
            for one in outworn:
                if one is not None:
                    one.close()
            return
        give_up_at = time.monotonic() + _INTERRUPT_FOR_S
        while not builder.connected.is_set():
            # Once is not enough: the backend connects to one peer after the other.
            builder.communicator.interrupt()
            builder.connected.wait(_INTERRUPT_EVERY_S)
            if time.monotonic() > give_up_at:
                _log.warning("quorum %d: a connect can't be interrupted here and ends at its own "
                             "timeout", self._quorum_id)  # fmt: skip
                break
        builder.release(outworn)
        self._builders = [one for one in self._builders if one.is_alive()]
        self._builders.append(builder)
        if len(self._builders) > _BUILDERS_MAX:
            self._builders.pop(0).join()

    def _give_up(self, error: Exception) -> ProcessGroupError:
        with self._lock:
            self._open = False
            if self._error is None:
                self._error = (
                    error
                    if isinstance(error, ProcessGroupError)
                    else ProcessGroupError(f"configure of quorum {self._quorum_id} failed: {error}")
                )
            return self._error
