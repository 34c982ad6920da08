"""Which tensors `Manager.allreduce` takes: all that the backend reduces rightly. The others are refused at the call."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.distributed import ReduceOp

from tests.harness.cluster import Replica, lighthouse, replicas

Make = Callable[[], Tensor]


@pytest.fixture
def pair() -> Iterator[list[Replica]]:
    with lighthouse(min_replicas=2, all_join=True) as server:
        both = [Replica(server, str(i), expected_replicas=2) for i in (0, 1)]
        yield both
        replicas(*[replica.close for replica in both])


def _ones(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.uint8).to(dtype)


def _refused(replica: Replica, cases: list[tuple[Make, ReduceOp.RedOpType]]) -> tuple[int, bool]:
    """How many of the cases are refused with a sentence in one step, and whether it is committed after them."""
    replica.manager.start_quorum()
    refusals = 0
    for make, op in cases:
        for call in (replica.manager.allreduce, replica.manager.start_allreduce):
            try:
                call(make(), reduce_op=op)
            except ValueError:
                refusals += 1
    return refusals, replica.end(replica.reduce())


def test_what_no_backend_reduces_is_refused_and_costs_no_quorum(pair: list[Replica]) -> None:
    real = [torch.int16, torch.uint16, torch.uint32, torch.uint64]
    real += [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu]
    ops = [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT]
    cases: list[tuple[Make, ReduceOp.RedOpType]] = []
    cases += [(lambda dtype=dtype: _ones(dtype, 3), op) for dtype in real for op in ops]
    for dtype in (torch.complex32, torch.complex64, torch.complex128):
        cases += [(lambda dtype=dtype: _ones(dtype, 3), op) for op in ops[2:]]
    cases.append((lambda: torch.ones(3, dtype=torch.bool), ReduceOp.AVG))
    cases.append((lambda: torch.ones(3, device="meta"), ReduceOp.SUM))
    done = replicas(*[lambda r=r: _refused(r, cases) for r in pair])
    assert done == [(2 * len(cases), True)] * 2


def test_a_view_that_is_not_its_memory_is_refused(pair: list[Replica]) -> None:
    """The sum of a view with gaps was one of what lies between its values, and was committed."""
    views: list[Make] = [
        lambda: torch.ones(2, 6)[:, ::2],
        lambda: torch.ones(2, 8)[:, :3],
        lambda: torch.ones(1).expand(5),
        lambda: torch.ones(3, dtype=torch.complex64).conj(),
        lambda: torch.ones(1, dtype=torch.complex64).conj().imag,
    ]
    cases = [(view, ReduceOp.SUM) for view in views]
    done = replicas(*[lambda r=r: _refused(r, cases) for r in pair])
    assert done == [(2 * len(cases), True)] * 2


def test_what_is_dense_or_wants_a_gradient_is_reduced(pair: list[Replica]) -> None:
    """A parameter was not, where more than one member scales its contribution."""
    makes: list[Make] = [
        lambda: torch.ones(3, 4).t(),
        lambda: torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda: torch.ones(3, 1, 2).permute(2, 1, 0),
        lambda: torch.ones(0),
        lambda: torch.tensor(1.0),
        lambda: torch.nn.Parameter(torch.ones(3)),
        lambda: torch.ones(3, dtype=torch.complex32),
    ]

    def run(replica: Replica, make: Make) -> bool:
        replica.manager.start_quorum()
        tensor = make()
        replica.manager.allreduce(tensor).wait()
        return replica.manager.should_commit() and bool((tensor == 1).all())

    for make in makes:
        assert replicas(*[lambda r=r, m=make: run(r, m) for r in pair]) == [True, True]
