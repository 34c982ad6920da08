"""What the main process saves, and the next one writes in its place. The board is a supervisor's own."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator

import pytest

from ft_accelerate.runtime.leadership import Leadership, OwnWrites, Saves
from ft_accelerate.runtime.script_position import ScriptPosition
from ft_core.launch.board import SCRIPT, Board, Slot
from ft_core.replica.status import Participation
from tests.harness.waiting import PATIENCE_S


def leadership(first: bool = False) -> Leadership:
    return Leadership(ScriptPosition(), group_size=1, speaks=True, first=first)


def saves_of(lead: Leadership) -> Saves:
    return Saves(lead, lambda: lambda: None)


def event(saves: Saves, lead: Leadership, mine: int, *members: int) -> None:
    """An event that these processes have done together is committed."""
    rank, size = members.index(mine), len(members)
    part = Participation(sum(1 << member for member in members), rank, size, size, rank, size)
    lead.decide(part, mine, dict.fromkeys(members, True))
    saves.committed()


def test_the_next_main_process_writes_what_the_one_before_has_not() -> None:
    lead = leadership()
    saves, written = saves_of(lead), list[str]()
    event(saves, lead, 2, 0, 1, 2)
    saves.save(lambda: saves.save(lambda: None), lambda: written.append("made"))
    event(saves, lead, 2, 0, 1, 2)  # the main process has made it
    saves.save(lambda: None, lambda: written.append("lost"))
    event(saves, lead, 2, 1, 2)  # process 1 writes now, and may die in it
    assert written == []
    event(saves, lead, 2, 2)
    assert written == ["lost"]
    saves.save(lambda: written.append("own"))
    event(saves, lead, 2, 2)
    assert written == ["lost", "own"]


def test_an_operation_within_a_save_is_not_after_it() -> None:
    """`save_state` waits for all processes before it writes, where Accelerate numbers the checkpoints."""
    lead = leadership()
    saves, written = saves_of(lead), list[str]()
    event(saves, lead, 1, 0, 1)
    saves.save(lambda: event(saves, lead, 1, 0, 1), lambda: written.append("lost"))
    event(saves, lead, 1, 1)  # process 0 has died when it wrote
    assert written == ["lost"]


@pytest.fixture
def slots() -> Iterator[tuple[Board, list[Slot]]]:
    board = Board(2)
    shared, wake = board.descriptors
    memory = mmap.mmap(shared, len(board._memory))
    yield board, [Slot(memory, wake, child, whole=True) for child in range(2)]
    memory.close()
    board.close()
    os.close(board._read)


@pytest.mark.parametrize("dies", [False, True])
def test_at_the_end_it_waits_for_the_main_process(
    dies: bool, slots: tuple[Board, list[Slot]]
) -> None:
    board, (main, other) = slots
    lead = leadership()
    saves, written = saves_of(lead), list[str]()
    event(saves, lead, 1, 0, 1)
    main.leads(True)
    saves.save(lambda: None, lambda: written.append("last"))
    other.training(1, over=True)
    waiting = threading.Thread(target=saves.outlive, args=(other, lambda decide: decide()))
    waiting.start()
    if dies:
        board.died(0)
    else:
        main.training(1, over=True)  # end_training, and the script goes on
        assert waiting.is_alive()
        main.training(SCRIPT, over=True)
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()
    assert written == (["last"] if dies else [])
    assert board.look(1).leads is dies


def asks(own: OwnWrites) -> None:
    """As a script does: if accelerator.is_main_process: ..."""
    own.may_begin()


def test_where_the_script_writes_by_itself_is_known_until_it_comes_to_something_else(
    slots: tuple[Board, list[Slot]],
) -> None:
    board, (main, other) = slots
    own = OwnWrites(main)
    asks(own)
    place = board.look(0).writes
    assert place.endswith("of test_leadership.py")
    own.over()
    assert board.look(0).writes == ""
    asks(own)
    own.told()  # model.save_pretrained(folder, is_main_process=accelerator.is_main_process)
    assert board.look(0).writes == ""
    asks(own)
    own.may_begin()
    own.told()
    assert board.look(0).writes == place, "the block goes on"
    board.died(0)
    board.clear(0)
    assert (board.look(0).writes, board.look(0).lost) == ("", place)
    own = OwnWrites(other)
    own.may_begin()
    own.over()
    assert board.look(0).lost == place, "another place"
    asks(own)
    assert board.look(0).lost == place, "it may die there, too"
    own.over()
    assert board.look(0).lost == ""


def test_what_was_written_again_before_the_supervisor_saw_the_death_is_not_lost(
    slots: tuple[Board, list[Slot]],
) -> None:
    """On a busy machine the next main process is faster: the run was whole, and its exit code was not 0."""
    board, (main, other) = slots
    dead, successor = OwnWrites(main), OwnWrites(other)
    asks(dead)
    asks(successor)
    successor.over()
    board.died(0)
    assert board.look(0).lost == "" and board.look(0).writes, "the supervisor still names the line"
    board.clear(0)
    asks(dead)
    board.died(0)
    assert board.look(0).lost, "what another life has lost"


def test_a_library_that_asks_writes_what_is_held(slots: tuple[Board, list[Slot]]) -> None:
    board, (main, _) = slots
    own = OwnWrites(main)
    names = {"__name__": "accelerate.accelerator", "own": own}
    exec("def print(): own.may_begin()\ndef is_main_process(): own.may_begin()", names)
    names["print"]()
    assert board.look(0).writes == ""
    names["is_main_process"]()
    assert board.look(0).writes.endswith("of test_leadership.py")
