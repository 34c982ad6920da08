"""The parts of a group: addresses, frames, the rendezvous, Gloo's descriptors."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ft_core.process_group import (
    ProcessGroupError,
    ProcessGroupGloo,
    choose_address,
    outgoing_address,
    reconfigurable,
)
from ft_core.process_group.gloo_sockets import DeviceSockets, OrphanedOperations, pair_sequences
from ft_core.process_group.rendezvous import Listener, Rendezvous
from ft_core.process_group.rendezvous_messages import (
    Address,
    Hello,
    RendezvousMessage,
    RendezvousOver,
    StoreKey,
    members_digest,
    take_message,
    to_frame,
)
from lighthouse.errors import ProtocolError
from lighthouse.own_address import interface_address
from tests.harness.waiting import PATIENCE_S, until


def test_addresses_travel_and_are_small() -> None:
    for host in ("127.0.0.1", "fe80::1", "a-rather-long-name.of.some.cluster.example"):
        address = Address(host, 65535, b"12345678")
        assert Address.decode(address.encode()) == address
        assert len(address.encode()) < 300
    for wrong in (
        *(b"", b"x", b"\xff\xfe//", b"ftpg1/1/3132333435363738/h"),  # the last: another version
        *(b"ftpg2/1/00/h", b"ftpg2/a/3132333435363738/h", b"ftpg2/1/3132333435363738/"),
    ):
        with pytest.raises(ValueError, match="no address"):
            Address.decode(wrong)


def test_frames_arrive_in_any_pieces() -> None:
    sent: list[RendezvousMessage] = [
        Hello(7, b"d" * 16, 1, 2, b"t" * 8, b"handle"),
        StoreKey("0/1", b"\0value"),
        RendezvousOver(),
    ]
    buffer, received = bytearray(), []
    for byte in b"".join(to_frame(message) for message in sent):
        buffer.append(byte)
        while (message := take_message(buffer)) is not None:
            received.append(message)
    assert received == sent
    assert not buffer


@pytest.mark.parametrize(
    "frame",
    [
        b"\xff\xff\xff\xff\x01",  # too long
        b"\0\0\0\x05short",
        b"GET / HTTP/1.0\r\n\r\n",
        to_frame(RendezvousOver()).replace(b"\x92\x02", b"\x92\x01"),  # another version
        to_frame(StoreKey("k", b"v")).replace(b"\xa1k", b"\xc4\x01k"),  # a name that is bytes
        b"\0\0\0\x01\x92",  # a message that is cut off
    ],
)
def test_what_no_member_sends_is_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        take_message(bytearray(frame))


@pytest.fixture
def listeners() -> Iterator[list[Listener]]:
    made = [Listener("127.0.0.1"), Listener("127.0.0.1")]
    yield made
    for listener in made:
        listener.close()


def test_strangers_do_not_disturb_a_rendezvous(listeners: list[Listener]) -> None:
    addresses = [listener.address for listener in listeners]
    where = ("127.0.0.1", listeners[1].address.port)
    with (
        closing(socket.create_connection(where)) as garbage,
        closing(socket.create_connection(where)) as silent,
        closing(socket.create_connection(where)) as misled,
        closing(socket.create_connection(where)) as surplus,
    ):
        garbage.sendall(b"GET / HTTP/1.0\r\n\r\n")
        silent.sendall(b"\0\0")
        digest = members_digest(addresses)
        misled.sendall(to_frame(Hello(1, digest, 0, 2, b"another!", b"")))
        cookie = listeners[1].address.cookie
        surplus.sendall(to_frame(Hello(1, digest, -1, 2, cookie, b"")))
        both = [Rendezvous(listeners[rank], 1, rank, addresses, b"h%d" % rank) for rank in (0, 1)]
        other = threading.Thread(target=both[0].gather, args=(time.monotonic() + PATIENCE_S,))
        other.start()
        both[1].gather(time.monotonic() + PATIENCE_S)
        other.join(PATIENCE_S)
        assert both[0].handles == both[1].handles == [b"h0", b"h1"]
        rejection = misled.recv(1000)
        assert b"another process group" in rejection
        assert b"no rank -1" in surplus.recv(1000)
        for rendezvous in both:
            rendezvous.finish()


def test_strangers_at_a_rendezvous_that_say_nothing_make_way(
    listeners: list[Listener], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each holds a descriptor; where none is left, Gloo aborts the process."""
    monkeypatch.setattr("ft_core.process_group.rendezvous.MOST_STRANGERS", 4)
    addresses = [listener.address for listener in listeners]
    with ExitStack() as stack:
        where = ("127.0.0.1", listeners[1].address.port)
        silent = [stack.enter_context(closing(socket.create_connection(where))) for _ in range(20)]
        both = [Rendezvous(listeners[rank], 1, rank, addresses, b"h") for rank in (0, 1)]
        other = threading.Thread(target=both[0].gather, args=(time.monotonic() + PATIENCE_S,))
        other.start()
        both[1].gather(time.monotonic() + PATIENCE_S)
        other.join(PATIENCE_S)
        for rendezvous in both:
            rendezvous.finish()
        assert silent[0].recv(1) == b""
        assert len(listeners[1].early) <= 4 + len(addresses)


