"""A lighthouse that ends with the process that has launched it, for launchers of whole jobs.

It runs in processes of its own (see `keeper.py`): if a library aborts the serving process, or
the kernel kills it, the launcher lives on, and another one serves at the same address.

The launcher keeps the writing end of a pipe, which the lighthouse reads as its standard input. When
that is closed, by `shutdown` or by the launcher's end however it comes, the lighthouse ends.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Self

from lighthouse import sockets
from lighthouse.config import LighthouseConfig, Timeouts
from lighthouse.keeper import keep_running, patiently
from lighthouse.server import LighthouseServer
from lighthouse.standby import serve_until_idle

_LISTENING, _FAILED = "listening ", "failed "


class LaunchedLighthouse:
    """A lighthouse in processes of its own; `address()` is where it listens. A context manager.

    Args:
        bind: "tcp://host:port"; port 0 means any free one.
        config: all other options.
        linger_s: when it is to end, it stays until it was unused for this many seconds.

    Blocks until it listens, about 0.3 s. Raises OSError, with a sentence, if it can't. Any thread.
    """

    def __init__(
        self, bind: str = "tcp://127.0.0.1:0", *, config: LighthouseConfig, linger_s: float = 0.0
    ) -> None:
        options = {"bind": bind, "config": asdict(config), "linger_s": linger_s}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lighthouse.launched", json.dumps(options)],
            cwd=Path(__file__).resolve().parents[1],  # `-m` finds the package there
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Of its own: the terminal's Ctrl-C is for the launcher, whose groups end first.
            start_new_session=True,
        )
        assert self._process.stdout is not None
        with self._process.stdout as pipe:
            said = pipe.read()
        if not said.startswith(_LISTENING):
            self.shutdown()
            raise OSError(said.removeprefix(_FAILED) or "the lighthouse ended while it started")
        self._address = sockets.reachable(said.removeprefix(_LISTENING))

    @property
    def pid(self) -> int:
        """Of the process whose child serves."""
        return self._process.pid

    def address(self) -> str:
        """ "tcp://host:port", where other hosts can reach it if `bind` lets them."""
        return self._address

    def shutdown(self) -> None:
        """End it, after `linger_s` without use, and wait for that. Any thread; idempotent."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.shutdown()


# ---------------------------------------------------------------- in the lighthouse's processes


def main(options: str) -> int:
    """Serve until the standard input ends; returns the exit code."""
    logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    given = json.loads(options)
    config = dict(given["config"])
    config["timeouts"] = Timeouts(**config["timeouts"])
    parsed = LighthouseConfig(**config)
    linger_s: float = given["linger_s"]

    def serve(address: str, tell: Callable[[str], None]) -> int:
        try:
            server = patiently(lambda: LighthouseServer(address or given["bind"], config=parsed))
        except (ValueError, OSError) as error:
            if not address:
                _report(f"{_FAILED}{error}")
            return 1
        if not address:  # the process that started this one reports
            _silence()
        with server:
            tell(server.bound)
            watcher = threading.Thread(target=_end_with_input, args=(server, linger_s), daemon=True)
            watcher.start()
            try:
                server.join()
            except RuntimeError:  # it has failed; another takes its place
                return 1
        return 0

    # A scheduler signals all processes of a job. The replica groups then end in their own time, and
    # need the lighthouse for that.
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)
    return keep_running(serve, lambda address: _report(f"{_LISTENING}{address}"), obey=())


def _end_with_input(server: LighthouseServer, linger_s: float) -> None:
    os.read(0, 1)  # the launcher never writes
    try:
        if linger_s > 0:
            serve_until_idle(server, linger_s, threading.Event())
    except RuntimeError:
        pass  # the server has failed meanwhile, which its `join` tells
    server.request_stop()


def _report(text: str) -> None:
    os.write(1, text.encode())
    _silence()


def _silence() -> None:
    """Close the launcher's pipe: it reads to the end."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
