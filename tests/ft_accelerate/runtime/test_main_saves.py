"""What the main process saves, and the next one writes in its place. The board is a supervisor's own."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator

import pytest

from ft_accelerate.runtime.leadership import Leadership, Saves
from ft_accelerate.runtime.script_position import ScriptPosition
from ft_core.launch.board import Board, Slot
from ft_core.replica.status import Participation
from tests.harness.waiting import PATIENCE_S


def leadership(first: bool = False) -> Leadership:
    return Leadership(
        ScriptPosition(), group_size=1, speaks=True, first=first, heals_variables=lambda: False
    )


def event(saves: Saves, lead: Leadership, mine: int, *members: int) -> None:
    """An event that these processes have done together is committed."""
    rank, size = members.index(mine), len(members)
    part = Participation(sum(1 << member for member in members), rank, size, size, rank, size)
    lead.decide(part, mine, dict.fromkeys(members, True))
    saves.committed()


def test_the_next_main_process_writes_what_the_one_before_has_not() -> None:
    lead = leadership()
    saves, written = Saves(lead), list[str]()
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


def test_a_line_says_that_what_the_script_writes_by_itself_may_be_missing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lead = leadership()
    saves = Saves(lead)
    event(saves, lead, 1, 0, 1)
    saves.denied()  # if accelerator.is_main_process: torch.save(...)
    event(saves, lead, 1, 0, 1)
    event(saves, lead, 1, 1)
    assert "may be missing" not in caplog.text
    saves = Saves(lead := leadership())
    event(saves, lead, 1, 0, 1)
    saves.denied()
    saves.denied()
    saves.seen()  # model.save_pretrained(folder, is_main_process=accelerator.is_main_process)
    event(saves, lead, 1, 1)
    assert caplog.text.count("may be missing") == 1


@pytest.fixture
def slots() -> Iterator[tuple[Board, list[Slot]]]:
    board = Board(2)
    shared, wake = board.descriptors
    memory = mmap.mmap(shared, len(board._memory))
    yield board, [Slot(memory, wake, child, whole=True) for child in range(2)]
    memory.close()
    board.close()
    os.close(board._read)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("dies", [False, True])
def test_at_the_end_it_waits_for_the_main_process(
    dies: bool, own: bool, slots: tuple[Board, list[Slot]]
) -> None:
    """`own`: the script has written by itself, too, which nothing can make up for."""
    board, (main, other) = slots
    lead = leadership()
    saves, written = Saves(lead), list[str]()
    event(saves, lead, 1, 0, 1)
    main.leads(True)
    saves.save(lambda: None, lambda: written.append("last"))
    if own:
        saves.denied()
    other.over(True)
    waiting = threading.Thread(target=saves.outlive, args=(other,))
    waiting.start()
    if dies:
        board.died(0)
    else:
        main.over(True)
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()
    assert written == (["last"] if dies else [])
    assert board.look(1).leads is (dies and not own)
