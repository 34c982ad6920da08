"""What the replica's machine asks its shell to do. Values only. PURE."""

from __future__ import annotations

from dataclasses import dataclass

from lighthouse.wire.messages import Member, Request


@dataclass(frozen=True, slots=True)
class Transmit:
    """Effect: send `message` to the lighthouse (or the group's leader)."""

    message: Request


@dataclass(frozen=True, slots=True)
class Configure:
    """Effect: give the process group these members; then call `configured`."""

    quorum_id: int
    members: tuple[Member, ...]
    replica_rank: int


@dataclass(frozen=True, slots=True)
class Abort:
    """Effect: revoke the process group now: blocked collectives fail, later ones too."""

    quorum_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class FetchState:
    """Effect: bring the state (step, lineage) from `sources`, and no other that may still be on
    its way; then call `fetched` with this very effect."""

    step: int
    lineage: str
    sources: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Remark:
    """Effect: something worth a log line."""

    text: str


Effect = Transmit | Configure | Abort | FetchState | Remark
