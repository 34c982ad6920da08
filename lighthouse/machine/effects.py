"""What the lighthouse's machines ask their shell to do."""

from __future__ import annotations

from dataclasses import dataclass

from lighthouse.wire.messages import JobKey, Reply

Peer = bytes
"""Identity of a connection."""


@dataclass(frozen=True, slots=True)
class Send:
    """Effect: deliver `message` to each of `peers`."""

    peers: tuple[Peer, ...]
    message: Reply


@dataclass(frozen=True, slots=True)
class Note:
    """Effect: a line for the log; `quorum` True: the one line that a quorum change gets."""

    job: JobKey
    text: str
    quorum: bool = False


@dataclass(frozen=True, slots=True)
class Remember:
    """Effect: keep this over a restart of the lighthouse (optional; see docs/protocol.md)."""

    job: JobKey
    quorum_id: int
    members: tuple[str, ...]


Effect = Send | Note | Remember
