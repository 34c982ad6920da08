"""Plain Python and numpy values, no containers, as nodes of a manifest (`ft_core.heal.format`)."""

from __future__ import annotations

import datetime
import decimal
import enum
import importlib
import pathlib
import sys
import uuid
import zoneinfo
from typing import Any

import numpy as np
import torch

from ft_core.heal import objects

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
    if isinstance(value, enum.Enum) and objects.kind_of(value):
        if value.name in kind.__members__:  # type: ignore[attr-defined]
            return [objects.ENUM, *objects.named(kind), value.name]
        if isinstance(value, enum.Flag) and type(value.value) is int:  # several members
            return [objects.FLAG, *objects.named(kind), value.value]
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
        return np.frombuffer(rest[1], dtype=numpy_dtype(rest[0]))[0]
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
    if tag == objects.ENUM:
        return objects.find(tag, *rest[:2])[rest[2]]
    if tag == objects.FLAG:
        return objects.find(tag, *rest[:2])(rest[2])
    raise ValueError(f"unknown tag {tag!r}")


def numpy_dtype(text: str) -> np.dtype[Any]:
    """The numpy dtype of this name. Raises ValueError if it may hold Python objects."""
    dtype = np.dtype(text)
    if dtype.kind not in NUMPY_KINDS:
        raise ValueError(f"numpy dtype {text!r} may not travel")
    return dtype
