"""Errors of the heal transport, split by who can do something about them.

HealError                   the state could not be brought here; the target stays behind and may try again
    UnsupportedObjectError  the state itself holds something that cannot travel; the user must change it
"""

from __future__ import annotations


class HealError(Exception):
    """A heal failed. The message names every source that was asked, and why it did not help."""


class UnsupportedObjectError(HealError, TypeError):
    """A state dict holds an object that cannot travel; the message names its path and what to do."""
