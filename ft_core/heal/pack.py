"""Trees with tensors: a manifest (msgpack, no pickle) and the tensors' raw bytes.

Tensors travel by dtype, shape and contents, in row-major order; strides, device, requires_grad and
the Parameter class do not travel. Leaves that are one tensor in the source (the same memory, shape
and strides) stay one on the target; tensors that overlap in another way travel separately. numpy
arrays and large bytes ride as raw bytes. A DTensor travels by its local part and needs a DTensor
with an equal local shape in the target's own tree.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ft_core.heal.errors import HealError, UnsupportedObjectError
from ft_core.heal.format import (
    DTYPES,
    NUMPY_KINDS,
    TENSOR_TAGS,
    Node,
    TreeDecoder,
    TreeEncoder,
    numpy_dtype,
    pack_node,
    unpack_node,
)
from ft_core.heal.layout import Layout, lay_out

MANIFEST_VERSION = 1
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What must be known of a tensor before its bytes arrive."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


def dtensor_type() -> Any:
    """torch's DTensor class if anything has loaded it; else there can be no such tensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return getattr(module, "DTensor", None)


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor as a one-dimensional uint8 tensor on the same memory."""
    assert tensor.is_contiguous()
    # The stride of a single element may be anything; only 1 can be seen as bytes.
    return tensor.detach().reshape(-1).as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def plain_tensor(tensor: torch.Tensor, path: Callable[[], str]) -> torch.Tensor:
    """`tensor` without autograd and lazy bits, or UnsupportedObjectError if it has no plain
    bytes."""
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
    """Tensor side of packing: gives every distinct tensor an index."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._seen: dict[tuple[Any, ...], int] = {}
        self._dtensor = dtensor_type()

    def node(self, value: Any, path: Callable[[], str]) -> Node | None:
        if type(value) in _PLAIN_TENSORS:
            return ["T", self._add(value, path)]
        if self._dtensor is not None and isinstance(value, self._dtensor):
            local = value.to_local()
            return ["DT", self._add(local, path), list(value.shape)]
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


def pack(tree: Any, allow_objects: bool = False) -> tuple[bytes, list[torch.Tensor]]:
    """Manifest and tensors of a tree. The tensors are the tree's own memory, not copies, and may
    be non-contiguous or on a device. Raises UnsupportedObjectError."""
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

    Where `into` holds a tensor of equal dtype and shape, that tensor is filled and returned as the
    leaf instead. Raises HealError.
    """
    parsed = Manifest(manifest)
    places = parsed.match(into)
    for target, source in zip(places.direct, tensors, strict=True):
        if target is not None and target is not source:
            byte_view(target).copy_(byte_view(source.contiguous()))
    return parsed.build(tensors, places, into, allow_objects=allow_objects)


class Placement:
    """Which leaves of the target's own tree receive which tensor."""

    def __init__(self, count: int) -> None:
        self.direct: list[torch.Tensor | None] = [None] * count  # bytes go straight in here
        self.returned: dict[int, Any] = {}  # id(node) -> leaf of `into` that is the result
        self.copied: dict[int, torch.Tensor] = {}  # id(node) -> filled from the tensor at the end
        self.claimed: dict[tuple[torch.device, int], int] = {}  # memory -> tensor index


class Manifest:
    """A parsed manifest. Raises HealError if it is malformed."""

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

    def match(self, into: Any) -> Placement:
        """Find places in the target's own tree for as many tensors as possible."""
        places = Placement(len(self.specs))
        if into is not None:
            TreeDecoder(lambda node, leaf: self._claim(places, node, leaf),
                        allow_objects=True).decode(_without_pickles(self._node), into)  # fmt: skip
        return places

    def _claim(self, places: Placement, node: Node, leaf: Any) -> None:
        if node[0] not in ("T", "DT") or not isinstance(leaf, torch.Tensor):
            return
        index = self._index(node)
        kind = dtensor_type()
        sharded = kind is not None and isinstance(leaf, kind)
        if (node[0] == "DT") != sharded or (sharded and list(leaf.shape) != node[2]):
            return
        local: torch.Tensor = getattr(leaf, "to_local")() if sharded else leaf  # noqa: B009
        spec = self.specs[index]
        if local.dtype != spec.dtype or tuple(local.shape) != spec.shape:
            return
        if local.is_meta or local.layout is not torch.strided or local.is_quantized:
            return
        if torch._debug_has_internal_overlap(local) == 1:  # an expanded tensor cannot be written
            return
        memory = (local.device, local.data_ptr())
        if local.numel() and places.claimed.setdefault(memory, index) != index:
            return  # tied here but not in the source: the second one gets memory of its own
        places.returned[id(node)] = leaf
        plain = local.is_contiguous() and not local.is_conj() and not local.is_neg()
        if plain and places.direct[index] is None:
            # Not detach(), which shares the counter of changes: autograd may have saved this tensor
            # for a backward whose result will count for nothing, and must not refuse to run it.
            places.direct[index] = local.data
        elif (first := places.direct[index]) is None or first.data_ptr() != local.data_ptr():
            places.copied[id(node)] = local.detach()

    def build(
        self, tensors: Sequence[torch.Tensor], places: Placement, into: Any, *,
        allow_objects: bool = False,
    ) -> Any:  # fmt: skip
        """The tree, once all tensors hold their bytes."""
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
                raise HealError(
                    f"The state holds a sharded tensor of global shape {node[2]}; pass into= with "
                    "a state dict of this rank, sharded alike."
                )
            return tensor

        return TreeDecoder(leaf, allow_objects=allow_objects).decode(self._node, into)

    def _index(self, node: Node) -> int:
        index = node[1]
        if type(index) is not int or not 0 <= index < len(self.specs):
            raise HealError(f"A source sent a malformed manifest: no tensor {index!r}.")
        return index


def _checked_spec(name: str, shape: list[int]) -> TensorSpec:
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"shape {shape!r}")
    return TensorSpec(DTYPES[name], tuple(shape))


def _without_pickles(node: Node) -> Node:
    """The same node objects, with pickled leaves replaced: matching places must run no code."""
    if type(node) is not list or (node and node[0] in TENSOR_TAGS):
        return node
    if node and node[0] == "P":
        return None
    return [_without_pickles(item) for item in node]
