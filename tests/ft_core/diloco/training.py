"""A DiLoCo or LocalSGD run inside one of the worker processes of tests/process."""

from __future__ import annotations

import hashlib
from datetime import timedelta
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ft_core.diloco.diloco import DiLoCo, LocalSGD
from ft_core.diloco.outer_step import squared_norm
from ft_core.manager import Manager
from ft_core.process_group import ProcessGroupGloo
from tests.ft_core.diloco import reference


def train(worker: Any, options: Any) -> None:
    """Train until the worker is told to stop. `options.outer`: "kind" and the class's arguments.

    Phases: "inner" (a window has begun, nothing is on its way), "overlap" (a fragment is), "vote"
    (the collectives are over). A "step" is reported for each outer step, "loaded" for each heal.
    """
    limit = timedelta(seconds=options.timeout_s)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit),
        use_async_quorum=options.use_async_quorum,
        timeout=limit,
        heartbeat_interval=timedelta(seconds=options.heartbeat_s),
        rank=0,
        world_size=1,
        lighthouse_addr=options.lighthouse,
        replica_id=options.name,
        expected_replicas=options.expected_replicas,
        init_sync=True,
    )
    manager.telemetry.add_sink(
        lambda event: worker._report("event", event=event.kind, t=event.wall_s, **event.data)
    )
    worker._report("began", replica_id=manager.replica_id)
    model = reference.network(options.seed)
    inner = reference.inner_optimizer(model)
    arguments = dict(options.outer)
    kind = reporting(LocalSGD if arguments.pop("kind") == "LocalSGD" else DiLoCo, worker)
    if issubclass(kind, DiLoCo):
        loop = kind(manager, model, inner, reference.outer_optimizer(model), **arguments)
    else:
        loop = kind(manager, model, inner, **arguments)
    number = sum(options.name.encode())
    step, shared = 0, worker._shared
    try:
        with loop:
            while True:
                with shared.changed:
                    shared.changed.wait_for(lambda: shared.stopping, timeout=options.pause_s)
                    if shared.stopping:
                        return
                worker._now = manager.current_step()
                if loop._sent is not None:
                    worker._at("overlap")
                elif loop.local_step:
                    worker._at("inner")
                reference.backward(model, number, step)
                inner.step()
                step += 1
    finally:
        manager.shutdown()


def reporting(kind: Any, worker: Any) -> Any:
    """`kind`, with its votes as a phase and its outer steps as reports."""

    class Reporting(kind):  # type: ignore[misc]
        def _vote(self) -> bool:
            worker._now = self._manager.current_step()
            worker._at("vote")
            return bool(super()._vote())

        def _load_healed(self, state: Any) -> None:
            super()._load_healed(state)
            drifts = [d for f in self._fragments for d in self._state.deltas(f)]
            worker._report("loaded", drift=squared_norm(drifts))

        def _complete(self) -> bool:
            committed = bool(super()._complete())
            outcome, position = self._manager.last_outcome(), self._manager.state_dict()
            worker._report(
                "step",
                committed=committed,
                step=position["step"],
                lineage=position["lineage"],
                digest=digest(self.state_dict()),
                reason=outcome.reason if outcome else "",
            )
            return committed

    return Reporting


def digest(state: Any) -> str:
    """Of all tensors of the global state."""
    found = hashlib.blake2b(digest_size=8)
    for leaf in tree_leaves(state):
        if isinstance(leaf, torch.Tensor):
            found.update(leaf.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
