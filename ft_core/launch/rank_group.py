"""The ranks of one replica group on this machine: `python -m ft_core.launch.rank_group N ...`.

They live and die together. When one fails, the others are killed, and this process ends as that one
did (the same exit code, or the same signal), so that the supervisor above it can tell a crash from a
kill. A rank that ends with `BROKEN_EXIT_CODE` has noticed the end of another rank, whose exit code
is the one that counts, and which may not have said its error yet. A rank that ends on SIGTERM has made
the others leave too (`GroupLeft`); they get the time to end by themselves. Restarts are the supervisor's
task. Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from ft_core.environment import ENV_SUPERVISOR, Supervision
from ft_core.launch.board import DUMP_SIGNAL, inherited
from ft_core.launch.restarts import BROKEN_EXIT_CODE, SIGTERM_EXIT_CODE
from ft_core.launch.supervisor import die_with, hear_endings, take
from ft_core.launch.warm.replacement import spawn

_LOWEST_PORT = 10_000
"""Of those that a group's store may have; services have their fixed ports below, mostly."""
STOP_TIMEOUT_S = 20.0
"""Less than the supervisor's, after which it kills this process and so the ranks."""
LAST_WORDS_S = 2.0
"""How long a rank that the others miss may take to say why, and to end."""


def group_command(command: Sequence[str], size: int) -> list[str]:
    """The command that runs `command` in a group of `size` ranks; `command` itself for one rank."""
    if size == 1:
        return list(command)
    return [sys.executable, "-m", "ft_core.launch.rank_group", str(size), *command]


def main(argv: Sequence[str]) -> int:
    """Run the group that `argv` (N, command ...) describes; returns the exit code, or ends by the signal
    that ended the group. Main thread only."""
    size, command = int(argv[0]), argv[1:]
    if parent := Supervision.read().pid:
        die_with(parent)
    env = {**os.environ, ENV_SUPERVISOR: str(os.getpid())}
    code = run_group(command, env, size=size)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def rank_environment(env: Mapping[str, str], *, rank: int, size: int, port: int) -> dict[str, str]:
    """`env` plus torchrun's variables for rank `rank` of `size`, with a store at `port`.

    What a torchrun further up has left there is left out: it says that torchrun runs the store.
    """
    return {
        **{name: value for name, value in env.items() if not name.startswith("TORCHELASTIC_")},
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def free_port() -> int:
    """A TCP port of this machine that is free, and that the kernel gives to no other process: a rank may
    import frameworks for seconds before it listens there."""
    low, given_from = _LOWEST_PORT, _LOWEST_PORT
    with contextlib.suppress(OSError, ValueError):
        given_from = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        wanted = random.SystemRandom().randrange(low, given_from) if given_from > low else 0
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", wanted))
            port: int = probe.getsockname()[1]
            return port


def run_group(command: Sequence[str], env: Mapping[str, str], *, size: int) -> int:
    """Run the group to its end; returns the exit code (as Popen's) of the first failed rank, or 0.

    SIGINT and SIGTERM are passed on to the ranks. Main thread only.
    """
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    port = free_port()
    board = inherited(env)
    ranks: list[subprocess.Popen[bytes]] = []

    def send_all(number: int) -> None:
        for process in ranks:
            process.send_signal(number)

    def kill_later(seconds: float) -> None:
        late = threading.Timer(seconds, send_all, (signal.SIGKILL,))
        late.daemon = True
        late.start()

    def on_signal(number: int, frame: FrameType | None) -> None:
        send_all(number)
        kill_later(STOP_TIMEOUT_S)

    hear_endings(on_signal)
    signal.signal(DUMP_SIGNAL, lambda number, frame: send_all(number))
    for rank in range(size):  # all before the first thread: see `spawn`
        told = rank_environment(env, rank=rank, size=size, port=port)
        ranks.append(spawn(command, env=told, pass_fds=board))
    for process in ranks:
        threading.Thread(target=lambda p=process: ended.put(p.wait()), daemon=True).start()
    failure = 0
    for _ in range(size):
        code = take(ended)
        if code and failure in (0, BROKEN_EXIT_CODE):
            failure = code
            if code == SIGTERM_EXIT_CODE:
                kill_later(STOP_TIMEOUT_S)
            elif code == BROKEN_EXIT_CODE:
                kill_later(LAST_WORDS_S)
            else:
                send_all(signal.SIGKILL)
    return failure


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
