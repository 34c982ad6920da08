"""What a training process tells its supervisor by the memory that they share."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest

from ft_core.config import JobOptions
from ft_core.launch.board import Board, Seen, Slot, reported, slot
from ft_core.manager import Manager
from ft_core.process_group import ProcessGroupGloo
from ft_core.replica.status import Attempt, ReplicaStatus
from lighthouse.errors import TrainingOver
from tests.harness.cluster import Replica, as_child, board_of, lighthouse, replicas
from tests.harness.waiting import PATIENCE_S, until


@pytest.fixture
def board() -> Iterator[Board]:
    """This process is the child 1 of its two."""
    with board_of(2) as made, as_child(made, 1):
        yield made


def slots_of(board: Board, count: int) -> list[Slot]:
    """Each child's end."""
    slots = []
    for child in range(count):
        with as_child(board, child):
            slots.append(slot())
    return slots


def test_commits_count_from_the_first_quorum_of_the_training_on(board: Board) -> None:
    """A loop of one's own, which calls nothing but its manager."""
    with lighthouse() as server:
        before = agreements(server.address())
        before.start_quorum()
        assert before.should_commit()
        before.shutdown()
        assert board.look(1) == Seen(), "no training yet"
        a = Replica(server, "a")
        a.manager.start_quorum()
        assert board.look(1).joined, "before the first vote, hence before any peer can finish"
        assert a.manager.should_commit()
        a.run_to(3)
        a.manager.state.trains = False  # as an operation of a script's
        a.run_to(5)
        a.close()
    assert board.wait()
    assert board.look(1) == Seen(joined=True, step=4, commits=5, trained=2)
    assert board.look(0) == Seen()
    board.clear(1)
    assert board.look(1) == Seen()


def test_a_board_that_is_closed_keeps_no_descriptor() -> None:
    def opened() -> set[str]:
        return set(os.listdir("/proc/self/fd"))

    before, heard = opened(), []
    with board_of(2) as board:
        waits = threading.Thread(target=lambda: heard.append(board.wait()))
        waits.start()
    waits.join()
    assert heard == [False]
    assert opened() == before


def test_rows_after_a_training_have_the_same_numbers_in_all(board: Board) -> None:
    """What is logged of one evaluation by one process only moves no number of the next one. The last one that
    was logged outlives the process."""
    slots = slots_of(board, 2)
    for each, extra in zip(slots, (2, 0), strict=True):
        each.training(1, over=True)
        each.evaluates()
        for _ in range(extra):
            each.next_row()
        each.evaluates()
    first, again = (each.next_row() for each in slots)
    assert again == first < slots[1].next_row()
    slots[0].logged(first)
    board.died(0)
    board.clear(0)
    assert slots[1].last_row == first
    slots[1].training(2, over=False)
    slots[1].evaluates()
    assert slots[1].next_row() > first


def test_a_life_that_evaluates_again_forgets_no_row_of_the_one_before(board: Board) -> None:
    """All died behind the row of the second of two evaluations, and this one is the first that is back."""

    def life() -> Slot:
        one = slots_of(board, 2)[0]
        one.training(1, over=False)
        one.training(1, over=True)
        return one

    before = life()
    for _ in range(2):
        before.evaluates()
        before.logged(row := before.next_row())
    board.died(0)
    board.clear(0)
    again = life()
    again.evaluates()
    again.evaluated()
    assert again.last_row == row


def test_whether_all_others_leave(board: Board) -> None:
    first, other = slots_of(board, 2)
    assert not first.others_leave(), "there is none"
    other.join()
    assert not first.others_leave()
    other.leaves()
    assert first.others_leave()
    board.died(1)
    assert not first.others_leave()


