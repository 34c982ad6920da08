"""Hosts without an IPv4 address but the loopback's: all that members tell each other is IPv6."""

from __future__ import annotations

import threading

import pytest
import torch

from ft_core.telemetry import HEAL_DONE, Event
from lighthouse import LighthouseServer
from lighthouse.config import LighthouseConfig, Timeouts
from tests.harness import networks
from tests.harness.cluster import Replica, replicas
from tests.harness.waiting import PATIENCE_S


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
