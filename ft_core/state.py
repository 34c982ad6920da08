"""The state that heals: how it is saved, served to peers, and loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from ft_core.moments import PreallocatedState
from ft_core.replica.machine import Replica
from ft_core.replica.status import Attempt, Stage
from ft_core.shell.session import Session

log = logging.getLogger("ft_core")

LARGE_BYTES = 1024 * 1024
"""Tensors from this size on are served to healing peers, and received during a step, without a copy
(`ft_core.heal`)."""
CHANGED_WHILE_SERVED = (
    "a tensor of the state was changed before should_commit while a peer healed from it: change "
    "the state after should_commit only, or return a copy of that tensor from state_dict"
)
CHANGED_WHILE_RECEIVED = (
    "a tensor of the state was changed before should_commit while it was received from a peer: it is "
    "received once more, and from now on into other memory"
)

Versions = list[tuple[Tensor, int]]

Load = Callable[[Any], None]
Save = Callable[[], Any]


class State:
    """A manager's named parts of state, each with its load and save function.

    Thread: the training loop's, but for `room`.
    """

    def __init__(self) -> None:
        self._parts: dict[str, tuple[Load, Save]] = {}
        self._private: set[str] = set()
        self._moments: list[PreallocatedState] = []
        self._served: Versions = []
        self._lends = True
        self._lent: dict[str, Any] | None = None
        self._received: Versions = []

    def register(self, key: str, load: Load, save: Save, *, lends: bool = True) -> None:
        """Add or replace a part. `lends` False: its owner reads it during a step that counts for
        nothing, too, so nothing may be received into it then."""
        self._parts[key] = (load, save)
        self._private = self._private - {key} if lends else self._private | {key}

    def expect(self, *optimizers: Optimizer) -> None:
        """These optimizers' states are in the parts. A process that has none yet gets memory for
        them before it joins (`prepare`)."""
        self._moments += map(PreallocatedState, optimizers)

    def prepare(self) -> None:
        """Do what takes long now: nobody waits for this process yet."""
        for moments in self._moments:
            moments.prepare()

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
        self._served = _versions(tree)

        def mark(machine: Replica, now: float) -> None:
            machine.published = (step, lineage)

        session.control.call(mark)

    def unchanged(self) -> bool:
        """Before a vote: whether what a peer may be reading is still what it was when the step
        began."""
        for moments in self._moments:
            moments.drop()
        served, self._served = self._served, []
        return _unchanged(served)

    def lend(self, replica: Replica) -> None:
        """A step begins whose loop does not wait for its heal, if it needs one: what it computes
        counts for nothing then, so large tensors may be received in place meanwhile. Only the
        optimizer changes those, after the vote; what a forward changes (the statistics of a
        BatchNorm) is small. A loop that does otherwise is noticed, and not trusted again.
        """
        self._lent = None
        if self._lends and (replica.stage is not Stage.MEMBER or replica.healing):
            places = self._places(without=self._private)
            self._lent = tree_map(_if_large, places) if _versions(places) else None

    def load(self, session: Session, otherwise: int) -> int:
        """Put the fetched state in place; returns its `batches_committed`.

        `otherwise`, if the loop has spoilt it in the step: then it is fetched again.
        """
        received, self._received = self._received, []
        if not _unchanged(received):
            log.warning(CHANGED_WHILE_RECEIVED)
            self._lends, self._lent = False, None
            session.control.call(lambda machine, now: machine.fetch_again())
            return otherwise
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

        All of it while the loop waits at its step's boundary; what was lent for a step that goes
        on meanwhile (`in_step`). From here on the own state is torn until the heal has ended.
        """
        whole, lent = False, None

        def spoil(replica: Replica, now: float) -> None:
            nonlocal whole, lent
            self._received = []
            if replica.healed:
                return
            if not in_step:
                whole = replica.loop_waits
            elif replica.attempt in (Attempt.OPEN, Attempt.PINNED):
                lent = self._lent
                self._received = _versions(lent)
            if whole or lent is not None:
                replica.spoil()

        session.control.call(spoil)
        tree = self._places() if whole else lent
        return None if tree is None else {"user": tree, "batches_committed": 0}

    def _places(self, without: Set[str] = frozenset()) -> dict[str, Any]:
        """What there is to receive into, by part."""
        with ExitStack() as stack:
            for moments in self._moments:
                stack.enter_context(moments.shown())
            return {key: save() for key, save in self.parts() if key not in without}


def _if_large(leaf: Any) -> Tensor | None:
    large = isinstance(leaf, Tensor) and leaf.nbytes >= LARGE_BYTES and leaf.is_contiguous()
    return leaf if large else None


def _versions(tree: Any) -> Versions:
    """The large tensors of a tree, with how often each was changed so far."""
    leaves = (_if_large(leaf) for leaf in tree_leaves(tree))
    return [(leaf, leaf._version) for leaf in leaves if leaf is not None]


def _unchanged(versions: Versions) -> bool:
    return all(tensor._version == version for tensor, version in versions)
