"""Operations before there is anything to train: a run's name that is broadcast, a barrier after the
main process has made a folder, a look at the processes that are there.

Processes that start together do them together, in a quorum of its own which ends when a model is
prepared: nothing can be healed yet. A process that comes back to others that have passed this place
answers for itself; what it broadcasts, it has to find out by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from ft_accelerate.exchange import Diverged, Exchange, Kind
from ft_accelerate.options import FaultTolerancePlugin, Supervision
from ft_core.local import DEFAULT_PORT
from ft_core.manager import Manager
from ft_core.process_group import process_group_for
from lighthouse.client import LighthouseClient
from lighthouse.errors import LighthouseError

log = logging.getLogger("ft_accelerate")

ASK_TIMEOUT_S = 5.0
SUFFIX = "/before"
"""Of the job's name on the lighthouse."""


class Prelude:
    """The loop's thread only."""

    def __init__(self, options: FaultTolerancePlugin, supervision: Supervision) -> None:
        self._options = options
        self._manager: Manager | None = None
        self._events = 0
        self._over = supervision.restarts > 0 or options.num_replica_groups == 1

    def together(self) -> bool:
        """Whether this process has started together with the others, as far as is known."""
        if not self._over and self._manager is None:
            self._over = others_train(self._options)
        return not self._over

    def operation(
        self, kind: Kind, attempt: Callable[[Exchange, Callable[..., Any]], Any], alone: Any
    ) -> Any:
        """As `Runtime.operation`."""
        if not self.together():
            return alone()
        if self._manager is None:
            self._manager = self._connect()
        manager = self._manager
        while True:
            manager.start_quorum()
            if self._over:  # the others have done more than this process: it is late
                self.close()
                return alone()
            exchange = Exchange(
                manager, self._options.replica_group_id, self._options.num_replica_groups, _device()
            )
            result = None
            if manager.errored() is None:
                try:
                    result = attempt(exchange, self._agree(exchange, kind))
                except Diverged:
                    self.close()
                    raise
            if manager.should_commit():
                self._events += 1
                return result

    def close(self) -> None:
        """Leave the quorum, if there is one. Twice is once."""
        manager, self._manager, self._over = self._manager, None, True
        if manager is not None:
            manager.shutdown()

    def _agree(self, exchange: Exchange, kind: Kind) -> Callable[..., Any]:
        def agree(nbytes: int = 0, shape: Any = ()) -> Any:
            return exchange.agree(kind, self._events, self._events, nbytes, shape)

        return agree

    def _connect(self) -> Manager:
        options = self._options
        return Manager(
            process_group_for(_device(), options.timeout_s),
            load_state_dict=self._late,
            state_dict=lambda: {"events": self._events},
            min_replica_size=options.min_replicas,
            use_async_quorum=False,
            init_sync=False,  # there is no state that could differ, and nobody to sit out a step
            timeout=timedelta(seconds=options.timeout_s),
            quorum_timeout=options.quorum_timeout,
            rank=0,
            world_size=1,
            lighthouse_addr=options.lighthouse or None,
            replica_id=str(options.replica_group_id),
            job_id=options.job_id + SUFFIX,
            expected_replicas=options.num_replica_groups,
            token=options.token,
        )

    def _late(self, state: dict[str, Any]) -> None:
        if state["events"] != self._events:
            self._over = True


def others_train(options: FaultTolerancePlugin) -> bool:
    """Whether somebody is there who has committed steps of this job, be it that he waits."""
    address = options.lighthouse or f"tcp://127.0.0.1:{DEFAULT_PORT}"
    try:
        with LighthouseClient(address, timeout_s=ASK_TIMEOUT_S) as client:
            rooms = client.status()["rooms"]
    except (LighthouseError, OSError):
        return False  # nobody is there yet, and what is wrong is told when this process joins
    # What a room remembers does not count: all of its members may be gone.
    return any(
        room["job_id"] == options.job_id and room.get("seated_step", 0) > 0 for room in rooms
    )


def _device() -> torch.device:
    from accelerate.state import PartialState

    device: torch.device = PartialState().device
    return device
