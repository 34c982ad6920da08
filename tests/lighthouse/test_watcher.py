"""Watchers of real processes, killed for real."""

from __future__ import annotations

import logging
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import zmq

from lighthouse.client import SERVICE
from lighthouse.config import LighthouseConfig
from lighthouse.endpoint import Endpoint
from lighthouse.machine.job import Note
from lighthouse.process_watch import CAUSE, ProcessWatch, Report
from lighthouse.server import LighthouseServer
from lighthouse.sockets import open_dealer
from lighthouse.wire.messages import NO_TERM
from tests.harness.waiting import PATIENCE_S, children_of_all_threads, until
from tests.lighthouse.support import FAST, JOB, Player

pytestmark = pytest.mark.process
REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def lines() -> queue.SimpleQueue[Note]:
    return queue.SimpleQueue()


def test_a_killed_process_gets_a_death_notice(
    lines: queue.SimpleQueue[Note], context: zmq.Context[Any]
) -> None:
    """Not its socket is what tells: the lighthouse stands behind a relay that hides its end."""
    with LighthouseServer(config=LighthouseConfig(timeouts=FAST), on_note=lines.put) as server:
        relay = _Relay(server.address(), context)
        with relay:
            command = [sys.executable, "-m", "tests.lighthouse.support", relay.address]
            command += ["b", "1", "watch"]
            with subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPO
            ) as process:
                try:
                    assert process.stdout is not None
                    assert process.stdout.readline() == b"ready\n"
                finally:
                    process.kill()
            while "revoked" not in (note := lines.get(timeout=PATIENCE_S)).text:
                pass
    assert CAUSE in note.text


class _Relay:
    """Forwards frames of any peer to the lighthouse and never closes a connection to it."""

    def __init__(self, server: str, context: zmq.Context[Any]) -> None:
        self._server, self._context = server, context
        self._front = Endpoint(context, "tcp://127.0.0.1:0", FAST, service=SERVICE)
        self.address = self._front.address
        self._stop_read = context.socket(zmq.PAIR)
        self._stop_read.bind("inproc://stop-relay")
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        with self._context.socket(zmq.PAIR) as stop:
            stop.connect("inproc://stop-relay")
            stop.send(b"")
            self._thread.join()

    def _run(self) -> None:
        backs: dict[Any, bytes] = {}
        by_peer: dict[bytes, Any] = {}
        monitors: list[Any] = []
        poller = zmq.Poller()
        for each in (*self._front.polled, self._stop_read):
            poller.register(each, zmq.POLLIN)
        while self._stop_read not in (ready := dict(poller.poll())):
            self._front.attend()
            while (entry := self._front.receive()) is not None:
                peer, frame = entry
                if peer not in by_peer:
                    identity = peer.rpartition(b"#")[0]
                    back, monitor = open_dealer(
                        self._context, self._server, SERVICE, identity, FAST
                    )
                    by_peer[peer], backs[back] = back, peer
                    monitors.append(monitor)
                    poller.register(back, zmq.POLLIN)
                by_peer[peer].send(frame)
            for back, peer in backs.items():
                if back in ready:
                    self._front.send([peer], back.recv())
        self._front.close()
        for each in (*backs, *monitors, self._stop_read):
            each.close(linger=0)


def test_a_graceful_end_gets_none(
    lines: queue.SimpleQueue[Note], context: zmq.Context[Any]
) -> None:
    with LighthouseServer(config=LighthouseConfig(timeouts=FAST), on_note=lines.put) as server:
        player = Player(server.address(), "a", context)
        watch = ProcessWatch(server.address(), FAST, player.replica_id.encode())
        assert watch.start([Report(JOB, player.replica_id)])
        assert watch.wait_ready(PATIENCE_S)
        player.join(expected_replicas=1)
        player.await_quorum()
        assert watch.running
        watch.close()
        watch.close()
        assert not watch.running
        # The watcher is reaped: all it had to say has arrived before this answer does.
        received = server.status()["server"]["received"]
        assert received == 2, "two joins, and no death notice"
        player.close()
    while lines.qsize():
        assert CAUSE not in lines.get().text


