"""A thousand seeded runs of the real machines, as many as the time of a run of all tests allows; `python -m tests.sim
--seeds FROM:TO` has more. A failing seed: `python -m tests.sim --seed N
--trace`; once understood it becomes a text scenario in `tests/scenario`, with what was wrong."""

from __future__ import annotations

import pytest

from tests.sim.profile import dense_profile_of
from tests.sim.run import run

BLOCK = 250


@pytest.mark.parametrize("first", range(0, 1_000, BLOCK))
def test_promises_hold(first: int) -> None:
    commits = heals = discards = 0
    for seed in range(first, first + BLOCK):
        try:
            result = run(seed)
        except Exception as error:
            raise AssertionError(
                f"seed {seed} (python -m tests.sim --seed {seed} --trace): {error}"
            ) from error
        commits, heals = commits + result.commits, heals + result.heals
        discards += result.discards
    # Runs in which nothing happens would pass, too.
    assert commits > 20 * BLOCK
    assert heals > BLOCK / 2
    assert discards > BLOCK / 2


def test_promises_hold_under_many_faults_in_a_short_time() -> None:
    for seed in range(BLOCK):
        try:
            run(seed, dense_profile_of(seed))
        except Exception as error:
            raise AssertionError(
                f"seed {seed} (python -m tests.sim --dense --seed {seed} --trace): {error}"
            ) from error


@pytest.mark.parametrize("seed", [3, 11, 42])
def test_a_seed_replays_exactly(seed: int) -> None:
    traces: list[list[str]] = []
    results = [run(seed, tracing=True, on_trace=traces.append) for _ in range(2)]
    assert results[0] == results[1]
    assert traces[0] == traces[1]
    assert len(traces[0]) > 50
