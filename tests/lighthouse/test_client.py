"""The client's two ends, and addresses as people write them."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

import pytest
import zmq

from lighthouse import dealer
from lighthouse.client import SERVICE, Connection, LighthouseClient
from lighthouse.config import normalize_address, split_address
from lighthouse.dealer import close
from lighthouse.endpoint import Endpoint
from lighthouse.errors import LighthouseUnavailable
from lighthouse.server import LighthouseServer
from lighthouse.sockets import (
    CLIENT_SEND_QUEUE_MESSAGES,
    answer_request,
    open_authenticator,
    open_router,
    read_request,
)
from lighthouse.wire import codec
from lighthouse.wire.messages import Declared, DeclareDead, StatusRequest
from tests.harness.waiting import PATIENCE_S
from tests.lighthouse.support import FAST, await_frame, refused_a


@pytest.mark.parametrize(
    ("written", "normal"),
    [
        ("tcp://host:29510", "tcp://host:29510"),
        ("host:29510", "tcp://host:29510"),
        ("http://10.0.0.1:29510", "tcp://10.0.0.1:29510"),
        ("http://my-host.example.org:1/", "tcp://my-host.example.org:1"),
        (" [::1]:29510\n", "tcp://[::1]:29510"),
        ("tcp://[fe80::1%eth0]:65535", "tcp://[fe80::1%eth0]:65535"),
    ],
)
def test_addresses_that_can_be_connected_to(written: str, normal: str) -> None:
    assert normalize_address(written) == normal
    assert normalize_address(written, to_connect=False) == normal


@pytest.mark.parametrize(
    "written",
    [
        "",
        "host",
        "host:",
        ":29510",
        "tcp://",
        "host:port",
        "host:70000",
        "host:0",
        "*:29510",
        "tcp://a b:1",
        "ipc:///tmp/x:1",
        "tcp://host:1/path",
        "http://user@host:1",
        "tcp://host:١",
    ],
)
def test_addresses_that_can_not(written: str) -> None:
    with pytest.raises(ValueError, match="write"):
        normalize_address(written)
    with pytest.raises(ValueError, match="write"):
        LighthouseClient(written)


def test_addresses_to_bind() -> None:
    assert normalize_address("*:0", to_connect=False) == "tcp://*:0"
    assert split_address("tcp://[::]:29510") == ("::", 29510)


def test_an_absent_lighthouse_is_one_sentence() -> None:
    with LighthouseServer() as server:
        address = server.address()
    with LighthouseClient(address, timeout_s=0.3) as client:
        with pytest.raises(LighthouseUnavailable, match=r"within 0\.3 s.*check that one runs"):
            client.status()


@pytest.mark.parametrize("lacks", ["thread", "descriptor"])
def test_a_lighthouse_that_can_not_be_started_leaves_no_port_open(
    lacks: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Members would have connected, and waited for an answer; and no other could have its state file."""
    with monkeypatch.context() as patch, refused_a(lacks, patch) as opened:
        with pytest.raises((RuntimeError, OSError), match="no more"):
            LighthouseServer(state_file=tmp_path / "state")
    (address,) = opened
    with LighthouseServer(address, state_file=tmp_path / "state") as server:
        assert server.status()["jobs"] == []


def test_a_client_waits_for_a_lighthouse_that_comes_later() -> None:
    with LighthouseServer() as server:
        address = server.address()
    with LighthouseClient(address, timeout_s=0.05) as client:
        with pytest.raises(LighthouseUnavailable):
            client.wait_until_up()
        with LighthouseServer(address):
            client.wait_until_up(timeout_s=10.0)
            assert client.status(timeout_s=10.0)["jobs"] == []


def test_each_call_of_a_client_gets_its_own_answer() -> None:
    """The first question was sent twice, before the connection was there and then: the next call got the second
    answer, of another member."""
    with LighthouseServer() as server, LighthouseClient(server.address()) as client:
        for name in "abc":
            accepted, text = client.declare_dead(name)
            assert accepted and f"wait for {name}," in text
        assert client.status()["server"]["received"] == 4


