"""Starts a lighthouse's process again whenever it ends by itself.

The command's process forks before it has any thread, and its child serves. A library can abort the
child, the kernel can kill it; the next one listens at the same address, and no step is lost. The
child ends with its parent.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypeVar

from lighthouse.files import hold_standard_streams, write_out

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0
STEADY_S = 10.0
"""A child that has lived for this long is started again without a pause."""
BIND_PATIENCE_S = 2.0
"""How long an address may be in use: the kernel may still be taking down the process before."""
BIND_AGAIN_S = 0.02
SIGNAL_LOOK_S = 1.0
"""No wait lasts longer: a signal that comes just before one, or to another thread, interrupts none, and is
handled when it ends."""
_SET_DEATH_SIGNAL = 1

T = TypeVar("T")
Serve = Callable[[str, Callable[[str], None]], int]
"""Serve at an address (empty: the command's own), tell the bound one, return the exit code."""


def keep_running(
    serve: Serve,
    on_listening: Callable[[str], None] = lambda address: None,
    *,
    obey: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGINT),
) -> int:
    """Run `serve` in child processes until one ends as it should; returns the exit code.

    A child that ends before the first one has listened, is told to stop, or returns 0 is not
    replaced. `on_listening` is called here when the first one listens. Call this in a process that
    has no other thread. The signals in `obey` tell it to stop from then on; a child begins with
    their defaults.
    """
    hold_standard_streams()
    keeper = _Keeper(serve, on_listening, obey)
    for signum in obey:
        signal.signal(signum, keeper.stop)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, no exit code of a child is kept
    return keeper.run()


def patiently(bind: Callable[[], T]) -> T:
    """What `bind` returns; called again while the address is in use, for `BIND_PATIENCE_S`."""
    deadline = time.monotonic() + BIND_PATIENCE_S
    while True:
        try:
            return bind()
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() >= deadline:
                raise
            time.sleep(BIND_AGAIN_S)


class Pauses:
    """Between the end of a process and the start of the next one: longer each time, unless it has lived for long."""

    def __init__(self) -> None:
        self._next_s = FIRST_PAUSE_S

    def after(self, lived_s: float) -> float:
        """Seconds to wait, after a process that has lived for `lived_s`."""
        pause_s = FIRST_PAUSE_S if lived_s >= STEADY_S else self._next_s
        self._next_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return pause_s


def ending_of(what: str, code: int) -> str:
    """A line that says how it has ended. `code`: its exit code, or minus a signal."""
    ending = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"lighthouse: {what} ended ({ending}); it is started again\n"


class _Keeper:
    def __init__(
        self,
        serve: Serve,
        on_listening: Callable[[str], None],
        obey: tuple[signal.Signals, ...],
    ) -> None:
        self._serve, self._on_listening, self._obey = serve, on_listening, obey
        self._child = 0
        self._stopping = False
        self._address = ""

    def stop(self, signum: int, _frame: object) -> None:
        self._stopping = True
        if self._child:
            with suppress(ProcessLookupError):
                os.kill(self._child, signum)

    def run(self) -> int:
        pauses = Pauses()
        while True:
            began = time.monotonic()
            code = self._one()
            if self._stopping:
                return max(code, 0)
            if code == 0 or not self._address:
                return code if code >= 0 else 1
            write_out(sys.stderr, ending_of("its process", code))
            time.sleep(pauses.after(time.monotonic() - began))

    def _one(self) -> int:
        """Run one child; its exit code, or minus the signal that has ended it."""
        read_end, write_end = os.pipe()
        parent = os.getpid()
        write_out(sys.stdout)
        # A child has this process's handlers at first, and would take a signal for no end of its own.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._obey)
        try:
            self._child = os.fork()
        except OSError as error:  # no process, or no memory, is left
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.close(read_end)
            os.close(write_end)
            if not self._address:
                raise
            write_out(sys.stderr, f"lighthouse: no process can be started ({error})\n")
            return 1
        if not self._child:
            os.close(read_end)
            self._be_child(parent, write_end, mask)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(write_end)
        if self._stopping:  # the signal came before there was a child
            os.kill(self._child, signal.SIGTERM)
        with os.fdopen(read_end) as pipe:
            said = pipe.read()
        if said and not self._address:
            self._address = said
            self._on_listening(said)
        with os.fdopen(os.pidfd_open(self._child), "rb") as ended:
            while not select.select([ended], [], [], SIGNAL_LOOK_S)[0]:
                pass
        _, status = os.waitpid(self._child, 0)
        self._child = 0
        return os.waitstatus_to_exitcode(status)

    def _be_child(self, parent: int, write_end: int, mask: Iterable[int]) -> None:
        code = 1
        try:
            for signum in self._obey:
                signal.signal(signum, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            if sys.platform.startswith("linux"):
                ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)

            def listening(address: str) -> None:
                os.write(write_end, address.encode())
                os.close(write_end)

            code = self._serve(self._address, listening)
        except SystemExit as ending:
            code = ending.code if isinstance(ending.code, int) else 1
        finally:
            write_out(sys.stdout)
            write_out(sys.stderr)
            os._exit(code)
