"""Who holds which share of the data, as each member finds it from its state and its quorum."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from ft_core.replica.shares import Shares
from ft_core.replica.status import CopyIndex, Participation, ParticipationRule, View
from lighthouse.wire.messages import Member, name_of


def view(*names: str, healing: tuple[str, ...] = ()) -> View:
    members = tuple(Member(f"{n}:x", 1, (b"",), n in healing) for n in names)
    return View(1, 1, "l", members)


def contributors(shares: Shares, now: View) -> dict[str, int]:
    """The share of each member that contributes, as all members find it."""
    found: dict[str, int] = {}
    groups = set()
    for member in now.members:
        plain = ParticipationRule().part(now, member.replica_id, behind=member.healing)
        part = shares.part(now, plain, member.replica_id)
        groups.add((part.groups, part.participants))
        assert (part.rank is None) == (part.share is None)
        if part.share is not None:
            assert part.rank == len(found), "ranks without gaps, in the order of the members"
            found[name_of(member.replica_id)] = part.share
    assert groups == {(len(found), len(found))}
    assert len({*found.values()}) == len(found), "a share has one holder"
    return found


def test_a_spare_takes_over_with_the_next_step() -> None:
    shares = Shares.vacant(3, 1)
    assert contributors(shares, view("0", "1", "2", "3")) == {"0": 0, "1": 1, "2": 2}
    shares = shares.after(view("0", "1", "2", "3"))
    died = view("1", "2", "3")
    assert contributors(shares, died) == {"1": 1, "2": 2}, (
        "the spare has computed no batch of its share"
    )
    shares = shares.after(died)
    assert contributors(shares, died) == {"1": 1, "2": 2, "3": 0}


def test_one_that_comes_back_is_a_spare_and_takes_over_in_its_turn() -> None:
    shares = Shares(("0", "1", "2"))
    shares = shares.after(view("1", "2", "3"))
    back = view("1", "2", "3", "0", healing=("0",))
    assert contributors(shares, back) == {"1": 1, "2": 2, "3": 0}
    shares = shares.after(back)
    assert contributors(shares, view("1", "2", "3", "0")) == {"1": 1, "2": 2, "3": 0}
    shares = shares.after(view("1", "3", "0"))
    assert contributors(shares, view("1", "3", "0")) == {"1": 1, "3": 0, "0": 2}


def test_one_that_heals_before_a_step_was_made_without_it_keeps_its_share() -> None:
    shares, back = Shares(("0", "1")), view("1", "2", "0", healing=("0",))
    assert contributors(shares, back) == {"1": 1}
    assert shares.after(back).holders == ("0", "1")


@pytest.mark.parametrize(
    ("left", "during", "after"),
    [
        (("2", "3"), {"2": 2}, {"2": 2, "3": 0}),  # two deaths, one spare
        (("1", "2"), {"1": 1, "2": 2}, {"1": 1, "2": 2}),  # a holder and the spare
        (("3",), {"3": 0}, {"3": 0}),  # all holders: no step would be made otherwise
    ],
)
def test_several_die_at_once(
    left: tuple[str, ...], during: dict[str, int], after: dict[str, int]
) -> None:
    shares, now = Shares(("0", "1", "2")), view(*left)
    assert contributors(shares, now) == during
    assert contributors(shares.after(now), now) == after


def test_shares_move_at_once_where_no_step_could_be_committed_before() -> None:
    shares, now = Shares(("0", "1", "2"), least=3), view("1", "2", "3")
    assert contributors(shares, now) == {"1": 1, "2": 2, "3": 0}
    assert shares.after(now).holders == ("3", "1", "2")


def part_of(name: str, shares: Shares, now: View) -> Participation:
    behind = any(m.healing for m in now.members if name_of(m.replica_id) == name)
    plain = ParticipationRule().part(now, f"{name}:x", behind=behind)
    return shares.part(now, plain, f"{name}:x")


def test_what_a_member_reads_is_what_it_holds_next() -> None:
    """So a loop that can't go back to a batch reads it once, if nothing else happens."""
    shares, now = Shares(("0", "1", "2")), view("1", "2", "3", "4", "0", healing=("0",))
    assert [part_of(n, shares, now).reads for n in "12304"] == [1, 2, None, 0, None]
    assert [part_of(n, shares, view("1", "3", "4")).reads for n in "134"] == [1, 0, 2]


