"""transformers' Trainer: its own state, and the few operations that bypass Accelerate.

Trainer's loop is a loop over Accelerate's objects, and is protected like any other (`install`). The
rest is here. It is put into `transformers.trainer` when a script imports that:

| what | why |
|---|---|
| `TrainerState`, callbacks, LR scheduler, loss sums | heal, so that logs and decisions are the peers' |
| callbacks' events on results | are left out while a process fast-forwards |
| `should_save`, `should_log`, `is_world_process_zero` | mean the first replica group that is there |
| the mean of the logged loss, the barrier before a best checkpoint | reach over all groups |
| `rng_state_*.pth` | is not written again by a process that fast-forwards |
| `_save_checkpoint` | a checkpoint is whole or absent (`trainer_checkpoints`) |
| `_determine_best_metric` | while a process fast-forwards its peers know what was the best |
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch.distributed as dist

from ft_accelerate.plugin.options import is_enabled
from ft_accelerate.runtime import patches
from ft_accelerate.runtime import process as processes
from ft_accelerate.runtime.torch_proxy import TorchProxy
from ft_accelerate.runtime.world_collectives import Collectives
from ft_accelerate.transformers.trainer_checkpoints import save_checkpoint, started_from
from ft_core.launch.import_hook import when_imported

MARK = "__ft_accelerate__"
RESULTS = frozenset(
    ("on_log", "on_evaluate", "on_predict", "on_prediction_step", "on_save", "on_push_begin")
)
"""Events about results: a process that fast-forwards has none."""

SEAMS: tuple[patches.Seam, ...] = (
    ("transformers.trainer", "Trainer.train", ("self", "resume_from_checkpoint")),
    ("transformers.trainer", "Trainer._save_rng_state", ("self", "output_dir")),
    ("transformers.trainer", "Trainer._save_checkpoint", ("self", "trial")),
    ("transformers.trainer", "Trainer._get_output_dir", ("self", "trial")),
    ("transformers.trainer", "Trainer._push_from_checkpoint", ("self", "checkpoint_folder")),
    ("transformers.trainer", "Trainer._determine_best_metric", ("self", "metrics", "trial")),
    (
        "transformers.trainer_utils",
        "rotate_checkpoints",
        ("output_dir", "save_total_limit", "best_model_checkpoint", "use_mtime"),
    ),
    ("transformers.trainer_callback", "TrainerState.save_to_json", ("self", "json_path")),
    ("transformers.trainer", "Trainer.is_world_process_zero", ("self",)),
    ("transformers.trainer", "Trainer.is_local_process_zero", ("self",)),
    ("transformers.trainer", "dist", ()),
    ("transformers.trainer_pt_utils", "dist", ()),
    ("transformers.trainer_pt_utils", "distributed_concat", ("tensor",)),
    ("transformers.trainer_callback", "CallbackHandler.call_event", ("self", "event")),
    ("transformers.trainer_callback", "TrainerState.load_from_json", ()),
    ("transformers.trainer_callback", "ExportableState.state", ("self",)),
    ("transformers.training_args", "TrainingArguments.should_save", ()),
    ("transformers.training_args", "TrainingArguments.should_log", ()),
)


def watch() -> None:
    """Hook into `transformers.trainer` when (or if) it is imported; idempotent."""
    when_imported("transformers.trainer", _on_trainer)


def check_seams() -> None:
    """Raise RuntimeError, in one sentence, if a name that we lean on has moved."""
    import transformers

    patches.check_seams(SEAMS, transformers, "transformers 5.23")


def _on_trainer(module: ModuleType) -> None:
    trainer: Any = vars(module)["Trainer"]
    if getattr(trainer.train, MARK, False):
        return
    try:
        check_seams()
    except RuntimeError as error:
        if processes.active() is not None or is_enabled():
            raise SystemExit(f"ft_accelerate: {error}") from None
        return
    from transformers import trainer_callback, trainer_pt_utils, training_args

    world = Collectives(processes.current)
    vars(module)["dist"] = TorchProxy(dist, barrier=world.barrier)
    vars(trainer_pt_utils)["dist"] = TorchProxy(
        dist,
        all_gather=world.all_gather,
        get_world_size=world.get_world_size,
        get_rank=world.get_rank,
    )
    _replace(trainer, "train", _train)
    _replace(trainer, "_save_rng_state", _unless_past)
    _replace(trainer, "_save_checkpoint", _save_checkpoint)
    _replace(trainer, "_determine_best_metric", _determine_best_metric)
    _replace(trainer, "is_world_process_zero", _is_leader)
    _replace(trainer, "is_local_process_zero", _is_leader)
    _replace(trainer_callback.CallbackHandler, "call_event", _call_event)
    for name in ("should_save", "should_log"):
        stock = inspect.getattr_static(training_args.TrainingArguments, name)
        setattr(
            training_args.TrainingArguments,
            name,
            property(_is_leader(stock.fget), doc=stock.__doc__),
        )


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    stock = inspect.getattr_static(owner, name)
    new = functools.wraps(stock)(make(stock))
    setattr(new, MARK, True)
    setattr(owner, name, new)


# ------------------------------------------------------------------ replacements


def _train(stock: Any) -> Any:
    def train(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        runtime = processes.active()
        if runtime is None:
            return stock(self, resume_from_checkpoint, *args, **kwargs)
        if resume_from_checkpoint is True:
            from transformers.trainer_utils import get_last_checkpoint

            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir) or True
        if resume_from_checkpoint is not True:  # True: Trainer says that there is no checkpoint
            resume_from_checkpoint = started_from(
                self.args.output_dir, resume_from_checkpoint or None, runtime
            )
        place = _places[self] = TrainerPlace(self)
        self.accelerator.register_for_checkpointing(place)
        runtime.on_live.append(place.arrive)
        try:
            result = stock(self, resume_from_checkpoint, *args, **kwargs)
        finally:
            runtime.on_live.remove(place.arrive)
        if not runtime.live:
            raise RuntimeError(
                "this process came back, but its training ended before it was where its peers "
                "are: start all of them with the same checkpoint, data and arguments"
            )
        return result

    return train


def _unless_past(stock: Any) -> Any:
    def save(self: Any, *args: Any, **kwargs: Any) -> Any:
        runtime = processes.active()
        if runtime is not None and not runtime.live:
            return None  # this process or a peer has written it already
        return stock(self, *args, **kwargs)

    return save


def _save_checkpoint(stock: Any) -> Any:
    def save(self: Any, model: Any, trial: Any, *args: Any, **kwargs: Any) -> Any:
        runtime = processes.active()
        if runtime is None:
            return stock(self, model, trial, *args, **kwargs)
        _know_the_best(self, runtime)
        return save_checkpoint(lambda: stock(self, model, trial, *args, **kwargs), self, trial)

    return save


def _determine_best_metric(stock: Any) -> Any:
    def determine(self: Any, metrics: Any, trial: Any) -> Any:
        runtime = processes.active()
        if runtime is None or not _know_the_best(self, runtime):
            return stock(self, metrics, trial)
        return self.state.best_global_step == self.state.global_step

    return determine


def _know_the_best(trainer: Any, runtime: Any) -> bool:
    """A process that fast-forwards has no metrics. Whether a step was the best so far, and so was
    saved with a barrier, it knows from its peers' state. False: this process decides by its metrics."""
    place = _places.get(trainer)
    if runtime.live or place is None or place.best_step is None:
        return False
    trainer.state.best_global_step = place.best_step
    return True


