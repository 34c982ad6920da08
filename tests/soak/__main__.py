"""`python -m tests.soak --mode sync --minutes 30 --seed 1`: real processes under faults at random.

Replica groups of real processes train while processes are killed, stopped and told to end, all at a
time, too (they go on from checkpoints); while the lighthouse is killed and stopped; while members
are cut off from each other or from the lighthouse (Linux, root: each group has a network of its own);
and while strangers talk to their ports. A seed repeats the schedule, not its timing.

Prints a table, writes a JSON file, and exits with 1 unless

- equal versions always had equal bits, and each step one history;
- no member was told that its loop or its memory is at fault, which they are not;
- no process ended without a fault;
- the longest time without a commit was at most `--longest-gap`, not counting in it what the soak's own
  process stood still for meanwhile, when the machine ran other things (both are printed);
- at the end all groups came to the same version.

Modes: sync, async (quorums), group (commit="group"), ranks (two ranks a group), diloco.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.harness import networks, workers
from tests.soak.checks import Gap
from tests.soak.run import Soak
from tests.soak.schedule import MODES, RANKS, WEIGHTS, Shape, schedule


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak", description=__doc__.split("\n\n")[1]
    )
    parser.add_argument("--mode", choices=MODES, default=MODES[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--groups", type=int, default=3)
    parser.add_argument("--kinds", nargs="*", choices=list(WEIGHTS), help="faults; default: all")
    parser.add_argument("--longest-gap", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--no-networks", action="store_true", help="all on one loopback interface")
    parser.add_argument("--output", type=Path, help="default: soak-MODE-SEED.json")
    given = parser.parse_args(argv)

    shape = Shape(
        mode=given.mode,
        groups=given.groups,
        ranks=2 if given.mode == RANKS else 1,
        networks=not given.no_networks and networks.available(),
    )
    seconds = given.minutes * 60
    faults = schedule(given.seed, seconds, shape, given.kinds)
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:8.1f}  {line}", flush=True)

    if not shape.networks:
        say("no network namespaces: members are not cut off from each other")
    output = given.output or Path(f"soak-{given.mode}-{given.seed}.json")
    log = output.with_suffix(".log")
    soak = Soak(shape, faults, seconds, say=say, log=log)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that networks are removed
    try:
        soak.run()
    finally:
        workers.close()
    wrong = problems(soak, given.longest_gap)
    show(soak, wrong)
    output.write_text(json.dumps(result(soak, given, wrong), indent=1) + "\n")
    print(f"written to {output}, what was printed to {log}")
    return 1 if wrong else 0


def problems(soak: Soak, longest_gap_s: float) -> list[str]:
    """Why the run has failed; empty: it has not."""
    checker = soak.checker
    wrong = checker.violations[:10]
    wrong += [f"ended without a fault ({n} times): {said}" for said, n in soak.endings.items()]
    for gap in checker.gaps:
        if gap.seconds - gap.still_s > longest_gap_s:
            wrong.append(f"no commit for {in_words(gap)}")
    if not soak.settled:
        wrong.append(f"the groups did not come to one version at the end: {checker.state_of}")
    return wrong


def in_words(gap: Gap) -> str:
    """For a person."""
    still = (
        f" (for {gap.still_s:.1f} s of which the soak itself stood still)" if gap.still_s else ""
    )
    return f"{gap.seconds:.2f} s{still}, after {', '.join(gap.after) or 'no fault'}"


def show(soak: Soak, wrong: list[str]) -> None:
    """Print the table."""
    checker = soak.checker
    print(f"\n{'fault':18}{'times':>7}{'no commit for, median':>23}{'worst':>10}")
    for kind, count, median_s, worst_s in checker.table():
        print(f"{kind:18}{count:7}{median_s:21.2f} s{worst_s:8.2f} s")
    print("\nlongest times without a commit:")
    for gap in checker.gaps[:5]:
        print(f"  {in_words(gap)}")
    print(f"\nthe soak itself stood still for {checker.still_s:.1f} s in all")
    counts = {k: n for k, n in sorted(checker.counts.items()) if not k.startswith("fault: ")}
    print(f"\n{soak.shape.mode}: step {checker.highest_step}; {counts}")
    for line in wrong:
        print(f"WRONG: {line}")
    print("failed" if wrong else "all held")


def result(soak: Soak, given: argparse.Namespace, wrong: list[str]) -> dict[str, Any]:
    """The JSON file."""
    checker = soak.checker
    return {
        "mode": given.mode,
        "seed": given.seed,
        "minutes": given.minutes,
        "groups": soak.shape.groups,
        "ranks": soak.shape.ranks,
        "networks": soak.shape.networks,
        "highest_step": checker.highest_step,
        "counts": dict(checker.counts),
        "faults": {
            kind: {"times": n, "median_s": median, "worst_s": worst}
            for kind, n, median, worst in checker.table()
        },
        "stood_still_s": checker.still_s,
        "longest_gaps": [asdict(gap) for gap in checker.gaps],
        "wrong": wrong,
        "schedule": [fault.as_json() for fault in soak.faults],
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
