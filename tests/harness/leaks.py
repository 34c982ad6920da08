"""What a test left behind in this process: threads, sockets, env variables, children, a group.

Reads /proc (Linux). A `Snapshot` is taken before a test, `leaks_since` compares afterwards. What
ends by itself soon (a socket that ZeroMQ's own thread closes, a thread on its last line) gets
`GRACE_S`; the comparison looks again until then, since nothing announces such an end.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.harness.waiting import children_of_all_threads

GRACE_S = 5.0
LOOKS_A_SECOND = 5
"""At least, within the grace."""

ENV_NOT_OURS = frozenset(
    {
        "PYTEST_CURRENT_TEST",
        "PYTEST_VERSION",
        # set by the first import of a library, never unset
        "KINETO_LOG_LEVEL",
        "TORCHINDUCTOR_CACHE_DIR",
        "TRITON_CACHE_DIR",
        "KMP_INIT_AT_FORK",
        "KMP_DUPLICATE_LIB_OK",
        "CUDA_MODULE_LOADING",
        "POSSIBLE_USER_WARNINGS",
    }
)
RETIRING = "ft-pg-retire"
RETIRING_S = 25.0
"""An operation that Gloo has lost (cut in mid-message) holds its communicator until its timeout; a
thread of this name waits for that in the background. The tests' groups have at most 20 s."""
SHARED_THREADS = "shared-"
"""Prefix of the names of threads that a fixture of the whole session owns."""
THREADS_NOT_OURS = ("tqdm_monitor", "pytest_timeout", "pydevd", "hypothesis", SHARED_THREADS)
shared_children: set[int] = set()
"""Process ids of children that a fixture of the whole session owns."""
fork_servers: set[int] = set()
"""Process ids of those that fork processes for this one (`tests.harness.workers`)."""
CHILDREN_NOT_OURS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The process before a test."""

    threads: frozenset[threading.Thread]
    environment: dict[str, str]
    sockets: frozenset[str]
    children: frozenset[int]

    @classmethod
    def take(cls) -> Snapshot:
        return cls(
            threads=frozenset(threading.enumerate()),
            environment=dict(os.environ),
            sockets=sockets(),
            children=children(),
        )


def leaks_since(before: Snapshot, grace_s: float = GRACE_S) -> list[str]:
    """A sentence for each thing left behind. Puts the environment back, ends the default group."""
    found = _process_group() + _environment(before)
    retired_by = time.monotonic() + RETIRING_S
    for thread in _threads(before):
        if thread.name == RETIRING:
            thread.join(max(0.0, retired_by - time.monotonic()))
    checks = (
        lambda: [f"thread {t.name!r} still runs" for t in _threads(before)],
        lambda: [f"socket still open: {s}" for s in sorted(sockets() - before.sockets)],
        lambda: [_child_sentence(pid) for pid in sorted(children() - before.children)],
    )
    return found + [line for check in checks for line in _settled(check, grace_s)]


def sockets() -> frozenset[str]:
    """The open sockets of this process, and the eventfds by which ZeroMQ and asyncio wake up."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue  # the one that listed them
        if target.startswith("socket:"):
            found.add(target)
        elif target == "anon_inode:[eventfd]":
            found.add(f"{target} {fd}")
    return frozenset(found)


def children() -> frozenset[int]:
    """Process ids of the children of this process and of its fork servers, which do not count
    themselves; dead but not waited for included."""
    parents = ["self", *fork_servers]
    found = {child for parent in parents for child in children_of_all_threads(parent)}
    return frozenset(pid for pid in found if not _is_foreign(pid))


def _is_foreign(pid: int) -> bool:
    owned = shared_children | fork_servers
    return pid in owned or any(name in _command_of(pid) for name in CHILDREN_NOT_OURS)


def _command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return ""


def _child_sentence(pid: int) -> str:
    return f"child process {pid} is left over: {_command_of(pid) or 'dead, not waited for'}"


def _settled(check: Callable[[], list[str]], grace_s: float) -> list[str]:
    """`check`'s findings, once they are gone or the grace is over: in looks, too, since a process that
    stood still for all of it has given what was ending no time."""
    deadline, looks = time.monotonic() + grace_s, round(grace_s * LOOKS_A_SECOND)
    while (found := check()) and (looks > 0 or time.monotonic() < deadline):
        gc.collect()
        time.sleep(0.01)
        looks -= 1
    return found


def _threads(before: Snapshot) -> list[threading.Thread]:
    return [
        thread
        for thread in threading.enumerate()
        if thread not in before.threads and not thread.name.startswith(THREADS_NOT_OURS)
    ]


def _environment(before: Snapshot) -> list[str]:
    now, names = dict(os.environ), set(os.environ) | set(before.environment)
    changed = [
        name
        for name in sorted(names - ENV_NOT_OURS)
        if now.get(name) != before.environment.get(name)
    ]
    for name in changed:
        if name in before.environment:
            os.environ[name] = before.environment[name]
        else:
            os.environ.pop(name, None)
    return [f"environment variable {name} was changed and not put back" for name in changed]


def _process_group() -> list[str]:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return []
    distributed.destroy_process_group()
    return ["torch's default process group is still initialized"]
