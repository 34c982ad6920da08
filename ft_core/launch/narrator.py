"""What a person who watches the terminal is told of a training: a line for each thing that happens."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from ft_core.launch.supervisor import after, age_s, say
from ft_core.replica.events import EXPELLED
from ft_core.telemetry import (
    COMMIT,
    DISCARD,
    HEAL_DONE,
    KEPT,
    QUORUM,
    REVOKED,
    TOLD_DISCARDS,
    VISIT,
    WAITING,
    Event,
)
from lighthouse.wire.messages import FINISHED, NOT_HELD, NOT_KNOWN, name_of

LOST = "it had lost its connection to the lighthouse, or that was started again"

ONLY_GROUP = (
    "these {} processes are the only replica group: if one of them dies, none goes on. Start one torchrun for each "
    "group, with REPLICA_GROUP_ID and NUM_REPLICA_GROUPS, or start the script with `{}` in place of torchrun"
)
"""Of processes that torchrun has started as it starts any script; and what makes a group of each."""

UNLIKE = "all must train on the same number of batches, so what they end with may differ"


class Narrator:
    """Tells the person who watches the terminal what has happened, a line each, as a sink of telemetry.

    | line | of |
    |---|---|
    | how many replica groups train, and at which lighthouse | the first member that does not heal |
    | a group is gone: it died, left, or was evicted | the same; not of deaths that the supervisor of all groups tells |
    | a group is back; if its process did not die, why the others had gone on without it | that group |
    | a group has finished, and others make a step after that | the same |
    | the job goes back, since no group that is here holds its newest step | the first member that does not heal |
    | a step is discarded again and again | the first member that does not heal |

    Args:
        speaker: the package that speaks.
        name, groups: of this replica group; how many there are meant to be.
        place: where the training is ("step 1,204"); "" at its beginning.
        deaths: whether to report deaths.
        returns: whether to report that this group is back.
        start: whether to report the first quorum.
        ends: whether to report that others go on when a group has finished: their scripts have parted.

    Thread: any, one at a time.
    """

    def __init__(
        self,
        speaker: str,
        name: str,
        groups: int,
        lighthouse: str,
        place: Callable[[], str],
        *,
        deaths: bool,
        returns: bool = True,
        start: bool = True,
        ends: bool = False,
    ) -> None:
        self._speaker, self._name, self._groups = speaker, name, groups
        self._lighthouse = lighthouse or "this machine's"
        self._place = place
        self._deaths, self._returns, self._start, self._ends = deaths, returns, start, ends
        self._members: set[str] = set()
        self._at_their_end: list[str] = []  # groups, since the last commit
        self._kept: int | None = None
        self._why, self._healed, self._first, self._discards = "", False, False, 0
        self._out = ""  # why the others have gone on without this group
        self._there_at = time.monotonic() - age_s()

    def __call__(self, event: Event) -> None:
        if event.kind == COMMIT:
            if self._healed and self._returns and (place := self._place()):
                away_s = time.monotonic() - self._there_at
                why = self._out and f" ({self._out})"
                self._say(f"group {self._name} is back at {place}{after(away_s)}{why}")
            for gone in self._at_their_end if self._first else ():
                self._say(
                    f"group {gone} is at the end of its script; {self._count()} go on: {UNLIKE}"
                )
            self._at_their_end.clear()
            self._healed, self._discards, self._out = False, 0, ""
            self._there_at = time.monotonic()
        elif event.kind == HEAL_DONE:
            self._healed = True
        elif event.kind == VISIT:
            self._healed = False
        elif event.kind == WAITING:
            reason = event.data["reason"]
            if self._members and reason.startswith(EXPELLED):
                lost = reason.endswith(NOT_KNOWN)
                self._out = LOST if lost else reason.removeprefix(EXPELLED)
        elif event.kind == KEPT:
            self._kept = event.data["step"]
        elif event.kind == REVOKED:
            self._why = event.data["reason"]
        elif event.kind == DISCARD:
            self._discards += 1
            if self._discards in TOLD_DISCARDS and self._first:
                times, why = self._discards, event.data["reason"]
                place = self._place() or "the first step"
                self._say(f"{place} was discarded {times} times in a row: {why}")
        elif event.kind == QUORUM:
            self._in_quorum(event.data)

    def _in_quorum(self, quorum: Mapping[str, Any]) -> None:
        before, self._members = self._members, {name_of(m) for m in quorum["members"]}
        why, self._why = self._why, ""
        healing = {name_of(m) for m in quorum["healing"]}
        trained = [rank for rank, m in enumerate(quorum["members"]) if name_of(m) not in healing]
        self._first = trained[:1] == [quorum["replica_rank"]]
        if quorum["replica_rank"] in trained:
            self._there_at = time.monotonic()  # also if it is evicted before its first commit
        of, _, gone_why = why.partition(": ")
        gone_of = name_of(of)
        if self._ends and gone_why == f"left: {FINISHED}" and gone_of in before - self._members:
            # Those that are left may be at their end, too: the next commit tells.
            self._at_their_end.append(gone_of)
        if not self._first:
            return
        count = self._count()
        if not before and self._start:
            self._say(f"training with {count}; the lighthouse is {self._lighthouse}")
        if NOT_HELD in quorum["reason"]:
            # The steps of the reason count agreements as well: they are none of the script's.
            place = self._place()
            to = place and f" to {place}"
            self._say(f"the job goes back{to}: what was committed later {NOT_HELD}")
        if not before and self._kept is not None:
            place = self._place() or f"commit {self._kept:,}"
            self._say(f"all had ended; the job goes on from the kept state of {place}")
        for gone in sorted(before - self._members):
            reason = gone_why if gone_of == gone else ""
            known = f" ({reason})" if reason else ""
            if reason != f"left: {FINISHED}" and (self._deaths or "evicted" in reason):
                self._say(f"group {gone} is gone{known}; {count} go on")

    def _count(self) -> str:
        return f"{len(self._members)} of {self._groups} replica groups"

    def _say(self, text: str) -> None:
        say(self._speaker, text)
