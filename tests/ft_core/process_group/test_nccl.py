"""The NCCL group on a double of NCCL's semantics (tests/harness/nccl_double.py): no GPU is needed."""

from __future__ import annotations

import os
import random
import threading
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from ft_core.collectives import allreduce as reduction
from ft_core.collectives.agreement import exchange_headers
from ft_core.errors import UnderCapture
from ft_core.process_group import ProcessGroupError, ProcessGroupNCCL
from ft_core.process_group.nccl import ClassicCudaDevice, outlive_nccl_errors
from ft_core.process_group.torch_versions import nccl2_available
from ft_core.replica.status import Participation
from ft_core.step import Step
from tests.ft_core.process_group.members import Calls, configure
from tests.harness import workers
from tests.harness.nccl_double import DoubleDevice, Wires, capture
from tests.harness.waiting import PATIENCE_S, until

ROUNDS = 60


class Pair:
    """Two groups, each on a device of its own."""

    def __init__(self, timeout_s: float = PATIENCE_S) -> None:
        self.wires = Wires()
        self.devices = [DoubleDevice(self.wires, index) for index in (1, 2)]
        self.groups = [
            ProcessGroupNCCL(timeout_s, hostname="127.0.0.1", on=device) for device in self.devices
        ]
        self.quorum_id = 0
        self.meet()

    def meet(self) -> None:
        """The next quorum."""
        self.quorum_id += 1
        configure(self.groups, self.quorum_id)

    def tensor(self, rank: int, value: float = 1.0, elements: int = 8) -> torch.Tensor:
        return self.devices[rank].place(torch.full((elements,), value))

    def step(self, rank: int) -> Step:
        """A step that is bound to the current quorum."""
        group = self.groups[rank]
        step = Step(group, weighted=False, bind=lambda: None, on_error=lambda reason: None)
        step.open()
        step.part = Participation(
            quorum_id=self.quorum_id,
            replica_rank=rank,
            replica_world_size=2,
            rank=rank,
            participants=2,
            groups=2,
        )
        step.bound_at = time.monotonic()
        group.bind(self.quorum_id)
        return step


@pytest.fixture
def pair() -> Iterator[Pair]:
    both = Pair()
    yield both
    for group in both.groups:
        group.shutdown()
    assert not both.wires.faults


def test_sums_in_one_quorum_after_the_other(pair: Pair) -> None:
    def reduce(rank: int) -> tuple[Exception | None, float]:
        step, tensor = pair.step(rank), pair.tensor(rank, rank + 1.0)
        reduction.reduce(step, tensor, ReduceOp.SUM, divided_by=1, quantize=False).wait()
        step.drain()
        return step.error, float(tensor.mean())

    for _ in range(3):
        assert Calls(reduce, range(2)).values() == dict.fromkeys(range(2), (None, 3.0))
        assert not any(group.under_way for group in pair.groups)
        pair.meet()


@pytest.mark.parametrize("call", ["reduce", "start"])
def test_a_cut_link_commits_nothing(pair: Pair, call: str) -> None:
    """Wherever in a step the link is cut: a member whose sum is wrong has failed its step."""
    chance = random.Random(1)
    pair.wires.delay_s = lambda: chance.random() * 0.002
    queued = threading.Semaphore(0)
    pair.wires.on_kernel = queued.release

    def attempt(rank: int) -> bool:
        step = pair.step(rank)
        tensors = [pair.tensor(rank, rank + 1.0) for _ in range(4)]
        for tensor in tensors:
            if call == "start":
                reduction.start(step, tensor, ReduceOp.SUM, divided_by=1)
            else:
                reduction.reduce(step, tensor, ReduceOp.SUM, divided_by=1, quantize=False)
        step.drain()
        right = all(bool((tensor == 3.0).all()) for tensor in tensors)
        assert right or step.error is not None, "unreduced gradients would be committed"
        return right

    wrong = 0
    for _ in range(ROUNDS):
        calls = Calls(attempt, range(2))
        for _ in range(chance.randrange(1, 9)):
            queued.acquire(timeout=0.05)  # less than 8 come if it is cut early
        pair.wires.cut()
        wrong += not all(calls.values().values())
        pair.meet()
        while queued.acquire(blocking=False):
            pass
    assert wrong, "no cut came early enough to matter"


