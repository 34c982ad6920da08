"""benchmarks/gpu_check.py on the double of NCCL's semantics, and where there is no GPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks import gpu_check
from benchmarks.gpu import place
from benchmarks.gpu.place import Crew, Gpu, Member
from benchmarks.gpu.trace import Span, busy, hidden, idle_us, longest_gap, spans_of
from benchmarks.gpu_check import CHECKS, Finding, examine, examine_apart
from ft_core.process_group import ProcessGroup
from tests.harness import workers
from tests.harness.gpu_stand import Stand
from tests.harness.waiting import PATIENCE_S, until

MEASURED = {
    "device to host and back": "GB/s to the host",
    "codec int8": "launches",
    "codec int4": "launches",
    "codec fp8": "launches",
    "one rank: configure and revoke": "10 right sums",
    "revokes in flight": "5 revoked, the slowest",
    "overhead and idle time": "ms a step",
    "overlap": "of the collectives' time hidden",
    "heal": "GB/s, 0% of it read from the source's memory",
    "heal on one host": "GB/s, 100% of it read from the source's memory",
}
"""How fast a busy machine is is not these tests' business: only that it was measured."""
SHARDED = "numbers: fully_shard"
APART = ("sanitizer", SHARDED)
NO_GPU = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="module")
def sharded() -> tuple[Finding, list[str]]:
    """Of a check that leaves a socket: DTensor's caches keep the group of its mesh. Before the test, so
    that it is not taken for a leak."""
    # In torch 2.11 the first thread that shards a model must not end: the next one that does would crash.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))
    dist.destroy_process_group()
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

    def enter(self) -> None:
        pass

    def group(self, index: int, timeout_s: float) -> ProcessGroup:
        return self.gloo(timeout_s)

    def full(self, index: int, elements: int, value: float) -> torch.Tensor:
        return torch.full((elements,), value)


def test_members_are_processes_whose_sockets_are_cut() -> None:
    finding = examine(OnTheHost([]), "links cut")
    assert finding.good, finding


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members may take long to end: this machine is not theirs alone."""
    monkeypatch.setattr(place, "ENDS_WITHIN_S", PATIENCE_S)


@pytest.mark.usefixtures("patient")
def test_a_member_that_is_killed_is_named() -> None:
    """As the kernel does where there is no memory left."""
    with OnTheHost([]).crew(2, 30.0) as crew:
        crew.call(0, Member.address).result()  # it has started
        with pytest.raises(RuntimeError, match="member 1 is gone, exit status -9"):
            crew.call(1, ends_itself).result()
    assert crew.codes == [0, -signal.SIGKILL]


def ends_itself(member: Member) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.usefixtures("patient")
def test_processes_end_as_usual_whether_their_group_was_closed_or_not() -> None:
    finding = examine(OnTheHost([]), "ends of processes")
    assert (finding.good, finding.measured) == (True, "exit statuses 0, 0")


# ---------------------------------------------------------------- a check in a process of its own

FOUND = [asdict(Finding("capture", "it", "a bar", True, 1.0))]
WRITES = f"import sys; open(sys.argv[-1], 'w').write({json.dumps(json.dumps(FOUND))})\n"


def ended_by(script: str, limit_s: float = PATIENCE_S) -> Finding:
    """What is said of a check whose process runs `script`."""
    stand = Stand()
    stand.command = (sys.executable, "-c", script)
    return examine_apart(stand, "capture", limit_s)


def test_a_check_apart_is_found() -> None:
    found = ended_by(WRITES)
    assert (found.name, found.measured, found.good, found.said) == ("capture", "it", True, "")


@pytest.mark.parametrize(
    ("script", "measured"),
    [
        ("raise SystemExit('it broke')", "exit status 1; it said: it broke"),
        ("import os; print('hm', flush=True); os.abort()", "exit status -6; it said: hm"),
        ("import os; os.kill(os.getpid(), 9)", "exit status -9; it said: nothing"),
        (WRITES + "import os; os.abort()", "it; its process: exit status -6"),
    ],
)
def test_a_check_whose_process_fails_is_told(script: str, measured: str) -> None:
    found = ended_by(script)
    assert (found.good, found.measured) == (False, measured)


HANGS = """
import faulthandler, os, signal, subprocess, sys, time
faulthandler.register(signal.SIGUSR1)
def waits_here():
    time.sleep(600)
