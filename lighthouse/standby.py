"""Lighthouses that run in the background and end by themselves.

| which | it is started by | it ends |
|---|---|---|
| for one machine | `python -m lighthouse.standby --bind tcp://127.0.0.1:29510 --exit-when-idle 120`, which prints its address and returns; `ft_core` does that where it is given no address | after 120 s without connections and requests |
| for one job | `LaunchedLighthouse`, in the job's launcher | with the launcher, however that ends |

Each runs in processes of its own (`keeper.py`): if a library aborts the serving process, or the kernel
kills it, another one serves at the same address, and a launcher lives on.

A launcher keeps the writing end of a pipe, which its lighthouse reads as its standard input. When `shutdown` writes
to it, or it is closed by the launcher's end, the lighthouse ends.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import click

from lighthouse import sockets
from lighthouse.config import LighthouseConfig, Timeouts
from lighthouse.files import write_out
from lighthouse.keeper import Pauses, ending_of, keep_running, patiently
from lighthouse.server import LighthouseServer
from lighthouse.waits import Overdue

STARTS = 3
"""How often a launcher's lighthouse is started that is killed before it listens."""
MAX_LOOK_S = 5.0
"""The longest time between two looks at the connections (at least four in the idle time)."""
_LISTENING, _FAILED = "listening ", "failed "


class LaunchedLighthouse:
    """A lighthouse in processes of its own; `address()` is where it listens. A context manager.

    Args:
        bind: "tcp://host:port"; port 0 means any free one.
        config: all other options.
        linger_s: when it is told to end, it first stays until it has been unused for this many seconds.

    Blocks until it listens, about 0.3 s. Raises OSError, with a sentence, if it can't. Any thread. If its first
    process ends, which starts the others again, a thread here starts that again, at the same address.
    """

    def __init__(
        self, bind: str = "tcp://127.0.0.1:0", *, config: LighthouseConfig, linger_s: float = 0.0
    ) -> None:
        self._options = {"config": asdict(config), "linger_s": linger_s}
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._process, self._bound = self._start(bind)
        self._address = sockets.reachable(self._bound)
        self._thread = threading.Thread(target=self._keep, name="lighthouse-launcher", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # no thread is left
            _end(self._process)
            raise OSError(str(error)) from error

    @property
    def pid(self) -> int:
        """Of the process whose child serves."""
        return self._process.pid

    def address(self) -> str:
        """ "tcp://host:port", where other hosts can reach it if `bind` lets them."""
        return self._address

    def shutdown(self) -> None:
        """End it, after `linger_s` without use, and wait for that. Any thread; idempotent."""
        with self._lock:
            self._over.set()
        _end(self._process)
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.shutdown()

    def _start(self, bind: str) -> tuple[subprocess.Popen[str], str]:
        """(Its process, where that listens). Raises as the constructor."""
        said, left = "", STARTS
        while not said and left:  # it was killed, or could not begin
            left -= 1
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "lighthouse.standby",
                    "--launched",
                    json.dumps({"bind": bind, **self._options}),
                ],
                cwd=Path(__file__).resolve().parents[1],  # `-m` finds the package there
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                # Of its own: the terminal's Ctrl-C is for the launcher, whose groups end first.
                start_new_session=True,
            )
            assert process.stdout is not None
            with process.stdout as pipe:
                said = pipe.read()
            if said.startswith(_LISTENING):
                return process, said.removeprefix(_LISTENING)
            _end(process)
        raise OSError(said.removeprefix(_FAILED) or "the lighthouse ended while it started")

    def _keep(self) -> None:
        """The thread: start it again whenever it ends before it is told to."""
        pauses = Pauses()
        while True:
            began, code = time.monotonic(), self._process.wait()
            why, lived_s = (
                ending_of("the first process of this launcher's", code),
                time.monotonic() - began,
            )
            while why:
                if self._over.wait(pauses.after(lived_s)):
                    return
                write_out(sys.stderr, why)
                why, lived_s = self._start_again(), 0.0

    def _start_again(self) -> str:
        """Why it can't be started, or ""."""
        with self._lock:
            if self._over.is_set():
                return ""
            _end(self._process)  # closes its pipe
            try:
                self._process, _ = self._start(self._bound)
            except OSError as error:
                return f"lighthouse: it can't be started: {error}\n"
        return ""


def _end(process: subprocess.Popen[str]) -> None:
    """Tell a launcher's lighthouse to end, and wait for that. It may have ended, or have been told."""
    assert process.stdin is not None
    with contextlib.suppress(ValueError, OSError):
        # Its end may not tell: a process that was forked from this one has a copy of the pipe.
        process.stdin.write("\n")
        process.stdin.flush()
    with contextlib.suppress(OSError):
        process.stdin.close()
    process.wait()


class Idle:
    """Tells when a server has had nothing to do for `limit_s` seconds. Reads no clock. What has come while its
    process was stopped counts: it may be unread at the first look after that.

    Raises ValueError unless `limit_s` is positive.
    """

    def __init__(self, limit_s: float, now: float) -> None:
        if limit_s <= 0:
            raise ValueError(f"the idle time must be positive, got {limit_s:g}")
        self.limit_s = limit_s
        self._over_at = now + limit_s
        self._overdue = Overdue()
        self._received = -1

    def over(self, server: dict[str, Any], now: float) -> bool:
        """Whether the server is idle at `now`; call it again and again.

        `server`: the part "server" of `LighthouseServer.status()`.
        """
        if server["connections"] > 0 or server["received"] != self._received:
            self._received = server["received"]
            self._over_at = now + self.limit_s
        return self._overdue.passed(self._over_at, now)

    def next_look_s(self, now: float) -> float:
        """Seconds until `over` should be called again."""
        left_s = self._overdue.look_at(self._over_at) - now
        return min(self.limit_s / 4, MAX_LOOK_S, max(0.0, left_s))


