"""What the main process saves through Accelerate and transformers, and the next one writes if it dies in it.

All processes run the same script, so all come to each save, and one of them writes. The others hold what they
would have written, until an event (a step or an operation) is committed after it.

| the main process | the save |
|---|---|
| has taken part in that event | is made: it is forgotten |
| is gone, and this process is the next one | it writes it now. The state is still that of the save, but for buffers: gradients are voted on before an optimizer steps |
| dies, and no event follows | processes that are at their end wait for the main one to come to its own. If it dies, the first of them writes (where one launcher has all replica groups) |

What the script writes by itself, since it has asked whether it is the main process, can't be held: a line says
that it may be missing, or the launcher's exit code does.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

from ft_accelerate.runtime.leadership import Leadership
from ft_core.launch.board import Slot
from ft_core.launch.trackers import HeldSaves

log = logging.getLogger("ft_accelerate")

LIBRARIES = ("torch", "accelerate", "transformers", "trl", "peft", "datasets", "ft_accelerate")
_ON_THE_WAY = ("is_main_process", "is_main", "__getattr__", "wrapper")


class Saves:
    """The saves of one process. The loop's thread only."""

    def __init__(self, leadership: Leadership) -> None:
        self._leadership = leadership
        self._saves = HeldSaves()
        self._within = False
        self._main = leadership.main
        self._asked = 0

    def save(
        self, write: Callable[[], Any], again: Callable[[], Any] | None = None, *, hold: bool = True
    ) -> Any:
        """Have it written, if this is the main process; else hold it. Returns what `write` returns.

        Args:
            write: writes in the main process, and in others what each has of its own. A save within it is
                a part of it.
            again: what writes it in the next main process; None: `write`.
            hold: False: another takes care that the next main process writes it.
        """
        if self._within:
            return write()
        if hold and not self._leadership.group_leads:
            self._saves.hold(again or write)
        self._within = True
        try:
            return write()
        finally:
            self._within = False

    def denied(self) -> None:
        """This is not the main process, as has been answered. Notes it if the script itself has asked, and
        so leaves out what we don't see."""
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_name in _ON_THE_WAY:
            frame = frame.f_back
        if not self._within:
            self._asked += frame.f_globals.get("__name__", "").partition(".")[0] not in LIBRARIES

    def seen(self) -> None:
        """The script has told what it does where it is the main process: it is among the saves."""
        self._asked = max(0, self._asked - 1)

    def committed(self) -> None:
        """An event was committed. All processes of a replica group call it at the same place."""
        if self._saves.held or self._asked:
            self._settle()
        self._main = self._leadership.main

    def _settle(self) -> None:
        asked, self._asked = self._asked, 0
        if self._leadership.group_leads:
            if self._leadership.holds and asked:
                log.warning(
                    "the main process has died; what the script writes by itself where it is the main "
                    "process, as it may have done since the step or operation before, may be missing"
                )
            self._make_up()
        elif self._leadership.main == self._main:
            self._saves.settled()

    def _make_up(self) -> None:
        self._within = True
        try:
            self._saves.make_up()
        finally:
            self._within = False

    def outlive(self, slot: Slot) -> None:
        """The training is over, and so is the script: wait until the main process has come to its end; if
        it dies, the first process that waits writes what it holds."""
        if not self._saves.held or self._leadership.group_leads:
            return
        slot.await_leader()
        if slot.takes_over():
            if not self._asked:  # else something is missing still
                slot.leads(True)
            self._leadership.holds = self._leadership.group_leads = True
            log.warning("the main process has died at the end of the script: this process saves")
            self._make_up()
