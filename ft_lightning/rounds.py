"""Agreements between steps: at the end of a validation, and of an epoch.

A round is a step of the manager's without an optimizer step: a quorum, perhaps one small sum, a
vote that carries the first member's word. It is repeated until it is committed, so that all
members have the same result or none has; a peer that dies costs a repetition.

Replica groups join where batches begin, not in the midst of Lightning's hooks. One that is let in
while its peers are in a round is told so in place of a state: it adds nothing to the round, and
joins again. One that finds in a round of its own that it is behind goes on alone to the next
batch, and heals there.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import msgpack
import torch

from ft_lightning.decisions import MAX_BYTES, Decisions

log = logging.getLogger("ft_lightning")

SLOTS = 64
"""Sums travel in tensors of a multiple of so many float64: peers that log other metrics than this
one must not make the process group's sizes differ."""


class Rounds:
    """What is agreed at the ends of validations and epochs. The loop's thread."""

    def __init__(self, trainer: Any, decisions: Decisions, round_of: Any) -> None:
        """`round_of(control, sums)`: one round, see `StepDriver.round`; None: no agreements."""
        self._trainer, self._decisions, self._round = trainer, decisions, round_of
        self._warned = False

    @property
    def _off(self) -> bool:
        trainer = self._trainer
        # Epochs of unknown length may end at another step elsewhere: then each is for itself.
        endless = trainer.num_training_batches == float("inf")
        outside = trainer.sanity_checking or trainer.state.fn != "fit"
        return self._round is None or endless or outside

    def meet(self) -> None:
        """A validation's batches are over, nothing is logged: who died meanwhile does not lead."""
        if not self._off:
            self._round(b"", None)

    def validation_metrics(self) -> None:
        """A validation's metrics are complete, nobody has acted on them: take the first member's."""
        if not self._off:
            self._adopt_metrics()

    def epoch_metrics(self) -> None:
        """An epoch's metrics are complete, nobody has acted on them: sum up, then as above."""
        if not self._off:
            self._sum_up()
            self._adopt_metrics()

    def stop(self) -> None:
        """All have acted on the metrics: stop if anybody wants to."""
        if self._off:
            return
        wishes = torch.zeros(SLOTS, dtype=torch.float64)
        wishes[0] = float(self._decisions.stop_wished)
        result = self._round(b"", wishes)
        if result is not None:
            self._decisions.agree_to_stop(bool(result[1][0] > 0))

    def _adopt_metrics(self) -> None:
        """Replace what callbacks and schedulers see by the first member's numbers."""
        connector = self._trainer._logger_connector
        mine = {k: v for k, v in self._trainer.callback_metrics.items() if v.numel() == 1}
        result = self._round(_pack(mine, self._monitored()), None)
        if result is None or not result[0]:
            return
        for name, value in _unpack(result[0]).items():
            if name in mine:
                agreed = torch.full_like(mine[name], value)
                connector._callback_metrics[name] = agreed
                for metric in self._computed(name):
                    metric._computed = agreed

    def _monitored(self) -> set[str]:
        """Metrics that decide something: they travel first."""
        trainer = self._trainer
        names = {getattr(c, "monitor", None) for c in trainer.callbacks}
        names |= {c.monitor for c in trainer.lr_scheduler_configs}
        return {str(name) for name in names if name}

    def _computed(self, name: str) -> list[Any]:
        results = self._trainer._results or {}
        return [
            m
            for m in results.values()
            if m._computed is not None and name in (m.meta.name, m.meta.forked_name(False))
        ]

    def _sum_up(self) -> None:
        """`sync_dist=True` of an epoch: sums and sizes over the quorum, in one round.

        Over those who take part at the epoch's end, of what each has seen of the epoch.
        """
        results = self._trainer._results or {}
        metrics = [
            (key, m)
            for key, m in sorted(results.items())
            if m.is_tensor and not m.has_reset and m.meta.on_epoch and m.meta.sync.should
            and (m.meta.is_mean_reduction or m.meta.is_sum_reduction)
        ]  # fmt: skip
        if not metrics:
            return
        names = float(sum(map(ord, "".join(key for key, _ in metrics))))
        row = [1.0, names]
        for _, metric in metrics:
            size = metric.cumulated_batch_size if metric.meta.is_mean_reduction else 1.0
            row += [float(metric.value), float(size)]
        sums = torch.zeros(-(-len(row) // SLOTS) * SLOTS, dtype=torch.float64)
        sums[: len(row)] = torch.tensor(row, dtype=torch.float64)
        result = self._round(b"", sums)
        if result is None:
            return
        total = result[1].tolist()
        if total[1] != total[0] * names:
            if not self._warned:
                self._warned = True
                log.warning("sync_dist: replica groups log different metrics; each has its own")
            return
        for index, (_, metric) in enumerate(metrics):
            value, size = total[2 + 2 * index], total[3 + 2 * index]
            mean = value / size if metric.meta.is_mean_reduction and size else value
            metric._computed = torch.full_like(metric.value, mean)


def _pack(metrics: dict[str, torch.Tensor], first: set[str]) -> bytes:
    """As many of the metrics as fit."""
    values = {k: float(metrics[k]) for k in sorted(metrics, key=lambda k: (k not in first, k))}
    while True:
        packed: bytes = msgpack.packb(values)
        if len(packed) <= MAX_BYTES:
            return packed
        values.popitem()


def _unpack(packed: bytes) -> dict[str, float]:
    values: dict[str, float] = msgpack.unpackb(packed)
    return {k: v if v is not None else math.nan for k, v in values.items()}
