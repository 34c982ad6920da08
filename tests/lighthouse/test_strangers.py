"""What a port hears from processes that do not mean it, and from peers that are broken or hostile."""

from __future__ import annotations

import errno
import logging
import os
import socket
import struct
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from lighthouse import sockets, web
from lighthouse.config import LighthouseConfig, split_address
from lighthouse.dealer import read_monitor
from lighthouse.machine.job import JobState
from lighthouse.machine.jobs import STATUS_MEMBERS, Lighthouse
from lighthouse.server import LighthouseServer
from lighthouse.wire import codec
from lighthouse.wire.messages import (
    DeathNotice,
    Decision,
    Heartbeat,
    JobKey,
    Join,
    Leave,
    Message,
    Refused,
    Request,
    Status,
    StatusRequest,
    Term,
    Vote,
)
from tests.harness.waiting import PATIENCE_S, until
from tests.lighthouse.conftest import PlayerFactory
from tests.lighthouse.support import FAST, Player, commit_together, dealer

HTTP = (
    b"GET /metrics HTTP/1.1\r\nHost: lighthouse.example.org:29510\r\n"
    b"User-Agent: Prometheus/2.53.0\r\nAccept: application/openmetrics-text\r\n\r\n"
)
STRAY = {
    "kubernetes-probe": b"GET / HTTP/1.1\r\nHost: 10.0.0.5:29510\r\nUser-Agent: kube-probe/1.30\r\n"
    b"Accept: */*\r\nConnection: close\r\n\r\n",
    "prometheus": HTTP * 3,
    "five-bytes": b"\x01\x02\x03\x04\x05",
    "port-scan": b"",
    "tls-hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)) * 2,
    "zmtp-1": b"\x01\x00" + b"\x06\x00stray" * 20,
    "zmtp-2": b"\xff" + bytes(8) + b"\x7f\x01\x05" + b"\x00\x00" + b"\x00\x05stray" * 20,
    "ssh": b"SSH-2.0-OpenSSH_9.6\r\n",
}


def _answers(server: LighthouseServer, context: zmq.Context[Any]) -> None:
    """The loop has handled all that was sent before, and goes on."""
    with dealer(context) as asking:
        asking.connect(server.address())
        asking.send(codec.encode(StatusRequest()))
        assert asking.poll(PATIENCE_S * 1000)


def _member_of_a_quorum(player: PlayerFactory) -> Player:
    a = player("a")
    a.join(expected_replicas=1)
    a.await_quorum()
    return a


def _connect(server: LighthouseServer) -> socket.socket:
    return socket.create_connection(split_address(server.address()), PATIENCE_S)


def _reset(connection: socket.socket) -> None:
    """Close it with a reset, as a process does that leaves data unread."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("ending", ["closes", "resets"])
@pytest.mark.parametrize("data", STRAY.values(), ids=STRAY.keys())
def test_strangers_leave_the_members_alone(
    server: LighthouseServer,
    context: zmq.Context[Any],
    player: PlayerFactory,
    data: bytes,
    ending: str,
) -> None:
    a = _member_of_a_quorum(player)
    stranger = _connect(server)
    stranger.sendall(data)
    stranger.close() if ending == "closes" else _reset(stranger)
    commit_together([a])
    _answers(server, context)
    assert server.status()["server"]["received"] == 4, "two joins, the vote and the question"


def test_zeromq_of_another_application_is_turned_away(
    server: LighthouseServer, context: zmq.Context[Any]
) -> None:
    for options in (
        {},
        {zmq.PLAIN_USERNAME: b"another", zmq.PLAIN_PASSWORD: b"x"},
        {zmq.PLAIN_USERNAME: b"lighthouse", zmq.PLAIN_PASSWORD: b"a\nb"},
        {zmq.PLAIN_USERNAME: b"lighthouse", zmq.PLAIN_PASSWORD: b"x", zmq.IDENTITY: b"chosen"},
    ):
        with context.socket(zmq.DEALER) as other:
            monitor = other.get_monitor_socket(
                zmq.EVENT_HANDSHAKE_FAILED_AUTH
                | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
                | zmq.EVENT_DISCONNECTED
            )
            other.setsockopt(zmq.LINGER, 0)
            for option, value in options.items():
                other.setsockopt(option, value)
            other.connect(server.address())
            with suppress(zmq.Again):  # turned away already: there is nothing to send it to
                other.send(codec.encode(StatusRequest()), zmq.DONTWAIT)
            assert monitor.poll(PATIENCE_S * 1000)
            other.disable_monitor()
    _answers(server, context)
    counts = server.status()["server"]
    assert counts["refused"] >= 2
    assert counts["received"] == 1, "the question"


def _greet(connection: socket.socket, identity: bytes, routing_id: bytes = b"") -> None:
    """The handshake of ZMTP 3 with PLAIN, by hand."""
    name = b"lighthouse"
    connection.sendall(
        b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"PLAIN".ljust(20, b"\0") + b"\0" + bytes(31)
    )
    hello = b"\x05HELLO" + bytes([len(name)]) + name + bytes([len(identity)]) + identity
    connection.sendall(b"\x04" + bytes([len(hello)]) + hello)
    _until_heard(connection, b"WELCOME")
    initiate = b"\x08INITIATE" + b"\x0bSocket-Type" + struct.pack("!I", 6) + b"DEALER"
    if routing_id:
        initiate += b"\x08Identity" + struct.pack("!I", len(routing_id)) + routing_id
    connection.sendall(b"\x04" + bytes([len(initiate)]) + initiate)
    _until_heard(connection, b"READY")


def _until_heard(connection: socket.socket, word: bytes) -> None:
    heard = b""
    while word not in heard:
        piece = connection.recv(4_096)
        assert piece, "turned away"
        heard += piece


FLOOD = """
import sys
from lighthouse.config import LighthouseConfig
from lighthouse.server import LighthouseServer
from tests.lighthouse.support import FAST
with LighthouseServer(config=LighthouseConfig(timeouts=FAST)) as server:
    print(server.address(), flush=True)
    sys.stdin.read()
