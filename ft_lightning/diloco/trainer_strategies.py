"""The strategies "ft_local_sgd" and "ft_diloco", written once for both of Lightning's namespaces.

Replica groups train on their own and agree every so many optimizer steps. What that means for the
parts of a Trainer is in docs/diloco.md; in short: `global_step` counts inner steps, and whatever
leaves the training loop (validation, checkpoints, the model after `fit`) sees the *global*
parameters, which are equal in all replica groups, not those that each is trying out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ft_lightning.diloco import equal_state as diloco_state
from ft_lightning.diloco.arguments import DiLoCoArguments, LocalSGDArguments
from ft_lightning.diloco.inner_driver import InnerDriver, InnerSteps
from ft_lightning.trainer.hooks import refuse_search
from ft_lightning.trainer.strategy import FTDDPMixin

log = logging.getLogger("ft_lightning")

STATE_KEY = "ft_outer_optimizer"
"""Where a checkpoint holds the outer optimizer's state."""


class PeriodicMixin(FTDDPMixin):
    """What both strategies share. Not used alone."""

    _votes_each_step = False
    _driver: InnerDriver | None  # type: ignore[assignment]
    _restored: Any = None
    _aside: dict[str, Tensor] | None = None
    _booked: tuple[int, float, float] = (0, 0.0, 0.0)

    def _make_algorithm(self, module: torch.nn.Module, steps: InnerSteps) -> Any:
        """LocalSGD or DiLoCo of ft_core."""
        raise NotImplementedError

    @property
    def algorithm(self) -> Any:
        """ft_core's LocalSGD or DiLoCo of the fit under way, or of the last one; None before."""
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

    def setup(self, trainer: Any) -> None:
        if trainer.state.fn == "fit":
            refuse_search(trainer, outer=True)
        super().setup(trainer)
        if trainer.state.fn != "fit":
            return
        assert self._driver is not None
        assert self.lightning_module is not None
        self._aside, self._booked = None, (0, 0.0, 0.0)
        steps = InnerSteps(list(self.optimizers))
        self._driver.use(self._make_algorithm(self.lightning_module, steps), steps)
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
        assert self._driver is not None
        if self._driver.batch_end():
            self._log_outer_step()

    def _log_outer_step(self) -> None:
        """An outer step was decided: say what it was like."""
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
        """Validation is about to start: on what all groups have in common."""
        if self._driver is not None and self._driver.entered:
            module = self.lightning_module
            assert module is not None
            self._aside = diloco_state.show_global(module, self.algorithm)

    def _show_local(self) -> None:
        if self._aside is not None:
            module = self.lightning_module
            assert module is not None
            before, self._aside = self._aside, None
            diloco_state.put_back(module, before)

    def _finish(self) -> None:
        """The last batch is done: the module gets the global parameters."""
        if self._driver is not None and self._driver.entered and not self._driver.finish():
            log.warning(
                "the last outer step was discarded: the model is that of the one before, without "
                "the inner steps since"
            )

    # ------------------------------------------------------------------ checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The global parameters, whatever this group is trying out."""
        state = super().lightning_module_state_dict()
        if self._driver is not None and self._driver.entered:
            module = self.lightning_module
            assert module is not None
            values = diloco_state.global_values(module, self.algorithm)
            state.update({k: v.to(state[k].device) for k, v in values.items() if k in state})
        return state

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        """From a peer comes only what the algorithm does not bring itself."""
        healing = self._driver is not None and self._driver.restoring
        super().load_model_state_dict(checkpoint, strict=strict and not healing)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        if self.is_global_zero and self.algorithm is not None:
            checkpoint[STATE_KEY] = self.algorithm.state_dict()["outer_optimizer"]
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self._restored = checkpoint.get(STATE_KEY)
        return checkpoint


class FTLocalSGDMixin(LocalSGDArguments, PeriodicMixin):
    __doc__ = LocalSGDArguments.__doc__


class FTDiLoCoMixin(DiLoCoArguments, PeriodicMixin):
    __doc__ = DiLoCoArguments.__doc__
