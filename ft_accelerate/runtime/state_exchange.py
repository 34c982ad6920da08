"""The state that a process has received from its peers, until its script stands where theirs stood; and what it sends."""

from __future__ import annotations

import logging
from typing import Any

from ft_accelerate.runtime import peer_state as states
from ft_accelerate.runtime.checkpoints import SavedPosition
from ft_accelerate.runtime.means import Means
from ft_accelerate.runtime.models import Prepared, freeze, thaw
from ft_accelerate.runtime.past_results import PastResults
from ft_accelerate.runtime.script_position import LATER, ScriptPosition
from lighthouse.errors import TrainingOver

log = logging.getLogger("ft_accelerate")


class StateExchange:
    """What a process takes from its peers, and gives to them.

    A state is received before the script is where it belongs, and put in place more than once: as soon as the script
    has prepared what its peers had prepared (`take`), where their window began (`arrive`), and where they stand
    (`go_live`). The loop's thread, but where said otherwise.
    """

    def __init__(
        self, prepared: Prepared, position: ScriptPosition, means: Means, past: PastResults
    ) -> None:
        self._prepared, self._position = prepared, position
        self._means, self._past = means, past
        self.begun = states.Begun(lambda: prepared.accelerators)
        self.received: dict[str, Any] | None = None
        """The peers' state, until this process is live."""
        self.untaken = False
        """Whether it is still to be put in place."""
        self.copies = False
        """Whether models change between votes, each process's in its own way: sent as copies, not compared."""

    # ------------------------------------------------------------------ what this process sends

    def places(self) -> dict[str, Any]:
        """Where a state may be received. The heal's thread, while the loop waits."""
        return states.places(self._prepared.accelerators)

    def dump(self, at: str) -> dict[str, Any]:
        """The state of this process, whose script is `at` a kind of event."""
        if self._position.target is not None and self.received is not None:
            return self.received  # this script is on its way there, and so are parts of its state
        state = states.dump(self._prepared.accelerators, self._position.describe(at))
        state["gradients"] = self._means.given(within_backward=at == "grad")
        self.begun.add_to(state, drifts=self.copies)
        state["past"] = self._past.dump()
        return states.copied(state) if self.copies else state

    def can_be_kept(self) -> bool:
        """Whether the keeper of states may have the state as it is."""
        return self._position.live and not self._position.pending and not self.copies

    # ------------------------------------------------------------------ what it receives

    def load(self, state: dict[str, Any]) -> None:
        """Take a peer's state, and set out for its place. Called inside `start_quorum`."""
        target = states.target_in(state)
        if self._position.is_in_past_of(target):
            raise TrainingOver(LATER)
        self.received, self.untaken, place = state, True, target.window or (0, 0)
        self._position.relocate(target)
        self.begun.relocated(remembers=self._position.remembers)
        self._means.peers = state["gradients"]
        self._past.take(state["past"])
        self.take()
        log.info("healed; the others are in pass %s over the loaders, batch %s", *place)

    def takes_kept(self, parts: dict[str, Any], saved: SavedPosition) -> bool:
        """Whether a state that was kept is one with which this script goes on."""
        state, prepared = parts["default"], self._prepared
        target = states.target_in(state)
        past = prepared.past(state, told=bool(target.epochs))
        trained = bool(states.moments(prepared.optimizers))
        return saved.goes_on_from(target, past=past, has_trained=trained)

    def take(self) -> None:
        """Put in place what was received, once this script has prepared what its peers had prepared."""
        if self.untaken and not (
            self._position.live or self._prepared.adding or self._position.given_up
        ):
            self.untaken = False
            self._restore()
            if self._position.remembers:
                freeze(self._prepared.registered)

    def begin_try(self) -> None:
        """The script begins a try. Peers that are before the first window of one have drawn more in those before."""
        if self._position.live:
            self.begun.mark(self._prepared.accelerators)
        elif self.received is not None and self._position.at_beginning:
            self.begun.draw_as(self.received)

    def arrive(self) -> None:
        """The script stands where its peers' window began: forget what it did in its past."""
        self._restore()
        self._prepared.forget_past()
        if self.received is not None:
            self.begun.arrive(self._prepared.accelerators, self.received)

    def go_live(self, at: str) -> None:
        """The script stands where its peers stood, `at` a kind of event."""
        self._restore(models=at == "fetch")
        self._means.arrived(within_backward=at == "grad")
        self.received = None

    def _restore(self, *, models: bool = True) -> None:
        thaw(self._prepared.registered)
        if (received := self.received) is not None:
            here = {"arrived": self._position.live, "decisive": not self._position.replays}
            states.restore(self._prepared.accelerators, received, models=models, **here)
