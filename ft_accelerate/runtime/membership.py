"""One process among its peers: joining and leaving the quorum, votes, the state it serves and loads."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ft_accelerate.plugin.options import FaultTolerancePlugin, GroupPlace, Supervision
from ft_accelerate.runtime import peer_state as states
from ft_accelerate.runtime.group_ranks import GroupRanks, end_with_group
from ft_accelerate.runtime.script_position import Phase, ScriptPosition
from ft_accelerate.runtime.startup_collectives import StartupCollectives
from ft_core.collectives.retry import RetryableReducer
from ft_core.errors import GroupBroken, QuorumUnavailable
from ft_core.launch.sigterm import Sigterm
from ft_core.launch.supervisor import die_with
from ft_core.manager import Manager
from ft_core.telemetry import JsonlSink
from lighthouse.errors import JoinRefused
from lighthouse.files import machine_lock

log = logging.getLogger("ft_accelerate")

FAR_BATCHES = 5000
"""A script that has more to catch up leaves the quorum meanwhile, so that no peer waits for it. Less
is run through in the quorum (some thousand batches a second): one that leaves while it heals is
let in again only after a pause that the lighthouse makes (lighthouse.machine.forming)."""
UNREACHABLE_PAUSE_S = 0.05
FINISHED = "the training has finished"
"""How the lighthouse's refusal begins when the others are done (lighthouse.machine.rules, R8)."""


