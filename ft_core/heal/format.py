"""Plain Python trees as msgpack nodes, without pickle.

A node is None, a bool, a 64-bit int, a float, a str or bytes as itself; all else is a list
`[tag, ...]`. Tensors are not written here: a callback turns each into a node of its own, and
another makes a value of such a node. Types are matched exactly, since a subclass may carry state
that would be lost in silence; what is not known is refused by name.
"""

from __future__ import annotations

import collections
import datetime
import enum
import pathlib
import pickle
import sys
from collections.abc import Callable, Iterable
from typing import Any

import msgpack
import numpy as np
import torch

from ft_core.heal.errors import HealError, UnsupportedObjectError

Node = Any  # None | bool | int | float | str | bytes | list[Any]
MAX_DEPTH = 100
TENSOR_TAGS = frozenset({"T", "DT", "N", "B"})  # nodes that the tensor callbacks own
NUMPY_KINDS = frozenset("biufcSUMm")
_BIG_BYTES = 64 << 10  # bytes objects from here on travel as raw data, not in the manifest
_FACTORIES: dict[str, Any] = {
    t.__name__: t for t in (list, dict, set, int, float, str, bool, tuple, bytes, frozenset)
}
_PURE_PATHS: dict[str, type[pathlib.PurePath]] = {
    "path": pathlib.Path,
    "posix": pathlib.PurePosixPath,
    "windows": pathlib.PureWindowsPath,
}
_allowed_enums: dict[str, type[enum.Enum]] = {}

DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and "qint" not in str(value) and "quint" not in str(value)
}


def allow_enum(cls: type[enum.Enum]) -> None:
    """Let members of this enum travel, by class name and member name. Needed on both sides.

    Enums of the standard library and of torch are allowed already. Call it before training.
    """
    _allowed_enums[f"{cls.__module__}:{cls.__qualname__}"] = cls


def pack_node(node: Node) -> bytes:
    """msgpack bytes of a node."""
    data: bytes = msgpack.packb(node, unicode_errors="surrogatepass")
    return data


