"""benchmarks/gpu_check.py on the double of NCCL's semantics, and where there is no GPU."""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu.place import Crew, Gpu
from benchmarks.gpu.trace import Span, busy, hidden, idle_us, spans_of
from benchmarks.gpu_check import CHECKS, Finding, examine, examine_apart
from ft_core.process_group import ProcessGroup
from tests.harness.gpu_stand import Stand

MEASURED = {
    "device to host and back": "GB/s to the host",
    "codec int8": "launches",
    "codec int4": "launches",
    "codec fp8": "launches",
    "one rank: configure and revoke": "10 right sums",
    "revokes in flight": "5 revoked, the slowest",
    "overhead and idle time": "ms a step",
    "overlap": "of the collectives' time hidden",
    "heal": "healed at",
}
"""How fast a busy machine is is not these tests' business: only that it was measured."""
SHARDED = "numbers: fully_shard"
APART = ("sanitizer", SHARDED)


@pytest.fixture(scope="module")
def sharded() -> tuple[Finding, list[str]]:
    """Of a check that leaves a socket: DTensor's caches keep the group of its mesh. Before the test, so
    that it is not taken for a leak."""
    stand = Stand()
    return examine(stand, SHARDED), stand.wires.faults


class Broken(Stand):
    """A place that gives other numbers, and no groups for crews."""

    def full(self, index: int, elements: int, value: float) -> torch.Tensor:
        return super().full(index, elements, value + 1)

    def crew(self, size: int, timeout_s: float) -> AbstractContextManager[Crew]:
        raise OSError("no processes here")


@pytest.mark.parametrize("name", [name for name in CHECKS if name not in APART])
def test_the_bar_holds_on_the_double(name: str) -> None:
    stand = Stand()
    finding = examine(stand, name)
    if name in MEASURED:
        assert MEASURED[name] in finding.measured, finding
        assert "inf" not in finding.measured
        assert "NOT HEALED" not in finding.measured
        assert finding.good is not None
    else:
        assert finding.good, finding
    assert not stand.wires.faults


def test_the_bar_holds_with_fully_shard(sharded: tuple[Finding, list[str]]) -> None:
    finding, faults = sharded
    assert finding.good, finding
    assert not faults


@pytest.mark.parametrize("name", ["one rank: configure and revoke", "SIGKILLs"])
def test_what_does_not_hold_is_said(name: str) -> None:
    finding = examine(Broken(), name)
    assert finding.good is False
    assert finding.measured.startswith(("0 right sums", "OSError: no processes here"))


class OnTheHost(Gpu):
    """The GPU's place, with its processes and its way to cut links, on the CPU with Gloo."""

    elements, rounds = 1 << 16, 5

    def group(self, index: int, timeout_s: float) -> ProcessGroup:
        return self.gloo(timeout_s)

    def full(self, index: int, elements: int, value: float) -> torch.Tensor:
        return torch.full((elements,), value)


def test_members_are_processes_whose_sockets_are_cut() -> None:
    finding = examine(OnTheHost([]), "links cut")
    assert finding.good, finding


def test_a_check_apart_is_found() -> None:
    stand = Stand()
    write = "import sys; open(sys.argv[-1], 'w').write(sys.argv[1])"
    expected = Finding("capture", "it", "a bar", True, 1.0)
    stand.command = (sys.executable, "-c", write, json.dumps([asdict(expected)]))
    assert examine_apart(stand, "capture", 60.0) == expected


def test_a_check_that_does_not_end_costs_only_its_time(tmp_path: Path) -> None:
    stand = Stand()
    stand.command = (sys.executable, "-c", "print('hm', flush=True); import time; time.sleep(600)")
    found = examine_apart(stand, "capture", 2.0)
    assert found.good is False
    assert found.measured.startswith("not ended after 2 s")
    stand.command = (sys.executable, "-c", "raise SystemExit('it broke')")
    found = examine_apart(stand, "capture", 60.0)
    assert found.measured == "exit status 1; it said: it broke"
    assert "not begun" in examine_apart(stand, "capture", -1.0).measured


def test_what_the_sanitizer_says_is_told() -> None:
    stand = Stand()
    stand.command = (sys.executable, "-c", "print('CSAN detected a possible data race')")
    found = examine(stand, "sanitizer")
    assert (found.good, found.measured) == (False, "CSAN detected a possible data race")
    stand.command = (sys.executable, "-c", "")
    found = examine(stand, "sanitizer")
    assert (found.good, found.measured) == (True, "clean (numbers: float32)")


def test_a_trace_is_read() -> None:
    events = [
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 0.0, "dur": 10.0},
        {"ph": "X", "cat": "kernel", "name": "ncclDevKernel", "ts": 8.0, "dur": 4.0},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 90.0},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy", "ts": 15.0, "dur": 1.0},
        {"ph": "i", "cat": "kernel", "name": "gemm", "ts": 80.0},
    ]
    spans = spans_of({"traceEvents": events}, {"kernel", "gpu_memcpy"})
    assert [span.name for span in spans] == ["gemm", "ncclDevKernel", "Memcpy"]
    assert busy(spans) == [(0.0, 12.0), (15.0, 16.0)]
    assert idle_us(spans) == 3.0
    assert hidden(spans, lambda name: "nccl" in name) == 0.5
    assert hidden(spans, lambda name: "none" in name) is None
    assert idle_us([]) == 0.0
    assert busy([Span("a", 0.0, 5.0), Span("b", 1.0, 2.0)]) == [(0.0, 5.0)]


def test_the_findings_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "found.json"
    assert gpu_check.main(["--only", "capture", "--json", str(path)], Stand()) == 0
    (found,) = json.loads(path.read_text())
    assert found["name"] == "capture"
    assert found["good"] is True
    assert found["bar"] in capsys.readouterr().out
    assert gpu_check.main(["--only", "SIGKILLs"], Broken()) == 1

    def apart(place: object, name: str, limit_s: float) -> Finding:
        assert 0 < limit_s <= gpu_check.CHECK_LIMIT_S
        return Finding(name, "it", "a bar", name != "heal")

    monkeypatch.setattr(gpu_check, "examine_apart", apart)
    assert gpu_check.main(["--json", str(path)], Stand()) == 1
    assert [found["name"] for found in json.loads(path.read_text())] == list(CHECKS)


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert gpu_check.main([]) == 2
    assert (
        capsys.readouterr().out == "gpu_check: this machine has no CUDA device that torch can use\n"
    )
