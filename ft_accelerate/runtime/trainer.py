"""transformers' Trainer: its own state, and the few operations that bypass Accelerate.

Trainer's loop is a loop over Accelerate's objects, and is protected like any other (`install`). The
rest is here; `SEAMS` is put in place when a script imports `transformers.trainer`. Trainer's state
heals, so that logs and decisions are the peers'. A process that comes back enters the loop where they
are, or runs there fast-forward. On that way it leaves out the callbacks' events on
results, writes no state of random numbers, and knows from its peers which step was the best.

*A process that comes back enters the loop.* Trainer can begin in the middle: when it resumes from a
checkpoint it starts with the epoch of the checkpoint, and its sampler skips the batches that were read. A
process that comes back does the same. It joins and heals with the first batch that it asks for. That
ends the loop over the epoch (`Elsewhere`), epochs that are over are passed over, and in the peers' epoch
Trainer is told that so many batches were trained. What this costs does not grow with the training, but
for the indices that the sampler skips within one epoch. Callbacks see what they see in a Trainer that
resumes: `on_train_begin`, then the peers' epoch.

Some loops can't be entered so, and are run through fast-forward: data that is not read by index, a
loader with a state of its own (torchdata), `ignore_data_skip`, and trainers that prepare their inputs
themselves, as those of reinforcement learning do, which count steps on their own.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from ft_accelerate import seams
from ft_accelerate.options import is_enabled
from ft_accelerate.runtime import group_shards
from ft_accelerate.runtime import process as processes
from ft_accelerate.runtime import world_collectives as world
from ft_accelerate.runtime.divided_data import index_sampler, skips_by_index
from ft_accelerate.runtime.loaders import peers_have_passed
from ft_accelerate.runtime.process import (
    is_main,
    is_main_to_log,
    saves,
    unless_catching_up,
    while_active,
)
from ft_accelerate.runtime.runtime import Runtime
from ft_accelerate.runtime.script_position import UNKNOWN, Elsewhere, Phase, ScriptPosition
from ft_accelerate.runtime.succession import owed_hooks
from ft_accelerate.runtime.trainer_checkpoints import checkpoint, started_from, started_with
from ft_accelerate.runtime.trainer_state import share, shared_by
from ft_accelerate.seams import Seam
from ft_core.launch.import_hook import when_imported

log = logging.getLogger("ft_accelerate")

RESULTS = frozenset(
    ("on_log", "on_evaluate", "on_predict", "on_prediction_step", "on_save", "on_push_begin")
)
"""Events about results: a process that fast-forwards has none."""
DECIDED = frozenset(("on_log", "on_evaluate", "on_predict", "on_save"))
"""Those of them at which callbacks decide whether to stop, evaluate and save."""
SEARCHES = (
    "hyperparameter_search trains once for each trial, and one process draws the trials for all, which can't be "
    "protected: let the search start each trial as a job of its own, or run it without fault tolerance"
)
KNOWN = "transformers 4.57 to 5.24"


def watch() -> None:
    """Hook into `transformers.trainer` when (or if) it is imported; idempotent."""
    when_imported("transformers.trainer", _on_trainer)
    for name in MODELS:
        when_imported(name, _on_models)


def _on_models(module: ModuleType) -> None:
    """Its models' `save_pretrained`, if it has one that is told which process is the main one."""
    seam = MODELS[module.__name__]
    if not seam.moved():
        seams.put((seam,), "another transformers")


def _on_trainer(module: ModuleType) -> None:
    try:
        seams.put(SEAMS, KNOWN)
        _watch_entry()
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
    if runtime.group_ranks.number == 0 and (text := seams.newer(KNOWN)):
        log.warning("%s", text)
    goes_on = resume_from_checkpoint is None
    if resume_from_checkpoint is True:
        from transformers.trainer_utils import get_last_checkpoint

        resume_from_checkpoint = get_last_checkpoint(self.args.output_dir) or True
    if resume_from_checkpoint is not True:  # True: Trainer says that there is no checkpoint
        resume_from_checkpoint = started_from(
            self.args, resume_from_checkpoint or None, runtime, goes_on=goes_on
        )
    started_with.pop(self, None)
    if isinstance(resume_from_checkpoint, (str, os.PathLike)):
        started_with[self] = Path(resume_from_checkpoint).resolve()
    runtime.position.begun += 1
    if not runtime.prepared.knows(getattr(self.model_wrapped, "_orig_mod", self.model_wrapped)):
        self.model_wrapped = (
            self.model
        )  # what it was wrapped in for an evaluation averages no gradient
    shared = share(self)
    self.accelerator.register_for_checkpointing(shared, *_reference_models(self))
    runtime.on_live.append(shared.arrive)
    runtime.leadership.heals_variables = True
    try:
        return original(self, resume_from_checkpoint, *args, **kwargs)
    finally:
        if runtime.live:  # else its peers are behind the training, and it arrives there
            runtime.on_live.remove(shared.arrive)