def test_the_end_of_the_holding_thread_counts_as_death(
    lines: queue.SimpleQueue[Note], context: zmq.Context[Any]
) -> None:
    """So the caller must choose a thread that lives as long as the process."""
    with LighthouseServer(config=LighthouseConfig(timeouts=FAST), on_note=lines.put) as server:
        player = Player(server.address(), "a", context)
        player.join(expected_replicas=1)
        player.await_quorum()
        watch = ProcessWatch(server.address(), FAST, player.replica_id.encode())
        ready = threading.Event()
        leave = threading.Event()

        def live_shortly() -> None:
            watch.hold()
            ready.set()
            leave.wait()

        thread = threading.Thread(target=live_shortly)
        thread.start()
        ready.wait()
        assert watch.start([Report(JOB, player.replica_id)])
        assert watch.wait_ready(PATIENCE_S)
        leave.set()
        thread.join()
        while CAUSE not in lines.get(timeout=PATIENCE_S).text:
            pass
        watch.close()
        player.close()


def test_closing_from_another_thread_is_safe(server: LighthouseServer) -> None:
    """The mutex can't be unlocked then; its page must stay mapped, or the kernel would stumble."""
    for _ in range(3):
        watch = ProcessWatch(server.address(), FAST, b"x")
        assert watch.start([Report(JOB, "x")])
        closer = threading.Thread(target=watch.close)
        closer.start()
        closer.join()
        assert not watch.running
    code = (
        "import threading\n"
        "from lighthouse.robust_mutex import RobustMutex\n"
        "for _ in range(3):\n"
        "    mutex = RobustMutex.create(); mutex.lock()\n"
        "    t = threading.Thread(target=mutex.discard); t.start(); t.join()\n"
        "del mutex\n"
        "import gc; gc.collect()\n"
        "again = RobustMutex.create(); again.lock(); again.discard()\n"
        "print('fine')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, capture_output=True, timeout=PATIENCE_S
    )
    assert done.stdout == b"fine\n"
    assert done.returncode == 0


def test_a_watcher_whose_lighthouse_is_away_still_ends(server: LighthouseServer) -> None:
    server.shutdown()
    watch = ProcessWatch(server.address(), FAST, b"x")
    assert watch.start([Report(JOB, "x")])
    assert not watch.wait_ready(0.3)
    watch.update([Report(JOB, "y")])
    watch.close()
    assert not watch.running


def test_a_watcher_that_is_stopped_keeps_nobody_waiting(
    server: LighthouseServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Each quorum tells it something, and nobody reads."""
    before = children_of_all_threads(os.getpid())
    watch = ProcessWatch(server.address(), FAST, b"x")
    assert watch.start([Report(JOB, "x")])
    assert watch.wait_ready(PATIENCE_S)
    (watcher,) = children_of_all_threads(os.getpid()) - before
    os.kill(watcher, signal.SIGSTOP)
    for quorum_id in range(2_000):
        watch.update([Report(JOB, "x", NO_TERM, quorum_id)])
    (record,) = caplog.records
    assert "the process watcher is gone" in record.message
    until(lambda: not watch.running)
    watch.close()


def test_a_module_of_the_script_takes_the_place_of_none(
    server: LighthouseServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A script may begin in a folder with a module of its own that is called as one of Python's."""
    (tmp_path / "json.py").write_text("raise SystemExit")
    monkeypatch.chdir(tmp_path)
    watch = ProcessWatch(server.address(), FAST, b"x")
    assert watch.start([Report(JOB, "x")])
    assert watch.wait_ready(PATIENCE_S)
    watch.close()


def test_what_is_missing_costs_one_line(
    server: LighthouseServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "platform", "plan9")
    watch = ProcessWatch(server.address(), FAST, b"x")
    with caplog.at_level(logging.INFO):
        assert not watch.start([Report(JOB, "x")])
    (record,) = caplog.records
    assert "plan9" in record.message
    assert "75 ms for each GiB" in record.message
    watch.update([])
    watch.close()


def test_an_interpreter_that_cannot_be_started_costs_one_line(
    server: LighthouseServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    watch = ProcessWatch(server.address(), FAST, b"x")
    assert not watch.start([Report(JOB, "x")])
    assert len(caplog.records) == 1
