"""Gloo with tensors of a device, which is a double whose streams are late (tests/harness/copy_double.py)."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.distributed import ReduceOp

from ft_core.errors import UnderCapture
from ft_core.process_group import ProcessGroupError, ProcessGroupGloo, gloo
from tests.ft_core.process_group.members import Calls, configure, gloo_groups
from tests.harness.copy_double import CopyDouble
from tests.harness.waiting import PATIENCE_S, until

ROUNDS = 30
PIECES = 3


class Pair:
    """Two members, each with a device of its own."""

    def __init__(self, groups: list[ProcessGroupGloo], devices: list[CopyDouble]) -> None:
        self.groups, self.devices, self.quorum_id = groups, devices, 0
        self.meet()

    def meet(self) -> None:
        self.quorum_id += 1
        configure(self.groups, self.quorum_id)

    def place(self, rank: int, *values: float) -> Tensor:
        return self.devices[rank].place(torch.tensor(values, dtype=torch.float32))


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setattr(gloo, "PIECE_BYTES", 4 * 16)
    chance = random.Random(1)

    def delay_s() -> float:
        return 0.002 * chance.random()

    with gloo_groups(2) as groups, CopyDouble(delay_s) as one, CopyDouble(delay_s) as other:
        yield Pair(groups, [one, other])
    assert not one.faults + other.faults


def test_sums_are_ordered_with_the_callers_stream(pair: Pair) -> None:
    """Before: the tensor is computed later than the call. After: it is read and written again at once."""

    def train(rank: int) -> list[Tensor]:
        device, group, found = pair.devices[rank], pair.groups[rank], []
        tensor = device.place(torch.zeros(16 * PIECES - 3))
        host = torch.zeros(2)
        for number in range(ROUNDS):
            device.model.run(partial(tensor.fill_, number + rank))
            work = group.allreduce([tensor])
            beside = group.allreduce([host.fill_(1.0)])  # in the same order on all members
            if number % 2:
                work.get_future().wait()
            work.wait()
            device.model.run(lambda: found.append(tensor.clone()))
            device.model.run(partial(tensor.fill_, -1))
            beside.wait()
            assert host.tolist() == [2.0, 2.0]
        device.model.drain()
        return found

    for found in Calls(train, range(2)).values().values():
        assert len(found) == ROUNDS
        for number, tensor in enumerate(found):
            assert tensor.tolist() == [2.0 * number + 1] * tensor.numel()


def test_a_piece_is_summed_while_the_next_one_is_copied(pair: Pair) -> None:
    tensors = [pair.devices[rank].place(torch.ones(16 * PIECES)) for rank in range(2)]
    first, go_on = threading.Event(), threading.Event()

    def delay_s() -> float:
        if first.is_set():
            go_on.wait(PATIENCE_S)
        first.set()
        return 0.0

    pair.devices[0].delay_s = delay_s
    calls = Calls(lambda rank: pair.groups[rank].allreduce([tensors[rank]]).wait(), range(2))
    until(lambda: tensors[1][:16].tolist() == [2.0] * 16, "the first piece")
    assert tensors[0].tolist() == [1.0] * 16 * PIECES
    assert tensors[1][16:].tolist() == [1.0] * 16 * (PIECES - 1)
    go_on.set()
    assert calls.values() == {0: True, 1: True}
    for rank in range(2):
        pair.devices[rank].model.drain()
        assert tensors[rank].tolist() == [2.0] * 16 * PIECES


def test_every_collective(pair: Pair) -> None:
    """Those that torch's Gloo has for CPU tensors only, too."""

    def run(rank: int) -> list[list[float]]:
        device, group, place = pair.devices[rank], pair.groups[rank], partial(pair.place, rank)
        mine, other = place(rank + 1.0, 10.0), 1 - rank
        gathered, listed = place(0, 0, 0, 0), [place(0, 0), place(0, 0)]
        crossed, share, received = place(0, 0), place(0), place(0, 0)
        largest, sent, several = place(float(rank)), place(rank + 5.0), [place(1), place(2, 3)]
        works = [
            group._allgather_base(gathered, mine),
            group.allgather(listed, mine),
            group.alltoall_base(crossed, mine, [], []),
            group._reduce_scatter_base(share, mine),
            group.broadcast([sent], 1),
            group.allreduce([largest], ReduceOp.MAX),
            group.allreduce_coalesced(several),
            group.send([mine], other) if rank else group.recv([received], other),
            group.recv([received], other) if rank else group.send([mine], other),
        ]
        for work in works:
            work.wait()
        device.model.drain()
        results = [gathered, *listed, crossed, share, sent, largest, *several, received]
        return [tensor.tolist() for tensor in results]

    alike = [[6.0], [1.0], [2.0], [4.0, 6.0]]
    both = [[1.0, 10.0, 2.0, 10.0], [1.0, 10.0], [2.0, 10.0]]
    assert Calls(run, range(2)).values() == {
        0: [*both, [1.0, 2.0], [3.0], *alike, [2.0, 10.0]],
        1: [*both, [10.0, 10.0], [20.0], *alike, [1.0, 10.0]],
    }


def test_a_revoked_collective_fails_and_the_next_quorum_is_right(pair: Pair) -> None:
    tensor = pair.place(0, *([1.0] * 16 * PIECES))
    work = pair.groups[0].allreduce([tensor])
    failed: list[Exception] = []
    future = work.get_future()
    pair.groups[0].revoke(RuntimeError("the peer is gone"))
    with pytest.raises(ProcessGroupError, match="the peer is gone"):
        work.wait()
    try:
        future.wait()
    except Exception as error:
        failed.append(error)
    assert "the peer is gone" in str(failed)
    assert work.is_completed() and not work.is_success()
    with pytest.raises(ProcessGroupError, match="revoked"):
        pair.groups[0].allreduce([tensor]).wait()
    pair.meet()
    test_every_collective(pair)


def test_a_collective_is_refused_while_a_graph_is_captured(pair: Pair) -> None:
    test_every_collective(pair)
    pair.devices[0].captures = True
    assert pair.groups[0].capturing and not pair.groups[1].capturing
    with pytest.raises(UnderCapture, match="graph is captured"):
        pair.groups[0].allreduce([pair.place(0, 1.0)])
