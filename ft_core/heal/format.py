"""The format of a state on the wire: a manifest (msgpack, no pickle) and the tensors' raw bytes.

A tree of plain Python values becomes one msgpack node. A node is None, a bool, a 64-bit int, a
float, a str or bytes as itself; all else is a list `[tag, ...]`. Types are matched exactly, because
a subclass may carry state that would be lost without notice; an unknown type is refused by name.
Dataclasses, namedtuples, Namespaces and enums travel by their values (`ft_core.heal.objects`).

Tensors are not part of the node. They travel by dtype, shape and contents, in row-major order. One that lies in another
order (channels_last, what `torch.linalg.qr` returns) lies in that again where its target is new, since sums of products
round by it. Device, requires_grad and the Parameter class do not travel. Leaves that are one tensor in
the source (the same memory, shape and strides) stay one on the target; tensors that overlap in
another way travel separately. numpy arrays and large bytes objects travel as raw bytes too.

A DTensor travels by its local part, with its global shape, mesh and placements. The target has the
DTensor of the same place receive it. Where its tree has none there (the moments of a fresh optimizer),
it makes one on the mesh of another DTensor that is sharded alike.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import gc
import hashlib
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
import torch

from ft_core.heal import objects
from ft_core.heal.objects import DTYPES, NUMPY_KINDS, decode_scalar, encode_scalar, numpy_dtype
from ft_core.heal.protocol import HealDenied, HealError, Layout, UnsupportedObjectError, lay_out
from ft_core.heal.shardings import Alike, Sharding, check_alike, dtensor_type, local_part, shardings

Node = Any  # None | bool | int | float | str | bytes | list[Any]
MANIFEST_VERSION = 3
MAX_DEPTH = 100
TENSOR_TAGS = frozenset({"T", "DT", "N", "B"})  # nodes that stand for raw bytes
_BY_VALUES = frozenset({objects.DATACLASS, objects.NAMED_TUPLE, objects.NAMESPACE})
_BIG_BYTES = 64 << 10  # bytes objects of this size and above travel as raw data
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
_AS_THEMSELVES = frozenset({type(None), bool, float, str})
_FACTORIES: dict[str, Any] = {
    t.__name__: t for t in (list, dict, set, int, float, str, bool, tuple, bytes, frozenset)
}
_TRAVEL = frozenset(DTYPES.values())


MEMORY = memoryview((ctypes.c_ubyte * (1 << 56)).from_address(0)).cast("B")
"""All of this process's memory, by address: one slice assigned to another copies a small tensor in half of
the time that `ctypes.memmove` takes. It holds the GIL."""


class _Attribute(str):
    """A step of a path that is not a key."""


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
        self._path: list[Any] = []  # keys, indexes and attributes
        self._where = self.path  # bound once: it is handed over with each tensor
        self._open: set[int] = set()  # ids of the containers that the walk is inside of

    def path(self) -> str:
        """The current place in the tree, as a Python expression."""
        steps = ["state_dict"]
        for step in self._path:
            if type(step) is _Attribute:
                steps.append(f".{step}")
            else:
                key = repr(step)
                steps.append(f"[{key}]" if len(key) <= 200 else "[...]")
        return "".join(steps)

    def encode(self, value: Any) -> Node:
        """The node of `value`. Raises UnsupportedObjectError, whose message names the path."""
        kind = type(value)
        if kind in _PLAIN_TENSORS:
            return self._tensor(value, self._where)
        if kind in _AS_THEMSELVES:
            return value
        if kind is int:
            return value if -(2**63) <= value < 2**63 else ["i", hex(value)]
        if kind is bytes and len(value) < _BIG_BYTES:
            return value
        node = self._tensor(value, self._where)
        if node is not None:
            return node
        node = self._container(value, kind)
        if node is None:
            node = encode_scalar(value, kind)
        return self._pickled(value) if node is None else node

    def _container(self, value: Any, kind: type) -> Node | None:
        known = (
            list,
            tuple,
            dict,
            collections.OrderedDict,
            collections.defaultdict,
            collections.Counter,
            collections.deque,
            set,
            frozenset,
        )
        by_values = "" if kind in known else objects.kind_of(value)
        if kind not in known and by_values not in _BY_VALUES:
            return None
        if id(value) in self._open:
            raise UnsupportedObjectError(
                f"{self.path()} contains itself, which cannot travel; remove the cycle."
            )
        if len(self._path) >= MAX_DEPTH:
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
            self._path.append(index)
            nodes.append(self.encode(item))
            self._path.pop()
        return nodes

    def _mapping(self, value: dict[Any, Any], kind: type) -> Node | None:
        flat: list[Node] = []
        encode, path = self.encode, self._path
        for key, item in value.items():
            path.append(key)
            flat.append(key if type(key) is str else self._key(key))
            flat.append(encode(item))
            path.pop()
        if self._canonical and kind is not collections.OrderedDict:
            entries = sorted(
                zip(flat[::2], flat[1::2], strict=True), key=lambda entry: pack_node(entry[0])
            )
            flat = [node for entry in entries for node in entry]
        if kind is dict:
            return ["d", *flat]
        if kind is collections.Counter:
            return ["cn", *flat]
        if kind is collections.OrderedDict:
            # Module.state_dict() attaches layer versions to the dict; load_state_dict reads them.
            metadata = getattr(value, "_metadata", None)
            self._path.append(_Attribute("_metadata"))
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
            self._path.append(_Attribute(name))
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


class TreeDecoder:
    """Turns a node back into a tree.

    Args:
        tensor: called as `tensor(node, into)`; returns the value of a node in TENSOR_TAGS. `into`
            is what the caller's own tree has at the same place, or None.
        allow_objects: unpickle what was pickled; else that raises HealError. None: leave it out, and have
            None in its place.
    """

    def __init__(
        self, tensor: Callable[[Node, Any], Any], *, allow_objects: bool | None = False
    ) -> None:
        self._tensor = tensor
        self._allow_objects = allow_objects

    def decode(self, node: Node, into: Any = None) -> Any:
        """The value of a node. Raises HealError for a malformed or a forbidden pickled node."""
        if type(node) is not list:
            return node
        try:
            tag = node[0]
            if tag in TENSOR_TAGS:
                return self._tensor(node, into)
            rest = node[1:]
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
                if self._allow_objects is None:
                    return None
                if not self._allow_objects:
                    raise HealDenied(
                        "The source sent pickled objects; set heal_allow_objects=True here too "
                        "(trusted networks only), or publish without it."
                    )
                return pickle.loads(rest[0])
            return decode_scalar(tag, rest)
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
            cls,
            {n: self.decode(v, mine.get(n)) for n, v in zip(rest[::2], rest[1::2], strict=True)},
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
            key = rest[index]
            if type(key) is list:
                key = self.decode(key)
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
    if tensor.dtype not in _TRAVEL:
        reason = f"a quantized tensor ({tensor.dtype}); send int_repr() and its scales"
    elif tensor.layout is not torch.strided:
        reason = f"a tensor of layout {tensor.layout}; make it dense"
    elif tensor.is_meta or type(tensor).__name__ == "FakeTensor":
        reason = "a tensor without data (meta device); materialize it"
    if reason:
        raise UnsupportedObjectError(f"{path()} is {reason}: this one cannot travel.")
    if tensor.requires_grad or tensor.is_conj() or tensor.is_neg():  # each view takes 0.3 us
        return tensor.detach().resolve_conj().resolve_neg()
    return tensor


class _Collector:
    """Gives every distinct tensor of one tree an index."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.kinds: dict[tuple[torch.dtype, torch.Size], int] = {}
        self.kind_of: list[int] = []  # of each tensor
        self._at: dict[int, int] = {}  # by address: the first tensor there
        self._others_at: dict[int, list[int]] = {}
        self._dtensor = dtensor_type()

    def node(self, value: Any, path: Callable[[], str]) -> Node | None:
        """The callback of TreeEncoder."""
        if type(value) in _PLAIN_TENSORS:
            index = self._add(value, path)
            return ["T", index] if value.is_contiguous() else ["T", index, *_order(value)]
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
        kind = tensor.dtype, tensor.shape
        kinds, tensors = self.kinds, self.tensors
        self.kind_of.append(kinds.setdefault(kind, len(kinds)))
        tensors.append(tensor)
        return len(tensors) - 1

    def _add(self, tensor: torch.Tensor, path: Callable[[], str]) -> int:
        plain = plain_tensor(tensor, path)
        pointer = plain.data_ptr()
        if not pointer:  # it has no elements
            return self._append(plain)
        count = len(self.tensors)
        first = self._at.setdefault(pointer, count)
        if first == count:
            return self._append(plain)
        others = self._others_at.setdefault(pointer, [])
        for index in (first, *others):
            if _is_one(plain, self.tensors[index]):
                return index
        others.append(self._append(plain))
        return others[-1]