def test_a_key_reaches_the_other_member(listeners: list[Listener]) -> None:
    addresses = [listener.address for listener in listeners]
    both = [Rendezvous(listeners[rank], 1, rank, addresses, b"h") for rank in (0, 1)]
    deadline = time.monotonic() + PATIENCE_S
    known = threading.Event()

    def serve() -> None:
        both[1].gather(deadline)
        both[1].pump(known.is_set, deadline)

    server = threading.Thread(target=serve)
    server.start()
    both[0].gather(deadline)
    both[0].publish("0/0", b"blob")
    assert both[1].lookup("0/0", deadline) == b"blob"
    with pytest.raises(ProcessGroupError, match="no member published"):
        both[1].lookup("0/7", time.monotonic())
    known.set()
    both[1].wake()
    server.join(PATIENCE_S)
    assert not server.is_alive()
    for rendezvous in both:
        rendezvous.close()
        with pytest.raises(ProcessGroupError):
            rendezvous.publish("late", b"")


def test_what_has_come_before_the_deadline_is_in_time(
    listeners: list[Listener], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process was stopped until it had passed: it has everything that it needs, and reads it first."""
    addresses = [listener.address for listener in listeners]
    both = [Rendezvous(listeners[rank], 1, rank, addresses, b"h%d" % rank) for rank in (0, 1)]
    patient = time.monotonic() + PATIENCE_S
    other = threading.Thread(target=both[0].gather, args=(patient,))
    other.start()
    assert select.select([listeners[1].socket], [], [], PATIENCE_S)[0]
    both[1].gather(time.monotonic() - 10.0)
    other.join(PATIENCE_S)
    assert both[0].handles == both[1].handles == [b"h0", b"h1"]
    both[0].publish("0/0", b"blob")
    both[0].finish()
    looks: list[float] = []
    wait_for = both[1]._changed.wait_for

    def after_the_configuring_thread(condition: Callable[[], bool], seconds: float) -> bool:
        looks.append(seconds)
        if looks[1:]:
            both[1].pump(lambda: both[1].knows("0/0"), time.monotonic() - 10.0)
        return wait_for(condition, seconds)

    monkeypatch.setattr(both[1]._changed, "wait_for", after_the_configuring_thread)
    assert both[1].lookup("0/0", time.monotonic() - 10.0) == b"blob"
    both[1].finish()


def test_one_that_gives_a_newer_quorum_up_while_an_older_one_is_made_is_not_waited_for(
    listeners: list[Listener], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its notice comes before the rendezvous for which it is."""
    addresses = [listener.address for listener in listeners]
    ended, on_end = threading.Event(), Rendezvous._on_end

    def tell(self: Rendezvous, connection: Any) -> None:
        on_end(self, connection)
        ended.set()

    monkeypatch.setattr(Rendezvous, "_on_end", tell)
    older = Rendezvous(listeners[1], 1, 1, addresses, b"")
    with socket.create_connection(("127.0.0.1", listeners[1].address.port)) as other:
        hello = Hello(2, members_digest(addresses), 0, 2, listeners[1].address.cookie, b"")
        other.sendall(to_frame(hello))
    older.pump(ended.is_set, time.monotonic() + PATIENCE_S)
    older.close()
    newer = Rendezvous(listeners[1], 2, 1, addresses, b"")
    with pytest.raises(ProcessGroupError, match="died or gave up"):
        newer.gather(time.monotonic() + PATIENCE_S)
        newer.pump(lambda: False, time.monotonic() + PATIENCE_S)
    newer.close()


class _Tap(dist.Store):
    """A store for one rank that lets a test look at what Gloo publishes, while it publishes."""

    def __init__(self) -> None:
        super().__init__()
        self.data: dict[str, bytes] = {}
        self.sockets: DeviceSockets | None = None
        self.sequences: list[int] = []

    def set(self, key: str, value: bytes) -> None:
        self.data[key] = bytes(value)
        self.sockets = DeviceSockets.find(bytes(value))
        self.sequences = pair_sequences(bytes(value), 1)

    def get(self, key: str) -> bytes:
        return self.data[key]

    def wait(self, keys: list[str], timeout: object = None) -> None:
        assert all(key in self.data for key in keys)

    def has_extended_api(self) -> bool:
        return False


def test_only_the_devices_own_sockets_are_cut() -> None:
    tap = _Tap()
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=False)]
    backend = dist.ProcessGroupGloo(tap, 0, 1, options)
    assert tap.sockets is not None
    assert len(tap.sequences) == 1

    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    accepted, _ = server.accept()
    # A connection to Gloo's listener is Gloo's (on its side), a connection of ours is not.
    caller = socket.create_connection(tap.sockets._address)
    with server, client, accepted, caller:
        caller.sendall(b"\0" * 4)  # half a sequence number: Gloo waits for the rest of it
        caller.settimeout(10)
        until(tap.sockets.shut, "Gloo's loop to accept it")
        with pytest.raises(ConnectionResetError):
            caller.recv(1)
        client.sendall(b"alive")
        assert accepted.recv(5) == b"alive"
        socket.create_connection(tap.sockets._address).close()  # the listener lives
    backend.allreduce([torch.ones(1)]).wait()
    del backend
    options._devices = []


