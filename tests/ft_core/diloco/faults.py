"""Faults that a test asks for, in the places where they happen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def failing(kind: Any, when: Callable[[int], bool]) -> Any:
    """`kind`, but the loop reports an error before its n-th vote (0, 1, ...) if `when(n)`."""

    class Failing(kind):  # type: ignore[misc]
        votes = 0

        def _vote(self) -> bool:
            n, self.votes = self.votes, self.votes + 1
            if when(n):
                self._manager.report_error(ValueError("injected"))
            return bool(super()._vote())

    Failing.__name__ = kind.__name__
    return Failing