"""


@contextmanager
def _running(script: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that runs `script`, and its first line. It ends when its input does."""
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    ) as process:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()


@pytest.fixture
def apart() -> Any:
    """Address of a lighthouse in a process of its own, which the test must not end."""
    with _running(FLOOD) as (process, address):
        yield address
        assert process.poll() is None
        process.communicate()
        assert process.returncode == 0


def _asked(address: str, context: zmq.Context[Any], times: int) -> None:
    """`address` answers, and so it does after some heartbeats of all its connections."""
    a = Player(address, "a", context)
    with closing(a):
        a.join(expected_replicas=1)
        a.await_quorum()
        for _ in range(times):
            commit_together([a])


def test_a_peer_that_floods_does_not_read_and_resets(apart: str, context: zmq.Context[Any]) -> None:
    """It ended the process: ZeroMQ 4.3.5 asserts that a connection which it does not read, because
    its queue is full, ends by its own hand. Its timer asserted it, one heartbeat later."""
    for _ in range(3):
        flood = socket.create_connection(split_address(apart), PATIENCE_S)
        _greet(flood, b"flood")
        try:
            flood.settimeout(0.05)
            for _ in range(200):
                flood.sendall(b"\0\x01x" * 10_000)
        except OSError:
            pass  # its buffers are full, or it was disconnected
        _reset(flood)
    _outlive_heartbeats(apart, context)


def test_two_connections_of_one_identity_and_a_reset(apart: str, context: zmq.Context[Any]) -> None:
    """The same assertion, where a later connection took over the identity of an earlier one."""
    first = socket.create_connection(split_address(apart), PATIENCE_S)
    second = socket.create_connection(split_address(apart), PATIENCE_S)
    for each in (first, second):
        _greet(each, b"both")
        each.sendall(b"\0\x01x")
    first.sendall(b"\0\x01x")
    _reset(first)
    _outlive_heartbeats(apart, context)
    second.close()


def test_a_routing_id_that_is_in_use_buys_no_memory(
    server: LighthouseServer, context: zmq.Context[Any], player: PlayerFactory
) -> None:
    """ZeroMQ keeps what the second of two connections sends, and never hands it over."""
    a = _member_of_a_quorum(player)
    with dealer(context) as first:
        first.setsockopt(zmq.IDENTITY, b"chosen")
        first.connect(server.address())
        until(lambda: server.status()["server"]["connections"] == 2)
        while not server.status()["server"]["disconnected"]:  # a slow one ends by its heartbeats
            with closing(_connect(server)) as second, suppress(OSError):
                _greet(second, b"x", b"chosen")
                second.settimeout(1.0)  # Linux may tell it of the end with a probe minutes later
                while True:
                    second.sendall(b"\2" + struct.pack("!Q", 100_000) + bytes(100_000))
        until(lambda: server.status()["server"]["connections"] == 2)
        commit_together([a])


