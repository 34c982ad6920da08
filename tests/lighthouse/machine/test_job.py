"""The lighthouse's machine: costs, memory, and nonsense from peers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lighthouse.config import LighthouseConfig, Timeouts
from lighthouse.machine import job as job_module
from lighthouse.machine.ballot import Ballot
from lighthouse.machine.forming import MAX_DOUBLINGS, Patience
from lighthouse.machine.job import Effect, JobState, Send
from lighthouse.machine.jobs import Lighthouse
from lighthouse.machine.members import REMEMBERED_DECISIONS, History, Members
from lighthouse.machine.rules import Position
from lighthouse.wire import codec, messages
from lighthouse.wire.messages import (
    FINISHED,
    PHASES,
    TORN,
    Basis,
    DeathNotice,
    Decision,
    Heartbeat,
    InDoubt,
    JobKey,
    Join,
    Leave,
    Member,
    Quorum,
    Refused,
    Request,
    Term,
    Vote,
    Waiting,
    apply_delta,
    member_delta,
    next_lineage,
)

KEY = JobKey("job", "room")
LIMITS = Timeouts.derive(6.0)
TERM = Term(0, 1)


def join(who: str, **given: object) -> Join:
    """A join of a process that has promised itself to the first term of its job."""
    made = Join(KEY, who, who, 0, "root", (who.encode(),), promised=TERM)
    return replace(made, **given)  # type: ignore[arg-type]


def nonces() -> Callable[[], int]:
    """1, 2, ..."""
    return partial(next, itertools.count(TERM.nonce))


def full_job(count: int) -> tuple[JobState, list[str]]:
    job = JobState(KEY, LighthouseConfig(expected_replicas=count, timeouts=LIMITS), 1)
    names = [f"r{i}" for i in range(count)]
    for name in names:
        job.handle(name.encode(), join(name), 0.0)
    return job, names


def vote_all(
    job: JobState, names: list[str], quorum_id: int, step: int, lineage: str
) -> list[Effect]:
    effects: list[Effect] = []
    for name in names:
        vote = Vote(KEY, name, quorum_id, step, lineage, True)
        effects = job.handle(name.encode(), vote, 1.0)
    return effects


def sends(effects: list[Effect]) -> list[Send]:
    return [effect for effect in effects if isinstance(effect, Send)]


def test_the_steady_state_is_one_message_of_constant_size() -> None:
    sizes = set()
    for count in (3, 300):
        job, names = full_job(count)
        answers = sends(vote_all(job, names, 1, 0, "root"))
        assert len(answers) == 1
        assert len(answers[0].peers) == count
        sizes.add(len(codec.encode(answers[0].message)))
    assert len(sizes) == 1


def test_a_quorum_change_is_few_messages_whatever_the_size() -> None:
    job, names = full_job(300)
    job.handle(b"new", join("new"), 0.5)
    answers = sends(vote_all(job, names, 1, 0, "root"))
    assert len(answers) == 2  # the difference for the old members, the list for the new one
    assert len(codec.encode(answers[0].message)) < 400


def test_a_term_ends_before_its_numbers_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for one quorum in a term: the next one is of a new term, so that its id is higher."""
    for module in (job_module, messages):
        monkeypatch.setattr(module, "TERM_BITS", 1)
    job, _ = full_job(1)
    effects = job.handle(b"r0", Vote(KEY, "r0", 1, 0, "root", False, "broken"), 1.0)
    offers = [send.message.offer for send in sends(effects) if isinstance(send.message, Waiting)]
    assert offers == [Term(1, 1)]
    again = join("r0", promised=Term(1, 1), quorum_id=1, last_members=("r0",))
    quorums = [send.message for send in sends(job.handle(b"r0", again, 2.0))]
    assert [quorum.quorum_id for quorum in quorums if isinstance(quorum, Quorum)] == [3]
    job.check()


def test_many_deaths_at_once_are_one_revoke() -> None:
    job, names = full_job(100)
    effects: list[Effect] = []
    for name in names[:50]:
        effects += job.lost(name, "power cut", 1.0)
    assert len(sends(effects)) == 1
    job.check()


