"""A manager's life with a lighthouse: what fails in it ends it, frees what it holds, and leaves nothing behind."""

from __future__ import annotations

import dataclasses
import threading

import pytest

from ft_core.shell.control import Control
from tests.harness.cluster import Replica, lighthouse
from tests.harness.leaks import Snapshot, leaks_since
from tests.harness.waiting import PATIENCE_S


def no_more_threads(patch: pytest.MonkeyPatch, name: str) -> None:
    """No thread of that name can be started."""
    start = threading.Thread.start

    def none(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    patch.setattr(threading.Thread, "start", none)


def test_an_error_of_the_control_thread_ends_the_loop_and_not_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It left its socket open, and the end of the process waited for that for ever."""
    turn = Control._turn

    def fail(self: Control) -> None:
        if threading.current_thread().name == "ft-control":
            raise OSError("no descriptors are left")
        turn(self)

    with lighthouse(expected_replicas=1) as server:
        replica = Replica(server, "r0")
        replica.manager.start_quorum()
        replica.manager.wait_quorum()
        monkeypatch.setattr(Control, "_turn", fail)
        with pytest.raises(RuntimeError, match="stopped working in this process"):
            replica.manager._attempts.session.wait_for(lambda _: False, None)
        ends = threading.Thread(target=replica.close, daemon=True)
        ends.start()
        ends.join(PATIENCE_S)
        assert not ends.is_alive()


@pytest.mark.parametrize("name", ["ft-control", "ft-plane"])
def test_a_first_step_for_which_no_thread_can_be_started_leaves_nothing_behind(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was open by then stayed: the connection, with a watcher of its own, and the other thread."""
    with lighthouse(expected_replicas=1) as server:
        before = Snapshot.take()
        replica = Replica(server, "r0")
        with monkeypatch.context() as full:
            no_more_threads(full, name)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                replica.manager.start_quorum()
        assert leaks_since(before) == []
        replica.close()


def test_a_lighthouse_that_no_thread_can_start_again_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It ended the thread that works the connection, or that of the group's leader."""
    with lighthouse(expected_replicas=1) as server:
        replica = Replica(server, "r0")
        replica.manager.start_quorum()
        session = replica.manager._attempts.session
        monkeypatch.setattr(
            session, "_options", dataclasses.replace(session._options, lighthouse="")
        )
        with monkeypatch.context() as full:
            no_more_threads(full, "ft-lighthouse")
            session._on_silence(1.0)
        replica.manager.wait_quorum()
        replica.close()
    assert "could not start a lighthouse again" in caplog.text
