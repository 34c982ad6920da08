"""Each option of a job shows by its effect, with real threads, Gloo and ZeroMQ."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

from ft_core.errors import QuorumUnavailable
from ft_core.heal import UnsupportedObjectError
from ft_core.launch.rank_group import free_port

from .cluster import Replica, lighthouse, replicas

ZMTP_GREETING = b"\xff"


class Note:
    """An object that only pickle can carry."""

    def __init__(self, text: str) -> None:
        self.text = text


def with_note(replica: Replica, text: str) -> Replica:
    """`replica`, with a `Note` in its state as `replica.note`."""

    def load(state: dict[str, Any]) -> None:
        replica.note = state["note"]

    replica.note = Note(text)
    replica.manager.register_state_dict_fn("note", load, lambda: {"note": replica.note})
    return replica


def beside(running: Replica, script: Callable[[], Any]) -> Any:
    """What `script` returns, while `running` steps."""
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            running.step()

    def finish() -> Any:
        try:
            return script()
        finally:
            over.set()

    return replicas(run, finish)[1]


def test_heal_server_listens_at_the_port_asked_for() -> None:
    port = free_port()
    with lighthouse() as server:
        replica = Replica(server, "r0", port=port)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 5)
        replica.run_to(1)
        with socket.create_connection(("127.0.0.1", port), 5) as connection:
            connection.settimeout(5)
            assert connection.recv(1) == ZMTP_GREETING
        replica.close()


def test_a_port_that_is_taken_is_refused_in_a_sentence() -> None:
    with lighthouse() as server, socket.create_server(("127.0.0.1", 0)) as taken:
        replica = Replica(server, "r0", port=taken.getsockname()[1])
        with pytest.raises(ValueError, match=r"Cannot serve heals on 127.*choose .* a free port"):
            replica.manager.start_quorum()
        replica.close()


@pytest.mark.parametrize("init_sync", [True, False])
def test_arbitrary_objects_heal_where_they_are_allowed(init_sync: bool) -> None:
    with lighthouse() as server:
        options = {"heal_allow_objects": True, "init_sync": init_sync}
        a = with_note(Replica(server, "r0", **options), "first")
        a.run_to(2)
        b = with_note(Replica(server, "r1", value=7.0, **options), "second")

        def join() -> None:
            b.step()
            b.run_to(b.manager.current_step() + 1)

        beside(a, join)
        assert b.note.text == "first"
        assert torch.equal(b.weights, torch.full((8,), -float(b.manager.current_step())))
        a.close()
        b.close()


def test_an_arbitrary_object_is_refused_by_name() -> None:
    with lighthouse() as server:
        a = with_note(Replica(server, "r0"), "first")
        sentence = r"\['note'\]\['note'\] is a .*test_job_options\.Note.*set heal_allow_objects=True"
        with pytest.raises(UnsupportedObjectError, match=sentence):
            a.manager.start_quorum()
        a.close()


def test_a_member_that_does_not_allow_objects_takes_none(caplog: pytest.LogCaptureFixture) -> None:
    with lighthouse() as server:
        a = with_note(Replica(server, "r0", heal_allow_objects=True, init_sync=False), "first")
        a.run_to(2)
        b = with_note(Replica(server, "r1", init_sync=False), "second")

        def join() -> None:
            with pytest.raises(QuorumUnavailable):
                b.manager.start_quorum(timeout=timedelta(seconds=1))

        beside(a, join)
        assert "set heal_allow_objects=True here too" in caplog.text
        assert b.note.text == "second"
        a.close()
        b.close()
