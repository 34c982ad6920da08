"""Whether the members of a quorum hold one state: what their votes say about it. PURE.

Theory. Members at an equal (step, lineage) hold equal states, if each of them has applied what was
committed, and no memory has failed. A yes tells two things about the state that its sender holds: how
often it was updated since the last commit, and a digest of a part of it. Members that say something
else than more than half of the others hold another state. Where counts have no majority, the largest
one counts: a loop that has caught an exception has left out an update, and has not made one more.
Members that have healed since the last commit do not decide what is right. Where digests have no
majority no member can tell which state is the right one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import TypeVar

from lighthouse.wire.messages import NONE_IS_RIGHT, NOT_COUNTED, Vote

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of `compare`.

    Attributes:
        different: members whose state is not their peers', by replica_id, and how it is known.
        hopeless: why no member can tell which state is right, as a sentence for a person; empty: one
            can.
    """

    different: Mapping[str, str] = field(default_factory=dict)
    hopeless: str = ""


ALIKE = Comparison()


def compare(votes: Mapping[str, Vote], unproven: Set[str], names: Mapping[str, str]) -> Comparison:
    """Compare what the votes of one step say.

    `votes`: those of the living members, by replica_id. `unproven`: members that have healed since
    the last commit. `names`: for people, by replica_id. O(members).
    """
    if len({(vote.updates, vote.digest) for vote in votes.values()}) < 2:
        return ALIKE
    said = {replica_id: vote for replica_id, vote in votes.items() if vote.ok}
    step = max((vote.step for vote in said.values()), default=0)
    counts = {r: vote.updates for r, vote in said.items() if vote.updates != NOT_COUNTED}
    right = _majority(counts.values()) if counts else 0
    right = max(counts.values(), default=0) if right is None else right
    different = {
        r: f"it has made {_times(count)} after step {step - 1}, and its peers {_times(right)}"
        for r, count in counts.items()
        if count != right
    }
    digests = {r: vote.digest for r, vote in said.items() if vote.digest and r not in different}
    judges = [digest for r, digest in digests.items() if r not in unproven]
    held = _majority(judges or digests.values())
    if digests and held is None:
        told = ", ".join(f"{names[r]}: {digest.hex()}" for r, digest in sorted(digests.items()))
        return Comparison(
            hopeless=f"the members hold different parameters at step {step}, and {NONE_IS_RIGHT} of "
            f"them ({told[:1_000]}): start again from a checkpoint"
        )
    why = f"its parameters at step {step} are not those of its peers"
    different |= {r: why for r, digest in digests.items() if digest != held}
    if different:  # their state may be what others have healed from
        why = "it has healed from a member whose state is not that of its peers"
        different |= {r: why for r in unproven if r in said and r not in digests | different}
    return Comparison(different)


def _majority(values: Iterable[T]) -> T | None:
    """The value of more than half of them; None: there is none."""
    counts = Counter(values)
    if not counts:
        return None
    [(value, count)] = counts.most_common(1)
    return value if 2 * count > counts.total() else None


def _times(updates: int) -> str:
    return {0: "no update", 1: "one update"}.get(updates, f"{updates} updates")
