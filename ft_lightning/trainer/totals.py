"""Numbers given to `self.log`, over all members: from what each has gathered to what all will see.

A number that is logged has a reduction: mean (weighted by batch sizes), sum, min or max. Each
member sends the values that Lightning has gathered so far, and all add them up in the order of
ranks, in double precision: the same bits everywhere. The result takes the place of what Lightning
would compute (`_computed`); what was gathered stays as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_FIELDS = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph",
           "add_dataloader_idx", "dataloader_idx", "metric_attribute")  # fmt: skip
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


def own(row: Row) -> Tensor:
    """What a single member's row says by itself."""
    return total([row])


def put(
    results: Any, module: nn.Module, gathered: list[dict[str, Row]], summed: Callable[[Row], bool]
) -> list[str]:
    """Let `results` show what all members have logged; the first member's where not `summed(row)`.

    Returns the keys of results that only peers had logged: the caller takes them out again.
    Torchmetrics objects are computed anew (see `metric_states.share`).
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
            computed = total(same) if summed(same[0]) else own(same[0])
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
