"""The server over real ZeroMQ: what replica groups hear, and what becomes of strangers."""

from __future__ import annotations

import errno
import fcntl
import os
import queue
import socket
import subprocess
import sys
import termios
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

import lighthouse.server as server_module
import lighthouse.waits as waits_module
from lighthouse.client import SERVICE, LighthouseClient
from lighthouse.config import LighthouseConfig, Timeouts
from lighthouse.endpoint import Endpoint
from lighthouse.errors import ProtocolError, VersionMismatch
from lighthouse.machine.job import Note
from lighthouse.machine.jobs import Lighthouse
from lighthouse.server import LighthouseServer
from lighthouse.wire import codec
from lighthouse.wire.messages import (
    DeathNotice,
    Decision,
    Expelled,
    Heartbeat,
    JobKey,
    Leave,
    Quorum,
    Refused,
    Revoke,
    StatusRequest,
    Waiting,
)
from tests.harness.waiting import PATIENCE_S, until
from tests.lighthouse.conftest import PlayerFactory
from tests.lighthouse.support import (
    FAST,
    Player,
    await_frame,
    commit_together,
    dealer,
)


def _pair(player: PlayerFactory) -> tuple[Player, Player]:
    a, b = player("a"), player("b")
    for one in (a, b):
        one.join(expected_replicas=2)
    for one in (a, b):
        one.await_quorum()
    return a, b


def test_two_replica_groups_join_vote_and_commit(player: PlayerFactory) -> None:
    a, b = _pair(player)
    assert a.quorum == b.quorum
    assert a.quorum is not None
    assert [m.replica_id for m in a.quorum.changed] == [a.replica_id, b.replica_id]
    for step in range(20):
        decisions = commit_together([a, b])
        assert [d.step for d in decisions] == [step, step]
        assert all(d.next_quorum is None for d in decisions), "the steady state has no lists"
    assert (a.step, a.lineage) == (b.step, b.lineage)


def test_one_no_discards_the_step_for_all(player: PlayerFactory) -> None:
    a, b = _pair(player)
    a.vote(ok=False, reason="out of cheese")
    revoke = b.await_message(Revoke)
    assert "out of cheese" in revoke.reason
    assert "a" in revoke.reason
    b.vote()
    decisions = [a.await_decision(), b.await_decision()]
    assert [d.committed for d in decisions] == [False, False]
    assert all(d.next_quorum is not None for d in decisions)
    commit_together([a, b])


def test_newcomer_is_admitted_after_the_step(player: PlayerFactory) -> None:
    a, b = _pair(player)
    first = a.quorum
    assert first is not None
    c = player("c")
    c.join()
    assert "step in progress" in c.await_message(Waiting).reason
    decisions = commit_together([a, b])
    delta = decisions[0].next_quorum
    assert delta is not None
    assert delta.base_id == first.quorum_id
    assert [m.replica_id for m in delta.changed] == [c.replica_id]
    assert c.await_quorum().quorum_id == delta.quorum_id > first.quorum_id


def test_goodbye_costs_the_others_nothing(player: PlayerFactory) -> None:
    a, b = _pair(player)
    a.vote(leaving=True)
    b.vote()
    assert a.await_decision().committed
    assert b.await_decision().committed
    a.say(Leave(a.job, a.replica_id))
    commit_together([b])


def test_closed_connection_revokes_the_step(player: PlayerFactory) -> None:
    a, b = _pair(player)
    a.close()
    assert "connection closed" in b.await_message(Revoke).reason
    b.vote()
    decision = b.await_decision()
    assert decision.committed
    assert decision.next_quorum is not None
    assert decision.next_quorum.removed == (a.replica_id,)


def test_what_was_said_before_the_end_counts(player: PlayerFactory) -> None:
    """A vote (or a goodbye) followed at once by the connection's end is heard first."""
    a, b = _pair(player)
    a.vote()
    a.connection.close(linger_s=PATIENCE_S)
    b.vote()
    assert b.await_decision().committed
    assert b.step == 1


def test_death_notice_counts_as_a_closed_connection(
    server: LighthouseServer, context: zmq.Context[Any], player: PlayerFactory
) -> None:
    a, b = _pair(player)
    with dealer(context, a.replica_id.encode()) as watcher:
        watcher.connect(server.address())
        watcher.send(codec.encode(DeathNotice(b.job, a.replica_id, "seen to die")))
        assert "seen to die" in b.await_message(Revoke).reason


def test_jobs_are_apart(player: PlayerFactory) -> None:
    jobs = [JobKey("job-1", "x"), JobKey("job-2", "x"), JobKey("job-2", "y")]
    alone = [player("same name", job) for job in jobs]
    for one in alone:
        one.join(expected_replicas=1)
    for one in alone:
        quorum = one.await_quorum()
        assert quorum.job == one.job
        assert [m.replica_id for m in quorum.changed] == [one.replica_id]
    alone[0].close()
    commit_together(alone[1:])


