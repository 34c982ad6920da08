"""What is logged after a fit (`trainer.validate`, `trainer.test`): each row once, though the leader dies.

Each process evaluates all of the data, at its own pace. So each numbers its rows, and the leader tells on the
supervisor's board which it has logged. The others keep those that are not logged yet, and wait for the leader when
they have seen all batches: the hooks of the evaluation's end (`BasePredictionWriter.write_on_epoch_end`), and what the
script writes after it, need a leader, too. The next leader logs those rows, and leaves out what the dead one was ahead
of it.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any

from ft_core.launch import board
from ft_lightning.trainer.batches import adopt, release
from ft_lightning.trainer.loggers import keep_metrics


class LaterRows:
    """Of this process, in a job that one supervisor has started. The loop's thread."""

    def __init__(self) -> None:
        self._slot, self._waits = board.slot(), False
        self._kept: deque[tuple[int, Callable[[], object]]] = deque()
        self._adopted: list[Any] = []
        self._leads: Callable[[], bool] | None = None
        """None: no evaluation is under way."""

    def begin(self, trainer: Any, leads: Callable[[], bool], ranks: Any, *, waits: bool) -> None:
        """An evaluation begins, of a Trainer whose fit is over.

        A logger whose class has no subclasses logs as it would by itself.

        Args:
            leads: `leads()`: whether this process writes.
            ranks: those of this replica group (`StrategyBase._in_group`).
            waits: this is its first one, which waits for the leader.
        """
        self._slot.evaluates()
        self._leads, self._ranks, self._waits = leads, ranks, waits
        loops = {"validate": "validate_loop", "test": "test_loop", "predict": "predict_loop"}
        loop = getattr(trainer, loops[trainer.state.fn])
        self._adopt(loop, lambda cls: {"on_run_end": self._ending(cls)})
        for logger in trainer.loggers:
            self._adopt(logger, lambda cls: {"log_metrics": self._logging(cls, leads)})

    def _adopt(self, instance: Any, methods: Callable[[type], dict[str, Any]]) -> None:
        with contextlib.suppress(TypeError):
            adopt(instance, methods)
            self._adopted.append(instance)

    def _ending(self, cls: Any) -> Callable[[Any], Any]:
        def on_run_end(this: Any) -> Any:
            self._await_leader()
            self._ranks.barrier(limited=False)
            return cls.on_run_end(this)

        return on_run_end

    def _await_leader(self) -> None:
        """If it dies meanwhile, one of those that wait leads."""
        if self._leads is not None and self._waits and not self._leads():
            self._slot.await_evaluated()

    def _logging(self, cls: Any, leads: Callable[[], bool]) -> Callable[..., None]:
        def log_metrics(this: Any, *args: Any, **kwargs: Any) -> None:
            def write() -> None:
                keep_metrics(this)
                cls.log_metrics(this, *args, **kwargs)
                this.save()

            self._kept.append((self._slot.next_row(), write))
            if leads():
                self.make_up()
            else:
                self._forget()

        return log_metrics

    def _forget(self) -> None:
        last = self._slot.last_row
        while self._kept and self._kept[0][0] <= last:
            self._kept.popleft()

    def make_up(self) -> None:
        """This process writes: log what none has logged."""
        self._forget()
        while self._kept:
            number, write = self._kept.popleft()
            write()
            self._slot.logged(number)

    def end(self, *, well: bool) -> None:
        """The evaluation is over: loop and loggers are themselves again. `well`: it has ended regularly."""
        if well and self._leads is not None:
            self._await_leader()
            self._ranks.barrier(limited=False)  # with all ranks of the leading group it is over
            if self._waits and self._leads():
                self._slot.evaluated()
        self._leads = None
        for each in self._adopted:
            release(each)
        self._adopted.clear()


@cache
def later_rows() -> LaterRows | None:
    """This process's; None: no supervisor has all replica groups of the job, and nothing tells what is logged."""
    return LaterRows() if board.slot().whole else None


def make_up_rows() -> None:
    """This process is the leader now: see `LaterRows.make_up`."""
    if (rows := later_rows()) is not None:
        rows.make_up()
