"""benchmarks/gpu_check.py on the double of NCCL's semantics, and where there is no GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu_check import CHECKS, Crew, Member, examine
from ft_core.process_group import ProcessGroup, ProcessGroupNCCL
from tests.harness.nccl_double import DoubleDevice, Wires, capture

SPEEDS = ("device to pinned memory", "codec")


class Stand:
    """A place on the CPU, whose members are threads."""

    elements, rounds = 64, 10

    def __init__(self) -> None:
        self.wires = Wires()
        self.devices: dict[int, DoubleDevice] = {}

    def group(self, index: int, timeout_s: float) -> ProcessGroup:
        self.devices[index] = DoubleDevice(self.wires, index + 1)
        return ProcessGroupNCCL(timeout_s, hostname="127.0.0.1", on=self.devices[index])

    def full(self, index: int, elements: int, value: float) -> torch.Tensor:
        tensor = torch.full((elements,), value)
        return self.devices[index].place(tensor) if index in self.devices else tensor

    def aside(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def capture(self) -> AbstractContextManager[Any]:
        return capture(self.devices[0])

    def synchronize(self) -> None:
        pass

    @contextmanager
    def crew(self, size: int, timeout_s: float) -> Iterator[Crew]:
        threads = Threads(self, size, timeout_s)
        yield threads
        for member in threads.members:
            member.close()
        threads.pool.shutdown()


class Threads:
    """A crew of threads."""

    def __init__(self, stand: Stand, size: int, timeout_s: float) -> None:
        self.size, self.stand = size, stand
        self.pool = ThreadPoolExecutor(size)
        self.members = [Member(stand, index, timeout_s) for index in range(size)]

    def call(self, index: int, method: str, *args: Any) -> Future[Any]:
        return self.pool.submit(getattr(self.members[index], method), *args)

    def kill(self, index: int) -> None:
        self.stand.wires.cut()


class Broken(Stand):
    """A place that gives other numbers, and no groups for crews."""

    def full(self, index: int, elements: int, value: float) -> torch.Tensor:
        return super().full(index, elements, value + 1)

    def crew(self, size: int, timeout_s: float) -> AbstractContextManager[Crew]:
        raise OSError("no processes here")


@pytest.mark.parametrize("name", [name for name in CHECKS if name not in SPEEDS])
def test_the_bar_holds_on_the_double(name: str) -> None:
    stand = Stand()
    finding = examine(stand, name)
    # How fast a busy machine revokes is not this test's business.
    if finding.measured.startswith("10 right sums") or "revoked, the slowest" in finding.measured:
        assert "inf" not in finding.measured
    else:
        assert finding.good, finding
    assert not stand.wires.faults


@pytest.mark.parametrize("name", SPEEDS)
def test_a_speed_is_measured(name: str) -> None:
    finding = examine(Stand(), name)
    assert finding.good is not None
    assert "GB/s" in finding.measured


@pytest.mark.parametrize("name", ["one rank: configure and revoke", "deaths"])
def test_what_does_not_hold_is_said(name: str) -> None:
    name = "SIGKILLs" if name == "deaths" else name
    finding = examine(Broken(), name)
    assert finding.good is False
    assert finding.measured.startswith(("0 right sums", "OSError: no processes here"))


def test_the_findings_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "found.json"
    assert gpu_check.main(["--only", "capture", "--json", str(path)], Stand()) == 0
    (found,) = json.loads(path.read_text())
    assert found["name"] == "capture"
    assert found["good"] is True
    assert found["bar"] in capsys.readouterr().out
    assert gpu_check.main(["--only", "SIGKILLs"], Broken()) == 1


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert gpu_check.main([]) == 2
    assert (
        capsys.readouterr().out == "gpu_check: this machine has no CUDA device that torch can use\n"
    )