def _reference_models(trainer: Any) -> list[nn.Module]:
    """Those that a callback moves after the trained one (TRL's `sync_ref_model`). Trainer has its Accelerator forget
    each model that was prepared before the training."""
    found = (getattr(each, "ref_model", None) for each in trainer.callback_handler.callbacks)
    known = trainer.accelerator._custom_objects
    return [m for m in found if isinstance(m, nn.Module) and all(m is not each for each in known)]


@seams.around
def _init_arguments(original: Any, self: Any) -> None:
    """With `--fsdp` torch's default process group is the replica group, and these arguments make it."""
    runtime = processes.activate() if self.fsdp else None
    if runtime is not None:
        runtime.group_ranks.hold_shards()
    original(self)


@while_active
def _determine_best_metric(
    runtime: Runtime, original: Any, self: Any, metrics: Any, trial: Any
) -> Any:
    shared = shared_by(self)
    if shared is not None and _know_the_best(self, runtime):
        return _best_step(self) == self.state.global_step
    found = original(self, metrics, trial)
    if found and shared is not None:
        shared.best_step = self.state.global_step
    return found


def _know_the_best(trainer: Any, runtime: Runtime) -> bool:
    """A process that fast-forwards has no metrics. Whether a step was the best so far it knows from its peers' state.
    False: this process decides by its metrics."""
    shared = shared_by(trainer)
    if runtime.live or shared is None or not shared.peers_state:
        return False
    trainer.state.best_global_step = json.loads(shared.peers_state["state"])["best_global_step"]
    return True


def _best_step(trainer: Any) -> int | None:
    """Whose evaluation was the best so far, as this process has found, or its peers have."""
    shared = shared_by(trainer)
    if shared is None:
        return None
    best: int | None = shared.peers_state.get("best_step", shared.best_step)
    return best


@while_active
def _call_event(
    runtime: Runtime,
    original: Any,
    self: Any,
    event: str,
    args: Any,
    state: Any,
    control: Any,
    **kwargs: Any,
) -> Any:
    shared, phase = shared_by(self), runtime.position.phase
    if event in RESULTS and not runtime.live:
        if shared is not None and event in DECIDED:
            shared.decide_as_peers(event, control)
        return control
    if self in _passing:
        return control
    if event == "on_step_begin" and shared is not None and phase is not Phase.FAST_FORWARD:
        shared.begin_step()
    state.is_world_process_zero = state.is_local_process_zero = runtime.leader
    control = owed_hooks(self).call(runtime, original, self, event, args, state, control, **kwargs)
    if shared is not None and event in DECIDED:
        shared.decided(event, control)
    return control


@while_active
def _get_eval_dataloader(
    runtime: Runtime, original: Any, self: Any, eval_dataset: Any = None
) -> Any:
    loader, shared = original(self, eval_dataset), shared_by(self)
    if shared is not None:
        shared.evaluates(eval_dataset if isinstance(eval_dataset, str) else "eval", loader)
    return loader


