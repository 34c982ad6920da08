"""A heal server's port, and processes that are no target; a source that says what is not so."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import pytest
import zmq

from ft_core.heal import HealError, HealServer, fetch
from ft_core.heal import protocol as wire
from ft_core.heal.same_host import listens
from ft_core.heal.transport import HealAddress, reading_socket
from lighthouse.config import MOST_STRANGERS, split_address
from tests.ft_core.heal.support import KEY, same, soon, state
from tests.harness.strangers import crowd
from tests.harness.waiting import until

MakeServer = Callable[..., HealServer]


def test_bytes_that_are_not_zeromq(make_server: MakeServer) -> None:
    server = make_server()
    server.publish(KEY, {"epoch": 1})
    _, port = split_address(HealAddress.parse(server.address).where)
    for junk in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096)):
        with socket.create_connection(("127.0.0.1", port)) as raw:
            raw.sendall(junk)
    assert fetch([server.address], KEY, deadline=soon())[0] == {"epoch": 1}


def test_connections_that_say_nothing_make_way(
    make_server: MakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Each takes a descriptor of the training's process."""
    server = make_server(max_clients=1)
    server.publish(KEY, {"epoch": 1})
    with crowd(HealAddress.parse(server.address).where, MOST_STRANGERS + 40) as ended:
        until(lambda: ended() >= 39)
        assert fetch([server.address], KEY, deadline=soon())[0] == {"epoch": 1}
    [line] = [each for each in caplog.messages if "say nothing" in each]
    assert f"more than {MOST_STRANGERS + 1} connections" in line


def test_a_place_is_free_again_when_its_reader_hangs_up(make_server: MakeServer) -> None:
    server = make_server(max_clients=1)
    context = zmq.Context()
    asked = wire.Open("", KEY.step, KEY.lineage, 1 << 20, 3600.0, b"")
    address = HealAddress.parse(server.address)
    with reading_socket(context, address) as reader:
        reader.connect(address.where)
        reader.send(wire.requests.encode(asked))
        until(lambda: server.stats().opened == 1)
    context.term()
    server.publish(KEY, {"epoch": 1})

    def served() -> bool:
        try:
            fetch([server.address], KEY, deadline=soon())
        except HealError:  # it serves the one that hung up, still
            return False
        return True

    until(served)


def test_a_process_that_is_no_member_gets_no_place(make_server: MakeServer) -> None:
    """Only members know the word at the end of the address; the quorum has told them."""
    server = make_server(max_clients=1)
    server.publish(KEY, {"epoch": 1})
    where = HealAddress.parse(server.address).where
    for address in (where, f"{where}/guessed", f"{where}/1/guessed"):
        with pytest.raises(HealError, match="Could not heal"):
            fetch([address], KEY, deadline=soon(1.0))
    assert server.stats().opened == 0
    assert fetch([server.address], KEY, deadline=soon())[0] == {"epoch": 1}


def test_a_source_cannot_name_another_process(make_server: MakeServer) -> None:
    server = make_server()
    where = HealAddress.parse(server.address).where
    assert listens(os.getpid(), where)
    assert not listens(os.getppid(), where), "that process has another socket, if any"
    assert not listens(os.getpid(), "tcp://127.0.0.1:1"), "no socket at all"


def test_a_source_that_closes_a_file_meanwhile_is_found(make_server: MakeServer) -> None:
    """As this process does: its descriptor of the listing has a free number below the socket's, and is closed
    before it is looked at."""
    with open(os.devnull):
        server = make_server()
    assert listens(os.getpid(), HealAddress.parse(server.address).where)


def test_memory_of_a_process_that_is_not_the_source_is_not_read(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = state(8)
    server = make_server()
    server.publish(KEY, tree)
    monkeypatch.setattr("ft_core.heal.source.os.getpid", os.getppid)
    back, stats = fetch([server.address], KEY, deadline=soon(), same_host=True)
    assert same(back, tree)
    assert stats.same_host_bytes == 0
