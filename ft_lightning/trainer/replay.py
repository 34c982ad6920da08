"""Several optimizer steps in one batch (manual optimization): a batch that is begun again.

Each `optimizer.step()` of a `training_step` is a step of the quorum's: one vote. If the second of
a batch is discarded, the first is committed already. The batch is then computed again from its
beginning, as nothing else is left of it, with the updates that are in the parameters left out: no
vote, no update, and gradients that stay at home. The same lets a replica group join whose peers
are in the midst of a batch.

What the user's code does besides (learning rate schedulers stepped by hand) must not count twice:
schedulers are put back to what they were when the step was begun, as soon as the batch that is
computed again comes to that place.

Gradients may be older than their step: one backward for the updates of two optimizers, or sums over
batches of which some had an update. Nobody can average them once more, since peers that go on with
their attempt would not take part. So those that are there when a step computes its first ones (or
votes without any) are kept until it is committed, put back at that place if it is not, and a part
of the state that a peer heals from.
"""

from __future__ import annotations

from typing import Any

import torch

from ft_lightning.trainer import loop_counters as position

Gradients = list[torch.Tensor | None]
"""One for each parameter of the module, in its order."""


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
        self._carried: Gradients | None = None
        self._carries = False  # this attempt has come to where they are noted, or put back
        self._lent = False  # they are the parameters' own, not copies
        self._arriving: Gradients | None = None  # a peer's, where this group has healed to

    def reset(self) -> None:
        """A new window begins."""
        self.done = self._left = 0
        self._returns = False
        self.settle()

    @property
    def active(self) -> bool:
        """Whether the window is computed again, and still before its open update."""
        return self._left > 0

    def mark(self) -> None:
        """A step is begun here: remember the schedulers, and the rates that they have set.

        And buffers, if updates may be left out: what is computed before them changes those again.
        """
        trainer = self._trainer
        self._marked = [
            [(c.scheduler, c.scheduler.state_dict()) for c in trainer.lr_scheduler_configs],
            [[_rates(group) for group in o.param_groups] for o in trainer.optimizers],
            [b.detach().clone() for b in self._buffers()],
        ]

    def prepare(self) -> bool:
        """The window is to be computed again, with `done` updates left out; are there any?

        Lightning's counters are those of its beginning, the schedulers' state that of `mark`.
        """
        self._left, self._returns = self.done, True
        self.arrive()
        return self.done > 0

    def arrive(self) -> None:
        """The window has come to a place where a step may begin: is it the marked one?"""
        if self.active or not self._returns:
            return
        self._returns = False
        if self._arriving is not None:
            self._put(self._arriving)
        states, rates, values = self._marked
        for buffer, value in zip(self._buffers() if values else (), values, strict=True):
            buffer.data.copy_(value)  # `data`: see `ft_core.buffers`
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

    # ------------------------------------------------------------------ gradients

    def carry(self, *, writes: bool) -> None:
        """The step's first gradients come now (`writes`), or its vote, if it has none."""
        if self.active or self._carries:
            return
        self._carries = True
        if self._carried is not None:
            self._put(self._carried)
            return
        grads = [p.grad for p in self._parameters()]
        self._carried = _copies(grads) if writes else grads
        self._lent = not writes

    def keep(self) -> None:
        """The attempt is discarded, and its gradients are about to go."""
        if self._lent and self._carried is not None:
            self._carried, self._lent = _copies(self._carried), False
        self._carries = False

    def settle(self) -> None:
        """The step is committed."""
        self._carried = self._arriving = None
        self._carries = self._lent = False

    def gradients(self, *, again: bool) -> dict[str, Any]:
        """For a peer that heals: those that belong to the step that begins (`again`: anew)."""
        values = self._carried if again else [p.grad for p in self._parameters()]
        return {"values": None if values is None else _copies(values), "carried": again}

    def arrive_with(self, done: int, gradients: dict[str, Any] | None) -> None:
        """Healed to a place in a window after `done` updates; `gradients` of a peer there."""
        self.settle()
        self.done = done
        values = None if gradients is None else gradients["values"]
        if gradients is not None and gradients["carried"]:
            self._carried = values
        else:
            self._arriving = values

    def _buffers(self) -> list[torch.Tensor]:
        return list(self._trainer.lightning_module.buffers()) if self.done else []

    def _parameters(self) -> list[torch.nn.Parameter]:
        return list(self._trainer.lightning_module.parameters())

    def _put(self, values: Gradients) -> None:
        for parameter, value in zip(self._parameters(), values, strict=True):
            parameter.grad = None if value is None else value.to(parameter.device, copy=True)


def _copies(gradients: Gradients) -> Gradients:
    return [None if g is None else g.detach().clone() for g in gradients]


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