def _order(tensor: torch.Tensor) -> list[int]:
    """Its dimensions as they lie in memory, the outermost first; [] if there are gaps, or elements overlap."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return order if tensor.permute(order).is_contiguous() else []


def _is_one(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors that begin at the same address are one."""
    alike = a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()
    return alike and a.device == b.device and a.numel() > 0


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


@dataclass(frozen=True, slots=True)
class Packed:
    """A tree as its source has it: `layout` and `layout_digest` are those that a `Manifest` has of `manifest`."""

    manifest: bytes
    tensors: list[torch.Tensor]
    layout: Layout
    layout_digest: bytes


@_without_collections()
def packed(tree: Any, allow_objects: bool = False) -> Packed:
    """A tree as its source has it.

    The tensors are the tree's own memory, not copies; they may be non-contiguous or on a device.
    Any thread, while the tree does not change. Raises UnsupportedObjectError.
    """
    collector = _Collector()
    node = TreeEncoder(collector.node, allow_objects=allow_objects).encode(tree)
    names = [[str(dtype).removeprefix("torch."), list(shape)] for dtype, shape in collector.kinds]
    sizes = [TensorSpec(dtype, shape).nbytes for dtype, shape in collector.kinds]
    manifest = pack_node([MANIFEST_VERSION, sys.byteorder, names, collector.kind_of, node])
    return Packed(manifest, collector.tensors, *_arranged(names, sizes, collector.kind_of))


