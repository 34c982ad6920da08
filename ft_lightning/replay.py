"""Several optimizer steps in one batch (manual optimization): a batch that is begun again.

Each `optimizer.step()` of a `training_step` is a step of the quorum's: one vote. If the second of
a batch is discarded, the first is committed already. The batch is then computed again from its
beginning, as nothing else is left of it, with the updates that are in the parameters left out: no
vote, no update, and gradients that stay at home. The same lets a replica group join whose peers
are in the midst of a batch.

What the user's code does besides (learning rate schedulers stepped by hand) must not count twice:
schedulers are put back to what they were when the step was begun, as soon as the batch that is
computed again comes to that place.
"""

from __future__ import annotations

from typing import Any

import torch

from ft_lightning import position


class StepDiscarded(BaseException):
    """Unwinds a `training_step` of manual optimization that must be computed again.

    Not an Exception: the user's own handlers are not meant. Never leaves the strategy.
    """


class Replay:
    """The updates of the batches under way (a window). The loop's thread."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.done = 0
        """Updates of the window that are committed."""
        self._left = 0
        self._marked: list[Any] = []
        self._returns = False
        self._muted = False

    def reset(self) -> None:
        """A new window begins."""
        self.done = self._left = 0
        self._returns = False

    @property
    def active(self) -> bool:
        """Whether the window is computed again, and still before its open update."""
        return self._left > 0

    def mark(self) -> None:
        """A step is begun here: remember the schedulers, and the rates that they have set."""
        trainer = self._trainer
        self._marked = [
            [(c.scheduler, c.scheduler.state_dict()) for c in trainer.lr_scheduler_configs],
            [[_rates(group) for group in o.param_groups] for o in trainer.optimizers],
        ]

    def prepare(self) -> None:
        """The window is to be computed again, with `done` updates left out.

        Lightning's counters are those of its beginning, the schedulers' state that of `mark`.
        """
        self._left, self._returns = self.done, True
        self.arrive()

    def arrive(self) -> None:
        """The window has come to a place where a step may begin: is it the marked one?"""
        if self.active or not self._returns:
            return
        self._returns = False
        states, rates = self._marked
        for scheduler, state in states:
            scheduler.load_state_dict(state)
        for optimizer, saved in zip(self._trainer.optimizers, rates, strict=True):
            for group, values in zip(optimizer.param_groups, saved, strict=True):
                group.update(values)

    def uncount(self) -> None:
        """Take the committed updates out of Lightning's counters: they will be counted again."""
        position.uncount_updates(self._trainer, self.done)

    def skip(self) -> None:
        """An update that is committed was left out."""
        self._left -= 1

    def mute(self, wrapper: Any) -> None:
        """Before a backward: gradients of updates that are left out are nobody's business."""
        if self.active:
            self._muted, wrapper.require_backward_grad_sync = True, False
        elif self._muted:
            self._muted, wrapper.require_backward_grad_sync = False, True


def _rates(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters. Tensors (capturable optimizers) are copied."""
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


def untoggle(module: Any) -> None:
    """A `training_step` was left while `toggle_optimizer` was in force: undo that."""
    for parameter, wanted in module._param_requires_grad_state.items():
        parameter.requires_grad = wanted
    module._param_requires_grad_state = {}
