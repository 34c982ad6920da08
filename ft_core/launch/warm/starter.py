"""The supervisor's side of warm starts: `WarmStarter.popen` is `subprocess.Popen`, and fast for a
process that is started again.

1. The first processes are started cold. The first of them that commits a step tells its modules.
2. A template imports the libraries among them.
3. From then on processes are forked from the template, while nothing says that a cold start would give
   a different process. In doubt it is started cold, and a debug line of the logger `ft_core` says why.

A template that has died, or whose files were changed, is replaced.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from ft_core.environment import warm_starts_allowed
from ft_core.launch.warm import learn
from ft_core.launch.warm.orders import PLACES, Channel, Started, place_order

log = logging.getLogger("ft_core")

ANSWER_S = 5.0
"""A template that does not answer an order for this long is killed."""
REFUSALS = 3
"""Templates that were made and then found unsafe to fork; after that there are no more."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Before the second template that replaces one, and at most; doubled from one to the next."""
AGAIN_S = 0.1
"""Before the next try to read a report."""
_START = "import sys; sys.path.insert(0, {root!r}); from ft_core.launch.warm.template import main; main()"
_ROOM = f"({learn.TITLE})".ljust(4096)
"""The last word of the template's command line, over which a replacement's is written."""
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37


def warm_starts(
    wanted: bool, *, places: Sequence[str] = (), renew: Sequence[str] = ()
) -> WarmStarter | None:
    """A starter, or None: not `wanted`, switched off by FT_WARM_START=0, or not possible here.

    Args:
        places: variables, or prefixes of them (with a `_` at the end), that the caller sets anew for
            each process, besides the usual ones.
        renew: functions, as "module:name", that are called in each replacement before its script, if
            the template has loaded the module: they mend what an import has kept of the environment.
    """
    if not (wanted and warm_starts_allowed() and sys.platform.startswith("linux")):
        return None
    return WarmStarter(places=places, renew=renew)


