"""The strategies "ft_local_sgd" and "ft_diloco" of a Trainer, for both of Lightning's namespaces.

Replica groups train on their own and agree every so many optimizer steps. What that means for the
parts of a Trainer is in docs/diloco.md. In short: `global_step` counts inner steps, and what leaves
the training loop (validation, checkpoints, the model after `fit`) sees the *global* parameters,
which are equal in all replica groups.

    before the first batch     enter: a quorum, and a heal if peers are ahead
    each batch                 the user's own, no communication; its optimizer step is an inner step
    end of a batch             the algorithm counts; when an outer step is due it sends, votes,
                               applies, and begins the next one

All that belongs to a batch (scheduler, loss scale) is done at its end, so a place that is noted
there is that of the boundary between two batches. A peer heals from a member that is at the end of
a batch, maybe of an epoch's last one, with its validation still to come. A process that has just
started is before its first batch. It goes through that batch without training, and takes the peer's
place at its end, so that both do the same from there on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ft_core.manager import Manager
from ft_lightning.diloco import inner_steps
from ft_lightning.diloco.inner_steps import DiLoCoArguments, InnerSteps, LocalSGDArguments
from ft_lightning.shared.step_collectives import zero_loss
from ft_lightning.trainer import healing
from ft_lightning.trainer.batches import Batches
from ft_lightning.trainer.counters import BATCHES, PARTS
from ft_lightning.trainer.leader import refuse_search
from ft_lightning.trainer.saves import copied
from ft_lightning.trainer.strategy import FTDDPMixin

log = logging.getLogger("ft_lightning")

STATE_KEY = "ft_outer_optimizer"
"""Where a checkpoint holds the outer optimizer's state."""


class _Place(Enum):
    """Where in the code a state may be asked for, or taken."""

    BOUNDARY = "boundary"
    BATCH_END = "batch end"
    END = "end"  # behind the last batch of the fit


