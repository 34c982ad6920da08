"""What `self.log` and torchmetrics objects have gathered, on its way to peers and summed up there.

Lightning keeps a value and a size for each number that is logged (`_ResultMetric`), and the object
itself for each torchmetrics object. A torchmetrics object has states, each with a reduction:
`dist_reduce_fx` of its `add_state`. What torchmetrics does between processes (`Metric.sync`: gather
each state, stack or chain what was gathered, reduce) is done here with states that have travelled
as bytes: no process waits for another here, and lists may be of different lengths. While a metric
is `shared`, each call of its `compute()` sees the states of all; its own states are untouched.

Reads attributes of torchmetrics that are not public: `_reductions`, `_update_count`, `_computed`,
and replaces `_sync_dist` of single objects for a while.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgpack
import torch
from torch import Tensor, nn

from ft_lightning.shared.step_collectives import packed_tensor, unpacked_tensor

log = logging.getLogger("ft_lightning")

State = dict[str, Any]
"""Of one torchmetrics object: a tensor or a list of tensors for each of its states."""
_EXT_TENSOR = 1
_warned: set[str] = set()

# ---------------------------------------------------------------------- bytes


def pack(tree: Any) -> bytes:
    """Plain values and tensors. Raises TypeError for anything else."""

    def default(value: Any) -> msgpack.ExtType:
        if not isinstance(value, Tensor):
            raise TypeError(f"cannot send a {type(value).__name__}")
        return msgpack.ExtType(_EXT_TENSOR, msgpack.packb(packed_tensor(value)))

    packed: bytes = msgpack.packb(tree, default=default)
    return packed


def unpack(data: bytes) -> Any:
    """What `pack` was given; tensors on the CPU."""

    def tensor(code: int, body: bytes) -> Tensor:
        assert code == _EXT_TENSOR
        return unpacked_tensor(msgpack.unpackb(body))

    return msgpack.unpackb(data, ext_hook=tensor, strict_map_key=False)


# ---------------------------------------------------------------------- torchmetrics


def metrics_in(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, object) of each torchmetrics object in `module` that has states of its own."""
    torchmetrics: Any = sys.modules.get("torchmetrics")
    if torchmetrics is None:
        return
    for _, part in module.named_modules():
        if isinstance(part, torchmetrics.MetricCollection):
            list(part.values())  # objects that share their states get them
    for name, part in module.named_modules():
        if isinstance(part, torchmetrics.Metric) and part._reductions:
            yield name, part


def counts(module: nn.Module) -> dict[str, int]:
    """How often each torchmetrics object in `module` was updated."""
    return {name: metric._update_count for name, metric in metrics_in(module)}


def states(module: nn.Module, since: dict[str, int]) -> dict[str, State]:
    """Of the torchmetrics objects in `module` that were updated since `counts` was `since`."""
    found = {}
    for name, metric in metrics_in(module):
        if metric._update_count != since.get(name, 0):
            state = {key: _wire(metric, key) for key in metric._reductions}
            if _travels(state):
                found[name] = state
            elif name not in _warned:
                _warned.add(name)
                log.warning(
                    "%s %r is not reduced over replica groups: its states are not tensors",
                    type(metric).__name__,
                    name,
                )
    return found


def _wire(metric: Any, key: str) -> Any:
    value = getattr(metric, key)
    if _chains(metric._reductions[key]) and isinstance(value, list) and len(value) > 1:
        return [metric._reductions[key](value)] if _travels({key: value}) else value
    return value


def _chains(reduction: Any) -> bool:
    return getattr(reduction, "__name__", "") == "dim_zero_cat"


def _travels(state: State) -> bool:
    values = [v if isinstance(v, list) else [v] for v in state.values()]
    return all(isinstance(item, Tensor) for value in values for item in value)


def merge(metric: Any, gathered: list[State]) -> State:
    """One state out of those of the members, as `Metric.sync` makes it; on the metric's device."""
    merged: State = {}
    for key, reduction in metric._reductions.items():
        values = [state[key] for state in gathered]
        lists = [value if isinstance(value, list) else [value] for value in values]
        chain = [item.to(metric.device) for items in lists for item in items]
        if len(gathered) == 1:
            merged[key] = chain if isinstance(values[0], list) else chain[0]
        elif not chain:
            merged[key] = []
        elif any(isinstance(value, list) for value in values) or _chains(reduction):
            merged[key] = chain if reduction is None else reduction(chain)
        else:
            stack = torch.stack(chain)
            merged[key] = stack if reduction is None else reduction(stack)
    return merged


