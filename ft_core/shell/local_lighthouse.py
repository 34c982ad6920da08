"""A lighthouse on this machine, for jobs that name none."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import time
from pathlib import Path

import lighthouse
from lighthouse.client import LighthouseClient
from lighthouse.errors import LighthouseError, LighthouseUnavailable
from lighthouse.files import machine_lock

log = logging.getLogger("ft_core")

DEFAULT_PORT = 29510
DEFAULT_IDLE_S = 120.0
START_TIMEOUT_S = 20.0
PROBE_TIMEOUT_S = 2.0


def ensure_local_lighthouse(
    port: int = DEFAULT_PORT, *, exit_when_idle_s: float = DEFAULT_IDLE_S
) -> str:
    """Address of a lighthouse on this machine, which is started unless one answers at `port`.

    Replica groups that are started one by one on a machine find the same one. It is a process of
    its own: it outlives this one, however this one ends, and exits when no client was connected for
    `exit_when_idle_s`. Jobs that share it are kept apart by their `job_id`.

    Raises LighthouseUnavailable if something else listens at `port`, or it does not start. Any
    thread; blocks for about 0.3 s if one must be started.
    """
    address = f"tcp://127.0.0.1:{port}"
    with machine_lock("ft-lighthouse", str(port)):
        if _answers(address):
            log.warning("no TORCHFT_LIGHTHOUSE set: using the lighthouse at %s", address)
            return address
        _start(address, exit_when_idle_s)
    log.warning(
        "no TORCHFT_LIGHTHOUSE set: started a lighthouse at %s; it ends after %g s without "
        "replica groups",
        address,
        exit_when_idle_s,
    )
    return address


def _answers(address: str) -> bool:
    """Whether a lighthouse is there; False: nothing listens, or not any more. One that is slow (a busy machine) has as
    long to answer as another would have to start."""
    host, port = address.removeprefix("tcp://").split(":")
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:  # ZeroMQ would wait and retry where no process listens
            socket.create_connection((host, int(port)), PROBE_TIMEOUT_S).close()
        except OSError:
            return False
        try:
            with LighthouseClient(address, timeout_s=PROBE_TIMEOUT_S) as client:
                client.status()
            return True
        except LighthouseError as error:
            if time.monotonic() > deadline:
                raise LighthouseUnavailable(
                    f"something listens at {address}, but not a lighthouse that we can talk to ({error}): "
                    "stop it, or start a lighthouse elsewhere and set TORCHFT_LIGHTHOUSE"
                ) from error


def _start(address: str, exit_when_idle_s: float) -> None:
    """Run the standby command; it returns when its child listens."""
    command = [
        sys.executable,
        "-m",
        "lighthouse.standby",
        "--bind",
        address,
        "--exit-when-idle",
        f"{exit_when_idle_s:g}",
    ]
    # From the folder that holds the package: `-m` finds it there, installed or not.
    home = Path(lighthouse.__file__).resolve().parents[1]
    try:
        done = subprocess.run(
            command,
            cwd=home,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise LighthouseUnavailable(
            f"a lighthouse did not start at {address} within {START_TIMEOUT_S:g} s: start one with "
            "`lighthouse` and set TORCHFT_LIGHTHOUSE to its address"
        ) from error
    if not done.stdout.strip():  # no exit code is known where the script ignores SIGCHLD
        reason = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no reason given"]
        raise LighthouseUnavailable(
            f"a lighthouse did not start at {address} ({reason[0]}): start one with `lighthouse` "
            "and set TORCHFT_LIGHTHOUSE to its address"
        )
