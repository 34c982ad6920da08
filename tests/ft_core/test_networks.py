"""Hosts without an IPv4 address but the loopback's, that have no route yet, that are cut off."""

from __future__ import annotations

import logging
import socket
import threading
from contextlib import ExitStack, closing
from functools import partial

import pytest
import torch

from ft_core.config import JobOptions
from ft_core.process_group import ProcessGroupError, ProcessGroupGloo
from ft_core.shell import session
from ft_core.shell.intra_group import IntraGroup
from ft_core.telemetry import HEAL_DONE, Event
from lighthouse import LighthouseServer, own_address
from lighthouse.config import LighthouseConfig, Timeouts
from tests.harness import networks
from tests.harness.cluster import Replica, replicas
from tests.harness.waiting import PATIENCE_S

LARGE = 1 << 14
"""Numbers, in more than one packet."""


def test_members_train_and_heal_in_networks_that_have_ipv6_only() -> None:
    if not networks.available():
        pytest.skip("network namespaces need root and `ip`")
    config = LighthouseConfig(
        timeouts=Timeouts.derive(PATIENCE_S, join_timeout_s=PATIENCE_S), expected_replicas=2
    )
    with networks.networks(2, ipv6=True) as made:
        with made.inside(2) as host:
            server = LighthouseServer(f"tcp://[{host}]:0", config=config)
        all_made = threading.Barrier(2, timeout=PATIENCE_S)
        healed = threading.Event()

        def note(event: Event) -> None:
            if event.kind == HEAL_DONE:
                healed.set()

        def member(index: int) -> torch.Tensor:
            with made.inside(index):
                replica = Replica(server, "ab"[index], value=float(index))
                replica.manager.telemetry.add_sink(note)
                all_made.wait()
                replica.run_to(3)
                replica.close()
                return replica.weights

        with server:
            first, second = replicas(lambda: member(0), lambda: member(1))
        assert torch.equal(first, second)
        assert healed.is_set(), "they began with other weights"


@pytest.mark.parametrize(("source", "target"), [(0, 1), (0, 2), (2, 0)], ids=str)
def test_a_cut_loses_what_is_sent_until_it_is_mended(source: int, target: int) -> None:
    """The harness's own: host 2 is the lighthouse's."""
    if not networks.available():
        pytest.skip("network namespaces need root and `ip`")
    with networks.networks(2) as made:
        with made.inside(source):
            sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with made.inside(target) as host:
            receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            receiver.bind((host, 0))
            receiver.settimeout(PATIENCE_S)
        with sender, receiver:
            for cut, said in [(False, b"before"), (True, b"lost"), (False, b"after")]:
                (made.cut if cut else made.mend)(source, target)
                sender.sendto(said, receiver.getsockname())
                if not cut:
                    assert receiver.recv(16) == said


def test_a_member_that_starts_before_its_host_has_a_route_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not networks.available():
        pytest.skip("network namespaces need root and `ip`")
    with networks.networks(1) as made, made.inside(1) as host:
        made.lose_route(0, 1)

        def advertised(*address: str) -> str:
            try:
                return own_address.advertised_host(*address)
            except ValueError:
                made.find_route(0, 1)
                raise

        monkeypatch.setattr(session, "advertised_host", advertised)
        with LighthouseServer(f"tcp://{host}:0") as server, made.inside(0):
            replica = Replica(server, "a")
            replica.run_to(1)
            replica.close()


def test_a_network_that_loses_large_packets_only_is_a_pair_that_can_not_connect(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A tunnel on the way has a smaller MTU, and its errors are filtered: quorums, connections and heartbeats
    pass, gradients don't. The others go on, and the member is back when the network is mended."""
    if not networks.available():
        pytest.skip("network namespaces need root and `ip`")
    caplog.set_level(logging.INFO)
    config = LighthouseConfig(
        timeouts=Timeouts.derive(20.0, join_timeout_s=PATIENCE_S), expected_replicas=3
    )
    with networks.networks(3) as made:
        with made.inside(3) as host:
            server = LighthouseServer(f"tcp://{host}:0", config=config)
        ready, end = threading.Barrier(3, timeout=PATIENCE_S), list[int]()

        def step(member: Replica) -> int:
            """How many have contributed; 0: it was discarded."""
            member.manager.start_quorum()
            member.manager.allreduce(torch.ones(LARGE)).wait()
            return member.manager.should_commit() and member.manager.num_participants()

        def train(index: int) -> None:
            with made.inside(index):
                member = Replica(server, "abc"[index])
                member.run_to(3)
                if ready.wait() == 0:
                    made.swallow_large(0)
                ready.wait()
                while index == 1 and step(member) != 2:
                    pass
                if index == 1:
                    made.swallow_large(0, 1_500)
                    while step(member) != 3:
                        pass
                    end.append(member.manager.current_step() + 3)
                while not end or member.manager.current_step() < end[0]:
                    step(member)
                member.close()

        with server:
            replicas(*(partial(train, index) for index in range(3)))
    assert any("does not confirm what is sent to it" in line for line in caplog.messages)
    assert any("can't connect to each other" in line for line in caplog.messages)


def test_ranks_of_one_group_find_each_other_where_there_is_ipv6_only() -> None:
    if not networks.available():
        pytest.skip("network namespaces need root and `ip`")
    with networks.networks(1, ipv6=True) as made, made.inside(1) as host:
        with LighthouseServer(f"tcp://[{host}]:0") as server:

            def rank(number: int) -> bool:
                with made.inside(0) as here:
                    options = JobOptions(
                        name="a",
                        group_rank=number,
                        group_world_size=2,
                        store_addr=here,
                        store_port=29_600,
                    )
                    with closing(IntraGroup(options, timeout_s=PATIENCE_S)) as in_group:
                        agreed = in_group.decide(True, all_of_them=True)
                    replica = Replica(
                        server, "a", rank=number, world_size=2, store_addr=here, store_port=29_601
                    )
                    replica.run_to(2)
                    replica.close()
                    return agreed

            assert replicas(lambda: rank(0), lambda: rank(1)) == [True, True]


def test_a_member_of_another_host_that_tells_a_loopback_address_is_not_taken_for_dead() -> None:
    """What `TORCHFT_LIGHTHOUSE=tcp://127.0.0.1:29510` makes of a member on the lighthouse's own host."""
    if not networks.available():
        pytest.skip("network namespaces need root and `ip`")
    with networks.networks(2) as made, ExitStack() as stack:
        groups = []
        for index, hostname in enumerate((made.host(0), "127.0.0.1")):
            with made.inside(index):
                groups.append(ProcessGroupGloo(hostname=hostname))
                stack.callback(groups[index].shutdown)
                groups[index].address()
        with (
            made.inside(0),
            pytest.raises(ProcessGroupError, match="or it is on another host") as told,
        ):
            groups[0].configure(1, 0, [group.address() for group in groups], PATIENCE_S)
    assert "set FT_INTERFACE there" in str(told.value)
