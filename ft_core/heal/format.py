"""The format of a state on the wire: a manifest (msgpack, no pickle) and the tensors' raw bytes.

A tree of plain Python values becomes one msgpack node. A node is None, a bool, a 64-bit int, a
float, a str or bytes as itself; all else is a list `[tag, ...]`. Types are matched exactly, because
a subclass may carry state that would be lost without notice; an unknown type is refused by name.
Dataclasses, namedtuples, Namespaces and enums travel by their values (`ft_core.heal.objects`).

Tensors are not part of the node. They travel by dtype, shape and contents, in row-major order;
strides, device, requires_grad and the Parameter class do not travel. Leaves that are one tensor in
the source (the same memory, shape and strides) stay one on the target; tensors that overlap in
another way travel separately. numpy arrays and large bytes objects travel as raw bytes too.

A DTensor travels by its local part, with its global shape, mesh and placements. The target has the
DTensor of the same place receive it. Where its tree has none there (the moments of a fresh optimizer),
it makes one on the mesh of another DTensor that is sharded alike.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import decimal
import enum
import gc
import hashlib
import pathlib
import pickle
import sys
import uuid
import zoneinfo
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
import torch

from ft_core.heal import objects
from ft_core.heal.protocol import HealDenied, HealError, Layout, UnsupportedObjectError, lay_out
from ft_core.heal.shardings import Alike, Sharding, check_alike, dtensor_type, local_part, shardings

Node = Any  # None | bool | int | float | str | bytes | list[Any]
MANIFEST_VERSION = 2
MAX_DEPTH = 100
TENSOR_TAGS = frozenset({"T", "DT", "N", "B"})  # nodes that stand for raw bytes
NUMPY_KINDS = frozenset("biufcSUMm")
_BY_VALUES = frozenset({objects.DATACLASS, objects.NAMED_TUPLE, objects.NAMESPACE})
_BIG_BYTES = 64 << 10  # bytes objects of this size and above travel as raw data
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
_FACTORIES: dict[str, Any] = {
    t.__name__: t for t in (list, dict, set, int, float, str, bool, tuple, bytes, frozenset)
}
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


def pack_node(node: Node) -> bytes:
    """The msgpack bytes of a node."""
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


class TreeEncoder:
    """Turns one tree into a node. One thread, one tree.

    Args:
        tensor: called as `tensor(value, path)`; returns the node of a tensor, an array or a large
            bytes object, and None for any other value. `path()` is the place in the tree, as text.
        allow_objects: pickle what is not a plain value; else such a value is refused.
        canonical: sort the entries of dicts, so that equal mappings give equal nodes whatever
            their insertion order was.
    """

    def __init__(
        self,
        tensor: Callable[[Any, Callable[[], str]], Node | None],
        *,
        allow_objects: bool = False,
        canonical: bool = False,
    ) -> None:
        self._tensor = tensor
        self._allow_objects = allow_objects
        self._canonical = canonical
        self._path = ["state_dict"]
        self._open: set[int] = set()  # ids of the containers that the walk is inside of

    def path(self) -> str:
        """The current place in the tree, as a Python expression."""
        return "".join(self._path)

    def encode(self, value: Any) -> Node:
        """The node of `value`. Raises UnsupportedObjectError, whose message names the path."""
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
        return self._pickled(value) if node is None else node

    def _container(self, value: Any, kind: type) -> Node | None:
        known = (list, tuple, dict, collections.OrderedDict, collections.defaultdict,
                 collections.Counter, collections.deque, set, frozenset)  # fmt: skip
        by_values = "" if kind in known else objects.kind_of(value)
        if kind not in known and by_values not in _BY_VALUES:
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
            if by_values:
                return self._object(value, kind, by_values)
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
            # Module.state_dict() attaches layer versions to the dict; load_state_dict reads them.
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
        """The node of a key or a set member: hashable plain values only."""
        if type(key) in (tuple, frozenset):
            return ["t" if type(key) is tuple else "f", *(self._key(item) for item in key)]
        if isinstance(key, torch.Tensor | np.ndarray):
            raise UnsupportedObjectError(
                f"{self.path()} uses a tensor as a key, which cannot travel; use its index or name."
            )
        return self.encode(key)

    def _object(self, value: Any, cls: type, tag: str) -> Node:
        if tag == objects.NAMED_TUPLE:
            return [tag, *objects.named(cls), *self._items(value)]
        found = objects.values_of(value)
        node: list[Node] = [tag, *objects.named(cls)]
        for name in sorted(found) if self._canonical else found:
            self._path.append(f".{name}")
            node += [name, self.encode(found[name])]
            self._path.pop()
        return node

    def _pickled(self, value: Any) -> Node:
        cls = type(value)
        name = f"{cls.__module__}.{cls.__qualname__}"
        if not self._allow_objects:
            raise UnsupportedObjectError(
                f"{self.path()} is a {name}, which cannot travel to a process that comes back; keep "
                "plain values, tensors, dataclasses or namedtuples of them in the state instead, or "
                "set heal_allow_objects=True on every member (uses pickle: trusted networks only)."
            )
        try:
            return ["P", pickle.dumps(value)]
        except Exception as error:  # pickling runs the object's own code
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
    if isinstance(value, enum.Enum) and objects.kind_of(value):
        if value.name in kind.__members__:  # type: ignore[attr-defined]
            return [objects.ENUM, *objects.named(kind), value.name]
        if isinstance(value, enum.Flag) and type(value.value) is int:  # several members
            return [objects.FLAG, *objects.named(kind), value.value]
    return None


class TreeDecoder:
    """Turns a node back into a tree.

    Args:
        tensor: called as `tensor(node, into)`; returns the value of a node in TENSOR_TAGS. `into`
            is what the caller's own tree has at the same place, or None.
        allow_objects: unpickle what was pickled; else that raises HealError.
    """

    def __init__(self, tensor: Callable[[Node, Any], Any], *, allow_objects: bool = False) -> None:
        self._tensor = tensor
        self._allow_objects = allow_objects

    def decode(self, node: Node, into: Any = None) -> Any:
        """The value of a node. Raises HealError for a malformed or a forbidden pickled node."""
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
            if tag in _BY_VALUES:
                return self._object(tag, rest, into)
            if tag in ("s", "f"):
                members = [self.decode(item) for item in rest]
                return set(members) if tag == "s" else frozenset(members)
            if tag == "P":
                if not self._allow_objects:
                    raise HealDenied(
                        "The source sent pickled objects; set heal_allow_objects=True here too "
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

    def _object(self, tag: str, rest: list[Node], into: Any) -> Any:
        module, qualname, *rest = rest
        cls = objects.find(tag, module, qualname)
        if tag == objects.NAMED_TUPLE:
            return tuple.__new__(cls, self._sequence("t", rest, into))
        if len(rest) % 2:
            raise ValueError("odd number of attributes")
        mine = objects.values_of(into) if type(into) is cls else {}
        return objects.make(
            cls, {n: self.decode(v, mine.get(n)) for n, v in zip(rest[::2], rest[1::2], strict=True)}
        )

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


# ---------------------------------------------------------------- tensors


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What must be known of a tensor before its bytes arrive."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor as a one-dimensional uint8 tensor on the same memory."""
    assert tensor.is_contiguous()
    # A single element may have any stride, but view(uint8) needs a last stride of 1.
    return tensor.detach().reshape(-1).as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def plain_tensor(tensor: torch.Tensor, path: Callable[[], str]) -> torch.Tensor:
    """`tensor` detached and with conjugation and negation resolved.

    Raises UnsupportedObjectError if it has no plain bytes: quantized, sparse, or without data.
    """
    reason = ""
    if tensor.is_quantized or str(tensor.dtype).removeprefix("torch.") not in DTYPES:
        reason = f"a quantized tensor ({tensor.dtype}); send int_repr() and its scales"
    elif tensor.layout is not torch.strided:
        reason = f"a tensor of layout {tensor.layout}; make it dense"
    elif tensor.is_meta or type(tensor).__name__ == "FakeTensor":
        reason = "a tensor without data (meta device); materialize it"
    if reason:
        raise UnsupportedObjectError(f"{path()} is {reason}: this one cannot travel.")
    return tensor.detach().resolve_conj().resolve_neg()


