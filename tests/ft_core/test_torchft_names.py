"""Scripts that were written for torchft: its names, arguments and variables, each by its effect."""

from __future__ import annotations

import copy
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ReduceOp
from torch.futures import Future

import ft_core
from ft_core.compat import torchft
from ft_core.compat.torchft import (
    DiLoCo,
    DistributedDataParallel,
    HTTPTransport,
    LighthouseServer,
    LocalSGD,
    ManagedProcessGroup,
    Manager,
    PGTransport,
)
from ft_core.compat.torchft.checkpointing.transport import CheckpointTransport
from ft_core.errors import QuorumUnavailable
from ft_core.launch.rank_group import free_port
from ft_core.process_group import (
    ProcessGroup,
    ProcessGroupDummy,
    ProcessGroupError,
    ProcessGroupGloo,
)
from lighthouse.errors import LighthouseUnavailable
from tests.ft_core.process_group.members import KIND_NAMES, KINDS, Calls, gloo_groups
from tests.harness import workers
from tests.harness.cluster import lighthouse, replicas
from tests.harness.waiting import PATIENCE_S

IN_TWENTY_S = timedelta(seconds=20)


def manager(address: str, name: str, **options: Any) -> torchft.TorchftManager:
    """Of a replica group of one rank, which is a thread; torchft's arguments."""
    given: dict[str, Any] = {
        "min_replica_size": 1,
        "use_async_quorum": False,
        "timeout": IN_TWENTY_S,
        "connect_timeout": IN_TWENTY_S,
        "rank": 0,
        "world_size": 1,
        "watch_process": False,
        **options,
    }
    return Manager(
        pg=ProcessGroupGloo(timeout=IN_TWENTY_S),
        lighthouse_addr=address,
        replica_id=name,
        **given,
    )


@pytest.fixture
def alone() -> Iterator[torchft.TorchftManager]:
    """The manager of a job's only replica group."""
    with lighthouse() as server:
        made = manager(server.address(), "alone")
        yield made
        made.shutdown()


# ---------------------------------------------------------------- imports

SCRIPT = """
import sys
import torch
import torchft
from torchft import Manager, Optimizer, ProcessGroupBabyNCCL, ProcessGroupGloo, ProcessGroupXCCL
from torchft.checkpointing.pg_transport import PGTransport
from torchft.local_sgd import DiLoCo
from torchft.process_group import ManagedProcessGroup
from neighbour import number

pg = ProcessGroupGloo()
model = torch.nn.Linear(2, 1)
manager = Manager(
    pg=pg, min_replica_size=1, load_state_dict=model.load_state_dict, state_dict=model.state_dict,
    replica_id="train_0", checkpoint_transport=PGTransport(pg, timeout=None, device="cpu"),
    quorum_retries=3,
)
wrapped = torchft.DistributedDataParallel(manager, model)
optimizer = Optimizer(manager, torch.optim.AdamW(wrapped.parameters()))
while manager.current_step() < 2:
    optimizer.zero_grad()
    wrapped(torch.ones(1, 2)).sum().backward()
    optimizer.step()
print("trained", number, sys.argv[1:], __name__, flush=True)
manager.shutdown()
"""


@pytest.mark.process
def test_a_script_with_torchfts_imports_trains(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "neighbour.py").write_text("number = 7\n")
    with lighthouse() as server:
        done = workers.run(
            "torch",
            ["-m", "ft_core.compat.torchft", str(tmp_path / "train.py"), "--epochs"],
            env={**os.environ, "TORCHFT_LIGHTHOUSE": server.address()},
            cwd=tmp_path,
        )
    assert "trained 7 ['--epochs'] __main__" in done.stdout, done.stderr


