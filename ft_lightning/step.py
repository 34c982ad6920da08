"""One optimizer step under a quorum: begin, vote, and what follows a discard.

    boundary (before a batch is fetched)   start_quorum; heal if behind, serve who is
    forward, backward                      DDP averages gradients over the participants
    optimizer_step                         run the closure, vote, and step only if committed

A step spans one batch, or as many as gradients are accumulated over (its window): a boundary
inside an open step does nothing. A discarded step is tried again on the spot, with all batches of
its window, until it is committed: no batch is lost, and Lightning's counters, schedulers and
callbacks see one step. It must be so, and not "skip the batch": a member that had reduced nothing
when another failed goes on with its attempt under the next quorum, so members agree about batches
only if the number of a step says which batches those are.

What runs twice is what the user's `training_step` does besides computing a loss (metrics count
such a batch twice).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from ft_core.manager import Manager
from ft_lightning import healing, position
from ft_lightning.batches import Batches


class StepDiscarded(BaseException):
    """Unwinds a `training_step` of manual optimization whose update was discarded.

    Not an Exception: the user's own handlers are not meant. Never leaves the strategy.
    """


class StepDriver:
    """The step protocol of one fit. The loop's thread, but for `state`.

    `on_quorum()` is called whenever membership may have changed; `hooks(name)` calls the
    callbacks' and the module's hook of that name; `leave()` raises what ends a fit on SIGTERM.
    """

    def __init__(
        self,
        trainer: Any,
        manager: Manager,
        batches: Batches,
        *,
        on_quorum: Callable[[], None],
        hooks: Callable[[str], None],
        leave: Callable[[], None],
    ) -> None:
        self._trainer, self._manager, self._batches = trainer, manager, batches
        self._on_quorum, self._hooks, self._leave = on_quorum, hooks, leave
        self._thread = threading.get_ident()
        self._starting = False
        self._in_step = False
        self._window: list[tuple[Any, ...]] = []
        """Arguments of `training_step` for each batch of the open step."""
        self._instead: tuple[Any, ...] | None = None
        """Arguments to use in place of the loop's, which has healed away from its batch."""
        self.open = False
        self.last_committed: bool | None = None
        self.participants = 0

    # ------------------------------------------------------------------ begin

    def at_boundary(self) -> None:
        """Before a batch is fetched."""
        if self._starting:
            return
        self._instead = None
        if not self.open:
            self._window.clear()
            self._start(in_step=False)

    def _start(self, *, in_step: bool) -> None:
        self._starting, self._in_step = True, in_step
        try:
            self._manager.start_quorum()
            self._on_quorum()
        finally:
            self._starting = False
        self.open = True

    # ------------------------------------------------------------------ compute

    def training_step(self, args: tuple[Any, ...], compute: Callable[..., Any]) -> Any:
        """One call of `Strategy.training_step`: `compute(*args)`, on the right batch."""
        args = self._instead or args
        while True:
            self._window.append(args)
            try:
                return compute(*args)
            except StepDiscarded:  # manual optimization; automatic never raises it
                pass
            self._again()
            window = self._take_window()
            for earlier in window[:-1]:
                self._window.append(earlier)
                compute(*earlier)
            args = self._instead = window[-1]

    # ------------------------------------------------------------------ end

    def optimizer_step(
        self, closure: Callable[[], Any], step: Callable[[Any], Any], optimizer: Any
    ) -> Any:
        """One call of `Strategy.optimizer_step`. `step(result)` updates the parameters.

        Returns what the closure returned, once the step is committed.
        """
        if not self.open:
            raise RuntimeError(
                "the optimizer was stepped twice for one batch (or accumulation window), but a "
                "fault-tolerant step holds one update: call optimizer.step once"
            )
        manual = not self._trainer.lightning_module.automatic_optimization
        while True:
            result = closure()
            if self._vote():
                step(result)
                self._window.clear()
                return result
            if manual:
                raise StepDiscarded
            healed = self._again()
            position.count_attempt(self._trainer)
            window = self._take_window()
            first = position.batch_index(self._trainer) - len(window) + 1
            for offset, args in enumerate(window[:-1]):
                with self._trainer.strategy.block_backward_sync():
                    self._closure(args, optimizer, first + offset)()
            self._instead = window[-1]
            if healed:
                closure = self._closure(window[-1], optimizer, first + len(window) - 1)

    def _vote(self) -> bool:
        leaving = self._trainer.received_sigterm
        if leaving:
            # The vote says goodbye: the next quorum is formed without this group at once.
            self._manager.leave_after_step()
        committed = self._manager.should_commit()
        self.open = False
        self.last_committed = committed
        if committed:
            self._on_quorum()  # it may have changed while the step had reduced nothing yet
        if leaving and not committed:
            self._leave()
        return committed

    def _again(self) -> bool:
        """A discarded step begins anew; returns whether this group healed to another place."""
        trainer = self._trainer
        for optimizer in trainer.optimizers:
            optimizer.zero_grad()
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            if scaler is not None:
                # If the user has unscaled these gradients, the next ones may be unscaled again.
                scaler._per_optimizer_states.pop(id(optimizer), None)
        position.uncount_attempt(trainer)
        before = self._window
        self._start(in_step=True)
        return self._window is not before

    def _take_window(self) -> list[tuple[Any, ...]]:
        """The batches to compute again; each is noted anew when it is."""
        window, self._window, self._instead = self._window, [], None
        return window

    def _closure(self, args: tuple[Any, ...], optimizer: Any, batch_idx: int) -> Callable[[], Any]:
        """Lightning's own: forward, zero_grad if the window's first, backward."""
        loop = self._trainer.fit_loop.epoch_loop.automatic_optimization
        closure: Callable[[], Any] = loop._make_closure(
            OrderedDict(enumerate(args)), optimizer, batch_idx
        )
        return closure

    def close(self) -> None:
        """The fit is over."""
        self._instead = None
        self._window = []
        self.open = False

    # ------------------------------------------------------------------ heal

    def state(self) -> dict[str, Any]:
        """What a healing peer needs (see `healing.dump`).

        Called in a thread of ft_core it gives places to receive a state instead: the loop waits
        then, and the user's hooks stay in their own thread.
        """
        if threading.get_ident() != self._thread:
            return healing.places(self._trainer)
        if not self._starting:
            raise RuntimeError("a state was asked for in the middle of a step")
        return healing.dump(self._trainer, batches=len(self._window) if self._in_step else 0)

    def load(self, state: dict[str, Any]) -> None:
        """Take a peer's state and go to its place in epoch and data."""
        trainer = self._trainer
        epoch_before = healing.restore(trainer, state)
        if position.epoch(trainer) != epoch_before:
            # What was gathered for the epoch that this group was in is not of this one.
            trainer.fit_loop.epoch_loop._results.reset()
            self._hooks("on_train_epoch_start")
        self._batches.jump(trainer)
        if self._in_step:
            self._refill_window()

    def _refill_window(self) -> None:
        """The loop holds batches of the place that it has left: fetch the right ones."""
        trainer = self._trainer
        arity = len(self._window[-1])
        self._window = []
        more = True
        while more:
            batch = self._batches.fetch(trainer)
            more = position.count_fetched(trainer)
            self._window.append((batch, position.batch_index(trainer))[:arity])
