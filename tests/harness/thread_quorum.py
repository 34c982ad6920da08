"""A quorum of threads in this process: what a Manager promises, without lighthouse or sockets.

For tests that need a step discarded at a chosen point. Its own tests are in test_thread_quorum.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch._dynamo  # torch imports it in the middle of things: two threads at once fail
from torch import Tensor
from torch.distributed import ReduceOp
from torch.futures import Future

from ft_core.collectives.allreduce import AsyncReduce, work_of
from tests.harness.waiting import PATIENCE_S


class ThreadQuorum:
    """`size` members that meet in every allreduce and vote."""

    def __init__(self, size: int, *, silent: tuple[int, ...] = ()) -> None:
        self.size = size
        self.silent = silent
        """Ranks that contribute nothing."""
        self.known_participants = 0
        """How many members think that there are when backward begins; 0: as many as there are."""
        self.lock = threading.Lock()
        self.open: dict[tuple[int, int], list[tuple[Tensor, Future[Tensor]] | None]] = {}
        self.ballots: dict[int, list[bool]] = {}
        self.voted = threading.Condition(self.lock)
        self.members = [ThreadManager(self, rank) for rank in range(size)]

    @property
    def participants(self) -> list[int]:
        return [rank for rank in range(self.size) if rank not in self.silent]

    def run(self, work: Callable[[ThreadManager], Any]) -> list[Any]:
        """`work(manager)` in one thread a member; results by rank. Raises what one raised."""
        with ThreadPoolExecutor(self.size) as pool:
            return [
                f.result(timeout=PATIENCE_S) for f in [pool.submit(work, m) for m in self.members]
            ]


class ThreadManager:
    """One member: the part of Manager's surface that DDP and the optimizer stand on."""

    def __init__(self, quorum: ThreadQuorum, rank: int) -> None:
        self.vote_checks: list[Callable[[], None]] = []
        self.quorum, self.rank = quorum, rank
        self.step_end_hooks: list[Callable[[bool], None]] = []
        self.schema: dict[str, str] = {}
        self.state_fns: dict[str, tuple[Callable[[Any], None], Callable[[], Any]]] = {}
        self.attempts = self.step = 0
        self.sizes: list[int] = []
        """Elements in each allreduce of the attempt, in order."""
        self.scheduled_heal: Any = None
        """State that is loaded with the next vote."""
        self._error: Exception | None = None
        self._pinned_at: float | None = None
        self._pending: list[Future[Tensor]] = []
        self._underway = False

    def register_schema(self, key: str, text: str) -> None:
        self.schema[key] = text

    def register_vote_check(self, check: Callable[[], None]) -> None:
        self.vote_checks.append(check)

    def register_step_end(self, hook: Callable[[bool], None]) -> None:
        self.step_end_hooks.append(hook)

    def register_compared(self, key: str, tensors: Callable[[], Iterable[Tensor]]) -> None:
        pass

    def preallocate_state(self, *optimizers: torch.optim.Optimizer) -> None:
        pass

    def is_healing(self) -> bool:
        return self.scheduled_heal is not None

    def step_is_untouched(self) -> bool:
        return self._underway and self._pinned_at is None

    def _run_vote_checks(self) -> None:
        for check in self.vote_checks:
            check()

    def register_state_dict_fn(
        self, key: str, load: Callable[[Any], None], save: Callable[[], Any]
    ) -> None:
        self.state_fns[key] = (load, save)

    def start_quorum(self) -> None:
        self.attempts += 1
        self._underway, self._error, self._pinned_at = True, None, None
        self.sizes, self._pending = [], []

    def participating_rank(self) -> int | None:
        able = self.quorum.participants
        return able.index(self.rank) if self.rank in able else None

    def errored(self) -> Exception | None:
        return self._error

    def report_error(self, e: Exception) -> None:
        self._error = self._error or e

    def updated(self) -> None:
        pass

    def update_failed(self, e: BaseException) -> None:
        raise AssertionError("an update raised") from e

    def mean_divisor(self) -> int:
        return self.quorum.known_participants or len(self.quorum.participants)

    def allreduce(
        self,
        tensor: Tensor,
        reduce_op: ReduceOp | ReduceOp.RedOpType = ReduceOp.AVG,
        *,
        divided_by: int = 1,
    ) -> Future[Tensor]:
        quorum = self.quorum
        if reduce_op == ReduceOp.AVG:
            tensor.mul_(divided_by / len(quorum.participants))
        if self.rank in quorum.silent:
            tensor.zero_()
        key = (self.attempts, len(self.sizes))
        self.sizes.append(tensor.numel())
        self._pinned_at = 0.0
        future: Future[Tensor] = Future()
        with quorum.lock:
            slots = quorum.open.setdefault(key, [None] * quorum.size)
            slots[self.rank] = (tensor, future)
            entries = [slot for slot in slots if slot is not None]
            complete = len(entries) == quorum.size
        if complete:
            with torch.no_grad():
                total = sum((t.clone() for t, _ in entries[1:]), entries[0][0].clone())
                for member, _ in entries:
                    member.copy_(total)
            for member, done in entries:
                done.set_result(member)
        self._pending.append(future)
        return future

    def start_allreduce(
        self,
        tensor: Tensor,
        reduce_op: ReduceOp | ReduceOp.RedOpType = ReduceOp.AVG,
        *,
        divided_by: int = 1,
    ) -> AsyncReduce:
        future = self.allreduce(tensor, reduce_op, divided_by=divided_by)
        return AsyncReduce(tensor, work_of(future))

    def should_commit(self) -> bool:
        self._run_vote_checks()
        quorum = self.quorum
        for future in self._pending:
            future.wait()
        if self.scheduled_heal is not None:
            for key, (load, _) in self.state_fns.items():
                load(self.scheduled_heal[key])
            self.scheduled_heal = None
        with quorum.lock:
            ballot = quorum.ballots.setdefault(self.attempts, [])
            ballot.append(self._error is None)
            quorum.voted.notify_all()
            assert quorum.voted.wait_for(lambda: len(ballot) == quorum.size, timeout=PATIENCE_S)
        self._underway, self._pinned_at = False, None
        committed = all(ballot)
        self.step += committed
        for hook in self.step_end_hooks:
            hook(committed)
        return committed
