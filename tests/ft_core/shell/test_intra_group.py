"""Calls among the ranks of one replica group, with real sockets; ranks are threads here."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import pickle
import resource
import signal
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ft_core.errors import GroupBroken
from ft_core.launch.rank_group import free_port
from ft_core.shell import group_store, intra_group
from ft_core.shell.intra_group import Door, IntraGroup
from tests.harness.cluster import ranks


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Their results; an exception is one, too."""

    def run(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


def test_a_store_at_the_port_of_an_earlier_one_knows_nothing_of_its_meetings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank had begun one more than the other."""
    port = free_port()
    with ranks(2, port) as groups, monkeypatch.context() as patch:
        patch.setattr(intra_group, "OPEN_TIMEOUT_S", 0.05)
        with pytest.raises(RuntimeError):
            groups[1].barrier()
    with ranks(2, port) as groups:
        assert together(groups[0].barrier, groups[1].barrier) == [None, None]


def test_barrier_broadcast_and_decisions_reach_all_ranks() -> None:
    with ranks(3) as groups:
        arrived = threading.Event()

        def script(rank: int) -> Any:
            group = groups[rank]
            if rank == 2:
                arrived.set()
            group.barrier(limited=False)
            assert arrived.is_set()
            sent = [group.broadcast({"from": rank}, src=src)["from"] for src in (0, 2, 4)]
            votes = [group.decide(rank > 0, all_of_them=each) for each in (True, False)]
            with group.local_only():
                assert group.broadcast(rank, src=1) == rank
            return sent, votes

        results = together(*[lambda r=r: script(r) for r in range(3)])
        assert results == [([0, 2, 1], [False, True])] * 3
        pickle.loads(pickle.dumps(groups[0])).close()  # as a Trainer that holds it may be copied


def test_different_calls_and_a_rank_that_is_gone_are_said() -> None:
    with ranks(2) as (zero, one):
        together(zero.barrier, one.barrier)
        errors = together(zero.barrier, lambda: one.decide(True, all_of_them=True))
        assert all("call different things (barrier, decision)" in str(error) for error in errors)
        one.close()
        for _ in range(2):  # also where the first error was caught: none would come
            with pytest.raises(GroupBroken, match="another rank of this replica group is gone"):
                zero.barrier()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_value_that_cannot_be_sent_keeps_no_other_rank_waiting(rank: int) -> None:
    with ranks(2) as groups:
        together(*[group.barrier for group in groups])
        worker = multiprocessing.get_context("fork").Process(target=signal.pause, daemon=True)
        worker.start()  # as of a data loader: it has copies of the connections
        values: list[Any] = [1, 2]
        values[rank] = threading.Lock()

        def script(group: IntraGroup, value: Any) -> list[str]:
            told = []
            for _ in range(2):  # a caller may catch it
                with pytest.raises((TypeError, GroupBroken)) as error:
                    group.broadcast(value, src=rank)
                told.append(str(error.value))
            return told

        told = together(*[partial(script, *each) for each in zip(groups, values, strict=True)])
        assert "pickle" in told[rank][0] and "failed in this rank before" in told[rank][1]
        assert all("another rank of this replica group is gone" in text for text in told[1 - rank])
        worker.kill()
        worker.join()


def test_a_rank_that_does_not_come_is_said_to_be_late() -> None:
    with ranks(2, timeout_s=0.5) as (zero, one):
        together(lambda: zero.barrier(limited=False), lambda: one.barrier(limited=False))
        with pytest.raises(
            GroupBroken, match="rank of this replica group did not come within 0.5 s"
        ):
            zero.barrier()


def test_ranks_begin_with_the_state_of_the_first() -> None:
    with ranks(2) as groups:
        states = [{"weights": torch.ones(5), "epoch": 1}, {"weights": torch.zeros(5), "epoch": 2}]
        places = [state["weights"] for state in states]

        def script(rank: int) -> str:
            return groups[rank].sync_initial_state(
                lambda: str(states[rank]),
                lambda: states[rank],
                states[rank].update,
                into=lambda: states[rank],
            )

        names = together(*[lambda r=r: script(r) for r in (0, 1)])
        assert names == [str(states[0])] * 2
        assert states[1]["epoch"] == 1 and states[1]["weights"].tolist() == [1.0] * 5
        assert states[1]["weights"] is places[1]  # received in place
        groups[1].local_only()(groups[1].barrier)()  # waits for no rank


def test_strangers_at_the_door_are_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 takes only connections that know the token from the group's own store, and waits for none of
    those that say nothing."""
    make = socket.create_server
    strangers: list[socket.socket] = []

    def server(*args: Any, **kwargs: Any) -> socket.socket:
        made = make(*args, **kwargs)
        if args[0][1]:  # the store's, which is torch's
            return made
        strangers.extend(socket.create_connection(made.getsockname()) for _ in range(100))
        strangers[-1].sendall(b"x" * 40)
        return made

    monkeypatch.setattr("ft_core.shell.intra_group.socket.create_server", server)
    with ranks(2) as (zero, one):
        assert (
            together(lambda: zero.broadcast("mine"), lambda: one.broadcast("his")) == ["mine"] * 2
        )
        for stranger in strangers:
            with stranger:
                assert stranger.recv(1) == b""


def test_a_rank_gets_in_where_strangers_take_all_descriptors(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cookie, limits = b"c" * 32, resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        door = stack.enter_context(closing(Door(server, cookie, 2)))
        come = partial(socket.create_connection, server.getsockname())
        silent = [stack.enter_context(come()) for _ in range(30)]
        silent[0].sendall(cookie[:20])
        rank = stack.enter_context(come())
        rank.sendall(cookie + (1).to_bytes(8, "big"))
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 5, limits[1]))
        try:
            number, connection = door.next()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        stack.callback(connection.close)
        assert number == 1
        assert connection.getpeername() == rank.getsockname()
        assert silent[0].recv(1) == b""
    [line] = caplog.messages
    assert "Too many open files" in line


