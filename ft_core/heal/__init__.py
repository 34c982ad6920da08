"""Heal: bring a rank that is behind up to the newest state, from healthy peers.

HealServer publishes a state on a source; fetch brings it to a target from all sources at once, in
place; digest tells whether two states are equal. pack and unpack are the format underneath.
"""

from ft_core.heal.digest import digest
from ft_core.heal.errors import HealError, UnsupportedObjectError
from ft_core.heal.format import allow_enum
from ft_core.heal.interrupt import Interrupt
from ft_core.heal.pack import pack, unpack
from ft_core.heal.source import HealServer
from ft_core.heal.target import fetch
from ft_core.heal.types import HealKey, HealProgress, HealStats, ServerStats

__all__ = [
    "HealError",
    "HealKey",
    "HealProgress",
    "HealServer",
    "HealStats",
    "Interrupt",
    "ServerStats",
    "UnsupportedObjectError",
    "allow_enum",
    "digest",
    "fetch",
    "pack",
    "unpack",
]
