"""One short fingerprint of a whole state."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from ft_core.heal.checksum import checksum
from ft_core.heal.format import NUMPY_KINDS, Node, TreeEncoder, pack_node
from ft_core.heal.pack import byte_view, dtensor_type, plain_tensor

_PIECE_BYTES = 16 << 20  # unit of work of one thread, and of staging from a device


def digest(tree: Any, *, allow_objects: bool = False, threads: int = 2) -> str:
    """16 hex digits: equal for bitwise equal states, different for others but with p ~ 2**-31.

    Sees every bit (-0.0 is not 0.0), order inside tensors, shapes, dtypes, keys and Python values;
    does not see device, strides, ties, nor the insertion order of dicts (OrderedDict: it does).
    `threads` run only while this call lasts. Raises UnsupportedObjectError like `pack`.
    """
    sums: list[tuple[list[Any], torch.Tensor]] = []
    dtensor = dtensor_type()

    def leaf(value: Any, path: Callable[[], str]) -> Node | None:
        if type(value) in (torch.Tensor, torch.nn.Parameter):
            tensor = plain_tensor(value, path)
        elif dtensor is not None and isinstance(value, dtensor):
            tensor = plain_tensor(value.to_local(), path)
        elif type(value) is np.ndarray and value.dtype.kind in NUMPY_KINDS:
            flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
            tensor = torch.from_numpy(flat if flat.flags.writeable else flat.copy())
            node = ["N", value.dtype.str, list(value.shape)]
            sums.append((node, tensor))
            return node
        elif type(value) is bytes:
            return ["B", hashlib.blake2b(value, digest_size=16).digest()]
        else:
            return None
        node = ["T", str(tensor.dtype), list(tensor.shape)]
        sums.append((node, tensor))
        return node

    root = TreeEncoder(leaf, allow_objects=allow_objects, canonical=True).encode(tree)
    pieces: list[tuple[list[Any], torch.Tensor]] = []
    for node, tensor in sums:
        flat = byte_view(tensor.contiguous())
        pieces.extend((node, piece) for piece in flat.split(_PIECE_BYTES))
    if threads > 1 and sum(piece.numel() for _, piece in pieces) >= 2 * _PIECE_BYTES:
        with ThreadPoolExecutor(threads, thread_name_prefix="ft-digest") as pool:
            results = list(pool.map(_piece_sum, [piece for _, piece in pieces]))
    else:
        results = [_piece_sum(piece) for _, piece in pieces]
    for (node, _), result in zip(pieces, results, strict=True):
        node.append(result)
    return hashlib.blake2b(pack_node(root), digest_size=8).hexdigest()


def _piece_sum(piece: torch.Tensor) -> bytes:
    return checksum(piece if piece.device.type == "cpu" else piece.cpu())
