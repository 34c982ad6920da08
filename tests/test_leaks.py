"""The leak police sees each kind of thing that a test may leave behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading

import pytest
import zmq

from tests.harness.leaks import Snapshot, leaks_since


def test_nothing_is_no_leak() -> None:
    assert leaks_since(Snapshot.take()) == []


def test_a_thread_is_seen_and_a_finished_one_is_not() -> None:
    before, release = Snapshot.take(), threading.Event()
    thread = threading.Thread(target=release.wait, name="stray")
    thread.start()
    assert leaks_since(before, grace_s=0.0) == ["thread 'stray' still runs"]
    release.set()
    thread.join()
    assert leaks_since(before) == []


def test_an_environment_variable_is_seen_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_TEST_OLD", "1")
    before = Snapshot.take()
    os.environ["FT_TEST_NEW"] = "1"
    del os.environ["FT_TEST_OLD"]
    found = leaks_since(before)
    assert [line.split()[2] for line in found] == ["FT_TEST_NEW", "FT_TEST_OLD"]
    assert os.environ["FT_TEST_OLD"] == "1"
    assert "FT_TEST_NEW" not in os.environ


def test_a_tcp_socket_is_seen() -> None:
    before = Snapshot.take()
    with socket.create_server(("127.0.0.1", 0)):
        assert len(leaks_since(before, grace_s=0.0)) == 1
    assert leaks_since(before) == []


def test_a_zeromq_context_is_seen() -> None:
    before = Snapshot.take()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    open_socket = context.socket(zmq.ROUTER)
    open_socket.bind("tcp://127.0.0.1:0")
    assert leaks_since(before, grace_s=0.0)
    open_socket.close()
    context.term()
    assert leaks_since(before) == []


def test_a_child_process_is_seen_dead_or_alive() -> None:
    before = Snapshot.take()
    command = [sys.executable, "-c", "input()"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE)
    assert "child process" in leaks_since(before, grace_s=0.0)[0]
    child.communicate(b"\n")
    assert leaks_since(before) == []


def test_a_process_group_is_seen_and_ended() -> None:
    import torch.distributed as dist

    before = Snapshot.take()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert "process group" in leaks_since(before)[0]
    assert not dist.is_initialized()
