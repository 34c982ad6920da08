"""The state that heals: how it is saved, served to peers, and loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from ft_core.replica import Replica
from ft_core.session import Session

SERVED_LIVE_BYTES = 1024 * 1024
"""Tensors from this size on are served to healing peers without a copy (`ft_core.heal`)."""

Load = Callable[[Any], None]
Save = Callable[[], Any]


class State:
    """A manager's named parts of state, each with its load and save function.

    Thread: the training loop's, but for `room`.
    """

    def __init__(self) -> None:
        self._parts: dict[str, tuple[Load, Save]] = {}
        self._served: list[tuple[Tensor, int]] = []

    def register(self, key: str, load: Load, save: Save) -> None:
        """Add or replace a part."""
        self._parts[key] = (load, save)

    def parts(self) -> Iterator[tuple[str, Save]]:
        """Each part's key and save function."""
        for key, (_, save) in self._parts.items():
            yield key, save

    def save(self) -> dict[str, Any]:
        """All parts by key: what their functions give, not copied."""
        return {key: save() for key, save in self.parts()}

    def publish(self, session: Session, batches_committed: int) -> None:
        """Serve the state at the replica's position; large tensors as they are (`unchanged`)."""
        replica = session.replica
        step, lineage = replica.step, replica.lineage
        tree = {"user": self.save(), "batches_committed": batches_committed}
        session.plane.publish(step, lineage, tree, len(replica.targets))
        self._served = [
            (leaf, leaf._version) for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)
            and leaf.nbytes >= SERVED_LIVE_BYTES
        ]  # fmt: skip

        def mark(machine: Replica, now: float) -> None:
            machine.published = (step, lineage)

        session.control.call(mark)

    def unchanged(self) -> bool:
        """Whether what a peer may be reading is still what it was when the step began."""
        served, self._served = self._served, []
        return all(tensor._version == version for tensor, version in served)

    def load(self, session: Session) -> int:
        """Put the fetched state in place; returns its `batches_committed`."""
        view = session.replica.view
        assert view is not None
        tree = session.plane.take_state(view.step, view.lineage)
        for key, (load, _) in self._parts.items():
            if key in tree["user"]:
                load(tree["user"][key])
        session.control.call(lambda machine, now: machine.load())
        batches_committed: int = tree["batches_committed"]
        return batches_committed

    def room(self, session: Session, *, in_step: bool) -> Any:
        """Heal thread: where a fetched state may be received in place; None: elsewhere.

        In place only while the loop waits at its step's boundary: else (`in_step`) it may be using
        it. From here on the own state is torn until the heal has ended.
        """
        in_place = False

        def spoil(replica: Replica, now: float) -> None:
            nonlocal in_place
            in_place = replica.loop_waits and not in_step
            if in_place:
                replica.spoil()

        session.control.call(spoil)
        return {"user": self.save(), "batches_committed": 0} if in_place else None
