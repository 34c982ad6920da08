from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ft_core.launch.rank_group import free_port
from ft_core.manager import Manager
from ft_core.process_group import ProcessGroupGloo
from ft_core.shell import local_lighthouse, session
from ft_core.shell.local_lighthouse import ensure_local_lighthouse
from lighthouse.client import LighthouseClient
from lighthouse.errors import LighthouseUnavailable
from lighthouse.standby import Idle
from tests.harness.cluster import one_of_two, rendezvous, replicas
from tests.harness.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def port() -> int:
    return free_port()


def processes_at(port: int) -> list[int]:
    """Ids of the process that listens on `port`, and of its keeper before it."""
    found = []
    for pid in sorted(map(int, filter(str.isdigit, os.listdir("/proc")))):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"lighthouse.standby" in command and f"tcp://127.0.0.1:{port}".encode() in command:
            found.append(pid)
    return found


def process_at(port: int) -> int:
    """Id of the process that keeps the one which listens on `port`."""
    return processes_at(port)[0]


@pytest.fixture
def stopped(port: int) -> Iterator[None]:
    """Ends the lighthouse of a test that does not wait for its end."""
    yield
    end(port)


def end(port: int) -> None:
    pid = process_at(port)
    descriptor = os.pidfd_open(pid)
    try:
        os.kill(pid, signal.SIGTERM)
        import select

        assert select.select([descriptor], [], [], 20)[0], "it did not end on SIGTERM"
    finally:
        os.close(descriptor)


def looks(idle: Idle, since: float, took_s: float = 0.0) -> Iterator[float]:
    """When a loop looks, whose looks take so long."""
    while True:
        yield (since := since + idle.next_look_s(since) + took_s)


def test_idle_is_counted_from_the_last_sign_of_life() -> None:
    idle = Idle(10.0, now=0.0)
    used, unused = {"connections": 1, "received": 5}, {"connections": 0, "received": 5}
    assert not any(idle.over(used, now) for now in (4.0, 8.0))
    assert next(now for now in looks(idle, 8.0) if idle.over(unused, now)) == 18.0
    assert not idle.over({"connections": 0, "received": 6}, 19.0)
    with pytest.raises(ValueError, match="positive"):
        Idle(0.0, now=0.0)


def test_what_has_come_while_the_process_was_stopped_is_use() -> None:
    """Members that have connected meanwhile are in its kernel."""
    idle, unused = Idle(10.0, now=0.0), {"connections": 0, "received": 5}
    assert not any(idle.over(unused, now) for now in (2.5, 500.0))
    assert 0.0 < idle.next_look_s(500.0) < 1.0
    assert not idle.over({"connections": 1, "received": 5}, 500.3)
    assert next(now for now in looks(idle, 500.3) if idle.over(unused, now)) == 510.3


@pytest.mark.parametrize("limit_s", [0.01, 10.0])
def test_a_server_that_is_slow_to_answer_is_idle_all_the_same(limit_s: float) -> None:
    idle, unused = Idle(limit_s, now=0.0), {"connections": 0, "received": 5}
    took = next(now for now in looks(idle, 0.0, took_s=0.2) if idle.over(unused, now))
    assert limit_s < took < 1.5 * limit_s + 2.0


@pytest.mark.process
@pytest.mark.usefixtures("stopped")
def test_all_processes_that_ask_find_the_same_lighthouse(
    port: int, caplog: pytest.LogCaptureFixture
) -> None:
    found: list[str] = []
    askers = [
        threading.Thread(target=lambda: found.append(ensure_local_lighthouse(port)))
        for _ in range(4)
    ]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    assert found == [f"tcp://127.0.0.1:{port}"] * 4
    lines = [record.getMessage() for record in caplog.records]
    assert sum("started a lighthouse" in line for line in lines) == 1
    assert sum("using the lighthouse" in line for line in lines) == 3