def test_second_process_of_a_name_is_refused(player: PlayerFactory) -> None:
    first, second = player("twin"), player("twin")
    first.join(expected_replicas=1)
    first.await_quorum()
    second.join()
    assert "still in use" in second.await_message(Waiting).reason
    assert "twin" in second.await_message(Refused).reason
    commit_together([first])


def test_restarted_process_takes_over_its_name(player: PlayerFactory) -> None:
    first, second = player("twin"), player("twin")
    first.join(expected_replicas=1)
    first.await_quorum()
    second.join()
    second.await_message(Waiting)
    first.close()
    assert [m.replica_id for m in second.await_quorum().changed] == [second.replica_id]


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"\xc1 no msgpack"],
        [msgpack.packb([codec.VERSION, "vote", 1, 2])],
        [msgpack.packb([codec.VERSION, "no such tag"])],
        [codec.encode(Waiting(JobKey(), "only a lighthouse says this"))],
        [codec.encode(StatusRequest()), b"one part too many", b"and another"],
        [b"", codec.encode(StatusRequest())],
    ],
    ids=["empty", "garbage", "fields", "tag", "direction", "parts", "delimiter"],
)
def test_nonsense_is_dropped_and_counted(
    server: LighthouseServer, context: zmq.Context[Any], frames: list[bytes]
) -> None:
    with dealer(context) as stranger:
        stranger.connect(server.address())
        stranger.send_multipart(frames)
        stranger.send(codec.encode(StatusRequest()))  # answered: the server lives, and is past it
        assert stranger.poll(PATIENCE_S * 1000)
        stranger.recv()
    assert server.status()["server"]["malformed"] == 1


def test_huge_frame_costs_its_sender_the_connection(
    server: LighthouseServer, context: zmq.Context[Any], player: PlayerFactory
) -> None:
    with dealer(context) as stranger:
        monitor = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(server.address())
        stranger.send(bytes(codec.MAX_REQUEST_BYTES + 1))
        assert monitor.poll(PATIENCE_S * 1000)
        stranger.disable_monitor()
    assert server.status()["server"]["received"] == 0
    commit_together(list(_pair(player)))


def test_other_version_is_told_which(server: LighthouseServer, context: zmq.Context[Any]) -> None:
    with dealer(context) as old:
        old.connect(server.address())
        old.send(msgpack.packb([codec.VERSION + 1, "stat?", "whatever else that version says"]))
        assert old.poll(PATIENCE_S * 1000)
        version, tag, _job, reason = msgpack.unpackb(old.recv())
    assert (version, tag) == (codec.VERSION, "refuse")
    assert f"version {codec.VERSION + 1}" in reason
    assert "same release" in reason
    assert server.status()["server"]["other_versions"] == 1


