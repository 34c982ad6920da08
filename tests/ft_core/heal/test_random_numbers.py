"""Torch's random numbers, of a process that comes back."""

from __future__ import annotations

import torch

from ft_core.heal.random_numbers import RandomNumbers


def test_seeded_alike_it_goes_on_with_its_peers_numbers() -> None:
    torch.manual_seed(3)
    peer, late = RandomNumbers(), RandomNumbers()
    torch.rand(7)
    peer.mark()
    expected = torch.rand(5)
    torch.manual_seed(3)  # it has been started again
    late.take(peer.marked())
    assert torch.equal(torch.rand(5), expected)
    late.put_back()  # its batch is computed once more
    assert torch.equal(torch.rand(5), expected)
    assert torch.equal(late.marked()[0], peer.marked()[0])


def test_with_a_seed_of_its_own_it_keeps_its_own() -> None:
    torch.manual_seed(3)
    peer, late = RandomNumbers(), RandomNumbers()
    peer.mark()
    torch.manual_seed(4)
    expected = torch.rand(5)
    torch.manual_seed(4)
    late.take(peer.marked())
    assert torch.equal(torch.rand(5), expected)


def test_a_member_that_was_let_in_again_has_computed_what_its_peers_have() -> None:
    """It was evicted within a step: its numbers are theirs already, and it has used some."""
    torch.manual_seed(3)
    peer, member = RandomNumbers(), RandomNumbers()
    for each in (peer, member):
        each.mark()
    torch.rand(7)
    now = torch.get_rng_state()
    member.take(peer.marked())
    assert torch.equal(torch.get_rng_state(), now)
