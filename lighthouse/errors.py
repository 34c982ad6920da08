"""Errors of the lighthouse package, split by their cause.

    LighthouseError
    ├── ProtocolError          the other side sent what this version can't read: dropped and counted
    │   └── VersionMismatch    the other side speaks another protocol version: upgrade one of them
    ├── LighthouseUnavailable  no lighthouse answers at the address within the connect timeout
    └── JoinRefused            the lighthouse, or every member that could heal it, refuses this replica
                               group for good; its sentence says why

Wrong options of a user raise `ValueError`.
"""

from __future__ import annotations


class LighthouseError(Exception):
    """Root of all errors that this package raises on purpose."""


class ProtocolError(LighthouseError):
    """Bytes that are not a message of this protocol."""


class VersionMismatch(ProtocolError):
    """A message of another protocol version."""


class LighthouseUnavailable(LighthouseError):
    """No lighthouse answers at the given address."""


class JoinRefused(LighthouseError):
    """This replica group is refused for good."""


class SettingsDiffer(JoinRefused):
    """This replica group has another model, other settings or another number of ranks than its peers, or is denied
    their state for what it has otherwise (a heal token, a sharding, a class)."""


class TooFewLeft(JoinRefused):
    """Others have finished the training, and without them no step can be made: this loop does more than theirs."""


class TrainingOver(JoinRefused):
    """The training has finished while this process was away, or the script's next one has begun: nothing
    is left to do for it."""
