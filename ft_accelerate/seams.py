"""Names of Accelerate and transformers that are replaced: checked, put in place, taken out again.

They have no seam of their own for what we do, scripts and libraries have imported their classes before
us, and Trainer makes its own `Accelerator`: so names are replaced in place. All are checked first.
One that has moved is refused in a sentence, rather than trained with unprotected; a version that is
newer than those that were tested is taken if none has moved.
Standard library only: launchers are here before torch is.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from ft_core.launch.import_hook import newer_than_tested

_missing = object()


@dataclass(frozen=True, slots=True, eq=False)
class Seam:
    """A name that we lean on.

    Attributes:
        module: where it is.
        name: in the module, dotted.
        parameters: that it must take; (): they do not matter.
        replace: called as `replace(original)`; returns what to put there. Of a property it gets, and
            returns, the getter; of a static method the function. None: the name is only checked.
        instead: what another version has in its place, where that is only checked, too.
    """

    module: str
    name: str
    parameters: tuple[str, ...] = ()
    replace: Callable[[Any], Any] | None = None
    instead: Seam | None = None

    def find(self) -> tuple[Any, str, Any]:
        """Its owner (a module or a class), its last name, and what is there."""
        owner: Any = importlib.import_module(self.module)
        *path, name = self.name.split(".")
        for part in path:
            owner = inspect.getattr_static(owner, part)
        return owner, name, inspect.getattr_static(owner, name)

    def moved(self) -> str:
        """Why it is not what we know; "": it is."""
        if self.instead is not None and not self.instead.moved():
            return ""
        full = f"{self.module}.{self.name}"
        try:
            _, _, found = self.find()
        except (ImportError, AttributeError):
            return f"{full} is not there"
        if not self.parameters:
            return ""
        try:
            known = inspect.signature(getattr(found, "__func__", found)).parameters
        except (TypeError, ValueError):
            return f"{full} is not a function"
        lost = [name for name in self.parameters if name not in known]
        return f"{full} takes no {lost[0]!r}" if lost else ""


def table(rows: Mapping[str, Sequence[tuple[Any, ...]]]) -> tuple[Seam, ...]:
    """By module: what follows the module in each `Seam` of it."""
    return tuple(Seam(module, *row) for module, known in rows.items() for row in known)


@dataclass(frozen=True, slots=True)
class _Placed:
    """`after` stands at `owner.name` instead of `before`."""

    owner: Any
    name: str
    before: Any
    after: Any


_placed: dict[Seam, _Placed] = {}


def check(seams: Sequence[Seam], known: str) -> None:
    """Raise RuntimeError, in a sentence, if one of them has moved.

    `known`: the package and the versions that were tested, "accelerate 1.11 to 1.15".
    """
    moved = next(filter(None, (seam.moved() for seam in seams)), "")
    if moved:
        package = known.split()[0]
        raise RuntimeError(
            f"ft_accelerate does not know {package} {sys.modules[package].__version__} ({moved}): "
            f"install one of {known}, or train without fault tolerance"
        )


def newer(known: str) -> str:
    """A sentence, if the package is newer than those that were tested; else ""."""
    package, *_, last = known.split()
    return newer_than_tested(sys.modules[package], last, "ft_accelerate")


def put(seams: Sequence[Seam], known: str) -> None:
    """Replace all of them, or none; idempotent. Raises RuntimeError as `check`."""
    check(seams, known)
    try:
        for seam in seams:
            _put(seam)
    except BaseException:
        take_out(seams)
        raise


def _put(seam: Seam) -> None:
    if seam.replace is None or seam in _placed:
        return
    owner, name, found = seam.find()
    original = found
    if isinstance(found, property | staticmethod):
        original = found.fget if isinstance(found, property) else found.__func__
    if any(original is placed.after for placed in _placed.values()):
        return  # a copy of a name that was replaced before it was copied
    after = seam.replace(original)
    if isinstance(original, FunctionType):
        functools.update_wrapper(after, original)
    _placed[seam] = _Placed(owner, name, vars(owner).get(name, _missing), after)
    if isinstance(found, property):
        setattr(owner, name, property(after, doc=found.__doc__))
    else:
        setattr(owner, name, staticmethod(after) if isinstance(found, staticmethod) else after)


def take_out(seams: Sequence[Seam]) -> None:
    """Put the originals back; idempotent."""
    for seam in reversed(seams):
        placed = _placed.pop(seam, None)
        if placed is None:
            continue
        if placed.before is _missing:
            delattr(placed.owner, placed.name)
        else:
            setattr(placed.owner, placed.name, placed.before)


def around(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """A `Seam.replace` whose function is called as `function(original, *args, **kwargs)`."""

    def replace(original: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        return wrapper

    return replace
