"""The leader of a replica group of several ranks: what the lighthouse and the ranks hear."""

from __future__ import annotations

import pytest

from ft_core.replica.group_leader import BROKEN, LEFT, GroupLeader, SendUp, peer_of
from lighthouse.machine.job import Send
from lighthouse.wire.messages import (
    FINISHED,
    GAVE_UP,
    GAVE_UP_PLACE,
    NO_QUORUM,
    NOT_COUNTED,
    PHASE_HEALING,
    PHASE_IDLE,
    PHASE_REDUCING,
    TORN,
    Decision,
    Expelled,
    Heartbeat,
    JobKey,
    Join,
    Leave,
    Member,
    Message,
    Quorum,
    Refused,
    Revoke,
    Vote,
    Waiting,
)

JOB = JobKey("job", "default")
GROUP = "g:1"


class Group:
    """A leader whose effects are kept apart: `up` to the lighthouse, `down` to each rank."""

    def __init__(self, size: int = 2) -> None:
        self.leader = GroupLeader(size)
        self.up: list[Message] = []
        self.down: dict[int, list[Message]] = {rank: [] for rank in range(size)}

    def _take(self, effects: list) -> None:
        for effect in effects:
            if isinstance(effect, SendUp):
                self.up.append(effect.message)
            else:
                assert isinstance(effect, Send)
                for rank, heard in self.down.items():
                    if peer_of(rank) in effect.peers:
                        heard.append(effect.message)
        self.leader.check()

    def says(self, rank: int, message: Message) -> None:
        self._take(self.leader.handle(peer_of(rank), message))

    def hears(self, message: Message) -> None:
        self._take(self.leader.from_lighthouse(message))

    def loses(self, rank: int) -> None:
        self._take(self.leader.disconnected(peer_of(rank)))

    def join(self, rank: int, step: int = 3, lineage: str = "a") -> None:
        address = b"at-%d" % rank
        self.says(rank, Join(JOB, "g", GROUP, step, lineage, (address,)))

    def in_quorum(self) -> Group:
        """Both ranks are members of quorum 1, and nothing is to be read."""
        self.join(0)
        self.join(1)
        member = Member(GROUP, 2, (b"at-0", b"at-1"))
        self.hears(Quorum(JOB, 1, 3, "a", 0, (), (member,)))
        self.up.clear()
        for heard in self.down.values():
            heard.clear()
        return self


def test_the_group_joins_when_all_ranks_have_with_all_addresses() -> None:
    group = Group()
    group.join(0)
    assert group.up == []
    group.join(1)
    (join,) = group.up
    assert isinstance(join, Join)
    assert join.addresses == (b"at-0", b"at-1")
    assert (join.step, join.lineage) == (3, "a")


def test_ranks_at_different_positions_are_a_torn_state() -> None:
    group = Group()
    group.join(0, step=4, lineage="b")
    group.join(1)
    (join,) = group.up
    assert isinstance(join, Join)
    assert join.lineage.startswith(TORN)
    assert join.step == 3


def test_all_yes_is_the_groups_yes_with_the_first_ranks_control() -> None:
    group = Group().in_quorum()
    for rank in (1, 0):
        assert group.up == []
        group.says(rank, Vote(JOB, GROUP, 1, 3, "a", True, control=b"%d" % rank))
    (vote,) = group.up
    assert isinstance(vote, Vote)
    assert vote.ok
    assert vote.control == b"0"


def vote_of_states(*told: tuple[int, bytes]) -> Vote:
    """The yes of a group whose ranks say this of their states: (updates, digest)."""
    group = Group(len(told)).in_quorum()
    for rank, (updates, digest) in reversed(list(enumerate(told))):
        group.says(rank, Vote(JOB, GROUP, 1, 3, "a", True, updates=updates, digest=digest))
    (vote,) = group.up
    assert isinstance(vote, Vote)
    return vote


