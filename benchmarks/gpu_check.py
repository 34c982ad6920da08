"""python benchmarks/gpu_check.py [--json FILE] [--only NAME]

What ft_core says of CUDA, checked on a machine with one GPU (torch 2.11 or later), in one command and
less than 9 minutes. Each check prints what it measured and its bar beside it. Members are processes that
share the GPU: NCCL_HOSTID tells NCCL that they are on different machines, so that it takes them and
connects them by sockets. Each check is a process of its own with a time limit, which leaves time for all checks after it,
so one that hangs or breaks the device costs the others nothing. Those that measure a speed run alone. FILE is written after each check. Of one whose bar
does not hold it has the last that its processes said; of one that had to be killed, where each of their threads was.

Beside torch and numpy it needs pyzmq, msgpack and xxhash. Where they can't be installed, carry their wheels (of the machine's
Python) and unpack them: `for w in *.whl; do python -m zipfile -e $w carried; done`, then
`PYTHONPATH=carried python benchmarks/gpu_check.py`.

Exit status: 0 if all bars hold, 1 if one does not, 2 where there is no CUDA device.

The checks run on the double of NCCL's semantics, too (tests/ft_core/process_group/test_gpu_check.py).
What they can't show with one GPU: links faster than loopback, and kernels of members that run at the same
time (processes share a GPU by turns, so the share of hidden communication is a hint).
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import torch  # noqa: E402

try:
    from benchmarks.gpu import links, memory, training
    from benchmarks.gpu.links import Answered
    from benchmarks.gpu.place import STACKS, Gpu, Place
    from ft_core.process_group.torch_versions import OLDEST
    from lighthouse.files import replace_whole
except ModuleNotFoundError as missing:
    raise SystemExit(
        f"gpu_check needs {missing.name}: the top of {__file__} says how to carry it"
    ) from missing

LIMIT_S = 530.0
"""For all checks together."""
CHECK_LIMIT_S = 90.0
SHARE_S = 12.0
"""Kept for each check that is still to come."""
AT_A_TIME = 3
"""So many checks that measure no speed."""
_SANITIZED = "numbers: float32"
_SAID, _STACKS = 2_000, 12_000
"""How many characters of each are kept."""
_STACKS_WITHIN_S, _DIES_WITHIN_S = 3.0, 5.0


@dataclass
class Finding:
    """What a check has found. `good`: None if it has no bar."""

    name: str
    measured: str
    bar: str
    good: bool | None
    seconds: float = 0.0
    said: str = ""
    """If the bar does not hold: the end of what its processes have printed, and where their threads were."""


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
    command = [*place.command, "--only", _SANITIZED]
    ended = run_within(command, CHECK_LIMIT_S - 10.0, environment, apart=False)
    said = [line for line in ended.text.splitlines() if "CSAN" in line]
    if said or ended.rc != 0:
        return (said or [ended.last_line()])[-1][:200], "clean", False
    return f"clean ({_SANITIZED})", "clean", True


CORRECT: dict[str, Callable[[Place], Answered]] = {
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
    "ends of processes": links.ends,
    "contexts": training.contexts,
    **{
        f"numbers: {case}": lambda place, case=case: training.numbers(place, case)
        for case in training.CASES
    },
    "numbers: DiLoCo with int8": training.diloco,
    "sanitizer": sanitized,
}
"""Some at a time: most of each is the start of its processes."""
FAST: dict[str, Callable[[Place], Answered]] = {
    "overhead and idle time": training.overhead,
    "overlap": training.overlap,
    "device to host and back": memory.copies,
    **{
        f"codec {name}": lambda place, name=name: memory.codec(place, name)
        for name in ("int8", "int4", "fp8")
    },
    "heal": lambda place: memory.heal(place, same_host=False),
    "heal on one host": lambda place: memory.heal(place, same_host=True),
}
"""One after the other, when the others are done."""
CHECKS = CORRECT | FAST
LATER = {
    **{name: len(FAST) + left / AT_A_TIME for left, name in enumerate(reversed(CORRECT))},
    **{name: left for left, name in enumerate(reversed(FAST))},
}
"""For how many checks time is kept while this one runs; of those that run at a time, for one."""


def examine(place: Place, name: str) -> Finding:
    """One check; an error is a bar that does not hold."""
    began = time.monotonic()
    try:
        place.enter()
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
            ended = run_within([*place.command, "--only", name, "--json", str(path)], limit_s)
            found = json.loads(path.read_text())[0] if path.exists() else None
        how = f"not ended after {limit_s:.0f} s" if ended.rc is None else f"exit status {ended.rc}"
        if found is None:
            finding.measured = f"{how}; it said: {ended.last_line()}"
        else:
            finding = Finding(**found)
            if ended.rc not in (0, 1):  # it has found that, and then its process failed
                finding.measured, finding.good = f"{finding.measured}; its process: {how}", False
        if finding.good is False:
            finding.said = (ended.text[-_SAID:] + ended.stacks[:_STACKS]).strip()
    finding.seconds = time.monotonic() - began
    return finding


class Ended(NamedTuple):
    """How a command has ended. `rc`: its exit status; None if it was killed. `text`: what it has printed.
    `stacks`: where the threads of its processes were before it was killed."""

    rc: int | None
    text: str
    stacks: str

    def last_line(self) -> str:
        return (self.text.splitlines() or ["nothing"])[-1][:200]


def run_within(
    command: Sequence[str],
    limit_s: float,
    environment: dict[str, str] | None = None,
    *,
    apart: bool = True,
) -> Ended:
    """Run a command, and kill it after `limit_s`. `apart`: with all that it has started, also if it has
    ended; else the caller's own caller does that."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=apart,
        )
        rc, text = None, None
        try:
            rc = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            output.seek(0)
            text = output.read()
            _signal(process, STACKS, apart)
            _wait(process, _STACKS_WITHIN_S)
        finally:
            _signal(process, signal.SIGKILL, apart)  # members that hang, too
        _wait(process, _DIES_WITHIN_S)  # one in the driver may not
        output.seek(0)
        everything = output.read()
    text = everything if text is None else text
    return Ended(rc, text, everything[len(text) :])


def _signal(process: subprocess.Popen[bytes], number: int, apart: bool) -> None:
    try:
        if apart:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
    except ProcessLookupError:
        pass


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> None:
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        pass


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
        faulthandler.register(STACKS)
    give_up_at = time.monotonic() + LIMIT_S
    findings: list[Finding] = []

    def note(finding: Finding) -> None:
        findings.append(finding)
        show(finding)
        if options.json is not None:
            with replace_whole(options.json) as draft:
                draft.write_text(json.dumps([asdict(one) for one in findings], indent=1))

    def apart(name: str, later: float) -> Finding:
        return examine_apart(place, name, limit_of(give_up_at - time.monotonic(), later))

    if options.only:
        note(examine(place, options.only))
    else:
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            for done in as_completed([pool.submit(apart, name, LATER[name]) for name in CORRECT]):
                note(done.result())
        for name in FAST:
            note(apart(name, LATER[name]))
    return int(any(finding.good is False for finding in findings))


def limit_of(left_s: float, later: float) -> float:
    """Of a check, when so much time is left for it and `later` others: they get theirs, too."""
    return min(CHECK_LIMIT_S, max(left_s - later * SHARE_S, left_s / (later + 1)))


if __name__ == "__main__":
    raise SystemExit(main())