def test_a_death_notice_may_come_before_the_first_join() -> None:
    """The lighthouse is started again while b dies: its watcher may be back sooner than its peers."""
    config = LighthouseConfig(expected_replicas=2, timeouts=LIMITS)
    lighthouse = Lighthouse(config, nonces())
    lighthouse.handle(b"b#watcher", DeathNotice(KEY, "b:1", "killed", Term(0, 9), 7), 0.0)
    basis = Basis(5, "x", committed=True)
    here = join("a", quorum_id=7, last_members=("a", "b:1"), basis=basis, step=5, lineage="x")
    lighthouse.handle(b"a", replace(here, promised=Term(0, 9)), 0.1)  # it is offered a higher term
    said = sends(lighthouse.handle(b"a", replace(here, promised=Term(1, 1)), 0.1))
    assert [type(send.message) for send in said] == [Quorum]


def test_a_full_lighthouse_refuses_but_reuses_jobs_that_all_have_left() -> None:
    machine = Lighthouse(LighthouseConfig(max_jobs=1, timeouts=LIMITS), nonces())
    machine.handle(b"a", join("a"), 0.0)
    other = join("b", job=JobKey("job", "other"))
    assert "full" in str(machine.handle(b"b", other, 0.0))
    machine.disconnected(b"a", 1.0)
    machine.handle(b"b", other, 1.0)
    machine.check()
    assert str(machine.status()).count("room_id") == 1


def test_one_that_asks_for_more_than_there_are_does_not_stop_the_others() -> None:
    machine = Lighthouse(LighthouseConfig(timeouts=LIMITS), nonces())
    for name in "ab":
        machine.handle(name.encode(), join(name, expected_replicas=2), 0.0)
    for asks, refused in ((3, False), (4, True)):
        name = f"c{asks}"
        (said,) = sends(machine.handle(name.encode(), join(name, min_replicas=asks), 0.0))
        assert isinstance(said.message, Refused) == refused
        if refused:
            assert "min_replica_size=4, with which the 2 replica groups" in said.message.reason
        machine.disconnected(name.encode(), 0.0)


def test_a_connection_joins_one_job() -> None:
    """Else one stranger could hold the places of all."""
    machine = Lighthouse(LighthouseConfig(timeouts=LIMITS), nonces())
    machine.handle(b"a", join("a"), 0.0)
    (said,) = sends(machine.handle(b"a", join("b", job=JobKey("other", "room")), 0.0))
    assert isinstance(said.message, Refused)
    assert "this connection has joined job 'job'" in said.message.reason
    assert machine.serves(b"a")
    machine.handle(b"b", join("b", job=JobKey("other", "room")), 0.0)
    assert len(machine.status()["jobs"]) == 2
    machine.disconnected(b"a", 1.0)
    assert not machine.serves(b"a")


# ---------------------------------------------------------------- differences


def members(draw: st.DrawFn) -> tuple[Member, ...]:
    names = draw(st.lists(st.sampled_from("abcdef"), unique=True))
    return tuple(
        Member(n, 1, (draw(st.sampled_from([b"x", b"y"])),), draw(st.booleans())) for n in names
    )


@st.composite
def lists(draw: st.DrawFn) -> tuple[tuple[Member, ...], tuple[Member, ...]]:
    return members(draw), members(draw)


@given(lists(), st.randoms())
def test_a_difference_leads_to_the_new_list_whatever_the_receiver_thinks_of_healing(
    case: tuple[tuple[Member, ...], tuple[Member, ...]], rng: random.Random
) -> None:
    old, new = case
    delta = member_delta(old, new)
    if delta is None:
        return
    removed, changed = delta
    receiver = tuple(replace(m, healing=rng.random() < 0.5) for m in old)
    message = Quorum(KEY, 2, 0, "root", 1, removed, changed)
    assert apply_delta(receiver, message) == new


# ---------------------------------------------------------------- memory


def test_pauses_grow_from_what_a_failure_cost_and_end_with_a_success() -> None:
    patience = Patience(shortest_s=1.0, longest_s=20.0)
    patience.failed("a", 0.0, now=0.0)
    assert not patience.allows("a", 0.9)
    assert patience.allows("a", 1.0)
    patience.failed("a", 0.0, now=1.0)
    assert not patience.allows("a", 2.9)
    patience.failed("b", 4.0, now=0.0)
    assert not patience.allows("b", 7.9)
    assert patience.allows("b", 8.0)
    for _ in range(MAX_DOUBLINGS + 2):
        patience.failed("b", 4.0, now=0.0)
    assert patience.allows("b", 20.0)
    patience.succeeded("a")
    assert patience.allows("a", 1.0)