def test_a_failure_after_the_queueing_is_found(pair: Pair) -> None:
    """Each collective is queued, and nobody waits for it, before the link breaks."""
    steps = [pair.step(rank) for rank in range(2)]
    hold = threading.Event()
    pair.wires.delay_s = lambda: 0.0 * hold.wait(PATIENCE_S)
    works = [group.allreduce([pair.tensor(rank)]) for rank, group in enumerate(pair.groups)]
    assert not any(work.is_completed() for work in works)
    pair.wires.cut()
    hold.set()
    for step in steps:
        step.drain()
        assert isinstance(step.error, ProcessGroupError)
    assert all(isinstance(work.exception(), ProcessGroupError) for work in works)


def test_a_late_peer_is_seen_as_a_stall_and_its_step_fails(pair: Pair) -> None:
    step = pair.step(0)
    work = pair.groups[0].allreduce([pair.tensor(0)])
    drained = Calls(lambda rank: step.drain(), [0])
    assert step.waited_s(time.monotonic() + 18.0) >= 18.0, "as the control thread asks"
    assert pair.groups[0].under_way
    pair.groups[0].revoke(RuntimeError("stalled"))
    drained.values()
    assert "stalled" in str(step.error)
    assert not work.is_success()
    assert step.waited_s(time.monotonic() + 18.0) == 0.0


def test_the_control_thread_asks_on_the_groups_device(pair: Pair) -> None:
    """A new thread has device 0. The fixture's `faults` tell of a query there."""
    step = pair.step(0)
    reduction.start(step, pair.tensor(0), ReduceOp.SUM, divided_by=1)
    waited: list[float] = []
    later = time.monotonic() + 18.0
    control = threading.Thread(
        target=lambda: waited.append(step.waited_s(later)), name="ft-control"
    )
    control.start()
    control.join(PATIENCE_S)
    assert waited[0] >= 18.0
    pair.groups[0].revoke(RuntimeError("stalled"))


def test_a_peer_later_than_nccl_waits_fails_the_step() -> None:
    pair = Pair(timeout_s=0.2)
    try:
        step = pair.step(0)
        reduction.start(step, pair.tensor(0), ReduceOp.SUM, divided_by=1)
        step.drain()
        assert step.error is not None
        until(lambda: pair.groups[0].errored() is not None)
    finally:
        for group in pair.groups:
            group.shutdown()


def test_an_error_that_shows_early_frees_a_kernel_that_hangs(pair: Pair) -> None:
    work = pair.groups[0].allreduce([pair.tensor(0)])
    pair.wires.cut(revoke=False)
    assert pair.groups[0].under_way, "asking finds the error"
    assert isinstance(pair.groups[0].errored(), ProcessGroupError)
    assert pair.groups[0].settle() is work.exception() is not None


def test_a_kernel_that_outlives_its_quorum_keeps_its_tensors_and_hides_no_failure(
    pair: Pair,
) -> None:
    begun, hold = threading.Event(), threading.Event()

    def delay_s() -> float:
        if not begun.is_set():  # the first kernel only
            begun.set()
            hold.wait(PATIENCE_S)
        return 0.0

    pair.wires.delay_s = delay_s
    old = pair.groups[0].allreduce([pair.tensor(0)])
    assert begun.wait(PATIENCE_S)
    pair.meet()
    step = pair.step(0)
    newer = pair.groups[0].allreduce([pair.tensor(0)])
    pair.groups[0].revoke(RuntimeError("the newer one fails, too"))
    until(newer.is_completed)
    assert not old.is_completed(), "it may still write"
    hold.set()
    until(old.is_completed)
    step.drain()
    assert "the newer one fails" in str(step.error)


def test_tensors_of_the_host_travel_beside_nccl(pair: Pair) -> None:
    def mixed(rank: int) -> list[list[float]]:
        group, device = pair.groups[rank], pair.devices[rank]
        step, result = pair.step(rank), torch.zeros(2, 1)
        # Both kinds in flight: a quorum's members call both in the same order.
        row, total = torch.full((1, 1), rank + 1.0), torch.tensor([rank + 1.0])
        on_device = device.tensor([10.0 * (rank + 1)])
        works = [
            group._allgather_base(result, row),
            group.allreduce([on_device]),
            group.allreduce([total]),
        ]
        for work in works:
            work.wait()
        group.barrier().wait()
        step.drain()
        assert step.error is None
        return [result.view(-1).tolist(), on_device.tolist(), total.tolist()]

    for _ in range(2):
        expected = [[1.0, 2.0], [30.0], [3.0]]
        assert Calls(mixed, range(2)).values() == {0: expected, 1: expected}
        pair.meet()


