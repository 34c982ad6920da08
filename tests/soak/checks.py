"""What must hold in every run, and what is counted. Knows nothing of processes. PURE."""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

from ft_core.state import CHANGED_WHILE_SERVED

AFTERMATH_S = 3.0
"""How long after its end a fault may still cost commits."""
REMEMBERED = 200_000
"""Versions whose digests are kept: no rank is so far behind the others."""
ACCUSATIONS = (
    CHANGED_WHILE_SERVED,
    "not those of its peers",
    "not that of its peers",
    "and its peers ",
)
"""In the reason of a discard: a member is told that its loop or its memory is at fault."""

Report = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Gap:
    """A time without a commit of any replica group.

    Attributes:
        seconds: how long.
        still_s: for how much of it the soak's own process stood still: that is the machine's.
        after: the faults that it followed.
    """

    seconds: float
    still_s: float
    after: list[str]


@dataclass(slots=True)
class Felt:
    """A fault, until when it may cost commits, and the longest time without one so far."""

    kind: str
    until: float
    longest_s: float = 0.0


class Checker:
    """Takes the reports of all ranks, in any order.

    - S3: equal (step, lineage) means equal bits, over all ranks of one number.
    - S2: a step has one lineage, until all that hold it, or a step that was made from it, are dead
      (`gone`). Not where each replica group commits on its own.
    - No member is accused: loops and memory are without fault.
    - The longest times without a commit of any replica group, and which faults they followed.
    """

    def __init__(self, *, one_lineage: bool, ranks: int = 1) -> None:
        self._one_lineage, self._ranks = one_lineage, ranks
        self._digests: dict[tuple[int, int, str], str] = {}
        self._lineages: dict[int, str] = {}  # by step, of the branch that is trained
        self._order: deque[tuple[int, int, str]] = deque()
        self._last_commit: float | None = None
        self._felt: list[Felt] = []
        self._all_felt: list[Felt] = []
        self.violations: list[str] = []
        self.counts: Counter[str] = Counter()
        self._gaps: list[tuple[float, float, list[str]]] = []  # how long, its end, the faults
        self._still: list[tuple[float, float]] = []  # apart from each other
        self.highest_step = 0
        self.state_of: dict[tuple[int, int], tuple[int, str, str]] = {}
        """By (group, rank): step, lineage and digest that it reported last."""

    def gone(self, group: int) -> None:
        """A replica group has lost a process, and so its state: others go on from what they hold."""
        for key in [key for key in self.state_of if key[0] == group]:
            del self.state_of[key]

    def fault(self, kind: str, now: float, for_s: float = 0.0) -> None:
        """A fault begins, and lasts `for_s`."""
        self.counts[f"fault: {kind}"] += 1
        felt = Felt(kind, now + for_s + AFTERMATH_S)
        self._felt.append(felt)
        self._all_felt.append(felt)

    def step(
        self, group: int, rank: int, report: Report, now: float, unheard: Set[int] = frozenset()
    ) -> None:
        """A rank's report of a step. `unheard`: groups that can't say what they hold, or could not
        a moment ago."""
        step, lineage, digest = report["step"], report["lineage"], report["digest"]
        key = (rank, step, lineage)
        known = self._digests.get(key)
        if known is None:
            self._digests[key] = digest
            self._order.append(key)
            if len(self._order) > REMEMBERED:
                del self._digests[self._order.popleft()]
        elif known != digest:
            self.violations.append(f"S3: step {step}, {lineage}: group {group} has other bits")
        self.state_of[group, rank] = (step, lineage, digest)
        if not report["committed"]:
            self.counts["discards"] += 1
            if any(each in report.get("reason", "") for each in ACCUSATIONS):
                self.violations.append(f"group {group} rank {rank} is told: {report['reason']}")
            return
        self.counts["commits"] += 1
        self.highest_step = max(self.highest_step, step)
        if self._one_lineage:
            self._check_branch(group, rank, step, lineage, unheard)
        self._note_gap(now)

    def _check_branch(
        self, group: int, rank: int, step: int, lineage: str, unheard: Set[int]
    ) -> None:
        first = self._lineages.setdefault(step, lineage)
        if first == lineage:
            return
        holding = [
            (g, r, held)
            for (g, r), (held, of, _) in sorted(self.state_of.items())
            if held >= step and self._lineages.get(held) == of and g not in unheard
        ]
        # A group that heals may have lost its source when some of its ranks have the state: it holds none.
        whole = Counter(g for g, _, _ in holding)
        holders = [(g, r, held) for g, r, held in holding if whole[g] == self._ranks]
        if holders:
            told = ", ".join(f"group {g} rank {r} at step {held}" for g, r, held in holders)
            self.violations.append(
                f"S2: step {step} has two lineages: {first}, held by {told}; and "
                f"{lineage}, of group {group} rank {rank}"
            )
        else:  # the job went back, as it must
            for lost in range(step, max(self._lineages) + 1):
                self._lineages.pop(lost, None)
            self._lineages[step] = lineage

    def _note_gap(self, now: float) -> None:
        last, self._last_commit = self._last_commit, now
        if last is None:
            return
        self._felt = [felt for felt in self._felt if felt.until >= last]
        for felt in self._felt:
            felt.longest_s = max(felt.longest_s, now - last)
        kinds = [felt.kind for felt in self._felt]
        self._gaps = sorted([*self._gaps, (now - last, now, kinds)], reverse=True)[:20]

    def stood_still(self, since: float, until: float) -> None:
        """The process that runs the soak did nothing meanwhile, and so, as far as is known, nor did the
        members. Overlaps with what it said before count once."""
        apart = []
        for begin, end in self._still:
            if end < since or begin > until:
                apart.append((begin, end))
            else:
                since, until = min(begin, since), max(end, until)
        self._still = sorted([*apart, (since, until)])

    @property
    def still_s(self) -> float:
        """For how long it stood still, in all."""
        return sum(end - begin for begin, end in self._still)

    @property
    def gaps(self) -> list[Gap]:
        """The longest ones; the longest first."""
        return [
            Gap(
                seconds,
                sum(max(0.0, min(e, end) - max(b, end - seconds)) for b, e in self._still),
                kinds,
            )
            for seconds, end, kinds in self._gaps
        ]

    def equal_at_the_end(self, ranks: int) -> bool:
        """Whether all ranks of one number were last at the same version."""
        worlds = [{s for (_, r), s in self.state_of.items() if r == rank} for rank in range(ranks)]
        return all(len(world) == 1 for world in worlds)

    def table(self) -> list[tuple[str, int, float, float]]:
        """By kind of fault: how many, and the longest time without a commit of any group that began
        while it lasted or `AFTERMATH_S` later: the median and the worst of them, in seconds."""
        times: dict[str, list[float]] = {}
        for felt in self._all_felt:
            times.setdefault(felt.kind, []).append(felt.longest_s)
        return [(k, len(t), statistics.median(t), max(t)) for k, t in sorted(times.items())]
