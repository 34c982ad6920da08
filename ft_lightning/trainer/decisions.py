"""What must not differ between replica groups: decided by the first of them, for all.

Each vote on a step carries a few bytes (`Manager.should_commit(control=)`), and all members get
those of the first member back with the commit: its wish to stop, whether it is time to validate
(`val_check_interval` by time), what step-wise plateau schedulers monitor, and a fingerprint of
hyperparameters and place. A member that differs in the fingerprint has neither applied the step
nor will it: it takes the first member's state instead.

At the end of a validation and of an epoch, where Lightning decides by metrics, a round of its own
(`agreements.py`) carries the first member's metrics, and every member's wish to stop.

| decision | taken |
|---|---|
| `should_stop` set before the first step (a Timer that is resumed after its end) | at once |
| `should_stop` set in `training_step`, before its last backward | with this step's commit |
| `should_stop` at a validation's or an epoch's end (EarlyStopping, a Timer by epoch), or set earlier by another than the first member | there |
| `should_stop` set anywhere else by the first member (Timer, `max_time`) | with the next commit |
| `val_check_interval` by time | with the commit that finds the time over |
| plateau schedulers, EarlyStopping, ModelCheckpoint's monitor | on the first member's metrics |

Per-group commit carries nothing: each group then decides for itself.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from operator import is_, itemgetter
from typing import Any

import msgpack
import torch

from ft_lightning.trainer.batches import adopt, release

log = logging.getLogger("ft_lightning")

MAX_DIFFERENCES = 3
"""In a row: then the difference is not in what heals."""


class Decisions:
    """One fit's decisions. The loop's thread."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.alone = False
        """Each group for itself: nothing is carried by votes."""
        self._wish = self._agreed = bool(trainer.should_stop)
        self._monitors: tuple[str, ...] = ()
        self._values: dict[str, float] = {}
        self._validated_at = time.monotonic()
        self._differences = 0
        self._aligned = True
        self._mine: list[bytes] = [b"", b""]
        self._hyperparameters = Hyperparameters()
        adopt(trainer, _asking(self))

    def release(self) -> None:
        """Give the Trainer its own attributes back."""
        if "_ft_original" in vars(type(self._trainer)):
            release(self._trainer)
            self._trainer.should_stop = self._agreed or self._wish
        vars(self._trainer.fit_loop.epoch_loop).pop("_get_monitor_value", None)

    def begin(self) -> None:
        """The fit's data is there, its first step is not."""
        trainer = self._trainer
        # From before any step: all that start alike have it (a Timer that is resumed after its end).
        self._agreed = self._agreed or self._wish
        self._validated_at = time.monotonic()
        self._wait_with_validation()
        # Epochs of a length that is known are as long everywhere (`world_view.schema`).
        self._aligned = trainer.num_training_batches != float("inf")
        self._monitors = tuple(
            str(c.monitor)
            for c in trainer.lr_scheduler_configs
            if c.reduce_on_plateau and c.interval == "step"
        )
        if self._monitors and not self.alone:
            trainer.fit_loop.epoch_loop._get_monitor_value = self._monitored

    # ------------------------------------------------------------------ stopping

    @property
    def stop(self) -> bool:
        """What `trainer.should_stop` is."""
        return self._agreed

    @stop.setter
    def stop(self, wish: bool) -> None:
        self._wish = bool(wish)
        if not wish or self.alone:
            self._agreed = self._wish

    @property
    def stop_wished(self) -> bool:
        """This group's own opinion, to be agreed upon."""
        return self._wish

    def agree_to_stop(self, stop: bool) -> None:
        """What all do."""
        self._agreed = stop

    # ------------------------------------------------------------------ the vote

    def control(self, number: int) -> bytes:
        """What this member's vote on a step carries. `number`: of the step in its batch."""
        trainer = self._trainer
        metrics = trainer.callback_metrics if self._monitors else {}
        values = [float(metrics.get(name, math.nan)) for name in self._monitors]
        self._mine = self._fingerprint(number)
        packed: bytes = msgpack.packb([self._mine, self._wish, self._validation_due(), values])
        return packed

    def differs(self, control: bytes) -> str:
        """Take the first member's word, of a committed step that is not applied yet.

        Returns how this member's step is not the same one ("": it is). Raises RuntimeError if it
        differs again and again.
        """
        if not control:
            return ""
        theirs, stop, validate, values = msgpack.unpackb(control)
        mine = self._mine
        if theirs != mine:
            self._differences += 1
            names = ("hyperparameters", "place in the run")
            parts = [n for n, a, b in zip(names, theirs, mine, strict=True) if a != b]
            what = f"its {' and '.join(parts)} differ from those of its peers"
            if self._differences > MAX_DIFFERENCES:
                raise RuntimeError(
                    f"this replica group cannot train: {what} even after it took their state; "
                    "start all groups with the same script and options, and equally many batches"
                )
            return what
        self._differences = 0
        self._agreed = self._agreed or stop
        self._values = dict(zip(self._monitors, values, strict=True))
        if self._timed and validate:
            self._trainer._last_val_time = -math.inf
        return ""

    def _fingerprint(self, number: int) -> list[bytes]:
        trainer = self._trainer
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        hyperparameters = self._hyperparameters.digest(
            trainer.optimizers, scaler.state_dict() if scaler is not None else None
        )
        place = [trainer.global_step, number]
        if self._aligned:
            loop = trainer.fit_loop
            place += [loop.epoch_progress.current.processed, loop.epoch_loop.batch_idx]
        return [hyperparameters, digest(place)]

    # ------------------------------------------------------------------ validation by the clock

    @property
    def _timed(self) -> bool:
        interval = getattr(self._trainer, "_val_check_time_interval", None)
        return interval is not None and not self.alone

    def _validation_due(self) -> bool:
        interval: float | None = getattr(self._trainer, "_val_check_time_interval", None)
        return interval is not None and time.monotonic() - self._validated_at >= interval

    def _wait_with_validation(self) -> None:
        """Lightning compares its clock with this time: never over, until all are told that it is."""
        if self._timed:
            self._trainer._last_val_time = math.inf

    def at_boundary(self) -> None:
        """Before a batch: what the last commit decided has happened."""
        self._wait_with_validation()

    def validated(self) -> None:
        """A validation has ended."""
        self._validated_at = time.monotonic()

    # ------------------------------------------------------------------ plateau schedulers by step

    def _monitored(self, key: str) -> Any:
        value = self._values.get(key, math.nan)
        mine = self._trainer.callback_metrics.get(key)
        if mine is None or math.isnan(value):
            return mine
        return torch.full_like(torch.as_tensor(mine), value)