@pytest.mark.process
@pytest.mark.usefixtures("stopped")
def test_it_outlives_the_process_that_started_it(port: int) -> None:
    script = (
        "import os, signal; from ft_core.shell.local_lighthouse import ensure_local_lighthouse;"
        f"ensure_local_lighthouse({port}); os.killpg(0, signal.SIGKILL)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, timeout=PATIENCE_S, start_new_session=True
    )
    assert done.returncode == -signal.SIGKILL
    with LighthouseClient(f"tcp://127.0.0.1:{port}", timeout_s=10) as client:
        assert client.status()["jobs"] == []


@pytest.mark.process
def test_it_ends_when_no_process_uses_it(port: int) -> None:
    address = ensure_local_lighthouse(port, exit_when_idle_s=3.0)  # until the client has connected
    with LighthouseClient(address) as client:
        client.status()  # while it is used it does not end
        descriptor = os.pidfd_open(process_at(port))
    try:
        import select

        assert select.select([descriptor], [], [], PATIENCE_S)[0]
    finally:
        os.close(descriptor)


@pytest.mark.process
def test_one_that_is_slow_to_answer_is_used(
    port: int, stopped: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine. The job ended: something else was taken to listen there."""
    ensure_local_lighthouse(port)
    pids = processes_at(port)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    asked: list[LighthouseClient] = []

    def client(*args: Any, **kwargs: Any) -> LighthouseClient:
        for pid in pids if len(asked) == 1 else ():
            os.kill(pid, signal.SIGCONT)
        asked.append(LighthouseClient(*args, **kwargs))
        return asked[-1]

    monkeypatch.setattr(local_lighthouse, "LighthouseClient", client)
    monkeypatch.setattr(local_lighthouse, "PROBE_TIMEOUT_S", 0.5)
    ensure_local_lighthouse(port)
    assert len(asked) >= 2
    assert processes_at(port) == pids


@pytest.mark.process
def test_a_port_in_other_use_is_said_so(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_lighthouse, "START_TIMEOUT_S", 0.0)
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        with pytest.raises(LighthouseUnavailable, match="something listens"):
            ensure_local_lighthouse(port)


@pytest.mark.process
def test_why_it_does_not_start_is_told_where_the_script_ignores_its_children(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_lighthouse, "_answers", lambda address: False)
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with socket.socket() as other:
            other.bind(("127.0.0.1", port))
            other.listen()
            with pytest.raises(LighthouseUnavailable, match="did not start .* stop what"):
                ensure_local_lighthouse(port)
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_one_that_ends_before_it_is_used_is_started_again(
    port: int, stopped: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have been idle for as long as it waits just when it was asked."""
    calls: list[str] = []

    def local() -> str:
        calls.append(ensure_local_lighthouse(port))
        if len(calls) == 1:
            end(port)
        return calls[-1]

    monkeypatch.setattr(session, "_local_lighthouse", local)
    monkeypatch.setattr(session, "LOCAL_PATIENCE_S", 0.2)
    manager = Manager(ProcessGroupGloo(10), lambda state: None, dict, rank=0, world_size=1)
    try:
        manager.start_quorum()
        assert manager.should_commit()
    finally:
        manager.shutdown()
    assert len(calls) >= 2


@pytest.mark.process
@pytest.mark.parametrize("ranks", [1, 2])
def test_one_that_is_gone_in_a_training_is_started_again(
    ranks: int, port: int, stopped: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own processes can't, where all of them were killed. The job ended a connect timeout later."""
    monkeypatch.setattr(session, "_local_lighthouse", lambda: ensure_local_lighthouse(port))
    gone = threading.Barrier(ranks, lambda: end(port))

    def train(options: dict[str, Any]) -> None:
        group = ProcessGroupGloo(10)
        manager = Manager(group, lambda state: None, dict, **options)
        try:
            for step in range(3):
                manager.start_quorum()
                if step == 1:
                    gone.wait(PATIENCE_S)
                assert manager.should_commit()
        finally:
            manager.shutdown()

    with rendezvous(1) as (store,):
        alone = {"rank": 0, "world_size": 1}
        places = [alone] if ranks == 1 else [one_of_two(rank, store) for rank in range(ranks)]
        replicas(*(partial(train, place) for place in places))