def _adds_to(total: str) -> Callable[[Any], Any]:
    """A replacement for what adds the result of an operation to a total of Trainer's state."""

    @while_active
    def add(runtime: Runtime, original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        mine, shared = getattr(self.state, total), shared_by(self)
        if shared is not None:
            shared.arrived_with = {}
        original(self, *args, **kwargs)
        if shared is not None and shared.arrived_with:
            # It has read its own total, and then arrived in the operation.
            theirs = shared.arrived_with[total]
            setattr(self.state, total, getattr(self.state, total) - mine + theirs)

    return add


@while_active
def _save_model(
    runtime: Runtime, original: Any, self: Any, output_dir: Any = None, _internal_call: bool = False
) -> Any:
    def write() -> Any:
        return original(self, output_dir, _internal_call)

    if not runtime.live:
        return write()
    # Checkpoints are published by whichever process leads, and the best one again.
    return runtime.saves.save(write, hold=not _internal_call)


@while_active
def _save_state_as_main(runtime: Runtime, original: Any, self: Any, json_path: str) -> None:
    """Only the main process writes it. The flags are those of the last event, when it may not have been the main one."""
    self.is_world_process_zero = self.is_local_process_zero = True
    original(self, json_path)


@while_active
def _save_pretrained(runtime: Runtime, original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Scripts call it with `is_main_process=accelerator.is_main_process`, or in the main process alone."""
    given = inspect.signature(original).bind(self, *args, **kwargs)  # PEFT's has it last
    is_main_process = given.arguments.get("is_main_process")

    def write(main: bool) -> Any:
        given.arguments["is_main_process"] = main
        return original(*given.args, **given.kwargs)

    if is_main_process is None or not runtime.live:
        return write(is_main_process is not False)
    runtime.own_writes.told()
    if is_main_process:
        return write(True)
    return runtime.saves.save(lambda: write(False), lambda: write(True))


@while_active
def _hyperparameter_search(runtime: Runtime, original: Any, self: Any, *args: Any, **k: Any) -> Any:
    if runtime.num_processes > 1:
        raise ValueError(SEARCHES)
    return original(self, *args, **k)


@while_active
def _main_process_first(
    runtime: Runtime, original: Any, self: Any, local: bool = True, desc: str = "work"
) -> Any:
    """As Accelerate's. The original waits in torch's barrier, which reaches this process only."""
    state = self.distributed_state
    return state.local_main_process_first() if local else state.main_process_first()


def _with_our_barrier(dist: Any) -> Any:
    return world.TorchProxy(dist, barrier=world.barrier)


def _over_quorum(dist: Any) -> Any:
    return world.TorchProxy(
        dist,
        all_gather=world.all_gather,
        get_world_size=world.get_world_size,
        get_rank=world.get_rank,
    )


SEAMS = seams.table(
    {
        "transformers.trainer": (
            ("Trainer.train", ("self", "resume_from_checkpoint"), _train),
            *(
                (name, ("fsdp_plugin", "accelerator"), replace)
                for name, replace in group_shards.CHECKPOINTS.items()
            ),
            ("Trainer.save_model", ("self", "output_dir", "_internal_call"), _save_model),
            *(
                (f"Trainer.{name}", ("self",), saves)
                for name in ("save_state", "save_metrics", "create_model_card", "push_to_hub")
            ),
            ("Trainer.store_flos", ("self",), _adds_to("total_flos")),
            ("Trainer._save_rng_state", ("self", "output_dir"), unless_catching_up),
            ("Trainer._save_checkpoint", ("self", "trial"), checkpoint),
            ("Trainer._get_output_dir", ("self", "trial")),
            ("Trainer._push_from_checkpoint", ("self", "checkpoint_folder")),
            (
                "Trainer._determine_best_metric",
                ("self", "metrics", "trial"),
                _determine_best_metric,
            ),
            (
                "Trainer.get_eval_dataloader",
                ("self", "eval_dataset"),
                _get_eval_dataloader,
            ),
            ("Trainer.hyperparameter_search", ("self",), _hyperparameter_search),
            ("Trainer.is_world_process_zero", ("self",), is_main),
            ("Trainer.is_local_process_zero", ("self",), is_main),
            ("dist", (), _with_our_barrier),
        ),
        "transformers.training_args": (
            ("TrainingArguments.__post_init__", ("self",), _init_arguments),
            ("TrainingArguments.should_save", (), is_main),
            ("TrainingArguments.should_log", (), is_main_to_log),
            (
                "TrainingArguments.main_process_first",
                ("self", "local", "desc"),
                _main_process_first,
            ),
        ),
        "transformers.trainer_utils": (
            (
                "sort_checkpoints",
                ("output_dir", "use_mtime"),
                None,
                Seam(
                    "transformers.trainer",
                    "Trainer._sorted_checkpoints",
                    ("self", "use_mtime", "output_dir"),
                ),
            ),
        ),
        "transformers.trainer_callback": (
            ("TrainerState.save_to_json", ("self", "json_path"), _save_state_as_main),
            ("CallbackHandler.call_event", ("self", "event"), _call_event),
            ("TrainerState.load_from_json",),
            ("ExportableState.state", ("self",)),
        ),
        "transformers.trainer_pt_utils": (
            ("dist", (), _over_quorum),
            ("distributed_concat", ("tensor",)),
        ),
    }
)


# ---------------------------------------------------------------- entering the loop

NO_FILES = os.devnull
"""The checkpoint from which a process that comes back "resumes": all is healed, nothing is read."""

_passing: weakref.WeakSet[Any] = weakref.WeakSet()
"""Callback handlers of Trainers whose next epoch is over: their callbacks hear nothing."""


def _watch_entry() -> None:
    """Put in place what versions of transformers have that do each of these in a method of its own."""
    for names in (ENTRY_SEAMS, TOKEN_SEAMS):
        if not any(seam.moved() for seam in names):
            seams.put(names, "another transformers")


@while_active
def _run_epoch(runtime: Runtime, original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    given = inspect.signature(original).bind(self, *args, **kwargs).arguments
    if not _can_be_entered(self, given["train_dataloader"]):
        original(**given)
        return
    position, epoch = runtime.position, given["epoch"]
    steps = self.state.global_step
    skipped = 0
    if epoch == given["epochs_trained"] and given["resume_from_checkpoint"] is not None:
        skipped = given["steps_trained_in_current_epoch"]
        steps -= _updates(self, skipped)
    _passing.discard(self.callback_handler)
    try:
        while not _done(self, position, given, steps):
            try:
                # A Trainer that skips batches tells an own batch sampler no epoch: so the peers' knows none where
                # they have resumed within this one.
                with nullcontext() if skipped else _told_the_epoch(given["train_dataloader"]):
                    original(**given)
                return
            except Elsewhere:
                continue
    finally:
        # Callbacks come before the next epoch. What they evaluate on the way to the peers' epoch is no pass of it.
        position.leaves = None if position.entry is None else UNKNOWN


@contextmanager
def _told_the_epoch(loader: Any) -> Iterator[None]:
    """A batch sampler of the script's own hears the epoch also where its loader skips batches: Trainer looks for
    `set_epoch` one wrapper deep, which is `loader`'s shard then, as its peers' did with the sampler itself."""
    shard = index_sampler(loader)
    set_epoch = getattr(getattr(shard, "batch_sampler", None), "set_epoch", None)
    if set_epoch is None:
        yield
        return
    vars(shard)["set_epoch"] = set_epoch
    try:
        yield
    finally:
        del vars(shard)["set_epoch"]


def _done(trainer: Any, position: ScriptPosition, given: dict[str, Any], steps: int) -> bool:
    """Before an epoch: whether the peers are in a later one. If they are in this one, `given` has
    Trainer enter it where they are.

    `steps`: before the epoch, where this process has trained from the beginning.
    """
    epoch, position.leaves = given["epoch"], position.iterations
    entry = position.entry
    if entry is not None and entry.number >= epoch:
        batches = position.enter(entry)
        (steps,) = entry.counts
        trainer.state.global_step = steps + _updates(trainer, batches)
        within = (
            given["resume_from_checkpoint"] is not None and given["steps_trained_in_current_epoch"]
        )
        # The first epoch of which the peers have asked the loader itself, and not one that skips batches.
        whole = given["epochs_trained"] + bool(within)
        if entry.number > whole or (entry.number == whole and batches):
            peers_have_passed(given["train_dataloader"])
        if entry.number > epoch:
            trainer.state.epoch = float(entry.number)  # as callbacks find it where that one begins
            if entry.number > epoch + 1:
                _passing.add(trainer.callback_handler)
            return True
        position.leaves = entry.first_pass
        given["epochs_trained"], given["resume_from_checkpoint"] = epoch, NO_FILES
        given["steps_trained_in_current_epoch"] = batches
    position.begin_epoch(epoch, steps)
    return False


def _updates(trainer: Any, batches: int) -> int:
    return batches // int(trainer.args.gradient_accumulation_steps)


def _can_be_entered(trainer: Any, loader: Any) -> bool:
    from transformers import Trainer

    return (
        not trainer.args.ignore_data_skip
        and type(trainer)._prepare_inputs is Trainer._prepare_inputs
        and skips_by_index(loader)
    )


ENTRY_SEAMS = (
    Seam(
        "transformers.trainer",
        "Trainer._run_epoch",
        (
            "self",
            "epoch",
            "train_dataloader",
            "resume_from_checkpoint",
            "epochs_trained",
            "steps_trained_in_current_epoch",
        ),
        _run_epoch,
    ),
    Seam("transformers.trainer", "Trainer._prepare_inputs", ("self",)),
)

TOKEN_SEAMS = (
    Seam(
        "transformers.trainer",
        "Trainer._track_num_input_tokens",
        ("self", "inputs"),
        _adds_to("num_input_tokens_seen"),
    ),
)

MODELS = {
    module: Seam(
        module,
        f"{model}.save_pretrained",
        ("self", "save_directory", "is_main_process"),
        _save_pretrained,
    )
    for module, model in (
        ("transformers.modeling_utils", "PreTrainedModel"),
        ("peft.peft_model", "PeftModel"),
        ("diffusers.models.modeling_utils", "ModelMixin"),
    )
}
