"""Averaged gradients on which no optimizer has stepped yet, for a process that comes back there.

A script may average gradients and not step at once: it has two backwards for one step (a discriminator's on
real and on generated data), an operation between backward and step, accumulation that synchronizes in each
batch, two optimizers and something between their steps, or an optimizer that steps seldom. A process that comes
back to such a place needs its peers' gradients besides their state, and they may not be able to go on without it.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from torch import Tensor

from ft_accelerate.runtime.models import Prepared
from ft_accelerate.runtime.script_position import ScriptPosition
from ft_core.collectives.retry import copies_of_gradients, put_gradients


class Means:
    """The gradients on which an optimizer may step still, as the last gradient step has left them, and the script
    since: a peer that comes back needs them. Thread: the one that runs backward for `committed`, else the loop's.

    A backward that follows adds to them, and a state is asked for in the middle of it. So they are copied
    before it. In an ordinary loop there are none then.
    """

    def __init__(self, prepared: Prepared, position: ScriptPosition) -> None:
        self._prepared, self._position = prepared, position
        self.peers: dict[str, list[Tensor | None]] = {}
        """Those that have come with the peers' state."""
        self._held: dict[str, list[Tensor | None]] = {}
        self._held_at: tuple[Any, int] | None = None
        """None: the script has begun no backward by `accelerator.backward`."""
        self._stepped: WeakSet[Any] = WeakSet()
        """Optimizers that have stepped since the last gradient step."""

    @property
    def _at(self) -> tuple[Any, int]:
        return self._position.window, self._position.grads

    @property
    def _added_to(self) -> bool:
        """Whether a backward has begun since."""
        return self._held_at == self._at

    def before_backward(self) -> None:
        """One begins, whether it synchronizes or not. In a script that has done here what its peers have done, it adds
        to their gradients: what the script has changed in its own (clipped, say) they have changed, too."""
        if self._added_to:
            return
        if self.peers and not self._position.grad_is_done:
            self._take()
        self._held, self._held_at = self._copied(), self._at

    def before_window(self) -> None:
        """A batch is asked for, and no optimizer has stepped. If a script drops gradients (they are not finite, or its
        forward or backward has raised, in all processes), there is nothing left that a peer would have to take or to
        compute again: a window begins, as after a step. But not in the middle of an accumulation, of which each
        process counts the batches; nor between two batches of which a script computes one loss."""
        position = self._position
        if (position.pending or self._added_to or position.left_out) and self._dropped:
            position.step_taken()

    def zeroed(self) -> None:
        """The script has called `zero_grad` of an optimizer or a model. One that does so behind a forward, and asks for the next
        batch then, has caught what its loss has raised."""
        self._position.left_out |= self._position.computed

    @property
    def _dropped(self) -> bool:
        """Whether the script has taken them from all optimizers, between two accumulations."""
        accelerators, optimizers = self._prepared.accelerators.values(), self._prepared.optimizers
        if not optimizers or not all(each.sync_gradients for each in accelerators):
            return False
        groups = (group for each in optimizers for group in each.param_groups)
        return all(p.grad is None for group in groups for p in group["params"])

    def committed(self) -> None:
        """A gradient step is: what is held is of the one before."""
        self._position.graded()
        self._held, self.peers = {}, {}
        self._stepped.clear()

    def stepped(self, optimizer: Any) -> None:
        """This one of torch's has."""
        self._stepped.add(optimizer)

    def given(self, *, within_backward: bool) -> dict[str, list[Tensor | None]]:
        """Copies of those of each model, by its number; None: a parameter has no gradient. Empty: there are
        none, or they are not known."""
        if self._added_to:
            return self._held
        known = self._position.grads or self._held_at is not None
        return self._copied() if known and not within_backward else {}

    def arrived(self, *, within_backward: bool) -> None:
        """This script has done what its peers had done; `within_backward`: they were in the next one, before which it
        takes their gradients."""
        self._prepared.arrived()
        self._stepped.clear()
        if not self.peers:  # all that theirs may have are left over
            self._stepped.update(self._prepared.optimizers)
        if self._added_to:
            self.peers = {}
        elif not within_backward:
            self._take()

    def _take(self) -> None:
        for number, values in self.peers.items():
            if (model := self._prepared.models[int(number)]()) is None:
                continue
            put_gradients(model.trained(), values)
        self.peers = {}

    def _copied(self) -> dict[str, list[Tensor | None]]:
        """Empty: there are none."""
        # Where a window begins, what an optimizer has stepped on is left over: in most loops, all of it.
        done = () if self._position.grads else self._stepped
        if done and all(optimizer in done for optimizer in self._prepared.optimizers):
            return {}
        living = {str(n): model for n, ref in enumerate(self._prepared.models) if (model := ref())}
        over = {id(p) for each in done for group in each.param_groups for p in group["params"]}
        found = {n: copies_of_gradients(model.trained(), but=over) for n, model in living.items()}
        # After a gradient step, none is what a script has that dropped them: its peer is to drop its own.
        there = any(p is not None for each in found.values() for p in each)
        return found if there or (self._position.grads and self._dropped) else {}
