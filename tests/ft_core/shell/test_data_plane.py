"""The data plane names members that it can't use, each once, and no error ends a thread of it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from ft_core.config import JobOptions
from ft_core.process_group import (
    ProcessGroup,
    ProcessGroupDummy,
    ProcessGroupError,
    ProcessGroupGloo,
)
from ft_core.replica.events import (
    Abort,
    Configure,
    Configured,
    Fetched,
    FetchState,
    Tried,
    TryToReach,
)
from ft_core.shell.data_plane import DataPlane, RankAddress, addresses
from ft_core.telemetry import Telemetry
from lighthouse.wire.messages import Member
from tests.harness.cluster import Replica, lighthouse
from tests.harness.waiting import PATIENCE_S


def advertised(process_group: bytes) -> bytes:
    return addresses.encode(RankAddress(process_group, "tcp://127.0.0.1:1/word"))


def configure(*members: tuple[str, bytes]) -> Configure:
    listed = tuple(Member(name, 1, (frame,)) for name, frame in members)
    return Configure(7, listed, 0)


class Plane(DataPlane):
    """A data plane whose reports are in `told`."""

    def __init__(self, group: ProcessGroup) -> None:
        options = JobOptions(name="me", timeout_s=PATIENCE_S)
        super().__init__(group, options, host="127.0.0.1", telemetry=Telemetry(), into=lambda: None)
        self.told: queue.SimpleQueue[Configured | Fetched | Tried] = queue.SimpleQueue()
        self.report = self.told.put

    def said(self) -> list[Configured | Fetched | Tried]:
        """What has been reported so far."""
        return [self.told.get() for _ in range(self.told.qsize())]

    def named(self) -> list[str]:
        """The members that have been reported as missed, each time."""
        return [name for event in self.said() for name in event.missed]  # type: ignore[union-attr]


@pytest.fixture
def make() -> Iterator[Callable[[ProcessGroup], Plane]]:
    made: list[Plane] = []

    def one(group: ProcessGroup) -> Plane:
        made.append(Plane(group))
        return made[-1]

    yield one
    for plane in made:
        plane.close()


class Misses(ProcessGroupDummy):
    """A group that reaches no other member: it tells at once, and again in its error."""

    def configure(
        self, quorum_id: int, rank: int, addresses: Sequence[bytes], timeout_s: float
    ) -> None:
        self.missed_listener([1])
        raise ProcessGroupError("no way there", missed=[1, 2])


def test_a_missed_member_is_reported_once(make: Callable[[ProcessGroup], Plane]) -> None:
    plane = make(Misses())
    plane.configure(configure(*((name, advertised(b"x")) for name in ("me", "a", "b"))))
    assert plane.said() == [Tried(("a",), ()), Configured(7, "no way there", ("b",))]


@pytest.mark.parametrize("frame", [b"", b"\xff\xff", b"text"])
def test_a_member_whose_address_can_not_be_read_is_missed(
    make: Callable[[ProcessGroup], Plane], frame: bytes
) -> None:
    plane = make(ProcessGroupDummy())
    plane.configure(configure(("me", advertised(b"x")), ("a", frame), ("b", advertised(b"y"))))
    (event,) = plane.said()
    assert isinstance(event, Configured)
    assert event.missed == ("a",)
    assert "a" in event.error


@pytest.mark.parametrize(
    "words",
    [
        "nonsense",
        "ftpg2/99999/0011223344556677/127.0.0.1",
        "ftpg2/1/0011223344556677/a\0b",
        "ftpg2/1/0011223344556677/255.255.255.255",
    ],
)
def test_so_is_one_whose_process_group_has_no_address_or_one_without_a_way(
    make: Callable[[ProcessGroup], Plane], words: str
) -> None:
    group = ProcessGroupGloo(PATIENCE_S, hostname="127.0.0.1")
    plane = make(group)
    plane.configure(configure(("me", plane.address()), ("a", advertised(words.encode()))))
    assert plane.named() == ["a"]


def test_and_one_that_has_the_address_of_another(make: Callable[[ProcessGroup], Plane]) -> None:
    plane = make(ProcessGroupGloo(PATIENCE_S, hostname="127.0.0.1"))
    own = plane.address()
    plane.configure(configure(("me", own), ("a", own)))
    assert plane.named() == ["a"]


class Hesitates(ProcessGroupGloo):
    """A group before whose `configure` something happens."""

    def when_silent(self, listener: Callable[[Sequence[int]], object]) -> None:
        super().when_silent(listener)
        self.happens()

    def happens(self) -> None:
        """Given by the test."""


@pytest.mark.parametrize("way", ["abort", "interrupt"])
def test_a_quorum_that_ends_before_its_group_is_begun_is_not_waited_for(
    make: Callable[[ProcessGroup], Plane], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """The other member never comes: to begin would be to wait for it, unless that is revoked."""
    group, other = (
        kind(PATIENCE_S, hostname="127.0.0.1") for kind in (Hesitates, ProcessGroupGloo)
    )
    plane = make(group)
    ends = plane.interrupt if way == "interrupt" else lambda: plane.abort(Abort(7, "gone"))
    monkeypatch.setattr(group, "happens", ends)
    plane.configure(configure(("me", plane.address()), ("a", advertised(other.address()))))
    assert not plane.said()
    other.shutdown()


@pytest.mark.parametrize("frame", [b"\xff\xff", advertised(b"nonsense")])
def test_a_question_whether_a_malformed_address_is_reached_is_answered(
    make: Callable[[ProcessGroup], Plane], frame: bytes
) -> None:
    other = make(ProcessGroupGloo(PATIENCE_S, hostname="127.0.0.1"))
    plane = make(ProcessGroupGloo(PATIENCE_S, hostname="127.0.0.1"))
    members = (Member("a", 1, (frame,)), Member("b", 1, (other.address(),)))
    plane.try_to_reach(TryToReach(members))
    assert plane.told.get(timeout=PATIENCE_S) == Tried(("a",), ("b",))


class Fails(ProcessGroupDummy):
    """A group whose question ends with an error that it does not foresee."""

    def unreachable(self, addresses: Sequence[bytes], timeout_s: float) -> set[int]:
        raise OSError("no descriptors are left")


def test_an_error_of_the_question_ends_no_thread_with_a_traceback(
    make: Callable[[ProcessGroup], Plane], caplog: pytest.LogCaptureFixture
) -> None:
    plane = make(Fails())
    callers = [
        threading.Thread(
            target=plane.try_to_reach, args=(TryToReach((Member("a", 1, (advertised(b"x"),)),)),)
        )
        for _ in range(8)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    plane.close()  # waits for the threads
    assert plane.said() == []
    assert caplog.text.count("could not try to connect to a") == 8


def test_where_no_thread_can_be_started_a_heal_fails_and_a_question_is_not_answered(
    make: Callable[[ProcessGroup], Plane], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended the thread of the plane, or the one that works the socket to the lighthouse."""
    plane = make(ProcessGroupDummy())
    asked = FetchState(1, "after 1", (Member("a", 1, (advertised(b"x"),)),))

    def none(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", none)
        plane.fetch(asked)
        plane.try_to_reach(TryToReach(asked.sources))
    assert plane.said() == [Fetched(asked, "can't start new thread")]
    plane.close()


def test_an_error_of_the_plane_thread_reaches_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """It used to end the thread, and the loop waited for a process group that never came."""

    def fail(self: DataPlane, effect: Configure) -> None:
        raise OSError("no descriptors are left")

    monkeypatch.setattr(DataPlane, "configure", fail)
    with lighthouse(expected_replicas=1) as server:
        replica = Replica(server, "r0")
        with pytest.raises(RuntimeError, match="stopped working in this process"):
            replica.manager.start_quorum()
            replica.manager.wait_quorum()
        replica.close()