class InnerDriver:
    """The inner steps of one fit, in place of `ft_lightning.trainer.driver.StepDriver`.

    Thread: the loop's, except for `state`.

    Args:
        on_quorum: called whenever membership may have changed.
        hooks: `hooks(name)` calls the callbacks' and the module's hook of that name.
    """

    open = True  # a batch needs no quorum

    def __init__(
        self,
        trainer: Any,
        manager: Manager,
        batches: Batches,
        *,
        on_quorum: Callable[[], object],
        hooks: Callable[[str], None],
    ) -> None:
        self._trainer, self._manager, self._batches = trainer, manager, batches
        self._on_quorum, self._hooks = on_quorum, hooks
        self._thread = threading.get_ident()
        self._place: _Place | None = None
        self._stepped = False
        self._pending: dict[str, Any] | None = None
        """A peer's place, to be taken at the end of the batch under way."""
        self.peers_ended = False
        """The place that was taken is behind the last batch of the fit. Read only."""
        self._steps: InnerSteps | None = None
        self.algorithm: Any = None
        self.entered = False
        self.restoring = False
        """A peer's place is being taken."""
        self.last_committed: bool | None = None
        self.control = b""
        """What the first member's vote on the last outer step has carried, if that was committed."""
        batches.at_boundary = self.at_boundary
        batches.begin_fit(trainer, healing.kept_for_loaders)
        batches.adopt(trainer.fit_loop, _leaving(self))

    def before_backward(self) -> None:
        """Nothing: gradients are this group's own."""

    def use(self, algorithm: Any, steps: InnerSteps) -> None:
        """`algorithm` (LocalSGD or DiLoCo) has `steps` for its inner optimizer."""
        self.algorithm, self._steps = algorithm, steps

    # ------------------------------------------------------------------ inner steps

    def at_boundary(self) -> None:
        """Before a batch is fetched. Before the fit's first one: join."""
        if self.entered or self._place is not None:
            return
        self._place = _Place.BOUNDARY
        try:
            self.algorithm.__enter__()
            self.entered = True
            self._batches.begin(self._trainer)
            self._on_quorum()
        finally:
            self._place = None

    def training_step(self, args: tuple[Any, ...], compute: Callable[..., Any]) -> Any:
        """The output of `compute`; nothing is computed while a peer's state waits to be loaded."""
        module = self._trainer.lightning_module
        output = None if self._pending is not None else compute(*args)
        if output is None and module.automatic_optimization and self._trainer.world_size > 1:
            return zero_loss(module)
        return output

    def optimizer_step(self, closure: Callable[[], Any], step: Callable[[], Any]) -> Any:
        """One call of `Strategy.optimizer_step`, of which `step()` is the stock one."""
        if self._pending is not None:
            return closure()
        self._stepped = True
        return step()

    def batch_end(self) -> bool:
        """The batch is done; returns whether an outer step ended with it.

        Raises StopIteration if peers are behind the last batch of the fit: there are no more here, either.
        """
        before = self._manager.last_outcome()
        self._place = _Place.BATCH_END
        try:
            if self._pending is not None:
                self._take_pending()
            elif self._stepped:
                self._inner_step_done()
            if self.peers_ended:
                raise StopIteration
            outcome = self._manager.last_outcome()
            if outcome is None or outcome is before:
                return False
            self.last_committed, self.control = outcome.committed, outcome.control
            if self.algorithm.in_slot:  # else behind the next inner step, where it may wait or heal
                self._on_quorum()
            return True
        finally:
            self._place = None
            self._stepped = False

    def finish(self) -> bool:
        """The last batch is done: agree on the inner steps since the last outer step. Returns
        whether that was committed.

        Afterwards the module holds the global parameters.
        """
        committed = True
        self._place = _Place.END
        try:
            if self.algorithm.local_step or self.algorithm.to_sync:
                committed = self.algorithm.sync()
            if self.algorithm.in_slot:  # else others have left, and none may come
                self._on_quorum()
            self._leave(None)
        finally:
            self._place = None
        return committed

    def close(self) -> None:
        """The fit is over. If it was not finished, the step under way is discarded."""
        self._stepped, self._pending = False, None
        self._leave(RuntimeError("the fit was broken off"))

    def _leave(self, error: Exception | None) -> None:
        if self.entered:
            self.entered = False
            self.algorithm.__exit__(None if error is None else type(error), error, None)
            inner_steps.show_global(self._trainer.lightning_module, self.algorithm)

    def _inner_step_done(self) -> None:
        assert self._steps is not None
        self._steps.done()

    # ------------------------------------------------------------------ heal

    def state(self) -> dict[str, Any]:
        """What a healing peer needs besides the algorithm's own state.

        In a thread of ft_core: the tensors in which to receive a state, of which there are none.
        """
        if threading.get_ident() != self._thread:
            return {}
        if self._place is None:
            raise RuntimeError("a state was asked for in the middle of a batch")
        state = healing.dump(self._trainer, self._batches)
        inner_steps.keep_what_members_share(state["checkpoint"], self._trainer, self.algorithm)
        if self._place is _Place.BATCH_END:
            # To the boundary after it.
            loops = state["checkpoint"]["loops"]["fit_loop"]
            for part in PARTS:
                loops[BATCHES][part]["completed"] += 1
            loops["epoch_loop.state_dict"]["_batches_that_stepped"] += 1
        state["place"], state["local_step"] = self._place.value, self.algorithm.local_step
        state["to_sync"] = self.algorithm.to_sync
        packed: dict[str, Any] = inner_steps.pack(state)
        return packed

    def load(self, packed: dict[str, Any]) -> None:
        """Take a peer's state, and with it its place in epoch and data."""
        state = inner_steps.unpack(packed)
        if self._place is _Place.BOUNDARY and state["place"] != _Place.BOUNDARY.value:
            self._pending = state
        else:
            self._restore(state)
            self.algorithm.local_step = state["local_step"]
            self.algorithm.to_sync = state["to_sync"]

    def _take_pending(self) -> None:
        """Go to the peer's place, at the end of the batch at which it was."""
        state, self._pending = self._pending, None
        assert state is not None
        for optimizer in self._trainer.optimizers:
            optimizer.zero_grad()
        self._restore(state)
        if state["local_step"]:
            # What was due after the peer's inner step is due here, too.
            self.algorithm.local_step = state["local_step"] - 1
            self._inner_step_done()
        else:
            self.algorithm.to_sync = state["to_sync"]

    def _restore(self, state: dict[str, Any]) -> None:
        trainer = self._trainer
        inner_steps.keep_own_moments(state["checkpoint"], trainer)
        self.peers_ended = state["place"] == _Place.END.value
        self.restoring = True
        try:
            # Behind the last epoch none begins.
            hooks = (lambda name: None) if self.peers_ended else self._hooks
            healing.restore(trainer, state, self._batches, hooks)
        finally:
            self.restoring = False
        if self._place is _Place.BATCH_END and not self.peers_ended:
            # The loop is about to count this batch, too.
            loop = trainer.fit_loop.epoch_loop
            loop.batch_progress.total.completed -= 1
            loop.batch_progress.current.completed -= 1
            loop.batch_progress.is_last_batch = trainer.fit_loop._data_fetcher.done
            loop._batches_that_stepped -= 1