def test_what_a_group_says_of_its_state_covers_its_ranks_in_their_order() -> None:
    vote = vote_of_states((1, b"first"), (1, b"second"))
    assert vote.updates == 1
    assert vote == vote_of_states((1, b"first"), (1, b"second"))
    assert vote.digest != vote_of_states((1, b"second"), (1, b"first")).digest
    assert vote.digest != vote_of_states((1, b"first"), (1, b"other")).digest
    assert vote_of_states((1, b""), (1, b"")).digest == b""


def test_a_group_has_updated_its_state_as_often_as_each_of_its_ranks() -> None:
    assert vote_of_states((2, b""), (2, b"")).updates == 2
    assert vote_of_states((1, b""), (NOT_COUNTED, b"")).updates == NOT_COUNTED


def test_a_group_whose_ranks_have_not_made_as_many_updates_gives_up_its_state() -> None:
    """Another group may have as few at the same step, and no group would see that."""
    group = Group().in_quorum()
    for rank, updates in enumerate((1, 0)):
        group.says(rank, Vote(JOB, GROUP, 1, 3, "a", True, updates=updates))
    (leave,) = group.up
    assert isinstance(leave, Leave)
    assert leave.reason.startswith(GAVE_UP)
    assert leave.reason.endswith("rank 1 has made 0 updates, and rank 0 1")
    for rank in range(2):
        (expelled,) = group.down[rank]
        assert isinstance(expelled, Expelled)
        assert expelled.differs
        group.says(rank, Leave(JOB, GROUP, f"{GAVE_UP}{expelled.reason}"))
    assert group.up == [leave]
    for rank in range(2):
        group.join(rank, 0, f"{TORN}{GROUP}")
    join = group.up[-1]
    assert isinstance(join, Join)
    assert join.lineage.startswith(TORN)
    assert join.left == leave.left


def test_the_first_no_is_the_groups_and_stops_the_others() -> None:
    group = Group().in_quorum()
    group.says(1, Vote(JOB, GROUP, 1, 3, "a", False, "broken link"))
    (vote,) = group.up
    assert isinstance(vote, Vote)
    assert not vote.ok
    (revoke,) = group.down[0]
    assert isinstance(revoke, Revoke)
    assert revoke.reason == "broken link"
    group.says(0, Vote(JOB, GROUP, 1, 3, "a", False, "broken link"))
    group.hears(Decision(JOB, 1, 3, False, "no"))
    assert len(group.down[1]) == 1


def quorum(number: int, *, healing: bool = False) -> Quorum:
    member = Member(GROUP, 2, (b"at-0", b"at-1"), healing)
    return Quorum(JOB, number, 3, "a", 0, (), (member,))


def attempts_told(group: Group, rank: int) -> list[tuple[int, int]]:
    """(quorum_id, attempts spent) of the quorums that `rank` was told."""
    heard = [m.next_quorum if isinstance(m, Decision) else m for m in group.down[rank]]
    return [(m.quorum_id, m.attempt) for m in heard if isinstance(m, Quorum)]


def test_after_a_no_ranks_hear_of_the_next_quorum_when_all_have_voted() -> None:
    """Rank 0 has lost its second attempt. Rank 1 had not begun it: it must lose it, too."""
    group = Group().in_quorum()
    group.says(0, Vote(JOB, GROUP, 1, 3, "a", False, "broken link", attempt=2))
    group.hears(Decision(JOB, 1, 3, False, "no", quorum(2)))
    group.hears(quorum(3))
    assert attempts_told(group, 0) == attempts_told(group, 1) == []
    group.says(1, Vote(JOB, GROUP, 1, 3, "a", False, "revoked", PHASE_IDLE, attempt=1))
    assert attempts_told(group, 0) == attempts_told(group, 1) == [(2, 2), (3, 2)]


