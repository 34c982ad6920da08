"""Python values in a manifest (`ft_core.heal.format`): those that hold no others, and objects of users' classes.

Plain Python and numpy values have a node of their own (`encode_scalar`). Of users' classes those travel, without
pickle, whose objects are their values: a dataclass, a namedtuple, a Namespace and a member of an enum are their
class's name and their values. The target finds the class under the same name in the same module, which it
imports if it must, and makes the object without calling anything that the class defines: no `__init__`, no
`__reduce__`, no `__setstate__`. A class for which that would not give an equal object (it defines how it is
copied, or is also a dict) does not travel this way.
"""

from __future__ import annotations

import argparse
import copyreg
import dataclasses
import datetime
import decimal
import enum
import importlib
import pathlib
import sys
import types
import uuid
import zoneinfo
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ft_core.config import JobOptions
from ft_core.heal.protocol import HealDenied, UnsupportedObjectError

# ---------------------------------------------------------------- objects of users' classes

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


# ---------------------------------------------------------------- values that hold no others

NUMPY_KINDS = frozenset("biufcSUMm")
_PURE_PATHS: dict[str, type[pathlib.PurePath]] = {
    "path": pathlib.Path,
    "posix": pathlib.PurePosixPath,
    "windows": pathlib.PureWindowsPath,
}
DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and "qint" not in str(value) and "quint" not in str(value)
}


def encode_scalar(value: Any, kind: type) -> list[Any] | None:
    """The node of `value`, whose type is `kind`; None if it is none of these."""
    if kind is complex:
        return ["c", value.real, value.imag]
    if isinstance(value, np.generic) and value.dtype.kind in NUMPY_KINDS:
        return ["ns", value.dtype.str, value.tobytes()]
    if kind is bytearray:
        return ["ba", bytes(value)]
    if kind is torch.Size:
        return ["sz", *value]
    if kind is torch.dtype:
        return ["ty", str(value).removeprefix("torch.")]
    if kind is torch.device:
        return ["dev", str(value)]
    if kind is datetime.timedelta:
        return ["td", value.days, value.seconds, value.microseconds]
    if kind is datetime.datetime and type(value.tzinfo) in (type(None), datetime.timezone):
        return ["dtm", value.isoformat(), value.fold]
    if kind is datetime.datetime and type(value.tzinfo) is zoneinfo.ZoneInfo and value.tzinfo.key:
        return ["dtz", value.replace(tzinfo=None).isoformat(), value.fold, value.tzinfo.key]
    if kind is datetime.date:
        return ["date", value.isoformat()]
    if kind is datetime.time and type(value.tzinfo) in (type(None), datetime.timezone):
        return ["tm", value.isoformat(), value.fold]
    if kind is datetime.timezone:
        return ["tz", datetime.datetime.min.replace(tzinfo=value).isoformat()]
    if kind is zoneinfo.ZoneInfo and value.key:
        return ["zi", value.key]
    if kind in (decimal.Decimal, uuid.UUID):
        return ["dec" if kind is decimal.Decimal else "uid", str(value)]
    if isinstance(value, pathlib.PurePath) and kind.__module__.partition(".")[0] == "pathlib":
        concrete = isinstance(value, pathlib.Path)
        posix = isinstance(value, pathlib.PurePosixPath)
        return ["p", "path" if concrete else "posix" if posix else "windows", str(value)]
    if kind is range:
        return ["r", value.start, value.stop, value.step]
    if kind is slice and all(
        type(v) in (int, type(None)) for v in (value.start, value.stop, value.step)
    ):
        return ["sl", value.start, value.stop, value.step]
    if kind.__module__.startswith("omegaconf."):
        return _encode_config(value)
    if isinstance(value, enum.Enum) and kind_of(value):
        if value.name in kind.__members__:  # type: ignore[attr-defined]
            return [ENUM, *named(kind), value.name]
        if isinstance(value, enum.Flag) and type(value.value) is int:  # several members
            return [FLAG, *named(kind), value.value]
    return None


def _encode_config(value: Any) -> list[Any] | None:
    """A configuration of OmegaConf's, as its YAML, with what interpolates left as it is written. None: that
    would make a different one (it is typed by a class, or refers to what is above it)."""
    OmegaConf = sys.modules["omegaconf"].OmegaConf
    if OmegaConf.get_type(value) not in (dict, list):
        return None
    try:
        given = OmegaConf.to_yaml(value), OmegaConf.is_readonly(value), OmegaConf.is_struct(value)
        same = bool(_decode_config(*given) == value)
    except Exception:  # a resolver of the user's may raise anything
        return None
    return ["oc", *given] if same else None


def _decode_config(text: str, readonly: bool | None, struct: bool | None) -> Any:
    try:
        OmegaConf = importlib.import_module("omegaconf").OmegaConf
    except ImportError as error:
        raise ValueError(
            "it holds a configuration of OmegaConf, which is not installed here"
        ) from error
    made = OmegaConf.create(text)
    if readonly is not None:
        OmegaConf.set_readonly(made, readonly)
    if struct is not None:
        OmegaConf.set_struct(made, struct)
    return made


def decode_scalar(tag: str, rest: list[Any]) -> Any:
    """The value of a node `[tag, *rest]`. Raises ValueError, TypeError, KeyError, IndexError or AttributeError if there
    is no such node."""
    if tag == "i":
        return int(rest[0], 16)
    if tag == "c":
        return complex(rest[0], rest[1])
    if tag == "ns":
        dtype = numpy_dtype(rest[0])  # without a size: an empty string
        return np.frombuffer(rest[1], dtype=dtype)[0] if dtype.itemsize else dtype.type()
    if tag == "ba":
        return bytearray(rest[0])
    if tag == "sz":
        return torch.Size(rest)
    if tag == "ty":
        return DTYPES[rest[0]]
    if tag == "dev":
        return torch.device(rest[0])
    if tag == "td":
        return datetime.timedelta(*rest)
    if tag == "dtm":
        return datetime.datetime.fromisoformat(rest[0]).replace(fold=rest[1])
    if tag == "dtz":
        zone = zoneinfo.ZoneInfo(rest[2])
        return datetime.datetime.fromisoformat(rest[0]).replace(fold=rest[1], tzinfo=zone)
    if tag == "date":
        return datetime.date.fromisoformat(rest[0])
    if tag == "tm":
        return datetime.time.fromisoformat(rest[0]).replace(fold=rest[1])
    if tag == "tz":
        return datetime.datetime.fromisoformat(rest[0]).tzinfo
    if tag == "zi":
        return zoneinfo.ZoneInfo(rest[0])
    if tag in ("dec", "uid"):
        return decimal.Decimal(rest[0]) if tag == "dec" else uuid.UUID(rest[0])
    if tag == "p":
        return _PURE_PATHS[rest[0]](rest[1])
    if tag == "r":
        return range(*rest)
    if tag == "sl":
        return slice(*rest)
    if tag == "oc":
        return _decode_config(*rest)
    if tag == ENUM:
        return find(tag, *rest[:2])[rest[2]]
    if tag == FLAG:
        return find(tag, *rest[:2])(rest[2])
    raise ValueError(f"unknown tag {tag!r}")


def numpy_dtype(text: str) -> np.dtype[Any]:
    """The numpy dtype of this name. Raises ValueError if it may hold Python objects."""
    dtype = np.dtype(text)
    if dtype.kind not in NUMPY_KINDS:
        raise ValueError(f"numpy dtype {text!r} may not travel")
    return dtype