class _Collector:
    """Gives every distinct tensor of one tree an index."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._seen: dict[tuple[Any, ...], int] = {}
        self._dtensor = dtensor_type()

    def node(self, value: Any, path: Callable[[], str]) -> Node | None:
        """The callback of TreeEncoder."""
        if type(value) in _PLAIN_TENSORS:
            return ["T", self._add(value, path)]
        if self._dtensor is not None and isinstance(value, self._dtensor):
            alike = Sharding.of(value).alike
            if any("Partial" in placement for placement in alike[2]):
                raise UnsupportedObjectError(
                    f"{path()} is a DTensor whose sum is pending ({alike[2]}): this one cannot "
                    "travel; redistribute it first."
                )
            return ["DT", self._add(local_part(value), path), list(value.shape), *map(list, alike)]
        if type(value) is np.ndarray and value.dtype.kind in NUMPY_KINDS:
            flat = np.ascontiguousarray(value).reshape(-1)
            index = self._append(torch.from_numpy(flat.view(np.uint8).copy()))
            return ["N", index, value.dtype.str, list(value.shape)]
        if type(value) is bytes:
            return ["B", self._append(torch.frombuffer(bytearray(value), dtype=torch.uint8))]
        return None

    def _append(self, tensor: torch.Tensor) -> int:
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def _add(self, tensor: torch.Tensor, path: Callable[[], str]) -> int:
        plain = plain_tensor(tensor, path)
        if plain.numel() == 0:
            return self._append(plain)
        key = (plain.device, plain.data_ptr(), plain.dtype, plain.shape, plain.stride())
        if key not in self._seen:
            self._seen[key] = self._append(plain)
        return self._seen[key]


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """No garbage collection meanwhile: a node for each tensor would set off several, which walk all objects
    of the process and cost more than the work itself. Nodes have no cycles."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@_without_collections()
