"""What a backend must be able to do for a group of changing members, and the thread it does it in."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Any

from ft_core.process_group.rendezvous import Rendezvous


class Communicator(ABC):
    """A connected backend and the way to break it. One at a time belongs to a group."""

    backend: Any  # c10d.Backend; set by connect()
    backend_futures = False  # whether works are to keep the backend's own waits and futures
    tainted = False  # an operation stayed behind in the backend and holds one of its threads

    @abstractmethod
    def handle(self) -> bytes:
        """What the other members need to reach it, b"" if nothing; any thread."""

    @abstractmethod
    def connect(self, meeting: Rendezvous, timeout_s: float) -> None:
        """Connect all members of the meeting; blocks; may raise anything. Builder thread.

        `timeout_s` is when the group interrupts; the backend's own timeout must come later.
        """

    @abstractmethod
    def interrupt(self) -> None:
        """End pending collectives, or a blocked `connect`, with an error. Any thread, any number
        of times, quick. Afterwards the communicator can at most be connected again.

        Some operations may stay behind in the backend until their timeout (`device_sockets` says
        why).
        """

    @abstractmethod
    def at_rest(self) -> bool:
        """After an interrupt: whether what stayed behind is asleep and leaves its tensors alone."""

    def stayed_behind(self, until: float) -> None:
        """An operation is in the backend that nobody can end before `until` (`time.monotonic()`)."""
        self.tainted = True

    @abstractmethod
    def close(self) -> None:
        """Give everything back; may block for tens of milliseconds. Called once."""

    @property
    @abstractmethod
    def reconnectable(self) -> bool:
        """Whether `connect` may be called again after a success and an interrupt."""


class Builder(threading.Thread):
    """Connects one communicator."""

    def __init__(self, communicator: Communicator, meeting: Rendezvous, timeout_s: float) -> None:
        super().__init__(name="ft-pg-configure", daemon=True)
        self.communicator = communicator
        self.error: Exception | None = None
        self.connected = threading.Event()  # or failed
        self._meeting = meeting
        self._timeout_s = timeout_s

    def run(self) -> None:
        try:
            self.communicator.connect(self._meeting, self._timeout_s)
        except Exception as error:
            self.error = error
        self.connected.set()
        self._meeting.wake()
