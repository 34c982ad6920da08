"""DDP and optimizer with the real manager, lighthouse and Gloo; replica groups are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch._dynamo  # torch imports it in the middle of things: two threads at once fail
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ft_core import (
    DistributedDataParallel,
    Optimizer,
    PureDistributedDataParallel,
)
from tests.harness import cluster
from tests.harness.waiting import PATIENCE_S

TIMEOUT_S = 20.0
STEPS = 6


@pytest.fixture
def lighthouse() -> Iterator[str]:
    with cluster.lighthouse(all_join=True) as server:
        yield server.address()


class ReplicaGroup:
    """One replica group's model, optimizer and manager."""

    def __init__(
        self,
        lighthouse: str,
        name: str,
        net: nn.Module,
        *,
        expected: int,
        wrapper: Callable[..., nn.Module] = DistributedDataParallel,
        use_async_quorum: bool = True,
        **kwargs: Any,
    ) -> None:
        self.net = net
        self.manager = cluster.manager(
            lighthouse,
            name,
            load_state_dict=self._load,
            state_dict=self._save,
            expected_replicas=expected,
            use_async_quorum=use_async_quorum,
            **kwargs,
        )
        self.model = wrapper(self.manager, net)
        inner = torch.optim.AdamW(net.parameters(), lr=0.01)
        self.optimizer = Optimizer(self.manager, inner)

    def _save(self) -> dict[str, Any]:
        return {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}

    def _load(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])

    def step(self, data: Tensor, *, fail: bool = False) -> bool:
        self.optimizer.zero_grad()
        self.model(data).square().mean().backward()
        if fail:
            self.manager.report_error(RuntimeError("injected"))
        self.optimizer.step()
        return not self.optimizer.step_was_skipped

    def weights(self) -> list[Tensor]:
        return [t.detach().clone() for t in self.net.state_dict().values()]


def conv_net() -> nn.Module:
    """Parameters of 1.6 MiB, so that there is more than one bucket; and running statistics.

    Starts the same whichever threads draw from torch's generator meanwhile.
    """
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(288, 1000),
        nn.ReLU(),
        nn.Linear(1000, 120),
        nn.Linear(120, 5),
    )
    generator = torch.Generator().manual_seed(3)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.05, generator=generator)
    return net


def batch(rank: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + number)
    return torch.randn(6, 1, 8, 8, generator=generator)


def in_threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(count) as pool:
        return [
            f.result(timeout=PATIENCE_S) for f in [pool.submit(work, rank) for rank in range(count)]
        ]


def assert_same(one: list[Tensor], other: list[Tensor]) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


# ---------------------------------------------------------------------- against torch


def torch_group(store: dist.Store, rank: int, size: int) -> dist.ProcessGroup:
    """torch's own Gloo group, made by hand since init_process_group is once a process."""
    group = dist.ProcessGroup(store, rank, size)
    backend = dist.ProcessGroupGloo(
        dist.PrefixStore("gloo", store), rank, size, timedelta(seconds=TIMEOUT_S)
    )
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


@pytest.fixture(scope="module")
def torch_weights() -> list[Tensor]:
    """Of rank 0 after `STEPS` steps of two. (Once: torch's groups keep a socket.)"""
    size, store = 2, dist.HashStore()

    def work(rank: int) -> list[Tensor]:
        net = conv_net()
        model = TorchDDP(net, process_group=torch_group(store, rank, size))
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        for number in range(STEPS):
            optimizer.zero_grad()
            model(batch(rank, number)).square().mean().backward()
            optimizer.step()
        return [t.detach().clone() for t in net.state_dict().values()]

    # Buffers are those of rank 0, which torch sends around at the next forward.
    return in_threads(size, work)[0]


@pytest.mark.parametrize("wrapper", [DistributedDataParallel, PureDistributedDataParallel])
@pytest.mark.parametrize("use_async_quorum", [True, False])
def test_without_faults_it_equals_torchs_ddp_bit_for_bit(
    lighthouse: str, torch_weights: list[Tensor], wrapper: Any, use_async_quorum: bool
) -> None:
    def work(rank: int) -> list[Tensor]:
        replica = ReplicaGroup(
            lighthouse,
            f"r{rank}",
            conv_net(),
            expected=2,
            wrapper=wrapper,
            use_async_quorum=use_async_quorum,
        )
        try:
            for number in range(STEPS):
                assert replica.step(batch(rank, number))
            assert replica.manager.current_step() == STEPS
            return replica.weights()
        finally:
            replica.manager.shutdown()

    ours = in_threads(2, work)
    assert_same(ours[0], ours[1])
    assert_same(ours[0], torch_weights)