def pack(tree: Any, allow_objects: bool = False) -> tuple[bytes, list[torch.Tensor]]:
    """The manifest and the tensors of a tree: see `packed`."""
    found = packed(tree, allow_objects)
    return found.manifest, found.tensors


def _arranged(names: Node, sizes: Sequence[int], kind_of: Sequence[int]) -> tuple[Layout, bytes]:
    """Where tensors of these kinds lie, and what is equal for all that lie so."""
    digest = hashlib.blake2b(pack_node([names, kind_of]), digest_size=16).digest()
    return lay_out([sizes[kind] for kind in kind_of]), digest


def unpack(
    manifest: bytes,
    tensors: Sequence[torch.Tensor],
    *,
    into: Any = None,
    allow_objects: bool = False,
) -> Any:
    """The tree of a manifest. `tensors` are in the manifest's order and become its leaves.

    Where `into` holds a tensor of equal dtype and shape at the same place, that tensor is filled
    and becomes the leaf instead. Raises HealError for a malformed manifest.
    """
    parsed = Manifest(manifest)
    places = parsed.match(into)
    for target, source in zip(places.direct, tensors, strict=True):
        if target is not None and target is not source:
            byte_view(target.data).copy_(byte_view(source.contiguous()))
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
        self.claimed: dict[int | tuple[torch.device, int], int] = {}  # memory -> tensor index
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
            version, byteorder, names, kind_of, self._node = parsed
            if version != MANIFEST_VERSION:
                raise ValueError(f"version {version!r}, this side speaks {MANIFEST_VERSION}")
            if byteorder != sys.byteorder:
                raise ValueError(f"the source is {byteorder}-endian")
            kinds = [_checked_spec(name, shape) for name, shape in names]
            if min(kind_of, default=0) < 0:
                raise ValueError("a negative kind")
            self.specs = [kinds[kind] for kind in kind_of]
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise HealError(f"A source sent a malformed manifest: {error}.") from error
        sizes = [kind.nbytes for kind in kinds]
        self.layout, self.layout_digest = _arranged(names, sizes, kind_of)

    @_without_collections()
    def match(self, into: Any) -> Placement:
        """Find places in the target's own tree for as many tensors as possible. Runs no pickles."""
        places = Placement(len(self.specs))
        if into is not None:
            places.shardings = {sharding.alike: sharding for sharding in shardings(into)}
            kind = dtensor_type()
            TreeDecoder(
                lambda node, leaf: self._claim(places, node, leaf, kind), allow_objects=None
            ).decode(self._node, into)
        return places

    def _claim(self, places: Placement, node: Node, leaf: Any, dtensor: Any) -> None:
        if node[0] not in ("T", "DT") or not isinstance(leaf, torch.Tensor):
            return
        index = self._index(node)
        local, spec = leaf, self.specs[index]
        sharded = dtensor is not None and isinstance(leaf, dtensor)
        if (node[0] == "DT") != sharded:
            return
        if sharded:
            check_alike(node[2], _alike(node), spec.shape, leaf)
            local = local_part(leaf)
        if local.dtype != spec.dtype or local.shape != spec.shape:
            return
        if local.is_meta or local.layout is not torch.strided or local.is_inference():
            return  # the last is written to in inference mode only
        contiguous = local.is_contiguous()
        if not contiguous and torch._debug_has_internal_overlap(local) == 1:
            return  # expanded: it cannot be written
        if pointer := local.data_ptr():  # else it has no elements
            memory = pointer if local.is_cpu else (local.device, pointer)
            if places.claimed.setdefault(memory, index) != index:
                return  # shared here but not in the source: the second one gets memory of its own
        places.returned[id(node)] = leaf
        plain = contiguous and not local.is_conj() and not local.is_neg()
        if plain and places.direct[index] is None:
            places.direct[index] = local
        elif (first := places.direct[index]) is None or first.data_ptr() != local.data_ptr():
            places.copied[id(node)] = local.detach()

    def build(
        self,
        tensors: Sequence[torch.Tensor],
        places: Placement,
        into: Any,
        *,
        allow_objects: bool = False,
    ) -> Any:
        """The tree, once all `tensors` (in the order of `specs`) hold their bytes. Raises HealError."""
        if len(tensors) != len(self.specs):
            raise ValueError(f"{len(self.specs)} tensors are needed, {len(tensors)} were given.")

        returned, copied = places.returned, places.copied
        ordered: dict[int, torch.Tensor] = {}

        def leaf(node: Node, _mine: Any) -> Any:
            known = returned.get(id(node))
            if known is not None and id(node) not in copied:
                return known
            tensor = tensors[self._index(node)]
            if known is not None:
                with torch.no_grad():
                    copied[id(node)].copy_(tensor)
                return known
            if node[0] == "N":
                flat = tensor.numpy().view(numpy_dtype(node[2])) if tensor.numel() else None
                empty = np.empty(0, numpy_dtype(node[2]))
                return (empty if flat is None else flat).reshape(node[3])
            if node[0] == "B":
                return tensor.numpy().tobytes()
            if node[0] == "DT":
                sharding = places.shardings.get(_alike(node))
                if sharding is None:
                    raise HealError(
                        f"The state holds a sharded tensor of global shape {node[2]}; pass into= with "
                        "a state dict of this rank, sharded alike."
                    )
                return sharding.make(tensor.data, node[2])
            if node[0] == "T" and (order := node[2:]):
                if (index := node[1]) not in ordered:
                    ordered[index] = _in_order(tensor, order)
                return ordered[index]
            return tensor.data if tensor.requires_grad else tensor  # a second leaf of one of `into`

        return TreeDecoder(leaf, allow_objects=allow_objects).decode(self._node, into)

    def _index(self, node: Node) -> int:
        index = node[1]
        if type(index) is not int or not 0 <= index < len(self.specs):
            raise HealError(f"A source sent a malformed manifest: no tensor {index!r}.")
        return index


def _in_order(tensor: torch.Tensor, order: list[int]) -> torch.Tensor:
    if sorted(order) != list(range(tensor.dim())):
        raise HealError(f"A source sent a malformed manifest: {order!r} are no dimensions.")
    found = torch.empty_permuted(tensor.shape, order, dtype=tensor.dtype, device=tensor.device)
    return found.copy_(tensor.detach())


def _alike(node: Node) -> Alike:
    sizes, names, placements = node[3:]
    return tuple(sizes), tuple(names), tuple(placements)


def _checked_spec(name: str, shape: list[int]) -> TensorSpec:
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"shape {shape!r}")
    return TensorSpec(DTYPES[name], tuple(shape))
