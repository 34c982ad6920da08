"""The strategies "ft_local_sgd" and "ft_diloco", written once for both of Lightning's namespaces.

Replica groups train on their own and agree every so many optimizer steps. What that means for the
parts of a Trainer is in docs/diloco.md; in short: `global_step` counts inner steps, and whatever
leaves the training loop (validation, checkpoints, the model after `fit`) sees the *global*
parameters, which are equal in all replica groups, not those that each is trying out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from ft_core.diloco import DiLoCo
from ft_core.local_sgd import LocalSGD
from ft_lightning import diloco_state
from ft_lightning.diloco_driver import InnerDriver, InnerSteps
from ft_lightning.strategy import FTDDPMixin

log = logging.getLogger("ft_lightning")

STATE_KEY = "ft_outer_optimizer"
"""Where a checkpoint holds the outer optimizer's state."""

Codec = Literal["int8", "int4", "fp8"]


class PeriodicMixin(FTDDPMixin):
    """What both strategies share. Not used alone."""

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


class FTLocalSGDMixin(PeriodicMixin):
    """Strategy for LocalSGD: replica groups train on their own and average their parameters.

    Each process is a replica group: it holds the whole model and may die at any time; the others
    lose nothing, and what dies with it is its own work since the last average.

    Args:
        sync_every: optimizer steps between two averages.
        weighted: weigh each group's parameters by the optimizer steps that it took.
        keep_windows: if an average fails because of somebody else, a group's work is kept and
            goes into the next one. False: it is dropped, and the group returns to the last average.
        bucket_bytes: how much travels in one piece.
        **kwargs: options of :class:`FTDDPStrategy`, such as ``min_replicas``.
    """

    def __init__(
        self,
        sync_every: int = 10,
        weighted: bool = False,
        keep_windows: bool = True,
        bucket_bytes: int = 32 << 20,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        _positive("sync_every", sync_every)
        self._sync_every = sync_every
        self._algorithm_options = {
            "weighted": weighted, "keep_windows": keep_windows, "bucket_bytes": bucket_bytes,
        }  # fmt: skip

    def _make_algorithm(self, module: torch.nn.Module, steps: InnerSteps) -> Any:
        assert self._manager is not None
        return LocalSGD(self._manager, module, steps, self._sync_every, **self._algorithm_options)


class FTDiLoCoMixin(PeriodicMixin):
    """Strategy for DiLoCo and Streaming DiLoCo: replica groups train on their own, and an outer
    optimizer steps on how far they have drifted on average.

    Each process is a replica group: it holds the whole model and may die at any time; the others
    lose nothing, and what dies with it is its own work since the last outer step.

    Args:
        sync_every: optimizer steps in a window, in which each fragment has one outer step (H).
        outer_lr: learning rate of the outer optimizer, SGD with Nesterov momentum.
        outer_momentum: its momentum.
        outer_optimizer: makes another outer optimizer from the parameters, instead of the two
            above.
        fragments: in how many parts of about equal size the model is synchronized; or a list of
            parameter names for each.
        fragment_sync_delay: optimizer steps between sending a fragment and applying it, behind
            which communication hides (tau).
        fragment_update_alpha: how much of its own parameters a group keeps when a fragment is
            applied, 0 to 1.
        codec: what travels: "int8", "int4" or "fp8"; None: as it is.
        error_feedback: send what the codec has lost the next time.
        weighted: weigh each group's drift by the optimizer steps that it took.
        backup_device: where the global parameters are kept, such as "cuda"; None: in CPU memory.
        pin_memory: page-locked, if that is CPU memory and there is a CUDA device.
        keep_windows: if an outer step fails because of somebody else, a group's work is kept and
            goes into the next one. False: it is dropped, and the group returns to the global
            parameters.
        bucket_bytes: how much travels in one piece.
        **kwargs: options of :class:`FTDDPStrategy`, such as ``min_replicas``.
    """

    def __init__(
        self,
        sync_every: int = 50,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        outer_optimizer: Callable[[Iterable[Any]], Optimizer] | None = None,
        fragments: int | list[list[str]] = 1,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float = 0.0,
        codec: Codec | None = None,
        error_feedback: bool = False,
        weighted: bool = False,
        backup_device: str | None = None,
        pin_memory: bool = True,
        keep_windows: bool = True,
        bucket_bytes: int = 32 << 20,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        _positive("sync_every", sync_every)
        _positive("outer_lr", outer_lr)
        if not 0.0 <= outer_momentum < 1.0:
            raise ValueError(f"outer_momentum must be from 0 to below 1, got {outer_momentum}")
        self._sync_every = sync_every
        self._outer = outer_lr, outer_momentum, outer_optimizer
        self._algorithm_options = {
            "fragments": fragments,
            "fragment_sync_delay": fragment_sync_delay,
            "fragment_update_alpha": fragment_update_alpha,
            "codec": codec,
            "error_feedback": error_feedback,
            "weighted": weighted,
            "backup_device": None if backup_device is None else torch.device(backup_device),
            "pin_memory": pin_memory,
            "keep_windows": keep_windows,
            "bucket_bytes": bucket_bytes,
        }

    def _make_algorithm(self, module: torch.nn.Module, steps: InnerSteps) -> Any:
        assert self._manager is not None
        lr, momentum, make = self._outer
        parameters = [p for p in module.parameters() if p.requires_grad]
        if make is not None:
            outer = make(parameters)
        else:
            outer = torch.optim.SGD(parameters, lr=lr, momentum=momentum, nesterov=momentum > 0)
        return DiLoCo(
            self._manager, module, steps, outer, self._sync_every, **self._algorithm_options
        )


def _positive(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{name} must be positive, got {value}")
