"""python benchmarks/spare_cost.py [--groups 3 --step 0.1 --steps 100 --rounds 5] [--json FILE]

What a hot spare costs the groups that hold the shares, in their processor time a step: a spare on the same cores
takes their time, but not their processor time, so this holds where there are fewer cores than processes, too.

One job of `--groups` groups, as in `goodput.py` (a step is a sleep for forward and backward, an all-reduce of 340 kB,
the vote, and an update). In each round `--steps` steps with a spare, and as many after its death.
"Adds" is the median over the rounds of the difference, as a part of `--step`. Limit: 1 %.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import arguments, report
from recovery import Case, start_lighthouse

GOODPUT = str(Path(__file__).resolve().parent / "goodput.py")
WARM_STEPS = 20
"""After a member has come or gone."""
LIMIT_S = 300.0


class Member:
    """The process of a group, and its newest step."""

    def __init__(self, group: int, expected: int, lighthouse: str, step_s: float) -> None:
        self.step = -1
        own = {"GROUP": group, "EXPECTED": expected, "SUPERVISOR": os.getpid()}
        self._process = subprocess.Popen(
            [sys.executable, GOODPUT, "--worker", "ours", lighthouse, str(step_s), "1"],
            env={**os.environ, **{f"GOODPUT_{name}": str(value) for name, value in own.items()}},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if (said := json.loads(line))["kind"] == "commit":
                self.step = said["step"]

    def cpu_s(self) -> float:
        """Processor time of all its threads so far."""
        return time.clock_gettime((~self._process.pid << 3) | 2)  # as clock_getcpuclockid does

    def check(self) -> None:
        """Raises RuntimeError if it has ended."""
        if self._process.poll() is not None:
            raise RuntimeError(f"a group ended with code {self._process.returncode}")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def await_(done: Callable[[], bool], members: list[Member]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not done():
        for member in members:
            member.check()
        if time.monotonic() >= deadline:
            raise TimeoutError(f"the groups made no step together within {LIMIT_S:g} s")
        time.sleep(0.005)


def block(holders: list[Member], steps: int) -> tuple[float, float]:
    """Milliseconds a step: a holder's processor time, and from one commit to the next."""
    first = holders[0].step + WARM_STEPS
    await_(lambda: all(each.step >= first for each in holders), holders)
    began, cpu_s, at = holders[0].step, sum(each.cpu_s() for each in holders), time.monotonic()
    await_(lambda: holders[0].step >= began + steps, holders)
    made, took_s = holders[0].step - began, time.monotonic() - at
    used_s = sum(each.cpu_s() for each in holders) - cpu_s
    return used_s / made / len(holders) * 1e3, took_s / made * 1e3


@contextmanager
def running(groups: int, step_s: float) -> Iterator[tuple[list[Member], Callable[[], Member]]]:
    """The holders of the shares, once a first spare has come and gone; and what starts another."""
    stop, lighthouse = start_lighthouse(Case("", groups + 1, ""))
    members: list[Member] = []

    def start(group: int) -> Member:
        members.append(Member(group, groups + 1, lighthouse, step_s))
        return members[-1]

    try:
        holders = [start(group) for group in range(groups)]
        spare = start(groups)
        await_(lambda: min(each.step for each in members) >= WARM_STEPS, members)
        spare.kill()  # the first quorum may have taken any of them for the spare
        yield holders, lambda: start(groups)
    finally:
        for member in members:
            member.kill()
        stop()


def main() -> None:
    parser = arguments((__doc__ or "").split("\n\n")[1])
    parser.add_argument("--groups", type=int, default=3, help="beside the spare")
    parser.add_argument("--step", type=float, default=0.1, help="seconds of forward and backward")
    parser.add_argument("--steps", type=int, default=100, help="of a block")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    found: list[tuple[float, float, float, float]] = []
    with running(options.groups, options.step) as (holders, start_spare):
        for _ in range(options.rounds):
            spare = start_spare()
            together = lambda spare=spare: spare.step >= holders[0].step - 1 >= 0  # noqa: E731
            await_(together, [*holders, spare])
            with_it = block(holders, options.steps)
            spare.check()
            spare.kill()
            without = block(holders, options.steps)
            found.append((*with_it, *without))
            print(f"with it {with_it[0]:.3f} ms, without {without[0]:.3f} ms a step", flush=True)
    cpu, step, alone, step_alone = (statistics.median(each) for each in zip(*found, strict=True))
    adds = statistics.median((row[0] - row[2]) / options.step / 1e3 for row in found)
    columns = ["", "processor time of a holder a step, ms", "step, ms"]
    rows = [
        ["with a spare", f"{cpu:.3f}", f"{step:.1f}"],
        ["without", f"{alone:.3f}", f"{step_alone:.1f}"],
        ["adds", f"{adds:+.2%}", ""],
    ]
    report("What a hot spare costs the others", columns, rows, found, options.json)


if __name__ == "__main__":
    main()
