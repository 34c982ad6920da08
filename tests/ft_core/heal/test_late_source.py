"""A source that is slower than the heal: no member wants the state that it offers any more."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from ft_core.heal.snapshot import Publication
from ft_core.shell.data_plane import DataPlane
from tests.harness.cluster import Replica, lighthouse, replicas
from tests.harness.waiting import PATIENCE_S

NUMEL = 600_000


@pytest.mark.parametrize(("commit", "may_be_read"), [("quorum", False), ("group", True)])
def test_a_state_that_no_target_read_is_kept_only_where_one_may_still_come(
    monkeypatch: pytest.MonkeyPatch, commit: str, may_be_read: bool
) -> None:
    """All members have voted, the healed one too: its training thread used to copy the whole state
    before each optimizer step that follows a heal. Where a group acts on its own vote, the target
    may still be reading, and the source keeps what it lacks."""
    copies: list[set[int]] = []
    kept: list[DataPlane] = []
    copy, keep = Publication.freeze, DataPlane.freeze

    def spy(self: Publication, needed: set[int]) -> None:
        copies.append(needed)
        copy(self, needed)

    def spy_on_plane(self: DataPlane) -> None:
        kept.append(self)
        keep(self)

    monkeypatch.setattr(Publication, "freeze", spy)
    monkeypatch.setattr(DataPlane, "freeze", spy_on_plane)
    with lighthouse() as server:
        group = [
            Replica(server, f"r{i}", value=float(i == 2), expected_replicas=3, commit=commit)
            for i in range(3)
        ]
        big = [torch.full((NUMEL,), float(i == 2)) for i in range(3)]
        healed = threading.Event()
        for index, replica in enumerate(group):
            replica.manager.register_state_dict_fn(
                "big", lambda s, i=index: big[i].copy_(s["t"]), lambda i=index: {"t": big[i]}
            )

        def see(event: Any) -> None:
            if event.kind == "heal_done":
                healed.set()

        group[2].manager.telemetry.add_sink(see)

        def script(index: int) -> None:
            replica = group[index]
            if index == 1:
                save = replica.manager.state.save

                def late() -> Any:
                    """It offers its state when the target has all of it from r0."""
                    if replica.manager.in_quorum():
                        assert healed.wait(PATIENCE_S)
                    return save()

                monkeypatch.setattr(replica.manager.state, "save", late)
            replica.run_to(3)
            replica.close()

        replicas(*(lambda i=i: script(i) for i in range(3)))
    assert torch.equal(big[2], big[0])
    assert bool(kept) == may_be_read
    assert may_be_read or not any(copies)