def test_unequal_starts_become_equal(lighthouse: str) -> None:
    def work(rank: int) -> list[Tensor]:
        net = conv_net()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(rank)
        replica = ReplicaGroup(lighthouse, f"r{rank}", net, expected=2)
        try:
            for number in range(3):
                replica.step(batch(rank, number))
            return replica.weights()
        finally:
            replica.manager.shutdown()

    one, other = in_threads(2, work)
    assert_same(one, other)


def test_other_shapes_are_refused(lighthouse: str) -> None:
    from lighthouse.errors import JoinRefused

    barrier = threading.Barrier(2, timeout=PATIENCE_S)

    def work(rank: int) -> str:
        replica = ReplicaGroup(lighthouse, f"r{rank}", nn.Linear(4, 3 + rank), expected=1)
        try:
            if rank == 1:
                barrier.wait()
                with pytest.raises(JoinRefused) as refusal:
                    replica.step(torch.ones(1, 4))
                    replica.step(torch.ones(1, 4))
                barrier.wait()
                return str(refusal.value)
            assert replica.step(torch.ones(1, 4))
            barrier.wait()
            barrier.wait()
            return ""
        finally:
            replica.manager.shutdown()

    assert "2 tensors of 20 values" in in_threads(2, work)[1]


# ---------------------------------------------------------------------- faults


def test_an_error_in_one_discards_for_all_and_the_next_step_commits(lighthouse: str) -> None:
    def work(rank: int) -> list[Any]:
        replica = ReplicaGroup(lighthouse, f"r{rank}", conv_net(), expected=2)
        try:
            history: list[Any] = []
            for number in range(5):
                fail = number == 2 and rank == 1
                history.append((replica.step(batch(rank, number), fail=fail), replica.weights()))
            return history
        finally:
            replica.manager.shutdown()

    one, other = in_threads(2, work)
    assert [committed for committed, _ in one] == [True, True, False, True, True]
    for (committed, mine), (same, theirs) in zip(one, other, strict=True):
        assert committed == same
        assert_same(mine, theirs)
    assert_same(one[1][1], one[2][1])  # parameters and running statistics


def test_a_group_that_leaves_and_one_that_joins_have_equal_states(lighthouse: str) -> None:
    """Group 1 goes after step 3; a new group 1 with other weights joins the running group 0."""
    joined = threading.Event()

    def survivor() -> dict[int, list[Tensor]]:
        replica = ReplicaGroup(lighthouse, "r0", conv_net(), expected=2)
        history: dict[int, list[Tensor]] = {}
        try:
            while not joined.is_set():
                replica.step(batch(0, replica.manager.current_step()))
                history[replica.manager.current_step()] = replica.weights()
                history.pop(replica.manager.current_step() - 50, None)
            return history
        finally:
            replica.manager.shutdown()

    def leaver() -> dict[int, list[Tensor]]:
        first = ReplicaGroup(lighthouse, "r1", conv_net(), expected=2)
        for number in range(3):
            first.step(batch(1, number))
        first.manager.shutdown()
        net = conv_net()
        with torch.no_grad():
            for tensor in net.state_dict().values():
                tensor.add_(1)
        second = ReplicaGroup(lighthouse, "r1", net, expected=2)
        history: dict[int, list[Tensor]] = {}
        try:
            while len(history) < 5:
                committed = second.step(batch(1, second.manager.current_step()))
                if committed and second.manager.current_step() > 3:
                    history[second.manager.current_step()] = second.weights()
            return history
        finally:
            second.manager.shutdown()
            joined.set()

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(survivor), pool.submit(leaver)]
        one, other = (f.result(timeout=PATIENCE_S) for f in futures)
    assert len(other) == 5
    for step, weights in other.items():
        assert_same(weights, one[step])