def test_a_store_s_port_that_a_stranger_has_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks would wait at it for days."""
    monkeypatch.setattr(group_store, "HOSTED", timedelta(seconds=1))
    with socket.create_server(("", 0)) as stranger, ThreadPoolExecutor(1) as pool:

        def turn_away() -> None:
            with contextlib.suppress(OSError):
                while True:
                    stranger.accept()[0].close()

        pool.submit(turn_away)
        port = stranger.getsockname()[1]
        with pytest.raises(RuntimeError, match="what listens there is no store"):
            group_store.group_store("127.0.0.1", port, 60.0, hosts=True)
        stranger.shutdown(socket.SHUT_RDWR)


def test_a_store_s_port_is_none_that_the_kernel_gives_to_others() -> None:
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert len({free_port() for _ in range(20)}) > 10
    assert max(free_port() for _ in range(20)) < low


def test_a_store_of_one_machine_is_not_there_for_others() -> None:
    """torch listens on all interfaces, unless it is given a socket."""
    port = free_port()
    store = group_store.group_store("127.0.0.1", port, 60.0, hosts=True)
    store.set("key", "value")
    other = group_store.group_store("127.0.0.1", port, 60.0, hosts=True)  # a tenant
    assert other.get("key") == b"value"
    where = f":{port:04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = [row[1] for row in rows if row[1].endswith(where) and row[3] == "0A"]
    assert listening == ["0100007F" + where]
    rows = [line.split() for line in Path("/proc/net/tcp6").read_text().splitlines()[1:]]
    assert not [row for row in rows if row[1].endswith(where) and row[3] == "0A"]


def test_a_meeting_that_the_system_refuses_breaks_the_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other rank has come to the store, and is at the door."""

    def refuse(group: IntraGroup, key: str) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with ThreadPoolExecutor(1) as pool, ranks(2) as (first, second):
        monkeypatch.setattr(IntraGroup, "_wait_for_ranks", refuse)
        other = pool.submit(together, second.barrier)
        for _ in range(2):  # also if the script has caught the first one
            with pytest.raises(GroupBroken, match="Too many open files"):
                first.barrier()
        first.close()
        assert isinstance(other.result()[0], RuntimeError)
