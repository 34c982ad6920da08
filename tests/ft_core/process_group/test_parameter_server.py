"""Sessions of a parameter server: threads with real Gloo, and a client that is a process and is killed."""

from __future__ import annotations

import http.client
import logging
import os
import socket
import subprocess
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ft_core.errors import ProcessGroupError
from ft_core.launch.rank_group import free_port
from ft_core.process_group import ProcessGroup, ProcessGroupGloo
from ft_core.process_group.parameter_server import ParameterServer
from lighthouse.config import MOST_STRANGERS
from tests.harness import workers
from tests.harness.waiting import PATIENCE_S, until

ROOT = Path(__file__).resolve().parents[3]


class Sums(ParameterServer):
    """Adds what clients send, and answers with what it has so far, until a client sends nothing."""

    def __init__(self) -> None:
        self.total = torch.zeros(2)
        self.served, self.ended = 0, 0
        super().__init__(host="127.0.0.1")

    @classmethod
    def new_process_group(cls) -> ProcessGroup:
        return ProcessGroupGloo(timeout=PATIENCE_S, hostname="127.0.0.1")

    def forward(self, session_id: str, pg: ProcessGroup) -> None:
        self.served += 1
        try:
            sent = torch.zeros(2)
            while True:
                pg.broadcast_one(sent, root=1).wait()
                if not sent.any():
                    return
                self.total += sent
                pg.broadcast_one(self.total.clone(), root=0).wait()
        finally:
            self.ended += 1


@pytest.fixture
def server() -> Iterator[Sums]:
    with Sums() as server:
        yield server


def add(pg: ProcessGroup, value: float) -> list[float]:
    answer = torch.zeros(2)
    pg.broadcast_one(torch.full((2,), value), root=1).wait()
    pg.broadcast_one(answer, root=0).wait()
    return answer.tolist()


def test_each_client_has_a_session_of_its_own(server: Sums) -> None:
    first, second = (Sums.new_session(server.address()) for _ in range(2))
    assert (first.rank(), first.size()) == (1, 2)
    assert [add(first, 1.0), add(second, 2.0), add(first, 3.0)] == [[1.0] * 2, [3.0] * 2, [6.0] * 2]
    first.broadcast_one(torch.zeros(2), root=1).wait()
    until(lambda: server.ended == 1, "the first session to end")
    assert add(second, 1.0) == [7.0] * 2
    for each in (first, second):
        each.shutdown()


def test_a_server_that_speaks_no_http_is_said_to_be_none() -> None:
    """The error was one of `http.client`, and the client's group was left with its port."""
    groups = list[ProcessGroup]()

    class Client(Sums):
        @classmethod
        def new_process_group(cls) -> ProcessGroup:
            groups.append(super().new_process_group())
            return groups[-1]

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1)
                connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

        answering = threading.Thread(target=answer)
        answering.start()
        port = listener.getsockname()[1]
        with pytest.raises(ProcessGroupError, match="no parameter server has answered"):
            Client.new_session(f"http://127.0.0.1:{port}/new_session")
        answering.join()
    with pytest.raises(ProcessGroupError, match="was shut down"):
        groups[0].address()


def test_a_session_ends_when_its_client_shuts_down(
    server: Sums, caplog: pytest.LogCaptureFixture
) -> None:
    pg = Sums.new_session(server.address())
    add(pg, 1.0)
    with caplog.at_level(logging.WARNING, "ft_core"):
        pg.shutdown()
        until(lambda: server.ended == 1, "the session to end")
        until(lambda: "of the parameter server has ended" in caplog.text, "the line about it")


@pytest.mark.process
def test_a_client_that_is_killed_costs_its_session_only(server: Sums) -> None:
    script = f"""
        import sys, time, torch
        from tests.ft_core.process_group.test_parameter_server import Sums, add
        pg = Sums.new_session({server.address()!r})
        print(add(pg, 1.0), flush=True)
        time.sleep(600)
    """
    command = ["-c", textwrap.dedent(script)]
    client = workers.start("torch", command, env=os.environ, stdout=subprocess.PIPE)
    try:
        assert client.stdout is not None
        assert client.stdout.readline() == b"[1.0, 1.0]\n"
        pg = Sums.new_session(server.address())
        assert add(pg, 1.0) == [2.0] * 2
    finally:
        client.end()
    until(lambda: server.ended == 1, "the dead client's session to end")
    assert add(pg, 1.0) == [3.0] * 2
    pg.shutdown()


def test_closing_ends_the_sessions(server: Sums) -> None:
    pg = Sums.new_session(server.address())
    add(pg, 1.0)
    before = {thread for thread in threading.enumerate() if thread.name == "ft-session"}
    assert before
    server.close()
    assert not any(thread.is_alive() for thread in before)
    with pytest.raises(ProcessGroupError):
        pg.broadcast_one(torch.zeros(2), root=0).wait()
    pg.shutdown()


def test_groups_that_cant_be_made_take_no_places(
    server: Sums, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> ProcessGroup:
        raise OSError("no interface is up")

    where = server.address().removeprefix("http://").partition("/")[0]
    with monkeypatch.context() as broken:
        broken.setattr(server, "new_process_group", none)
        for _ in range(MOST_STRANGERS + 1):
            connection = http.client.HTTPConnection(where, timeout=PATIENCE_S)
            connection.request("POST", "/new_session", b"x")
            with pytest.raises(http.client.RemoteDisconnected):
                connection.getresponse()
            connection.close()
    pg = Sums.new_session(server.address())
    assert add(pg, 1.0) == [1.0] * 2
    pg.shutdown()


def test_where_no_thread_can_be_started_a_client_is_refused_and_takes_no_place(
    server: Sums, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def some(thread: threading.Thread) -> None:
        if thread.name == "ft-session":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as few:
        few.setattr(threading.Thread, "start", some)
        for _ in range(MOST_STRANGERS + 1):
            with pytest.raises(ProcessGroupError, match="503"):
                Sums.new_session(server.address())
    pg = Sums.new_session(server.address())
    assert add(pg, 1.0) == [1.0] * 2
    pg.shutdown()


def test_no_server_is_one_sentence() -> None:
    with pytest.raises(ProcessGroupError, match=r"no parameter server .* check that it runs there"):
        Sums.new_session(f"http://127.0.0.1:{free_port()}/new_session")


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/elsewhere", b"x", 404),
        ("/new_session", b"x" * 1000, 404),
        ("/new_session", b"no address", 200),
    ],
)
def test_strangers_change_nothing(
    server: Sums, path: str, body: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    """What is no group's address shows when the session is to begin, and ends it."""
    where = server.address().removeprefix("http://").partition("/")[0]
    connection = http.client.HTTPConnection(where, timeout=PATIENCE_S)
    connection.request("POST", path, body)
    assert connection.getresponse().status == status
    connection.close()
    if status == 200:
        until(lambda: "has ended" in caplog.text, "the session to end")
    pg = Sums.new_session(server.address())
    assert add(pg, 1.0) == [1.0] * 2
    assert server.served == 1
    pg.shutdown()
