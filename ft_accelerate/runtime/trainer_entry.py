"""transformers' Trainer: a process that comes back enters the loop where its peers are.

Trainer can begin in the middle: when it resumes from a checkpoint it starts with the epoch of the
checkpoint, and its sampler skips the batches that were read. A process that comes back does the same.
It joins and heals with the first batch that it asks for. That ends the loop over the epoch
(`Elsewhere`), epochs that are over are passed over, and in the peers' epoch Trainer is told that so
many batches were trained. What this costs does not grow with the training, but for the indices that
the sampler skips within one epoch.

Callbacks see what they see in a Trainer that resumes: `on_train_begin`, then the peers' epoch.

Some loops can't be entered so, and are run through fast-forward: data that is not read by index, a
loader with a state of its own (torchdata), `ignore_data_skip`, and trainers that prepare their inputs
themselves, as those of reinforcement learning do, which count steps on their own.
"""

from __future__ import annotations

import inspect
import os
import weakref
from typing import Any

from ft_accelerate import seams
from ft_accelerate.runtime.divided_data import skips_by_index
from ft_accelerate.runtime.process import while_active
from ft_accelerate.runtime.runtime import Runtime
from ft_accelerate.runtime.script_position import Elsewhere, ScriptPosition
from ft_accelerate.seams import Seam

NO_FILES = os.devnull
"""The checkpoint from which a process that comes back "resumes": all is healed, nothing is read."""

_passing: weakref.WeakSet[Any] = weakref.WeakSet()
"""Callback handlers of Trainers whose next epoch is over."""


def watch() -> None:
    """Put `SEAMS` in place, where this version of transformers runs an epoch in a method of its own."""
    if not any(seam.moved() for seam in SEAMS):
        seams.put(SEAMS, "another transformers")


def passes_over(handler: Any) -> bool:
    """Whether this `CallbackHandler`'s Trainer passes over an epoch, and its callbacks hear nothing."""
    return handler in _passing


@while_active
def _run_epoch(runtime: Runtime, original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    given = inspect.signature(original).bind(self, *args, **kwargs).arguments
    if not _can_be_entered(self, given["train_dataloader"]):
        original(**given)
        return
    position, epoch = runtime.position, given["epoch"]
    steps = self.state.global_step
    if epoch == given["epochs_trained"] and given["resume_from_checkpoint"] is not None:
        steps -= _updates(self, given["steps_trained_in_current_epoch"])
    _passing.discard(self.callback_handler)
    try:
        while not _done(self, position, given, steps):
            try:
                original(**given)
                return
            except Elsewhere:
                continue
    finally:
        position.leaves = None


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
        if entry.number > epoch:
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


SEAMS = (
    Seam(
        "transformers.trainer", "Trainer._run_epoch",
        (
            "self", "epoch", "train_dataloader", "resume_from_checkpoint", "epochs_trained",
            "steps_trained_in_current_epoch",
        ),
        _run_epoch,
    ),
    Seam("transformers.trainer", "Trainer._prepare_inputs", ("self",)),
)  # fmt: skip
