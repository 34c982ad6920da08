"""What must not differ between replica groups: decided by the first of them, for all.

Each vote on a step carries a few bytes (`Manager.should_commit(control=)`), and the commit brings
those of the first member to all: its wish to stop, whether it is time to validate
(`val_check_interval` by time) or to save (ModelCheckpoint's `train_time_interval`), what step-wise
plateau schedulers monitor, and a fingerprint of hyperparameters and place. A member with another
fingerprint does not apply the step. It takes the first member's state instead.

At the end of a validation and of an epoch, where Lightning decides by metrics, an agreement
(`agreements.py`) carries the first member's metrics, and every member's wish to stop.

| decision | taken |
|---|---|
| `should_stop` set before the first step (a Timer that is resumed after its end) | at once |
| `should_stop` set in `training_step`, before its last backward | with this step's commit |
| `should_stop` at a validation's or an epoch's end (EarlyStopping, a Timer by epoch), or set earlier by another than the first member | there |
| `should_stop` set anywhere else by the first member (Timer, `max_time`) | with the next commit |
| `val_check_interval` by time, ModelCheckpoint's `train_time_interval` | with the commit that finds the time over (LocalSGD and DiLoCo: that of an outer step, for saves) |
| plateau schedulers, EarlyStopping, ModelCheckpoint's monitor | on the first member's metrics |

Per-group commit carries nothing: each group then decides for itself. So it does under LocalSGD and DiLoCo, but for
saves by the clock, and where the leader logs.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Callable
from operator import attrgetter, is_
from typing import Any

import msgpack
import torch

from ft_lightning.trainer.batches import adopt, adopted, release

log = logging.getLogger("ft_lightning")

MAX_CONTROL_BYTES = 1000
MAX_DIFFERENCES = 3
"""In a row: then the difference is not in what heals."""


class Decisions:
    """One fit's decisions. The loop's thread."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.alone = False
        """Each group for itself: votes carry nothing."""
        self.saves_alone = False
        """The same of what a ModelCheckpoint saves by the clock."""
        self.timed = False
        """Whether `val_check_interval` is a time, which all must find over at the same step."""
        self._wish = bool(trainer.should_stop)
        self._monitors: tuple[str, ...] = ()
        self._values: dict[str, float] = {}
        self._validated_at = time.monotonic()
        self._saving: list[Any] = []  # callbacks that save by the clock
        self._saved_at: list[float] = []
        self._differences = 0
        self._aligned = True
        self._mine: list[bytes] = [b"", b""]
        self._hyperparameters = Hyperparameters()
        self.tell: Callable[[], Any] = lambda: None
        """What the first member has to say besides, as plain values; None: nothing."""
        self.hear: Callable[[Any], None] = lambda told: None
        """Called in all members with what it has said."""
        adopt(trainer, _asking(self))
        trainer._ft_stop = self._wish

    def release(self) -> None:
        """Give the Trainer its own attributes back."""
        if adopted(self._trainer):
            stop = self._trainer._ft_stop or self._wish
            release(self._trainer, "_ft_stop")
            self._trainer.should_stop = stop
        vars(self._trainer.fit_loop.epoch_loop).pop("_get_monitor_value", None)

    def begin(self) -> None:
        """The fit's data is there, its first step is not."""
        trainer = self._trainer
        # From before any step: all that start alike have it (a Timer resumed after its end).
        trainer._ft_stop = trainer._ft_stop or self._wish
        self._validated_at = time.monotonic()
        self.timed = (
            getattr(trainer, "_val_check_time_interval", None) is not None and not self.alone
        )
        if self.timed:
            self.wait_with_validation()
        if not self.saves_alone:
            found = trainer.checkpoint_callbacks
            self._saving = [
                c for c in found if getattr(c, "_train_time_interval", None) is not None
            ]
            self.wait_with_saves()
        self._saved_at = [self._validated_at] * len(self._saving)
        # Epochs of a length that is known are as long everywhere (`strategy.schema`).
        self._aligned = trainer.num_training_batches != float("inf")
        self._monitors = tuple(
            str(c.monitor)
            for c in trainer.lr_scheduler_configs
            if c.reduce_on_plateau and c.interval == "step"
        )
        if self._monitors and not self.alone:
            trainer.fit_loop.epoch_loop._get_monitor_value = self._monitored

    # ------------------------------------------------------------------ stopping

    def wish_to_stop(self, wish: bool) -> None:
        """`trainer.should_stop` is set: it becomes true when all agree."""
        self._wish = bool(wish)
        if not wish or self.alone:
            self._trainer._ft_stop = self._wish

    @property
    def stop_wished(self) -> bool:
        """This group's own opinion, to be agreed upon."""
        return self._wish

    def agree_to_stop(self, stop: bool) -> None:
        """What all do."""
        self._trainer._ft_stop = stop

    # ------------------------------------------------------------------ the vote

    def control(self, number: int) -> bytes:
        """What this member's vote on a step carries. `number`: of the step in its batch."""
        trainer = self._trainer
        metrics = trainer.callback_metrics if self._monitors else {}
        values = [float(metrics.get(name, math.nan)) for name in self._monitors]
        self._mine = self._fingerprint(number)
        due = [self._validation_due(), *self._saves_due()]
        decided = [self._mine, self._wish, due, values]
        packed: bytes = msgpack.packb([*decided, self.tell()])
        return packed if len(packed) <= MAX_CONTROL_BYTES else msgpack.packb([*decided, None])

    def differs(self, control: bytes) -> str:
        """Follow the first member's decisions, which came with a commit that is not applied yet.

        Returns how this member's step differs from the first one's; "": not at all. Raises
        RuntimeError if it differs again and again.
        """
        if not control:
            return ""
        theirs, stop, (validate, *saves), values, told = msgpack.unpackb(control)
        if told is not None:
            self.hear(told)
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
        if stop:
            self._trainer._ft_stop = True
        self._values = dict(zip(self._monitors, values, strict=True))
        if self.timed and validate:
            self._trainer._last_val_time = -math.inf
        self._save_by_the_clock(saves)
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

    # ------------------------------------------------------------------ validation and saves by the clock

    def _validation_due(self) -> bool:
        interval: float | None = getattr(self._trainer, "_val_check_time_interval", None)
        return interval is not None and time.monotonic() - self._validated_at >= interval

    def wait_with_validation(self) -> None:
        """Lightning compares its clock with this time: it is never over, until a commit says so."""
        self._trainer._last_val_time = math.inf

    def validated(self) -> None:
        """A validation has ended."""
        self._validated_at = time.monotonic()

    def _saves_due(self) -> list[bool]:
        now = time.monotonic()
        return [
            now - saved_at >= callback._train_time_interval.total_seconds()
            for callback, saved_at in zip(self._saving, self._saved_at, strict=True)
        ]

    def outer_control(self) -> bytes:
        """What this member's vote on an outer step of LocalSGD or DiLoCo carries."""
        due = self._saves_due()
        packed: bytes = msgpack.packb([due, self.tell()])
        return packed if len(packed) <= MAX_CONTROL_BYTES else msgpack.packb([due, None])

    def hear_outer(self, control: bytes) -> None:
        """What the first member's vote has carried, with the commit of an outer step."""
        if not control:
            return
        saves, told = msgpack.unpackb(control)
        if told is not None:
            self.hear(told)
        self._save_by_the_clock(saves)

    def wait_with_saves(self) -> None:
        """Each ModelCheckpoint compares its clock with this time: it is not over, until a commit says so."""
        for callback in self._saving:
            callback._last_time_checked = math.inf

    def _save_by_the_clock(self, saves: list[bool]) -> None:
        """Each ModelCheckpoint compares its clock with this time, behind the batch, which may have several steps."""
        for number, (callback, due) in enumerate(zip(self._saving, saves, strict=False)):
            if due:
                callback._last_time_checked, self._saved_at[number] = -math.inf, time.monotonic()
            elif callback._last_time_checked != -math.inf:
                callback._last_time_checked = math.inf

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
        def put(self: Any, wish: bool) -> None:
            decisions.wish_to_stop(wish)

        def callbacks(self: Any) -> list[Any]:
            found = cls.early_stopping_callbacks.fget(self)
            return [c for c in found if not hasattr(c, "_ft_internal")]

        stop = property(attrgetter("_ft_stop"), put)
        return {"should_stop": stop, "early_stopping_callbacks": property(callbacks)}

    return methods


