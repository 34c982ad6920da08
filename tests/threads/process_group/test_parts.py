"""The parts under a group: addresses, frames, the meeting, Gloo's descriptors."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch
import torch.distributed as dist

from ft_core.process_group import ProcessGroupError, choose_address, outgoing_address, wire
from ft_core.process_group.gloo_sockets import DeviceSockets, pair_sequences
from ft_core.process_group.interfaces import interface_address
from ft_core.process_group.rendezvous import Listener, Rendezvous


def test_addresses_travel_and_are_small() -> None:
    for host in ("127.0.0.1", "fe80::1", "a-rather-long-name.of.some.cluster.example"):
        address = wire.Address(host, 65535, b"12345678")
        assert wire.Address.decode(address.encode()) == address
        assert len(address.encode()) < 300
    for wrong in (b"", b"x", b"ftpg1/1/00/h", b"ftpg1/a/3132333435363738/h", b"\xff\xfe//"):
        with pytest.raises(ValueError, match="no address"):
            wire.Address.decode(wrong)


def test_frames_arrive_in_any_pieces() -> None:
    hello = wire.Hello(7, b"d" * 16, 1, 2, b"t" * 8, b"handle")
    stream = hello.encode() + wire.key_frame("0/1", b"\0value") + wire.frame(wire.DONE)
    buffer, frames = bytearray(), []
    for byte in stream:
        buffer.append(byte)
        while (taken := wire.take_frame(buffer)) is not None:
            frames.append(taken)
    assert [kind for kind, _ in frames] == [wire.HELLO, wire.KEY, wire.DONE]
    assert wire.Hello.decode(frames[0][1]) == hello
    assert wire.parse_key(frames[1][1]) == ("0/1", b"\0value")
    assert not buffer


def test_what_no_member_sends_is_refused() -> None:
    with pytest.raises(wire.FrameError):
        wire.take_frame(bytearray(b"\xff\xff\xff\xff\x01"))
    with pytest.raises(wire.FrameError):
        wire.Hello.decode(b"short")
    with pytest.raises(wire.FrameError):
        wire.Hello.decode(b"other" + b"\0" * 100)
    with pytest.raises(wire.FrameError):
        wire.parse_key(b"\0\0\0\x09abc")


@pytest.fixture
def doorbells() -> Iterator[list[Listener]]:
    bells = [Listener("127.0.0.1"), Listener("127.0.0.1")]
    yield bells
    for bell in bells:
        bell.close()


def test_strangers_do_not_disturb_a_meeting(doorbells: list[Listener]) -> None:
    addresses = [bell.address.encode() for bell in doorbells]
    where = ("127.0.0.1", doorbells[1].address.port)
    with (
        closing(socket.create_connection(where)) as garbage,
        closing(socket.create_connection(where)) as silent,
        closing(socket.create_connection(where)) as misled,
    ):
        garbage.sendall(b"GET / HTTP/1.0\r\n\r\n")
        silent.sendall(b"\0\0")
        digest = wire.members_digest(addresses)
        misled.sendall(wire.Hello(1, digest, 0, 2, b"another!", b"").encode())
        meetings = [Rendezvous(doorbells[rank], 1, rank, addresses, b"h%d" % rank) for rank in (0, 1)]
        other = threading.Thread(target=meetings[0].gather, args=(time.monotonic() + 10,))
        other.start()
        meetings[1].gather(time.monotonic() + 10)
        other.join(10)
        assert meetings[0].handles == meetings[1].handles == [b"h0", b"h1"]
        kind_and_body = misled.recv(1000)
        assert b"another process group" in kind_and_body
        for meeting in meetings:
            meeting.finish()


def test_a_key_reaches_the_other_member(doorbells: list[Listener]) -> None:
    addresses = [bell.address.encode() for bell in doorbells]
    meetings = [Rendezvous(doorbells[rank], 1, rank, addresses, b"h") for rank in (0, 1)]
    deadline = time.monotonic() + 10
    known = threading.Event()

    def serve() -> None:
        meetings[1].gather(deadline)
        meetings[1].pump(known.is_set, deadline)

    server = threading.Thread(target=serve)
    server.start()
    meetings[0].gather(deadline)
    meetings[0].publish("0/0", b"blob")
    assert meetings[1].lookup("0/0", 10) == b"blob"
    with pytest.raises(ProcessGroupError, match="no member published"):
        meetings[1].lookup("0/7", 0.01)
    known.set()
    meetings[1].wake()
    server.join(10)
    assert not server.is_alive()
    for meeting in meetings:
        meeting.close()
        with pytest.raises(ProcessGroupError):
            meeting.publish("late", b"")


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
        end = time.monotonic() + 10
        while tap.sockets.shut() == 0:  # until Gloo's loop has accepted it
            assert time.monotonic() < end
            time.sleep(0.001)
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


def test_descriptors_are_given_back(doorbells: list[Listener]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    addresses = [bell.address.encode() for bell in doorbells]
    for quorum_id in range(5):
        meeting = Rendezvous(doorbells[1], quorum_id, 1, addresses, b"")
        with pytest.raises(ProcessGroupError, match="never came"):
            meeting.gather(time.monotonic() + 0.01)
        meeting.close()
        meeting.close()
    assert len(os.listdir("/proc/self/fd")) == before
