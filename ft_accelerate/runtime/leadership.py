"""Which process is the main one, which writes files and logs, and prints; and what the next main process takes over
from it: the runs of trackers, and saves that it may not have made."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from ft_accelerate.runtime.script_position import ScriptPosition
from ft_core.launch.board import SCRIPT, Slot, slot
from ft_core.launch.trackers import HeldSaves, Opening
from ft_core.manager import Manager
from ft_core.replica.status import Participation

log = logging.getLogger("ft_accelerate")

NO_QUORUM = -1


def main_of(whole: Mapping[int, bool]) -> int:
    """The main process of those that take part; `whole` is in the order of ranks.

    The first whose script has been there for all events, since its variables (a best metric, a list of
    results) lack nothing. If there is none: the first.
    """
    return next((index for index, is_whole in whole.items() if is_whole), next(iter(whole)))


class Leadership:
    """Whether this process is the main one. The loop's thread, and those of `open`.

    Args:
        position: of this process's script.
        group_size: processes of a replica group, of which the first may be the main one.
        speaks: it tells the launcher for its replica group.
        first: it is the main one until a quorum says otherwise.
    """

    def __init__(
        self,
        position: ScriptPosition,
        *,
        group_size: int,
        speaks: bool,
        first: bool,
    ) -> None:
        self.holds = first
        """Whether this process is the main one of its quorum, also while it catches up."""
        self.group_leads = first
        """Whether it is in the replica group of that one, as far as it knows."""
        self.main = -1
        """Number of the main process, as this quorum's first event has told; -1: before it."""
        self.denied = 0
        """How often this process was asked whether it is the main one, and was not."""
        self._position, self._speaks = position, speaks
        self.heals_variables = False
        """Whether a framework heals what a script would keep in variables, such as Trainer. It stays so when that
        has trained: what follows is its results."""
        self._size = group_size
        self._led_in, self._warned = NO_QUORUM, False
        self._openings: list[Opening] = []

    @property
    def mine(self) -> bool:
        """Whether this process is the main one: the first of those that take part and whose scripts
        have been there for all events; if there is none, the first."""
        if any(opening.here for opening in self._openings):
            return True
        leads = self.holds and self._position.live
        self.denied += not leads
        return leads

    def still(self, manager: Manager | None) -> bool:
        """As `mine`, as far as the lighthouse has told by now: one that was stopped for a while, or cut off,
        has a successor, and must not write into what that writes."""
        if self.mine and manager is not None and manager.last_outcome() is not None:
            part = manager.in_quorum()
            if manager.evicted() or (part is not None and part.rank is None):
                self.holds = False
        return self.mine

    def open(self, opens: Callable[[], None], failed: Callable[[Exception], None]) -> Opening:
        """Open something that only the main process has, in a thread beside the training, which counts as the
        main process until all calls that have waited are done."""
        opening = Opening("ft_accelerate trackers", opens, failed)
        self._openings = [*(each for each in self._openings if not each.over), opening]
        return opening

    def follow(self, part: Participation) -> None:
        """A step has begun.

        Which process is the main one is known with the headers of the quorum's first event. Until then
        it is the first process, if its script has been there for all events, has been the main one
        before, or is alone.
        """
        if part.rank is None:  # this process only heals
            self.holds = self.group_leads = False
        elif part.quorum_id != self._led_in:
            knows = self._position.missed == 0 or self.group_leads or part.groups == 1
            self._take(part.rank == 0 and knows)

    def decide(self, part: Participation | None, index: int, whole: Mapping[int, bool]) -> None:
        """The headers of this quorum have arrived. `index`: of this process; `whole`: as in `main_of`."""
        self._led_in = NO_QUORUM if part is None else part.quorum_id
        contributes, self.main = part is not None and part.rank is not None, main_of(whole)
        self._take(contributes and self.main // self._size == index // self._size)

    def take_over(self) -> None:
        """Outside of a quorum: this replica group is the one that writes now."""
        self.group_leads, self.holds = True, self._speaks

    def _take(self, leads: bool) -> None:
        self.group_leads, self.holds = leads, leads and self._speaks
        if self._speaks:
            slot().leads(leads)
        missed = self._position.missed
        if self.holds and missed and not self._warned and not self.heals_variables:
            self._warned = True
            log.warning(
                "this process is the main one now, and came back after its peers had done %s events "
                "(steps and operations) without it: what the script keeps in variables of its own, such "
                "as the best metric so far, lacks them, unless it is registered with "
                "accelerator.register_for_checkpointing",
                missed,
            )


MAX_BYTES = 1000
"""Of the ids together; what is longer does not travel, and the next main process begins runs."""


class TrackerRuns:
    """The open runs: one id for each tracker, by its name.

    A tracker that names its runs would begin another run in the next main process. So all processes know
    the ids: they travel with the commit of a step (`Manager.should_commit(control=)`), whenever they or
    the quorum have changed. The loop's thread; `opened` also from the thread
    that opens trackers for it."""

    def __init__(self) -> None:
        self.mine: dict[str, str] = {}
        """That this process has opened."""
        self._theirs: dict[str, str] = {}
        self._changes = 0
        self._told = (0, 0)

    def opened(self, tracker: str, run: str) -> None:
        """This process writes to `run`."""
        self.mine[tracker] = run
        self._theirs.pop(tracker, None)
        self._changes += 1

    def closed(self, tracker: str) -> None:
        """It is over: it is not to be continued."""
        self._theirs.pop(tracker, None)
        if self.mine.pop(tracker, None) is not None:
            self._changes += 1

    def to_continue(self, tracker: str) -> str | None:
        """The run that the main process before had open when it was heard from last."""
        return None if tracker in self.mine else self._theirs.get(tracker)

    def for_wandb(self, given: dict[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
        """The arguments of `wandb.init` in the main process. What the script gives stays."""
        known = self.to_continue("wandb")
        if known is None or (given.get("id") or environ.get("WANDB_RUN_ID")) not in (None, known):
            return given
        resume = given.get("resume")
        if resume is None and "WANDB_RESUME" not in environ:
            resume = "allow"
        return {**given, "id": known, "resume": resume}

    def for_mlflow(self, given: dict[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
        """The arguments of `mlflow.start_run` in the main process. What the script gives stays."""
        known = self.to_continue("mlflow")
        if known is None or given.get("run_id") or "MLFLOW_RUN_ID" in environ:
            return given
        return given if given.get("nested") else {**given, "run_id": known}

    def news(self, quorum_id: int) -> bytes:
        """What the main process adds to its vote; nothing if all members of this quorum know it."""
        if not self._changes or self._told == (quorum_id, self._changes):
            return b""
        packed = json.dumps({**self._theirs, **self.mine}).encode()
        return packed if len(packed) <= MAX_BYTES else b""

    def told(self, quorum_id: int) -> None:
        """The vote has been committed that brought the news."""
        self._told = quorum_id, self._changes

    def hear(self, packed: bytes) -> None:
        """What the main process has added. If this process is the next main one, and is killed before it has
        opened the runs, the one after it must know them, too: so they are news again."""
        self._theirs = json.loads(packed)
        self._changes += 1


# ---------------------------------------------------------------- saves

LIBRARIES = ("torch", "accelerate", "transformers", "trl", "peft", "datasets", "ft_accelerate")
_ON_THE_WAY = {
    "__getattr__",
    "_inner",
    "is_local_main_process",
    "is_main_process",
    "on_local_main_process",
    "on_main_process",
}


class Saves:
    """What the main process saves through Accelerate and transformers, and the next one writes if it dies in it.

    All processes run the same script, so all come to each save, and one of them writes. The others hold what
    they would have written, until an event (a step or an operation) is committed after it.

    | the main process | the save |
    |---|---|
    | has taken part in that event | is made: it is forgotten |
    | is gone, and this process is the next one | it writes it now. The state is still that of the save: gradients are voted on before an optimizer steps. Buffers, which a forward has changed since, are put back meanwhile |
    | dies, and no event follows | processes that are at their end wait for the main one to come to its own. If it dies, the first replica group of them writes (where one launcher has all) |

    What the script writes by itself, since it has asked whether it is the main process, can't be held. So the
    launcher knows from the main process where that may be (`OwnWrites`). If it dies there, the launcher says so,
    and its exit code is not 0 unless a main process has come to that place again. The loop's thread only.
    """

    def __init__(
        self, leadership: Leadership, keep_buffers: Callable[[], Callable[[], None]]
    ) -> None:
        """`keep_buffers`: `RetryableReducer.keep_buffers`."""
        self._leadership, self._keep_buffers = leadership, keep_buffers
        self._saves = HeldSaves()
        self._within = False
        self._main = leadership.main

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
            self._saves.hold(self._with_buffers_as_now(again or write))
        self._within = True
        try:
            return write()
        finally:
            self._within = False

    def _with_buffers_as_now(self, write: Callable[[], Any]) -> Callable[[], None]:
        as_now = self._keep_buffers()

        def call() -> None:
            as_later = self._keep_buffers()
            as_now()
            try:
                write()
            finally:
                as_later()

        return call

    def committed(self) -> None:
        """An event was committed. All processes of a replica group call it at the same place."""
        if self._saves.held and not self._within:  # within a save nothing is written yet
            self._settle()
        self._main = self._leadership.main

    def _settle(self) -> None:
        if self._leadership.group_leads:
            self._make_up()
        elif self._leadership.main == self._main:
            self._saves.settled()

    def _make_up(self) -> None:
        self._within = True
        try:
            self._saves.make_up()
        finally:
            self._within = False

    def outlive(self, slot: Slot, as_one: Callable[[Callable[[], bool]], bool]) -> None:
        """The script is over: wait until the main process has come to its end; if it dies, the first replica group
        that waits writes what it holds. `as_one`: `GroupRanks.as_one`."""
        if self._leadership.group_leads or not as_one(lambda: self._is_left_to_us(slot)):
            return
        self._leadership.take_over()
        self._make_up()

    def _is_left_to_us(self, slot: Slot) -> bool:
        if not self._saves.held:
            return False
        slot.await_leader(SCRIPT)
        if taken := slot.takes_over():
            slot.leads(True)
            log.warning("the main process has died at the end of the script: this process saves")
        return taken


class OwnWrites:
    """Where the script may be writing by itself: it has heard that this is the main process, and has not come to
    a step, an operation or its end since. The loop's thread only.

    Only a launcher of ours hears of it. `places`: where it may be writing, in the order in which it came there.
    """

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self.places: list[str] = []

    def may_begin(self) -> None:
        """The script has asked whether this is the main process, and it is."""
        if self._slot.there and (place := _place_in_script()):
            self.places.append(place)
            self._slot.writes(place)

    def told(self) -> None:
        """The script has asked only to tell a function of ours, which takes care of the rest."""
        if self.places and _place_in_script():
            self.places.pop()
            self._slot.writes(self.places[-1] if self.places else "")

    def over(self) -> None:
        """The script has come to something else: it has written."""
        self._slot.wrote(self.places)
        self._slot.writes("")
        self.places.clear()


def _place_in_script() -> str:
    """The line of the script that has called this, through our functions and then, perhaps, properties of
    Accelerate's; "": it was a library, or a function of ours that asks Accelerate."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _package_of(frame) == "ft_accelerate":
        frame = frame.f_back
    while frame is not None and _passes_on(frame):
        frame = frame.f_back
    if frame is None or _package_of(frame) in LIBRARIES:
        return ""
    return f"line {frame.f_lineno} of {os.path.basename(frame.f_code.co_filename)}"


def _passes_on(frame: FrameType) -> bool:
    return _package_of(frame) == "accelerate" and frame.f_code.co_name in _ON_THE_WAY


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