def unpack_node(data: bytes | memoryview) -> Node:
    """The node in these bytes. Raises HealError if they are not msgpack."""
    try:
        return msgpack.unpackb(
            data,
            unicode_errors="surrogatepass",
            strict_map_key=False,
        )
    except (ValueError, TypeError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise HealError(f"A source sent a manifest that is not valid msgpack: {error}.") from error


def _is_known_enum(cls: type) -> bool:
    root = cls.__module__.partition(".")[0]
    return (
        root in sys.stdlib_module_names
        or root == "torch"
        or f"{cls.__module__}:{cls.__qualname__}" in _allowed_enums
    )


class TreeEncoder:
    """Turns one tree into nodes. `tensor(value, path)` returns a node for tensors, arrays and
    large bytes, or None if it does not know the value. With `canonical`, the entries of dicts are
    sorted, so that equal mappings give equal nodes whatever their insertion order was."""

    def __init__(
        self,
        tensor: Callable[[Any, Callable[[], str]], Node | None],
        *,
        allow_objects: bool = False,
        canonical: bool = False,
        root: str = "state_dict",
    ) -> None:
        self._tensor = tensor
        self._allow_objects = allow_objects
        self._canonical = canonical
        self._path = [root]
        self._open: set[int] = set()

    def path(self) -> str:
        """Where the walk is, as a Python expression."""
        return "".join(self._path)

    def encode(self, value: Any) -> Node:
        """The node of `value`. Raises UnsupportedObjectError, which names the path."""
        kind = type(value)
        if value is None or kind in (bool, float, str):
            return value
        if kind is int:
            return value if -(2**63) <= value < 2**63 else ["i", hex(value)]
        if kind is bytes and len(value) < _BIG_BYTES:
            return value
        node = self._tensor(value, self.path)
        if node is not None:
            return node
        node = self._container(value, kind)
        if node is None:
            node = _encode_scalar(value, kind)
        return self._object(value) if node is None else node

    def _container(self, value: Any, kind: type) -> Node | None:
        known = (list, tuple, dict, collections.OrderedDict, collections.defaultdict,
                 collections.Counter, collections.deque, set, frozenset)  # fmt: skip
        if kind not in known:
            return None
        if id(value) in self._open:
            raise UnsupportedObjectError(
                f"{self.path()} contains itself, which cannot travel; remove the cycle."
            )
        if len(self._path) > MAX_DEPTH:
            raise UnsupportedObjectError(
                f"{self.path()} is nested deeper than {MAX_DEPTH} levels, which cannot travel; "
                "flatten it."
            )
        self._open.add(id(value))
        try:
            if kind is list:
                return ["l", *self._items(value)]
            if kind is tuple:
                return ["t", *self._items(value)]
            if kind is collections.deque:
                return ["dq", value.maxlen, *self._items(value)]
            if kind in (set, frozenset):
                items = sorted((self._key(item) for item in value), key=pack_node)
                return ["s" if kind is set else "f", *items]
            return self._mapping(value, kind)
        finally:
            self._open.discard(id(value))

    def _items(self, values: Iterable[Any]) -> list[Node]:
        nodes = []
        for index, item in enumerate(values):
            self._path.append(f"[{index}]")
            nodes.append(self.encode(item))
            self._path.pop()
        return nodes

    def _mapping(self, value: dict[Any, Any], kind: type) -> Node | None:
        entries: list[tuple[Node, Node]] = []
        for key, item in value.items():
            self._path.append(f"[{key!r}]" if len(repr(key)) <= 200 else "[...]")
            entries.append((self._key(key), self.encode(item)))
            self._path.pop()
        if self._canonical and kind is not collections.OrderedDict:
            entries.sort(key=lambda entry: pack_node(entry[0]))
        flat = [node for entry in entries for node in entry]
        if kind is dict:
            return ["d", *flat]
        if kind is collections.Counter:
            return ["cn", *flat]
        if kind is collections.OrderedDict:
            # Module.state_dict() hangs layer versions on the dict; load_state_dict reads them.
            metadata = getattr(value, "_metadata", None)
            self._path.append("._metadata")
            node = None if metadata is None else self.encode(metadata)
            self._path.pop()
            return ["o", node, *flat]
        factory = getattr(value, "default_factory", None)
        name = "" if factory is None else getattr(factory, "__name__", "?")
        if factory is not None and _FACTORIES.get(name) is not factory:
            return None
        return ["dd", name, *flat]

    def _key(self, key: Any) -> Node:
        """Keys and set members: hashable plain values only."""
        if type(key) in (tuple, frozenset):
            return ["t" if type(key) is tuple else "f", *(self._key(item) for item in key)]
        if isinstance(key, torch.Tensor | np.ndarray):
            raise UnsupportedObjectError(
                f"{self.path()} uses a tensor as a key, which cannot travel; use its index or name."
            )
        return self.encode(key)

    def _object(self, value: Any) -> Node:
        cls = type(value)
        name = f"{cls.__module__}.{cls.__qualname__}"
        if not self._allow_objects:
            raise UnsupportedObjectError(
                f"{self.path()} is a {name}, which cannot travel; keep plain values or tensors "
                "in the state instead, or pass allow_objects=True on every member (uses pickle: "
                "trusted networks only)."
            )
        try:
            return ["P", pickle.dumps(value)]
        except Exception as error:  # pickling runs the object's own code, which may raise anything
            raise UnsupportedObjectError(
                f"{self.path()} is a {name}, which cannot be pickled ({error}); remove it from "
                "the state."
            ) from error


def _encode_scalar(value: Any, kind: type) -> Node | None:
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
    if kind is datetime.date:
        return ["date", value.isoformat()]
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
    if isinstance(value, enum.Enum) and value.name is not None and _is_known_enum(kind):
        return ["e", kind.__module__, kind.__qualname__, value.name]
    return None


class TreeDecoder:
    """Makes a tree of nodes. `tensor(node, into)` makes the value of a node in TENSOR_TAGS;
    `into` is what the caller's own tree has at the same place, or None."""

    def __init__(self, tensor: Callable[[Node, Any], Any], *, allow_objects: bool = False) -> None:
        self._tensor = tensor
        self._allow_objects = allow_objects

    def decode(self, node: Node, into: Any = None) -> Any:
        """The value. Raises HealError for a malformed node, or a pickled one not allowed here."""
        if type(node) is not list:
            return node
        try:
            tag, *rest = node
            if tag in TENSOR_TAGS:
                return self._tensor(node, into)
            if tag in ("l", "t", "dq"):
                return self._sequence(tag, rest, into)
            if tag in ("d", "o", "dd", "cn"):
                return self._mapping(tag, rest, into)
            if tag in ("s", "f"):
                members = [self.decode(item) for item in rest]
                return set(members) if tag == "s" else frozenset(members)
            if tag == "P":
                if not self._allow_objects:
                    raise HealError(
                        "The source sent pickled objects; pass allow_objects=True here too "
                        "(trusted networks only), or publish without it."
                    )
                return pickle.loads(rest[0])
            return _decode_scalar(tag, rest)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise HealError(f"A source sent a malformed manifest: {error!r}.") from error

    def _sequence(self, tag: str, rest: list[Node], into: Any) -> Any:
        maxlen = None
        if tag == "dq":
            maxlen, *rest = rest
        mine = into if isinstance(into, list | tuple | collections.deque) else ()
        if len(mine) != len(rest):
            mine = ()
        values = [
            self.decode(item, mine[index] if mine else None) for index, item in enumerate(rest)
        ]
        if tag == "dq":
            return collections.deque(values, maxlen)
        return values if tag == "l" else tuple(values)

    def _mapping(self, tag: str, rest: list[Node], into: Any) -> Any:
        head = None
        if tag in ("o", "dd"):
            head, *rest = rest
        mine = into if isinstance(into, dict) else {}
        if len(rest) % 2:
            raise ValueError("odd number of dict items")
        entries = []
        for index in range(0, len(rest), 2):
            key = self.decode(rest[index])
            entries.append((key, self.decode(rest[index + 1], mine.get(key))))
        if tag == "d":
            return dict(entries)
        if tag == "cn":
            return collections.Counter(dict(entries))
        if tag == "dd":
            return collections.defaultdict(_FACTORIES[head] if head else None, entries)
        ordered = collections.OrderedDict(entries)
        if head is not None:
            ordered._metadata = self.decode(head)  # type: ignore[attr-defined]
        return ordered


def _decode_scalar(tag: str, rest: list[Node]) -> Any:
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
    if tag == "date":
        return datetime.date.fromisoformat(rest[0])
    if tag == "p":
        return _PURE_PATHS[rest[0]](rest[1])
    if tag == "r":
        return range(*rest)
    if tag == "sl":
        return slice(*rest)
    if tag == "e":
        return _decode_enum(*rest)
    raise ValueError(f"unknown tag {tag!r}")


def _decode_enum(module: str, qualname: str, name: str) -> enum.Enum:
    # Only what is imported already: a source cannot make this process import code.
    cls: Any = _allowed_enums.get(f"{module}:{qualname}") or sys.modules.get(module)
    if not isinstance(cls, type):
        for part in qualname.split("."):
            cls = getattr(cls, part)
    if not (isinstance(cls, type) and issubclass(cls, enum.Enum) and _is_known_enum(cls)):
        raise ValueError(f"{module}.{qualname} is not an enum that may travel")
    return cls[name]


def numpy_dtype(text: str) -> np.dtype[Any]:
    """A dtype without Python objects in it."""
    dtype = np.dtype(text)
    if dtype.kind not in NUMPY_KINDS:
        raise ValueError(f"numpy dtype {text!r} may not travel")
    return dtype
