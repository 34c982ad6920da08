"""What the starter, the template and its replacements say to each other.

Messages are JSON with file descriptors beside them, over a stream socket. Standard library only.
"""

from __future__ import annotations

import array
import inspect
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PLACES = (
    "FT_",
    "TORCHFT_",
    "REPLICA_GROUP_ID",
    "NUM_REPLICA_GROUPS",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "CUDA_VISIBLE_DEVICES",
)
"""Variables, or prefixes of them (with a `_` at the end), that launchers set for each process anew. No
library keeps what its import has read of them (`renew` mends the one that does)."""
MAX_DESCRIPTORS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A process to start, as `subprocess.Popen` would start it.

    Attributes:
        words: what follows the interpreter on the command line: a script, or "-m" and a module, and
            arguments.
        env, cwd, umask: of the process.
        process_group: to join; 0: one of its own.
        new_session: as Popen's `start_new_session`.
        blocked, ignored: signals that the parent blocks, and ignores.
        numbers: of the descriptors that come along with the order, in the new process.
        places: see `PLACES`.
        renew: functions to call in the new process, as "module:name", where the module is loaded.
        surroundings: of the parent, see `surroundings`.
    """

    words: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    umask: int
    process_group: int
    new_session: bool
    blocked: Sequence[int]
    ignored: Sequence[int]
    numbers: Sequence[int]
    places: Sequence[str]
    renew: Sequence[str]
    surroundings: Mapping[str, Any]

    def message(self) -> dict[str, Any]:
        """The order for `Channel.send`; `Order(**message)` makes it again."""
        return asdict(self)

    def is_place(self, name: str) -> bool:
        """Whether an environment variable may differ between two processes of one template."""
        return any(name == p or (p.endswith("_") and name.startswith(p)) for p in self.places)


def place_order(
    given: Mapping[str, Any],
    descriptors: Sequence[int],
    places: Sequence[str],
    renew: Sequence[str],
) -> Order | str:
    """The order for what `Started` was asked, or why only a cold start can do that.

    Args:
        given: arguments of `Popen._execute_child` by name.
        descriptors: those that the new process gets as 0, 1, 2; those to pass on follow.
        places, renew: see `Order`.
    """
    words = [os.fspath(word) for word in given["args"]]
    unusual = {name: given[name] for name, usual in _USUAL.items() if given[name] not in usual}
    if unusual:
        return f"the option {', '.join(unusual)}"
    if words[0] != sys.executable or len(words) < 2:
        return f"{words[0]} is another program"
    if words[1].startswith("-") and not (words[1] == "-m" and len(words) > 2):
        return f"the interpreter's option {words[1]}"
    cwd = os.getcwd()
    if given["cwd"] is not None and os.fspath(given["cwd"]) != cwd:
        return "another working directory"
    if words[1] != "-m" and not words[1].endswith(".py"):
        return f"{words[1]} is not a .py file"
    if words[1] != "-m" and not os.access(words[1], os.R_OK):
        return f"{words[1]} can't be read"
    status = Path("/proc/self/status").read_text()
    mask = next((line.split()[1] for line in status.splitlines() if line.startswith("Umask:")), "")
    if len(descriptors) >= MAX_DESCRIPTORS or not mask:
        return "too many descriptors" if mask else "no umask in /proc/self/status"
    group = given["process_group"]
    return Order(
        words=words[1:],
        env=dict(os.environ if given["env"] is None else given["env"]),
        cwd=cwd,
        umask=int(mask, 8) if given["umask"] < 0 else given["umask"],
        process_group=os.getpgrp() if group < 0 else group,
        new_session=given["start_new_session"],
        blocked=sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))),
        ignored=ignored_signals(),
        numbers=[0, 1, 2, *descriptors[3:]],
        places=places,
        renew=renew,
        surroundings=surroundings(),
    )


_USUAL: dict[str, tuple[Any, ...]] = {
    "executable": (None, sys.executable),
    "preexec_fn": (None,),
    "close_fds": (True,),
    "shell": (False,),
    "restore_signals": (True,),
    "gid": (None, -1),
    "gids": (None,),
    "uid": (None, -1),
}


class Started(subprocess.Popen[bytes]):
    """A `Popen` whose process is forked from one that runs, where that is possible, else started.

    Args:
        fork: called with (arguments of `Popen._execute_child` by name, descriptors of the new process);
            returns a process id of a child of this process, or 0: start it.
        command, options: as for `Popen`.

    Attributes:
        warm: whether it was forked.
    """

    def __init__(
        self,
        fork: Callable[[Mapping[str, Any], Sequence[int]], int],
        command: Sequence[str],
        **options: Any,
    ) -> None:
        self._fork, self.warm = fork, False
        super().__init__(command, **options)

    def _execute_child(self, *given: Any) -> None:
        stock = super()._execute_child  # type: ignore[misc]
        named = inspect.signature(stock).bind(*given).arguments
        pipes = [named[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        ends = [own if end == -1 else end for own, end in zip((0, 1, 2), pipes, strict=True)]
        pid = self._fork(named, [*ends, *sorted(named["pass_fds"])])
        if not pid:
            stock(*given)
            return
        self.pid, self.warm, self._child_created = pid, True, True
        names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(named[name] for name in names))  # type: ignore[attr-defined]


def surroundings() -> dict[str, Any]:
    """What a process inherits and an order can't change: equal in parent and template, or no fork."""
    kinds = sorted(name for name in dir(resource) if name.startswith("RLIMIT_"))
    own = Path("/proc/self")
    return {
        "uid": list(os.getresuid()),
        "gid": [*os.getresgid(), *sorted(os.getgroups())],
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "affinity": sorted(os.sched_getaffinity(0)),
        "scheduler": os.sched_getscheduler(0),
        "limits": {kind: list(resource.getrlimit(getattr(resource, kind))) for kind in kinds},
        "cgroup": (own / "cgroup").read_text(),
        "oom_score_adj": (own / "oom_score_adj").read_text(),
        "namespaces": sorted(os.readlink(each) for each in (own / "ns").iterdir()),
    }


