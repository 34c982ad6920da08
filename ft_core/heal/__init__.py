"""Heal: bring a rank that is behind to the newest state, from healthy peers.

A source publishes its state on a `HealServer`; `fetch` brings it to a target from all sources at
once, in place; `digest` tells whether two states are equal. `pack` and `unpack` are the format.
"""

from ft_core.heal.digests import digest
from ft_core.heal.format import pack, unpack
from ft_core.heal.protocol import (
    ANY,
    NEXT,
    HealDenied,
    HealError,
    HealKey,
    HealProgress,
    HealStats,
    ServerStats,
    UnsupportedObjectError,
)
from ft_core.heal.source import HealServer
from ft_core.heal.target import fetch
from ft_core.heal.transport import Interrupt

__all__ = [
    "ANY",
    "NEXT",
    "HealDenied",
    "HealError",
    "HealKey",
    "HealProgress",
    "HealServer",
    "HealStats",
    "Interrupt",
    "ServerStats",
    "UnsupportedObjectError",
    "digest",
    "fetch",
    "pack",
    "unpack",
]
