"""What `self.log` has gathered in an epoch, to be put back when a step is discarded.

The values of a discarded attempt would count twice in an epoch's mean.
"""

from __future__ import annotations

from typing import Any

Snapshot = dict[str, dict[str, Any]]
"""By key of the result: attributes of it, or of the torchmetrics object that it wraps."""

_OWN = ("value", "cumulated_batch_size", "_forward_cache", "_computed", "has_reset",
        "_update_count")  # fmt: skip


def snapshot(results: Any) -> Snapshot:
    """The state of a `_ResultCollection`. Its own tensors are replaced, never written to: no copy.

    A torchmetrics object writes into its states: they are copied.
    """
    found: Snapshot = {}
    for key, metric in results.items():
        if metric.is_tensor:
            found[key] = {name: getattr(metric, name) for name in _OWN if hasattr(metric, name)}
        elif hasattr(metric, "value"):
            states = metric.value._copy_state_dict()
            found[key] = {"states": states, "_update_count": metric.value._update_count}
    return found


def restore(results: Any, saved: Snapshot) -> None:
    """Undo what was logged since `snapshot`."""
    for key, metric in results.items():
        before = saved.get(key)
        if before is None:
            metric.reset()
        elif metric.is_tensor:
            for name, value in before.items():
                setattr(metric, name, value)
        else:
            for name, value in before["states"].items():
                setattr(metric.value, name, value)
            metric.value._update_count = before["_update_count"]
            metric.value._computed = None
