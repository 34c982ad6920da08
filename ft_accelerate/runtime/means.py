"""Averaged gradients on which no optimizer has stepped yet, for a process that comes back there.

A script may average gradients and not step at once: it has two backwards for one step (a discriminator's on
real and on generated data), an operation between backward and step, accumulation that synchronizes in each
batch, two optimizers and something between their steps. A process that comes back to such a place needs its
peers' gradients besides their state, and they may not be able to go on without it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ft_accelerate.runtime.models import FaultTolerantModel, Prepared
from ft_accelerate.runtime.script_position import Phase, ScriptPosition


class Means:
    """The gradients that the last gradient step of the script's window has left, on which an optimizer may step
    still: a peer that comes back needs them. Thread: the one that runs backward for `committed` and `refused`, else
    the loop's.

    A backward that follows adds to them, and a state is asked for in the middle of it. So they are copied
    before it.
    """

    def __init__(self, prepared: Prepared, position: ScriptPosition) -> None:
        self._prepared, self._position = prepared, position
        self.peers: dict[str, list[Tensor | None]] = {}
        """Those that have come with the peers' state."""
        self._held: dict[str, list[Tensor | None]] = {}
        self._held_at: tuple[Any, int] | None = None

    @property
    def _at(self) -> tuple[Any, int]:
        return self._position.window, self._position.grads

    @property
    def _added_to(self) -> bool:
        """Whether a backward has begun since."""
        return self._held_at == self._at

    def before_backward(self) -> None:
        """One begins, whether it synchronizes or not."""
        if self._position.grads and not self._added_to:
            self._held, self._held_at = self._copied(), self._at

    def committed(self) -> None:
        """A gradient step is: what is held is of the one before."""
        self._position.graded()
        self._held, self._held_at = {}, None

    def given(self, *, within_backward: bool) -> dict[str, list[Tensor | None]]:
        """Copies of those of each model, by its number; None: a parameter has no gradient. Empty: there are
        none, or they are not known."""
        if self._added_to:
            return self._held
        return {} if within_backward or not self._position.grads else self._copied()

    def refused(self) -> None:
        """Backward has ended, of a step that the peers have done. Behind the last one what follows adds to
        their gradients."""
        position = self._position
        position.replay_grad()
        if position.phase is Phase.REPLAY and not position.grad_is_done:
            self._take()

    def arrived(self, *, within_backward: bool) -> None:
        """This script is where its peers were. Since it took their gradients, the script may have changed them
        as the peers' have (clipped, say), unless a backward of its own adds to them."""
        if not (within_backward or self._added_to):
            self._take()
        self.peers = {}

    def _take(self) -> None:
        for number, values in self.peers.items():
            model = self._prepared.models[int(number)]()
            if isinstance(model, FaultTolerantModel):
                for parameter, value in zip(_trained(model), values, strict=True):
                    if value is None or parameter.grad is None:
                        parameter.grad = None if value is None else value.clone()
                    else:
                        parameter.grad.copy_(value)  # it may share memory with a bucket

    def _copied(self) -> dict[str, list[Tensor | None]]:
        """Empty: there is a model of another kind (FSDP2)."""
        living = {str(n): model for n, ref in enumerate(self._prepared.models) if (model := ref())}
        if not all(isinstance(model, FaultTolerantModel) for model in living.values()):
            return {}
        return {
            number: [None if p.grad is None else p.grad.detach().clone() for p in _trained(model)]
            for number, model in living.items()
        }


def _trained(model: FaultTolerantModel) -> list[Tensor]:
    return [p for p in model.module.parameters() if p.requires_grad]