def _is_leader(stock: Any) -> Any:
    def is_first(self: Any) -> bool:
        runtime = processes.active()
        return bool(stock(self) if runtime is None else runtime.leader)

    return is_first


def _call_event(stock: Any) -> Any:
    def call_event(
        self: Any, event: str, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> Any:
        runtime = processes.active()
        if runtime is not None:
            if event in RESULTS and not runtime.live:
                return control
            state.is_world_process_zero = state.is_local_process_zero = runtime.leader
        return stock(self, event, args, state, control, **kwargs)

    return call_event


# ------------------------------------------------------------------ the state


class TrainerPlace:
    """A Trainer's state besides Accelerate's objects, as plain data. The loop's thread only.

    A peer's state is kept until this process has arrived at the peer's position, and loaded then: in
    between, Trainer counts the steps that it fast-forwards through.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer: weakref.ref[Any] = weakref.ref(trainer)
        self._peers_state: dict[str, Any] | None = None

    @property
    def best_step(self) -> int | None:
        """The peers' best step, until this process has arrived at their position."""
        return (
            json.loads(self._peers_state["state"])["best_global_step"]
            if self._peers_state
            else None
        )

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer()
        if trainer is None:  # it was collected, its accelerator was not
            return {}
        scheduler = trainer.lr_scheduler
        return {
            "state": json.dumps(dataclasses.asdict(trainer.state)),
            "callbacks": json.dumps([[type(c).__name__, c.state()] for c in _exportable(trainer)]),
            "scheduler": None if scheduler is None else scheduler.state_dict(),
            "rates": _rates(trainer),
            "loss": float(getattr(trainer, "_tr_loss", 0.0)),
            "total_loss": float(getattr(trainer, "_total_loss_scalar", 0.0)),
            "last_logged": int(getattr(trainer, "_globalstep_last_logged", 0)),
            "flos": trainer.current_flos,  # an int at 0, which travels as another tensor than 0.0
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._peers_state = state

    def arrive(self) -> None:
        """This process has arrived at its peer's position: load the peer's state."""
        trainer, found, self._peers_state = self._trainer(), self._peers_state, None
        if trainer is None or not found:
            return
        mine = trainer.state
        for name, value in json.loads(found["state"]).items():
            if not name.startswith("is_"):  # whether this process is the first, and such
                setattr(mine, name, value)
        states = json.loads(found["callbacks"])
        for callback in _exportable(trainer):
            for place, (name, state) in enumerate(states):
                if name == type(callback).__name__:
                    vars(callback).update(state["attributes"])
                    del states[place]
                    break
        if trainer.lr_scheduler is not None and found["scheduler"] is not None:
            trainer.lr_scheduler.load_state_dict(found["scheduler"])
        for group, rate in zip(trainer.optimizer.param_groups, found["rates"], strict=False):
            group["lr"] = rate
        trainer._tr_loss.fill_(found["loss"])
        trainer._total_loss_scalar = found["total_loss"]
        trainer._globalstep_last_logged = found["last_logged"]
        trainer.current_flos = found["flos"]


_places: weakref.WeakKeyDictionary[Any, TrainerPlace] = weakref.WeakKeyDictionary()


def _exportable(trainer: Any) -> list[Any]:
    from transformers.trainer_callback import ExportableState

    all_ = [*trainer.callback_handler.callbacks, trainer.control]
    return [callback for callback in all_ if isinstance(callback, ExportableState)]


def _rates(trainer: Any) -> list[float]:
    if trainer.optimizer is None:
        return []
    return [float(group["lr"]) for group in trainer.optimizer.param_groups]