def test_history_is_bounded() -> None:
    history = History(())
    position = Position(0, "root")
    history.start(position, 0)
    live = Ballot.open(1, TERM.nonce, position, (), {"a": "a"}, 0.0)
    votes = []
    for step in range(2 * REMEMBERED_DECISIONS):
        votes.append(Vote(KEY, "a", 1, step, live.position.lineage, True))
        live.position = history.decided(Decision(KEY, 1, step, True), live)
    assert history.decision(votes[0]) is None
    assert history.decision(votes[-1]) is not None
    assert history.commits == 2 * REMEMBERED_DECISIONS


def test_a_member_keeps_its_place_and_moves_with_its_connection() -> None:
    known = Members()
    known.put(join("a"), b"one")
    first = known.by_id["a"].arrival
    known.put(join("b"), b"two")
    known.put(join("a", step=3), b"three")
    assert known.by_id["a"].arrival == first
    assert known.of_peer(b"one") == []
    assert known.of_peer(b"three") == ["a"]
    known.move(known.by_id["b"], b"three")
    assert known.of_peer(b"three") == ["a", "b"]
    known.check()
    with pytest.raises(AssertionError, match="two members of one name"):
        known.put(join("c", name="a"), b"four")


# ---------------------------------------------------------------- nonsense


def any_request(
    rng: random.Random, ids: list[int], lineages: list[str], terms: list[Term]
) -> Request:
    """Well-formed, but said at any time by anybody about anything."""
    who, step = rng.choice("abcd"), rng.randrange(4)
    quorum_id, lineage = rng.choice(ids), rng.choice(lineages)
    kind = rng.randrange(10)
    if kind < 3:
        doubt = InDoubt(quorum_id, step, next_lineage(lineage, TERM.nonce, quorum_id, step))
        return join(
            who,
            step=step,
            lineage=lineage,
            quorum_id=rng.choice([0, *ids]),
            name=rng.choice([who, "a"]),
            in_doubt=rng.choice([None, doubt]),
            last_members=tuple(rng.sample("abcd", rng.randrange(4))),
            basis=rng.choice(
                [None, Basis(0, "x", rng.random() < 0.5, rng.random() < 0.5, (("a", "b"),))]
            ),
            can_heal=rng.random() < 0.8,
            group_commit=rng.random() < 0.05,
            promised=rng.choice(terms),
        )
    if kind < 8:
        return Vote(
            KEY,
            who,
            quorum_id,
            step,
            lineage,
            rng.random() < 0.7,
            "",
            rng.choice(PHASES),
            rng.random() < 0.1,
            rng.random() < 0.1,
        )
    if kind == 8:
        return Heartbeat(KEY, who, quorum_id, step)
    return Leave(KEY, who) if rng.random() < 0.5 else DeathNotice(KEY, who)


@pytest.mark.parametrize("block", range(4))
def test_nothing_that_peers_say_breaks_an_invariant(block: int) -> None:
    quorums = 0
    for seed in range(block * 250, block * 250 + 250):
        rng = random.Random(seed)
        config = LighthouseConfig(min_replicas=rng.choice([1, 2]), timeouts=LIMITS)
        machine, now, highest = Lighthouse(config, nonces()), 0.0, 0
        ids, lineages, terms = [1], ["root", TORN + "a"], [TERM] * 9
        for _ in range(60):
            now += rng.choice([0.0, 0.01, 0.3, 3.0])
            wanted = machine.deadline()
            effects: list[Effect] = []
            if wanted is not None and wanted <= now:
                effects = machine.expire(now)
                again = machine.deadline()
                assert again is None or again > now, "a deadline that does not move"
            if rng.random() < 0.05:
                effects += machine.disconnected(rng.choice("abcd").encode(), now)
            request = any_request(rng, ids, lineages, terms)
            effects += machine.handle(rng.choice("abcd").encode(), request, now)
            machine.check()
            for send in sends(effects):
                told = send.message
                if isinstance(told, Waiting) and told.offer is not None:
                    terms = [*terms[-9:], *[told.offer] * 3]
                if isinstance(told, Decision) and told.next_quorum is not None:
                    told = told.next_quorum
                if isinstance(told, Quorum):
                    quorums += told.quorum_id > highest
                    highest = max(highest, told.quorum_id)
                    ids, lineages = [*ids[-2:], told.quorum_id], [*lineages[-3:], told.lineage]
    assert quorums > 250


