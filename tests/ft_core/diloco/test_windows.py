"""What counts of what a member has done."""

from __future__ import annotations

from typing import Any

import pytest

from ft_core.diloco.diloco import DiLoCo, LocalSGD
from ft_core.diloco.schedule import Windows
from ft_core.process_group import ProcessGroupError
from lighthouse.errors import LighthouseUnavailable
from tests.ft_core.diloco.members import Trainer
from tests.harness.cluster import lighthouse


def test_unweighted_windows_count_one_unless_dropped() -> None:
    windows = Windows(2, 10, "")
    assert windows.weight(0) == 1.0
    windows.inner_step()
    windows.drop_all()
    assert windows.weight(0) == windows.weight(1) == 0.0
    windows.inner_step()
    assert windows.weight(0) == 1.0


def test_by_inner_steps_each_fragment_for_itself() -> None:
    windows = Windows(2, 10, "steps")
    for _ in range(5):
        windows.inner_step()
    windows.restart(0)
    for _ in range(5):
        windows.inner_step()
    assert (windows.weight(0), windows.weight(1)) == (0.5, 1.0)
    windows.drop_all()
    assert (windows.weight(0), windows.weight(1)) == (0.0, 0.0)


def test_by_samples() -> None:
    windows = Windows(1, 10, "samples")
    windows.add_samples(32)
    windows.inner_step()
    windows.add_samples(7)
    assert windows.weight(0) == 39.0
    with pytest.raises(ValueError, match="must not be negative"):
        windows.add_samples(-1)


def test_a_window_is_not_kept_while_it_is_unknown_whether_it_was_counted() -> None:
    windows = Windows(2, 10, "")
    windows.sent(1)
    assert windows.may_be_kept(0) and not windows.may_be_kept(1)
    windows.committed(1)
    assert windows.may_be_kept(1)
    windows.sent(0)
    windows.in_step()  # it still stands where the quorum stands: the outer step was discarded
    assert windows.may_be_kept(0)


def test_unknown_unit() -> None:
    with pytest.raises(ValueError, match="weighted must be"):
        Windows(1, 10, "often")


def heal_next(member: Trainer, **place: int) -> None:
    """The next quorum that it joins loads a peer's state, which names this place of its loop."""
    start = member.manager.start_quorum

    def healed(*args: Any, **kwargs: Any) -> None:
        start(*args, **kwargs)
        member.manager.start_quorum = start  # type: ignore[method-assign]
        for name, value in place.items():
            setattr(member.loop, name, value)

    member.manager.start_quorum = healed  # type: ignore[method-assign]


def evict(member: Trainer) -> None:
    member.manager.rejoin("evicted", discard_state=False)
    member.loop._open = False  # as after a vote that discards


@pytest.mark.parametrize("when", ["slot begins", "window is sent again"])
def test_a_member_that_takes_a_peers_place_goes_on_from_there(when: str) -> None:
    """It counts no inner step twice, and sends nothing before its peers do."""
    with lighthouse() as server:
        member = Trainer(server.address(), 0, LocalSGD, sync_every=4, keep_windows=True)
        loop, manager = member.loop, member.manager
        with loop:
            for _ in range(4 if when == "slot begins" else 3):
                member.inner_step()
            heal_next(member, local_step=2)  # within a window
            if when == "slot begins":
                evict(member)
            else:
                manager.report_error(ProcessGroupError("a peer has died"))
            before = manager.current_step()
            member.inner_step()
            assert (loop.local_step, manager.current_step()) == (2, before)
            member.inner_step()
            assert (loop.local_step, manager.current_step()) == (3, before)
            member.inner_step()
            assert (loop.local_step, manager.current_step()) == (0, before + 1)
        member.close()


def test_a_member_that_enters_at_a_peers_place_does_what_is_due_there() -> None:
    """The peer waits in its outer step for this member, which must not make an inner step first."""
    with lighthouse() as server:
        member = Trainer(server.address(), 0, LocalSGD, sync_every=4, keep_windows=True)
        heal_next(member, local_step=4)  # behind a slot's last inner step
        with member.loop as loop:
            assert (loop.local_step, member.manager.current_step()) == (0, 1)
        member.close()


def test_one_that_found_no_quorum_may_be_entered_again() -> None:
    """By a loop that has caught that. It took its slot for begun, and sent at the slot's end without a quorum."""
    with lighthouse() as server:
        member = Trainer(server.address(), 0, LocalSGD, sync_every=2)
        start, calls = member.manager.start_quorum, []

        def unavailable_once(*args: Any, **kwargs: Any) -> None:
            calls.append(args)
            if len(calls) == 1:
                raise LighthouseUnavailable("no lighthouse answers")
            start(*args, **kwargs)

        member.manager.start_quorum = unavailable_once  # type: ignore[method-assign]
        with pytest.raises(LighthouseUnavailable):
            member.loop.__enter__()
        assert not member.loop.in_slot
        member.run(2)
        assert member.manager.current_step() == 1
        assert len(calls) == 2


def test_a_member_that_took_a_peers_place_sends_in_a_sync() -> None:
    """At once, though nothing was due at that place: a peer waits there for what it sends."""
    with lighthouse() as server:
        member = Trainer(server.address(), 0, LocalSGD, sync_every=4, keep_windows=True)
        bind, misses = member.manager.bind_step, [None]
        member.manager.bind_step = lambda: misses.pop() if misses else bind()  # type: ignore[method-assign]
        with member.loop:
            member.inner_step()
            member.loop.local_step = 3  # as a load does, of a state behind the last batch
            assert member.loop.sync(), "the attempt in which it has healed begins anew"
        assert not misses
        member.close()


@pytest.mark.parametrize("left", [1, 0])
@pytest.mark.parametrize("when", ["slot begins", "fragment is sent again"])
def test_a_member_that_heals_in_a_sync_makes_what_is_left_of_its_peers(
    when: str, left: int
) -> None:
    with lighthouse() as server:
        options = {"sync_every": 6, "fragments": 3, "keep_windows": True}
        member = Trainer(server.address(), 0, DiLoCo, **options)
        loop, manager = member.loop, member.manager
        with loop:
            member.inner_step()
            heal_next(member, local_step=0, to_sync=left)
            if when == "slot begins":
                evict(member)
            else:
                loop._launch()
                manager.report_error(ProcessGroupError("a peer has died"))
            assert loop.sync()
            assert (loop.to_sync, manager.current_step()) == (0, left)
        member.close()