print(subprocess.Popen(['sleep', '600']).pid, flush=True)
print('hm', flush=True)
waits_here()
"""


@pytest.mark.parametrize("writes", ["", WRITES])
def test_a_check_that_hangs_costs_only_its_time_and_says_where(writes: str) -> None:
    found = ended_by(writes + HANGS, 3.0)
    assert found.good is False
    how = "it; its process: not ended after 3 s" if writes else "not ended after 3 s; it said: hm"
    assert found.measured == how
    pid, said, *stacks = found.said.splitlines()
    assert said == "hm"
    assert any("waits_here" in line for line in stacks)
    until(lambda: ended(int(pid)))


def ended(pid: int) -> bool:
    """Whether there is no such process, but one that nobody waits for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_checks_that_hang_leave_time_for_all_others() -> None:
    """Also the last one, if all before it hang."""
    lanes, limits = [gpu_check.LIMIT_S] * gpu_check.AT_A_TIME, []
    for name in CHECKS:
        if name == next(iter(gpu_check.FAST)):
            lanes = [min(lanes)]
        left_s = max(lanes)
        limits.append(gpu_check.limit_of(left_s, gpu_check.LATER[name]))
        lanes[lanes.index(left_s)] -= limits[-1]
    assert min(limits) >= gpu_check.SHARE_S
    assert max(limits) == limits[0] == gpu_check.CHECK_LIMIT_S
    assert min(lanes) >= 0
    assert gpu_check.limit_of(-1.0, 3) < 0
    assert "not begun" in examine_apart(Stand(), "capture", -1.0).measured


@pytest.mark.parametrize("name", ["xxhash", "msgpack", "zmq"])
def test_what_was_not_carried_is_named(name: str) -> None:
    ended = workers.run("torch", ["-c", without([name])], env=NO_GPU)
    assert f"gpu_check needs {name}" in ended.stderr
    assert "how to carry it" in ended.stderr


def test_nothing_else_needs_to_be_carried() -> None:
    program = without(
        ["click", "rich", "lightning", "accelerate", "transformers", "pytest", "tests"]
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], env=NO_GPU, capture_output=True, text=True
    )
    assert "CUDA device" in ended.stdout, ended.stderr


def without(names: Sequence[str]) -> str:
    """A program that is gpu_check where these packages can't be imported."""
    script = Path(gpu_check.__file__)
    return (
        "import runpy, sys\n"
        "ours = ('ft_core', 'lighthouse', 'benchmarks')\n"  # which a fork has behind it
        "for name in [m for m in sys.modules if m.partition('.')[0] in ours]: del sys.modules[name]\n"
        f"sys.modules.update(dict.fromkeys({list(names)}))\n"
        f"sys.argv = [{str(script)!r}]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )


def test_what_the_sanitizer_says_is_told() -> None:
    stand = Stand()
    stand.command = (sys.executable, "-c", "print('CSAN detected a possible data race')")
    found = examine(stand, "sanitizer")
    assert (found.good, found.measured) == (False, "CSAN detected a possible data race")
    stand.command = (sys.executable, "-c", "")
    found = examine(stand, "sanitizer")
    assert (found.good, found.measured) == (True, "clean (numbers: float32)")
    # What hangs in it is killed with this check's own process.
    stand.command = (sys.executable, "-c", "import os; print('CSAN', os.getpgrp())")
    assert examine(stand, "sanitizer").measured == f"CSAN {os.getpgrp()}"


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
    assert longest_gap(spans) == "0.003 ms between ncclDevKernel and Memcpy"
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
    found = [found["name"] for found in json.loads(path.read_text())]
    assert sorted(found) == sorted(CHECKS)
    fast = list(gpu_check.FAST)
    assert found[-len(fast) :] == fast


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert gpu_check.main([]) == 2
    assert (
        capsys.readouterr().out == "gpu_check: this machine has no CUDA device that torch can use\n"
    )
