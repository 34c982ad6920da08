"""The quorum rules against a deliberately dumb twin, written from their text (R1 to R7) alone."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from lighthouse.machine.rules import (
    Candidate,
    Choice,
    Position,
    Roll,
    Situation,
    decide,
    natural,
    too_early,
)
from lighthouse.wire.messages import TORN

NAMES = [f"replica_{n}" for n in (0, 1, 2, 9, 10, 11, 100)]


def whole(rng: Random) -> Position:
    return Position(rng.randint(0, 2), rng.choice("ab"))


def position(rng: Random) -> Position:
    torn = rng.random() < 0.25
    return Position(rng.randint(0, 3), TORN + "x") if torn else whole(rng)


def origin(rng: Random) -> tuple[int, int]:
    return (0, 0) if rng.random() < 0.3 else (rng.choice((1, 2)), rng.choice((1, 2)))


def roll(rng: Random, here: list[str]) -> Roll:
    away = sorted(set(NAMES) - set(here))
    expected = rng.choice([0, 0, 1, 2, 3, 5])
    return Roll(
        expected=expected,
        needed=rng.choice([expected, min(expected, 2)]),
        here=tuple(here),
        dead={name: rng.random() < 0.5 for name in rng.sample(away, rng.randint(0, 2))},
        since=10.0,
        join_timeout_s=5.0,
        go_on_after_s=rng.choice([math.inf, 5.0, 8.0]),
    )


def situation(rng: Random) -> tuple[Situation, float]:
    names = rng.sample(NAMES, rng.randint(0, 5))
    ids = {name: f"id-{name}" for name in NAMES}
    arrivals = rng.sample(range(len(names)), len(names))
    candidates = tuple(
        Candidate(ids[name], name, position(rng), rng.random() < 0.75, at, *origin(rng))
        for name, at in zip(names, arrivals, strict=True)
    )
    return (
        Situation(
            candidates=candidates,
            min_replicas=rng.randint(1, 4),
            roll=roll(rng, names),
            previous=tuple(rng.sample(sorted(ids.values()), rng.randint(0, 4))),
            head=whole(rng) if rng.random() < 0.5 else None,
            branch=rng.choice((0, 1, 2)),
        ),
        rng.choice([10.0, 14.9, 15.0, 17.9, 18.0, 1e9]),
    )


def situations(count: int) -> Iterator[tuple[Situation, float, Random]]:
    """With the generator that made each, for more of it."""
    for seed in range(count):
        rng = Random(seed)
        yield *situation(rng), rng


# ---------------------------------------------------------------- the twin: slow and obvious


def twin_order(name: str) -> list[tuple[str, int | str]]:
    """Digits as numbers, before texts at the same place."""
    return [("0", int(p)) if p.isdigit() else ("1", p) for p in re.findall(r"\d+|\D+", name)]


def twin_position(s: Situation) -> Position | None:
    """R2: the head; then what a quorum has held, first of the branch, in the newest
    quorum; then the highest step of a whole state; then what most hold; then the first."""
    pool = [c for c in s.candidates if TORN not in c.position.lineage]
    everywhere = [c.position for c in pool]
    if not pool:
        return None
    if s.head in everywhere:
        return s.head
    if any(c.held for c in pool):
        pool = [c for c in pool if c.held]
        pool = [c for c in pool if c.genesis == s.branch] or pool
        newest = max(c.held for c in pool)
        pool = [c for c in pool if c.held == newest]
    top = max(c.position.step for c in pool)
    pool = [c for c in pool if c.position.step == top]
    most = max(everywhere.count(c.position) for c in pool)
    for c in sorted(pool, key=lambda c: (twin_order(c.name), c.arrival)):
        if everywhere.count(c.position) == most:
            return c.position
    raise AssertionError("unreachable")


def twin_ranks(chosen: list[Candidate], previous: tuple[str, ...]) -> list[str]:
    """R7."""
    ranks: list[str] = []
    for replica_id in previous:
        for c in chosen:
            if c.replica_id == replica_id:
                ranks.append(c.replica_id)
    started = bool(ranks)
    newcomers = [c for c in chosen if c.replica_id not in ranks]
    while newcomers:
        first = newcomers[0]
        for c in newcomers:
            mine = (c.arrival,) if started else (twin_order(c.name), c.arrival)
            best = (first.arrival,) if started else (twin_order(first.name), first.arrival)
            if mine < best:
                first = c
        ranks.append(first.replica_id)
        newcomers.remove(first)
    return ranks


def twin(s: Situation, now: float) -> list[str] | None:
    """The members in rank order, or None for "wait"."""
    if not s.candidates:
        return None
    position = twin_position(s)
    if position is None:
        return None
    chosen = []
    for c in s.candidates:  # R3
        if c.position != position and not c.can_heal:
            continue
        chosen.append(c)
    if len(chosen) < s.min_replicas:  # R1
        return None
    return twin_ranks(chosen, s.previous)


def twin_awaits(roll: Roll, now: float) -> bool:
    """R6: whether a name is missing."""
    if roll.expected == 0:
        return now < 15.0
    present = [
        *roll.here,
        *(name for name, declared in roll.dead.items() if declared or now >= 15.0),
    ]
    if now < 15.0:
        return len(present) < roll.expected
    return len(present) < roll.needed and now < 10.0 + roll.go_on_after_s


# ---------------------------------------------------------------- comparisons


def test_rules_agree_with_the_twin() -> None:
    chosen = 0
    for case, now, _ in situations(10_000):
        verdict = decide(case, now)
        members = twin(case, now)
        assert verdict.reason
        if members is None:
            assert verdict.choice is None, case
            continue
        newest, chosen = twin_position(case), chosen + 1
        behind = frozenset(c.replica_id for c in case.candidates if c.position != newest)
        expected = Choice(tuple(members), newest, behind & frozenset(members))
        assert verdict.choice == expected, (case, now)
    assert 2_000 < chosen < 8_000


def test_time_alone_changes_the_answer_only_when_announced() -> None:
    """Shells sleep until `wake_at`: before it nothing may change, at it the answer must, or be that
    something else is waited for."""
    for case, _, _ in situations(5_000):
        announced(case)


def announced(situation: Situation) -> None:
    now = situation.roll.since
    for _ in range(3):
        verdict = decide(situation, now)
        if verdict.wake_at is None:
            assert decide(situation, 1e9).choice == verdict.choice
            return
        assert verdict.choice is None
        before = verdict.wake_at - 1e-6
        assert decide(situation, before) == verdict
        now = verdict.wake_at
        assert decide(situation, now) != verdict
    raise AssertionError("it wakes up in vain")


def test_what_is_waited_for_in_numbers() -> None:
    """R1; members of an earlier quorum, until the join timeout; R6."""
    for case, now, rng in situations(5_000):
        roll, least, first = case.roll, case.min_replicas, rng.random() < 0.5
        missed = set(rng.sample(NAMES, max(0, rng.randint(-3, 4))))
        early = too_early(roll, least, first, now, missed)
        awaited = (
            len(roll.here) < least or (missed and now < 15.0) or (first and twin_awaits(roll, now))
        )
        assert bool(awaited) == (early is not None), (case, now, first, missed)
        if early is not None and early.wake_at is not None:
            assert early.wake_at > now
            assert too_early(roll, least, first, early.wake_at, missed) != early


def test_the_order_in_which_candidates_are_listed_does_not_matter() -> None:
    for case, now, rng in situations(1_000):
        shuffled = tuple(rng.sample(case.candidates, len(case.candidates)))
        assert decide(replace(case, candidates=shuffled), now) == decide(case, now), case


@given(st.lists(st.text("ab019", max_size=6)))
def test_natural_order_is_the_twins(names: list[str]) -> None:
    assert sorted(names, key=natural) == sorted(names, key=twin_order)


def test_natural_order_of_replica_names() -> None:
    assert sorted(NAMES, key=natural) == NAMES