# ---------------------------------------------------------------------- fingerprints

_CONSTANT = {bool, int, float, str, type(None)}


class Hyperparameters:
    """The hyperparameters of some optimizers, as they were seen last."""

    def __init__(self) -> None:
        self._seen: list[Any] = []
        self._scaler: Any = None
        self._fixed = False  # none of them can change in place
        self._digest = b""

    def digest(self, optimizers: list[Any], scaler: dict[str, Any] | None) -> bytes:
        """Of the present hyperparameters. `scaler`: the loss scaler's state."""
        groups = [group for known in optimizers for group in known.param_groups]
        seen: list[Any] = []
        for group in groups:  # each step: no more than a comparison, if all are the same objects
            seen += group.keys()
            seen += group.values()
        same = len(seen) == len(self._seen) and all(map(is_, seen, self._seen))
        if not (same and self._fixed) or scaler != self._scaler:
            told = [[(k, v) for k, v in sorted(group.items()) if k != "params"] for group in groups]
            self._seen, self._scaler = seen, scaler
            self._fixed = all(_is_constant(value) for group in told for _, value in group)
            plain = [[(name, _plain(value)) for name, value in group] for group in told]
            self._digest = digest([plain, scaler])
        return self._digest


def _is_constant(value: Any) -> bool:
    return type(value) in _CONSTANT or (
        type(value) is tuple and all(type(item) in _CONSTANT for item in value)
    )


def _plain(value: Any) -> Any:
    """What all processes write alike of a hyperparameter; None for other objects."""
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
