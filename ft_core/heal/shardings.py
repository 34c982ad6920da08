"""DTensors in a state: this process's parts of them, and how they are sharded; models whose parameters are."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils._pytree import tree_leaves

from ft_core.heal.protocol import HealDenied

Alike = tuple[tuple[int, ...], tuple[str, ...], tuple[str, ...]]
"""Sizes and names of a mesh's dimensions, and the placements: equal in ranks of one number."""


def dtensor_type() -> Any:
    """torch's DTensor class if it has been loaded, else None: then there can be no DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return getattr(module, "DTensor", None)


@dataclass(frozen=True, slots=True)
class Sharding:
    """The mesh and the placements of a DTensor; holds none of its memory."""

    mesh: Any
    placements: Any

    @classmethod
    def of(cls, tensor: Any) -> Sharding:
        """The sharding of a DTensor."""
        return cls(tensor.device_mesh, tensor.placements)

    @property
    def alike(self) -> Alike:
        """What ranks of one number have in common."""
        names = self.mesh.mesh_dim_names or ()
        return tuple(self.mesh.shape), tuple(names), tuple(map(repr, self.placements))

    def make(self, local: torch.Tensor, shape: Sequence[int]) -> Any:
        """A DTensor of this local part. No collective; any thread."""
        stride = torch.empty(shape, device="meta").stride()
        return dtensor_type().from_local(
            local,
            self.mesh,
            self.placements,
            run_check=False,
            shape=torch.Size(shape),
            stride=stride,
        )


def shardings(tree: Any) -> list[Sharding]:
    """Those of the DTensors in a tree, each once."""
    kind = dtensor_type()
    if kind is None:
        return []
    leaves = tree_leaves(tree)
    found = [leaf for leaf in leaves if isinstance(leaf, Sharding)]
    found += [Sharding.of(leaf) for leaf in leaves if isinstance(leaf, kind)]
    return list({sharding.alike: sharding for sharding in found}.values())


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a DTensor, on the same memory and version; else the tensor itself."""
    kind = dtensor_type()
    if kind is None or not isinstance(tensor, kind):
        return tensor
    with torch.no_grad():  # else it is a view that autograd knows
        local: torch.Tensor = getattr(tensor, "to_local")()  # noqa: B009
    return local


def check_alike(shape: list[int], alike: Alike, part: tuple[int, ...], mine: Any) -> None:
    """Raise HealDenied unless `mine` is sharded as a source's DTensor of this global `shape`, of which
    `part` is the shape of this rank's part."""
    here, local = Sharding.of(mine).alike, local_part(mine)
    if (shape, alike, part) == (list(mine.shape), here, tuple(local.shape)):
        return

    def said(shape: Iterable[int], part: Iterable[int], alike: Alike) -> str:
        ranks = "x".join(map(str, alike[0]))
        return f"{list(part)} of {list(shape)} ({', '.join(alike[2])} over {ranks} ranks)"

    raise HealDenied(
        f"The source's replica group is sharded in another way: a tensor is {said(shape, part, alike)} "
        f"there and {said(mine.shape, local.shape, here)} here; give all replica groups the same mesh "
        "and the same fully_shard() calls."
    )


# ---------------------------------------------------------------- models


@runtime_checkable
class ShardedModel(Protocol):
    """`collectives.sharded.Shards`."""

    def at_rest(self) -> AbstractContextManager[None]:
        """Within it the model holds its shards, also where they are gathered now, and again what it holds now
        afterwards."""


@contextmanager
def at_rest(models: Iterable[ShardedModel]) -> Iterator[None]:
    """Within it a state of these models can be saved as it is between steps, and that changes nothing. The
    loop's thread, or one for which that waits."""
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(model.at_rest())
        yield
