"""How one thread ends a heal that another one waits in."""

from __future__ import annotations

import os
import threading


class Interrupt:
    """Given to `fetch`, which ends with a HealError soon after `set`. `close` it when that is over."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._closed = False
        self.is_set = False

    def fileno(self) -> int:
        """Readable once it is set."""
        return self._fd

    def set(self) -> None:
        """Any thread; also after `close`."""
        with self._lock:
            self.is_set = True
            if not self._closed:
                os.eventfd_write(self._fd, 1)

    def close(self) -> None:
        """The thread that fetched."""
        with self._lock:
            self._closed = True
            os.close(self._fd)
