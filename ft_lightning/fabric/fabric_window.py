"""The batches of one update, and what of them counts when this group joins in their midst. PURE.

A *window* is the batch (or the accumulated batches) of a Fabric loop's update. Every backward pass
that synchronizes is a step of the quorum: it has a vote of its own, and is tried again from kept
gradients until it is committed (`ft_core.collectives.retry`). A batch may hold several, as a GAN's
does. The loop is the user's and can't be rewound; so a replica group whose peers are in the midst of
a window starts with the window's first batch, and leaves out what its peers have done already.

| | gradients | `optimizer.step()` | collectives |
|---|---|---|---|
| before the place where the peers are | stay local | does nothing | what the peers got |
| from there on | averaged, committed | updates | over the participants |
| void, until the loader fetches a batch | zeros | does nothing | this process's value |

A window is void where this group has healed inside it: what the loop holds belongs to another place.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


class Where(Enum):
    """Where in the loop a quorum is asked for."""

    BOUNDARY = "before a batch"
    BATCH = "in a batch"
    ROUND = "in an agreement"


@dataclass(frozen=True, slots=True)
class WindowPlace:
    """How far the members are in their window; heals with the state.

    Attributes:
        committed: backward passes that were committed.
        passes: calls of `fabric.backward`.
        agreements: collectives since the last commit, or since the window's first batch.
    """

    committed: int = 0
    passes: int = 0
    agreements: int = 0


class Window:
    """The window under way. Thread: the loop's, or autograd's while the loop waits in backward.

    Attributes:
        open: it was begun, and no backward pass has been committed since.
        void: the rest of this pass of the loop counts for nothing.
        arrived: this pass is where the peers are.
        fresh: there are committed gradients for an optimizer.
        place: how far this group is, or (before it has arrived) its peers are.
        results: of the agreements since the window's first batch, in their order; heal with the
            state. A group that joins in the midst of a window answers its own calls with them.
    """

    def __init__(self) -> None:
        self.open = self.void = self.fresh = self._uncounted = False
        self.arrived = True
        self.place = WindowPlace()
        self.results: list[Any] = []
        self._left_out = self._passes = self._answered = 0

    @property
    def muted(self) -> bool:
        """Gradients stay local: they are committed already, or void."""
        return self.void or self._left_out > 0

    @property
    def local(self) -> bool:
        """Collectives stay local: the peers are past them, or will not come to them."""
        return self.void or not self.arrived

    def start_over(self) -> None:
        """The next pass is a new window's."""
        self.place = WindowPlace()
        self.results = []

    def begin(self) -> None:
        """A pass begins with the window's first batch; what `place` says is left out."""
        self._left_out, self._passes, self._answered = self.place.committed, 0, 0
        self.open, self.void, self.fresh = True, False, False
        self.arrived = self.place == WindowPlace()

    def agreed(self) -> None:
        """A collective was called."""
        if self.arrived:
            place = self.place
            self.place = WindowPlace(place.committed, place.passes, place.agreements + 1)

    def answer(self) -> Any:
        """What the peers got from the call at hand, before this group has come to their place."""
        if self.arrived or self.void or self._answered == len(self.results):
            return None
        self._answered += 1
        return self.results[self._answered - 1]

    def before_backward(self) -> None:
        """`fabric.backward` is called."""
        if not self.muted and self._passes >= self.place.passes:
            self.arrived = True
        self._passes += 1

    def gradients(self) -> bool:
        """The first gradients of a backward pass: whether they are to be averaged."""
        if self.muted:
            return False
        self.arrived = True
        return True

    def after_backward(self) -> None:
        """`fabric.backward` returns."""
        if self.arrived:
            place = self.place
            self.place = WindowPlace(place.committed, self._passes, place.agreements)

    def committed(self) -> None:
        """A backward pass is committed."""
        self.place = WindowPlace(self.place.committed + 1, self._passes, 0)
        self.open, self.fresh, self._uncounted = False, True, True

    def refused(self) -> None:
        """The gradients of a backward pass have stayed local."""
        self._left_out = max(0, self._left_out - 1)

    def count_update(self) -> bool:
        """An optimizer steps: whether it is the first one since the last commit."""
        first, self._uncounted = self._uncounted, False
        return first

    def break_off(self) -> None:
        """The rest of this pass is void."""
        self.void = True