def test_a_rank_that_is_in_another_quorum_is_not_waited_for() -> None:
    group = Group().in_quorum()
    group.says(0, Vote(JOB, GROUP, 1, 3, "a", False, "broken link", attempt=2))
    group.hears(Decision(JOB, 1, 3, False, "no", quorum(2)))
    group.says(1, Heartbeat(JOB, GROUP, 1, 3))  # it is, and will vote
    assert attempts_told(group, 0) == []
    group.says(1, Heartbeat(JOB, GROUP, 0, 3))
    assert attempts_told(group, 0) == [(2, 2)]


def test_a_no_that_is_late_holds_nothing_back() -> None:
    """Rank 1 has given up its state, and joined again, when rank 0's no on the old quorum comes."""
    group, torn = Group().in_quorum(), f"{TORN}{GROUP}"
    group.says(1, Leave(JOB, GROUP, f"{GAVE_UP}spoilt"))
    group.join(1, 0, torn)
    group.says(0, Vote(JOB, GROUP, 1, 3, "a", False, "broken link"))
    group.says(0, Leave(JOB, GROUP, f"{GAVE_UP}told to"))
    group.join(0, 0, torn)
    group.hears(quorum(2, healing=True))
    assert attempts_told(group, 0) == attempts_told(group, 1) == [(2, 0)]


def test_what_is_held_back_is_void_when_the_group_must_join_again() -> None:
    group = Group().in_quorum()
    group.says(0, Vote(JOB, GROUP, 1, 3, "a", False, "broken link"))
    group.hears(Decision(JOB, 1, 3, False, "no", quorum(2)))
    group.hears(Expelled(JOB, 2, "evicted"))
    assert attempts_told(group, 0) == []
    for rank in (0, 1):
        expelled = group.down[rank][-1]
        assert isinstance(expelled, Expelled)
        assert expelled.quorum_id == NO_QUORUM  # they are not in quorum 2, and must obey
        group.join(rank)
    group.hears(quorum(3))
    assert attempts_told(group, 0) == [(3, 0)]


def test_a_request_is_repeated_only_until_its_answer_is_there() -> None:
    group = Group()
    group.join(0)
    assert group.leader.unanswered is None
    group.join(1)
    assert isinstance(group.leader.unanswered, Join)
    group.hears(Waiting(JOB, "one more"))
    assert isinstance(group.leader.unanswered, Join)
    group.hears(quorum(1))
    assert group.leader.unanswered is None


def healing() -> Group:
    """Both ranks are members of quorum 1 that heal."""
    group = Group()
    group.join(0)
    group.join(1)
    member = Member(GROUP, 2, (b"at-0", b"at-1"), True)
    group.hears(Quorum(JOB, 1, 3, "a", 0, (), (member,)))
    group.up.clear()
    return group


def test_a_no_of_ranks_that_have_healed_is_not_that_of_a_group_behind() -> None:
    """As where too few take part in the step in which the group heals."""
    group = healing()
    no = Vote(JOB, GROUP, 1, 3, "a", False, "too few", PHASE_REDUCING)
    group.says(0, no)
    assert group.up == []  # the other rank may not have healed
    assert isinstance(group.down[1][-1], Revoke)
    group.says(1, no)
    assert group.up == [no]
    group = healing()
    group.says(0, no)
    group.says(1, Vote(JOB, GROUP, 1, 3, "a", True))  # on its way already
    assert group.up == [no]


def test_a_no_of_a_rank_that_has_not_healed_is_that_of_a_group_behind() -> None:
    for first in (0, 1):
        group = healing()
        phases = [PHASE_REDUCING, PHASE_HEALING]
        for rank, phase in zip((first, 1 - first), phases, strict=True):
            group.says(rank, Vote(JOB, GROUP, 1, 3, "a", False, "revoked", phase))
        (vote,) = group.up
        assert isinstance(vote, Vote)
        assert vote.phase == PHASE_HEALING


