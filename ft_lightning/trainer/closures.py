"""What an optimizer is given to compute its loss with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def once(result: Any) -> Callable[[], Any]:
    """A closure for the optimizer: the loss was computed already, and for one evaluation."""
    calls = 0

    def closure() -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise RuntimeError(
                "this optimizer evaluates the loss several times a step, which a fault-tolerant "
                "step cannot: use an optimizer that evaluates it once"
            )
        return result

    return closure