def test_an_heir_has_a_share_for_which_others_wait() -> None:
    shares, now = Shares(("0", "1", "2"), least=3), view("1", "2", "3")
    assert [part_of(n, shares, now).heir for n in "123"] == [False, False, True]
    # Nobody waits where no holder is left, and none is needed where enough are.
    assert not part_of("3", shares, view("3")).heir
    first = Shares.vacant(3, 3)
    assert not part_of("0", first, view("0", "1", "2")).heir
    assert [part_of(n, first, view("0", "1", "3")).heir for n in "013"] == [False, False, True]
    assert not part_of("3", first, view("3")).heir
    assert not part_of("3", Shares(("0", "1", "2")), now).heir


def test_one_that_heals_holds_no_share_where_too_few_would() -> None:
    shares, now = Shares(("0", "1"), least=2), view("1", "2", "0", healing=("0",))
    assert contributors(shares, now) == {"1": 1, "2": 0}
    assert shares.after(now).holders == ("2", "1")


def test_the_first_shares_go_by_number_and_later_ones_by_rank() -> None:
    shares, now = Shares.vacant(3, 1), view("2", "1", "4", "3")
    assert contributors(shares, now) == {"2": 2, "1": 1, "4": 0}
    now = view("3", "4", "5")
    assert shares.after(now).after(now).holders == ("3", "4", "5")


def test_each_rank_with_a_copy_of_a_group_that_holds_a_share_contributes() -> None:
    shares, now = Shares(("2", "1")), view("1", "2", "3")
    for name, first in (("1", 0), ("2", 2), ("3", None)):
        for rank in (0, 1):
            plain = ParticipationRule(place=CopyIndex(rank, 2)).part(now, f"{name}:x", behind=False)
            part = shares.part(now, plain, f"{name}:x")
            assert part.rank == (None if first is None else first + rank)
            assert (part.participants, part.groups) == (4, 2)


def test_what_was_loaded_for_another_number_of_shares_is_left_out() -> None:
    assert Shares.vacant(2, 1).loaded(["5", "6"]).holders == ("5", "6")
    assert Shares.vacant(2, 1).loaded(["5", "6", "7"]) == Shares.vacant(2, 1)
    assert Shares.vacant(2, 1).loaded(()) == Shares.vacant(2, 1)


@dataclass
class Process:
    name: str
    shares: Shares
    healing: bool = False
    lives: int = field(default=0)

    @property
    def replica_id(self) -> str:
        return f"{self.name}:{self.lives}"


@pytest.mark.parametrize("seed", range(30))
def test_members_agree_whatever_dies_and_comes_back(seed: int) -> None:
    """Members hold only what they were given: the state before, their quorum, and a peer's heal."""
    chance = random.Random(seed)
    count, spares = chance.randint(1, 4), chance.randint(1, 3)
    least = chance.randint(1, count)
    start = Shares.vacant(count, least)
    members = [Process(str(n), start) for n in range(count + spares)]
    chance.shuffle(members)  # ranks go by whatever order
    away: list[Process] = []
    calm = 0
    for _ in range(200):
        if len(members) > 1 and chance.random() < 0.3:
            away.append(members.pop(chance.randrange(len(members))))
            calm = 0
        if away and chance.random() < 0.3:
            back = away.pop(chance.randrange(len(away)))
            back.shares, back.healing, back.lives = start, True, back.lives + 1
            members.append(back)
        healthy = [m for m in members if not m.healing]
        if not healthy:
            return  # no state is left: such a job ends
        for member in members:
            if member.healing:  # it loads a peer's state before it contributes
                member.shares = start.loaded(healthy[0].shares.holders)
        now = View(1, 1, "l", tuple(Member(m.replica_id, 1, (b"",), m.healing) for m in members))
        parts = [contributors(m.shares, now) for m in members]
        assert all(part == parts[0] for part in parts)
        if len(parts[0]) < least or chance.random() < 0.3:
            continue  # discarded: nothing moves
        # Full strength two steps after a death, if there are enough that have a state.
        calm += 1
        assert calm < 2 or len(parts[0]) == min(count, len(healthy))
        for member in members:
            member.shares, member.healing = member.shares.after(now), False
        assert len({m.shares for m in members}) == 1
