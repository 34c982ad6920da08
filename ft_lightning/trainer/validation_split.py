"""Who validates which batches, and what is missing when somebody is gone. PURE.

A validation set is a list of batches, numbered from 0, equal in all replica groups. Members of a
quorum divide it so that each batch counts exactly once, whoever dies:

1. *Begin.* A round (a step without an update, `rounds.py`) is committed. All who took part know
   the same list of missing batches (at first: all), their number n and their rank among them.
   Member k of n takes the missing batches at places k, k + n, k + 2n, ... of that list.
2. *Compute.* Each member adds the results of its share to what it holds. What it holds is the sum
   over a set of batches that it knows by number: what it has *done*.
3. *Tally.* In another round each member shows what it has done and what it holds. Batches that
   nobody who is there has done are missing: they are shared out as in 1, and 2 and 3 follow again.
4. *Final.* None is missing: the result is the sum over what all hold, and all have it, as all have
   seen the same and add in the order of ranks.

Why each batch counts once. Nobody computes a batch that a committed round did not give it, and a
committed round gives a batch to one member: so what members have done never overlaps. A round that
is not committed changes nothing and is repeated. Who dies before the tally takes what it holds
along: its batches are in nobody's set, so they are missing. Who dies after it has been counted.

Who joins meanwhile sits in on rounds as one that takes no part (no rank, nothing done). Who is
left behind (evicted, and back) is in no round any more: it computes what it has not done, alone,
so that what it holds is the whole set, and heals at the next batch.

It ends: each tally that finds batches missing has lost a member since the round before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def share(missing: Sequence[int], rank: int, members: int) -> list[int]:
    """The batches out of `missing` that member `rank` of `members` takes, in order.

    As even as can be: shares differ by one batch at most. May be empty.
    """
    assert 0 <= rank < members
    return list(missing[rank::members])


def missing(batches: int, done: Sequence[Iterable[int]]) -> list[int]:
    """Batches out of `batches` that no set in `done` (one a member) holds, in order.

    The sets must not overlap, and hold nothing else: AssertionError.
    """
    left, counted = set(range(batches)), 0
    for own in done:
        numbers = set(own)
        counted += len(numbers)
        left -= numbers
    assert batches - len(left) == counted, "a batch was validated by two, or is none of the set"
    return sorted(left)