class Membership:
    """Joining, voting, healing and leaving. The loop's thread, but where said otherwise.

    `process_index` of `num_processes`: this process's number among all processes of all replica groups.
    """

    def __init__(
        self,
        options: FaultTolerancePlugin,
        place: GroupPlace,
        supervision: Supervision,
        reducer: RetryableReducer,
    ) -> None:
        self.options, self._supervision = options, supervision
        self.group_ranks = GroupRanks(options, place, supervision.restarts)
        self.num_processes, self.process_index = (
            self.group_ranks.num_processes,
            self.group_ranks.process_index,
        )
        self.position = ScriptPosition()
        self.reducer = reducer
        self.manager: Manager | None = None
        self.attempts_discarded = 0
        self.contributes = True
        """Whether this process's values count in the current step: it is not only healing."""
        self._accelerators: list[weakref.ref[Any]] = []
        self._open = False
        self._at = "fetch"
        self._joined = False
        self._aside = False
        self._closed = False
        only = options.num_replica_groups == 1
        self._leader = self.process_index == 0 and (supervision.restarts == 0 or only)
        self._healed: dict[str, Any] | None = None
        self.serve_copies = False
        """Whether the state changes between the steps that are voted on (LocalSGD)."""
        self.on_live: list[Callable[[], None]] = []
        """Called when the script stands where its peers' stood when they sent their state."""
        self.startup = StartupCollectives(options, supervision, self.group_ranks)
        self._has_turn = False
        self._starting = 0
        self._owes_report = True
        self._sigterm = Sigterm(self._is_waiting)
        self._sink: JsonlSink | None = None
        if place.event_log:
            self._sink = JsonlSink(Path(place.event_log), name=str(self.process_index))
        if supervision.pid:
            die_with(supervision.pid)
        atexit.register(self._at_exit)

    # ------------------------------------------------------------------ which processes are there

    @property
    def leader(self) -> bool:
        """Whether this process is the main one: the first of those that take part."""
        return self._leader and self.position.phase is Phase.LIVE

    @property
    def local_leader(self) -> bool:
        """Whether this process is the main one of its machine.

        On a machine of several: the first one that the launcher has started there, since each
        machine has files of its own. On the only one: the main one, so that one speaks.
        """
        told = self._supervision
        if 0 < told.children < self.options.num_replica_groups:
            first = told.child == 0 and self.group_ranks.place.local_rank == 0
            return first and self.position.phase is Phase.LIVE
        return self.leader

    @property
    def live(self) -> bool:
        """Whether the script's work counts."""
        return self.position.phase is Phase.LIVE

    @property
    def participants(self) -> int:
        """Processes that contribute to the current (or last) step; 0 before the first."""
        if self.manager is None or not self._joined:
            return 0
        try:
            return self.manager.num_participants()
        except QuorumUnavailable:
            return 0

    def adopt(self, accelerator: Any) -> None:
        """Heal this accelerator's objects; the last one made is it."""
        self._accelerators.append(weakref.ref(accelerator))

    @property
    def accelerator(self) -> Any:
        for ref in reversed(self._accelerators):
            found = ref()
            if found is not None:
                return found
        raise RuntimeError("no Accelerator was created")

    @contextmanager
    def one_at_a_time(self) -> Iterator[None]:
        """Let one process of this job and machine in at a time: there is no quorum before training.

        Reentrant.
        """
        if self._has_turn:
            yield
            return
        lock = machine_lock("ft_accelerate", self.options.job_id)
        self._has_turn = True
        try:
            yield
        finally:
            self._has_turn = False
            os.close(lock)

    @property
    def _device(self) -> torch.device:
        device: torch.device = self.accelerator.device
        return device

    # ------------------------------------------------------------------ the attempt

    def _begin(self, at: str) -> None:
        """Open an attempt, unless one is open: be in a quorum, heal, serve."""
        self._end_if_told()
        if self.manager is None or self._aside:
            self._join(at)
            return
        if self._open:
            return
        self._start(at)

    def _vote(self) -> bool:
        if self._sigterm.noted:
            self._manager.leave_after_step()
        try:
            committed = self._manager.should_commit()
        except GroupBroken as error:
            end_with_group(error)
        self._open = False
        self.attempts_discarded += not committed
        return committed

    def _start(self, at: str) -> None:
        self._at = at
        manager, self._starting = self._manager, threading.get_ident()
        try:
            manager.start_quorum()
        except GroupBroken as error:
            end_with_group(error)
        finally:
            self._starting = 0
        self._open = self._joined = True
        try:
            rank = manager.participating_rank()
            self._leader, self.contributes = rank == 0, rank is not None
        except QuorumUnavailable:
            return  # the attempt has failed already; its vote tells
        if self._owes_report:
            self._owes_report = False
            self._supervision.tell_joined()

    def _join(self, at: str) -> None:
        """Join (again) and learn where the others are; stay if that place is near.

        The processes of one group get the same state, and so decide alike.
        """
        while True:
            self._end_if_told()
            if self.manager is None:
                self._watch_sigterm()
                self._connect()
            self._aside = False
            try:
                self._start(at)
            except JoinRefused as error:
                if FINISHED not in str(error):
                    raise
                # Nothing is left to do, and nothing has failed.
                log.warning("this process came back too late: %s", error)
                self._leave_for_good()
                raise SystemExit(0) from None
            target = self.position.target
            if target is None or self.position.phase is Phase.LIVE:
                return
            if not target.reachable:
                self._leave("the others are where this process cannot join them")
                time.sleep(UNREACHABLE_PAUSE_S)
                continue
            if self.position.distance > FAR_BATCHES:
                log.info("about %s batches behind: catching up first", self.position.distance)
                self._leave(f"about {self.position.distance} batches behind", keep_state=True)
            return

    def _watch_sigterm(self) -> None:
        """Unless the script has a handler of its own, which stays."""
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            self._sigterm.watch()

    def _is_waiting(self) -> bool:
        """Whether the script waits for peers. Called in a signal handler: takes no lock."""
        if self.manager is None:
            return True
        return self._starting != 0 and not self.manager.in_quorum()

    def _end_if_told(self) -> None:
        """End this process if SIGTERM has come and no step is under way that could be its last."""
        if self._sigterm.noted and not self._open:
            log.warning("ended by SIGTERM; the other replica groups go on")
            self._sigterm.end()

    def _connect(self) -> None:
        self.startup.close()
        allow_objects = self.options.heal_allow_objects
        manager = self.group_ranks.manager(self._device)
        manager.set_state_dict_fns(self._load, self._dump)
        manager.preallocate_state(*(o.optimizer for o in self.accelerator._optimizers))
        if self._sink is not None:
            manager.telemetry.add_sink(self._sink)
        self.reducer.attach(manager)
        lineage = self.group_ranks.sync_initial_state(
            lambda: states.lineage_of_start(self.accelerator, allow_objects=allow_objects),
            give=lambda: states.dump(self.accelerator, None),
            take=self._take_start,
            into=lambda: states.places(self.accelerator),
        )
        manager.load_state_dict({"step": 0, "batches_committed": 0, "lineage": lineage})
        self.manager = manager

    def _take_start(self, state: dict[str, Any]) -> None:
        """Begin with the state of this group's rank 0, as with DistributedDataParallel.

        A pass over data that is under way takes over that process's shuffling, too.
        """
        generators = states.generators(self.accelerator)
        before = [generator.get_state() for generator in generators]
        states.restore(self.accelerator, state, models=True)
        for iteration in self.position.active:
            for generator, mine in zip(generators, before, strict=True):
                known = iteration.generator_state
                if known is not None and torch.equal(known, mine):
                    iteration.generator_state = generator.get_state()

    def _leave(
        self, reason: str = "this process has left for a while", *, keep_state: bool = False
    ) -> None:
        """Leave the quorum, to join it again and heal; the whole group leaves. `keep_state`: what it
        has healed is as new as any if all others die meanwhile."""
        self._open, self._aside = False, True
        self._manager.rejoin(reason, discard_state=not keep_state)

    def _at_exit(self) -> None:
        """The script has ended without `end_training`: in a pass over data, or by an error?"""
        ended = not self.position.active and not hasattr(sys, "last_value")
        self.close(finished=ended and not self._sigterm.noted)

    def _leave_for_good(self, *, finished: bool = False) -> None:
        manager, self.manager, self._open = self.manager, None, False
        self.reducer.detach()
        if manager is not None:
            manager.shutdown(finished=finished and self.live)

    @property
    def _manager(self) -> Manager:
        if self.manager is None:
            raise RuntimeError("this process has left its quorum")
        return self.manager

    def close(self, *, finished: bool = False) -> None:
        """Leave for good; the others go on at once. Idempotent.

        `finished`: the training is at its end; a process that comes later does not begin it anew.
        """
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        self._sigterm.unwatch()
        self.startup.close()
        self.group_ranks.close()
        self._leave_for_good(finished=finished)
        if self._sink is not None:
            self._sink.close()

    # ------------------------------------------------------------------ heal

    def _dump(self) -> dict[str, Any]:
        if threading.get_ident() != self._starting:  # the heal's thread asks where to receive
            return states.places(self.accelerator)
        if self.position.target is not None and self._healed is not None:
            return self._healed  # this script is on its way there, and so are parts of its state
        state = states.dump(self.accelerator, self.position.describe(self._at))
        return tree_map(_copied, state) if self.serve_copies else state

    def _load(self, state: dict[str, Any]) -> None:
        """Take a peer's state, and set out for its place. Called inside `start_quorum`."""
        self._healed = state
        states.restore(self.accelerator, state, models=True)
        target = states.target_in(state)
        self.position.relocate(target)
        log.info(
            "healed; the others are in pass %s over the loaders, batch %s",
            *(target.window or (0, 0)),
        )


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