def pack(tree: Any, allow_objects: bool = False) -> tuple[bytes, list[torch.Tensor]]:
    """The manifest and the tensors of a tree.

    The tensors are the tree's own memory, not copies; they may be non-contiguous or on a device.
    Any thread, while the tree does not change. Raises UnsupportedObjectError.
    """
    collector = _Collector()
    node = TreeEncoder(collector.node, allow_objects=allow_objects).encode(tree)
    specs = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in collector.tensors]
    manifest = pack_node([MANIFEST_VERSION, sys.byteorder, specs, node])
    return manifest, collector.tensors


def unpack(
    manifest: bytes, tensors: Sequence[torch.Tensor], *, into: Any = None,
    allow_objects: bool = False,
) -> Any:  # fmt: skip
    """The tree of a manifest. `tensors` are in the manifest's order and become its leaves.

    Where `into` holds a tensor of equal dtype and shape at the same place, that tensor is filled
    and becomes the leaf instead. Raises HealError for a malformed manifest.
    """
    parsed = Manifest(manifest)
    places = parsed.match(into)
    for target, source in zip(places.direct, tensors, strict=True):
        if target is not None and target is not source:
            byte_view(target).copy_(byte_view(source.contiguous()))
    return parsed.build(tensors, places, into, allow_objects=allow_objects)


class Placement:
    """Which leaves of the target's own tree receive which tensor.

    A leaf in `direct` receives the bytes themselves. A leaf in `copied` cannot (it is not
    contiguous, or a second leaf for the same tensor) and is filled by a copy at the end.
    """

    def __init__(self, count: int) -> None:
        self.direct: list[torch.Tensor | None] = [None] * count  # by tensor index
        self.returned: dict[int, Any] = {}  # id(node) -> leaf of `into` that is the result
        self.copied: dict[int, torch.Tensor] = {}  # id(node) -> leaf to fill at the end
        self.claimed: dict[tuple[torch.device, int], int] = {}  # memory -> tensor index
        self.shardings: dict[Alike, Sharding] = {}  # of the DTensors in `into`


