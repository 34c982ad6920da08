"""The loggers of a Fabric: the leader writes, and the next one goes on where it has stopped.

As those of a Trainer (`ft_lightning/trainer/loggers.py`), but for two things. Before the first quorum rank 0 of a
fresh start writes, since scripts log their settings there. And a loop that comes back logs in passes that
have no effect: those rows are dropped.
"""

from __future__ import annotations

import contextlib
import sys
from types import FrameType
from typing import Any

import msgpack

from ft_lightning.fabric.fabric_step import FabricStepMixin
from ft_lightning.trainer.decisions import MAX_CONTROL_BYTES
from ft_lightning.trainer.loggers import Loggers, adopt_log_places, log_places


class FabricLoggersMixin(FabricStepMixin):
    """The part of the strategy that hands loggers on. The loop's thread."""

    _fabric: Any = None
    _began: tuple[int, list[int], int]
    _loggers: Loggers | None = None
    """None: they are as they are, since this is the only group, one is of a class without subclasses, or the
    leader's word does not come with each step (`commit="group"`, outer steps)."""

    def _find_loggers(self) -> None:
        """A Fabric sets up its environment. It is told to no strategy, but has called this one."""
        frame: FrameType | None = sys._getframe(1)
        while (
            frame is not None and getattr(frame.f_locals.get("self"), "_strategy", None) is not self
        ):
            frame = frame.f_back
        self._fabric = None if frame is None else frame.f_locals["self"]
        together = self._votes_each_step and self._options.commit == "quorum"
        if self._fabric is None or self._is_alone or not together or self._loggers is not None:
            return
        dummy = self._from("fabric.loggers.logger")._DummyExperiment
        with contextlib.suppress(TypeError):
            self._loggers = Loggers(self._fabric, dummy, self._still_leads, self._counts)
            self._loggers.in_quorum(self._leader, takes_over=False)

    def _counts(self) -> bool:
        """Whether what the loop logs now is of the training."""
        return not self._window.local

    def _on_quorum(self) -> bool:
        met, known = self._met, super()._on_quorum()
        if known and self._loggers is not None:
            self._loggers.in_quorum(
                self._leader,
                takes_over=met or self.scope.restarts > 0,
                begins=self.progress.step <= self._began[0] + 1,
            )
        return known

    def _vote(self) -> bool:
        if self._loggers is not None and self._sigterm.noted:
            self._loggers.before_leaving()
        committed = super()._vote()
        if self._loggers is not None and committed:
            assert self._manager is not None
            outcome = self._manager.last_outcome()
            if outcome is not None and outcome.control:
                self._loggers.hear(msgpack.unpackb(outcome.control))
            if self._sigterm.noted:
                self._loggers.leave()
        return committed

    def _control(self) -> bytes:
        news = None if self._loggers is None else self._loggers.news()
        packed: bytes = b"" if news is None else msgpack.packb(news)
        return packed if len(packed) <= MAX_CONTROL_BYTES else b""

    def _logs(self) -> list[Any]:
        """For a healing peer: where the loggers write, and the rows that they keep."""
        if self._loggers is None:
            return [[], []]
        return [log_places(self._fabric), self._loggers.rows()]

    def _take_logs(self, told: list[Any]) -> None:
        if self._loggers is not None:
            adopt_log_places(self._fabric, told[0])
            self._loggers.take_rows(told[1])
