"""The sockets of one Gloo device, so that a blocked Gloo operation can be ended from outside.

Gloo has no working abort: `ProcessGroupGloo.abort()` leaves a thread that waits in a ring whose
neighbours are alive. What ends such a wait is to cut the device's sockets: Gloo's loop thread reads
the end of stream, fails the operations of that pair and closes it. A socket is cut by dissolving its
connection (`connect` to an unspecified address: the peer gets a reset, and bytes that still lie in
the kernel can no longer reach a tensor) and shutting its receiving side, which wakes Gloo.

Orphaned operations. This does not end all operations. A message that is half received, or half sent,
when its connection ends is in none of the lists that Gloo goes through (2.13 to 2.15,
transport/tcp/pair.cc). A thread that waits for it waits until the operation's timeout, whatever ended
the connection. That thread can't be released from outside. But it will not touch the tensors again:
it sleeps (`workers_asleep`), and no bytes arrive. If the timeout comes while the interpreter ends, a
thread of Gloo reports the failure to an interpreter that is gone, and the process aborts (SIGABRT,
SIGSEGV) after all its work was done: a launcher takes that for a crash. So the end of the process
waits for a timeout that would come during it, until the backend is gone with its threads (`OrphanedOperations`); a
later one finds no process.

Which descriptors are Gloo's, in a process where ZeroMQ, stores and user code open and close sockets
all the time? The kernel knows: a Gloo device has one epoll descriptor of its own in which exactly its
listener, its wake-up pipe and its connections are registered, and Linux lists them, with their
inodes, in /proc/self/fdinfo. The device is recognised by its listener, whose raw socket address is
part of the blob that Gloo publishes through the store. A descriptor number may be closed and reused
between the listing and the `shutdown`; so it is duplicated first, the duplicate's inode is compared
with the listed one, and only the duplicate is shut.

The listener itself must never be shut: Gloo would abort the process on the failing accept. It keeps
the descriptor of each connection that is not a member's (a probe, a scan) for good, and aborts when
none are left. So outside of a configure the kernel drops all packets to the listener: `close_door`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import re
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator, Sequence

_TARGET = re.compile(rb"^tfd:\s*(\d+) .* ino:([0-9a-f]+) ", re.MULTILINE)
_SEQUENCE_BYTES = 8
_KNOCK_TIMEOUT_S = 0.2
_REPEATS = 3
"""Repetitions come after 0.2 s or a round trip, then after twice as long each: 1.4 s at least."""
_TCP_INFO_BYTES, _RETRANSMITS = 8, 2  # struct tcp_info begins: state, ca_state, retransmits
_NOWHERE = struct.pack("=H14x", socket.AF_UNSPEC)
_ATTACH_FILTER, _DETACH_FILTER = 26, 27
_DROP_ALL = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0))  # "return 0 bytes"
_libc = ctypes.PyDLL(None)  # PyDLL: calls keep the GIL
_WORKER_NAME = b"pt_gloo_runloop"
_EXIT_S = 10.0
"""More than an interpreter with torch in it takes to end (measured: 1 s)."""
_LATE_S = 10.0
"""How long after its timeout an operation may be reported, and its backend's threads end, on a busy machine."""
_LOOK_S = 0.01


class DeviceSockets:
    """The descriptors of one live Gloo device, which the caller keeps alive while it uses this."""

    def __init__(self, epoll: int, listener_inode: int, address: tuple[str, int]) -> None:
        self._epoll = epoll
        self._listener_inode = listener_inode
        self._address = address

    @classmethod
    def find(cls, blob: bytes) -> DeviceSockets | None:
        """The device that published `blob`; None where that can't be determined (not Linux).

        Call it in the thread that publishes, before the store's `set` returns.
        """
        try:
            names = os.listdir("/proc/self/fd")
        except FileNotFoundError:
            return None
        epolls, listener = [], None
        for name in names:
            descriptor = int(name)
            try:
                target = os.readlink(f"/proc/self/fd/{name}")
                if target == "anon_inode:[eventpoll]":
                    epolls.append(descriptor)
                elif listener is None and target.startswith("socket:["):
                    listener = _listener_in(descriptor, blob)
            except OSError:  # closed since it was listed
                continue
        if listener is None:
            return None
        inode, address = listener
        for epoll in epolls:
            if any(inode == found for _, found in _targets(epoll)):
                return cls(epoll, inode, address)
        return None

    def shut(self) -> int:
        """Cut every connection of the device, in microseconds; returns how many.

        Any thread. Does nothing when the device is gone.
        """
        targets = list(_targets(self._epoll))
        if all(inode != self._listener_inode for _, inode in targets):
            return 0
        copies = []
        for descriptor, inode in targets:
            copy = -1 if inode == self._listener_inode else _copy_if_same(descriptor, inode)
            if copy >= 0:
                copies.append(copy)
        # All within microseconds, hence through calls that keep the GIL: if Gloo saw some
        # connections end much earlier than others, failing operations would leave half-sent
        # messages behind.
        for copy in copies:
            _libc.connect(copy, _NOWHERE, len(_NOWHERE))
            _libc.shutdown(copy, socket.SHUT_RD)
        for copy in copies:
            os.close(copy)
        return len(copies)

    def close_door(self) -> None:
        """All members are connected: refuse all others, and keep the connections that exist."""
        program = struct.pack("@HP", 1, ctypes.addressof(_DROP_ALL))
        self._set_on_listener(_ATTACH_FILTER, program)

    def open_door(self) -> None:
        """Members may connect."""
        self._set_on_listener(_DETACH_FILTER, bytes(4))

    def _set_on_listener(self, option: int, value: bytes) -> None:
        for number, inode in _targets(self._epoll):
            copy = _copy_if_same(number, inode) if inode == self._listener_inode else -1
            if copy >= 0:
                with socket.socket(fileno=copy) as listener, contextlib.suppress(OSError):
                    listener.setsockopt(socket.SOL_SOCKET, option, value)

    def unanswered(self) -> set[str]:
        """Hosts that acknowledge nothing of what was sent to them, for more than a second.

        A slow or stopped peer is not one: its kernel acknowledges. Any thread.
        """
        targets = list(_targets(self._epoll))
        if all(inode != self._listener_inode for _, inode in targets):
            return set()
        hosts = {_silent_host(number, inode) for number, inode in targets}
        return hosts - {""}

    def knock(self, sequences: Sequence[int]) -> None:
        """Release pairs that wait for a peer to dial in: dial in for the peer and close.

        `sequences` identify the pairs: the first eight bytes on a connection. Pairs that do not
        wait are not disturbed. Any thread.
        """
        for sequence in sequences:
            try:
                with socket.create_connection(self._address, _KNOCK_TIMEOUT_S) as dial:
                    dial.sendall(struct.pack("=q", sequence))
            except OSError:
                return


