"""Replica groups of an ordinary script are stopped (SIGSTOP) at random, longer than their timeout, and go on.

    python -m tests.soak.stops --script fabric_loop --groups 3 --seconds 40 --seed 1

Ends with an error if two groups differ at a step, a script fails, or the job does not end. A seed chooses when
and for how long; what the processes do meanwhile is the machine's.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import IO

from tests.ft_accelerate.installed import installed
from tests.ft_lightning.harness import NOT_OURS
from tests.harness import workers
from tests.harness.waiting import PATIENCE_S, gone

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ("fabric_loop", "accelerate_loop", "two_fits")
LAUNCH = ["-m", "accelerate.commands.accelerate_cli", "launch", "--cpu", "--use_fault_tolerance"]
LAUNCH += ["--fault_tolerance_keep_state_s", "0"]
LONGEST_S = 4.0
TIMEOUT_S = 1.0
"""A process that was stopped for longer may end, since no lighthouse has answered it. If it held the newest state alone, the
job goes back, which is said, and steps differ: a longer timeout leaves that out."""
EVERY_S = 1.0
"""A group is stopped about as often as that, while another runs."""


def soak(
    folder: Path,
    script: str,
    *,
    groups: int,
    seconds: float,
    steps: int,
    seed: int,
    timeout_s: float = TIMEOUT_S,
) -> dict[int, int]:
    """Run it to `steps`, with stops for `seconds`; how many groups have made each step.

    Raises AssertionError for what must not happen."""
    said = folder / "said"
    with said.open("wb") as out:
        job = _start(script, [str(folder), str(groups), str(steps), str(timeout_s)], out)
    try:
        _stop_some(folder, groups, time.monotonic() + seconds, random.Random(seed), job)
        assert job.wait(PATIENCE_S) == 0, said.read_text()
    finally:
        job.end()
    digests: dict[int, list[str]] = defaultdict(list)
    for path in folder.glob("[0-9].*"):
        lines = [line.split() for line in path.read_text().splitlines()]
        made = [(int(step), digest) for step, digest in lines]
        following = [*(step for step, _ in made[1:]), steps + 1]
        for (step, digest), after in zip(made, following, strict=False):
            if after == step + 1:  # else it has healed in that batch of its script's
                digests[step].append(digest)
    differing = [step for step, found in digests.items() if len(set(found)) > 1]
    assert not differing, f"steps {differing} differ between groups; {said.read_text()}"
    assert max(digests) >= steps, said.read_text()
    return {step: len(found) for step, found in digests.items()}


def _start(script: str, arguments: list[str], out: IO[bytes]) -> workers.Worker:
    folder, groups, _, timeout_s = arguments
    command = [str(Path(__file__).with_name(f"{script}.py")), *arguments]
    if script != "accelerate_loop":
        env = {name: value for name, value in os.environ.items() if not name.startswith(NOT_OURS)}
        env["PYTHONPATH"] = str(ROOT)
        return workers.start("lightning", command, env=env, stdout=out, stderr=out)
    flags = ["--fault_tolerance_timeout_s", timeout_s, "--num_processes", groups]
    launch, env = [*LAUNCH, *flags, *command], installed(Path(folder))
    return workers.start("accelerate", launch, env=env, stdout=out, stderr=out)


def _stop_some(
    folder: Path, groups: int, until: float, rng: random.Random, job: workers.Worker
) -> None:
    """One is stopped while another trains, and again when it has trained since: one group alone does not
    come to the job's end."""
    stopped: dict[Path, float] = {}
    logged: dict[Path, int] = {}
    while time.monotonic() < until and job.poll() is None:
        living = [path for path in folder.glob("[0-9].*") if not gone(_pid(path))]
        trains = [
            path
            for path in living
            if path not in stopped and path.stat().st_size > logged.get(path, 0)
        ]
        if len(living) == groups and len(trains) > 1:
            chosen = rng.choice(sorted(trains))
            _signal(chosen, signal.SIGSTOP)
            logged[chosen] = chosen.stat().st_size
            stopped[chosen] = time.monotonic() + rng.uniform(0.3, LONGEST_S)
        time.sleep(rng.uniform(0.0, EVERY_S))  # when, is what the seed chooses
        _go_on(stopped, time.monotonic())
    _go_on(stopped, float("inf"))


def _go_on(stopped: dict[Path, float], now: float) -> None:
    for path in [path for path, until in stopped.items() if until <= now]:
        del stopped[path]
        _signal(path, signal.SIGCONT)


def _pid(log: Path) -> int:
    return int(log.suffix[1:])


def _signal(log: Path, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(_pid(log), number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--script", choices=SCRIPTS, default=SCRIPTS[0])
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=40.0, help="of stops")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout-s", type=float, default=TIMEOUT_S)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        made = soak(Path(folder), **vars(chosen))
    alone = sum(count == 1 for count in made.values())
    print(f"{len(made)} steps, {alone} of them by one group; equal at all that several have made")


if __name__ == "__main__":
    main()
