"""What is logged after a fit (`trainer.validate`, `trainer.test`): each row once, though the leader dies.

Each process evaluates all of the data, at its own pace. So each numbers its rows, and the leader tells on the
supervisor's board which it has logged. The others keep those that are not logged yet, and wait for the leader at
the end of the evaluation: what the script writes after it needs a leader, too. The next leader logs them, and
leaves out what the dead one was ahead of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from ft_core.launch import board
from ft_lightning.trainer.batches import adopt, release
from ft_lightning.trainer.loggers import keep_metrics


class LaterRows:
    """Of this process, in a job that one supervisor has started. The loop's thread."""

    def __init__(self) -> None:
        self._slot = board.slot()
        self._kept: deque[tuple[int, Callable[[], object]]] = deque()
        self._adopted: list[Any] = []
        self._leads: Callable[[], bool] | None = None
        """None: no evaluation is under way."""

    def begin(self, loggers: Iterable[Any], leads: Callable[[], bool]) -> None:
        """An evaluation begins, of a Trainer whose fit is over. `leads()`: whether this process writes.

        A logger whose class has no subclasses logs as it would by itself."""
        self._slot.evaluates()
        self._leads = leads
        for logger in loggers:
            try:
                adopt(logger, lambda cls: {"log_metrics": self._logging(cls, leads)})
            except TypeError:
                continue
            self._adopted.append(logger)

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

    @property
    def under_way(self) -> bool:
        """Whether an evaluation is."""
        return self._leads is not None

    def end(self, *, waits: bool) -> None:
        """The evaluation is over: the loggers are themselves again. `waits`: it has ended regularly, and this is
        the first rank of its replica group, which waits for the leader. If that dies, one of them leads."""
        leads, self._leads = self._leads, None
        if leads is not None and waits:
            if not leads():
                self._slot.await_evaluated()
            if leads():
                self._slot.evaluated()
        for logger in self._adopted:
            release(logger)
        self._adopted.clear()


@cache
def later_rows() -> LaterRows | None:
    """This process's; None: no supervisor has all replica groups of the job, and nothing tells what is logged."""
    return LaterRows() if board.slot().whole else None


def make_up_rows() -> None:
    """This process is the leader now: see `LaterRows.make_up`."""
    if (rows := later_rows()) is not None:
        rows.make_up()