def test_a_reused_descriptor_is_left_alone() -> None:
    left, right = socket.socketpair()
    with left, right:
        sockets = DeviceSockets(epoll=left.fileno(), listener_inode=1, address=("127.0.0.1", 1))
        assert sockets.shut() == 0
        right.sendall(b"x")
        assert left.recv(1) == b"x"


def test_sequences_are_read_only_when_they_look_right() -> None:
    numbers = b"".join(number.to_bytes(8, "little") for number in (5, 6, 7))
    assert pair_sequences(b"header" + numbers, 3) == [5, 6, 7]
    assert pair_sequences(b"header" + numbers, 2) == [6, 7]
    assert pair_sequences(b"xx" + numbers[:-8] + numbers[:8], 3) == []
    assert pair_sequences(b"", 3) == []


def test_choosing_an_address() -> None:
    assert choose_address("127.0.0.1", None) == "127.0.0.1"
    assert choose_address(None, "lo") == interface_address("lo") == "127.0.0.1"
    assert outgoing_address("127.0.0.1") == "127.0.0.1"
    socket.inet_aton(outgoing_address())
    with pytest.raises(ValueError, match="not both"):
        choose_address("a", "b")
    with pytest.raises(ValueError, match="interfaces here"):
        interface_address("nonesuch0")
    with pytest.raises(ValueError, match="does not resolve"):
        choose_address("no.such.host.invalid", None)


def test_descriptors_are_given_back(listeners: list[Listener]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    addresses = [listener.address for listener in listeners]
    for quorum_id in range(5):
        rendezvous = Rendezvous(listeners[1], quorum_id, 1, addresses, b"")
        with pytest.raises(ProcessGroupError, match="never came"):
            rendezvous.gather(time.monotonic() + 0.01)
        rendezvous.close()
        rendezvous.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_process_that_is_too_slow_itself_accuses_no_other(listeners: list[Listener]) -> None:
    """All others are connected, as far as there are any; its own backend is not."""
    rendezvous = Rendezvous(listeners[0], 1, 0, [listeners[0].address], b"")
    rendezvous.gather(time.monotonic() + 10.0)
    with pytest.raises(ProcessGroupError, match="these have not connected: this process$"):
        rendezvous.pump(lambda: False, time.monotonic())
    assert not rendezvous.missed(0.0)
    rendezvous.close()


class Slow:
    """A work, and the threads of its backend: they get no processor time while the process is stopped, which it is in
    the first wait for the work."""

    operation, quorum_id, issued_at = "allreduce", 1, 0.0

    def __init__(self) -> None:
        self.looks, self.ended_with = 0, list[object]()

    def ended_within(self, seconds: float) -> bool:
        self.looks += 1
        return self.looks > 1

    def is_completed(self) -> bool:
        return self.looks > 1

    def fail(self, error: object) -> None:
        self.ended_with.append(error)

    def quiescent(self) -> bool:
        return False

    def operation_orphaned(self, until: float) -> None:
        raise AssertionError("the backend may still write to its tensors")

    def monotonic(self) -> float:
        return 100.0 * min(self.looks, 1)


def test_a_revoked_work_is_not_abandoned_for_the_time_in_which_the_process_was_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow: Any = Slow()
    group = ProcessGroupGloo(PATIENCE_S)
    monkeypatch.setattr(reconfigurable, "time", slow)
    group._end_or_abandon(slow, [slow], ProcessGroupError("revoked"))
    monkeypatch.undo()
    group.shutdown()
    assert slow.looks == 2
    assert slow.ended_with == []


def test_the_end_of_a_process_waits_until_a_backend_with_a_lost_operation_is_gone() -> None:
    """However late that is reported, up to a limit; not for one that the process does not live to see."""
    operations = OrphanedOperations()
    first, second = object(), object()
    operations.add(first, due=103.0)
    operations.add(first, due=101.0)
    assert operations.exit_delay_s(100.0) == operations.exit_delay_s(102.0) + 2.0 == 13.0
    assert operations.exit_delay_s(112.0) == 1.0
    assert operations.exit_delay_s(114.0) == 0.0
    operations.add(second, due=160.0)
    operations.gone(first)
    assert operations.exit_delay_s(100.0) == 0.0
    assert operations.exit_delay_s(155.0) == 15.0
