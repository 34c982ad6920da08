"""One heal at a time: the state that is wanted now, not the one that was wanted before."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ft_core.config import JobOptions
from ft_core.heal import HealKey, HealServer
from ft_core.process_group import ProcessGroupDummy
from ft_core.replica.events import Configured, Fetched, FetchState
from ft_core.shell.data_plane import DataPlane, RankAddress, addresses
from ft_core.telemetry import Telemetry
from lighthouse.wire.messages import Member
from tests.ft_core.heal.support import FaultyLink, same
from tests.harness.waiting import PATIENCE_S

MakeServer = Callable[..., HealServer]
OLD, NEW = HealKey(1, "old"), HealKey(2, "new")
NUMEL = 4 << 20


class Target:
    """A data plane that heals into one tensor, and what it has reported."""

    def __init__(self, into: Callable[[], Any] | None = None) -> None:
        self.mine = torch.zeros(NUMEL)
        self.reports: list[tuple[FetchState, str]] = []
        self.news = threading.Condition()
        self.plane = DataPlane(
            ProcessGroupDummy(),
            JobOptions(name="target", timeout_s=120.0),
            host="127.0.0.1",
            telemetry=Telemetry(),
            into=into or (lambda: {"w": self.mine}),
        )
        self.plane.report = self._report

    def _report(self, event: Configured | Fetched) -> None:
        assert isinstance(event, Fetched)
        with self.news:
            self.reports.append((event.fetch, event.error))
            self.news.notify_all()

    def fetch(self, key: HealKey, address: str) -> FetchState:
        source = Member("source", 1, (addresses.encode(RankAddress(b"", address)),))
        effect = FetchState(key.step, key.lineage, (source,))
        self.plane.fetch(effect)
        return effect

    def await_success(self) -> None:
        with self.news:
            assert self.news.wait_for(lambda: any(not error for _, error in self.reports), 30)


def heal_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ft-heal"]


@pytest.fixture
def target() -> Iterator[Target]:
    made = Target()
    yield made
    made.plane.close()


def test_what_a_heal_that_was_outrun_still_receives_is_not_written(
    make_server: MakeServer, target: Target
) -> None:
    """Its last chunks used to land in the tensors on top of the newer state."""
    begun, go_on = threading.Event(), threading.Event()

    def hold(offset: int, data: bytearray) -> bytearray:
        if offset > 2 << 20:
            begun.set()
            go_on.wait(PATIENCE_S)
        return data

    behind, ahead = (make_server(same_host=False) for _ in range(2))
    behind.publish(OLD, {"w": torch.ones(NUMEL)})
    newest = {"w": torch.full((NUMEL,), 2.0)}
    ahead.publish(NEW, newest)
    with FaultyLink(behind.address, hold) as link:
        target.fetch(OLD, link.address)
        assert begun.wait(PATIENCE_S)
        wanted = target.fetch(NEW, ahead.address)
        target.await_success()
        go_on.set()
        for thread in heal_threads():
            thread.join()
    assert target.reports == [(wanted, "")]
    assert same(target.plane.take_state(NEW.step, NEW.lineage), newest)
    assert same(target.mine, newest["w"])


def test_a_heal_that_waits_for_its_source_ends_with_the_plane(make_server: MakeServer) -> None:
    target = Target()
    target.fetch(OLD, make_server().address)  # which publishes nothing
    target.plane.close()
    assert not heal_threads()
    assert target.reports == []


def test_a_state_that_cannot_be_saved_is_a_heal_that_failed(make_server: MakeServer) -> None:
    """`into` calls the user's functions; the members must hear of it and not wait."""
    target = Target(into=lambda: {}["weights"])
    server = make_server()
    server.publish(NEW, {"w": torch.ones(NUMEL)})
    target.fetch(NEW, server.address)
    with target.news:
        assert target.news.wait_for(lambda: target.reports, 30)
    assert [error for _, error in target.reports] == ["'weights'"]
    target.plane.close()


def test_a_heal_that_was_outrun_before_it_began_does_nothing(
    make_server: MakeServer, target: Target
) -> None:
    server = make_server()
    server.publish(NEW, {"w": torch.full((NUMEL,), 2.0)})
    for _ in range(20):
        target.fetch(OLD, server.address)  # of an address that serves another version
    wanted = target.fetch(NEW, server.address)
    target.await_success()
    assert [fetch for fetch, error in target.reports if not error] == [wanted]
    assert target.mine.eq(2).all()