def test_a_name_that_is_not_served_says_what_is() -> None:
    from ft_core.compat.torchft import ProcessGroupBabyNCCL
    from ft_core.compat.torchft.process_group import ProcessGroupXCCL

    with pytest.raises(NotImplementedError, match="use ProcessGroupGloo or ProcessGroupNCCL"):
        ProcessGroupBabyNCCL(timeout=IN_TWENTY_S)
    with pytest.raises(NotImplementedError, match="use ProcessGroupGloo"):
        ProcessGroupXCCL()
    with pytest.raises(ImportError):
        from ft_core.compat.torchft import no_such_name  # noqa: F401


# ---------------------------------------------------------------- the manager


def test_calls_in_torchfts_way(alone: torchft.TorchftManager) -> None:
    assert (alone.num_participants(), alone.participating_rank()) == (0, None)
    alone.start_quorum(True)  # its first argument is allow_heal
    tensor = torch.full((2,), 3.0)
    work = alone.allreduce(tensor)
    assert work.wait(timeout=IN_TWENTY_S) is tensor
    assert work.get_future().value() is tensor
    assert alone.should_commit()
    assert (alone.num_participants(), alone.participating_rank()) == (1, 0), "after the vote, too"


def test_seconds_of_the_environment_count_in_place_of_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with lighthouse() as server:
        monkeypatch.setenv("TORCHFT_QUORUM_TIMEOUT_SEC", "1")
        waits = manager(server.address(), "a", quorum_timeout=None, min_replica_size=2)
        with pytest.raises(QuorumUnavailable, match="no quorum within"):
            waits.start_quorum()
        waits.shutdown()
        monkeypatch.delenv("TORCHFT_QUORUM_TIMEOUT_SEC")
        monkeypatch.setenv("TORCHFT_TIMEOUT_SEC", "1")
        made = manager(server.address(), "b", job_id="another")
        made.start_quorum()
        assert made.wrap_future(Future(), "late").wait() == "late"
        made.shutdown()
    monkeypatch.setenv("TORCHFT_CONNECT_TIMEOUT_SEC", "1")
    looks = manager("tcp://127.0.0.1:1", "c")
    with pytest.raises(LighthouseUnavailable):
        looks.start_quorum()
    looks.shutdown()
    monkeypatch.setenv("TORCHFT_CONNECT_TIMEOUT_SEC", "soon")
    with pytest.raises(ValueError, match="TORCHFT_CONNECT_TIMEOUT_SEC must be a number"):
        manager("tcp://127.0.0.1:1", "d")


def test_the_managers_port_of_the_environment_is_listened_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = free_port()
    monkeypatch.setenv("TORCHFT_MANAGER_PORT", str(port))
    with lighthouse() as server:
        made = manager(server.address(), "a")
        made.start_quorum()
        socket.create_connection(("127.0.0.1", port), PATIENCE_S).close()
        made.shutdown()


def test_torchfts_transports_are_taken_and_others_refused() -> None:
    pg = ProcessGroupDummy()

    class Own(CheckpointTransport[Any]):
        pass

    for taken in (HTTPTransport[dict[str, Any]](IN_TWENTY_S, num_chunks=0), PGTransport(pg)):
        Manager(pg, None, None, 1, checkpoint_transport=taken, quorum_retries=2).shutdown()
    with pytest.raises(NotImplementedError, match="leave checkpoint_transport out"):
        Manager(pg, None, None, 1, checkpoint_transport=Own())
    with pytest.raises(NotImplementedError, match="Manager.register_state_dict_fn"):
        taken.send_checkpoint([1], 3, {}, IN_TWENTY_S)


