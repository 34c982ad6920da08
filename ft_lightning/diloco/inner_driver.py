"""The inner steps of a fit under LocalSGD or DiLoCo, and heals between two of them.

    before the first batch     enter: a quorum, and a heal if peers are ahead
    each batch                 the user's own, no communication; its optimizer step is an inner step
    end of a batch             the algorithm counts; when an outer step is due it sends, votes,
                               applies, and begins the next one

The algorithms of ft_core hook the inner optimizer's `step`. In Lightning forward and backward run
*inside* that call, and with an overflow of fp16 it does not happen at all, so that members would
count differently. `InnerSteps` takes the optimizer's place for them: its hooks run at the end of
each batch that stepped an optimizer. All else that belongs to the batch is done there (scheduler,
loss scale), so a place that is noted there is that of the boundary between two batches.

A peer heals from a member that is at the end of a batch, maybe of an epoch's last one, with its
validation still to come. A process that has just started is before its first batch. It goes
through that batch without training, and takes the peer's place at its end, so that both do the
same from there on.
"""

from __future__ import annotations

import threading
from collections import ChainMap, OrderedDict
from collections.abc import Callable, MutableMapping
from enum import Enum
from typing import Any, NoReturn

import torch
from torch.utils.hooks import RemovableHandle

from ft_core.manager import Manager
from ft_lightning.diloco import equal_state as diloco_state
from ft_lightning.shared.step_collectives import zero_loss
from ft_lightning.trainer import healing
from ft_lightning.trainer import loop_counters as position
from ft_lightning.trainer.batches import Batches


class InnerSteps(torch.optim.Optimizer):
    """What LocalSGD and DiLoCo take for the inner optimizer: hooks, and nothing to step."""

    # No super().__init__(): all attributes are answered here.
    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._after: OrderedDict[int, Callable[..., Any]] = OrderedDict()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> MutableMapping[Any, Any]:  # type: ignore[override]
        states = [optimizer.state for optimizer in self._optimizers]
        return states[0] if len(states) == 1 else _Together(*states)

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return {}

    def register_step_post_hook(self, hook: Any) -> RemovableHandle:
        handle = RemovableHandle(self._after)
        self._after[handle.id] = hook
        return handle

    def step(self, closure: Any = None) -> NoReturn:  # type: ignore[override]
        raise RuntimeError("the Trainer steps its own optimizers; this one is for hooks only")

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none)

    def done(self) -> None:
        """An inner step has ended."""
        for hook in list(self._after.values()):
            hook(self, (), {})

    def __repr__(self) -> str:
        return f"InnerSteps({self._optimizers!r})"


class _Together(ChainMap[Any, Any]):
    """The states of several optimizers; what is deleted is deleted where it is."""

    def __delitem__(self, key: Any) -> None:
        for state in self.maps:
            state.pop(key, None)


class _Place(Enum):
    """Where in the code a state may be asked for, or taken."""

    BOUNDARY = "boundary"
    BATCH_END = "batch end"


