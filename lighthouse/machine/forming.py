"""When a job forms its next quorum, and from which members: what `rules.py` is asked. PURE.

Keeps what matters only between quorums: the members of the last one, since when the job has been
waiting, how many members it wants, and which ones are better left out for a while.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import replace

from lighthouse.config import LighthouseConfig
from lighthouse.machine import fence, rules
from lighthouse.machine.ballot import Ballot
from lighthouse.machine.members import History, Members, MemberState
from lighthouse.machine.newcomers import Newcomers
from lighthouse.machine.pairs import Pairs, Silences, leave_out
from lighthouse.wire.messages import NO_QUORUM, ReachReport, name_of

SHORTEST_PAUSE, LONGEST_PAUSE = 1 / 8, 8
"""Bounds, in heal timeouts, of the time that a member which keeps failing stays out."""
REMEMBERED_FAILURES = 1_024
MAX_DOUBLINGS = 16
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 5.0
"""D4, see `pairs.py`."""


class Patience:
    """Growing pauses for replica groups that hang or fail to heal: each time costs the others.

    By name, since a process that dies while it heals comes back under a new replica_id.
    """

    def __init__(self, shortest_s: float, longest_s: float) -> None:
        self._shortest_s, self._longest_s = shortest_s, longest_s
        self._failures: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def failed(self, name: str, cost_s: float, now: float) -> None:
        """`name` has cost its peers a step that began `cost_s` seconds ago.

        The pause is at least twice as long as the cost, and doubles with each failure.
        """
        count = self._failures.pop(name, (0, 0.0))[0] + 1
        pause_s = max(self._shortest_s, 2 * cost_s) * 2 ** min(count - 1, MAX_DOUBLINGS)
        self._failures[name] = (count, now + min(pause_s, self._longest_s))
        if len(self._failures) > REMEMBERED_FAILURES:
            self._failures.popitem(last=False)

    def succeeded(self, name: str) -> None:
        """`name` took part in a commit."""
        self._failures.pop(name, None)

    def __bool__(self) -> bool:
        """Whether a failure is remembered."""
        return bool(self._failures)

    def allows(self, name: str, now: float) -> bool:
        """Whether `name` may try again."""
        return name not in self._failures or now >= self._failures[name][1]


class Forming:
    """What one job needs to form its next quorum. One owner.

    Attributes:
        since: when waiting for it began (machine's clock, seconds).
        pairs: members that can't connect to each other.
        left_out: by replica_id, which of them the last verdict left out, and why.
    """

    def __init__(
        self,
        config: LighthouseConfig,
        members: Members,
        history: History,
        newcomers: Newcomers,
    ) -> None:
        limits = config.timeouts
        self.since = 0.0
        self.pairs, self._silences = Pairs(members.by_id), Silences()
        self.left_out: dict[str, str] = {}
        self._apart: dict[str, list[str]] = {}  # those left out, and which each can't reach
        self._members, self._history = members, history
        self._newcomers = newcomers
        self._join_timeout_s = limits.join_timeout_s
        self._torn_timeout_s = limits.timeout_s  # a source's replacement needs time to start
        self._config = config
        self._previous: tuple[str, ...] = ()  # members of the last quorum, in rank order
        self._newest = NO_QUORUM  # before the term's first quorum: the newest that a member reports
        self._reported: tuple[str, ...] = ()  # members of the last one that was reported
        self._takeover: fence.Takeover | None = None  # what that quorum starts from
        self._branch = 0  # where no member is at the head: genesis of the states that come first
        self._all_here = (
            False  # the next quorum is formed since all are here, or are waited for no more
        )
        self._strict = False  # and its first commit needs each of them
        self._shut = False  # in the next step no member could give its state to a newcomer
        self._worked = False  # a member of the live quorum has started a collective
        self._fruitless = 0  # quorums of the same members in a row that ended before any work
        self._paused_until = 0.0
        self._patience = Patience(
            SHORTEST_PAUSE * limits.heal_timeout_s, LONGEST_PAUSE * limits.heal_timeout_s
        )

    # ------------------------------------------------------------------ events

    def joined(self, member: MemberState) -> None:
        """`member` has joined."""
        join, history, here = member.join, self._history, self._members.by_id
        if join.replica_id in history.missed:
            self._members.mark_was_member(member)
        history.joined(join.replica_id, join.name)
        if join.last_members != self._reported:  # the others of its quorum bring the same list
            self._reported = join.last_members
            newer = history.head is None and join.quorum_id > self._newest
            if newer:
                self._newest = join.quorum_id
            history.reported(join, here, missed=newer)

    def decided(self, live: Ballot, committed: bool, now: float) -> None:
        """The step of `live` is decided: members that cost the others the step must pause."""
        self._worked = self._worked or committed or live.reduced()
        if committed and self.pairs:
            self.pairs.committed(live.names)
        if committed and self._patience:
            for replica_id in live.yes():
                self._patience.succeeded(live.names[replica_id])
        if live.revoked:
            for replica_id in live.costly():
                # One that can't connect to another member has not failed to heal: its pair rests.
                if not self.pairs.apart(replica_id, live.names):
                    self._patience.failed(live.names[replica_id], now - live.since, now)

    def new_term(self, now: float) -> None:
        """All members must join again."""
        self._previous = ()
        self._newest, self._reported = NO_QUORUM, ()
        self._shut = False
        self.since = now

    def ended(self, live: Ballot, committed: bool, now: float) -> None:
        """The quorum of `live` is over."""
        before = self._previous
        self._previous = tuple(member.replica_id for member in live.members)
        worked, self._worked = self._worked, False
        self._paused_until = now
        if worked:
            self._fruitless = 0
        else:
            self._fruitless = self._fruitless + 1 if before == self._previous else 1
            if self._fruitless > 1:  # D4
                pause_s = FIRST_PAUSE_S * 2.0 ** min(self._fruitless - 2, MAX_DOUBLINGS)
                self._paused_until = now + min(pause_s, LONGEST_PAUSE_S)
        self._shut = not (committed and live.admits())
        self.since = now

    def reach_reported(self, report: ReachReport, live: Ballot | None, now: float) -> str:
        """A member could not connect to others, or says whether it can by now. Returns why the process
        group of `live` can't be made; empty: this says nothing of it."""
        silence, unheard = report.silence, set()
        if live is None or report.replica_id not in live.living:
            silence = None  # it is in no process group
        if silence and live and silence.quorum_id == live.quorum_id:
            unheard = self._silences.said(report.replica_id, silence, now)
        self.pairs.reported(report.replica_id, report.missed, report.reached, now)
        if unheard:
            self.pairs.silent(unheard, now)
        if live is None:
            self.pairs.hurry(now)
        self._explain_left_out(now)
        others = {end for pair in unheard if report.replica_id in pair for end in pair}
        names = map(name_of, sorted(others - {report.replica_id}))
        return f"it can connect to {', '.join(names)}, but nothing gets through" if unheard else ""

    def ask_pairs(self, now: float) -> list[tuple[MemberState, MemberState]]:
        """(asked, to reach): which member is to connect to which others now, and say whether it can."""
        here = self._members.by_id
        questions = [(here[one], here[other]) for one, other in self.pairs.expire(now)]
        self._explain_left_out(now)
        return questions

    def _explain_left_out(self, now: float) -> None:
        here = self._members.by_id
        self.left_out.clear()
        for left, others in self._apart.items():
            text = self.pairs.sentence(left, others, now) if left in here else ""
            if text:
                self.left_out[left] = text

    # ------------------------------------------------------------------ questions

    def admits(self, live: Ballot, now: float) -> bool:
        """Whether the next quorum could take a member that waits: then a commit ends this one."""
        all_members = self._members.by_id
        if len(all_members) == len(live.members):
            return False
        return any(
            self._may_enter(m, live, now)
            for m in all_members.values()
            if m.replica_id not in live.names
        )

    def _may_enter(self, member: MemberState, live: Ballot, now: float) -> bool:
        if not self._patience.allows(member.name, now):
            return False
        if self.pairs and self.pairs.apart(member.replica_id, live.living):
            return False
        head = self._history.head
        if head is not None and member.position == head:
            return True
        if member.doubt is not None and not member.settle:
            return True
        # It must heal. It waits where no member can give its state.
        return member.join.can_heal and live.admits()

    @property
    def _min_replicas(self) -> int:
        return max(self._config.min_replicas, self._members.rules.min_replicas)

    def _roll(self, now: float) -> rules.Roll:
        wish, option = self._members.rules.expected_replicas, self._config.expected_replicas
        needed = wish or option  # a lighthouse of several jobs has one option for all of them
        return rules.Roll(
            max(wish, option),
            needed,
            needed if now >= self.since + self._join_timeout_s and self._has_past() else 0,
            self._members.names,
            self._history.dead,
            self.since,
            self._join_timeout_s,
            self._config.go_on_after_s,
        )

    def _has_past(self) -> bool:
        """Whether there is a step to lose: groups that all begin at step 0 need not wait for one that
        will heal from them."""
        head = self._history.head
        if head is None and (self._members.were_members or self._history.missed):
            return True
        if head is not None and head.step > 0:
            return True
        return any(member.position.step > 0 for member in self._members.by_id.values())

    @property
    def _numbered(self) -> bool:
        """Whether the job says how many groups it has: one that does not goes on with those that are
        here, since none of them could tell when all are."""
        return max(self._members.rules.expected_replicas, self._config.expected_replicas) > 0

    def genesis(self, first: Ballot) -> int:
        """Of a state that begins with the quorum `first`; see `rules.founders`."""
        return rules.genesis(first.nonce, len(first.members) if self._numbered else 0)

    def suffice(self, here: Collection[str]) -> bool:
        """Whether a step to which those of `here` say yes is committed (F2)."""
        return not self._numbered or self._history.suffice(here)

    @property
    def doubt(self) -> tuple[str, int]:
        """What becomes of a step in doubt, and in which branch (`History.settle`), by the last verdict."""
        if self._history.head is not None:
            return "", 0
        return "either" if self._takeover is None else self._takeover.doubt, self._branch

    def rests_on(
        self, members: Collection[str]
    ) -> tuple[tuple[fence.Members, ...], Collection[str]]:
        """(bases, each) of the quorum of `members` that the last verdict has chosen; see `History`."""
        history, found = self._history, self._takeover
        if self._all_here and not self._strict:
            return (frozenset(members),), ()
        if self._all_here or history.each:
            return (), members
        return (history.bases if found is None else found.bases), ()

    def verdict(self, now: float) -> rules.Verdict:
        """Apply the rules to the members."""
        all_members, head = self._members.by_id, self._history.head
        if not all_members:
            return rules.Verdict(None, "no replica group is here")
        roll = self._roll(now)
        if self._history.finished and head is not None:
            held = any(member.position.step >= head.step for member in all_members.values())
            late_s = self._config.timeouts.connect_timeout_s
            if all(member.too_late for member in all_members.values()):
                late_s = 0.0
            late = rules.too_late(roll, held, head.step, self.since + late_s, now)
            if late is not None:
                return late
        first = self._members.were_members == 0
        if self._history.finished and not first:
            until = self.since + self._config.timeouts.connect_timeout_s
            few = rules.too_few_left(roll, self._min_replicas, until, now)
            if few is not None:
                return few
        missed = self._not_replaced(self._history.missed)
        early = rules.too_early(roll, self._min_replicas, first, now, missed)
        if early is not None:
            return early
        offered = self._newcomers.offered
        if offered and head is None and now < roll.expires:
            reason = f"waiting for {len(offered)} that are here to follow this lighthouse"
            return rules.Verdict(None, reason, roll.expires)
        self._all_here, self._takeover = False, None
        at_head = head is not None and any(m.position == head for m in all_members.values())
        self._branch = 0 if at_head else self._members.branch()
        if head is None:
            self._takeover = self._history.takeover(self._members, self._branch, complete=False)
        elif now < roll.expires and not at_head:
            if lacking := self._lacking():
                return rules.Verdict(None, rules.missing(lacking), roll.expires)
        situation = rules.Situation(
            candidates=self._reachable(self._candidates(now), now),
            min_replicas=self._min_replicas,
            roll=roll,
            previous=self._previous,
            head=head,
            branch=self._branch,
            torn_timeout_s=self._torn_timeout_s,
        )
        verdict = rules.decide(situation, now)
        if verdict.choice is not None:
            verdict = self._fenced(verdict, verdict.choice, roll, now)
        choice = verdict.choice
        if choice is not None and now < self._paused_until and choice.members == self._previous:
            pause = f"the last {self._fruitless} quorums of these members ended before any work"
            return rules.Verdict(None, f"{pause}: pausing before the next", self._paused_until)
        if self.left_out and choice is None:
            self.pairs.hurry(now)
            self._explain_left_out(now)
            reason = "; ".join((verdict.reason, *self.left_out.values()))
            verdict = replace(verdict, reason=reason)
        return verdict

    def _fenced(
        self, verdict: rules.Verdict, choice: rules.Choice, roll: rules.Roll, now: float
    ) -> rules.Verdict:
        """F2, F3: wait unless the members of `choice` suffice for a commit, or all are here (F7)."""
        history = self._history
        if history.head is None:
            lacking = self._not_replaced(history.missed)  # they were waited for
            found = self._takeover  # members that are behind and may not heal take no part
            enough = found is not None and history.half_of(found.bases, choice.members)
        else:
            enough = choice.position == history.head and self.suffice(choice.members)
            lacking = set() if enough else self._lacking()
        waited_for, until = ("", now) if enough else roll.wait(now)
        if lacking and now < roll.expires:
            waited_for, until = rules.missing(lacking), roll.expires
        wait = rules.waiting(waited_for, until, now)
        if wait is not None:
            return wait
        late = rules.missing(lacking) if lacking else waited_for
        if late:
            verdict = replace(verdict, reason=f"{verdict.reason} (gave up {late})")
        if enough:
            return verdict
        self._all_here = True
        self._strict = self._numbered and choice.position.step > 0  # else it begins anew
        if history.head is None:
            self._takeover = history.takeover(self._members, self._branch, complete=True)
        idle = self._strict and self._members_without(choice)
        if idle:
            return rules.Verdict(None, f"waiting until {', '.join(idle)} can take part")
        return verdict

    def _members_without(self, choice: rules.Choice) -> list[str]:
        """Members that `choice` leaves out, and which another lighthouse could go on with (F7)."""
        return [
            member.name
            for r, member in self._members.by_id.items()
            if member.was_member and member.join.can_heal and r not in choice.members
        ]

    def _lacking(self) -> set[str]:
        """Members on which the next commit rests, and for which the job waits."""
        return self._not_replaced(self._history.lacking(self._members.by_id))

    def _not_replaced(self, away: Collection[str]) -> set[str]:
        """Those of `away` that may come back: a process whose name is here again is gone."""
        names = self._members.names
        return {r for r in away if name_of(r) not in names}

    def _reachable(
        self, candidates: tuple[rules.Candidate, ...], now: float
    ) -> tuple[rules.Candidate, ...]:
        """D2: those that can connect to each other."""
        bad = self.pairs.bad() if self.pairs else ()
        if bad:
            best = rules.newest(candidates, self._history.head, self._branch)
            behind = {c.replica_id for c in candidates if c.position != best}
            order = rules.rank_order(candidates, self._previous)
            self._apart = leave_out(order, bad, behind)
            candidates = tuple(c for c in candidates if c.replica_id not in self._apart)
        elif self._apart:
            self._apart = {}
        self._explain_left_out(now)
        return candidates

    def _candidates(self, now: float) -> tuple[rules.Candidate, ...]:
        """All members except those that would only cost the holders of the head a step.

        These are members that must heal where no source could serve them: right after a discard, when
        sources are in the middle of their step, and before an exchange between two updates
        (`Vote.admits`). So are members that keep hanging or failing to heal. They wait for a later
        commit if the job can go on without them.
        """
        head, members = self._history.head, self._members.by_id.values()
        # One that has left and joined again is a newcomer, and was in no quorum since.
        known = (
            {m.replica_id for m in members if m.was_member}.intersection(self._previous)
            if self._shut
            else None
        )
        all_members = tuple(_candidate(member) for member in members)
        kept = tuple(
            c
            for c in all_members
            if (c.position == head or known is None or c.replica_id in known)
            and self._patience.allows(c.name, now)
        )
        if len(kept) == len(all_members):
            return all_members
        best = rules.newest(all_members, head, self._branch)
        able = {c.replica_id for c in kept if c.can_heal or c.position == best}
        goes_on = any(c.position == head for c in kept) and self.suffice(able)
        if len(able) < self._min_replicas or (self._numbered and not goes_on):
            return all_members
        if not any(c.position == best for c in kept):
            return all_members  # the only holders of the newest state are never left out
        return kept


def _candidate(member: MemberState) -> rules.Candidate:
    return rules.Candidate(
        member.replica_id,
        member.name,
        member.position,
        member.join.can_heal,
        member.arrival,
        member.genesis,
        member.held,
    )