@pytest.mark.parametrize("speaks", [b"\0\1\0", b"\0\5wrong"], ids=["hello", "a message"])
def test_a_message_that_does_not_end_buys_no_memory(
    server: LighthouseServer, player: PlayerFactory, speaks: bytes
) -> None:
    """ZeroMQ keeps its parts until the last one comes; each may be as large as a request."""
    a = _member_of_a_quorum(player)
    part = b"\3" + struct.pack("!Q", 100_000) + bytes(100_000)
    while not server.status()["server"]["disconnected"]:  # a slow one ends by its heartbeats
        with closing(_connect(server)) as endless, suppress(OSError):
            _greet(endless, b"endless")
            endless.sendall(speaks)
            endless.settimeout(1.0)
            while True:
                endless.sendall(part)
    commit_together([a])


def test_those_that_have_only_asked_make_way(
    server: LighthouseServer, context: zmq.Context[Any], player: PlayerFactory
) -> None:
    """Where descriptors run short: each is answered, also where earlier ones stay."""
    a = _member_of_a_quorum(player)
    server._endpoint._most = 4
    with ExitStack() as stack:
        for _ in range(12):
            asking = stack.enter_context(dealer(context))
            asking.setsockopt(zmq.RECONNECT_IVL, -1)
            asking.connect(server.address())
            asking.send(codec.encode(StatusRequest()))
            assert asking.poll(PATIENCE_S * 1000)
        until(lambda: server.status()["server"]["connections"] <= 5)
        commit_together([a])


def test_failures_to_accept_do_not_make_the_server_deaf(
    server: LighthouseServer, context: zmq.Context[Any], player: PlayerFactory
) -> None:
    """ZeroMQ reports one after the other without a pause while there is no descriptor."""
    a = _member_of_a_quorum(player)
    endpoint, made = server._endpoint, []
    real, left = read_monitor, [20_000]

    def many(monitor: Any) -> tuple[int, int] | None:
        left[0] -= 1
        return (sockets.ACCEPT_FAILED, errno.EMFILE) if left[0] >= 0 else real(monitor)

    room = endpoint._make_room
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(endpoint, "_make_room", lambda *given: made.append(room(*given)))
        patch.setattr("lighthouse.dealer.read_monitor", many)
        _answers(server, context)
        assert left[0] < 0
    assert 1 <= len(made) < 1_000
    commit_together([a])


def _outlive_heartbeats(address: str, context: zmq.Context[Any]) -> None:
    """Wait until the server has ended a connection that answers no heartbeat: its timers ran."""
    silent = socket.create_connection(split_address(address), PATIENCE_S)
    _greet(silent, b"silent")
    with suppress(ConnectionResetError):
        while silent.recv(4_096):
            pass
    silent.close()
    _asked(address, context, 3)


def test_a_peer_that_sends_too_much_is_disconnected(
    server: LighthouseServer, context: zmq.Context[Any], player: PlayerFactory
) -> None:
    a = _member_of_a_quorum(player)
    with dealer(context) as flood:
        flood.setsockopt(zmq.LINGER, 0)
        monitor = flood.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        flood.connect(server.address())
        while not monitor.poll(0):
            for _ in range(1_000):
                flood.send(b"\xc1 no msgpack")
        flood.disable_monitor()
    commit_together([a])
    assert server.status()["server"]["disconnected"] >= 1


def test_silent_visitors_of_the_status_page_leave_descriptors_to_the_members(
    server: LighthouseServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "SILENCE_S", PATIENCE_S)
    with web.StatusPage("127.0.0.1:0", server.status) as page, ExitStack() as stack:
        address = split_address(f"tcp://{page.url[len('http://') : -1]}")

        def visit() -> socket.socket:
            return stack.enter_context(closing(socket.create_connection(address, PATIENCE_S)))

        def answers() -> bool:
            try:
                return bool(urllib.request.urlopen(page.url, timeout=PATIENCE_S).read())
            except OSError:
                return False

        silent = [visit() for _ in range(web.MOST_CONNECTIONS)]
        assert not answers()
        silent[0].close()
        until(answers)


