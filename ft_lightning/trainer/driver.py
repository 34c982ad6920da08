"""Optimizer steps under a quorum: begin, vote, and what follows a discard.

    boundary (before a batch is fetched)   start_quorum; heal if behind, serve who is
    forward, backward                      DDP averages gradients over the participants
    optimizer_step                         run the closure, vote, and step only if committed

A step spans one batch, or as many as gradients are accumulated over (its window): a boundary
inside an open step does nothing. With manual optimization a window may hold several steps; the
second one begins with its first backward (`replay.py`). A discarded step is tried again on the
spot, with all batches of its window, until it is committed: no batch is lost, and Lightning's
counters, schedulers and callbacks see one step. It must be so, and not "skip the batch": a member
that had reduced nothing when another failed goes on with its attempt under the next quorum, so
members agree about batches only if the number of a step says which batches those are. What runs
twice is what the user's `training_step` does besides computing a loss and logging.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from enum import Enum
from typing import Any

from ft_core.errors import GroupLeft
from ft_core.manager import Manager
from ft_lightning.shared.step_collectives import gather_bytes
from ft_lightning.trainer import healing, logged
from ft_lightning.trainer import loop_counters as position
from ft_lightning.trainer.batches import Batches
from ft_lightning.trainer.decisions import Decisions
from ft_lightning.trainer.repeat import Repeating, Window
from ft_lightning.trainer.replay import Replay, StepDiscarded, untoggle

log = logging.getLogger("ft_lightning")


class Place(Enum):
    """Where in the code a quorum is asked for."""

    BOUNDARY = "before a batch"
    STEP = "in a batch"
    ROUND = "between batches"


class StepDriver:
    """The step protocol of one fit. The loop's thread, but for `state`.

    `on_quorum()` is called whenever membership may have changed; `hooks(name)` calls the
    callbacks' and the module's hook of that name; `leave()` raises what ends a fit on SIGTERM.
    `patience_s`: how long a peer may be late at the end of a validation or an epoch.
    """

    def __init__(
        self,
        trainer: Any,
        manager: Manager,
        batches: Batches,
        decisions: Decisions,
        *,
        on_quorum: Callable[[], None],
        hooks: Callable[[str], None],
        leave: Callable[[], None],
        patience_s: float,
    ) -> None:
        self._trainer, self._manager, self._batches = trainer, manager, batches
        self._decisions, self._replay = decisions, Replay(trainer)
        self._repeating = Repeating(trainer, self._repeat)
        self._on_quorum, self._hooks, self._leave = on_quorum, hooks, leave
        self._patience = timedelta(seconds=patience_s)
        self._thread = threading.get_ident()
        self._place: Place | None = None  # where `start_quorum` is being called; None: nowhere
        self._gathers = False  # the round under way gathers
        self._visit: bool | None = None  # let in while peers are in a round, that gathers or not
        self._lost = False  # behind, and not where it can heal: no round until the next boundary
        self._window: Window = []  # arguments of `training_step` for each batch
        self._instead: tuple[Any, ...] | None = None  # of the loop's arguments, once it has healed
        self._logged: logged.Snapshot = {}
        self._only_reduces = False  # the open step began after an update; no gradients yet
        self._counted = True  # Lightning's counters hold the window's committed updates
        self.open = self.computing = False
        self.last_committed: bool | None = None
        self.participants = 0

    @property
    def waits(self) -> bool:
        """Whether a quorum is asked for, and the loop stands still."""
        return self._place is not None

    @property
    def _manual(self) -> bool:
        return not self._trainer.lightning_module.automatic_optimization

    # ------------------------------------------------------------------ begin

    def at_boundary(self) -> None:
        """Before a batch is fetched."""
        if self._place is not None:
            return
        self._instead = None
        if not self.open:
            self._window.clear()
            self._replay.reset()
            self._lost = False
            self._decisions.at_boundary()
            self._start(Place.BOUNDARY)
            self._batches.mark(self._trainer)
            self._logged = logged.snapshot(self._trainer.fit_loop.epoch_loop._results)
            if self._manual:
                self._replay.mark()
                self._only_reduces = self._replay.prepare()

    def _start(self, place: Place) -> None:
        """Begin a step (or a round): in a quorum, healed. Raises as `Manager.start_quorum`."""
        self._place = place
        try:
            self._manager.start_quorum()
            while self._visit is not None:
                self._sit_in(self._visit)
                self._manager.start_quorum()
            self._on_quorum()
        except GroupLeft:  # another rank of this group was told to end: so was this one
            self._leave()
        finally:
            self._place = None
        self.open = place is not Place.ROUND

    def _sit_in(self, gathers: bool) -> None:
        """Peers are between batches: add nothing to what they do, and join again."""
        self._visit = None
        if gathers:
            gather_bytes(self._manager, b"")
        self._manager.should_commit(no_update=True)
        self._visit = None  # again, if the quorum changed meanwhile
        self._manager.forget_state("joined while its peers were between batches")

    def ensure_open(self, *, to_reduce: bool = False) -> None:
        """Inside a `training_step`: another step of the same batch begins, if none is open.

        `to_reduce`: it may be over without an update. Raises StepDiscarded if this group has
        healed to another place in it.
        """
        if self._replay.active:
            return
        self._replay.arrive()
        self._only_reduces = to_reduce and (self._only_reduces or not self.open)
        if self.open:
            return
        before = self._window
        self._start(Place.STEP)
        self._replay.mark()
        if self._window is not before:
            raise StepDiscarded

    def before_backward(self, wrapper: Any) -> None:
        """Gradients are about to be computed."""
        if self._manual:
            self.ensure_open()
            wrapper.mute(self._replay.active)
            self._replay.carry(writes=True)

    # ------------------------------------------------------------------ compute

    def training_step(self, args: tuple[Any, ...], compute: Callable[..., Any]) -> Any:
        """One call of `Strategy.training_step`: `compute(*args)`, on the right batch."""
        args = self._instead or args
        while True:
            self._window.append(args)
            try:
                output = self._compute(args, compute)
                if self._only_reduces:
                    self._replay.carry(writes=False)
                if not self._only_reduces or self._vote(None):
                    self._only_reduces = False
                    return output
            except StepDiscarded:  # manual optimization; automatic never raises it
                pass
            untoggle(self._trainer.lightning_module)
            if not self.open:
                self._again(updating=not self._only_reduces)
            self._zero_grad()
            self._only_reduces = self._replay.prepare()
            window = self._take_window()
            for earlier in window[:-1]:
                self._window.append(earlier)
                self._compute(earlier, compute)
            args = self._instead = window[-1]

    def _compute(self, args: tuple[Any, ...], compute: Callable[..., Any]) -> Any:
        self.computing = True
        try:
            return compute(*args)
        finally:
            self.computing = False

    @property
    def replaying(self) -> bool:
        """Whether what is computed now is done already, and nothing of it may reach peers."""
        return self._replay.active

    # ------------------------------------------------------------------ end

    def optimizer_step(
        self, closure: Callable[[], Any], step: Callable[[Any], Any], optimizer: Any
    ) -> Any:
        """One call of `Strategy.optimizer_step`. `step(result)` updates the parameters.

        Returns what the closure returned, once the step is committed.
        """
        if self._manual:
            return self._manual_step(closure, step, optimizer)
        if not self.open:
            raise RuntimeError(
                "the optimizer was stepped twice for one batch (or accumulation window), but with "
                "automatic optimization a step holds one update: call optimizer.step once, or use "
                "manual optimization"
            )
        result = closure()
        if not self._vote(optimizer):
            raise StepDiscarded
        step(result)
        self._window.clear()
        return result

    def _repeat(self, earlier: Callable[[Window], None]) -> tuple[bool, Window]:
        """See `Repeating`."""
        healed, window = self._again(), self._take_window()
        earlier(window)
        self._instead = window[-1]
        return healed, window

    def _manual_step(
        self, closure: Callable[[], Any], step: Callable[[Any], Any], optimizer: Any
    ) -> Any:
        if self._replay.active:
            result = closure()
            self._replay.skip()
            return result
        try:
            result = closure()
            self.ensure_open()
        except StepDiscarded:
            self._trainer.profiler.stop("optimizer_step")
            raise
        self._replay.carry(writes=False)
        if not self._vote(optimizer):
            raise StepDiscarded
        step(result)
        self._replay.done += 1
        return result

    def _vote(self, optimizer: Any) -> bool:
        leaving = self._trainer.received_sigterm
        if leaving:
            # The vote says goodbye: the next quorum is formed without this group at once.
            self._manager.leave_after_step()
        control = self._decisions.control(optimizer, self._replay.done)
        committed = self._manager.should_commit(control=control)
        self.open = False
        if committed and not leaving:
            committed = self._same_step()
        self.last_committed = committed
        if committed:
            self._replay.settle()
            self._on_quorum()  # it may have changed while the step had reduced nothing yet
        if leaving and not committed:
            self._leave()
        return committed

    def _same_step(self) -> bool:
        """Whether what was committed is what this group would apply; else it will heal."""
        outcome = self._manager.last_outcome()
        difference = self._decisions.differs(outcome.control if outcome is not None else b"")
        if difference:
            log.warning("%s: it takes their state", difference)
            self._manager.forget_state(difference)
        return not difference

    def _again(self, *, updating: bool = True) -> bool:
        """A discarded step begins anew; returns whether this group healed to another place.

        `updating`: it was discarded inside an optimizer's step.
        """
        self._replay.keep()
        self._zero_grad()
        if updating:
            position.uncount_attempt(self._trainer)
        self._replay.uncount()
        before = self._window
        self._counted = False
        try:
            self._start(Place.STEP)
        finally:
            self._counted = True
        healed = self._window is not before
        results = self._trainer.fit_loop.epoch_loop._results
        if healed:
            self._logged = logged.snapshot(results)
            self._replay.mark()
        else:
            logged.restore(results, self._logged)
        return healed

    def _zero_grad(self) -> None:
        scaler = getattr(self._trainer.precision_plugin, "scaler", None)
        for optimizer in self._trainer.optimizers:
            optimizer.zero_grad()
            if scaler is not None:
                # If the user has unscaled these gradients, the next ones may be unscaled again.
                scaler._per_optimizer_states.pop(id(optimizer), None)

    def _take_window(self) -> Window:
        """The batches to compute again; each is noted anew when it is."""
        window, self._window, self._instead = self._window, [], None
        return window

    def close(self) -> None:
        """The fit is over."""
        self._repeating.release()
        self._instead, self._window, self._logged, self.open = None, [], {}, False

    # ------------------------------------------------------------------ rounds

    def round(self, mine: bytes | None) -> tuple[list[bytes], int] | None:
        """One agreement between batches: (what each who takes part gives, the rank of this group).

        `mine` None: only to meet. Returns None if this group is behind: it heals at the next batch.
        """
        if self.open:
            return None  # a window goes on over the end of an epoch: `optimizer_step` overridden
        self._lost = self._lost or self._manager.is_healing()  # evicted, and let in again
        while not self._lost:
            self._gathers, gathered, committed = mine is not None, list[bytes](), False
            self._start(Place.ROUND)
            if not self._lost:
                self._place = Place.ROUND  # who joins before the vote is told so, too
                try:
                    gathered = [] if mine is None else gather_bytes(self._manager, mine)
                    committed = self._manager.should_commit(self._patience, no_update=True)
                finally:
                    self._place = None
            if self._lost:
                self._manager.forget_state("fell behind between batches")
            elif committed:
                rank = self._manager.participating_rank()
                assert rank is not None
                return gathered, rank
        return None

    # ------------------------------------------------------------------ heal

    def state(self) -> dict[str, Any]:
        """What a healing peer needs (see `healing.dump`).

        Called in a thread of ft_core it gives places to receive a state instead: the loop waits
        then, and the user's hooks stay in their own thread.
        """
        if threading.get_ident() != self._thread:
            return healing.places(self._trainer)
        if self._place is None:
            raise RuntimeError("a state was asked for in the middle of a step")
        if self._place is Place.ROUND:
            return {"round": self._gathers}
        state = healing.dump(
            self._trainer,
            batches=len(self._window) if self._place is Place.STEP else 0,
            updates=self._replay.done if self._counted else 0,
        )
        begins = self._place is Place.BOUNDARY
        data = self._batches.states(self._trainer if begins else None)
        gradients = self._replay.gradients(again=not self._counted) if self._manual else None
        return {**state, "updates": self._replay.done, "data": data, "gradients": gradients}

    def load(self, state: dict[str, Any]) -> None:
        """Take a peer's state and go to its place in epoch and data."""
        if self._place is Place.ROUND:
            self._lost = True
            return
        if "round" in state:
            self._visit = bool(state["round"])
            return
        trainer = self._trainer
        epoch_before = healing.restore(trainer, state)
        if position.epoch(trainer) != epoch_before:
            # What was gathered for the epoch that this group was in is not of this one.
            trainer.fit_loop.epoch_loop._results.reset()
            self._hooks("on_train_epoch_start")
        self._batches.jump(trainer, state["data"])
        self._replay.arrive_with(state["updates"], state["gradients"])
        if self._place is Place.STEP:
            self._refill_window()

    def _refill_window(self) -> None:
        """The loop holds batches of the place that it has left: fetch the right ones."""
        trainer = self._trainer
        arity, self._window, more = len(self._window[-1]), [], True
        while more:
            batch = self._batches.fetch(trainer)
            more = position.count_fetched(trainer)
            self._window.append((batch, position.batch_index(trainer))[:arity])