def test_client_of_another_version_says_so_in_one_error(
    context: zmq.Context[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a newer lighthouse would send to this client, over a real socket."""
    answer = msgpack.packb([codec.VERSION + 1, "refuse", ["default", "default"], "unreadable"])
    newer = Endpoint(context, "tcp://127.0.0.1:0", FAST, service=SERVICE)
    player = Player(newer.address, "a", context)
    try:
        player.say(StatusRequest())
        newer.send([await_frame(newer)[0]], answer)
        with pytest.raises(VersionMismatch, match=f"version {codec.VERSION + 1}"):
            player.await_message(Quorum)
    finally:
        player.close()
        newer.close()
    assert issubclass(VersionMismatch, ProtocolError)


def test_peer_that_never_reads_holds_up_nobody(
    server: LighthouseServer, context: zmq.Context[Any], player: PlayerFactory
) -> None:
    with dealer(context) as deaf:
        deaf.setsockopt(zmq.RCVHWM, 1)
        deaf.setsockopt(zmq.RCVBUF, 4_096)
        deaf.setsockopt(zmq.LINGER, 0)
        deaf.connect(server.address())
        a, b = _pair(player)
        # Each answer is a full status; far more of them than its queues and buffers hold.
        ended = 0
        while ended == 0:
            for _ in range(100):
                deaf.send(codec.encode(StatusRequest()))
            ended = server.status()["server"]["disconnected"]
        commit_together([a, b])


def test_lighthouse_is_restarted_on_the_same_port(
    context: zmq.Context[Any], tmp_path: Path
) -> None:
    config = LighthouseConfig(timeouts=FAST)
    first = LighthouseServer(config=config)
    a, b = Player(first.address(), "a", context), Player(first.address(), "b", context)
    try:
        for one in (a, b):
            one.join(expected_replicas=2)
        old_ids = {one.await_quorum().quorum_id for one in (a, b)}
        commit_together([a, b])
        first.shutdown()
        for one in (a, b):
            one.await_event("disconnected")
        with LighthouseServer(first.address(), config=config):
            for one in (a, b):
                one.await_event("connected")
                one.say(Heartbeat(one.job, one.replica_id, 1, one.step))
                assert "not known" in one.await_message(Expelled).reason
                assert one.quorum is not None
                ids = tuple(m.replica_id for m in one.quorum.changed)
                one.join(quorum_id=one.quorum.quorum_id, last_members=ids)
            new_ids = {one.await_quorum().quorum_id for one in (a, b)}
            assert len(old_ids) == len(new_ids) == 1
            assert min(new_ids) > max(old_ids)
            commit_together([a, b])
            assert a.step == b.step == 2
    finally:
        first.shutdown()
        a.close()
        b.close()


def test_state_file_makes_a_restart_wait_for_all(context: zmq.Context[Any], tmp_path: Path) -> None:
    """With it, even a lighthouse that hears of no last_members waits for the missing one."""
    state_file = tmp_path / "lighthouse.json"
    timeouts = FAST.derive(10.0, join_timeout_s=60.0)  # longer than this test has
    config = LighthouseConfig(timeouts=timeouts)
    with LighthouseServer(config=config, state_file=state_file) as server:
        a, b = Player(server.address(), "a", context), Player(server.address(), "b", context)
        for one in (a, b):
            one.join(expected_replicas=2)
        for one in (a, b):
            one.await_quorum()
    try:
        with LighthouseServer(server.address(), config=config, state_file=state_file):
            a.join()
            assert "come back" in a.await_message(Waiting).reason
            b.join()
            a.await_quorum()
            b.await_quorum()
    finally:
        a.close()
        b.close()


def test_a_vote_that_has_arrived_in_time_is_not_late(
    context: zmq.Context[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server was busy until the deadline had passed, and reads one frame before it looks at it."""
    monkeypatch.setattr(server_module, "BATCH_MESSAGES", 1)
    monkeypatch.setattr(waits_module, "PUT_OFF_S", PATIENCE_S)
    limits = Timeouts.derive(
        60.0, heartbeat_timeout_s=3.0, revoke_timeout_s=4.0, join_timeout_s=0.5
    )
    other, blocked, go_on = JobKey("other", "room"), threading.Event(), threading.Event()

    def block(note: Note) -> None:
        if note.job == other:
            blocked.set()
            go_on.wait(PATIENCE_S)

    config = LighthouseConfig(timeouts=limits)
    with LighthouseServer(config=config, on_note=block) as server, ExitStack() as stack:
        stack.callback(go_on.set)
        a, b = (Player(server.address(), name, context) for name in "ab")
        for player in (a, b):
            player.join(expected_replicas=2)
        for player in (a, b):
            player.await_quorum()
        a.vote(False)
        b.await_message(Revoke)
        due = time.monotonic() + limits.revoke_timeout_s
        c = Player(server.address(), "c", context, other)
        for player in (a, b, c):
            stack.callback(player.close)
        c.join()
        assert blocked.wait(PATIENCE_S)
        assert b.quorum is not None
        beat = Heartbeat(b.job, b.replica_id, b.quorum.quorum_id, 0)
        for _ in range(3):
            b.say(beat)
        b.vote()
        fds = server._endpoint._routes.fd_of
        (fd,) = (fd for peer, fd in fds.items() if peer.decode().startswith("b-"))
        most = 15 * len(codec.encode(beat))  # more than the vote and what came before it
        # When the second lot was read, ZeroMQ's thread has handed over the first.
        for _ in range(2):
            known = server._endpoint._received_by(fd)
            for _ in range(20):
                b.say(beat)
            until(lambda known=known: server._endpoint._received_by(fd) > known + most)
            until(lambda: _unread(fd) == 0)
        time.sleep(max(0.0, due - time.monotonic()))
        go_on.set()
        heard: object = None
        while not isinstance(heard, Decision | Expelled):
            heard = b.await_message(object)  # type: ignore[type-var]
        assert isinstance(heard, Decision)


def _unread(fd: int) -> int:
    return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), sys.byteorder)


def test_notes_are_one_line_a_quorum_change_and_none_a_step(context: zmq.Context[Any]) -> None:
    notes: queue.SimpleQueue[Note] = queue.SimpleQueue()
    config = LighthouseConfig(timeouts=FAST)
    with LighthouseServer(config=config, on_note=notes.put) as server:
        a = Player(server.address(), "a", context)
        a.join(expected_replicas=1)
        a.await_quorum()
        for _ in range(10):
            commit_together([a])
        a.close()
    lines = [notes.get() for _ in range(notes.qsize())]
    assert [note.quorum for note in lines].count(True) == 1
    assert sum("step 0" in note.text for note in lines) == 1


