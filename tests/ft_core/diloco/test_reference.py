"""The algorithms, bit by bit, against plain loops in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ft_core.diloco.diloco import DiLoCo, LocalSGD
from ft_core.diloco.fragments import split
from ft_core.diloco.schedule import Schedule, ScheduleEvent
from tests.ft_core.diloco.members import Trainer, make_members, run_all
from tests.ft_core.diloco.reference import Reference, network, trace
from tests.harness.cluster import lighthouse

INNER = 240


def expected(
    members: int, sync_every: int, fragments: Any, delay: int, **options: Any
) -> Reference:
    """The reference run of the same schedule."""
    parts = [f.names for f in split(network(), fragments)]
    run = Reference(range(members), parts, **options)
    schedule = Schedule(sync_every, len(parts), delay)
    events = {}
    for inner, event, fragment in trace(schedule, INNER):
        events.setdefault(inner, []).append((event, fragment))
    for inner in range(1, INNER + 1):
        for member in run.members.values():
            run.inner_step(member)
        for event, fragment in events.get(inner, []):
            run.launch(fragment) if event is ScheduleEvent.LAUNCH else run.apply(fragment)
    return run


def same(trainer: Trainer, run: Reference, *, exact: bool) -> None:
    """Global and local parameters are those of the reference."""
    shared = dict(run.model.named_parameters())
    local = dict(run.members[trainer.number].model.named_parameters())
    for name, value in trainer.globals().items():
        if exact:
            assert torch.equal(value, shared[name]), name
            assert torch.equal(trainer.parameters()[name], local[name]), name
        else:
            torch.testing.assert_close(value, shared[name].detach(), rtol=1e-11, atol=1e-13)


CASES = {
    "DiLoCo": (DiLoCo, 4, None, 0, {}),
    "fragments": (DiLoCo, 12, 3, 0, {}),
    "uneven slots": (DiLoCo, 11, 3, 0, {}),
    "delay": (DiLoCo, 10, 2, 3, {}),
    "delay and mixing": (DiLoCo, 10, 2, 4, {"fragment_update_alpha": 0.5}),
    "names": (
        DiLoCo,
        6,
        [
            ["unused", "a.weight"],
            ["a.bias", "b.weight", "b.bias"],
            ["c.bias", "head.weight", "head.bias"],
        ],
        1,
        {},
    ),
    "LocalSGD": (LocalSGD, 5, None, 0, {}),
}


@pytest.mark.parametrize(
    ("case", "members"), [*((case, 2) for case in CASES), ("delay and mixing", 3), ("LocalSGD", 3)]
)
def test_as_the_reference(case: str, members: int) -> None:
    kind, sync_every, fragments, delay, options = CASES[case]
    if kind is DiLoCo:
        options = {**options, "fragments": fragments, "fragment_sync_delay": delay}
    with lighthouse(all_join=True) as server:
        trainers = make_members(
            server, [kind] * members, sync_every=sync_every, bucket_bytes=100, **options
        )
        run_all(trainers, INNER)
    run = expected(
        members,
        sync_every,
        fragments,
        delay,
        alpha=options.get("fragment_update_alpha", 0.0),
        local_sgd=kind is LocalSGD,
    )
    for trainer in trainers:
        assert trainer.loop.stats.discarded == 0
        # Of three, Gloo's order of addition depends on where an element lies.
        same(trainer, run, exact=members == 2)
        assert trainer.loop.stats.committed == trainer.manager.current_step() > 10
    for other in trainers[1:]:
        for name, value in trainers[0].globals().items():
            assert torch.equal(value, other.globals()[name])