class WarmStarter:
    """Starts processes, and keeps a template for them. Any thread; several wait for each other.

    Args:
        places, renew: see `warm_starts`.
        answer_s: see `ANSWER_S`.
    """

    def __init__(
        self,
        *,
        places: Sequence[str] = (),
        renew: Sequence[str] = (),
        answer_s: float = ANSWER_S,
    ) -> None:
        self._places, self._renew, self._answer_s = (*PLACES, *places), renew, answer_s
        self._lock = threading.Lock()
        self._name = f"ft-warm-{os.getpid()}-{secrets.token_hex(8)}"
        self._listener: socket.socket | None = None
        self._keeper: threading.Thread | None = None
        self._env: dict[str, str] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._ready, self._closed = threading.Event(), threading.Event()
        self._reason = "there is no template yet"

    def popen(self, command: Sequence[str], **options: Any) -> Started:
        """`subprocess.Popen(command, **options)`. Its process is a child of this one in any case."""
        env = dict(options.pop("env", None) or os.environ)
        with self._lock:
            if self._keeper is None and not self._closed.is_set():
                self._env = env
                self._begin()
            if self._listener is not None:
                env = {**env, learn.ENV_REPORT: self._name}
        return Started(self._fork, command, env=env, **options)

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until the next process can be forked; False: it took too long."""
        return self._ready.wait(timeout_s)

    @property
    def template_pid(self) -> int:
        """Process id of the template; 0: there is none."""
        with self._lock:
            return 0 if self._process is None else self._process.pid

    def close(self) -> None:
        """End the template. Processes that were started go on. Idempotent."""
        with self._lock:
            self._closed.set()
            self._stop_listening()
            if self._process is not None:
                self._process.kill()
        if self._keeper is not None:
            self._keeper.join()

    # ---------------------------------------------------------------- the template

    def _begin(self) -> None:
        """Where it fails the process is started cold, and the next one tries again. Holds `_lock`."""
        keeper = threading.Thread(target=self._keep, name="ft-warm", daemon=True)
        try:
            self._listen()
            keeper.start()
        except (OSError, RuntimeError) as error:  # no descriptors are left, or no threads
            self._reason = str(error)
            self._stop_listening()
            return
        self._keeper = keeper

    def _listen(self) -> None:
        with contextlib.ExitStack() as undo:
            listener = undo.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind("\0" + self._name)
            listener.listen()
            undo.pop_all()
        self._listener = listener

    def _stop_listening(self) -> None:
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the keeper
            self._listener.close()
            self._listener = None

    def _keep(self) -> None:
        """The keeper's thread. Templates are its children: they end with it (`die_with`)."""
        for _ in range(REFUSALS):
            told = self._await_report()
            pause_s, why = 0.0, ""
            while told is not None and not why and not self._closed.wait(pause_s):
                try:
                    why = self._live(told)
                except OSError as error:  # no descriptors, processes or memory are left for it
                    self._reason = str(error)
                pause_s = min(max(2 * pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
            if self._closed.is_set():
                return
            self._reason = why or self._reason
            log.debug("no warm starts: %s", why)
            with self._lock, contextlib.suppress(OSError):
                if not self._closed.is_set():
                    self._listen()
        with self._lock:
            self._stop_listening()

    def _await_report(self) -> dict[str, Any] | None:
        """What the first process that commits tells; None: closed."""
        while (listener := self._listener) is not None:
            try:
                told = learn.receive(listener)
            except (OSError, ValueError):
                self._closed.wait(AGAIN_S)  # no descriptors may be left, and it would fail at once
                continue
            with self._lock:
                self._stop_listening()
            return told
        return None

    def _live(self, told: Mapping[str, Any]) -> str:
        """A template from its start to its end. Returns why nothing can be forked from it, or ""."""
        ours, theirs = socket.socketpair()
        with contextlib.closing(Channel(ours)) as channel, theirs:
            return self._live_with(channel, theirs, told)

    def _live_with(self, channel: Channel, theirs: socket.socket, told: Mapping[str, Any]) -> str:
        start = _START.format(root=str(learn.OUR_ROOT))
        command = [sys.executable, "-c", start, str(theirs.fileno()), str(os.getpid()), _ROOM]
        with self._lock, theirs:
            if self._closed.is_set():
                return ""
            self._process = process = subprocess.Popen(
                command,
                env=self._env,
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C is not for it
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=None if log.isEnabledFor(logging.DEBUG) else subprocess.DEVNULL,
            )
        self._reason = "the template still imports"
        try:
            channel.send(told)
            said, _ = channel.receive()
        except (OSError, EOFError):
            said = {"refusal": "the template ended while it imported"}
        if not said["refusal"]:
            log.debug("a template (process %d) has %d modules", process.pid, said["modules"])
            with self._lock:
                self._channel = channel
            self._ready.set()
        process.wait()
        with self._lock:
            self._ready.clear()
            self._process = self._channel = None
            self._reason = "the template has ended"
        return str(said["refusal"])

    # ---------------------------------------------------------------- processes

    def _fork(self, given: Mapping[str, Any], descriptors: Sequence[int]) -> int:
        """As `Started` needs it."""
        with self._lock:
            done = self._order(given, descriptors)
        if isinstance(done, int):
            return done
        log.debug("cold start: %s", done)
        return 0

    def _order(self, given: Mapping[str, Any], descriptors: Sequence[int]) -> int | str:
        """A child's process id, or why it is to be started cold."""
        if self._channel is None or self._process is None:
            return self._reason
        hold, go = os.pipe()
        was_subreaper = _is_subreaper()
        _set_subreaper(True)
        try:
            order = place_order(given, descriptors, self._places, self._renew)
            if isinstance(order, str):
                return order
            self._channel.send(order.message(), [*descriptors, hold])
            said, _ = self._channel.receive(self._answer_s)
            if "cold" in said:
                return str(said["cold"])
            pid = int(said["pid"])
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # it is a child of ours
            os.write(go, b"!")
            return pid
        except (OSError, EOFError, ValueError) as error:
            self._process.send_signal(signal.SIGKILL)
            return f"the template does not answer ({error or type(error).__name__})"
        finally:
            _set_subreaper(was_subreaper)
            os.close(hold)
            os.close(go)


def _prctl(*arguments: Any) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(*arguments) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def _is_subreaper() -> bool:
    found = ctypes.c_int()
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(found), 0, 0, 0)
    return bool(found.value)


def _set_subreaper(on: bool) -> None:
    """Whether processes below this one whose parent ends become this one's children."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)