def test_leaving_is_said_once() -> None:
    group = Group().in_quorum()
    for rank in (0, 1):
        group.says(rank, Leave(JOB, GROUP, FINISHED))
    assert group.up == [Leave(JOB, GROUP, FINISHED, quorum_id=1)]
    group.loses(0)
    group.loses(1)
    assert group.down == {0: [], 1: []}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_gives_up_its_state_takes_the_group_with_it(rank: int) -> None:
    group, other = Group().in_quorum(), 1 - rank
    leave = Leave(JOB, GROUP, f"{GAVE_UP}another learning rate", quorum_id=1)
    group.says(rank, leave)
    assert group.up == [leave]
    (expelled,) = group.down[other]
    assert isinstance(expelled, Expelled)
    assert expelled.differs  # it heals, too
    assert not expelled.hung
    group.join(rank, 0, f"{TORN}{GROUP}")
    assert len(group.up) == 1  # not without the other
    group.join(other)
    join = group.up[-1]
    assert isinstance(join, Join)
    assert join.lineage.startswith(TORN)


@pytest.mark.parametrize("order", ["one by one", "side by side"])
def test_all_ranks_that_give_up_at_once_rejoin_once(order: str) -> None:
    group = Group().in_quorum()
    torn = f"{TORN}{GROUP}"
    group.says(0, Leave(JOB, GROUP, f"{GAVE_UP}visited"))
    if order == "one by one":
        group.join(0, 0, torn)
        group.says(1, Leave(JOB, GROUP, f"{GAVE_UP}visited"))
    else:
        group.says(1, Leave(JOB, GROUP, f"{GAVE_UP}visited"))
        group.join(0, 0, torn)
    group.join(1, 0, torn)
    assert [type(message) for message in group.up] == [Leave, Join]


def test_a_rank_that_gives_up_twice_does_not_unseat_one_that_waits() -> None:
    """Rank 1 has joined again because rank 0 had given up, and gives up itself only then: rank 0,
    whose join is on its way, would take being told to join for something older."""
    group = Group().in_quorum()
    torn = f"{TORN}{GROUP}"
    group.says(0, Leave(JOB, GROUP, f"{GAVE_UP}visited"))
    group.join(0, 0, torn)
    group.join(1)
    group.says(1, Leave(JOB, GROUP, f"{GAVE_UP}visited"))
    group.join(1, 0, torn)
    assert [type(message) for message in group.up] == [Leave, Join, Leave, Join]
    assert [type(message) for message in group.down[0]] == [Expelled]  # whose state is gone already


def left_and_joined_again() -> Group:
    """Rank 1 has given up its state, and both ranks have joined again."""
    group = Group().in_quorum()
    torn = f"{TORN}{GROUP}"
    group.says(1, Leave(JOB, GROUP, f"{GAVE_UP}spoilt"))
    for rank in (1, 0):
        group.join(rank, 0, torn)
    return group


def test_a_group_that_has_left_a_quorum_does_not_vote_in_it() -> None:
    group = Group().in_quorum()
    group.says(1, Leave(JOB, GROUP, f"{GAVE_UP}spoilt"))
    group.says(0, Vote(JOB, GROUP, 1, 3, "a", False, "allreduce failed"))
    assert [type(message) for message in group.up] == [Leave]


@pytest.mark.parametrize("known", [True, False])
def test_a_group_that_has_joined_again_stays_so_when_it_is_expelled_from_what_it_left(
    known: bool,
) -> None:
    """The answer to something that crossed the leave. Joined again, the group may give up again,
    and its other ranks must hear of it."""
    group = left_and_joined_again()
    if known:
        group.hears(Expelled(JOB, 1, "left"))
    group.hears(Quorum(JOB, 2, 3, "a", 0, (), (Member(GROUP, 2, (b"at-0", b"at-1")),)))
    if not known:
        group.hears(Expelled(JOB, 1, "left"))
    group.up.clear()
    group.down[0].clear()
    group.says(1, Leave(JOB, GROUP, f"{GAVE_UP}spoilt"))
    assert [type(message) for message in group.up] == [Leave]
    assert [type(message) for message in group.down[0]] == [Expelled]


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("decision", [True, False])
def test_a_group_that_has_left_is_in_no_quorum_made_before_that_was_known(
    decision: bool, joined: bool
) -> None:
    group = left_and_joined_again()
    if not joined:
        group.says(1, Leave(JOB, GROUP, f"{GAVE_UP}spoilt"))
    group.down[0].clear()
    quorum = Quorum(JOB, 2, 4, "b", 1, (), ())
    group.hears(Decision(JOB, 1, 3, True, "ok", quorum) if decision else quorum)
    if decision:  # rank 0 may still be in doubt of its step
        (heard,) = group.down[0]
        assert isinstance(heard, Decision)
        assert (heard.next_quorum, heard.waiting) == (None, True)
    else:
        assert group.down[0] == []
    group.hears(Expelled(JOB, 1, "not known here"))  # of the quorum that the ranks know
    assert isinstance(group.down[0][-1], Expelled)


