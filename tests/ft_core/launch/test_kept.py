"""The keeper of states: which version it takes, and which process begins with it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ft_core.launch.kept import Card, Version, takes

KEPT = Version(step=10, lineage="l", genesis=7, held=4)


@pytest.mark.parametrize(
    ("own", "begins"),
    [
        (Version(0, "", 0, 0), True),  # a fresh start
        (replace(KEPT, step=9), True),  # an older checkpoint
        (replace(KEPT, held=3, step=99), True),  # of a quorum that a newer one has not gone on from
        (KEPT, False),
        (replace(KEPT, step=11), False),  # a newer checkpoint
        (replace(KEPT, held=5, step=2), False),
        (Version(11, "", 0, 0), False),  # a checkpoint that says no more than its step
        (Version(10, "", 0, 0), True),
        (Version(3, "x", 8, 2), False),  # of another run
    ],
)
def test_a_process_begins_with_what_is_kept_if_that_is_newer(own: Version, begins: bool) -> None:
    assert KEPT.begins_with(own) is begins


def test_the_keeper_never_goes_back() -> None:
    card = Card("tcp://a/w", ("job", "room", "schema"), KEPT)
    assert takes(None, card)
    assert not takes(card, card)
    assert not takes(card, replace(card, version=None))
    assert not takes(card, replace(card, version=replace(KEPT, step=9)))
    assert takes(card, replace(card, version=replace(KEPT, step=11)))
    assert takes(card, replace(card, version=replace(KEPT, step=1, held=5)))
    assert takes(card, replace(card, version=Version(1, "x", 8, 1))), "the job has begun anew"
    assert takes(
        card, replace(card, place=("job", "room 2", "schema"), version=Version(1, "x", 7, 1))
    )


@pytest.mark.parametrize("version", [None, KEPT])
def test_a_card_travels(version: Version | None) -> None:
    card = Card("tcp://a/w", ("job", "room", "schema"), version, "token")
    assert Card.of(card.row()) == card
