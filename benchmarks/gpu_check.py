"""python benchmarks/gpu_check.py [--json FILE] [--only NAME]

What ft_core says of CUDA, checked on a machine with one GPU (torch 2.11 or later), in one command and
less than 9 minutes. Each check prints what it measured and its bar beside it. Members are processes that
share the GPU: NCCL_HOSTID tells NCCL that they are on different machines, so that it takes them.

Exit status: 0 if all bars hold, 1 if one does not, 2 where there is no CUDA device.

The checks run on the double of NCCL's semantics, too (tests/ft_core/process_group/test_gpu_check.py).

Not checked yet: sockets that are cut without a death; step overhead and idle time with a model of 125 M
parameters in bf16; overlap from a trace; heal of 8 GiB (with CUDA IPC, and the source's stall);
fully_shard, bf16, GradScaler and compile bit by bit; TORCH_CUDA_SANITIZER; contexts a process.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import torch  # noqa: E402

from ft_core.collectives.quantized import DEFAULT_CODEC  # noqa: E402
from ft_core.errors import UnderCapture  # noqa: E402
from ft_core.process_group import ProcessGroup, ProcessGroupGloo, ProcessGroupNCCL  # noqa: E402
from ft_core.torch_versions import OLDEST  # noqa: E402

CONNECT_S = 60.0
FREE_S = 0.2
D2H_GB_S = 45.0
CODEC_GB_S = 1000.0
Answer = tuple[bool, str]
"""Of an attempt at a step: whether all sums are right, and the error with which it would be discarded."""


class Place(Protocol):
    """Where the checks run: the GPU, or a stand-in for it."""

    elements: int
    """Of a tensor that is reduced."""
    rounds: int
    """How often a check repeats what it does, where it is quick; others less often."""

    def group(self, index: int, timeout_s: float) -> ProcessGroup: ...

    def full(self, index: int, elements: int, value: float) -> torch.Tensor: ...

    def aside(self) -> AbstractContextManager[Any]:
        """A stream of its own, which is kept busy for some time first."""
        ...

    def capture(self) -> AbstractContextManager[Any]: ...

    def synchronize(self) -> None: ...

    def crew(self, size: int, timeout_s: float) -> AbstractContextManager[Crew]: ...


class Member:
    """One member of a quorum, in a process or a thread of its own."""

    def __init__(self, place: Place, index: int, timeout_s: float) -> None:
        self.place, self.index = place, index
        self.group = place.group(index, timeout_s)
        self.members, self.rank = 1, 0

    def address(self) -> bytes:
        return self.group.address()

    def configure(self, quorum_id: int, rank: int, addresses: Sequence[bytes]) -> None:
        self.members, self.rank = len(addresses), rank
        self.group.configure(quorum_id, rank, addresses, CONNECT_S)

    def attempt(
        self, tensors: int = 4, after_s: float = 0.0, revoked_after_s: float = 60.0
    ) -> Answer:
        """A step of so many all-reduces, up to where its vote would be cast. It is revoked if it takes too
        long, as the control thread does."""
        time.sleep(after_s)
        stalled = threading.Timer(revoked_after_s, self.revoke)
        stalled.start()
        held = [
            self.place.full(self.index, self.place.elements, self.rank + 1.0)
            for _ in range(tensors)
        ]
        error: object = None
        try:
            for work in [self.group.allreduce([tensor]) for tensor in held]:
                work.wait()
        except RuntimeError as caught:
            error = caught
        error = self.group.settle() or error or self.group.errored()
        stalled.cancel()
        expected = self.members * (self.members + 1) / 2
        return all(bool((one == expected).all()) for one in held), str(error or "")

    def revoked_in_flight(self, after_s: float) -> float:
        """Start an all-reduce that no other member joins, revoke it, and return the seconds from there until
        the device was free; infinity if the step would have been committed."""
        self.group.allreduce([self.place.full(self.index, self.place.elements, 1.0)])
        time.sleep(after_s)
        began = time.monotonic()
        self.group.revoke(RuntimeError("on purpose"))
        error = self.group.settle()
        self.place.synchronize()
        return float("inf") if error is None else time.monotonic() - began

    def revoke(self) -> None:
        self.group.revoke(RuntimeError("it takes too long"))

    def close(self) -> None:
        self.group.shutdown()


class Crew(Protocol):
    """Some members, whose methods are called by name."""

    size: int

    def call(self, index: int, method: str, *args: Any) -> Future[Any]: ...

    def kill(self, index: int) -> None:
        """End it in the middle of what it does."""
        ...


def meet(crew: Crew, quorum_id: int) -> None:
    """All members configure one quorum."""
    addresses = [crew.call(rank, "address").result() for rank in range(crew.size)]
    calls = [crew.call(rank, "configure", quorum_id, rank, addresses) for rank in range(crew.size)]
    for call in calls:
        call.result()


# ---------------------------------------------------------------- on the GPU


class Gpu:
    """The machine's first CUDA device."""

    elements, rounds = 4 << 20, 100

    def group(self, index: int, timeout_s: float) -> ProcessGroup:
        return ProcessGroupNCCL(timeout_s, hostname="127.0.0.1", device=0)

    def full(self, index: int, elements: int, value: float) -> torch.Tensor:
        return torch.full((elements,), value, device="cuda:0")

    def aside(self) -> AbstractContextManager[Any]:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2_000_000)
        return torch.cuda.stream(stream)

    def capture(self) -> AbstractContextManager[Any]:
        return torch.cuda.graph(torch.cuda.CUDAGraph())

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def crew(self, size: int, timeout_s: float) -> AbstractContextManager[Crew]:
        return Processes(self, size, timeout_s)


