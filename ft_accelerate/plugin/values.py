"""Texts of the environment, of flags and of YAML as values. PURE; each raises a ValueError that is a
sentence with `what` as its subject.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from typing import Any

_TRUE = ("1", "true", "yes", "on", "y", "t")
_FALSE = ("0", "false", "no", "off", "n", "f", "")


def read(kind: type, value: Any, what: str) -> Any:
    """`value` (a text, or what YAML made of it) as a bool, int, float (of seconds) or str."""
    if kind is bool:
        return value if isinstance(value, bool) else truth(str(value), what)
    if kind is int:
        return number(value, what)
    if kind is float:
        try:
            if isinstance(value, bool):
                raise ValueError
            return float(value)
        except (TypeError, ValueError):
            raise ValueError(f"{what} must be a number of seconds, got {value!r}") from None
    return str(value)


def number(value: Any, what: str) -> int:
    """A whole number; 1.5 and True are none."""
    try:
        if isinstance(value, bool | float):
            raise ValueError
        return int(value)
    except (TypeError, ValueError):
        raise ValueError(f"{what} must be a whole number, got {value!r}") from None


def truth(text: str, what: str) -> bool:
    """A truth value in one of the words that Accelerate takes, too."""
    text = text.strip().lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError(f"{what} must be true or false, got {text!r}")


def check_names(names: Iterable[str], prefix: str, known: Collection[str]) -> None:
    """Every environment variable of `names` that begins so is one of `known`."""
    for name in names:
        if name.startswith(prefix) and name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(sorted(known))}"
            raise ValueError(f"environment variable {name} is unknown: {hint}")
