"""Two members that reach the lighthouse and not each other: the others train, with one of the two."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import pytest
import torch

from ft_core.errors import QuorumUnavailable
from ft_core.process_group.rendezvous_messages import Address, Hello
from ft_core.telemetry import QUORUM, WAITING, Event
from lighthouse import LighthouseServer
from tests.harness import networks
from tests.harness.cluster import Replica, lighthouse, replicas
from tests.harness.proxy import Proxy
from tests.harness.waiting import PATIENCE_S

NAMES = "abc"
COMMITS, CUT_AT = 30, 10
TIMEOUT_S = 10 * PATIENCE_S  # no wait for it ends in this test

namespaces_work = functools.cache(networks.available)


class Member:
    """A replica group that is a thread. What it hears is noted."""

    def __init__(self, server: LighthouseServer, name: str) -> None:
        wait = timedelta(seconds=TIMEOUT_S)
        self.replica = Replica(server, name, timeout=wait, connect_timeout=wait)
        self.name = name
        self.quorums: list[list[str]] = []
        self.ranks: dict[int, int] = {}
        self.left_out = threading.Event()
        self.replica.manager.telemetry.add_sink(self._note)

    def _note(self, event: Event) -> None:
        if event.kind == QUORUM:
            self.ranks[event.data["quorum_id"]] = event.data["replica_rank"]
            self.quorums.append([m.partition(":")[0] for m in event.data["members"]])
        elif event.kind == WAITING and "is left out until they can" in event.data["reason"]:
            self.left_out.set()


class Training:
    """Three members. c can't be in a quorum at first (or from `cut` on); `mend` lets it in; then all
    take some steps."""

    def __init__(self, server: LighthouseServer, where: Callable[[int], Any] | None = None) -> None:
        self.server, self.where = server, where or (lambda index: nullcontext())
        self.members: dict[str, Member] = {}
        self.made = threading.Barrier(len(NAMES))
        self.mended, self.back = threading.Event(), threading.Event()
        self.final = 0
        self.networks: Any = None
        self.quorums_at_first = self.quorums_until_mended = 0  # of those that are kept alone
        self.cut: Callable[[], None] | None = None  # None: they are apart from the start
        self.mend: Callable[[], None] = lambda: None
        self.prepare: Callable[[Member], None] = lambda member: None

    def run(self, *, kept: str, left_out: str) -> None:
        """`kept` train on while `left_out` is not let in."""
        self.kept, self.left_out = kept, left_out
        replicas(*(lambda i=i: self._script(i) for i in range(len(NAMES))))
        weights = [member.replica.weights for member in self.members.values()]
        assert all(torch.equal(weights[0], each) for each in weights)

    def _script(self, index: int) -> None:
        name = NAMES[index]
        with self.where(index):
            member = self.members[name] = Member(self.server, name)
            self.prepare(member)
            self.made.wait(PATIENCE_S)
            try:
                if name == self.left_out:
                    self._come_back(member)
                else:
                    self._go_on(member)
            finally:
                member.replica.close()

    def _go_on(self, member: Member) -> None:
        manager = member.replica.manager
        apart, cut = self.members[self.left_out], [self.cut] if self.cut else []
        while not self.back.is_set():
            member.replica.step()
            if member.name == self.kept[0] and manager.current_step() == CUT_AT and cut:
                assert sorted(member.quorums[-1]) == sorted(NAMES)
                cut.pop()()
            if member.name != self.kept[0] or self.mended.is_set():
                continue
            if not self.quorums_at_first and sorted(member.quorums[-1]) == sorted(self.kept):
                self.quorums_at_first = len(member.quorums)
            alone = sorted(member.quorums[-1]) == sorted(self.kept)  # not in one more try
            if manager.current_step() >= COMMITS and apart.left_out.is_set() and alone:
                self.quorums_until_mended = len(member.quorums)
                self.mend()
                self.mended.set()
        member.replica.run_to(self.final)

    def _come_back(self, member: Member) -> None:
        while not member.replica.step() or not self.mended.is_set():
            assert self.mended.is_set() or self.cut or not member.replica.manager.current_step()
        self.final = member.replica.manager.current_step() + 3
        self.back.set()
        member.replica.run_to(self.final)


@pytest.mark.parametrize("what", ["cut", "swallows"])
def test_a_pair_that_a_proxy_keeps_apart(what: str) -> None:
    """It accepts connections, so that the pair seems good when it is tried: each time this costs one
    quorum more, after a rest that grows. It ends them, or keeps all that is sent."""
    with lighthouse(timeout_s=TIMEOUT_S, expected_replicas=3, all_join=True) as server:
        training = Training(server)
        proxies: list[Proxy] = []

        def prepare(member: Member) -> None:
            if member.name == "c":
                proxies.append(Proxy(member.replica.manager._pg))
                setattr(proxies[0], what, from_b)

        def from_b(hello: Hello) -> bool:
            return training.members["b"].ranks.get(hello.quorum_id) == hello.rank

        def mend() -> None:
            setattr(proxies[0], what, lambda hello: False)

        training.prepare, training.mend = prepare, mend
        try:
            training.run(kept="ab", left_out="c")
        finally:
            for proxy in proxies:
                proxy.close()


@contextmanager
def apart(*ways: tuple[int, int]) -> Iterator[Training]:
    """A training in networks of their own, where no packet gets through `ways`."""
    if not namespaces_work():
        pytest.skip("needs network namespaces: root, and the command ip")
    with networks.networks(len(NAMES)) as made:
        for way in ways:
            made.cut(*way)
        with made.inside(len(NAMES)) as host:
            server = LighthouseServer(f"tcp://{host}:0", config=_patient())
        try:
            training = Training(server, made.inside)
            training.networks = made
            training.mend = lambda: [made.mend(*way) for way in ways]
            yield training
        finally:
            server.shutdown()


def _patient() -> Any:
    with lighthouse(timeout_s=TIMEOUT_S, expected_replicas=3, all_join=True) as example:
        return example.config


@pytest.mark.parametrize(
    "ways", [((1, 2), (2, 1)), ((1, 2),), ((2, 1),)], ids=["both", "to", "from"]
)
def test_no_packet_gets_through(ways: tuple[tuple[int, int], ...]) -> None:
    with apart(*ways) as training:
        training.run(kept="ab", left_out="c")
        assert training.quorums_until_mended == training.quorums_at_first  # the trials cost none


@pytest.mark.parametrize("ways", [((1, 2), (2, 1)), ((2, 1),)], ids=["both", "from"])
def test_no_packet_gets_through_from_some_step_on(ways: tuple[tuple[int, int], ...]) -> None:
    """Collectives are under way when the cut begins. No process has died, and no timeout passes."""
    with apart() as training:
        networks_of = training.networks
        training.cut = lambda: [networks_of.cut(*way) for way in ways]
        training.mend = lambda: [networks_of.mend(*way) for way in ways]
        training.run(kept="ab", left_out="c")
        assert training.quorums_at_first == 2, "one of all three, one of two: none fails to connect"


def tells_an_address_that_leads_nowhere(member: Member) -> None:
    group = member.replica.manager._pg
    good = Address.decode(group.address())
    group.address = Address(good.host, 1, good.cookie).encode


def test_of_those_that_wait_one_says_that_its_address_leads_nowhere(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """All three are needed, so each is told who is left out."""
    with lighthouse(
        timeout_s=TIMEOUT_S, min_replicas=3, expected_replicas=3, all_join=True
    ) as server:
        members = {name: Member(server, name) for name in NAMES}
        tells_an_address_that_leads_nowhere(members["c"])
        heard = threading.Barrier(len(NAMES))

        def wait(name: str) -> None:
            manager = members[name].replica.manager
            while not members[name].left_out.is_set():
                with suppress(QuorumUnavailable):
                    manager.start_quorum(timeout=timedelta(seconds=0.1))
                    assert not manager.should_commit()  # one that could not connect
            heard.wait(PATIENCE_S)
            members[name].replica.close()

        replicas(*(functools.partial(wait, name) for name in NAMES))
        said = [line for line in caplog.messages if "tells the others that it is at" in line]
        assert [line[:3] for line in said] == ["c: "]


def test_an_address_that_leads_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    """All hold equal states, so nothing but the rule keeps quorums from following each other."""
    with lighthouse(timeout_s=TIMEOUT_S, expected_replicas=3, all_join=True) as server:
        members = {name: Member(server, name) for name in NAMES}
        tells_an_address_that_leads_nowhere(members["c"])
        trained = threading.Barrier(len(NAMES))

        def train(name: str) -> None:
            members[name].replica.run_to(COMMITS)
            trained.wait(PATIENCE_S)
            members[name].replica.close()

        def wait_in_vain() -> None:
            manager = members["c"].replica.manager
            while not members["c"].left_out.is_set() or trained.n_waiting < len(NAMES) - 1:
                with pytest.raises(QuorumUnavailable):
                    manager.start_quorum(timeout=timedelta(seconds=0.1))
            assert server.status()["jobs"][0]["state"] == "live"
            assert "c is left out until they can" in server.status()["jobs"][0]["reason"]
            trained.wait(PATIENCE_S)
            members["c"].replica.close()

        replicas(lambda: train("a"), lambda: train("b"), wait_in_vain)
        said = [line for line in caplog.messages if "c is left out" in line]  # WARNING, by default
        assert len(said) == 1, "once, not in each step"
        assert "127.0.0.1" in said[0]
        assert "set FT_INTERFACE" in said[0]
        # One or two that fail, one that works; and where trials of the pair succeed, none.
        assert len(members["a"].quorums) <= 3
        assert len(members["b"].quorums) <= 3
