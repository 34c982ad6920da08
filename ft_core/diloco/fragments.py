"""What travels: fragments of a model, and their tensors laid out as buckets.

A *fragment* is a part of the model's trainable parameters with outer steps of its own. Each
parameter is in exactly one; tied parameters count once; frozen ones are in none, since they never
change. Persistent buffers (running statistics) travel with the last fragment: once a window.

A fragment's tensors are laid out in one flat tensor per dtype, in order; *buckets* are consecutive
pieces of it. So whatever the sizes, every element is in exactly one bucket: a bucket may hold many
tensors, and a tensor may span many buckets.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ft_core.collectives.buffers import own_memory, owned_buffers
from ft_core.heal.shardings import Sharding, dtensor_type, local_part

DEFAULT_BUCKET_BYTES = 32 << 20
FragmentSpec = int | Sequence[nn.Module | Sequence[str]] | None


@dataclass(frozen=True, slots=True, eq=False)
class Fragment:
    """`names` and `parameters` in the same order; `index` among the fragments."""

    index: int
    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]

    @property
    def numel(self) -> int:
        """Elements of the local parts."""
        return sum(local_values(p).numel() for p in self.parameters)


def local_values(tensor: Tensor) -> Tensor:
    """The tensor's memory in this process, detached: of a DTensor its local shard."""
    return local_part(tensor).detach()