class Processes:
    """A crew of processes."""

    def __init__(self, place: Place, size: int, timeout_s: float) -> None:
        self.size = size
        context = multiprocessing.get_context("spawn")
        self._pool = ThreadPoolExecutor(size)
        self._ends, self._all = [], []
        for index in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(place, index, timeout_s, theirs))
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._all.append(process)

    def call(self, index: int, method: str, *args: Any) -> Future[Any]:
        def run() -> Any:
            self._ends[index].send((method, args))
            good, value = self._ends[index].recv()
            if not good:
                raise RuntimeError(value)
            return value

        return self._pool.submit(run)

    def kill(self, index: int) -> None:
        self._all[index].kill()

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *exc: object) -> None:
        for end, process in zip(self._ends, self._all, strict=True):
            end.close()
            process.join(10.0)
            process.kill()
        self._pool.shutdown()


def serve(place: Place, index: int, timeout_s: float, end: Any) -> None:
    """A member in its process."""
    os.environ["NCCL_HOSTID"] = f"ft-gpu-check-{index}"
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    member = Member(place, index, timeout_s)
    while True:
        try:
            method, args = end.recv()
        except EOFError:
            break
        try:
            end.send((True, getattr(member, method)(*args)))
        except Exception as error:
            end.send((False, f"{type(error).__name__}: {error}"))
    member.close()


# ---------------------------------------------------------------- the checks


@dataclass
class Finding:
    """What a check has found. `good`: None if it has no bar."""

    name: str
    measured: str
    bar: str
    good: bool | None


Check = Callable[[Place], tuple[str, str, bool | None]]


def versions(place: Place) -> tuple[str, str, bool | None]:
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    known = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return (
        f"torch {torch.__version__}, NCCL {nccl}, {device}",
        f"torch {OLDEST[0]}.{OLDEST[1]} or later",
        known >= OLDEST,
    )


def one_rank(place: Place) -> tuple[str, str, bool | None]:
    member, count, right, slowest = Member(place, 0, 30.0), place.rounds, 0, 0.0
    for quorum_id in range(1, count + 1):
        member.configure(quorum_id, 0, [member.address()])
        right += member.attempt(1) == (True, "")
        began = time.monotonic()
        member.revoke()
        place.synchronize()
        slowest = max(slowest, time.monotonic() - began)
    member.close()
    bar = f"{count} of {count}; {FREE_S} s"
    return (
        f"{right} right sums; revoked within {slowest:.3f} s",
        bar,
        right == count and slowest <= FREE_S,
    )