def test_a_parameter_may_be_left_out_of_a_forward_pass(alone: torchft.TorchftManager) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(2, 1), nn.Linear(2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    model = DistributedDataParallel(alone, Model())
    optimizer = torchft.Optimizer(alone, torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert alone.current_step() == 1


def test_a_lighthouse_with_torchfts_arguments_waits_for_min_replicas() -> None:
    server = LighthouseServer("127.0.0.1:0", 2, join_timeout_ms=100, quorum_tick_ms=100)
    one = manager(server.address(), "a", quorum_timeout=timedelta(seconds=0.5))
    with pytest.raises(QuorumUnavailable, match="min_replicas=2"):
        one.start_quorum()
    one.shutdown()
    server.shutdown()


def test_a_parameter_server_with_torchfts_arguments() -> None:
    from ft_core.compat.torchft.parameter_server import ParameterServer

    class Adds(ParameterServer):
        def __init__(self) -> None:
            super().__init__(port=0, store_port=0)

        @classmethod
        def new_process_group(cls) -> ProcessGroup:
            return ProcessGroupGloo(timeout=IN_TWENTY_S)

        def forward(self, session_id: str, pg: ProcessGroup) -> None:
            data = torch.zeros(1)
            pg.broadcast_one(data, root=1).wait()
            pg.broadcast_one(data + 23, root=0).wait()

    with Adds() as server:
        pg = Adds.new_session(server.address())
        data = torch.full((1,), 12.0)
        pg.broadcast_one(data, root=1).wait()
        pg.broadcast_one(data, root=0).wait()
        assert data.item() == 35.0
        pg.shutdown()


# ---------------------------------------------------------------- groups and meshes


def test_a_reduction_after_the_vote_returns_the_own_value() -> None:
    """Two groups: within the step their sum and maximum, after it what this one has."""

    def script(made: torchft.TorchftManager, value: float) -> list[float]:
        group = ManagedProcessGroup(made)
        found = []
        for _ in range(2):  # within the step, and after its vote
            for op in (ReduceOp.SUM, ReduceOp.MAX):
                tensor = torch.tensor([value])
                if not found:
                    made.start_quorum()
                dist.all_reduce(tensor, op=op, group=group)
                found.append(tensor.item())
            if len(found) == 2:
                assert made.should_commit()
        made.shutdown()
        return found

    with lighthouse() as server:
        two = [manager(server.address(), f"r{i}", expected_replicas=2) for i in range(2)]
        found = replicas(*[lambda i=i: script(two[i], 3.0 + i) for i in range(2)])
    assert found == [[7.0, 4.0, 6.0, 3.0], [7.0, 4.0, 8.0, 4.0]]


def test_a_timeout_that_is_set_bounds_the_next_quorums_collectives() -> None:
    group = torchft.ErrorSwallowingProcessGroupWrapper(ProcessGroupGloo(timeout=IN_TWENTY_S))
    group.set_timeout(timedelta(seconds=0.2))
    other = ProcessGroupGloo(timeout=IN_TWENTY_S)
    addresses = [group.address(), other.address()]
    replicas(
        lambda: group.configure(1, 0, addresses, PATIENCE_S),
        lambda: other.configure(1, 1, addresses, PATIENCE_S),
    )
    group.allreduce([torch.ones(1)]).wait()  # the other one never comes
    assert "Timed out" in str(group.error())
    with pytest.raises(ValueError, match="must be positive"):
        other.set_timeout(timedelta(0))
    group.shutdown()
    other.shutdown()


@pytest.mark.parametrize("native", KINDS, ids=KIND_NAMES)
def test_a_timeout_that_is_set_between_two_quorums_bounds_the_second(native: bool) -> None:
    """Also where torch gives the group of the first one other members."""
    with gloo_groups(2, native=native, timeout_s=IN_TWENTY_S.total_seconds()) as groups:
        addresses = [group.address() for group in groups]

        def script(rank: int, quorum_id: int) -> None:
            groups[rank].configure(quorum_id, rank, addresses, PATIENCE_S)

        Calls(partial(script, quorum_id=1), (0, 1)).values()
        groups[0].set_timeout(timedelta(seconds=0.2))
        Calls(partial(script, quorum_id=2), (0, 1)).values()
        with pytest.raises(ProcessGroupError, match="200ms"):
            groups[0].allreduce([torch.ones(1)]).wait()  # the other one never comes


def test_coalesced_collectives_and_broadcast_one() -> None:
    def script(group: ProcessGroupGloo, rank: int) -> list[list[float]]:
        group.configure(1, rank, addresses, PATIENCE_S)
        a, b = torch.tensor([rank + 1.0]), torch.tensor([10.0 * rank])
        group.allreduce_coalesced([a, b]).wait()
        c = torch.tensor([float(rank)])
        group.broadcast_one(c, 1).wait()
        d = [torch.zeros(2), torch.zeros(2)]
        group.allgather_into_tensor_coalesced(d, [torch.ones(1) * rank, torch.ones(1) * 5]).wait()
        return [each.tolist() for each in (a, b, c, *d)]

    two = [ProcessGroupGloo(timeout=IN_TWENTY_S) for _ in range(2)]
    addresses = [group.address() for group in two]
    found = replicas(lambda: script(two[0], 0), lambda: script(two[1], 1))
    assert found == [[[3.0], [10.0], [1.0], [0.0, 1.0], [5.0, 5.0]]] * 2
    for group in two:
        group.shutdown()


SHARDED = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from ft_core.compat.torchft import Manager, ProcessGroupGloo, ft_init_device_mesh

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
manager = Manager(
    ProcessGroupGloo(), None, None, 2, timeout=timedelta(seconds=20), rank=0, world_size=1,
    use_async_quorum=False, lighthouse_addr=sys.argv[1], replica_id="sharded", expected_replicas=2,
)
mesh = ft_init_device_mesh(
    device_type="cpu", mesh_shape=(2, 1), mesh_dim_names=("dp_replicate", "dp_shard"),
    replicate_dim=0, manager=manager,
)
model = fully_shard(torch.nn.Linear(4, 1, bias=False), mesh=mesh["dp_replicate", "dp_shard"])
manager.start_quorum()
model(torch.ones(1, 4)).sum().backward()
assert manager.should_commit()
print(model.weight.grad.full_tensor().flatten().tolist(), flush=True)
manager.shutdown()
"""


@pytest.mark.process
def test_a_mesh_whose_replicate_dimension_is_the_quorum() -> None:
    """FSDP2's gradients over that mesh are the mean of two groups: of 1 there and 3 here. In a process of its
    own, since torch keeps meshes and their default group for ever."""

    def peer(address: str) -> None:
        made = manager(address, "peer", expected_replicas=2)
        made.start_quorum()
        made.allreduce(torch.full((4,), 3.0)).wait()
        assert made.should_commit()
        made.shutdown()

    def sharded(address: str) -> subprocess.CompletedProcess[str]:
        return workers.run("torch", ["-c", SHARDED, address], env=os.environ)

    with lighthouse(all_join=True) as server:
        address = server.address()
        found = replicas(lambda: sharded(address), lambda: peer(address))[0]
    assert found.stdout == "[2.0, 2.0, 2.0, 2.0]\n", found.stderr


# ---------------------------------------------------------------- LocalSGD and DiLoCo


def fragments(model: nn.Module) -> list[nn.Module]:
    return [nn.ModuleList([model.a, model.b]), nn.ModuleList([model.c, model.d])]


class FourLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(3, 3) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.d(torch.tanh(self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))))


def outer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def train(model: nn.Module, inner: torch.optim.Optimizer, member: int, steps: int) -> None:
    for step in range(steps):
        inner.zero_grad()
        model(torch.full((2, 3), member + 0.1 * step)).square().sum().backward()
        inner.step()


@pytest.mark.parametrize("quantized", [False, True])
def test_a_list_of_fragments_with_an_outer_optimizer_each(quantized: bool) -> None:
    """The numbers of this project's own form, whose outer optimizer is one over all parameters."""
    start = FourLayers()

    def member(address: str, number: int, build: Callable[..., Any]) -> list[float]:
        made, model = manager(address, f"r{number}", expected_replicas=2), copy.deepcopy(start)
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        with build(made, model, inner):
            train(model, inner, number, 8)
        made.shutdown()
        return [value for p in model.parameters() for value in p.flatten().tolist()]

    def theirs(made: Any, model: nn.Module, inner: Any) -> Any:
        return DiLoCo(
            made,
            fragments(model),
            inner,
            [outer_of(f.parameters()) for f in fragments(model)],
            sync_every=4,
            use_bucketization=True,
            bucket_cap_mb=1,
            should_quantize=quantized,
            fragment_sync_delay=1,
            fragment_update_alpha=0.25,
        )

    def ours(made: Any, model: nn.Module, inner: Any) -> Any:
        return ft_core.DiLoCo(
            made,
            model,
            inner,
            outer_of(model.parameters()),
            4,
            fragments=fragments(model),
            codec="int8" if quantized else None,
            fragment_sync_delay=1,
            fragment_update_alpha=0.25,
        )

    def run(build: Callable[..., Any]) -> list[Any]:
        with lighthouse(all_join=True) as server:
            address = server.address()
            return replicas(*[lambda i=i: member(address, i, build) for i in range(2)])

    assert run(theirs) == run(ours)


@pytest.mark.parametrize("kind", [DiLoCo, LocalSGD])
def test_a_state_with_the_model_heals_the_rest_of_it(kind: Any) -> None:
    """torchft's scripts put model and optimizers into the manager's state, torchtitan a scheduler and its
    step counter, too: a newcomer gets the latter, and the model from DiLoCo or LocalSGD."""
    joined, done = threading.Event(), threading.Event()

    class Member:
        def __init__(self, address: str, name: str, epoch: int) -> None:
            self.model, self.scheduler = FourLayers(), {"last_epoch": epoch}
            self.inner = torch.optim.AdamW(self.model.parameters(), lr=0.01)
            self.manager = manager(address, name, load_state_dict=self.load, state_dict=self.save)
            self.loaded: list[set[str]] = []
            if kind is LocalSGD:
                self.loop = kind(self.manager, self.model, self.inner, 2)
            else:
                outer = outer_of(self.model.parameters())
                self.loop = kind(self.manager, [self.model], self.inner, outer, 2)

        def save(self) -> dict[str, Any]:
            return {
                "model": self.model.state_dict(),
                "inner": self.inner.state_dict(),
                "scheduler": dict(self.scheduler),
            }

        def load(self, state: dict[str, Any]) -> None:
            self.loaded.append(set(state))
            self.model.load_state_dict(state["model"])
            self.inner.load_state_dict(state["inner"])
            self.scheduler = dict(state["scheduler"])

        def globals(self) -> list[torch.Tensor]:
            return [t.clone() for t in self.loop.state_dict()["parameters"].values()]

    def first(address: str) -> None:
        member = Member(address, "first", 5)
        with member.loop:
            while not done.is_set():
                train(member.model, member.inner, 1, 1)
                if member.manager.current_step() >= 2:
                    joined.set()
        member.manager.shutdown()

    def newcomer(address: str) -> Member:
        assert joined.wait(PATIENCE_S)
        try:
            member = Member(address, "newcomer", 0)
            with member.loop:
                train(member.model, member.inner, 2, 1)  # joins, heals, and loses this step
                healed, now = member.globals(), list(member.model.parameters())
                assert all(torch.equal(a, b) for a, b in zip(healed, now, strict=True))
            return member
        finally:
            done.set()
            member.manager.shutdown()

    with lighthouse() as server:
        member = replicas(lambda: first(server.address()), lambda: newcomer(server.address()))[1]
    assert member.loaded == [{"model", "inner", "scheduler"}]
    assert member.scheduler == {"last_epoch": 5}
    steps = {int(state["step"]) for state in member.inner.state.values()}
    assert steps == {1}, "another member's moments belong to its own window"
