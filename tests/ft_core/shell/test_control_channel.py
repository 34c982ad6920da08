"""What travels with the votes, and a member whose state is not the quorum's."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from typing import Any

import pytest
import torch

from tests.harness.cluster import Replica, lighthouse, replicas
from tests.harness.waiting import PATIENCE_S, children_of_all_threads, gone


def test_all_get_the_control_bytes_of_the_first_member() -> None:
    with lighthouse() as server:
        pair = [Replica(server, f"r{i}", expected_replicas=2) for i in range(2)]

        def script(replica, index):
            manager = replica.manager
            seen = []
            for step in range(3):
                manager.start_quorum()
                rank = manager.participating_rank()
                assert manager.should_commit(control=f"{step} from {rank}".encode())
                seen.append(manager.last_outcome().control)
            replica.close()
            return seen

        expected = [f"{step} from 0".encode() for step in range(3)]
        found = replicas(*[lambda r=r, i=i: script(r, i) for i, r in enumerate(pair)])
        assert found == [expected, expected]


def test_a_member_that_forgets_its_state_heals_from_the_others() -> None:
    """Also one that was the first member: what it holds must not win."""
    for forgetful in (0, 1):
        with lighthouse() as server:
            pair = [Replica(server, f"r{i}", expected_replicas=2) for i in range(2)]
            healed, until = threading.Event(), [0]

            def script(replica, index, forgetful=forgetful, healed=healed, until=until):
                replica.run_to(4)
                if index == forgetful:
                    replica.weights.fill_(1e9)
                    replica.manager.rejoin("a test spoilt it")
                    replica.step()
                    until[0] = replica.manager.current_step() + 20
                    healed.set()
                while not healed.is_set():
                    replica.step()
                replica.run_to(until[0])
                replica.close()
                return replica.weights.clone()

            a, b = replicas(*[lambda r=r, i=i: script(r, i) for i, r in enumerate(pair)])
            assert torch.equal(a, b)
            assert float(a.abs().max()) < 1e6


def test_a_wait_ends_well_if_what_it_is_for_came_while_the_process_was_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The control thread has yet to read it when the wait's deadline has passed."""
    stopped_s = [0.0]

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return time.monotonic() + stopped_s[0]

    with lighthouse() as server:
        replica = Replica(server, "r")
        assert replica.step()
        control = replica.manager._session.control
        monkeypatch.setattr("ft_core.shell.control.time", Clock)
        asked: list[Any] = []

        def holds(status: Any) -> bool:
            asked.append(status)
            if len(asked) == 1:
                stopped_s[0] += 2 * PATIENCE_S
            return len(asked) > 1

        assert control.wait(holds, time.monotonic() + PATIENCE_S)
        assert not control.wait(lambda status: False, time.monotonic())
        monkeypatch.undo()
        replica.close()


def test_timers_wait_for_a_look_at_what_came_while_the_process_was_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As that a collective takes too long, or that the time for a late vote is over."""
    with lighthouse() as server:
        replica = Replica(server, "r")
        assert replica.step()
        control = replica.manager._session.control
        did, ticked = list[str](), threading.Event()
        receive, tick = control._link.receive, control._on_tick

        def look() -> Any:
            did.append("look")
            return receive()

        def on_tick(status: Any, now: float) -> Any:
            did.append("tick")
            ticked.set()
            return tick(status, now)

        with control._io:
            monkeypatch.setattr(control._link, "receive", look)
            monkeypatch.setattr(control, "_on_tick", on_tick)
            control._tick_at = time.monotonic() - 100.0
        control.wake()
        assert ticked.wait(PATIENCE_S)
        assert did[:2] == ["look", "look"]
        replica.close()


def test_a_process_that_was_forked_ends_nothing_of_its_parents() -> None:
    """A framework's exit hooks shut its managers down, also where a process ends that the script has forked."""
    before = children_of_all_threads(os.getpid())
    with lighthouse() as server:
        replica = Replica(server, "a", watch_process=True)
        assert replica.step()
        (watcher,) = children_of_all_threads(os.getpid()) - before
        forked = multiprocessing.get_context("fork").Process(target=replica.manager.shutdown)
        forked.start()
        forked.join(PATIENCE_S)
        assert forked.exitcode == 0
        assert replica.step()
        assert not gone(watcher)
        replica.close()
    assert gone(watcher)