def _sums(place: Place, ranks: int) -> tuple[str, str, bool | None]:
    wrong, count = 0, place.rounds
    with place.crew(ranks, 30.0) as crew:
        for quorum_id in (1, 2):
            meet(crew, quorum_id)
            for _ in range(count // 2):
                calls = [crew.call(rank, "attempt") for rank in range(ranks)]
                wrong += sum(call.result() != (True, "") for call in calls)
    return f"{wrong} wrong of {count // 2 * 2 * ranks}", "0", wrong == 0


def revokes_in_flight(place: Place) -> tuple[str, str, bool | None]:
    count, took = max(1, place.rounds // 2), []
    with place.crew(2, 30.0) as crew:
        for quorum_id in range(1, count + 1):
            meet(crew, quorum_id)
            took.append(crew.call(0, "revoked_in_flight", 0.02).result())
    measured = f"{count} revoked, the slowest stream free after {max(took):.3f} s"
    return measured, f"all discarded; {FREE_S} s", max(took) <= FREE_S


def deaths(place: Place) -> tuple[str, str, bool | None]:
    wrong, failed, count = 0, 0, max(1, place.rounds // 5)
    for number in range(count):
        with place.crew(2, 30.0) as crew:
            meet(crew, 1)
            calls = [crew.call(rank, "attempt", 64, 0.0, 1.0) for rank in range(2)]
            time.sleep(0.005 * number)
            crew.kill(1)
            right, error = calls[0].result()
            wrong += not right and not error
            failed += bool(error)
    return f"{wrong} wrong sums committed; {failed} of {count} steps discarded", "0", wrong == 0


def late_peer(place: Place) -> tuple[str, str, bool | None]:
    limit_s = 0.02 * place.rounds
    with place.crew(2, limit_s) as crew:
        meet(crew, 1)
        calls = [crew.call(0, "attempt", 1), crew.call(1, "attempt", 1, 3 * limit_s)]
        answers = [call.result() for call in calls]
    wrong = sum(not right and not error for right, error in answers)
    measured = f"{wrong} wrong sums committed; said: {answers[0][1][:80]}"
    return measured, "0, and an error", wrong == 0 and bool(answers[0][1])


def gloo_on_a_side_stream(place: Place) -> tuple[str, str, bool | None]:
    wrong, count = 0, 10 * place.rounds
    group = ProcessGroupGloo(30.0, hostname="127.0.0.1")
    group.configure(1, 0, [group.address()], CONNECT_S)
    tensor = place.full(0, 1 << 16, 0.0)
    for number in range(count):
        with place.aside():
            tensor.fill_(number)
            group.allreduce([tensor]).wait()
            copy = tensor.clone()
            tensor.fill_(-1)
            wrong += not bool((copy == number).all())
    group.shutdown()
    return f"{wrong} wrong of {count}", "0", wrong == 0


def captured(place: Place) -> tuple[str, str, bool | None]:
    member = Member(place, 0, 30.0)
    member.configure(1, 0, [member.address()])
    said, tensor = "nothing", place.full(0, 8, 1.0)
    try:
        with place.capture():
            member.group.allreduce([tensor])
    except UnderCapture as error:
        said = str(error)
    member.close()
    return said, "refused with a sentence", "graph is captured" in said


def _gb_s(place: Place, nbytes: int, work: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(5):
        place.synchronize()
        began = time.perf_counter()
        work()
        place.synchronize()
        best = min(best, time.perf_counter() - began)
    return nbytes / best / 1e9


def to_host(place: Place) -> tuple[str, str, bool | None]:
    source = place.full(0, place.elements * 16, 1.0)
    target = torch.empty(source.shape, pin_memory=source.is_cuda)
    speed = _gb_s(place, source.nbytes, lambda: target.copy_(source, non_blocking=True))
    return f"{speed:.1f} GB/s", f"{D2H_GB_S:g} GB/s", speed >= D2H_GB_S


def codec(place: Place) -> tuple[str, str, bool | None]:
    rows = place.full(0, place.elements * 16, 1.0).view(4, -1)
    speed = _gb_s(place, rows.nbytes, lambda: DEFAULT_CODEC.encode(rows))
    return f"int8 encode {speed:.0f} GB/s", f"{CODEC_GB_S:g} GB/s", speed >= CODEC_GB_S


CHECKS: dict[str, Check] = {
    "versions": versions,
    "one rank: configure and revoke": one_rank,
    "sums of 2 ranks": lambda place: _sums(place, 2),
    "sums of 3 ranks": lambda place: _sums(place, 3),
    "revokes in flight": revokes_in_flight,
    "SIGKILLs": deaths,
    "peer late by 3 timeouts": late_peer,
    "Gloo on a side stream": gloo_on_a_side_stream,
    "capture": captured,
    "device to pinned memory": to_host,
    "codec": codec,
}


def examine(place: Place, name: str) -> Finding:
    """One check; an error is a bar that does not hold."""
    try:
        measured, bar, good = CHECKS[name](place)
    except Exception as error:  # the others shall run
        measured, bar, good = f"{type(error).__name__}: {error}", "no error", False
    return Finding(name, measured, bar, good)


def main(arguments: Sequence[str] | None = None, place: Place | None = None) -> int:
    parser = argparse.ArgumentParser(description="check ft_core's CUDA path on one GPU")
    parser.add_argument("--json", type=Path, help="write the findings there")
    parser.add_argument("--only", choices=list(CHECKS), help="one check")
    options = parser.parse_args(arguments)
    if place is None:
        if not torch.cuda.is_available():
            print("gpu_check: this machine has no CUDA device that torch can use")
            return 2
        place = Gpu()
    findings = []
    for name in [options.only] if options.only else CHECKS:
        began = time.monotonic()
        finding = examine(place, name)
        findings.append(finding)
        sign = {True: "ok", False: "NOT MET", None: ""}[finding.good]
        seconds = time.monotonic() - began
        print(
            f"{name:32} {finding.measured} (bar: {finding.bar}) {sign} [{seconds:.1f} s]",
            flush=True,
        )
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(finding) for finding in findings], indent=1))
    return int(any(finding.good is False for finding in findings))


if __name__ == "__main__":
    raise SystemExit(main())
