"""Objects of users' classes that travel without pickle: what they consist of, and how they are made.

A dataclass, a namedtuple, a Namespace and a member of an enum are their class's name and their
values. The target finds the class under the same name in the same module, which it imports if it
must, and makes the object without calling anything that the class defines: no `__init__`, no
`__reduce__`, no `__setstate__`. A class for which that would not give an equal object (it defines
how it is copied, or is also a dict) does not travel this way.
"""

from __future__ import annotations

import argparse
import copyreg
import dataclasses
import enum
import importlib
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ft_core.config import JobOptions
from ft_core.heal.protocol import HealDenied, UnsupportedObjectError

DATACLASS, NAMED_TUPLE, NAMESPACE, ENUM, FLAG = "dc", "nt", "nm", "e", "ef"
_NAMESPACES = (argparse.Namespace, types.SimpleNamespace)
_COPIED_BY_ITSELF = ("__reduce__", "__reduce_ex__", "__getnewargs__", "__getnewargs_ex__")


@contextmanager
def naming_option(options: JobOptions) -> Iterator[None]:
    """An UnsupportedObjectError that leaves this names the option as the user writes it."""
    try:
        yield
    except UnsupportedObjectError as error:
        raise UnsupportedObjectError(options.as_written(str(error))) from error.__cause__


def kind_of(value: Any) -> str:
    """As what `value` travels: one of the tags above, or "" where it does not."""
    return _kind(type(value)) if _is_findable(type(value)) else ""


def named(cls: type) -> list[str]:
    """Module and qualified name of a class."""
    return [cls.__module__, cls.__qualname__]


def values_of(value: Any) -> dict[str, Any]:
    """The attributes of a dataclass or Namespace; those of a dataclass with slots, too."""
    found = dict(getattr(value, "__dict__", ()))
    if dataclasses.is_dataclass(value):
        for each in dataclasses.fields(value):
            if each.name not in found and hasattr(value, each.name):
                found[each.name] = getattr(value, each.name)
    return found


def inside(value: Any) -> list[Any]:
    """What an object that travels by its values consists of; empty for all else."""
    return list(values_of(value).values()) if kind_of(value) in (DATACLASS, NAMESPACE) else []


def find(tag: str, module: str, qualname: str) -> Any:
    """The class of this name, which must travel as `tag`. Raises HealDenied."""
    cls: Any = None
    try:
        cls = sys.modules.get(module) or importlib.import_module(module)
        for part in qualname.split("."):
            cls = getattr(cls, part)
    except (ImportError, AttributeError) as error:
        raise HealDenied(
            f"The state holds a {module}.{qualname}, which this process does not have ({error}): "
            "define it in the same module on every member."
        ) from error
    kind = _kind(cls) if isinstance(cls, type) else ""
    if kind != tag and not (kind == ENUM and tag == FLAG and issubclass(cls, enum.Flag)):
        raise HealDenied(f"The state holds a {module}.{qualname}, which is another class here.")
    return cls


def make(cls: Any, values: Mapping[str, Any]) -> Any:
    """A dataclass or Namespace of these attributes."""
    simple = issubclass(cls, types.SimpleNamespace)
    made = types.SimpleNamespace.__new__(cls) if simple else object.__new__(cls)
    for name, value in values.items():
        if not isinstance(name, str) or name.startswith("__"):
            raise ValueError(f"attribute {name!r}")
        object.__setattr__(made, name, value)
    return made


def _is_findable(cls: type) -> bool:
    found: Any = sys.modules.get(cls.__module__)
    for part in cls.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is cls


def _kind(cls: type) -> str:
    if issubclass(cls, enum.Enum):
        return ENUM
    if issubclass(cls, tuple):
        plain = tuple in cls.__bases__ and cls.__dictoffset__ == 0
        return NAMED_TUPLE if plain and hasattr(cls, "_fields") else ""
    if not (dataclasses.is_dataclass(cls) or issubclass(cls, _NAMESPACES)):
        return ""
    return _by_attributes(cls)


def _by_attributes(cls: type) -> str:
    """A class whose objects are their attributes, and nothing else: no dict, list, exception ..."""
    namespace = issubclass(cls, _NAMESPACES)
    if not namespace and getattr(cls, "__new__", None) is not object.__new__:
        return ""
    if cls.__base__ is None or _solid(cls) not in (object, *_NAMESPACES):
        return ""
    if cls in copyreg.dispatch_table:
        return ""
    own = [base for base in cls.__mro__ if base not in (object, *_NAMESPACES)]
    if any(name in vars(base) for base in own for name in _COPIED_BY_ITSELF):
        return ""
    known = {"__dict__", "__weakref__", *getattr(cls, "__dataclass_fields__", ())}
    for base in own:
        slots = vars(base).get("__slots__", ())
        if not known.issuperset((slots,) if isinstance(slots, str) else slots):
            return ""
        for name in ("__getstate__", "__setstate__"):
            method = vars(base).get(name)
            if method is not None and getattr(method, "__module__", "") != "dataclasses":
                return ""
    return NAMESPACE if namespace else DATACLASS


def _solid(cls: type) -> type:
    """The base that decides the layout in memory."""
    return next(base for base in cls.__mro__ if not base.__flags__ & _HEAP)


_HEAP = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a `class` statement
