"""A Trainer's whole state as a checkpoint that travels, and its restoration in a running fit.

A heal is a resumption from a checkpoint, with all the hooks that Lightning calls for that: what a
LightningModule, data module or callback keeps through a checkpoint, it keeps through a heal. The
only difference is that the fit is running already.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import astuple
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ft_core.config import JobOptions
from ft_core.heal import digest
from ft_core.shell.intra_group import IntraGroup
from ft_lightning.shared.epoch_rest import Origin
from ft_lightning.trainer import finetuning
from ft_lightning.trainer.batches import Batches
from ft_lightning.trainer.counters import (
    batches_done,
    capture_counters,
    epochs_done,
    settle_counters,
)
from ft_lightning.trainer.loggers import adopt_log_places, log_places
from ft_lightning.trainer.saves import with_copied_buffers

log = logging.getLogger("ft_lightning")

_LIGHTNINGS_OWN = {
    "epoch",
    "global_step",
    "pytorch-lightning_version",
    "state_dict",
    "loops",
    "callbacks",
    "optimizer_states",
    "lr_schedulers",
    "hparams_name",
}
"""In each checkpoint, whatever the module keeps."""


def lineage_of_start(trainer: Any, *, allow_objects: bool) -> str:
    """Name of the state in which a run starts; equal for replica groups that start alike.

    It covers what decides the course of the training, and nothing that may differ between groups
    (such as a callback's paths). Groups in other states heal at the first quorum.
    """
    state = {
        **places(trainer)["checkpoint"],
        "lr_schedulers": [c.scheduler.state_dict() for c in trainer.lr_scheduler_configs],
        "epoch": trainer.current_epoch,
        "step": trainer.global_step,
    }
    return f"start-{digest(state, allow_objects=allow_objects)}"


def begin(trainer: Any, in_group: IntraGroup, options: JobOptions) -> str:
    """Make the ranks of this replica group begin alike; returns `lineage_of_start`, after that."""
    strategy, allow_objects = trainer.strategy, options.heal_allow_objects
    return in_group.sync_initial_state(
        lambda: lineage_of_start(trainer, allow_objects=allow_objects),
        strategy.lightning_module_state_dict,
        lambda state: strategy.load_model_state_dict({"state_dict": state}, strict=True),
        into=strategy.lightning_module_state_dict,
    )


def dump(trainer: Any, data: Batches, *, batches: int = 0) -> dict[str, Any]:
    """The state as of the boundary at which the current step began. The loop's thread only.

    Tensors are the live ones: the caller copies. `data`: what this fit reads; `batches`: as in `capture_counters`.
    """
    checkpoint = _checkpoint(trainer)
    checkpoint["loops"] = {"fit_loop": capture_counters(trainer, batches=batches)}
    metrics = {
        name: value.detach().clone() if isinstance(value, torch.Tensor) else value
        for name, value in trainer.callback_metrics.items()
    }
    return {
        "checkpoint": checkpoint,
        "should_stop": trainer.should_stop,
        "metrics": metrics,
        "logs": log_places(trainer),
        "rows": trainer.strategy.kept_rows(),
        "checkpoint_names": trainer.strategy.checkpoint_names.state(),
        "last_saves": last_saves(trainer.checkpoint_callbacks),
        "trained": finetuning.trained(trainer),
        "reset_by_pruning": finetuning.reset_by_pruning(trainer),
        "loaded_in": _loaded_in(trainer),
        "asked_with": data.asked_with,
        "origin": astuple(data.origin),
    }


_OF_LAST_SAVE = (
    "_last_checkpoint_saved",
    "_last_global_step_saved",
    "_defer_save_until_validation",
)


def last_saves(callbacks: list[Any]) -> list[dict[str, Any]]:
    """What Lightning's `ModelCheckpoint` goes by when it saves, and does not keep in a checkpoint."""
    return [{n: vars(each)[n] for n in _OF_LAST_SAVE if n in vars(each)} for each in callbacks]


def take_last_saves(callbacks: list[Any], told: list[dict[str, Any]]) -> None:
    """Take a peer's `last_saves`. Without them a process that came back would write "last" at the end of a fit
    whose end is not the last save."""
    for callback, known in zip(callbacks, told, strict=False):
        vars(callback).update(known)


def _checkpoint(trainer: Any) -> dict[str, Any]:
    with trainer.strategy.as_it_is():
        checkpoint: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(
            weights_only=False
        )
        saved = checkpoint["state_dict"]
        checkpoint["state_dict"] = finetuning.as_pruned(saved, trainer.lightning_module)
    for owner in (trainer.lightning_module, trainer.datamodule):
        if owner is not None:
            # The target has its own. They may hold any object, and restoring does not read them.
            for key in ("CHECKPOINT_HYPER_PARAMS_KEY", "CHECKPOINT_HYPER_PARAMS_TYPE"):
                checkpoint.pop(getattr(owner, key, key), None)
    return checkpoint


def kept_for_loaders(trainer: Any) -> dict[str, Any]:
    """What the data module and the module themselves keep in a checkpoint now: loaders may follow from it."""
    data, kept = trainer.datamodule, {}
    if data is not None:
        kept[type(data).__qualname__] = data.state_dict()
    # Hooks may need what `on_train_start` sets up, and the first loaders are asked for before that.
    with suppress(Exception):
        kept |= {k: v for k, v in _checkpoint(trainer).items() if k not in _LIGHTNINGS_OWN}
    return deepcopy(kept)


def places(trainer: Any) -> dict[str, Any]:
    """The target's own tensors, shaped like `dump`'s tree: where tensors may be received.

    Any thread, while the loop waits: no hook of the user is called.
    """
    strategy = trainer.strategy
    with strategy.as_it_is():
        model = strategy.lightning_module_state_dict()
    return {
        "checkpoint": {
            "state_dict": model,
            "optimizer_states": [o.state_dict() for o in strategy.optimizers],
        }
    }


def set_aside(trainer: Any, state: dict[str, Any]) -> dict[str, Any]:
    """A dumped state that is restored later. What was received in the model's own buffers is copied:
    the batch under way, which will be abandoned, has yet to put those back to where it began."""
    return {
        **state,
        "checkpoint": with_copied_buffers(state["checkpoint"], trainer.lightning_module),
    }


def restore(
    trainer: Any, state: dict[str, Any], batches: Batches, hooks: Callable[[str], None]
) -> None:
    """Put a dumped state in place, and go to its place in epoch and data; the loop's thread. Counters are
    those of the boundary then.

    `hooks(name)` calls the callbacks' and the module's hook of that name.
    """
    epoch_before, fit_loop = epochs_done(trainer), trainer.fit_loop
    # Then Lightning has not called the hook of that epoch's start.
    resumed_within_epoch = fit_loop.restarted_mid_epoch
    checkpoint = state["checkpoint"]
    _adopt_directories(trainer, checkpoint.get("callbacks", {}))
    connector = trainer._checkpoint_connector
    connector._loaded_checkpoint = _copy(checkpoint)  # hooks may take it apart
    try:
        with trainer.strategy.as_it_is():
            connector.restore_datamodule()
            finetuning.adopt_pruned(trainer.lightning_module, checkpoint["state_dict"])
            finetuning.adopt_reset(trainer, state["reset_by_pruning"])
            connector.restore_model()
            connector.restore_callbacks()
            _adopt_averages(trainer)
            _restart_clocks(trainer)
            finetuning.adopt(trainer, state["trained"])
            connector.restore_training_state()
    finally:
        connector._loaded_checkpoint = {}
    settle_counters(trainer)
    fit_loop.reset_restart_stage()
    trainer.should_stop = state["should_stop"]
    adopt_log_places(trainer, state["logs"])
    trainer.strategy.checkpoint_names.load(state["checkpoint_names"])
    take_last_saves(trainer.checkpoint_callbacks, state["last_saves"])
    trainer.callback_metrics.update(state["metrics"])
    log.info(
        "healed: epoch %s, batch %s, global step %s",
        trainer.current_epoch,
        batches_done(trainer),
        trainer.global_step,
    )
    if _reload(trainer, state, batches.asked_with):
        put_back_hooks(trainer, state)
    if epochs_done(trainer) != epoch_before or resumed_within_epoch:
        # What was logged in the epoch that this group was in is not of this one.
        fit_loop.epoch_loop._results.reset()
        hooks("on_train_epoch_start")
        _put_back(trainer, state)
    # Last: the peer has logged already what these hooks log (LearningRateMonitor a row for each epoch).
    trainer.strategy.take_rows(state["rows"])
    batches.origin = Origin(*state["origin"])
    batches.jump(trainer, state.get("data", ()))


def _loaded_in(trainer: Any) -> list[float]:
    """The epochs in which Lightning has asked for the loaders: to train on, and for the validation."""
    fit_loop = trainer.fit_loop
    validation = fit_loop.epoch_loop.val_loop
    return [fit_loop._last_train_dl_reload_epoch, validation._last_val_dl_reload_epoch]


def _reload(trainer: Any, state: dict[str, Any], asked_with: Any) -> bool:
    """With `reload_dataloaders_every_n_epochs`: have the loaders that a peer has asked for, in the epochs and with the
    states of the data module and the module in which it did. Whether any was asked for. Call `Batches.jump` next.

    `asked_with`: the states in which this process has asked for those to train on.
    """
    if not trainer.reload_dataloaders_every_n_epochs:
        return False
    mine, theirs = _loaded_in(trainer), state["loaded_in"]
    fit_loop = trainer.fit_loop
    validation = fit_loop.epoch_loop.val_loop
    own, peers = (digest(each, allow_objects=True) for each in (asked_with, state["asked_with"]))
    with_that = own == peers
    if with_that and mine == theirs:
        return False
    if mine[0] != theirs[0] or not with_that:
        _load_hooks(trainer, {**_copy(state["checkpoint"]), **deepcopy(state["asked_with"])})
        the_loops = {"_data_fetcher": fit_loop._data_fetcher}
        fit_loop._last_train_dl_reload_epoch = -math.inf
        _ask(trainer, fit_loop, theirs[0])
        vars(fit_loop).update(the_loops)  # the loop under way holds it
        fit_loop._data_fetcher.setup(fit_loop._combined_loader)
    if mine[1] != theirs[1]:
        validation._last_val_dl_reload_epoch = -math.inf
        if theirs[1] != -math.inf:  # else it asks before its first validation, as the peer does
            trainer.validating = True
            _ask(trainer, validation, theirs[1])
            trainer.training = True
    return True


def _ask(trainer: Any, loop: Any, epoch: float) -> None:
    """Let a loop ask for its loaders as in `epoch`."""
    current, now = trainer.fit_loop.epoch_progress.current, trainer.current_epoch
    current.completed = epoch  # for which the data module may ask
    try:
        loop.setup_data()
    finally:
        current.completed = now


def _put_back(trainer: Any, state: dict[str, Any]) -> None:
    """An epoch's first hooks were called in a restored state. The peer had called them before it gave that: what
    they change from its present value (a rate, a counter) would be changed twice."""
    connector = trainer._checkpoint_connector
    connector._loaded_checkpoint = checkpoint = _copy(state["checkpoint"])
    try:
        _load_hooks(trainer, checkpoint)
        finetuning.adopt(trainer, state["trained"])
        with trainer.strategy.as_it_is():
            connector.restore_optimizers_and_schedulers()
    finally:
        connector._loaded_checkpoint = {}


def put_back_hooks(trainer: Any, state: dict[str, Any]) -> None:
    """What the module and callbacks keep is that of the peer again: it had called the hooks since the boundary
    already when it gave its state."""
    _load_hooks(trainer, _copy(state["checkpoint"]))


def _load_hooks(trainer: Any, checkpoint: dict[str, Any]) -> None:
    """Let the data module, the module and callbacks load what they keep. The module's hook may change `checkpoint`."""
    data = trainer.datamodule
    if data is not None and (kept := checkpoint.get(type(data).__qualname__)):
        data.load_state_dict(deepcopy(kept))
    trainer.lightning_module.on_load_checkpoint(checkpoint)
    for callback in trainer.callbacks:
        if known := checkpoint.get("callbacks", {}).get(callback.state_key):
            callback.load_state_dict(deepcopy(known))


def _copy(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """With the same tensors and objects in it."""
    copied: dict[str, Any] = tree_map(lambda leaf: leaf, checkpoint)
    return copied


def _adopt_directories(trainer: Any, states: dict[str, Any]) -> None:
    """Checkpoint callbacks of all groups save into one directory.

    A process that was started later has resolved a directory of its own, and Lightning drops a
    checkpoint callback's state if the directories differ.
    """
    for callback in trainer.checkpoint_callbacks:
        directory = states.get(callback.state_key, {}).get("dirpath")
        if directory and getattr(callback, "dirpath", None):
            callback.dirpath = directory


def _adopt_averages(trainer: Any) -> None:
    """Of how many models an average is: Lightning's StochasticWeightAveraging takes that from a state before
    it begins only, and this process may have begun by its checkpoint."""
    for callback in trainer.callbacks:
        averaged, loaded = (getattr(callback, n, None) for n in ("n_averaged", "_init_n_averaged"))
        if averaged is not None and loaded is not None:
            averaged.fill_(loaded)


def _restart_clocks(trainer: Any) -> None:
    """The time of a Timer (`max_time`) is that of its peers, and goes on from here: Lightning's adds what has passed
    since the training began in this process."""
    for callback in trainer.callbacks:
        started = getattr(callback, "_start_time", None)
        if isinstance(started, dict) and hasattr(callback, "_offset"):
            started["train"] = time.monotonic()
