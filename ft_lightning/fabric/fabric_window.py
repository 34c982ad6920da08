"""Several optimizer steps for one batch of a Fabric loop: what counts when the batch comes again.

Each `optimizer.step()` with gradients of its own is a step of the quorum's: one vote. Its batch, or
the batches that are accumulated, are its *window*. The loop is the user's, so when the second
update of a window is discarded, the rest of this pass of the loop is void: nothing that it computes
reaches peers, no optimizer steps. Then the loader gives the window's batches again, and the updates
that are committed are left out. A replica group whose peers are in the midst of a window joins in
the same way.

| | gradients | `optimizer.step()` | `all_reduce` |
|---|---|---|---|
| a window's open update | reduced | votes | over the step |
| between two updates | | | a round of its own |
| left out, as it is committed | stay at home | does nothing | this process's value |
| void, until the loader is asked for a batch | zeros | does nothing | this process's value |
"""

from __future__ import annotations

from enum import Enum


class Where(Enum):
    """Where in the loop a quorum is asked for."""

    BOUNDARY = "before a batch"
    BATCH = "in a batch"
    ROUND = "between steps"


class Window:
    """Of the batches under way. The loop's thread.

    Attributes:
        done: updates of the window that are committed.
        void: the rest of this pass counts for nothing.
        arrived: this pass is past all that peers have done already.
        settled: what becomes of the gradients at hand is known: `fate`. Another optimizer that
            steps on them needs no vote.
        fate: they are applied.
    """

    def __init__(self) -> None:
        self.done = self._left = 0
        self.void = self.settled = self.fate = False
        self.arrived = True

    @property
    def muted(self) -> bool:
        """Gradients stay at home: of updates that are committed, or void."""
        return self.void or self._left > 0

    @property
    def local(self) -> bool:
        """Collectives stay at home: peers are past them, or will not come to them."""
        return self.void or not self.arrived

    def begin(self) -> None:
        """A pass begins, with the window's first batch; `done` updates are left out."""
        self._left = self.done
        self.void = self.settled = self.fate = False
        self.arrived = self.done == 0

    def gradients(self) -> None:
        """A backward begins."""
        self.settled = False
        if not self.muted:
            self.arrived = True

    def committed(self) -> None:
        """The open update is committed."""
        self.done += 1
        self._settle(True)

    def discarded(self, *, comes_again: bool) -> None:
        """The open update is discarded; `comes_again`: the loader will give out its batches."""
        self.void = comes_again
        self._settle(False)

    def skip(self) -> None:
        """An update that is committed was left out."""
        assert self._left > 0
        self._left -= 1
        self._settle(False)

    def break_off(self) -> None:
        """The rest of this pass is void."""
        self.void = True

    def _settle(self, fate: bool) -> None:
        self.settled, self.fate = True, fate