def test_a_weighted_mean_finds_its_weights_on_the_host(pair: Pair) -> None:
    def weight(rank: int) -> float:
        step = pair.step(rank)
        step.weighted, step.samples = True, 1 + 2 * rank
        reduction.find_weight(step)
        assert step.error is None
        return step.weight

    assert Calls(weight, range(2)).values() == {0: 0.25, 1: 0.75}


def test_headers_tell_of_an_error_at_once(pair: Pair) -> None:
    """What the host reads at once is never garbage that NCCL has left."""
    assert Calls(lambda rank: exchange_headers(pair.step(rank), [rank]), range(2)).values() == {
        rank: [[0], [1]] for rank in range(2)
    }
    step = pair.step(0)
    said = Calls(lambda rank: exchange_headers(step, [1, 2]), [0])
    until(lambda: pair.groups[0].under_way)
    pair.groups[0].revoke(RuntimeError("the peer is gone"))
    assert said.values() == {0: None}
    assert "the peer is gone" in str(step.error)


def test_both_are_revoked_together(pair: Pair) -> None:
    waits = [pair.groups[0].allreduce([one]) for one in (pair.tensor(0), torch.ones(4))]
    pair.groups[0].revoke(RuntimeError("the peer is gone"))
    until(lambda: all(work.is_completed() for work in waits))
    assert all("the peer is gone" in str(work.exception()) for work in waits)
    pair.meet()


def test_works_that_nothing_asks_about_are_let_go(pair: Pair) -> None:
    refs = []
    for _ in range(20):
        works = [group.allreduce([pair.tensor(rank)]) for rank, group in enumerate(pair.groups)]
        for work in works:
            work.wait()
            refs.append(weakref.ref(work))
    assert sum(ref() is not None for ref in refs) <= 2 * len(works)


def test_torch_distributed_waits_for_what_it_asks_to_be_synchronous(pair: Pair) -> None:
    """torch's classic backend returns no work then."""

    def reduce(rank: int) -> tuple[float, Exception | None]:
        tensor = pair.tensor(rank, rank + 1.0)
        dist.all_reduce(tensor, group=pair.groups[rank])
        return float(tensor.mean()), pair.groups[rank].settle()

    assert Calls(reduce, range(2)).values() == {0: (3.0, None), 1: (3.0, None)}


def test_a_reduce_scatter_of_a_list_needs_no_copy_of_the_backends(pair: Pair) -> None:
    """The classic backend lets go of its copy of the inputs in the first wait, in the middle of a kernel."""

    for device in pair.devices:
        device.takes_floats = True  # torch makes a tensor of its own

    def scatter(rank: int) -> list[float]:
        own = pair.tensor(rank, 0.0, 2)
        inputs = [pair.tensor(rank, 10.0 * part + rank, 2) for part in range(2)]
        dist.reduce_scatter(own, inputs, group=pair.groups[rank])
        assert pair.groups[rank].settle() is None
        return own.tolist()

    assert Calls(scatter, range(2)).values() == {0: [1.0, 1.0], 1: [21.0, 21.0]}


@pytest.mark.parametrize("fails", [False, True])
def test_a_work_that_is_kept_outlives_its_backend(pair: Pair, fails: bool) -> None:
    """The fixture's `faults` tell of a work that asks a backend which is gone, and of a backend that goes in
    the loop's thread."""
    kept = [pair.groups[0].allreduce([pair.tensor(0)])]
    if not fails:
        kept.append(pair.groups[1].allreduce([pair.tensor(1)]))
        until(lambda: all(work.is_completed() for work in kept))
    pair.meet()
    until(lambda: all(work.end.communicator.backend is None for work in kept))
    for work in kept:
        assert work.is_completed()
        if fails:
            with pytest.raises(ProcessGroupError, match="superseded by quorum 2"):
                work.wait()
            with pytest.raises(RuntimeError, match="superseded by quorum 2"):
                work.get_future().wait()
        else:
            assert work.wait()
            assert float(work.get_future().wait()[0].mean()) == 2.0
            assert float(work.result()[0].mean()) == 2.0


def test_a_collective_is_refused_while_a_graph_is_captured(pair: Pair) -> None:
    step = pair.step(0)
    with capture(pair.devices[0]):
        with pytest.raises(UnderCapture, match="graph is captured"):
            pair.groups[0].allreduce([pair.tensor(0)])
        with pytest.raises(UnderCapture, match="reduce the gradients after each replay"):
            reduction.start(step, pair.tensor(0), ReduceOp.SUM, divided_by=1)
    assert step.error is None