def test_an_answer_to_an_earlier_call_that_comes_late_is_none_to_this_one() -> None:
    context: zmq.Context[Any] = zmq.Context()
    endpoint = Endpoint(context, "tcp://127.0.0.1:0", FAST, service=SERVICE)

    def answer() -> None:
        peer, frame = await_frame(endpoint)
        asked = codec.decode(frame)
        assert isinstance(asked, DeclareDead)
        for name in ("earlier", asked.member):
            endpoint.send([peer], codec.encode(Declared(asked.job_id, name, True, f"of {name}")))

    late = threading.Thread(target=answer)
    late.start()
    with LighthouseClient(endpoint.address, timeout_s=PATIENCE_S) as client:
        answered = client.declare_dead("this")
    late.join()
    endpoint.close()
    context.term()
    assert answered == (True, "of this")


def test_send_never_blocks_and_says_when_the_queue_is_full(context: zmq.Context[Any]) -> None:
    with LighthouseServer() as server:
        address = server.address()
    connection = Connection(address, identity=b"x", timeouts=FAST, context=context)
    try:
        said = [DeclareDead("job", str(n)) for n in range(CLIENT_SEND_QUEUE_MESSAGES + 5)]
        sent = [connection.send(message) for message in said]
        assert sent == [True] * CLIENT_SEND_QUEUE_MESSAGES + [False] * 5
        assert connection.receive() == []
        assert connection.events() == []
    finally:
        connection.close()
        connection.close()


def test_what_is_repeated_while_the_lighthouse_is_away_is_sent_once(
    context: zmq.Context[Any],
) -> None:
    """Else it would answer all of it at once when it is back, and take that for a peer that does not
    read."""
    with LighthouseServer() as server:
        address = server.address()
    connection = Connection(address, identity=b"x", timeouts=FAST, context=context)
    said = [DeclareDead("job", name) for name in "abc"]
    for message in (*said[:2] * CLIENT_SEND_QUEUE_MESSAGES, said[2]):
        assert connection.send(message)
    server_context: zmq.Context[Any] = zmq.Context()
    endpoint = Endpoint(server_context, address, FAST, service=SERVICE)
    assert [codec.decode(await_frame(endpoint)[1]) for _ in said] == said
    assert _events_until(connection, "connected") == ["connected"]
    for _ in range(2):  # an answer may be lost: this is a question of now
        connection.send(said[0])
    assert [codec.decode(await_frame(endpoint)[1]) for _ in range(2)] == said[:1] * 2
    connection.close()
    endpoint.close()
    server_context.term()


@pytest.mark.parametrize("identity", [b"", b"\0x", bytes(256)])
def test_identities_that_a_router_would_not_have(
    context: zmq.Context[Any], identity: bytes
) -> None:
    with pytest.raises(ValueError, match="identity"):
        Connection("host:1", identity=identity, timeouts=FAST, context=context)


def test_events_alternate_over_restarts(context: zmq.Context[Any]) -> None:
    with LighthouseServer() as server:
        address = server.address()
        connection = Connection(address, identity=b"x", timeouts=FAST, context=context)
        seen = _events_until(connection, "connected")
    seen += _events_until(connection, "disconnected")
    with LighthouseServer(address):
        seen += _events_until(connection, "connected")
    connection.close()
    assert seen == ["connected", "disconnected", "connected"]


def _events_until(connection: Connection, last: str) -> list[str]:
    seen: list[str] = []
    while last not in seen:
        assert connection.sockets[1].poll(10_000)
        seen += connection.events()
    return seen


def test_bytes_of_a_lighthouse_that_are_no_message_are_counted(context: zmq.Context[Any]) -> None:
    authenticator = open_authenticator(context)
    router, monitor = open_router(context, "tcp://127.0.0.1:0", FAST)
    address = router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
    connection = Connection(address, identity=b"x", timeouts=FAST, context=context)
    connection.send(StatusRequest())
    assert authenticator.poll(PATIENCE_S * 1000)
    request = read_request(authenticator)
    assert request is not None
    answer_request(authenticator, request, admitted=True)
    assert router.poll(PATIENCE_S * 1000)
    peer, _ = router.recv_multipart()
    router.send_multipart([peer, b"nonsense"])
    router.send_multipart([peer, b"two", b"parts"])
    while connection.malformed < 2:
        assert connection.sockets[0].poll(PATIENCE_S * 1000)
        assert connection.receive() == []
    connection.close()
    close(router, monitor)
    authenticator.close()


def test_a_connection_that_is_half_made_ends_with_its_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No file descriptors are left. It had waited for ever for the socket that was open."""

    def fails(*_: object) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    monkeypatch.setattr(dealer, "open_monitor", fails)
    with pytest.raises(zmq.ZMQError):
        LighthouseClient("tcp://127.0.0.1:1")