def _leaving(driver: InnerDriver) -> Callable[[Any], dict[str, Any]]:
    """Lightning's loop over epochs, which a group leaves that has healed behind the last one: its peers have ended it."""

    def methods(cls: Any) -> dict[str, Any]:
        def on_advance_end(self: Any) -> None:
            if driver.peers_ended:
                self.trainer.lightning_module._current_fx_name = None  # a hook was left, too
                raise StopIteration
            cls.on_advance_end(self)

        return {"on_advance_end": on_advance_end}

    return methods


class PeriodicMixin(FTDDPMixin):
    """What both strategies share. Not used alone."""

    _votes_each_step = False
    _serves_spares = False
    _driver: InnerDriver | None  # type: ignore[assignment]
    _restored: Any = None
    _aside: dict[str, Tensor] | None = None
    _booked: tuple[int, float, float] = (0, 0.0, 0.0)

    def _make_algorithm(self, module: torch.nn.Module, steps: InnerSteps) -> Any:
        """LocalSGD or DiLoCo of ft_core."""
        raise NotImplementedError

    @property
    def algorithm(self) -> Any:
        """ft_core's LocalSGD or DiLoCo of the fit under way, or of the last one; None before. To be
        asked only; any thread."""
        return None if self._driver is None else self._driver.algorithm

    # ------------------------------------------------------------------ set-up

    def _make_driver(self, trainer: Any) -> Any:
        assert self._manager is not None
        assert self._batches is not None
        return InnerDriver(
            trainer,
            self._manager,
            self._batches,
            on_quorum=self._on_quorum,
            hooks=self._call_hooks,
        )

    def _setup_model(self, model: Any) -> Any:
        return model  # nothing happens in its backward

    def _refuse_trainer(self, trainer: Any) -> None:
        refuse_search(trainer, outer=True)

    def setup(self, trainer: Any) -> None:
        """Called by Lightning when a run begins: for a fit, make the algorithm and its inner steps,
        too.

        Raises ValueError for a Trainer that looks for a learning rate; else as `FTDDPMixin.setup`.
        """
        if trainer.state.fn == "fit":
            refuse_search(trainer, outer=True)
        super().setup(trainer)
        if trainer.state.fn != "fit":
            return
        assert self._driver is not None
        assert self.lightning_module is not None and self._decisions is not None
        self._aside, self._booked = None, (0, 0.0, 0.0)
        steps = InnerSteps(list(self.optimizers))
        with self._averaging(self.lightning_module):
            self._driver.use(self._make_algorithm(self.lightning_module, steps), steps)
        self._driver.algorithm.control = self._decisions.outer_control
        callback = self._from("callbacks").Callback
        members = {
            "on_train_batch_end": lambda _, *rest: self._batch_end(),
            "on_validation_start": lambda _, *rest: self._show_global(),
            "on_validation_end": lambda _, *rest: self._show_local(),
            "on_train_end": lambda _, *rest: self._finish(),
        }
        outer = type("_FTOuterSteps", (callback,), members)()
        # Before all others: they see what is so after the outer step.
        trainer.callbacks.insert(0, outer)
        self._callbacks = (*self._callbacks, outer)

    def on_train_start(self) -> None:
        """The state is complete: the global parameters are what the module holds now."""
        super().on_train_start()
        assert self._manager is not None
        known = self._checkpoints.loaded
        start = self._manager.state_dict()
        self._manager.load_state_dict({**start, "step": known.get("step", 0)})
        if self._restored is not None:
            state = {**self.algorithm.state_dict(), "outer_optimizer": self._restored}
            self.algorithm.load_state_dict(state)

    # ------------------------------------------------------------------ the loop's hooks

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Called by Lightning (or by the user's `optimizer.step`): an inner step."""
        assert self._driver is not None
        update = partial(super().optimizer_step, optimizer, closure, model, **kwargs)
        output = self._driver.optimizer_step(closure, update)
        if self._sink is not None and isinstance(output, Tensor):
            self._tell_loss(output)
        return output

    def _batch_end(self) -> None:
        assert self._driver is not None and self._decisions is not None
        self._decisions.wait_with_saves()
        if self._driver.batch_end():
            if self._driver.last_committed:
                self._checkpoints.round_ended()
                self._decisions.hear_outer(self._driver.control)
            self._log_outer_step()

    def _log_outer_step(self) -> None:
        """An outer step was decided: log its figures."""
        assert self._manager is not None
        module, stats = self.lightning_module, self.algorithm.stats
        assert module is not None
        booked = stats.bytes_sent, stats.communication_s, stats.hidden_s
        sent, took_s, hidden_s = (a - b for a, b in zip(booked, self._booked, strict=True))
        self._booked = booked
        values = {
            "outer_divergence": stats.divergence,
            "outer_bytes": float(sent),
            "outer_communication_s": took_s,
            "outer_hidden_s": hidden_s,
            "outer_participants": float(self.num_participants),
            "outer_discarded": float(stats.discarded),
        }
        step = float(self._manager.current_step())
        module.log("outer_step", step, prog_bar=True, on_step=True, on_epoch=False, batch_size=1)
        module.log_dict(values, on_step=True, on_epoch=False, batch_size=1)

    def _show_global(self) -> None:
        """Validation starts, on the parameters that all groups have in common."""
        if self._driver is not None and self._driver.entered:
            module = self.lightning_module
            assert module is not None
            self._aside = inner_steps.show_global(module, self.algorithm)

    def _show_local(self) -> None:
        if self._aside is not None:
            module = self.lightning_module
            assert module is not None
            before, self._aside = self._aside, None
            inner_steps.put_back(module, before)

    def _finish(self) -> None:
        """The last batch is done: the module gets the global parameters."""
        if self._driver is not None and self._driver.entered and not self._driver.finish():
            log.warning(
                "the last outer step was discarded: the model is that of the outer step before it, "
                "without the inner steps since"
            )

    # ------------------------------------------------------------------ checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The global parameters, not this group's own."""
        state = super().lightning_module_state_dict()
        if self._driver is not None and self._driver.entered:
            module = self.lightning_module
            assert module is not None
            values = inner_steps.global_values(module, self.algorithm)
            state.update({k: v.to(state[k].device) for k, v in values.items() if k in state})
        return state

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        """From a peer comes only what the algorithm does not bring itself."""
        healing = self._driver is not None and self._driver.restoring
        super().load_model_state_dict(checkpoint, strict=strict and not healing)

    def _place(self) -> dict[str, Any]:
        place = super()._place()
        if self.algorithm is not None:
            place[STATE_KEY] = self.algorithm.state_dict()["outer_optimizer"]
        return place

    def _unchanged(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """A copy: inner steps follow before it is known whether the leader has saved."""
        kept: dict[str, Any] = copied(checkpoint)
        return kept

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As the stock method; keeps the outer optimizer's state until the algorithm is made."""
        checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        self._restored = checkpoint.get(STATE_KEY)
        return checkpoint


class FTLocalSGDMixin(LocalSGDArguments, PeriodicMixin):
    __doc__ = LocalSGDArguments.__doc__


class FTDiLoCoMixin(DiLoCoArguments, PeriodicMixin):
    __doc__ = DiLoCoArguments.__doc__