def ignored_signals() -> list[int]:
    """Signals that this process ignores, other than those that Python itself ignores."""
    own = (signal.SIGPIPE, getattr(signal, "SIGXFSZ", signal.SIGPIPE))
    numbers = sorted(signal.valid_signals() - set(own))
    return [int(n) for n in numbers if signal.getsignal(n) is signal.SIG_IGN]


class Channel:
    """Messages with descriptors over a connected stream socket, which it owns. One thread at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def send(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Raises OSError if the other side is gone."""
        data = json.dumps(message).encode()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        self._sock.sendmsg([struct.pack("!I", len(data))], rights if descriptors else [])
        self._sock.sendall(data)

    def receive(self, timeout_s: float | None = None) -> tuple[dict[str, Any], list[int]]:
        """The next message. Raises EOFError if the other side is gone, TimeoutError."""
        self._sock.settimeout(timeout_s)
        room = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
        head, rights, _, _ = self._sock.recvmsg(4, room)
        descriptors = array.array("i")
        for _, kind, data in rights:
            if kind == socket.SCM_RIGHTS:
                descriptors.frombytes(
                    data[: len(data) // descriptors.itemsize * descriptors.itemsize]
                )
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        text = self._exactly(struct.unpack("!I", self._whole(head))[0])
        return json.loads(text), list(descriptors)

    def close(self) -> None:
        """Idempotent."""
        self._sock.close()

    def _whole(self, head: bytes) -> bytes:
        return head + self._exactly(4 - len(head)) if head else self._exactly(4)

    def _exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            part = self._sock.recv(count - len(data))
            if not part:
                raise EOFError("the other side is gone")
            data += part
        return bytes(data)
