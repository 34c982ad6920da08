"""Averaged gradients on which no optimizer has stepped yet, for a replica group that comes back there.

A loop may average gradients and not step at once: it has two backwards for one step (a discriminator's on real
and on generated data), accumulation that synchronizes in each batch, two optimizers, or one that steps seldom.
A group that comes back to such a place leaves out the backwards that its peers have committed, so it needs what
they have averaged. As `ft_accelerate.runtime.means` for scripts that run through their past.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any, Protocol
from weakref import WeakSet

from torch import Tensor

from ft_core.collectives.retry import copies_of_gradients, put_gradients

Gradients = list[list[Tensor | None]]
"""Of each model that is trained."""


class TrainedParameters(Protocol):
    """`RetryableDistributedDataParallel`, or `RetryableShards`."""

    def parameters(self) -> Iterable[Tensor]:
        """All of them, in the model's order."""


class AveragedGradients:
    """The gradients on which an optimizer may step still, as the last commit has left them, and the loop since.
    Thread: the loop's, or autograd's while the loop waits in backward.

    A backward that follows adds to them, and a state is asked for in the middle of it. So they are copied
    before it. In an ordinary loop there are none then.

    Args:
        models, optimizers: those of the strategy, which come later.
    """

    def __init__(self, models: list[TrainedParameters], optimizers: list[Any]) -> None:
        self._models, self._optimizers = models, optimizers
        self._held: Gradients | None = None
        """As they were before the first backward since the last commit; None: none has begun."""
        self._theirs: Gradients | None = None
        """What is to be in the place of this group's own; None: nothing is."""
        self._in_backward = False
        """Whether that is to be there before the next backward that counts, not before its batch."""
        self._stepped: WeakSet[Any] = WeakSet()
        """Optimizers that have stepped since the last commit."""

    def before_backward(self, committed: int) -> None:
        """One begins that adds to averaged gradients, whether it synchronizes or not. `committed`: backwards of
        this window."""
        if self._theirs is not None:
            self._put()
        if self._held is None or self._dropped:  # after one that has raised, say
            self._held = self._copied(committed)

    def committed(self) -> None:
        """A backward is."""
        self._held = self._theirs = None
        self._stepped.clear()

    def stepped(self, optimizer: Any) -> None:
        """This one of the script's has."""
        self._stepped.add(optimizer)

    def given(self, committed: int, *, in_backward: bool) -> dict[str, Any]:
        """For a group that heals. `in_backward`: the loop is in one. Of one that `before_backward` was not told
        of (`loss.backward()`) the gradients before it are not known."""
        known = True
        if self._theirs is not None:
            values, in_backward = self._theirs, self._in_backward
        elif self._held is not None:
            values = self._held
        elif in_backward:
            values, known = [], not committed or len(self._stepped) > 0
        else:
            values = self._copied(committed)
        return {"values": values, "in_backward": in_backward, "known": known}

    def healed(self, given: dict[str, Any]) -> None:
        """Take what a peer has given."""
        self._held, self._stepped = None, WeakSet()
        self._theirs, self._in_backward = given["values"], given["in_backward"]

    def break_off(self) -> None:
        """The loop begins its window once more, and leaves out what is committed of it."""
        if self._theirs is None:
            self._theirs, self._in_backward = self._held, True
        self._held = None

    def start_over(self) -> None:
        """The next window is another one than that of the gradients which are to be taken."""
        self._theirs = None

    def begin(self) -> None:
        """A window begins: its first batch is fetched next."""
        if self._theirs is not None and not self._in_backward:
            self._put()

    @property
    def wanted(self) -> bool:
        """Whether a backward would add to other gradients than the peers'."""
        return any(value is not None for value in chain(*(self._theirs or ())))

    @property
    def _dropped(self) -> bool:
        return all(p.grad is None for model in self._models for p in model.parameters())

    def _put(self) -> None:
        theirs, self._theirs = self._theirs, None
        # Nothing: the peers had none, or left over ones.
        every = theirs or [[None for _ in model.parameters()] for model in self._models]
        for model, values in zip(self._models, every, strict=True):
            put_gradients(model.parameters(), values)

    def _copied(self, committed: int) -> Gradients:
        """Empty: there are none."""
        # Where a window begins, what an optimizer has stepped on is left over: in most loops, all of it.
        done = () if committed else [each for each in self._optimizers if each in self._stepped]
        over = {id(p) for each in done for group in each.param_groups for p in group["params"]}
        found = [copies_of_gradients(model.parameters(), but=over) for model in self._models]
        return found if any(value is not None for value in chain(*found)) else []