def test_status_from_any_thread_and_over_the_wire(
    server: LighthouseServer, player: PlayerFactory
) -> None:
    _pair(player)
    with LighthouseClient(server.address(), timeout_s=PATIENCE_S) as client:
        client.wait_until_up()
        remote = client.status()
    local = server.status()
    assert remote["jobs"] == local["jobs"]
    assert [m["name"] for m in local["jobs"][0]["members"]] == ["a", "b"]
    server.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        server.status()


def test_address_in_use_is_one_sentence(server: LighthouseServer) -> None:
    with pytest.raises(OSError, match=r"choose another port"):
        LighthouseServer(server.address())


def test_torchft_like_options_and_their_conflicts() -> None:
    with LighthouseServer(min_replicas=3, join_timeout_ms=250) as server:
        assert server.config.min_replicas == 3
        assert server.config.timeouts.join_timeout_s == 0.25
    with pytest.raises(ValueError, match="not both"):
        LighthouseServer(config=LighthouseConfig(), min_replicas=2)


def test_all_interfaces_are_advertised_as_one_that_can_be_reached() -> None:
    with (
        LighthouseServer("tcp://0.0.0.0:0") as server,
        LighthouseClient(server.address(), timeout_s=PATIENCE_S) as client,
    ):
        assert "0.0.0.0" not in server.address()
        client.wait_until_up()


def test_internal_error_ends_the_server_and_is_told(
    context: zmq.Context[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Endpoint, dry: bool) -> list[bytes]:
        if not self.received:
            return []  # its thread wakes up for the connection, too
        raise AssertionError("an invariant does not hold")

    config = LighthouseConfig(timeouts=FAST)
    with LighthouseServer(config=config) as server:
        a = Player(server.address(), "a", context)
        a.await_event("connected")
        monkeypatch.setattr(Endpoint, "take_lost", broken)
        a.join(expected_replicas=1)
        a.await_event("disconnected")
        with pytest.raises(RuntimeError, match="an invariant does not hold"):
            server.join(PATIENCE_S)
        a.close()


def test_many_processes_worth_of_connections_come_and_go(
    server: LighthouseServer, context: zmq.Context[Any]
) -> None:
    """Descriptors are reused all the time, and no peer is taken for another."""
    for wave in range(5):
        players = [
            Player(server.address(), f"p{n}", context, JobKey("job", str(wave))) for n in range(20)
        ]
        for one in players:
            one.join(expected_replicas=20)
        for one in players:
            one.await_quorum()
        commit_together(players)
        stay = players[:10]  # with fewer than half the others could be going on elsewhere
        for one in players[10:]:
            one.close()
        for one in stay:
            assert one.await_message(Revoke).step == 1
            one.vote()
        for one in stay:
            assert one.await_message(Decision).committed, wave
            one.say(Leave(one.job, one.replica_id))
            one.connection.close(linger_s=PATIENCE_S)


def test_killed_process_is_seen_by_its_socket(
    player: PlayerFactory, server: LighthouseServer
) -> None:
    assert "connection closed" in _kill_a_process(player, server, "plain").reason


def _kill_a_process(player: PlayerFactory, server: LighthouseServer, how: str) -> Revoke:
    script = Path(__file__).with_name("support.py")
    command = [sys.executable, "-m", "tests.lighthouse.support", server.address(), "b", "2", how]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=script.parent.parent.parent
    ) as process:
        try:
            a = player("a")
            a.join(expected_replicas=2)
            a.await_quorum()
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
        finally:
            process.kill()
    # Far below the heartbeat timeout: not silence, but the end itself was seen.
    return a.await_message(Revoke, timeout_s=FAST.heartbeat_timeout_s / 2)


def test_a_status_that_is_asked_for_while_the_machine_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(machine: Lighthouse) -> Any:
        raise KeyError("a fault of the machine")

    monkeypatch.setattr(Lighthouse, "statuses", fail)
    server = LighthouseServer()
    pool = ThreadPoolExecutor(1)
    answer = pool.submit(server.status)
    with pytest.raises(RuntimeError, match="shut down"):
        answer.result(PATIENCE_S)
    pool.shutdown()
    with pytest.raises(RuntimeError, match="stopped on an internal error"):
        server.join(PATIENCE_S)
    with pytest.raises(RuntimeError, match="shut down"):
        server.status()
    server.shutdown()


def test_a_server_that_cannot_be_made_whole_leaves_its_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none_left() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with socket.create_server(("127.0.0.1", 0)) as taken:
        bind = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
    with (
        monkeypatch.context() as patched,
        pytest.raises(OSError, match="Too many open files") as kept,
    ):
        patched.setattr(socket, "socketpair", none_left)
        LighthouseServer(bind)
    assert kept.tb is not None  # what it holds is not freed before its port is asked for
    with LighthouseServer(bind) as server:
        assert server.address() == bind