# ---------------------------------------------------------------- in the lighthouse's processes


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--bind", default="tcp://127.0.0.1:29510", metavar="ADDRESS", help="Where to listen.")
@click.option(
    "--exit-when-idle",
    "idle_s",
    default=120.0,
    type=float,
    metavar="SECONDS",
    help="End after so long without connections and requests.",
)
@click.option("--launched", hidden=True, help="The options of a LaunchedLighthouse, as JSON.")
def main(bind: str, idle_s: float, launched: str | None) -> None:
    """Put a lighthouse into the background; it ends by itself when it is not used.

    Prints its address and exits with 0 when it listens; else says why not and exits with 1.
    """
    if launched is not None:
        raise SystemExit(_serve_launcher(**json.loads(launched)))
    read_end, write_end = os.pipe()
    if os.fork():  # nothing has started a thread yet
        os.close(write_end)
        with os.fdopen(read_end) as pipe:
            said = pipe.read()
        listens = said.startswith(_LISTENING)
        text = said.removeprefix(_LISTENING).removeprefix(_FAILED)
        click.echo(text or "the lighthouse ended while it started", err=not listens)
        raise SystemExit(0 if listens else 1)
    os.close(read_end)
    try:
        _serve_machine(bind, idle_s, write_end)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)  # must not unwind the parent's click a second time


def _serve_machine(bind: str, idle_s: float, write_end: int) -> None:
    """Serve until unused. `write_end`: of the pipe that the command reads."""
    os.setsid()  # a trainer's Ctrl-C, and its launcher's clean-up, must not reach this process

    def detach() -> None:
        _close_for_good(0, 1, 2)
        os.close(write_end)

    def until_unused(server: LighthouseServer) -> None:
        stop = threading.Event()
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, lambda _signum, _frame: stop.set())
        _wait_until_unused(server, idle_s, stop)

    def make(address: str) -> LighthouseServer:
        return LighthouseServer(address, config=LighthouseConfig(), on_note=lambda note: None)

    _keep_serving(bind, make, until_unused, write_end, detach, (signal.SIGTERM, signal.SIGINT))


def _serve_launcher(bind: str, config: dict[str, Any], linger_s: float) -> int:
    """Serve until the standard input ends; returns the exit code."""
    logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    parsed = LighthouseConfig(**{**config, "timeouts": Timeouts(**config["timeouts"])})

    def end_with_input(server: LighthouseServer) -> None:
        os.read(0, 1)  # `shutdown` writes, or the launcher is gone
        try:
            if linger_s > 0:
                _wait_until_unused(server, linger_s, threading.Event())
        except RuntimeError:
            pass  # the server has failed meanwhile, which its `join` tells
        server.request_stop()

    def until_told(server: LighthouseServer) -> None:
        threading.Thread(target=end_with_input, args=(server,), daemon=True).start()
        server.join()

    # A scheduler signals all processes of a job. The replica groups then end in their own time, and
    # need the lighthouse for that.
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)
    return _keep_serving(
        bind,
        lambda address: LighthouseServer(address, config=parsed),
        until_told,
        1,
        lambda: _close_for_good(1),  # the launcher reads to the end
        (),
    )


def _keep_serving(
    bind: str,
    make: Callable[[str], LighthouseServer],
    run: Callable[[LighthouseServer], None],
    pipe: int,
    detach: Callable[[], None],
    obey: tuple[signal.Signals, ...],
) -> int:
    """Serve in child processes, one after the other; returns the exit code.

    Args:
        make: the server, at an address.
        run: returns when the server is to end; raises RuntimeError if the server has failed.
        pipe: to it this process writes where it listens, or why it can't; each process then calls
            `detach`.
        obey: see `keep_running`.
    """

    def report(text: str) -> None:
        os.write(pipe, text.encode())
        detach()

    def serve(address: str, tell: Callable[[str], None]) -> int:
        try:
            server = patiently(lambda: make(address or bind))
        except (ValueError, OSError) as error:
            if not address:
                report(f"{_FAILED}{error}")
            return 1
        if not address:  # the process that started this one reports
            detach()
        with server:
            tell(server.bound)
            try:
                run(server)
            except RuntimeError:  # another takes its place
                return 1
        return 0

    return keep_running(serve, lambda address: report(f"{_LISTENING}{address}"), obey=obey)


def _wait_until_unused(server: LighthouseServer, limit_s: float, stop: threading.Event) -> None:
    """Return when `server` was idle for `limit_s` seconds, has ended, or `stop` is set. Blocks."""
    idle = Idle(limit_s, time.monotonic())
    while not stop.wait(idle.next_look_s(time.monotonic())) and not server.join(0.0):
        if idle.over(server.status()["server"], time.monotonic()):
            return


def _close_for_good(*descriptors: int) -> None:
    """Of the terminal, or of a pipe that reads our output; their numbers stay taken."""
    sys.stdout.flush()
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(null, descriptor)
    os.close(null)


if __name__ == "__main__":
    main()
