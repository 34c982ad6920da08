"""Which member validates which batches, and what is missing when a member is gone. PURE.

A validation set is a list of batches, numbered from 0, equal in all replica groups. Members of a
quorum divide it so that each batch counts exactly once, also if members die:

1. *Begin.* An agreement (a step without an update, `agreements.py`) is committed. All participants
   know the same list of missing batches (at first: all), their number n and their rank among them.
   Member k of n takes the missing batches at places k, k + n, k + 2n, ... of that list.
2. *Compute.* Each member adds the results of its share to what it holds. What it holds is the sum
   over a set of batches that it knows by number: what it has *done*.
3. *Tally.* In another agreement each member shows what it has done and what it holds. Batches that
   no participant has done are missing: they are shared out as in 1, and 2 and 3 follow again.
4. *Final.* None is missing: the result is the sum over what all hold, and all have it, as all have
   seen the same and add in the order of ranks.

Why each batch counts once. No member computes a batch that a committed agreement did not give it,
and a committed agreement gives a batch to one member: so what members have done never overlaps. An
agreement that is not committed changes nothing and is repeated. A member that dies before the tally
takes what it holds along: its batches are in no set, so they are missing. One that dies after it
has been counted.

A group that joins meanwhile contributes nothing to agreements (no rank, nothing done). One that
fell behind (evicted, and back) is in no agreement any more: it computes what it has not done,
alone, so that what it holds is the whole set, and heals at the next batch.

It ends: each tally that finds batches missing has lost a member since the agreement before it.
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
