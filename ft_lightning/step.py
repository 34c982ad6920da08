"""One optimizer step under a quorum: begin, vote, and what follows a discard.

    boundary (before a batch is fetched)   start_quorum; heal if behind, serve who is
    forward, backward                      DDP averages gradients over the participants
    optimizer_step                         run the closure, vote, and step only if committed

A step spans one batch, or as many as gradients are accumulated over: a boundary inside an open
step does nothing. A discarded step of one batch is tried again on the spot, so that nobody
notices: no batch is lost, and Lightning's counters, schedulers and callbacks see one step. A step
over several batches, or one of manual optimization, cannot be tried again (its gradients are
gone); it is skipped, and Lightning, which counts it all the same, is set right.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ft_core.manager import Manager
from ft_lightning import healing, position
from ft_lightning.batches import Batches

_GATED = "step (discarded)"


class StepDriver:
    """The step protocol of one fit. The loop's thread, but for `state`.

    `on_quorum()` is called whenever membership may have changed. `hooks(name)` calls the
    callbacks' and the module's hook of that name.
    """

    def __init__(
        self,
        trainer: Any,
        manager: Manager,
        batches: Batches,
        *,
        on_quorum: Callable[[], None],
        hooks: Callable[[str], None],
    ) -> None:
        self._trainer, self._manager, self._batches = trainer, manager, batches
        self._on_quorum, self._hooks = on_quorum, hooks
        self._thread = threading.get_ident()
        self._starting = False
        self._in_step = False
        self._gated: list[Any] = []
        self._skipped = False
        self.open = False
        self.last_committed: bool | None = None
        self.participants = 0
        self.replaced: tuple[Any, int] | None = None
        """A batch and its index to use instead of those of the loop, which healed meanwhile."""

    # ------------------------------------------------------------------ begin

    def at_boundary(self) -> None:
        """Before a batch is fetched."""
        if self._starting:
            return
        self.replaced = None
        self._end_skip()
        if not self.open:
            self._start(in_step=False)

    def _start(self, *, in_step: bool) -> None:
        self._starting, self._in_step = True, in_step
        try:
            self._manager.start_quorum()
            self._on_quorum()
        finally:
            self._starting = False
        self.open = True

    # ------------------------------------------------------------------ end

    def run(
        self, closure: Callable[[], Any], step: Callable[[Any], Any], optimizer: Any
    ) -> tuple[Any, bool]:
        """One call of `Strategy.optimizer_step`. `step(result)` updates the parameters.

        Returns what the closure or `step` returned, and whether the step was committed.
        """
        if not self.open:
            raise RuntimeError(
                "the optimizer was stepped twice for one batch (or accumulation window), but a "
                "fault-tolerant step holds one update: call optimizer.step once"
            )
        while True:
            result = closure()
            if self._vote():
                return step(result), True
            if not self._may_retry():
                self._skip(optimizer)
                return result, False
            position.uncount_zero_grad(self._trainer)
            self._start(in_step=True)

    def _vote(self) -> bool:
        if self._trainer.received_sigterm:
            # The vote says goodbye: the next quorum is formed without this group at once.
            self._manager.leave_after_step()
        committed = self._manager.should_commit()
        self.open = False
        self.last_committed = committed
        self._on_quorum()
        return committed

    def _may_retry(self) -> bool:
        trainer = self._trainer
        return (
            trainer.lightning_module.automatic_optimization
            and trainer.accumulate_grad_batches == 1
            and not trainer.received_sigterm
        )

    def _skip(self, optimizer: Any) -> None:
        """Lightning will count this step, and step learning-rate schedulers: take it back."""
        trainer = self._trainer
        position.uncount_step(trainer)
        optimizer.zero_grad()
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            # If the user has unscaled these gradients, the next ones may be unscaled again.
            scaler._per_optimizer_states.pop(id(optimizer), None)
        for config in trainer.lr_scheduler_configs:
            if config.interval == "step":
                config.interval = _GATED
                self._gated.append(config)
        self._skipped = True

    def _end_skip(self) -> None:
        if self._skipped:
            self._skipped = False
            self._trainer.fit_loop.epoch_loop._batches_that_stepped -= 1
        for config in self._gated:
            config.interval = "step"
        self._gated.clear()

    def close(self) -> None:
        """The fit is over: leave nothing of ours in Lightning's objects."""
        for config in self._gated:
            config.interval = "step"
        self._gated.clear()
        self.replaced = None
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
        return healing.dump(self._trainer, in_step=self._in_step)

    def load(self, state: dict[str, Any]) -> None:
        """Take a peer's state and go to its place in epoch and data."""
        trainer = self._trainer
        epoch_before = healing.restore(trainer, state, in_step=False)
        if position.epoch(trainer) != epoch_before:
            # What was gathered for the epoch that this group was in is not of this one.
            trainer.fit_loop.epoch_loop._results.reset()
            self._hooks("on_train_epoch_start")
        self._batches.jump(trainer)
        if self._in_step:
            self._fetch_replacement()
            position.settle(trainer, in_step=True)

    def _fetch_replacement(self) -> None:
        """The loop holds a batch of the place that it has left: fetch the right one."""
        trainer = self._trainer
        fit_loop = trainer.fit_loop
        fetcher = fit_loop._data_fetcher
        if hasattr(fetcher, "iterator_wrapper"):
            return  # training_step draws from the iterator itself
        batch, _, _ = next(fetcher)
        fit_loop.epoch_loop.batch_progress.is_last_batch = fetcher.done
        batch = trainer.precision_plugin.convert_input(batch)
        batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
        batch = trainer.strategy.batch_to_device(batch, dataloader_idx=0)
        self.replaced = (batch, position.batches_done(trainer))