MOMENT = 10.0


def told(effects: list[Effect], kind: type[Any]) -> list[Any]:
    return [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, kind)]


def finished_job(*reasons: str) -> JobState:
    job, names = full_job(3)
    vote_all(job, names, 1, 0, "root")
    for name, reason in zip(names, reasons, strict=True):
        job.handle(name.encode(), Leave(KEY, name, reason), 2.0)
    return job


def test_one_who_comes_back_waits_and_is_sent_away() -> None:
    job = finished_job(FINISHED, FINISHED, FINISHED)
    effects = job.handle(b"again", join("again", expected_replicas=3), MOMENT)
    (waiting,) = told(effects, Waiting)
    assert "finished at step 1" in waiting.reason
    assert not told(effects, Quorum)
    deadline = job.deadline()
    assert deadline == MOMENT + LIMITS.connect_timeout_s
    (refused,) = told(job.expire(deadline), Refused)
    assert "does not start it over" in refused.reason
    assert job.empty


def test_one_that_waited_already_when_the_others_finished_is_sent_away_at_once() -> None:
    job, names = full_job(3)
    vote_all(job, names, 1, 0, "root")
    first, *rest = names
    job.handle(first.encode(), Leave(KEY, first, ""), 2.0)
    job.handle(b"again", join("again", expected_replicas=3), 2.0)
    effects: list[Effect] = []
    for name in rest:
        assert not told(effects, Refused)
        effects = job.handle(name.encode(), Leave(KEY, name, FINISHED), 2.0)
        if name == rest[0]:  # it gives up its quorum, or has lost its connection
            job.handle(b"again", join("again", expected_replicas=3), 2.0)
    (refused,) = told([*effects, *job.expire(2.0)], Refused)
    assert "does not start it over" in refused.reason
    assert job.empty


def test_one_that_comes_when_some_have_finished_is_waited_for() -> None:
    """It may have finished itself, and be in the next training already."""
    job, names = full_job(3)
    vote_all(job, names, 1, 0, "root")
    job.handle(names[0].encode(), Leave(KEY, names[0], FINISHED), 2.0)
    job.handle(b"next", join("next", expected_replicas=3), 2.0)
    for name in names[1:]:
        effects = job.handle(name.encode(), Leave(KEY, name, FINISHED), 2.0)
        assert not told([*effects, *job.expire(2.0)], Refused)
    assert not job.empty


def test_all_members_that_come_start_anew() -> None:
    job = finished_job(FINISHED, FINISHED, FINISHED)
    effects: list[Effect] = []
    for name in ("x", "y", "z"):
        effects = job.handle(name.encode(), join(name), MOMENT)
    assert told(effects, Quorum)


def test_members_of_the_next_training_come_one_by_one() -> None:
    """Each takes longer to connect than the join timeout."""
    job = finished_job(FINISHED, FINISHED, FINISHED)
    effects: list[Effect] = []
    for number, name in enumerate(("x", "y", "z")):
        now = MOMENT + number * LIMITS.connect_timeout_s / 3
        assert not told(job.expire(now), Refused)
        effects = job.handle(name.encode(), join(name, expected_replicas=3), now)
    assert told(effects, Quorum)


def test_a_member_that_holds_the_last_step_goes_on() -> None:
    """A second `fit`, or a resumed checkpoint."""
    job = finished_job(FINISHED, FINISHED, FINISHED)
    lineage = next_lineage("root", TERM.nonce, 1, 0)
    effects = job.handle(b"x", join("x", step=1, lineage=lineage), MOMENT)
    assert not told(effects, Refused)
    assert told(job.expire(MOMENT + LIMITS.join_timeout_s), Quorum)


def test_members_that_only_shut_down_may_come_back() -> None:
    job = finished_job("shutdown", "shutdown", "shutdown")
    job.handle(b"again", join("again"), MOMENT)
    effects = job.expire(MOMENT + LIMITS.join_timeout_s)
    assert told(effects, Quorum)