def agreements(address: str) -> Manager:
    """Of a script whose training has not begun: its steps are none of a training."""
    options = JobOptions.resolve(
        name="a",
        job_id="before",
        lighthouse=address,
        group_rank=0,
        group_world_size=1,
        async_quorum=False,
        watch_process=False,
        trains=False,
    )
    manager = Manager.from_options(ProcessGroupGloo(timeout=20), options)
    manager.set_state_dict_fns(lambda state: None, dict)
    return manager


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("min_replicas (5) is\n  too many"), "ValueError: min_replicas (5) is too many"),
        (SystemExit("there is no script"), "there is no script"),
        (SystemExit(2), ""),
        (ValueError("é" * 2000), "ValueError: " + "é" * 369),
    ],
)
def test_the_error_of_a_script_is_told(
    board: Board, error: BaseException, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the supervisor, and one that Python keeps from its exit hooks to them, too."""
    # Left in this process, it would tell later tests that their scripts have failed.
    monkeypatch.setattr(sys, "last_value", None, raising=False)
    with pytest.raises(type(error)), reported():
        raise error
    assert sys.last_value is (error if isinstance(error, SystemExit) else None)
    assert board.look(1).error == told
    assert board.look(0).error == ""
    board.clear(1)
    assert board.look(1).error == ""


def test_the_first_that_is_left_after_the_training_takes_over() -> None:
    with board_of(3) as made:
        slots = slots_of(made, 3)

        def takers() -> list[int]:
            return [i for i, each in enumerate(slots) if each.takes_over()]

        slots[1].leads(True)
        for each in slots:
            each.training(1, over=True)
        assert takers() == [], "the leader lives"
        made.died(1)
        assert takers() == [0]
        made.clear(1)  # started again: it has not trained
        assert takers() == [0]
        made.died(0)
        assert takers() == [2]
        slots[2].leads(True)
        assert takers() == []
        slots[2].leads(False)
        made.clear(0)
        slots[0].training(1, over=True)
        assert takers() == [0]
        made.finished(0)  # it has not written for all
        assert takers() == [2]


def test_whether_another_process_has_come_to_a_training() -> None:
    with board_of(2) as made:
        mine, other = slots_of(made, 2)
        mine.training(1, over=False)
        assert mine.none_has_trained() and not other.none_has_trained()
        other.training(1, over=False)
        assert not mine.none_has_trained()
        made.died(1)
        assert mine.none_has_trained()
        made.clear(1)
        made.finished(1)
        assert mine.none_has_trained(), "its script has no training"
        made.clear(1)
        slots_of(made, 2)[1].join()
        made.finished(1)
        assert not mine.none_has_trained()


def test_no_process_waits_for_a_leader_that_is_past_that_training() -> None:
    """Not even for one that is in the next training already, nor for one that was stopped beside its successor."""
    with board_of(3) as made:
        slots = slots_of(made, 3)
        mine, leader, stopped = slots
        for each in slots:
            each.training(1, over=False)
        leader.leads(True)
        stopped.leads(True)
        mine.training(1, over=True)
        assert not mine.has_passed(1)
        assert mine._leader_writes(1)
        leader.training(1, over=True)
        assert mine.has_passed(1) and not mine.has_passed(2)
        assert not mine.others_are_past() and not leader.others_are_past(), "one trains on"
        assert stopped.another_is_past()
        mine.await_leader(1)
        leader.training(2, over=False)
        assert mine.has_passed(1) and not mine.has_passed(2)
        mine.await_leader(1)
        made.died(1)
        assert not mine.has_passed(1)
        assert mine._leader_writes(1), "the one that was stopped leads again"
        stopped.training(1, over=True)
        assert mine.others_are_past()
        mine.training(2, over=False)
        assert not mine.others_are_past(), "they have not ended that one"
        assert not mine.another_is_past()
        made.finished(2)
        assert mine.others_are_past(), "its script has ended"
        made.died(2)
        assert not mine.others_are_past(), "none is left that has"


def test_nothing_is_taken_over_where_other_machines_train() -> None:
    with board_of(1, whole=False) as made, as_child(made, 0):
        slot().training(1, over=True)
        assert not slot().takes_over()


def status_of(replica: Replica) -> ReplicaStatus:
    session = replica.manager._session
    assert session is not None
    return session.control.status


def test_a_vote_that_waits_outside_ends_when_all_others_have_ended_the_training(
    board: Board,
) -> None:
    """The lighthouse is a new one, and waits for the other member, which may know what became of the step."""
    done, outcomes = threading.Event(), list[bool]()

    def ends() -> None:
        a.run_to(1)
        a.begin()
        until(lambda: status_of(b).attempt is Attempt.VOTED, "the vote")
        first.shutdown()
        a.close()
        with lighthouse(bind=first.address(), all_join=True, expected_replicas=2):
            until(lambda: status_of(b).outside, "it to be outside")
            board.finished(0)
            assert done.wait(PATIENCE_S)

    def votes() -> None:
        b.run_to(1)
        gradient = b.begin()
        try:
            with pytest.raises(TrainingOver, match="finished in all other processes"):
                outcomes.append(b.end(gradient))
        finally:
            done.set()
            b.close()

    with lighthouse(all_join=True, expected_replicas=2) as first:
        a, b = (Replica(first, name) for name in "ab")
        replicas(ends, votes)
    assert not outcomes


def test_a_loop_that_is_evicted_is_to_be_back_and_comes_back(board: Board) -> None:
    short, back = timedelta(seconds=2), threading.Event()
    with lighthouse(timeout_s=2.0, all_join=True, expected_replicas=2) as server:
        a, b = (Replica(server, name, timeout=short) for name in "ab")

        def goes_on() -> None:
            while not back.is_set():
                a.step()
            a.close()

        def hangs() -> None:
            b.run_to(1)
            try:
                until(lambda: board.look(1).hung_until > 0, "the eviction")
                while not b.step():
                    pass
            finally:
                back.set()
                b.close()
            assert board.look(1).hung_until == 0

        replicas(goes_on, hangs)