def test_visitors_for_whom_no_thread_can_be_started_take_no_place(
    server: LighthouseServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with web.StatusPage("127.0.0.1:0", server.status) as page:
        with monkeypatch.context() as full:
            full.setattr(threading.Thread, "start", none)
            for _ in range(web.MOST_CONNECTIONS + 1):
                with pytest.raises(OSError, match="closed connection|reset by peer"):
                    urllib.request.urlopen(page.url, timeout=PATIENCE_S)
        assert urllib.request.urlopen(page.url, timeout=PATIENCE_S).read()


def test_a_message_that_the_rules_fail_on_ends_its_job_only(
    server: LighthouseServer, player: PlayerFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job starts over as after a restart of the lighthouse, and its members join again."""
    a, b = player("a", JobKey("ill", "x")), player("b", JobKey("well", "x"))
    for one in (a, b):
        one.join(expected_replicas=1)
        one.await_quorum()
    before = a.quorum
    right = JobState.handle

    def wrong(self: JobState, peer: bytes, message: Any, now: float) -> Any:
        if isinstance(message, Vote) and message.job.job_id == "ill":
            raise AssertionError("an invariant does not hold")
        return right(self, peer, message, now)

    monkeypatch.setattr(JobState, "handle", wrong)
    a.vote()
    commit_together([b])
    until(lambda: server.status()["server"]["failures"] == 1)
    monkeypatch.setattr(JobState, "handle", right)
    assert before is not None
    a.join(quorum_id=before.quorum_id, last_members=(a.replica_id,), expected_replicas=1)
    assert a.await_quorum().quorum_id > before.quorum_id
    commit_together([a, b])
    assert server.status()["server"]["failures"] == 1
    assert LighthouseConfig(timeouts=FAST).max_jobs > 2


def forge(said: str, member: Any, quorum_id: int) -> Request:
    """What `member` has not said."""
    job, replica_id = member.job, member.replica_id
    forged: dict[str, Request] = {
        "no": Vote(job, replica_id, quorum_id, 0, "init", False, "forged"),
        "leave": Leave(job, replica_id, "forged"),
        "death": DeathNotice(job, replica_id, "forged"),
        "heartbeat": Heartbeat(job, replica_id, quorum_id - 1, 0),
        "join": Join(job, "a", replica_id, 9, "forged", (b"a",)),
    }
    return forged[said]


@pytest.mark.parametrize("said", ["no", "leave", "death", "heartbeat", "join"])
def test_what_another_process_says_of_a_member_has_no_effect(
    server: LighthouseServer, context: zmq.Context[Any], player: PlayerFactory, said: str
) -> None:
    """Its identity is what counts; its name, replica_id and quorum are in every status."""
    a, b = player("a"), player("b")
    for one in (a, b):
        one.join(expected_replicas=2)
    (quorum_id,) = {one.await_quorum().quorum_id for one in (a, b)}
    forged = forge(said, a, quorum_id)
    with dealer(context, b"forger") as forger:
        forger.connect(server.address())
        forger.send(codec.encode(forged))
        forger.send(codec.encode(StatusRequest()))
        answers = [_hear(forger)]
        if said == "join":
            answers.append(_hear(forger))
            assert isinstance(answers[0], Refused)
        assert isinstance(answers[-1], Status), "its message was handled before"
    for decision in commit_together([a, b]):
        assert decision.quorum_id == quorum_id
        assert decision.next_quorum is None


@pytest.mark.parametrize("said", ["no", "leave", "death"])
def test_a_member_s_routing_id_gives_no_part_in_what_it_says_and_hears(
    server: LighthouseServer, player: PlayerFactory, said: str
) -> None:
    """ZeroMQ's routing ids are numbers that a peer may choose, too; they are not who speaks."""
    a, b = player("a"), player("b")
    for one in (a, b):
        one.join(expected_replicas=2)
    (quorum_id,) = {one.await_quorum().quorum_id for one in (a, b)}
    frame = codec.encode(forge(said, a, quorum_id))
    routes = [
        r for p, r in server._endpoint._route_of.items() if p.startswith(a.replica_id.encode())
    ]
    assert len(routes) == 1
    assert routes[0].startswith(b"\0")
    with closing(_connect(server)) as forger:
        _greet(forger, b"forger", routes[0])
        forger.sendall(bytes([0, len(frame)]) + frame)
        until(lambda: server.status()["server"]["connections"] == 3)
        for decision in commit_together([a, b]):
            assert decision.quorum_id == quorum_id
    until(lambda: server.status()["server"]["connections"] == 2)
    for decision in commit_together([a, b]):
        assert decision.quorum_id == quorum_id
        assert decision.next_quorum is None


def _hear(connection: zmq.Socket[bytes]) -> Message:
    assert connection.poll(PATIENCE_S * 1000)
    return codec.decode(connection.recv())


def test_a_member_that_connects_again_is_still_itself(
    server: LighthouseServer, context: zmq.Context[Any], player: PlayerFactory
) -> None:
    a, b = player("a"), player("b")
    for one in (a, b):
        one.join(expected_replicas=2)
    (quorum_id,) = {one.await_quorum().quorum_id for one in (a, b)}
    with dealer(context, a.replica_id.encode()) as successor:
        successor.connect(server.address())
        vote = Vote(a.job, a.replica_id, quorum_id, 0, "init", True)
        successor.send(codec.encode(vote))
        b.vote()
        assert b.await_decision().committed
        assert isinstance(_hear(successor), Decision)


def test_a_refusal_does_not_tell_what_the_members_have(
    server: LighthouseServer, player: PlayerFactory, caplog: pytest.LogCaptureFixture
) -> None:
    """The log does, as a warning: the lighthouse of a launcher shows no other lines."""
    a, b = player("a"), player("b")
    a.join(expected_replicas=1, schema="1", schema_text="a secret model")
    a.await_quorum()
    b.join(schema="2", schema_text="another model")
    reason = b.await_message(Refused).reason
    assert "another model" in reason
    assert "secret" not in reason

    def warned() -> list[str]:
        said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        return [text for text in said if "another model" in text and "a secret model" in text]

    until(warned)  # it is written behind the answer


def test_a_job_that_never_had_a_member_leaves_nothing(
    server: LighthouseServer, context: zmq.Context[Any], player: PlayerFactory
) -> None:
    kept = player("a", JobKey("kept", "x"))
    kept.join(expected_replicas=1)
    kept.await_quorum()
    passing = player("b", JobKey("passing", "x"))
    passing.join(min_replicas=2)
    assert {j["job_id"] for j in _status(server, context)["jobs"]} == {"kept", "passing"}
    passing.close()
    until(lambda: [j["job_id"] for j in server.status()["jobs"]] == ["kept"])
    kept.close()
    until(lambda: server.status()["jobs"][0]["state"] == "forming")
    assert [j["job_id"] for j in server.status()["jobs"]] == ["kept"], "its history counts"


def _status(server: LighthouseServer, context: zmq.Context[Any]) -> dict[str, Any]:
    """The status after all that was said before on connections that have been heard."""
    until(lambda: len(server.status()["jobs"]) == 2)
    return server.status()


def test_a_frame_too_large_for_its_kind_is_not_decoded(
    server: LighthouseServer,
    context: zmq.Context[Any],
    player: PlayerFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unpacked: list[int] = []
    real = msgpack.unpackb

    def unpackb(frame: Any, **options: Any) -> Any:
        unpacked.append(len(frame))
        return real(frame, **options)

    monkeypatch.setattr(codec.msgpack, "unpackb", unpackb)
    with dealer(context) as large:
        large.connect(server.address())
        for tag in ("vote", "stat?", "beat", "no such"):
            large.send(msgpack.packb([codec.VERSION, tag, [[]] * codec.MAX_SMALL_BYTES]))
        large.send(codec.encode(StatusRequest()))
        assert isinstance(_hear(large), Status)
    assert max(unpacked) <= codec.MAX_SMALL_BYTES
    assert server.status()["server"]["malformed"] == 4


def test_a_status_has_a_bound() -> None:
    machine = Lighthouse(
        LighthouseConfig(timeouts=FAST, expected_replicas=STATUS_MEMBERS + 9), lambda: 1
    )
    for n in range(STATUS_MEMBERS + 9):
        job = JobKey("large", "x")
        machine.handle(
            b"p%d" % n, Join(job, f"n{n}", f"r{n}", 0, "init", (b"a",), promised=Term(0, 1)), 0.0
        )
    (job_status,) = machine.status()["jobs"]  # type: ignore[misc]
    assert len(job_status["members"]) == STATUS_MEMBERS
    assert job_status["left_off"] == 9


CROWD = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))
from lighthouse.config import LighthouseConfig
from lighthouse.server import LighthouseServer
from tests.lighthouse.support import FAST
import logging; logging.basicConfig(stream=sys.stdout, format="%(message)s")
with LighthouseServer(config=LighthouseConfig(timeouts=FAST)) as server:
    print(resource.getrlimit(resource.RLIMIT_NOFILE), server.address(), flush=True)
    sys.stdin.read()
"""


def test_connections_that_say_nothing_make_way(context: zmq.Context[Any]) -> None:
    """More than the process has descriptors for; one line says so."""
    with _running(CROWD) as (process, first):
        assert first.startswith("(200, 200)"), "the limit was raised to the hard one"
        address = first.split()[-1]
        silent = []
        with suppress(ConnectionError):  # some are ended before they are made
            for _ in range(300):
                silent.append(socket.create_connection(split_address(address), PATIENCE_S))
        _asked(address, context, 3)
        for each in silent:
            each.close()
        said, _ = process.communicate()
        assert process.returncode == 0
    (line,) = [each for each in said.splitlines() if "ulimit -n" in each]
    assert "those that say nothing, or have only asked, are ended" in line