def share(module: nn.Module, gathered: list[dict[str, State]]) -> Callable[[], None]:
    """Let `compute()` of the objects in `module` see what all members have; returns the undoing.

    `gathered`: what `states` has given, in the order of ranks.
    """
    names = dict.fromkeys(name for each in gathered for name in each)
    known = dict(module.named_modules())
    changed: list[tuple[Any, Any, int]] = []
    for name in names:
        metric: Any = known.get(name)
        if metric is None:
            continue
        merged = merge(metric, [each[name] for each in gathered if name in each])
        changed.append((metric, metric.distributed_available_fn, metric._update_count))
        metric._update_count = max(metric._update_count, 1)  # else it warns of having nothing
        metric._sync_dist = partial(_put, metric, merged)
        metric.distributed_available_fn = _available
        metric._computed = None

    def undo() -> None:
        for metric, available, count in changed:
            vars(metric).pop("_sync_dist", None)
            metric.distributed_available_fn = available
            metric._computed = None
            if not count and metric._update_count == 1:
                metric._update_count = 0

    return undo


@contextmanager
def shared(module: nn.Module, gathered: list[dict[str, State]]) -> Iterator[None]:
    """`share`, for the time of a block."""
    undo = share(module, gathered)
    try:
        yield
    finally:
        undo()


def _available() -> bool:
    return True


def _put(metric: Any, merged: State, *args: Any, **kwargs: Any) -> None:
    """In place of `Metric._sync_dist`, which has put its own states aside."""
    for key, value in merged.items():
        setattr(metric, key, list(value) if isinstance(value, list) else value.clone())


# ---------------------------------------------------------------------- numbers

_FIELDS = (
    "fx",
    "name",
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "enable_graph",
    "add_dataloader_idx",
    "dataloader_idx",
    "metric_attribute",
)
Row = dict[str, Any]
"""One logged number (or torchmetrics object) of one member, in plain values and tensors."""


def rows(results: Any, wanted: Callable[[Any], bool]) -> dict[str, Row]:
    """By key: what is logged in `results` of an epoch, as far as `wanted(result)`.

    "value" (and "size", for means) of numbers; neither, of torchmetrics objects.
    """
    found: dict[str, Row] = {}
    for key, result in (results or {}).items():
        meta = result.meta
        if result.has_reset or not meta.on_epoch or not wanted(result):
            continue
        row: Row = {name: getattr(meta, name) for name in _FIELDS}
        row |= {"reduce": meta.reduce_fx.__name__, "sync": meta.sync.should}
        if result.is_tensor:
            row["value"] = result.value.squeeze()
            if meta.is_mean_reduction:
                row["size"] = torch.as_tensor(result.cumulated_batch_size).squeeze()
        found[key] = row
    return found


def total(same: list[Row]) -> Tensor:
    """One number out of what members have of it; at least one row."""
    values = torch.stack([row["value"].double() for row in same])
    kind = same[0]["reduce"]
    if kind == "mean":
        result = values.sum() / torch.stack([row["size"].double() for row in same]).sum()
    elif kind == "sum":
        result = values.sum()
    else:
        result = values.max() if kind == "max" else values.min()
    dtype: torch.dtype = same[0]["value"].dtype
    return result.to(dtype)


def put(
    results: Any, module: nn.Module, gathered: list[dict[str, Row]], summed: Callable[[Row], bool]
) -> list[str]:
    """Let `results` show what all members have logged; the first member's where not `summed(row)`.

    Returns the keys of results that only peers had logged: the caller takes them out again.
    Torchmetrics objects are computed anew (see `share`).
    """
    made: list[str] = []
    for key in dict.fromkeys(key for each in gathered for key in each):
        same = [each[key] for each in gathered if key in each]
        result = results.get(key)
        if result is None:
            result = results[key] = _make(results, module, same[0])
            made.append(key)
        result.has_reset = False
        result._computed = None
        if "value" in same[0]:
            computed = total(same if summed(same[0]) else same[:1])
            result._computed = computed.to(result.value.device)
    return made


def _make(results: Any, module: nn.Module, row: Row) -> Any:
    """A result as `self.log` would have made it here."""
    lightning: Any = sys.modules[type(results).__module__]
    meta = lightning._Metadata(
        **{name: row[name] for name in _FIELDS}, reduce_fx=getattr(torch, row["reduce"])
    )
    meta.sync = lightning._Sync(_should=row["sync"])
    result = lightning._ResultMetric(meta, "value" in row)
    if "value" not in row:
        result.value = module.get_submodule(row["metric_attribute"])
    return result
