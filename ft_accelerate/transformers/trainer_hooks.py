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
import json
import weakref
from types import ModuleType
from typing import Any

from ft_accelerate import seams
from ft_accelerate.options import is_enabled
from ft_accelerate.runtime import process as processes
from ft_accelerate.runtime import world_collectives as world
from ft_accelerate.runtime.process import while_active
from ft_accelerate.runtime.runtime import Runtime
from ft_accelerate.runtime.world_collectives import TorchProxy
from ft_accelerate.seams import Seam
from ft_accelerate.transformers.trainer_checkpoints import save_checkpoint, started_from
from ft_core.launch.import_hook import when_imported

RESULTS = frozenset(
    ("on_log", "on_evaluate", "on_predict", "on_prediction_step", "on_save", "on_push_begin")
)
"""Events about results: a process that fast-forwards has none."""
KNOWN = "transformers 5.23"


def watch() -> None:
    """Hook into `transformers.trainer` when (or if) it is imported; idempotent."""
    when_imported("transformers.trainer", _on_trainer)


def check_seams() -> None:
    """Raise RuntimeError, in one sentence, if a name that we lean on has moved."""
    seams.check(SEAMS, KNOWN)


def _on_trainer(module: ModuleType) -> None:
    try:
        seams.put(SEAMS, KNOWN)
    except RuntimeError as error:
        if processes.active() is not None or is_enabled():
            raise SystemExit(f"ft_accelerate: {error}") from None


# ------------------------------------------------------------------ replacements


@while_active
def _train(
    runtime: Runtime,
    original: Any,
    self: Any,
    resume_from_checkpoint: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
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
        result = original(self, resume_from_checkpoint, *args, **kwargs)
    finally:
        runtime.on_live.remove(place.arrive)
    if not runtime.live:
        raise RuntimeError(
            "this process came back, but its training ended before it was where its peers are: "
            "start all of them with the same checkpoint, data and arguments"
        )
    return result


@while_active
def _save_rng_state(runtime: Runtime, original: Any, *args: Any, **kwargs: Any) -> Any:
    if not runtime.live:
        return None  # this process or a peer has written it already
    return original(*args, **kwargs)


@while_active
def _save_checkpoint(
    runtime: Runtime, original: Any, self: Any, model: Any, trial: Any, *args: Any, **kwargs: Any
) -> None:
    _know_the_best(self, runtime)
    save_checkpoint(lambda: original(self, model, trial, *args, **kwargs), self, trial)


@while_active
def _determine_best_metric(
    runtime: Runtime, original: Any, self: Any, metrics: Any, trial: Any
) -> Any:
    if not _know_the_best(self, runtime):
        return original(self, metrics, trial)
    return self.state.best_global_step == self.state.global_step


def _know_the_best(trainer: Any, runtime: Runtime) -> bool:
    """A process that fast-forwards has no metrics. Whether a step was the best so far, and so was
    saved with a barrier, it knows from its peers' state. False: this process decides by its metrics."""
    place = _places.get(trainer)
    if runtime.live or place is None or place.best_step is None:
        return False
    trainer.state.best_global_step = place.best_step
    return True


@while_active
def _is_leader(runtime: Runtime, original: Any, self: Any) -> bool:
    return runtime.leader


@while_active
def _call_event(
    runtime: Runtime, original: Any, self: Any, event: str, args: Any, state: Any, control: Any,
    **kwargs: Any,
) -> Any:  # fmt: skip
    if event in RESULTS and not runtime.live:
        return control
    state.is_world_process_zero = state.is_local_process_zero = runtime.leader
    return original(self, event, args, state, control, **kwargs)


def _with_our_barrier(dist: Any) -> TorchProxy:
    return TorchProxy(dist, barrier=world.barrier)


def _over_quorum(dist: Any) -> TorchProxy:
    return TorchProxy(
        dist,
        all_gather=world.all_gather,
        get_world_size=world.get_world_size,
        get_rank=world.get_rank,
    )


SEAMS = (
    Seam("transformers.trainer", "Trainer.train", ("self", "resume_from_checkpoint"), _train),
    Seam("transformers.trainer", "Trainer._save_rng_state", ("self", "output_dir"),
         _save_rng_state),
    Seam("transformers.trainer", "Trainer._save_checkpoint", ("self", "trial"), _save_checkpoint),
    Seam("transformers.trainer", "Trainer._get_output_dir", ("self", "trial")),
    Seam("transformers.trainer", "Trainer._push_from_checkpoint", ("self", "checkpoint_folder")),
    Seam("transformers.trainer", "Trainer._determine_best_metric", ("self", "metrics", "trial"),
         _determine_best_metric),
    Seam("transformers.trainer_utils", "rotate_checkpoints",
         ("output_dir", "save_total_limit", "best_model_checkpoint", "use_mtime")),
    Seam("transformers.trainer_callback", "TrainerState.save_to_json", ("self", "json_path")),
    Seam("transformers.trainer", "Trainer.is_world_process_zero", ("self",), _is_leader),
    Seam("transformers.trainer", "Trainer.is_local_process_zero", ("self",), _is_leader),
    Seam("transformers.trainer", "dist", (), _with_our_barrier),
    Seam("transformers.trainer_pt_utils", "dist", (), _over_quorum),
    Seam("transformers.trainer_pt_utils", "distributed_concat", ("tensor",)),
    Seam("transformers.trainer_callback", "CallbackHandler.call_event", ("self", "event"),
         _call_event),
    Seam("transformers.trainer_callback", "TrainerState.load_from_json"),
    Seam("transformers.trainer_callback", "ExportableState.state", ("self",)),
    Seam("transformers.training_args", "TrainingArguments.should_save", (), _is_leader),
    Seam("transformers.training_args", "TrainingArguments.should_log", (), _is_leader),
)  # fmt: skip


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