def _asking(decisions: Decisions) -> Any:
    """A Trainer whose `should_stop` is the quorum's, and which hides our own callbacks."""

    def methods(cls: Any) -> dict[str, Any]:
        def get(self: Any) -> bool:
            return decisions.stop

        def put(self: Any, wish: bool) -> None:
            decisions.stop = wish

        def callbacks(self: Any) -> list[Any]:
            found = cls.early_stopping_callbacks.fget(self)
            return [c for c in found if not hasattr(c, "_ft_internal")]

        return {"should_stop": property(get, put), "early_stopping_callbacks": property(callbacks)}

    return methods


# ---------------------------------------------------------------------- fingerprints

_CONSTANT = {bool, int, float, str, type(None)}


class Hyperparameters:
    """What was last seen of some optimizers' hyperparameters."""

    def __init__(self) -> None:
        self._groups: list[_Group] = []
        self._scaler: Any = None
        self._digest = b""

    def digest(self, optimizers: list[Any], scaler: dict[str, Any] | None) -> bytes:
        """Of now. `scaler`: the loss scaler's state."""
        groups = [group for known in optimizers for group in known.param_groups]
        changed = len(groups) != len(self._groups) or not self._digest
        if changed:
            self._groups = [_Group() for _ in groups]
        for known, group in zip(self._groups, groups, strict=True):
            if known.changed(group):
                changed = True
        if changed or scaler != self._scaler:
            self._scaler = scaler
            self._digest = digest([[group.digest for group in self._groups], scaler])
        return self._digest


class _Group:
    """One parameter group."""

    def __init__(self) -> None:
        self._keys: tuple[str, ...] = ()
        self._get: Any = None
        self._values: tuple[Any, ...] = ()
        self._plain: list[Any] = []
        self._mutable: set[int] = set()  # places of values that may change in place
        self.digest = b""

    def changed(self, group: dict[str, Any]) -> bool:
        """Whether its digest is another one than at the last call."""
        try:
            values = self._get(group) if len(group) == len(self._keys) else None
        except KeyError:
            values = None
        if values is None:
            self._keys = tuple(sorted(group))  # "params" and at least a learning rate
            self._get, self._mutable = itemgetter(*self._keys), set()
            self._values, self._plain = (), [None] * len(self._keys)
            values = self._get(group)
        before = self._values or (self,) * len(self._keys)
        if not self._mutable and all(map(is_, values, before)):
            return False
        for index, key in enumerate(self._keys):
            value = values[index]
            if key != "params" and (value is not before[index] or index in self._mutable):
                self._plain[index] = _plain(value)
                if _is_constant(value):
                    self._mutable.discard(index)
                else:
                    self._mutable.add(index)
        old, self._values = self.digest, values
        self.digest = digest([self._keys, self._plain])
        return self.digest != old


def _is_constant(value: Any) -> bool:
    return type(value) in _CONSTANT or (
        type(value) is tuple and all(type(item) in _CONSTANT for item in value)
    )


def _plain(value: Any) -> Any:
    """Hyperparameters that all processes write alike; other objects say nothing."""
    kind = type(value)
    if kind in (float, int, bool):
        return value + 0.0  # of minus zero, too
    if kind is str or value is None:
        return value
    if kind in (tuple, list):
        return [_plain(item) for item in value]
    if isinstance(value, torch.Tensor):
        return _plain(value.item()) if value.numel() == 1 else None
    return None


def digest(value: Any) -> bytes:
    """Eight bytes that stand for plain values."""
    return hashlib.blake2b(repr(value).encode(), digest_size=8).digest()