def test_a_classic_backend_is_made_so_that_its_threads_end_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each name is one that this torch reads; what the user has set is there again afterwards."""
    told: dict[str, str] = {}

    def made(*args: object) -> None:
        told.update({name: value for name, value in os.environ.items() if "TORCH_NCCL" in name})
        told["level"] = dist.get_debug_level().name

    monkeypatch.setattr(dist, "ProcessGroupNCCL", made)
    made.Options = dist.distributed_c10d.ProcessGroupNCCL.Options  # type: ignore[attr-defined]
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    monkeypatch.delenv("TORCH_NCCL_DUMP_ON_TIMEOUT", raising=False)
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        ClassicCudaDevice(0).new_backend(dist.HashStore(), 0, 1, timeout_s=1)
        assert dist.get_debug_level() == dist.DebugLevel.DETAIL
    finally:
        dist.set_debug_level(level)
    assert told.pop("level") == "INFO"
    assert set(told.values()) == {"0"}
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
    assert "TORCH_NCCL_DUMP_ON_TIMEOUT" not in os.environ
    header = (
        Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"
    )
    known = header.read_text()
    assert all(f'"{name}"' in known for name in told)


class Classic:
    """As torch's classic backend (its header): a collective has the backend's timeout of when it was called."""

    def __init__(self, options: Any) -> None:
        self.options, self.limits_s = options, list[float]()

    def set_timeout(self, timeout: timedelta) -> None:
        self.options._timeout = timeout

    def eager_connect_single_device(self, device: torch.device) -> None:
        pass

    def allreduce(self, tensors: list[torch.Tensor], options: object) -> None:
        self.limits_s.append(self.options._timeout.total_seconds())

    def query(self) -> bool:
        return True


def test_a_classic_backend_connects_within_the_time_for_connecting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its first collective connects it. The others have the group's timeout again."""
    assert hasattr(dist.ProcessGroupNCCL, "set_timeout")
    assert hasattr(dist.ProcessGroupNCCL, "options")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=2)
    backend, device = Classic(options), ClassicCudaDevice(0)
    monkeypatch.setattr(device, "_device", torch.device("cpu"))
    monkeypatch.setattr(device, "end_of", lambda work: backend)
    rendezvous: Any = None  # the classic backend has met its members
    device.connect(backend, rendezvous, 60.0)
    backend.allreduce([], None)
    assert backend.limits_s == [60.0, 2.0]


@pytest.mark.parametrize(("dumps", "warns"), [(None, True), ("1", True), ("0", False)])
def test_it_warns_of_the_monitor_of_the_groups_own_nccl(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    dumps: str | None,
    warns: bool,
) -> None:
    monkeypatch.delenv("TORCH_NCCL_DUMP_ON_TIMEOUT", raising=False)
    if dumps is not None:
        monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", dumps)
    ClassicCudaDevice(0)
    assert not caplog.messages, "there is no such group"
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    ClassicCudaDevice(0)
    assert ["set TORCH_NCCL_DUMP_ON_TIMEOUT=0" in said for said in caplog.messages] == [
        True
    ] * warns


@pytest.mark.parametrize(
    ("backend", "before", "after"),
    [
        ("nccl", None, "0"),
        (None, None, "0"),
        ("cpu:gloo,cuda:nccl", "1", "1"),
        ("gloo", None, None),
    ],
)
def test_a_replica_group_in_a_trainer_outlives_the_monitor(
    monkeypatch: pytest.MonkeyPatch, backend: str | None, before: str | None, after: str | None
) -> None:
    """Its own group is made by this package: nothing needs to be set."""
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", before or "")
    if before is None:
        monkeypatch.delenv("TORCH_NCCL_DUMP_ON_TIMEOUT")
    outlive_nccl_errors(backend)
    assert os.environ.get("TORCH_NCCL_DUMP_ON_TIMEOUT") == before, "there is no GPU"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    outlive_nccl_errors(backend)
    assert os.environ.get("TORCH_NCCL_DUMP_ON_TIMEOUT") == after


@pytest.mark.process
@pytest.mark.skipif(not nccl2_available(), reason="this torch has no nccl2")
def test_torch_takes_the_arguments_that_its_nccl2_is_given() -> None:
    """In a process that ends at once: without a GPU the backend aborts it when it is destroyed."""
    script = (
        "import os, torch.distributed as dist\n"
        "from ft_core.process_group.nccl import CudaDevice\n"
        "made = CudaDevice(0).new_backend(dist.HashStore(), 0, 1, timeout_s=1)\n"
        "print(made.supports_reconfigure, flush=True)\n"
        "os._exit(0)"
    )
    ended = workers.run("torch", ["-c", script], env=os.environ)
    assert ended.stdout == "True\n", ended.stderr
