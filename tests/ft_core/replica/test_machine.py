"""The replica's machine under nonsense: whatever is received, in whatever order, it stays sane."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from ft_core.replica import events
from ft_core.replica.machine import Replica
from ft_core.replica.status import Attempt, Stage
from lighthouse.wire import messages

KEY = messages.JobKey("job", "room")


def member(name: str, healing: bool = False) -> messages.Member:
    return messages.Member(name, 1, (name.encode(),), healing)


def any_reply(rng: random.Random, replica: Replica) -> messages.Reply:
    quorum_id, step = rng.randrange(1, 12), rng.randrange(4)
    if replica.view is not None and rng.random() < 0.7:
        quorum_id, step = replica.view.quorum_id, replica.view.step
    kind = rng.randrange(12)
    if kind < 4:
        names = rng.sample("abc", rng.randrange(1, 4))
        own = replica.lineage if rng.random() < 0.7 else "x"
        settle = rng.choice(["", "", "commit", "discard"])
        return messages.Quorum(
            KEY,
            quorum_id + rng.randrange(3),
            step,
            own,
            rng.choice([0, 0, quorum_id]),
            tuple(rng.sample("bc", rng.randrange(2))),
            tuple(member(n, rng.random() < 0.3) for n in names),
            "any",
            settle,
            nonce=replica.promised.nonce if rng.random() < 0.95 else 99,
            attempt=messages.ONE_RANK if rng.random() < 0.8 else rng.randrange(9),
        )
    if kind < 8:
        decision = messages.Decision(KEY, quorum_id, step, rng.random() < 0.6)
        if rng.random() < 0.3:
            return replace(decision, waiting=True)
        if rng.random() < 0.4:
            nonce = replica.promised.nonce
            after = messages.next_lineage(replica.lineage, nonce, quorum_id, step)
            both = (member("a"), member("b"))
            following = messages.Quorum(
                KEY, quorum_id + 1, step + 1, after, 0, (), both, nonce=nonce
            )
            return replace(decision, next_quorum=following)
        return decision
    if kind == 8:
        return messages.Revoke(KEY, quorum_id, step, "any")
    if kind == 9:
        differs = rng.random() < 0.2
        return messages.Expelled(KEY, quorum_id, "any", rng.random() < 0.3, differs)
    if kind == 10 and rng.random() < 0.3:
        return messages.ReachQuery(KEY, (member("b"),))
    return (
        messages.Refused(KEY, "any")
        if rng.random() < 0.05
        else messages.Waiting(KEY, f"reason {step}")
    )


def act(
    rng: random.Random, replica: Replica, fetches: list[events.FetchState]
) -> events.ReplicaEvent | None:
    """One thing that a shell may do in this state."""
    attempt = replica.attempt
    if rng.random() < 0.3:  # what a loop would do next
        if attempt is Attempt.CLOSED:
            return events.Begin()
        if replica.may_vote or attempt is Attempt.FAILED:
            return events.CastVote(replica.may_vote)
    kind = rng.randrange(12)
    if attempt in (Attempt.CLOSED, Attempt.OPEN) and kind == 0:
        return events.Begin(heal_in_step=rng.random() < 0.3)
    if attempt is Attempt.OPEN and kind == 1:
        return events.Entered()
    elif attempt is Attempt.OPEN and replica.ready and kind == 2:
        return events.Bind()
    elif attempt is not Attempt.CLOSED and kind == 3:
        return events.CastVote(replica.may_vote and rng.random() < 0.8)
    elif kind == 4:
        return events.Fail("any", stalled=rng.random() < 0.2)
    elif kind == 5 and replica.view is not None:
        return events.Configured(replica.view.quorum_id, rng.choice(["", "", "broken"]))
    elif kind == 6 and fetches:
        error = rng.choice(["", "", "gone"])
        return events.Fetched(
            rng.choice(fetches[-3:]), error, denied=bool(error) and rng.random() < 0.2
        )
    elif kind == 7 and replica.healing and replica.state_fetched:
        return events.Loaded()
    elif kind == 8:
        return events.Connected() if rng.random() < 0.5 else events.Disconnected()
    elif kind == 9 and rng.random() < 0.2:
        return events.Rejoin("any", rng.random() < 0.5, rng.random() < 0.5)
    elif kind == 10:
        return events.StopWaiting()
    elif kind == 11:
        return events.Tried(("b",), ("c",))
    return None


@pytest.mark.parametrize("group_commit", [False, True])
def test_nothing_that_is_received_breaks_an_invariant(group_commit: bool) -> None:
    outcomes = 0
    for seed in range(600):
        rng = random.Random(seed)
        template = messages.Join(
            KEY,
            "a",
            "a",
            0,
            "root",
            (b"a",),
            group_commit=group_commit,
            promised=messages.Term(0, 1),
        )
        replica = Replica(template, resend_s=1.0, revoke_grace_s=0.5)
        now, last_configured = 0.0, 0
        votes: dict[tuple[int, int], bool] = {}
        fetches: list[events.FetchState] = []
        for _ in range(80):
            now += rng.choice([0.0, 0.1, 1.0])
            before = replica.outcome
            wanted = replica.deadline()
            if wanted is not None and wanted <= now:
                effects = replica.expire(now)
            elif rng.random() < 0.5:
                event = act(rng, replica, fetches)
                effects = [] if event is None else replica.handle(event, now)
            else:
                effects = replica.handle(any_reply(rng, replica), now)
            replica.check()
            status = replica.status
            assert (status.part is None) == (replica.view is None)
            assert status.deadline == replica.deadline()
            outcomes += replica.outcome is not None and replica.outcome is not before
            for effect in effects:
                if isinstance(effect, events.FetchState):
                    fetches.append(effect)
                if isinstance(effect, events.Configure):
                    assert effect.quorum_id > last_configured, "quorum ids only grow"
                    last_configured = effect.quorum_id
                if isinstance(effect, events.Transmit) and isinstance(
                    effect.message, messages.Vote
                ):
                    vote = effect.message
                    key = (vote.quorum_id, vote.step)
                    assert votes.setdefault(key, vote.ok) == vote.ok, "voted both ways"
            if replica.stage in (Stage.REFUSED, Stage.LEFT):
                break
    assert outcomes > 300


def test_a_rank_is_outside_from_when_it_is_told_so_until_a_quorum_has_it_again() -> None:
    """Where its own quorum has ended and waits for more members, no other rank can have a quorum."""
    template = messages.Join(KEY, "a", "a", 0, "root", (b"a",), promised=messages.Term(0, 1))
    replica = Replica(template, resend_s=1.0, revoke_grace_s=0.5)

    def hears(message: messages.Reply) -> bool:
        replica.handle(message, 0.0)
        replica.check()
        return replica.status.outside

    def quorum(quorum_id: int) -> messages.Quorum:
        both = (member("a"), member("b"))
        return messages.Quorum(KEY, quorum_id, 0, "root", 0, (), both, nonce=1)

    replica.handle(events.Begin(), 0.0)
    assert hears(messages.Waiting(KEY, "for b"))
    assert not hears(quorum(1))
    assert not hears(messages.Revoke(KEY, 1, 0, "b has finished"))
    assert not hears(messages.Decision(KEY, 1, 0, False, waiting=True))
    assert replica.stage is Stage.WAITING
    assert not hears(quorum(2))
    assert hears(messages.Expelled(KEY, 2, "it was silent"))
    assert hears(messages.Waiting(KEY, "for the step in progress to end"))
    assert replica.stage is Stage.WAITING
    (beat,) = replica.expire(2.0)
    assert isinstance(beat, events.Transmit)
    assert isinstance(beat.message, messages.Heartbeat)
    assert beat.message.quorum_id == messages.NO_QUORUM, "it does not vote in the one that it left"
    assert not hears(quorum(3))
    assert hears(messages.Refused(KEY, "the training is over"))
