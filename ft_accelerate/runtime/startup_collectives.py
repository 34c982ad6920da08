"""Operations before a model is prepared: a run's name that is broadcast, a barrier after the main
process has made a folder.

Processes that start together do them together, in a quorum of its own that ends when a model is
prepared: there is nothing to heal yet. A process that comes back to others that have passed this
place has its own value for each. The processes of the only replica group do them together also when
the group was restarted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from ft_accelerate.plugin.options import FaultTolerancePlugin, Supervision
from ft_accelerate.runtime.checked_collectives import CheckedCollectives, Diverged, Kind
from ft_accelerate.runtime.group_ranks import GroupRanks, ended_with_its_group
from ft_core.collectives.agreement import agree
from ft_core.manager import Manager
from ft_core.shell.local_lighthouse import DEFAULT_PORT
from lighthouse.client import LighthouseClient
from lighthouse.errors import LighthouseError

log = logging.getLogger("ft_accelerate")

ASK_TIMEOUT_S = 5.0
SUFFIX = "/before"
"""Of the job's name on the lighthouse."""


class StartupCollectives:
    """The loop's thread only."""

    def __init__(
        self, options: FaultTolerancePlugin, supervision: Supervision, group_ranks: GroupRanks
    ) -> None:
        self._group_ranks = group_ranks
        self._manager: Manager | None = None
        self._events = 0
        self._only_group = options.num_replica_groups == 1
        self._over = group_ranks.num_processes == 1 or (
            supervision.restarts > 0 and not self._only_group
        )

    def together(self) -> bool:
        """Whether this process has started together with the others, as far as it knows."""
        if not self._over and self._manager is None:
            self._over = not self._only_group and others_train(self._group_ranks)
        return not self._over

    def operation(
        self,
        kind: Kind,
        attempt: Callable[[CheckedCollectives, Callable[..., Any]], Any],
        alone: Any,
    ) -> Any:
        """As `Runtime.operation`."""
        if not self.together():
            return alone()
        if self._manager is None:
            self._manager = self._connect()
        agreed = agree(
            lambda: self._attempt(kind, attempt),
            begin=self._begin,
            vote=self._vote,
            is_behind=lambda: self._over,
        )
        if agreed is None:  # the others have done more than this process: it is late
            self.close()
            return alone()
        self._events += 1
        return agreed.result

    def _begin(self) -> None:
        with ended_with_its_group():
            self._connected.start_quorum()

    def _vote(self) -> bool:
        with ended_with_its_group():
            committed = self._connected.should_commit()
        return committed

    def _attempt(
        self, kind: Kind, attempt: Callable[[CheckedCollectives, Callable[..., Any]], Any]
    ) -> Any:
        if self._connected.errored() is not None:
            return None
        ranks = self._group_ranks
        collectives = CheckedCollectives(
            self._connected, ranks.process_index, ranks.num_processes, _device()
        )

        def headers(nbytes: int = 0, shape: Any = ()) -> Any:
            return collectives.agree(kind, self._events, self._events, nbytes, shape)

        try:
            return attempt(collectives, headers)
        except Diverged:
            self.close()
            raise

    @property
    def _connected(self) -> Manager:
        assert self._manager is not None
        return self._manager

    def close(self) -> None:
        """Leave the quorum, if there is one. Idempotent."""
        manager, self._manager, self._over = self._manager, None, True
        if manager is not None:
            manager.shutdown()

    def _connect(self) -> Manager:
        # There is no state that could differ: nothing to compare, and no member to sit out a step.
        manager = self._group_ranks.manager(
            _device(), suffix=SUFFIX, commit="quorum", init_sync=False
        )
        manager.set_state_dict_fns(self._late, lambda: {"events": self._events})
        return manager

    def _late(self, state: dict[str, Any]) -> None:
        if state["events"] != self._events:
            self._over = True


def others_train(group_ranks: GroupRanks) -> bool:
    """Whether a process has committed steps of this job and is there, in a quorum or waiting.

    A collective of the group: all its processes call it, and get the same answer.
    """
    return bool(group_ranks.from_rank_0(lambda: _others_train(group_ranks.options)))


def _others_train(options: FaultTolerancePlugin) -> bool:
    address = options.lighthouse or f"tcp://127.0.0.1:{DEFAULT_PORT}"
    try:
        with LighthouseClient(address, timeout_s=ASK_TIMEOUT_S) as client:
            jobs = client.status()["jobs"]
    except (LighthouseError, OSError):
        return False  # no lighthouse yet; what is wrong is reported when this process joins
    # What a job's state remembers does not count: all of its members may be gone.
    return any(job["job_id"] == options.job_id and job["highest_step"] > 0 for job in jobs)


def _device() -> torch.device:
    from accelerate.state import PartialState

    device: torch.device = PartialState().device
    return device
