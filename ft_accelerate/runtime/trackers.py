"""Experiment trackers under a main process that may change.

Accelerate starts trackers in the main process only. If that one dies, the next main process starts
its own when it logs for the first time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

_waiting: weakref.WeakKeyDictionary[Any, tuple[Any, Any]] = weakref.WeakKeyDictionary()


def initialize(
    original: Callable[..., Any], accelerator: Any, args: Any, kwargs: Any, *, main: bool
) -> None:
    """`init_trackers(*args, **kwargs)`: now, or when this becomes the main process."""
    if main:
        _waiting.pop(accelerator, None)
        original(accelerator, *args, **kwargs)
    else:
        _waiting[accelerator] = (args, kwargs)


def start_waiting(original: Callable[..., Any], accelerator: Any) -> None:
    """This process is the main one and is about to log."""
    if accelerator in _waiting:
        args, kwargs = _waiting.pop(accelerator)
        original(accelerator, *args, **kwargs)