def like(local: Tensor, model: Tensor) -> Tensor:
    """`local` as what `model` is: a DTensor of the same mesh and placements, or a plain tensor."""
    kind = dtensor_type()
    if kind is None or not isinstance(model, kind):
        return local
    made: Tensor = Sharding.of(model).make(local, model.shape)
    return made


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable parameters by name, tied ones once. Raises ValueError if there is none."""
    found = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not found:
        raise ValueError(
            "the model has no trainable parameter: there is nothing to synchronize, set "
            "requires_grad before"
        )
    return found


def split(model: nn.Module, spec: FragmentSpec) -> list[Fragment]:
    """Cut the model's trainable parameters into fragments.

    `spec`: None, one fragment; a number, so many of about equal size, in order of registration; or
    a list with a module, or the names of parameters, for each. Raises ValueError if the number is
    too large, or a list misses or repeats parameters.
    """
    parameters = trainable(model)
    if spec is None:
        spec = 1
    if isinstance(spec, int):
        groups = _balanced(parameters, spec)
    else:
        groups = _listed(parameters, model, spec)
    return [
        Fragment(index, tuple(names), tuple(parameters[name] for name in names))
        for index, names in enumerate(groups)
    ]


def _balanced(parameters: dict[str, nn.Parameter], count: int) -> list[list[str]]:
    if not 1 <= count <= len(parameters):
        raise ValueError(
            f"fragments={count} is not possible: the model has {len(parameters)} trainable "
            "parameters, use a number from 1 to that"
        )
    total = sum(p.numel() for p in parameters.values())
    groups: list[list[str]] = [[]]
    done = 0
    for position, (name, parameter) in enumerate(parameters.items()):
        left = len(parameters) - position  # this one included
        missing = count - len(groups)
        middle = done + parameter.numel() / 2
        if groups[-1] and missing and (left == missing or middle >= total * len(groups) / count):
            groups.append([])
        groups[-1].append(name)
        done += parameter.numel()
    return groups


def _listed(
    parameters: dict[str, nn.Parameter], model: nn.Module, spec: Sequence[nn.Module | Sequence[str]]
) -> list[list[str]]:
    if isinstance(spec, str) or not isinstance(spec, Iterable) or not list(spec):
        raise ValueError(
            f"fragments must be a number, or a list of modules or of lists of parameter names, "
            f"got {spec!r}"
        )
    aliases = _aliases(model)
    owner: dict[str, int] = {}
    groups: list[list[str]] = []
    for index, part in enumerate(spec):
        names = _names_of(part, index, parameters, aliases)
        groups.append(names)
        for name in names:
            if name in owner:
                raise ValueError(
                    f"parameter {name!r} is in fragments {owner[name]} and {index}: put it in one "
                    "of them"
                )
            owner[name] = index
    missing = [name for name in parameters if name not in owner]
    if missing:
        raise ValueError(
            f"fragments miss {len(missing)} parameters, such as {missing[0]!r}: put each trainable "
            "parameter in one"
        )
    return groups


def _names_of(
    part: nn.Module | Sequence[str],
    index: int,
    parameters: dict[str, nn.Parameter],
    aliases: dict[str, str],
) -> list[str]:
    """First names of the trainable parameters that `part` stands for."""
    if isinstance(part, nn.Module):
        by_id = {id(p): name for name, p in parameters.items()}
        mine = [p for p in part.parameters() if p.requires_grad]
        foreign = [p for p in mine if id(p) not in by_id]
        if foreign:
            raise ValueError(f"fragment {index} is a module that is not a part of the model")
        names = [by_id[id(p)] for p in mine]
    else:
        names = []
        for name in [part] if isinstance(part, str) else part:
            first = aliases.get(name, "")
            if first not in parameters:
                why = "is frozen" if first else "is not a parameter of the model"
                raise ValueError(f"fragment {index} names {name!r}, which {why}: leave it out")
            names.append(first)
    if not names:
        raise ValueError(f"fragment {index} has no trainable parameter: leave it out")
    return names


def _aliases(model: nn.Module) -> dict[str, str]:
    """Each name of each parameter -> the first name of the same parameter (tied ones have more)."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(p), name)
        for name, p in model.named_parameters(remove_duplicate=False)
    }


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The model's present buffers that a state dict holds, by full name, in order; shared ones once.

    Of DTensors the local parts, of expanded ones what they hold.
    """
    owned = owned_buffers(model).items()
    buffers = {full: local_values(getattr(owner, name)) for full, (owner, name) in owned}
    return {full: own_memory(buffer) for full, buffer in buffers.items()}


class SentForm:
    """The names, shapes and dtypes of what travels, as they are now. Members that send other sizes than their peers
    would end the processes of all."""

    def __init__(self, fragments: Sequence[Fragment], model: nn.Module) -> None:
        self._fragments, self._model = fragments, model
        self._parameters, self._buffers = self._now()

    def check(self) -> None:
        """Raise ValueError if it is another one by now."""
        parameters, buffers = self._now()
        if new := sorted(set(buffers) - set(self._buffers)):
            raise ValueError(
                f"buffers that the model has got since training began would not be equal in all groups: "
                f"{', '.join(new)}. Register them before, or with persistent=False; LocalSGD and DiLoCo "
                "can't prune (torch.nn.utils.prune, Lightning's ModelPruning)"
            )
        for kind, then, now in (
            ("parameter", self._parameters, parameters),
            ("buffer", self._buffers, buffers),
        ):
            for name, form in then.items():
                if now.get(name) != form:
                    raise ValueError(
                        f"{kind} {name!r} was {form} when LocalSGD or DiLoCo was made, and is {now.get(name)} now: "
                        "it is averaged with that of the other groups, so it must stay what it was. Convert the "
                        "model before, and register a buffer that changes with persistent=False"
                    )

    def _now(self) -> tuple[dict[str, str], dict[str, str]]:
        parameters = {
            name: _form(local_values(p))
            for fragment in self._fragments
            for name, p in zip(fragment.names, fragment.parameters, strict=True)
        }
        found = persistent_buffers(self._model).items()
        return parameters, {name: _form(buffer) for name, buffer in found}


def _form(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"


def describe(fragments: Sequence[Fragment], model: nn.Module) -> str:
    """What must be equal in all members, in a line: fragments, names, shapes, dtypes."""
    lines = [
        f"{f.index} {name} {tuple(p.shape)} {tuple(local_values(p).shape)} {p.dtype}"
        for f in fragments
        for name, p in zip(f.names, f.parameters, strict=True)
    ]
    lines += [
        f"buffer {name} {tuple(buffer.shape)} {buffer.dtype}"
        for name, buffer in persistent_buffers(model).items()
    ]
    digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=6).hexdigest()
    sizes = "+".join(str(f.numel) for f in fragments[:8]) + ("+..." if len(fragments) > 8 else "")
    return f"{len(fragments)} fragments of {sizes} values ({digest})"


Key = tuple[torch.dtype, bool, torch.device]  # bool: pairs of reals


class Flat:
    """Tensors laid out in one flat tensor per dtype, with views of their shapes, and buckets.

    `device`: where it lives; None: where each tensor is. Complex tensors are laid out as pairs of
    reals.
    """

    def __init__(
        self, tensors: Sequence[Tensor], bucket_bytes: int, device: torch.device | None = None
    ) -> None:
        sizes: dict[Key, int] = {}
        places: list[tuple[Key, int, int]] = []
        for tensor in tensors:
            real = tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype
            key = (real, tensor.is_complex(), device or tensor.device)
            count = tensor.numel() * (2 if tensor.is_complex() else 1)
            places.append((key, sizes.get(key, 0), count))
            sizes[key] = sizes.get(key, 0) + count
        self.parts = {
            key: torch.zeros(size, dtype=key[0], device=key[2]) for key, size in sizes.items()
        }
        self.views: list[Tensor] = []
        for tensor, (key, start, count) in zip(tensors, places, strict=True):
            piece = self.parts[key][start : start + count]
            if tensor.is_complex():
                piece = torch.view_as_complex(piece.view(-1, 2))
            self.views.append(piece.view(tensor.shape))
        self._bucket_bytes = bucket_bytes

    def buckets(self) -> list[Tensor]:
        """Flat tensors of at most `bucket_bytes` (one element at least), in order; they are views."""
        found = []
        for part in self.parts.values():
            size = max(1, self._bucket_bytes // part.element_size())
            found += [b for b in part.split(size) if b.numel()]
        return found

    @property
    def nbytes(self) -> int:
        """Of all parts."""
        return sum(part.nbytes for part in self.parts.values())