def test_a_rank_that_leaves_its_place_lets_the_others_keep_their_state() -> None:
    group = Group().in_quorum()
    group.says(0, Leave(JOB, GROUP, f"{GAVE_UP_PLACE}far behind"))
    (expelled,) = group.down[1]
    assert isinstance(expelled, Expelled)
    assert not expelled.differs


def test_a_lost_rank_breaks_the_group() -> None:
    group = Group(3)
    for rank in range(3):
        group.join(rank)
    group.up.clear()
    group.loses(1)
    assert group.up == [Leave(JOB, GROUP, "rank 1 is gone")]
    for rank in (0, 2):
        (refused,) = group.down[rank]
        assert isinstance(refused, Refused)
        assert refused.reason.startswith(BROKEN)
    group.join(2)
    assert isinstance(group.down[2][-1], Refused)


@pytest.mark.parametrize("committed", [True, False])
def test_a_rank_that_was_told_to_end_takes_its_group_along_in_peace(committed: bool) -> None:
    """SIGTERM reaches rank 1 a step before rank 0, or never: the vote has said goodbye for both."""
    group = Group().in_quorum()
    group.says(0, Vote(JOB, GROUP, 1, 3, "a", True))
    group.says(1, Vote(JOB, GROUP, 1, 3, "a", committed, leaving=True))
    vote = group.up[-1]
    assert isinstance(vote, Vote)
    assert vote.leaving
    group.hears(Decision(JOB, 1, 3, committed, waiting=True))
    told = group.down[0][-1]
    assert isinstance(told, Refused)
    assert told.reason.startswith(LEFT)
    up = len(group.up)
    group.loses(1)
    group.join(0)
    assert group.down[0][-1] == told
    assert len(group.up) == up


def test_a_goodbye_that_came_after_the_groups_no_is_no_crash() -> None:
    group = Group().in_quorum()
    group.says(0, Vote(JOB, GROUP, 1, 3, "a", False))
    group.says(1, Vote(JOB, GROUP, 1, 3, "a", True, leaving=True))
    group.hears(Decision(JOB, 1, 3, False, waiting=True))
    assert not isinstance(group.down[0][-1], Refused)  # at the lighthouse the group has not left
    group.loses(1)
    told = group.down[0][-1]
    assert isinstance(told, Refused)
    assert told.reason.startswith(LEFT)
    assert isinstance(group.up[-1], Leave)


@pytest.mark.parametrize("when", ["before", "after"])
def test_who_wants_to_go_on_without_a_rank_that_has_left_is_told(when: str) -> None:
    """Rank 1 has ended for good; rank 0 gives up its state and would wait for it forever."""
    group = Group().in_quorum()
    group.says(1, Leave(JOB, GROUP, FINISHED))
    if when == "before":
        group.loses(1)
    group.says(0, Leave(JOB, GROUP, f"{GAVE_UP}another learning rate"))
    group.join(0, 0, f"{TORN}{GROUP}")
    if when == "after":
        group.loses(1)
    refused = group.down[0][-1]
    assert isinstance(refused, Refused)
    assert "rank 1 is gone" in refused.reason
