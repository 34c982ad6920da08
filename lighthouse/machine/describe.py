"""What a job shows to people: its status as JSON types, and why a replica group does not fit."""

from __future__ import annotations

from lighthouse.machine.ballot import Ballot
from lighthouse.machine.history import History
from lighthouse.machine.members import Members
from lighthouse.wire.messages import JobKey, Join


def status_of(
    key: JobKey, live: Ballot | None, seats: Members, history: History, reason: str
) -> dict[str, object]:
    """One job; `reason`: why it waits, or why its quorum is what it is."""
    head = history.head
    return {
        "job_id": key.job_id,
        "room_id": key.room_id,
        "state": "live" if live else "forming",
        "reason": live.revoked if live and live.revoked else reason,
        "quorum_id": live.quorum_id if live else None,
        "step": head.step if head else 0,
        "lineage": head.lineage if head else "",
        "commits": history.commits,
        "discards": history.discards,
        "members": [
            {
                "replica_id": m.replica_id,
                "name": live.names[m.replica_id],
                "healing": m.healing,
                "gone": live.gone.get(m.replica_id, ""),
                "voted": m.replica_id in live.votes,
            }
            for m in live.members
        ]
        if live
        else [],
        "waiting": [s.name for s in seats if live is None or not live.has(s.replica_id)],
        "highest_step": max((s.position.step for s in seats), default=0),
    }


def mismatch(join: Join, other: Join) -> str:
    """Why `join` can't train with `other`; empty: it can."""
    if other.schema != join.schema:
        return (
            f"{join.name} does not match {other.name}: {join.schema_text or join.schema}"
            f" against {other.schema_text or other.schema}; start all replica groups "
            "with the same model and settings"
        )
    if len(other.addresses) != len(join.addresses):
        return (
            f"{join.name} has {len(join.addresses)} ranks and {other.name} "
            f"{len(other.addresses)}; all replica groups need the same number"
        )
    return ""
