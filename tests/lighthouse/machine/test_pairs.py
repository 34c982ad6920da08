"""Which end of a bad pair is left out, and when a pair is tried again: D1 to D3 of `pairs.py`."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from lighthouse.machine.members import Members
from lighthouse.machine.pairs import (
    ANSWER_S,
    COMMITS_TO_FORGET,
    LONGEST_REST_S,
    MOST_PAIRS,
    Pair,
    Pairs,
    leave_out,
)
from lighthouse.wire.messages import JobKey, Join

NAMES = "abcdef"


def members_of(*names: str) -> Members:
    members = Members()
    for name in names:
        join = Join(JobKey(), name, name, 0, "root", (name.encode(),))
        members.put(join, name.encode())
    return members


def pairs_of(*names: str) -> Pairs:
    return Pairs(members_of(*names).by_id)


def every_graph(count: int) -> list[frozenset[Pair]]:
    edges = [frozenset(pair) for pair in combinations(NAMES[:count], 2)]
    return [
        frozenset(edge for at, edge in enumerate(edges) if bits >> at & 1)
        for bits in range(1 << len(edges))
    ]


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_what_is_left_can_connect(count: int) -> None:
    """For every graph of bad pairs, and with any one member behind or not."""
    order = NAMES[:count]
    for bad in every_graph(count):
        for behind in ((), (order[0],), tuple(order[1:])):
            left = leave_out(order, bad, behind)
            kept = [m for m in order if m not in left]
            assert kept
            assert not any(pair <= set(kept) for pair in bad)
            assert all(frozenset((m, o)) in bad for m, others in left.items() for o in others)
            assert all(others for others in left.values())
            holders = [m for m in order if m not in behind]
            assert len(holders) != 1 or holders[0] in kept, "the last holder of the state stays"
        kept_all = count - len(leave_out(order, bad, ()))
        largest = max(
            size
            for size in range(1, count + 1)
            for some in combinations(order, size)
            if not any(pair <= set(some) for pair in bad)
        )
        assert kept_all == largest


def test_ties_are_for_the_up_to_date_and_the_first() -> None:
    bad = [frozenset("ab")]
    assert leave_out("ab", bad, ()) == {"b": ["a"]}
    assert leave_out("ba", bad, ()) == {"a": ["b"]}
    assert leave_out("ab", bad, ("a",)) == {"a": ["b"]}
    assert leave_out("abc", [*bad, frozenset("ac")], ()) == {"a": ["b", "c"]}
    assert leave_out("abc", [*bad, frozenset("x"), frozenset("ax")], ()) == {"b": ["a"]}
    assert leave_out("abc", [*bad, frozenset("c")], ()) == {"c": [], "b": ["a"]}
    assert leave_out("a", [frozenset("a")], ()) == {}
    assert leave_out("abc", bad, ("a",)) == {"a": ["b"]}  # also where several hold the state
    alone = [
        frozenset("a"),
        frozenset("b"),
    ]  # bad with every other one: they go first, and c may stay
    assert leave_out("abc", [*alone, frozenset("ac"), frozenset("bc")], ()) == {
        "a": ["c"],
        "b": ["c"],
    }


def test_rests_grow_until_both_ends_can_connect() -> None:
    pairs, now, rests = pairs_of("a", "b"), 0.0, []
    assert pairs.deadline() is None
    pairs.reported("a", ["b"], (), now)
    pairs.reported("b", ["a"], (), now)  # of the same failure
    for _ in range(9):
        due = pairs.deadline()
        assert due is not None
        assert pairs.expire(due - 0.01) == []
        assert pairs.bad() == {frozenset("ab")}
        rests.append(due - now)
        assert pairs.expire(due) == [("a", "b"), ("b", "a")]
        pairs.reported("a", (), ["b"], due)
        pairs.reported("a", (), ["b"], due)  # one end's word again
        now = due + 0.5
        pairs.reported("b", ["a"], (), now)
    assert rests == [1, 2, 4, 8, 16, 32, LONGEST_REST_S, LONGEST_REST_S, LONGEST_REST_S]
    due = pairs.deadline()
    assert due is not None
    pairs.expire(due)
    for end, other in ("ab", "ba"):
        assert pairs.apart("a", "bc")
        pairs.reported(end, (), [other], due + 99)
    assert not pairs.apart("a", "bc")
    assert pairs.deadline() is None


def test_the_deadline_of_many_pairs_is_known_without_a_look_at_them() -> None:
    """The server asks after each message."""

    class Counted(dict[Any, Any]):
        looks = 0

        def values(self) -> Any:
            self.looks += 1
            return super().values()

    ends = [f"m{number}" for number in range(60)]
    pairs = pairs_of(*ends)
    pairs._pairs = counted = Counted()
    for number, end in enumerate(ends):
        pairs.reported(end, ends[number + 1 :], (), number / 100)
    assert len(counted) == 60 * 59 // 2
    assert {pairs.deadline() for _ in range(1_000)} == {1.0}
    assert counted.looks == 1
    pairs.expire(1.0)
    assert {pairs.deadline() for _ in range(1_000)} == {1.01}
    pairs.committed(ends)
    assert {pairs.deadline() for _ in range(1_000)} == {None}
    assert counted.looks == 3


def test_pairs_of_members_that_are_gone_wake_the_server_once() -> None:
    here: dict[str, Any] = dict.fromkeys("abc")
    pairs = Pairs(here)
    pairs.reported("a", ["b"], (), 0.0)
    pairs.reported("c", ["c"], (), 1.0)
    del here["b"]
    assert pairs.deadline() == 1.0
    assert pairs.expire(1.0) == []
    assert pairs.deadline() == 2.0
    assert pairs.bad() == {frozenset("c")}


def test_an_end_that_does_not_answer_is_asked_again() -> None:
    """The question or the answer was lost: that says nothing about the pair, so its rest does not grow."""
    pairs = pairs_of("a", "b")
    pairs.reported("a", ["b"], (), 0.0)
    assert pairs.expire(1.0) == [("a", "b"), ("b", "a")]
    assert pairs.deadline() == 1.0 + ANSWER_S
    assert pairs.expire(1.0 + ANSWER_S) == [("a", "b"), ("b", "a")]
    pairs.reported("a", (), ["b"], 7.0)
    assert pairs.expire(1.0 + 2 * ANSWER_S) == [("b", "a")]
    assert pairs.bad()
    pairs.reported("b", ["a"], (), 12.0)
    assert pairs.deadline() == 14.0  # only now it has failed for the second time
    assert pairs.expire(14.0) == [("a", "b"), ("b", "a")]
    pairs.reported("b", (), ["a"], 14.0)
    assert pairs.expire(14.0 + ANSWER_S) == [("a", "b")]
    pairs.reported("a", (), ["b"], 20.0)
    assert not pairs.bad()


def test_answers_that_were_not_asked_for_change_nothing() -> None:
    pairs = pairs_of("a", "b")
    pairs.reported("a", ["stranger"], (), 0.0)
    assert not pairs
    pairs.reported("a", ["b"], (), 0.0)
    pairs.reported("a", (), ["b"], 0.5)
    pairs.reported("b", (), ["a"], 0.5)
    assert pairs.bad() == {frozenset("ab")}


def test_commits_together_forget() -> None:
    pairs = pairs_of("a", "b", "c")
    pairs.reported("a", ["b"], (), 0.0)
    pairs.committed("ac")
    assert pairs.bad()
    for _ in range(COMMITS_TO_FORGET):
        assert pairs
        pairs.committed("abc")
        assert not pairs.bad()
    assert not pairs


def test_the_pairs_of_members_that_are_gone_are_forgotten_with_the_next_report() -> None:
    """They would slow down each question about the pairs for as long as the job lives."""
    members = members_of("a", "b", "c")
    pairs = Pairs(members.by_id)
    pairs.reported("a", ["b"], (), 0.0)
    members.take("b")
    pairs.reported("a", ["c"], (), 0.0)
    assert pairs.bad() == {frozenset("ac")}


def test_the_pairs_remembered_have_a_bound() -> None:
    names = [f"m{i}" for i in range(120)]
    pairs = pairs_of(*names)
    assert len(names) * (len(names) - 1) / 2 > 1.5 * MOST_PAIRS
    for name in names:
        pairs.reported(name, [other for other in names if other != name], (), 0.0)
        assert len(pairs.bad()) <= MOST_PAIRS
    assert len(pairs.bad()) == MOST_PAIRS