def pair_sequences(blob: bytes, world_size: int) -> list[int]:
    """The sequence numbers that Gloo gave to its pairs, from the blob that it published.

    They are its last `world_size` eight-byte integers and increase by one; [] if they don't.
    """
    size = _SEQUENCE_BYTES * world_size
    if len(blob) < size:
        return []
    numbers = list(struct.unpack(f"={world_size}q", blob[len(blob) - size :]))
    first = numbers[0]
    return numbers if numbers == list(range(first, first + world_size)) else []


def _targets(epoll: int) -> Iterator[tuple[int, int]]:
    """(descriptor, inode) of all that is registered in an epoll descriptor."""
    try:
        with open(f"/proc/self/fdinfo/{epoll}", "rb") as listing:
            text = listing.read()
    except OSError:
        return
    for match in _TARGET.finditer(text):
        yield int(match[1]), int(match[2], 16)


def _listener_in(descriptor: int, blob: bytes) -> tuple[int, tuple[str, int]] | None:
    """(inode, address) if the descriptor is a listening socket whose raw address is in `blob`."""
    copy = os.dup(descriptor)
    try:
        candidate = socket.socket(fileno=copy)
    except OSError:  # the number was reused meanwhile, and is no longer a socket
        os.close(copy)
        return None
    with candidate:
        if candidate.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        if not candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return None
        name = candidate.getsockname()
        raw = struct.pack("=H", candidate.family) + struct.pack("!H", name[1])
        packed = socket.inet_pton(candidate.family, name[0].partition("%")[0])
        raw += packed if candidate.family == socket.AF_INET else struct.pack("!I", 0) + packed
        if raw not in blob:
            return None
        return os.fstat(candidate.fileno()).st_ino, (name[0], name[1])


def workers_asleep() -> bool:
    """Whether no Gloo thread of this process runs (threads of two groups can't be told apart)."""
    return not any(_is_working(task) for task in os.listdir("/proc/self/task"))


def _is_working(task: str) -> bool:
    try:
        with open(f"/proc/self/task/{task}/stat", "rb") as file:
            name, _, rest = file.read().partition(b"(")[2].rpartition(b")")
    except OSError:  # ended
        return False
    return name == _WORKER_NAME and rest[1:2] != b"S"


def _copy_if_same(descriptor: int, inode: int) -> int:
    """A duplicate of the descriptor if it is (still) that socket, else -1."""
    try:
        copy = os.dup(descriptor)
    except OSError:
        return -1
    status = os.fstat(copy)
    if status.st_ino == inode and stat.S_ISSOCK(status.st_mode):
        return copy
    os.close(copy)
    return -1


def _silent_host(descriptor: int, inode: int) -> str:
    """The host at the other end, if the kernel has sent the same bytes to it again and again without
    an answer; else nothing."""
    copy = _copy_if_same(descriptor, inode)
    if copy < 0:
        return ""
    with socket.socket(fileno=copy) as connection:
        try:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            if info[_RETRANSMITS] < _REPEATS:
                return ""
            return str(connection.getpeername()[0])
        except OSError:  # not TCP, the listener, or closed
            return ""


class OrphanedOperations:
    """When Gloo will end the operations that it has lost, in backends that are not gone yet. Any thread.

    Attributes:
        due: `time.monotonic()`, by the communicator's `id`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.due: dict[int, float] = {}

    def add(self, communicator: object, due: float) -> None:
        """An operation was abandoned, which Gloo ends by itself at `due`."""
        with self._lock:
            self.due[id(communicator)] = max(due, self.due.get(id(communicator), due))

    def gone(self, communicator: object) -> None:
        """Its backend was destroyed: its threads have ended."""
        with self._lock:
            self.due.pop(id(communicator), None)

    def exit_delay_s(self, now: float) -> float:
        """How long the end of the process should wait, if none of them is gone earlier, in seconds."""
        with self._lock:
            soon = [due for due in self.due.values() if now - _LATE_S < due < now + _EXIT_S]
        return max(soon) + _LATE_S - now if soon else 0.0


orphaned_operations = OrphanedOperations()


@atexit.register
def _wait_for_orphans() -> None:
    while (left_s := orphaned_operations.exit_delay_s(time.monotonic())) > 0:
        time.sleep(min(left_s, _LOOK_S))
