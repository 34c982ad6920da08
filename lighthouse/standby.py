"""A lighthouse for one machine that starts when it is needed and ends when it is idle.

`python -m lighthouse.standby --bind tcp://127.0.0.1:29510 --exit-when-idle 120` puts a lighthouse
into the background, prints its address and returns. The lighthouse ends after 120 s without
connections and requests. `ft_core` starts one if it is given no address.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import click

from lighthouse.config import LighthouseConfig
from lighthouse.keeper import keep_running, patiently
from lighthouse.server import LighthouseServer

MAX_LOOK_S = 5.0
"""The longest time between two looks at the connections (at least four in the idle time)."""


class Idle:
    """Whether a server has had nothing to do for `limit_s` seconds. Reads no clock.

    Raises ValueError unless `limit_s` is positive.
    """

    def __init__(self, limit_s: float, now: float) -> None:
        if limit_s <= 0:
            raise ValueError(f"the idle time must be positive, got {limit_s:g}")
        self.limit_s = limit_s
        self._since = now
        self._received = -1

    def over(self, server: dict[str, Any], now: float) -> bool:
        """Whether the server is idle at `now`; call it again and again.

        `server`: the part "server" of `LighthouseServer.status()`.
        """
        if server["connections"] > 0 or server["received"] != self._received:
            self._received = server["received"]
            self._since = now
        return now - self._since >= self.limit_s

    def next_look_s(self) -> float:
        """Seconds until `over` should be called again."""
        return min(self.limit_s / 4, MAX_LOOK_S)


def serve_until_idle(server: LighthouseServer, limit_s: float, stop: threading.Event) -> None:
    """Return when `server` was idle for `limit_s` seconds, has ended, or `stop` is set. Blocks."""
    import time

    idle = Idle(limit_s, time.monotonic())
    while not stop.wait(idle.next_look_s()) and not server.join(0.0):
        if idle.over(server.status()["server"], time.monotonic()):
            return


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
def main(bind: str, idle_s: float) -> None:
    """Put a lighthouse into the background; it ends by itself when it is not used.

    Prints its address and exits with 0 when it listens; else says why not and exits with 1.
    """
    read_end, write_end = os.pipe()
    if os.fork():  # nothing has started a thread yet
        os.close(write_end)
        with os.fdopen(read_end) as pipe:
            word, _, text = pipe.read().partition(" ")
        click.echo(text or "the lighthouse ended while it started", err=word != "listening")
        raise SystemExit(0 if word == "listening" else 1)
    os.close(read_end)
    try:
        _serve(bind, idle_s, write_end)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)  # must not unwind the parent's click a second time


def _serve(bind: str, idle_s: float, write_end: int) -> None:
    os.setsid()  # a trainer's Ctrl-C, and its launcher's clean-up, must not reach this process

    def report(text: str) -> None:
        os.write(write_end, text.encode())
        _detach()
        os.close(write_end)

    def serve(address: str, tell: Callable[[str], None]) -> int:
        stop = threading.Event()
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, lambda _signum, _frame: stop.set())
        try:
            server = patiently(
                lambda: LighthouseServer(
                    address or bind, config=LighthouseConfig(), on_note=lambda note: None
                )
            )
        except (ValueError, OSError) as error:
            if not address:
                report(f"failed {error}")
            return 1
        if not address:  # the parent reports
            _detach()
            os.close(write_end)
        tell(server.bound)
        with server:
            try:
                serve_until_idle(server, idle_s, stop)
            except RuntimeError:  # it has failed; another takes its place
                return 1
        return 0

    keep_running(serve, on_listening=lambda address: report(f"listening {address}"))


def _detach() -> None:
    """Close the terminal, or the pipe that reads our output."""
    sys.stdout.flush()
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)


if __name__ == "__main__":
    main()