class Manifest:
    """A parsed manifest. Raises HealError if it is malformed.

    `specs`: one per tensor. `layout`: where their bytes lie. `layout_digest`: equal for manifests
    whose tensors have equal dtypes and shapes, so that chunks of several sources can be mixed.
    """

    @_without_collections()
    def __init__(self, data: bytes | memoryview) -> None:
        parsed = unpack_node(data)
        try:
            version, byteorder, specs, self._node = parsed
            if version != MANIFEST_VERSION:
                raise ValueError(f"version {version!r}, this side speaks {MANIFEST_VERSION}")
            if byteorder != sys.byteorder:
                raise ValueError(f"the source is {byteorder}-endian")
            self.specs = [_checked_spec(name, shape) for name, shape in specs]
        except (ValueError, TypeError, KeyError) as error:
            raise HealError(f"A source sent a malformed manifest: {error}.") from error
        self.layout: Layout = lay_out([spec.nbytes for spec in self.specs])
        self.layout_digest = hashlib.blake2b(pack_node(specs), digest_size=16).digest()

    @_without_collections()
    def match(self, into: Any) -> Placement:
        """Find places in the target's own tree for as many tensors as possible. Runs no pickles."""
        places = Placement(len(self.specs))
        if into is not None:
            places.shardings = {sharding.alike: sharding for sharding in shardings(into)}
            TreeDecoder(lambda node, leaf: self._claim(places, node, leaf),
                        allow_objects=True).decode(_without_pickles(self._node), into)  # fmt: skip
        return places

    def _claim(self, places: Placement, node: Node, leaf: Any) -> None:
        if node[0] not in ("T", "DT") or not isinstance(leaf, torch.Tensor):
            return
        index = self._index(node)
        kind = dtensor_type()
        sharded = kind is not None and isinstance(leaf, kind)
        if (node[0] == "DT") != sharded:
            return
        local, spec = local_part(leaf), self.specs[index]
        if sharded:
            check_alike(node[2], _alike(node), spec.shape, leaf)
        if local.dtype != spec.dtype or tuple(local.shape) != spec.shape:
            return
        if local.is_meta or local.layout is not torch.strided or local.is_quantized:
            return
        if torch._debug_has_internal_overlap(local) == 1:  # expanded: it cannot be written
            return
        memory = (local.device, local.data_ptr())
        if local.numel() and places.claimed.setdefault(memory, index) != index:
            return  # shared here but not in the source: the second one gets memory of its own
        places.returned[id(node)] = leaf
        plain = local.is_contiguous() and not local.is_conj() and not local.is_neg()
        if plain and places.direct[index] is None:
            # Not detach(), which shares the version counter: autograd may have saved this tensor for
            # a backward whose result is discarded anyway, and must not refuse to run it.
            places.direct[index] = local.data
        elif (first := places.direct[index]) is None or first.data_ptr() != local.data_ptr():
            places.copied[id(node)] = local.detach()

    def build(
        self, tensors: Sequence[torch.Tensor], places: Placement, into: Any, *,
        allow_objects: bool = False,
    ) -> Any:  # fmt: skip
        """The tree, once all `tensors` (in the order of `specs`) hold their bytes. Raises HealError."""
        if len(tensors) != len(self.specs):
            raise ValueError(f"{len(self.specs)} tensors are needed, {len(tensors)} were given.")

        def leaf(node: Node, _mine: Any) -> Any:
            tensor = tensors[self._index(node)]
            if id(node) in places.copied:
                with torch.no_grad():
                    places.copied[id(node)].copy_(tensor)
            if id(node) in places.returned:
                return places.returned[id(node)]
            if node[0] == "N":
                flat = tensor.numpy().view(numpy_dtype(node[2])) if tensor.numel() else None
                empty = np.empty(0, numpy_dtype(node[2]))
                return (empty if flat is None else flat).reshape(node[3])
            if node[0] == "B":
                return tensor.numpy().tobytes()
            if node[0] == "DT":
                known = places.shardings.get(_alike(node))
                if known is None:
                    raise HealError(
                        f"The state holds a sharded tensor of global shape {node[2]}; pass into= with "
                        "a state dict of this rank, sharded alike."
                    )
                return known.make(tensor, node[2])
            return tensor

        return TreeDecoder(leaf, allow_objects=allow_objects).decode(self._node, into)

    def _index(self, node: Node) -> int:
        index = node[1]
        if type(index) is not int or not 0 <= index < len(self.specs):
            raise HealError(f"A source sent a malformed manifest: no tensor {index!r}.")
        return index


def _alike(node: Node) -> Alike:
    sizes, names, placements = node[3:]
    return tuple(sizes), tuple(names), tuple(placements)


def _checked_spec(name: str, shape: list[int]) -> TensorSpec:
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"shape {shape!r}")
    return TensorSpec(DTYPES[name], tuple(shape))


def _without_pickles(node: Node) -> Node:
    """The same node objects, but None for pickled leaves: matching places must run no code."""
    if type(node) is not list or (node and node[0] in TENSOR_TAGS):
        return node
    if node and node[0] == "P":
        return None
    return [_without_pickles(item) for item in node]
