"""LocalSGD and DiLoCo for Lightning Fabric, written once for both of its namespaces.

The loop is the user's. An inner step is counted where the next batch is fetched (or at the next
forward, with data that Fabric does not know), so that it holds all that the loop does after
`optimizer.step()`. There an outer step is launched and applied, and a replica group heals. Fabric's
collectives (`all_reduce`, `all_gather`) stay in the replica group.

    for epoch in fabric.strategy.epochs(10):        # agrees on the rest at its end
        for batch in loader: ...
        with fabric.strategy.global_parameters():   # those that all groups have in common
            validate(); fabric.save(path, {"model": model, "outer": fabric.strategy.outer, ...})
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from ft_lightning.diloco import inner_steps
from ft_lightning.diloco.inner_steps import DiLoCoArguments, InnerSteps, LocalSGDArguments
from ft_lightning.fabric.fabric_step import FabricStepMixin
from ft_lightning.fabric.fabric_strategy import FTFabricMixin


class Outer:  # no dataclass: Fabric takes those for collections, and copies them
    """What a checkpoint needs besides the global parameters; give it to `fabric.save` and `load`. The
    loop's thread."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = weakref.ref(strategy)
        self.loaded: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """The number of outer steps, and the outer optimizer's state."""
        strategy = self._strategy()
        if strategy is None or strategy.algorithm is None:
            return dict(self.loaded)
        state = strategy.algorithm.state_dict()
        return {"step": strategy.outer_step, "outer_optimizer": state["outer_optimizer"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what `state_dict` gave. Has an effect before the first batch only."""
        self.loaded = dict(state)


class _NothingToHoldBack:
    """What `fabric.no_backward_sync` asks."""

    def no_backward_sync(self, module: Any, enabled: bool = True) -> Any:
        return contextlib.nullcontext()


class FabricPeriodicMixin(FTFabricMixin):
    """What both strategies share. Not used alone."""

    _votes_each_step = False
    _serves_spares = False
    _steps: InnerSteps | None = None
    _entered = _stepped = False

    def _prepare(self) -> None:
        super()._prepare()
        self._backward_sync_control: Any = _NothingToHoldBack()
        self.algorithm: Any = None
        """ft_core's LocalSGD or DiLoCo; None before the first batch."""
        self.outer = Outer(self)

    def _make_algorithm(self, module: nn.Module, steps: Any) -> Any:
        raise NotImplementedError

    # ------------------------------------------------------------------ what users call

    @property
    def num_participants(self) -> int:
        """How many replica groups were in the last outer step; 0 before the first. Any thread."""
        outcome = self._manager.last_outcome() if self._manager is not None else None
        return outcome.participants if outcome is not None else 0

    @property
    def outer_step(self) -> int:
        """Committed outer steps. (`current_step`: inner steps.) Any thread."""
        return self._manager.current_step() if self._manager is not None else 0

    @contextlib.contextmanager
    def global_parameters(self) -> Iterator[None]:
        """Within, the models hold the global parameters: for validation and checkpoints.

        Between two batches, in the loop's thread; do not train within."""
        if not self._entered:
            yield
            return
        before = inner_steps.show_global(self._whole(), self.algorithm)
        try:
            yield
        finally:
            inner_steps.put_back(self._whole(), before)

    def epochs(self, total: int) -> Iterator[int]:
        """As FTDDPStrategy's; after the last one, `finish`."""
        yield from super().epochs(total)
        self.finish()

    def finish(self) -> None:
        """The training is over: agree on the inner steps since the last outer step. Idempotent.

        The models hold the global parameters afterwards. Raises what the last outer step raises (see
        `ft_core.Manager.should_commit`). The loop's thread.
        """
        if self._entered:
            self._count()
            if self.algorithm.local_step or self.algorithm.to_sync:
                self.algorithm.sync()
            if self.algorithm.in_slot:
                self._on_quorum()  # else others have left, and none may come
            self._exit(None)

    def leave(self) -> None:
        self._exit(RuntimeError("the training was broken off"))
        super().leave()

    # ------------------------------------------------------------------ set-up

    def setup_module(self, module: nn.Module) -> Any:
        """Called by `fabric.setup` and `setup_module`: nothing happens in its backward. Raises
        RuntimeError after the first batch."""
        if self._started:
            raise RuntimeError("set up all models before the first batch: peers heal them as one")
        self._models.append(module)
        if any(p.requires_grad for p in module.parameters()):
            self._ensure_manager()
            self._watch_forward(module)
        return module

    def _start(self) -> None:
        super()._start()
        assert self._manager is not None
        known = self._manager.state_dict()
        self._manager.load_state_dict({**known, "step": self.outer.loaded.get("step", 0)})
        self._steps = InnerSteps(self._optimizers)
        self.algorithm = self._make_algorithm(self._whole(), self._steps)
        if "outer_optimizer" in self.outer.loaded:
            state = self.algorithm.state_dict()
            state["outer_optimizer"] = self.outer.loaded["outer_optimizer"]
            self.algorithm.load_state_dict(state)

    def _whole(self) -> nn.Module:
        return self._models[0] if len(self._models) == 1 else nn.ModuleList(self._models)

    # ------------------------------------------------------------------ inner steps

    def begin_window(self, *, by_loader: bool) -> None:
        """Between two inner steps: join, or count the one that is done."""
        if self._starting or self._manager is None or not self._optimizers:
            return
        if by_loader:
            if not self._leads(self._fetching):
                return
            self._fed_by_loader = True
        elif self._fed_by_loader:
            return  # one of that batch, or behind the training
        if not self._started:
            self._start()
        self._starting = True
        try:
            if not self._entered:
                self.algorithm.__enter__()
                self._entered = True
                self._on_quorum()
            elif self._stepped:
                before = self._manager.last_outcome()
                self._count()
                outcome = self._manager.last_outcome()
                if outcome is not before:
                    if self.algorithm.in_slot:  # else behind the next inner step
                        self._on_quorum()
                    if outcome is not None and outcome.committed:
                        self._held.round_ended()
        finally:
            self._starting = False

    def _count(self) -> None:
        if self._stepped:
            assert self._steps is not None
            self._stepped = False
            self.progress.step += 1
            self._steps.done()

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Called by `optimizer.step()`: an inner step, once per batch, however many optimizers."""
        if self._trains_alone:
            self._refuse_to_train_alone()
        closure: Callable[[], Any] | None = kwargs.pop("closure", None)
        result = None if closure is None else closure()
        output = super(FabricStepMixin, self).optimizer_step(optimizer, **kwargs)
        self._stepped = True
        return output if closure is None else result

    def _exit(self, error: Exception | None) -> None:
        if self._entered:
            self._entered = self._stepped = False
            self.algorithm.__exit__(None if error is None else type(error), error, None)
            inner_steps.show_global(self._whole(), self.algorithm)

    # ------------------------------------------------------------------ heal

    def _state(self) -> dict[str, Any]:
        """What a healing peer needs besides the algorithm's own state."""
        if threading.get_ident() != self._thread:
            return {}
        state = super()._state()
        del state["models"]
        state["optimizers"] = [o.state_dict()["param_groups"] for o in self._optimizers]
        state["local_step"], state["to_sync"] = self.algorithm.local_step, self.algorithm.to_sync
        packed: dict[str, Any] = inner_steps.pack(state)
        return packed

    def _load(self, packed: dict[str, Any]) -> None:
        super()._load(inner_steps.unpack(packed))

    def _take(self, state: dict[str, Any]) -> None:
        groups = zip(state["optimizers"], self._optimizers, strict=True)
        # A peer's learning rates, but this group's own moments; the models are the algorithm's.
        state["optimizers"] = [
            {"state": mine.state_dict()["state"], "param_groups": theirs} for theirs, mine in groups
        ]
        state["models"] = [model.state_dict() for model in self._models]
        super()._take(state)
        self.algorithm.local_step, self.algorithm.to_sync = state["local_step"], state["to_sync"]


class FTFabricLocalSGDMixin(LocalSGDArguments, FabricPeriodicMixin):  # type: ignore[misc]
    __doc__ = LocalSGDArguments.__doc__


class FTFabricDiLoCoMixin(DiLoCoArguments, FabricPeriodicMixin):  # type: ignore[misc]
    __doc__ = DiLoCoArguments.__doc__
