"""Break a machine on purpose, and see the checker say so. A checker that finds nothing proves nothing.

Each case names the promise that must be reported; the seeds are those of the ordinary runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

import ft_core.replica.machine as replica_module
import ft_core.replica.status as status_module
import lighthouse.machine.members as history_module
from ft_core.replica.events import CastVote, Rejoin
from ft_core.replica.machine import Replica
from ft_core.replica.status import Attempt, Outcome
from lighthouse.machine.ballot import Ballot
from lighthouse.machine.job import JobState
from lighthouse.machine.members import History
from lighthouse.wire.messages import Member, Quorum, Term, Vote, next_lineage
from tests.sim.profile import Profile, profile_of
from tests.sim.run import run

Patch = pytest.MonkeyPatch


def counts_votes_of_old_quorums(patch: Patch) -> None:
    original = JobState._on_vote

    def on_vote(self: JobState, peer: bytes, vote: Vote, now: float) -> None:
        live = self._live
        if live is not None and vote.quorum_id < live.quorum_id and vote.replica_id in live.living:
            position = live.position
            vote = replace(
                vote, quorum_id=live.quorum_id, step=position.step, lineage=position.lineage
            )
        original(self, peer, vote, now)

    patch.setattr(JobState, "_on_vote", on_vote)


def reuses_ids_after_restart(patch: Patch) -> None:
    """All lives of lighthouses share one nonce, and the epoch stays."""
    original = JobState.__init__

    def init(self: JobState, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.term = Term(0, 1)

    patch.setattr(JobState, "__init__", init)


def commits_without_the_decision(patch: Patch) -> None:
    original = Replica._on_cast_vote

    def on_cast_vote(self: Replica, event: CastVote, now: float) -> Any:
        effects = original(self, event, now)
        if self.attempt is Attempt.VOTED and self.view is not None:
            self._commit_locally(self.view)
        return effects

    patch.setattr(Replica, "_on_cast_vote", on_cast_vote)


def carries_sums_into_the_next_quorum(patch: Patch) -> None:
    original = Replica._fail_if_bound

    def fail_if_bound(self: Replica, message: Quorum) -> None:
        if self.attempt is not Attempt.BOUND:
            original(self, message)

    patch.setattr(Replica, "_fail_if_bound", fail_if_bound)
    patch.setattr(Replica, "may_vote", property(lambda self: self.view is not None))


def votes_yes_without_healing(patch: Patch) -> None:
    original = Replica._on_quorum

    def on_quorum(self: Replica, message: Quorum, now: float) -> Any:
        effects = original(self, message, now)
        if self.view is not None and not self.healed:
            self.step, self.lineage, self.healed = self.view.step, self.view.lineage, True
        return effects

    patch.setattr(Replica, "_on_quorum", on_quorum)


def forgets_who_may_hold_more(patch: Patch) -> None:
    class Forgetful(set[str]):
        def add(self, element: str) -> None: ...
        def update(self, *others: Iterable[str]) -> None: ...

    original = History.__init__

    def init(self: History, missed: tuple[str, ...]) -> None:
        original(self, ())
        self.missed = Forgetful()

    patch.setattr(History, "__init__", init)


def drops_every_step_in_doubt(patch: Patch) -> None:
    patch.setattr(History, "_was_committed", lambda *_: False)


def commits_every_step_in_doubt(patch: Patch) -> None:
    patch.setattr(History, "_was_committed", lambda *_: True)


def commits_on_one_yes(patch: Patch) -> None:
    patch.setattr(Ballot, "commits", lambda self, group_commit: bool(self.yes()))


def takes_the_behind_for_healed(patch: Patch) -> None:
    patch.setattr(Ballot, "is_behind", lambda self, replica_id: False)


def lets_flags_of_healing_travel(patch: Patch) -> None:
    def apply_delta(base: tuple[Member, ...], quorum: Quorum) -> tuple[Member, ...]:
        changed = {member.replica_id: member for member in quorum.changed}
        kept = [changed.pop(m.replica_id, m) for m in base if m.replica_id not in quorum.removed]
        return (*kept, *changed.values())

    patch.setattr(replica_module, "apply_delta", apply_delta)
    patch.setattr(Replica, "_advance", _advance_without_healing)


def _advance_without_healing(self: Replica, view: replica_module.View) -> None:
    self.step = view.step + 1
    self.lineage = next_lineage(view.lineage, view.nonce, view.quorum_id, view.step)
    self.view = replace(view, step=self.step, lineage=self.lineage)


def never_evicts(patch: Patch) -> None:
    def evict_laggards(self: JobState, live: Ballot, now: float) -> None:
        live.deadline = now + 1e9

    patch.setattr(JobState, "_evict_laggards", evict_laggards)


def never_repeats(patch: Patch) -> None:
    patch.setattr(Replica, "_repeat", lambda self, now: [])
    patch.setattr(Replica, "deadline", lambda self: self._grace_at)


def shows_everyone_its_own_control(patch: Patch) -> None:
    original = Replica._close

    def close(self: Replica, outcome: Outcome) -> None:
        vote = self._vote
        original(self, replace(outcome, control=vote.control) if vote and vote.ok else outcome)

    patch.setattr(Replica, "_close", close)


def names_a_lineage_by_step_alone(patch: Patch) -> None:
    def by_step(lineage: str, nonce: int, quorum_id: int, step: int) -> str:
        return f"step-{step}"

    patch.setattr(status_module, "next_lineage", by_step)
    patch.setattr(history_module, "next_lineage", by_step)
    patch.setattr("tests.sim.checker.next_lineage", by_step)


def gives_up_and_keeps_its_position(patch: Patch) -> None:
    original = Replica._on_rejoin

    def on_rejoin(self: Replica, event: Rejoin, now: float) -> Any:
        position = self.step, self.lineage
        effects = original(self, event, now)
        self.step, self.lineage = position
        return effects

    patch.setattr(Replica, "_on_rejoin", on_rejoin)


CASES: list[tuple[Callable[[Patch], None], str]] = [
    (counts_votes_of_old_quorums, "S2|S5|S6|L1"),
    (reuses_ids_after_restart, "S1"),
    (commits_without_the_decision, "S2|S6"),
    (carries_sums_into_the_next_quorum, "S5|S6"),
    (votes_yes_without_healing, "S3|S4|S6"),
    (forgets_who_may_hold_more, "S2|S6"),
    (drops_every_step_in_doubt, "S6|S2"),
    (commits_every_step_in_doubt, "S2|S6"),
    (commits_on_one_yes, "S6"),
    (takes_the_behind_for_healed, "S3|S4|L1"),
    (lets_flags_of_healing_travel, "S1|S4"),
    (never_evicts, "L1"),
    (never_repeats, "L1"),
    (shows_everyone_its_own_control, "control"),
    (names_a_lineage_by_step_alone, "S3"),
    (gives_up_and_keeps_its_position, "S3"),
]


def without_comparison(profile: Profile) -> Profile:
    """The lighthouse compares states, and parts with a member whose state is wrong: the checker is to
    find it by itself."""
    return replace(profile, compares=False)


def first_complaint(seeds: int, change: Callable[[Profile], Profile] = without_comparison) -> str:
    """What the first failing seed says; empty if none of `seeds` fails."""
    for seed in range(seeds):
        try:
            run(seed, change(profile_of(seed)))
        except Exception as error:
            return f"seed {seed}: {type(error).__name__} {error}"
    return ""


@pytest.mark.parametrize(("mutate", "wanted"), CASES, ids=lambda v: getattr(v, "__name__", None))
def test_a_broken_machine_is_caught(
    mutate: Callable[[Patch], None], wanted: str, monkeypatch: Patch
) -> None:
    mutate(monkeypatch)
    complaint = first_complaint(400)
    assert complaint, "no seed found it"
    assert any(word in complaint for word in wanted.split("|")), complaint


def test_a_healing_member_that_contributes_is_caught() -> None:
    complaint = first_complaint(
        200, lambda profile: without_comparison(replace(profile, healing_stays_out=False))
    )
    assert "S4" in complaint


def test_unbroken_machines_pass() -> None:
    """Also with comparison: no member is accused of a state that it does not hold."""
    assert first_complaint(100, lambda profile: profile) == ""
