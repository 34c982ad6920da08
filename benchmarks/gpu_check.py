"""python benchmarks/gpu_check.py [--json FILE] [--only NAME]

What ft_core says of CUDA, checked on a machine with one GPU (torch 2.11 or later), in one command and
less than 9 minutes. Each check prints what it measured and its bar beside it. Members are processes that
share the GPU: NCCL_HOSTID tells NCCL that they are on different machines, so that it takes them and
connects them by sockets. Each check is a process of its own, so one that hangs or breaks the device costs
the others nothing. FILE is written after each check.

Beside torch it needs pyzmq, msgpack and xxhash. Where they can't be installed, carry their wheels (of the machine's
Python) and unpack them: `for w in *.whl; do python -m zipfile -e $w carried; done`, then
`PYTHONPATH=carried python benchmarks/gpu_check.py`.

Exit status: 0 if all bars hold, 1 if one does not, 2 where there is no CUDA device.

The checks run on the double of NCCL's semantics, too (tests/ft_core/process_group/test_gpu_check.py).
What they can't show with one GPU: links faster than loopback, and kernels of members that run at the same
time (processes share a GPU by turns, so the share of hidden communication is a hint).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import torch  # noqa: E402

from benchmarks.gpu import links, memory, training  # noqa: E402
from benchmarks.gpu.links import Answered  # noqa: E402
from benchmarks.gpu.place import Gpu, Place  # noqa: E402
from ft_core.process_group.torch_versions import OLDEST  # noqa: E402

LIMIT_S = 530.0
"""For all checks together."""
CHECK_LIMIT_S = 90.0
_SANITIZED = "numbers: float32"


@dataclass
class Finding:
    """What a check has found. `good`: None if it has no bar."""

    name: str
    measured: str
    bar: str
    good: bool | None
    seconds: float = 0.0


def versions(place: Place) -> Answered:
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    known = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return (
        f"torch {torch.__version__}, NCCL {nccl}, {device}",
        f"torch {OLDEST[0]}.{OLDEST[1]} or later",
        known >= OLDEST,
    )


def sanitized(place: Place) -> Answered:
    """Another check, while torch watches which stream uses which memory."""
    environment = {**os.environ, "TORCH_CUDA_SANITIZER": "1"}
    rc, text = run_within([*place.command, "--only", _SANITIZED], CHECK_LIMIT_S - 10.0, environment)
    said = [line for line in text.splitlines() if "CSAN" in line]
    if said or rc != 0:
        return (said or text.splitlines() or ["nothing"])[-1][:200], "clean", False
    return f"clean ({_SANITIZED})", "clean", True


CHECKS: dict[str, Callable[[Place], Answered]] = {
    "versions": versions,
    "one rank: configure and revoke": links.one_rank,
    "sums of 2 ranks": lambda place: links.sums(place, 2),
    "sums of 3 ranks": lambda place: links.sums(place, 3),
    "revokes in flight": links.revokes_in_flight,
    "SIGKILLs": links.deaths,
    "links cut": links.cut_links,
    "peer late by 3 timeouts": links.late_peer,
    "Gloo on a side stream": links.gloo_on_a_side_stream,
    "capture": links.captured,
    "contexts": training.contexts,
    **{
        f"numbers: {case}": lambda place, case=case: training.numbers(place, case)
        for case in training.CASES
    },
    "numbers: DiLoCo with int8": training.diloco,
    "sanitizer": sanitized,
    "overhead and idle time": training.overhead,
    "overlap": training.overlap,
    "device to host and back": memory.copies,
    **{
        f"codec {name}": lambda place, name=name: memory.codec(place, name)
        for name in ("int8", "int4", "fp8")
    },
    "heal": memory.heal,
}


def examine(place: Place, name: str) -> Finding:
    """One check; an error is a bar that does not hold."""
    began = time.monotonic()
    try:
        measured, bar, good = CHECKS[name](place)
    except Exception as error:  # the others shall run
        measured, bar, good = f"{type(error).__name__}: {error}", "no error", False
    return Finding(name, measured, bar, good, time.monotonic() - began)


def examine_apart(place: Place, name: str, limit_s: float) -> Finding:
    """One check in a process of its own."""
    began = time.monotonic()
    finding = Finding(name, "not begun: the time for all checks is over", "no error", False)
    if limit_s > 0:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "found.json"
            rc, text = run_within([*place.command, "--only", name, "--json", str(path)], limit_s)
            if path.exists():
                (found,) = json.loads(path.read_text())
                return Finding(**found)
        last = (text.splitlines() or ["nothing"])[-1][:200]
        ended = f"not ended after {limit_s:.0f} s" if rc is None else f"exit status {rc}"
        finding.measured = f"{ended}; it said: {last}"
    finding.seconds = time.monotonic() - began
    return finding


def run_within(
    command: Sequence[str], limit_s: float, environment: dict[str, str] | None = None
) -> tuple[int | None, str]:
    """The exit status and what the command has printed; None if it, and all that it has started, had to
    be killed."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            rc: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            rc = None
        try:
            os.killpg(process.pid, signal.SIGKILL)  # members that hang
        except ProcessLookupError:
            pass
        process.wait()
        output.seek(0)
        return rc, output.read()


def show(finding: Finding) -> None:
    sign = {True: "ok", False: "NOT MET", None: ""}[finding.good]
    print(
        f"{finding.name:32} {finding.measured} (bar: {finding.bar}) {sign} "
        f"[{finding.seconds:.1f} s]",
        flush=True,
    )


def main(arguments: Sequence[str] | None = None, place: Place | None = None) -> int:
    parser = argparse.ArgumentParser(description="check ft_core's CUDA path on one GPU")
    parser.add_argument("--json", type=Path, help="write the findings there")
    parser.add_argument("--only", choices=list(CHECKS), help="one check, in this process")
    options = parser.parse_args(arguments)
    if place is None:
        if not torch.cuda.is_available():
            print("gpu_check: this machine has no CUDA device that torch can use")
            return 2
        place = Gpu([sys.executable, str(Path(__file__).resolve())])
    give_up_at = time.monotonic() + LIMIT_S
    findings: list[Finding] = []
    for name in [options.only] if options.only else CHECKS:
        limit_s = min(CHECK_LIMIT_S, give_up_at - time.monotonic())
        finding = examine(place, name) if options.only else examine_apart(place, name, limit_s)
        findings.append(finding)
        show(finding)
        if options.json is not None:
            options.json.write_text(json.dumps([asdict(one) for one in findings], indent=1))
    return int(any(finding.good is False for finding in findings))


if __name__ == "__main__":
    raise SystemExit(main())