class InnerDriver:
    """The inner steps of one fit; stands where `ft_lightning.trainer.driver.StepDriver` does. The loop's
    thread, but for `state`.

    `on_quorum()` is called whenever membership may have changed; `hooks(name)` calls the
    callbacks' and the module's hook of that name.
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
        self._steps: InnerSteps | None = None
        self.algorithm: Any = None
        self.entered = False
        self.restoring = False
        """A peer's place is being taken."""
        self.last_committed: bool | None = None
        batches.at_boundary = self.at_boundary

    def before_backward(self) -> None:
        """Nothing: gradients are this group's own."""

    def use(self, algorithm: Any, steps: InnerSteps) -> None:
        """`algorithm` (LocalSGD or DiLoCo) has `steps` for its inner optimizer."""
        self.algorithm, self._steps = algorithm, steps

    # ------------------------------------------------------------------ inner steps

    def at_boundary(self) -> None:
        """Before a batch is fetched. The fit's first: join."""
        if self.entered or self._place is not None:
            return
        self._place = _Place.BOUNDARY
        try:
            self.algorithm.__enter__()
            self.entered = True
            self._on_quorum()
        finally:
            self._place = None

    def training_step(self, args: tuple[Any, ...], compute: Callable[..., Any]) -> Any:
        module = self._trainer.lightning_module
        output = None if self._pending is not None else compute(*args)
        if output is None and module.automatic_optimization and self._trainer.world_size > 1:
            return zero_loss(module)
        return output

    def optimizer_step(self, closure: Callable[[], Any], step: Callable[[], Any]) -> Any:
        """One call of `Strategy.optimizer_step`, which `step()` is. `closure()` computes only."""
        if self._pending is not None:
            return closure()
        self._stepped = True
        return step()

    def batch_end(self) -> bool:
        """The batch is done; whether the end of an outer step came with it."""
        before = self._manager.last_outcome()
        self._place = _Place.BATCH_END
        try:
            if self._pending is not None:
                self._take_pending()
            elif self._stepped:
                self._inner_step_done()
        finally:
            self._place = None
            self._stepped = False
        outcome = self._manager.last_outcome()
        if outcome is None or outcome is before:
            return False
        self.last_committed = outcome.committed
        self._on_quorum()
        return True

    def finish(self) -> bool:
        """The last batch is done: agree on what came after the last outer step. Whether it worked.

        Afterwards the module holds the global parameters.
        """
        committed = True
        self._place = _Place.BATCH_END
        try:
            if self.algorithm.local_step:
                committed = self.algorithm.sync()
            self._leave(None)
        finally:
            self._place = None
        return committed

    def close(self) -> None:
        """The fit is over. If it was not finished, the step under way is dropped."""
        self._stepped, self._pending = False, None
        self._leave(RuntimeError("the fit was broken off"))

    def _leave(self, error: Exception | None) -> None:
        if self.entered:
            self.entered = False
            self.algorithm.__exit__(None if error is None else type(error), error, None)
            diloco_state.show_global(self._trainer.lightning_module, self.algorithm)

    def _inner_step_done(self) -> None:
        assert self._steps is not None
        self._steps.done()

    # ------------------------------------------------------------------ heal

    def state(self) -> dict[str, Any]:
        """What a healing peer needs besides the algorithm's own state.

        Called in a thread of ft_core it gives places to receive a state instead: none.
        """
        if threading.get_ident() != self._thread:
            return {}
        if self._place is None:
            raise RuntimeError("a state was asked for in the middle of a batch")
        state = healing.dump(self._trainer)
        diloco_state.keep_what_members_share(state["checkpoint"], self._trainer, self.algorithm)
        if self._place is _Place.BATCH_END:
            # To the boundary after it.
            loops = state["checkpoint"]["loops"]["fit_loop"]
            for part in position.PARTS:
                loops[position.BATCHES][part]["completed"] += 1
            loops["epoch_loop.state_dict"]["_batches_that_stepped"] += 1
        state["place"], state["local_step"] = self._place.value, self.algorithm.local_step
        packed: dict[str, Any] = diloco_state.pack(state)
        return packed

    def load(self, packed: dict[str, Any]) -> None:
        """Take a peer's state, and its place in epoch and data."""
        state = diloco_state.unpack(packed)
        if self._place is _Place.BOUNDARY and state["place"] == _Place.BATCH_END.value:
            self._pending = state
        else:
            self._restore(state)
            self.algorithm.local_step = state["local_step"]

    def _take_pending(self) -> None:
        """Go on from where the peer was, at the end of the batch that it was at."""
        state, self._pending = self._pending, None
        assert state is not None
        for optimizer in self._trainer.optimizers:
            optimizer.zero_grad()
        self._restore(state)
        if state["local_step"]:
            # What may be due after the peer's inner step is due here, too.
            self.algorithm.local_step = state["local_step"] - 1
            self._inner_step_done()

    def _restore(self, state: dict[str, Any]) -> None:
        trainer = self._trainer
        diloco_state.keep_own_moments(state["checkpoint"], trainer)
        self.restoring = True
        try:
            epoch_before = healing.restore(trainer, state)
        finally:
            self.restoring = False
        if position.epoch(trainer) != epoch_before:
            # What was gathered for the epoch that this group was in is not of this one.
            trainer.fit_loop.epoch_loop._results.reset()
            self._hooks("on_train_epoch_start")
        self._batches.jump(trainer)
        if self._place is _Place.BATCH_END:
            # The loop is about to count this batch, too.
            loop = trainer.fit_loop.epoch_loop
            loop.batch_progress.total.completed -= 1
            loop.batch_progress.current.completed -= 1
            loop.batch_progress.is_last_batch = trainer.fit_loop._data_fetcher.done
            loop._batches_that_stepped -= 1
