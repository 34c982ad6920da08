"""Quantized all-reduce over real Gloo: same bits everywhere, fewer bytes, order among collectives."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed import ReduceOp

from ft_core.collectives.quantized import (
    Reduction,
    codec_named,
    reduce_quantized,
    reduce_scatter_quantized,
    wire_bytes,
)
from ft_core.manager import WorldSizeMode
from ft_core.process_group import ProcessGroupGloo
from ft_core.replica.status import Participation
from tests.ft_core.process_group.members import Calls, configure, gloo_groups
from tests.harness.cluster import Replica, lighthouse, replicas
from tests.harness.waiting import PATIENCE_S


def members(address: str, count: int, **options: Any) -> list[Replica]:
    """Their steps have all of them: on a busy machine one can be too late for a quorum's connections."""
    given = {"expected_replicas": count, "min_replica_size": count, **options}
    return [Replica(address, f"r{i}", **given) for i in range(count)]


def all_of(group: list[Replica], script: Callable[[Replica, int], Any]) -> list[Any]:
    def run(replica: Replica, index: int) -> Any:
        try:
            return script(replica, index)
        finally:
            replica.close()

    return replicas(*[lambda r=r, i=i: run(r, i) for i, r in enumerate(group)])


def values_of(index: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(count, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("op", [ReduceOp.AVG, ReduceOp.SUM])
def test_manager_allreduce_quantized(op: Any, dtype: torch.dtype) -> None:
    with lighthouse() as server:
        group = members(server.address(), 3)

        def script(replica: Replica, index: int) -> torch.Tensor:
            replica.manager.start_quorum()
            tensor = values_of(index, 1000, dtype).view(10, 100)
            future = replica.manager.allreduce(tensor, should_quantize=True, reduce_op=op)
            assert future.wait() is tensor
            assert replica.manager.should_commit()
            return tensor

        found = all_of(group, script)
    exact = sum(values_of(i, 1000).double() for i in range(3)).view(10, 100)
    if op == ReduceOp.AVG:
        exact = exact / 3
    torch.testing.assert_close(found[0].double(), exact, rtol=0.02, atol=0.1)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_a_tensor_without_values_costs_no_step() -> None:
    """A plain all-reduce takes it, too."""
    with lighthouse() as server:

        def script(replica: Replica, index: int) -> bool:
            replica.manager.start_quorum()
            for quantized in (False, True):
                replica.manager.allreduce(torch.empty(0, 3), should_quantize=quantized).wait()
            return replica.manager.should_commit()

        assert all_of(members(server.address(), 2), script) == [True, True]


@pytest.mark.parametrize("name", ["int8", "fp8", "int4"])
def test_buckets_without_values(name: str) -> None:
    codec = codec_named(name)

    def reduce(groups: list[ProcessGroupGloo], rank: int) -> None:
        part = Participation(1, rank, 2, participants=2, rank=rank, groups=2)
        jobs = [Reduction(torch.ones(count), torch.zeros(count)) for count in (0, 1)]
        reduce_quantized(groups[rank], codec, jobs, part)
        assert [job.bucket.numel() for job in jobs] == [0, 1]
        assert [job.next_residual.shape for job in jobs if job.next_residual is not None] == [
            (0,),
            (1,),
        ]
        assert abs(float(jobs[1].bucket) - 2.0) <= 2 * LOSSES[name]
        reduce_scatter_quantized(groups[rank], codec, torch.empty(0), torch.empty(0), part)

    with gloo_groups(2) as groups:
        configure(groups, 1)
        Calls(lambda rank: reduce(groups, rank), range(2)).values()


def test_plain_and_quantized_calls_keep_their_order() -> None:
    """A quantized one has two rounds, of which the second starts later, from a thread."""
    with lighthouse() as server:
        group = members(server.address(), 3)

        def script(replica: Replica, index: int) -> list[list[float]]:
            manager, found = replica.manager, []
            for step in range(10):
                manager.start_quorum()
                tensors = [torch.full((257 + i,), float(index + i)) for i in range(6)]
                tensors.append(torch.full((3,), index, dtype=torch.int64))
                for i, tensor in enumerate(tensors):
                    quantize = tensor.is_floating_point() and (i + step) % 2 == 0
                    manager.allreduce(tensor, should_quantize=quantize)
                assert manager.should_commit(), manager.last_outcome()
                found = [[float(t.min()), float(t.max())] for t in tensors]
            return found

        for found in all_of(group, script):
            for i in range(6):
                assert found[i] == pytest.approx([1.0 + i] * 2, rel=0.02)
            assert found[6] == [1.0, 1.0]


def test_quantized_calls_end_where_no_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = threading.Thread.start

    def some(thread: threading.Thread) -> None:
        if thread.name == "ft-collectives":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", some)
    with lighthouse() as server:
        group = members(server.address(), 2)

        def script(replica: Replica, index: int) -> list[float]:
            replica.manager.start_quorum()
            tensors = [torch.full((4,), float(index + i)) for i in range(2)]
            for tensor in tensors:
                replica.manager.allreduce(tensor, should_quantize=True)
            assert replica.manager.should_commit()
            return [float(tensor[0]) for tensor in tensors]

        assert all_of(group, script) == [pytest.approx([0.5, 1.5], rel=0.02)] * 2


def test_spares_add_nothing() -> None:
    with lighthouse() as server:
        group = members(
            server.address(), 3, min_replica_size=2, world_size_mode=WorldSizeMode.FIXED_WITH_SPARES
        )

        def script(replica: Replica, index: int) -> list[float]:
            replica.manager.start_quorum()
            tensor = torch.full((300,), [2.0, 4.0, 100.0][index])
            replica.manager.allreduce(tensor, should_quantize=True).wait()
            assert replica.manager.should_commit()
            return tensor.tolist()

        assert all_of(group, script) == [pytest.approx([3.0] * 300, rel=0.01)] * 3


def test_what_cannot_be_quantized_is_refused() -> None:
    with lighthouse() as server:
        manager = Replica(server, "r0").manager
        manager.start_quorum()
        for op, dtype in (
            (ReduceOp.MAX, torch.float32),
            (ReduceOp.SUM, torch.int64),
            (ReduceOp.AVG, torch.complex64),
        ):
            with pytest.raises(ValueError, match="should_quantize is for sums and means"):
                tensor = torch.ones(3, dtype=dtype)
                manager.allreduce(tensor, should_quantize=True, reduce_op=op)
        assert manager.should_commit()
        manager.shutdown()


def test_a_failed_quantized_call_is_never_reported_as_success() -> None:
    with lighthouse() as server:
        group = members(server.address(), 2)
        both_sent = threading.Barrier(2)  # one that had not begun would not see the step discarded

        def script(replica: Replica, index: int) -> tuple[bool, bool]:
            manager = replica.manager
            manager.start_quorum()
            tensor = torch.ones(1000)
            future = manager.allreduce(tensor, should_quantize=True)
            both_sent.wait(PATIENCE_S)
            if index == 1:
                manager.report_error(ValueError("no"))  # in its first round or its second
            future.wait()
            first = manager.should_commit()
            manager.start_quorum()
            manager.allreduce(tensor.fill_(1.0), should_quantize=True).wait()
            return first, manager.should_commit()

        assert all_of(group, script) == [(False, True), (False, True)]


def sent_by_sockets() -> dict[str, int]:
    """Payload bytes sent over each TCP socket of this process (TCP_INFO's bytes_acked)."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{fd}")
            if not name.startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(fd))) as copy:
                if copy.family != socket.AF_INET or copy.type != socket.SOCK_STREAM:
                    continue
                info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                found[name] = struct.unpack_from("Q", info, 120)[0]
        except OSError:
            continue
    return found


@pytest.mark.parametrize(("name", "fewer"), [("int8", 3.8), ("int4", 7.2), ("fp8", 3.8)])
def test_bytes_on_the_wire(name: str, fewer: float) -> None:
    """Counted by the kernel, on all sockets of three members in this process."""
    count, codec = 300_000, codec_named(name)
    with lighthouse() as server:
        group = members(server.address(), 3)
        both: list[int] = []

        def script(replica: Replica, index: int) -> None:
            manager = replica.manager
            for quantize in (False, True):
                manager.start_quorum()
                meet(manager)
                before = sent_by_sockets() if index == 0 else {}
                meet(manager)
                tensor = values_of(index, count)
                if quantize:
                    part = manager.step.participation()
                    reduce_quantized(manager._pg, codec, [Reduction(tensor)], part)
                else:
                    manager.allreduce(tensor, reduce_op=ReduceOp.SUM).wait()
                meet(manager)
                if index == 0:
                    after = sent_by_sockets()
                    both.append(sum(after[s] - before.get(s, 0) for s in after))
                meet(manager)
                assert manager.should_commit()

        all_of(group, script)
    plain, quantized = both
    assert plain / quantized > fewer
    assert quantized == pytest.approx(3 * wire_bytes(codec, count, 3), rel=0.03)


def meet(manager: Any) -> None:
    """All members are here."""
    manager.allreduce(torch.zeros(1)).wait()


@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
def test_error_feedback_sends_later_what_was_lost(name: str) -> None:
    """The sum over many steps of what arrives tends to the sum of what was meant."""
    codec, steps, count = codec_named(name), 40, 500
    with lighthouse() as server:
        group = members(server.address(), 3)

        def script(replica: Replica, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            manager = replica.manager
            totals = []
            for feedback in (False, True):
                residual = torch.zeros(count) if feedback else None
                total = torch.zeros(count)
                for _ in range(steps):
                    manager.start_quorum()
                    meet(manager)
                    job = Reduction(values_of(index, count), residual)
                    reduce_quantized(manager._pg, codec, [job], manager.step.participation())
                    assert manager.should_commit()
                    residual = job.next_residual
                    total += job.bucket
                totals.append(total / steps)
            return totals[0], totals[1]

        found = all_of(group, script)
    exact = sum(values_of(i, count) for i in range(3))
    without, with_feedback = ((found[0][i] - exact).norm() for i in range(2))
    assert with_feedback < without / 5
    for plain, corrected in found[1:]:
        assert torch.equal(plain, found[0][0])
        assert torch.equal(corrected, found[0][1])


LOSSES = {"int8": 1 / 254, "fp8": 1 / 28, "int4": 1 / 14 + 1 / 512}
"""The largest error of a value, relative to the largest of its block (`ft_core.collectives.quantized`)."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(LOSSES))
def test_reduce_scatter_quantized(name: str, dtype: torch.dtype) -> None:
    """Against Gloo's own, within what each member's encoding may lose; shares that are no whole blocks."""
    codec, count, silent = codec_named(name), 3, 2

    def part_of(rank: int) -> Participation:
        return Participation(
            quorum_id=1,
            replica_rank=rank,
            replica_world_size=count,
            rank=None if rank == silent else rank,
            participants=count - 1,
            groups=count,
        )

    def scatter(groups: list[ProcessGroupGloo], rank: int, share: int) -> None:
        values = values_of(rank, count * share, dtype)
        kept, output, exact = values.clone(), values.new_empty(share), torch.empty(share)
        plain = values.float() if rank != silent else torch.zeros(count * share)
        groups[rank]._reduce_scatter_base(exact, plain).wait()
        reduce_scatter_quantized(groups[rank], codec, output, values, part_of(rank))
        assert torch.equal(values, kept)
        largest = sum(
            float(values_of(i, count * share, dtype).abs().max()) for i in range(count - 1)
        )
        allowed = LOSSES[name] * largest * 1.001
        if dtype == torch.bfloat16:
            allowed += float(exact.abs().max() + allowed) / 256
        assert 0 < float((output.float() - exact).abs().max()) <= allowed
        with pytest.raises(ValueError, match="pad them"):
            reduce_scatter_quantized(groups[rank], codec, output, values[1:], part_of(rank))

    with gloo_groups(count) as groups:
        configure(groups, 1)
        for share in (1000, 512):
            Calls(lambda rank, share=share: scatter(groups, rank, share), range(count)).values()
    with gloo_groups(1) as groups:  # nothing travels, and nothing is lost
        configure(groups, 1)
        values, output = values_of(0, 10, dtype), torch.empty(10, dtype=dtype)
        reduce_scatter_quantized(groups[0], codec, output, values, part_of(0))
        assert torch.equal(output, values)
