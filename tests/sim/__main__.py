"""Replay or search: `python -m tests.sim --seed N [--trace]`, `... --seeds 0:2000 [--jobs 2]`."""

from __future__ import annotations

import argparse
import contextlib
import gc
import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial

from tests.sim.profile import Profile, dense_profile_of, profile_of
from tests.sim.run import Result, run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="run this one")
    parser.add_argument("--seeds", default="0:2000", help="FIRST:END, run all of them")
    parser.add_argument("--trace", action="store_true", help="print what happened")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at a failure")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the seeds")
    parser.add_argument("--dense", action="store_true", help="many faults of few kinds, soon")
    options = parser.parse_args()
    profile = dense_profile_of if options.dense else profile_of
    if options.seed is not None:
        return _one(options.seed, profile(options.seed), options.trace)
    first, end = (int(part) for part in options.seeds.split(":"))
    return _many(range(first, end), profile, options.keep_going, options.jobs)


def _one(seed: int, profile: Profile, trace: bool) -> int:
    def show(lines: list[str]) -> None:
        if trace:
            print("\n".join(lines))

    try:
        print(run(seed, profile, tracing=trace, on_trace=show))
    except AssertionError:
        traceback.print_exc()
        return 1
    return 0


RUNS_A_COLLECTION = 20
"""A run leaves circles behind: they are collected after so many runs, and never in between."""


def _quiet() -> None:
    gc.freeze()
    gc.disable()


def _try(seed: int, profile: Callable[[int], Profile]) -> Result | str:
    """The result of one run, or what is wrong with it."""
    if seed % RUNS_A_COLLECTION == 0:
        gc.collect()
    try:
        return run(seed, profile(seed))
    except Exception as error:  # a broken machine may fail in any way
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"seed {seed}: {type(error).__name__} {error} [{where.name}:{where.lineno}]"


def _many(seeds: range, profile: Callable[[int], Profile], keep_going: bool, jobs: int) -> int:
    began, ran, failed = time.perf_counter(), 0, 0
    commits = events = 0
    worst = (0.0, seeds.start)
    _quiet()
    with multiprocessing.Pool(jobs, _quiet) if jobs > 1 else contextlib.nullcontext() as pool:
        each = partial(_try, profile=profile)
        results = map(each, seeds) if pool is None else pool.imap(each, seeds, chunksize=50)
        for seed, result in zip(seeds, results, strict=True):
            ran += 1
            if isinstance(result, str):
                failed += 1
                print(result, flush=True)
                if not keep_going:
                    break
                continue
            commits, events = commits + result.commits, events + result.events
            if not result.woken:
                worst = max(worst, (result.recovered_s, seed))
    seconds = time.perf_counter() - began
    print(
        f"{ran} seeds, {failed} failed, {commits} commits, {events} events, {seconds:.1f} s "
        f"({ran / seconds:.0f} a second); slowest recovery {worst[0]:.1f} s (seed {worst[1]})"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
