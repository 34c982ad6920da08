"""One manager's life with a lighthouse: addresses, threads, timers; opened at the first step."""

from __future__ import annotations

import hashlib
import logging
import math
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import zmq

from ft_core.config import JobOptions
from ft_core.environment import ENV_INTERFACE
from ft_core.errors import GroupBroken, GroupLeft
from ft_core.heal.protocol import WITHHELD
from ft_core.launch.board import slot
from ft_core.process_group import ProcessGroup
from ft_core.replica.events import (
    DISCARDS_STATE,
    Depart,
    Fail,
    Remark,
    ReplicaEvent,
    Tried,
)
from ft_core.replica.group_leader import BROKEN, LEFT
from ft_core.replica.machine import Replica
from ft_core.replica.status import Attempt, ReplicaStatus, Stage
from ft_core.shell.control import OUTSIDE_LOOK_S, Condition, Control, Link
from ft_core.shell.data_plane import DataPlane
from ft_core.shell.group_server import GroupLink, GroupRendezvous, GroupServer
from ft_core.telemetry import WAITING, Telemetry
from lighthouse.client import Connection, new_identity
from lighthouse.config import normalize_address
from lighthouse.errors import (
    JoinRefused,
    LighthouseUnavailable,
    SettingsDiffer,
    TooFewLeft,
    TrainingOver,
)
from lighthouse.own_address import address_that_answers, advertised_host
from lighthouse.process_watch import ProcessWatch, Report
from lighthouse.wire.messages import (
    DECLARE_DEAD,
    DENIED,
    LEFT_OUT,
    NO_QUORUM,
    NOT_HELD,
    OVER,
    TOO_FEW_LEFT,
    UNLIKE,
    JobKey,
    Join,
    Term,
)

log = logging.getLogger("ft_core")

REACH_AGAIN_S = 0.2
LOOK_EVERY_S = 0.25
"""How often a collective that takes longer than this is looked at."""
WHY_IT_WAITS = "a member hangs, or its loop is at another place and calls other collectives"
HANG_TIMEOUTS = 10
"""A loop that was evicted has this many timeouts to come back. Then a supervisor ends it."""
WAIT_TOLD_S = 10.0
"""A loop that has waited this long to be in a quorum says for what."""
LOCAL_PATIENCE_S = 3.0
"""For a lighthouse on this machine that was there a moment ago, before another is started."""


class Session:
    """Owns the ZeroMQ context, the control and plane threads, the heal server and the watcher.

    `rendezvous`: where the ranks of this replica group have met.
    `hangs`: the supervisor was told so, and `back` is due. Read only.
    `into` gives the tree to receive a state in place (heal thread); `waited_s(now)` tells for how
    long the loop has waited for its collectives (control thread).

    Thread: the training loop's, but where said otherwise.
    """

    _starter: threading.Thread | None = None
    """Starts a lighthouse for this job again."""

    def __init__(
        self,
        options: JobOptions,
        process_group: ProcessGroup,
        *,
        replica_id: str,
        room_id: str,
        rendezvous: GroupRendezvous,
        can_heal: bool,
        step: int,
        lineage: str,
        origin: tuple[int, int],
        schema: str,
        telemetry: Telemetry,
        into: Callable[[], Any],
        waited_s: Callable[[float], float],
    ) -> None:
        self.room_id = room_id
        self._options, self._telemetry, self._waited_s = options, telemetry, waited_s
        self.lighthouse = options.lighthouse or _local_lighthouse()
        self._closed = self.hangs = self._told_of_silence = self._told_left_out = False
        limits = options.timeouts
        self._reached, host = _reach(self.lighthouse, options.interface, limits.connect_timeout_s)
        self.plane = DataPlane(process_group, options, host=host, telemetry=telemetry, into=into)
        self._context, self._rendezvous = zmq.Context(), rendezvous
        self._ends = ExitStack()  # of what is open, each also if another fails; the newest first
        self._ends.callback(self._context.destroy, linger=0)  # also of a link half made
        self._ends.callback(self.plane.close)
        with ExitStack() as undo:
            undo.callback(self._ends.close)
            link, self.replica_id, identity = self._connect(host, replica_id)
            job = JobKey(options.job_id, room_id)
            template = Join(
                job=job,
                name=options.name,
                replica_id=self.replica_id,
                step=step,
                lineage=lineage,
                addresses=(self.plane.address(),),
                min_replicas=options.min_replicas,
                expected_replicas=options.expected_replicas,
                can_heal=can_heal,
                group_commit=options.group_commit,
                schema=schema_digest(schema),
                schema_text=schema[:1500],
                genesis=origin[0],
                held=origin[1],
            )
            self._control_of(template, link, identity)
            undo.pop_all()

    def _control_of(self, template: Join, link: Link, identity: bytes) -> None:
        """Start what works the link, and what watches this process."""
        limits, job, replica_id = self._options.timeouts, template.job, template.replica_id
        wait_s, rule = limits.resend_s, self._options.participation
        replica = Replica(template, resend_s=wait_s, revoke_grace_s=wait_s, rule=rule)
        self._watch: ProcessWatch | None = None
        if self._options.watch_process:
            self._watch = ProcessWatch(self._reached, limits, identity)
            self._ends.callback(self._watch.close)
            self._watch.start([Report(job, replica_id)])
        self.control = Control(
            replica,
            link,
            self.plane,
            on_remark=self._on_remark,
            on_place=lambda promised, quorum_id: self._record(job, replica_id, promised, quorum_id),
            on_tick=self._on_tick,
        )
        self._ends.callback(self.control.close)
        self.plane.report = self.control.submit

    def _connect(self, host: str, replica_id: str) -> tuple[Link, str, bytes]:
        """(the link to the lighthouse or to the group's leader, the group's replica_id, the identity
        that it presents to the lighthouse).

        `replica_id`: of a group whose leader is this rank.
        """
        options, limits, self._host = self._options, self._options.timeouts, host
        if options.group_world_size == 1:
            identity = new_identity(replica_id)
            own = Connection(
                self._reached, identity=identity, timeouts=limits, context=self._context
            )
            return own, replica_id, identity
        if (leader := self._rendezvous.leader) is None:
            group = GroupServer(
                options.group_world_size,
                host=host,
                lighthouse=self._reached,
                replica_id=replica_id,
                timeouts=limits,
                on_silence=self._on_silence,
            )
            self._ends.callback(group.close)
            leader = group.leader
            self._rendezvous.announce(leader)
        link = GroupLink(leader, options.group_rank, limits, self._context)
        return link, leader.replica_id, leader.identity.encode()

    def check_refused(self) -> None:
        """Raises JoinRefused (TrainingOver, TooFewLeft, SettingsDiffer) if the lighthouse refuses this replica group, GroupBroken
        (GroupLeft) if the group has lost a rank (has left with one that was told to end)."""
        status = self.control.status
        if status.refused:
            if status.reason.startswith(BROKEN):  # by another rank that has found this before?
                self.refuse_if_others_are_past()
            if status.reason.startswith(LEFT):
                raise GroupLeft(status.reason)
            if status.reason.startswith(BROKEN):
                raise GroupBroken(status.reason)
            if OVER in status.reason:
                raise TrainingOver(status.reason)
            if status.reason.startswith(TOO_FEW_LEFT):
                raise TooFewLeft(status.reason)
            denied = status.reason.startswith(DENIED) and WITHHELD not in status.reason
            unlike = denied or UNLIKE in status.reason
            raise (SettingsDiffer if unlike else JoinRefused)(status.reason)

    def await_lighthouse(self) -> None:
        """Raises LighthouseUnavailable unless a lighthouse answers within the connect timeout."""
        limit_s = self._options.timeouts.connect_timeout_s
        deadline = time.monotonic() + limit_s
        while not self._options.lighthouse and time.monotonic() < deadline:
            if self.control.await_connected(min(deadline, time.monotonic() + LOCAL_PATIENCE_S)):
                return
            # The one on this machine that answered a moment ago has ended (idle or killed).
            _local_lighthouse()
        soon = time.monotonic() + max(self._options.timeouts.heartbeat_timeout_s, LOCAL_PATIENCE_S)
        if soon < deadline and not self.control.await_connected(soon):
            self._tell_of_silence(deadline - time.monotonic())
        if not self.control.await_connected(deadline):  # a later call may find one
            raise LighthouseUnavailable(
                f"no lighthouse answers at {self.lighthouse} within {limit_s:g} s: start one "
                "with `lighthouse --bind tcp://0.0.0.0:29510` and set TORCHFT_LIGHTHOUSE to "
                "its address"
            )

    def wait_for(self, condition: Condition, deadline: float | None) -> bool:
        """Wait until `condition` holds; raises LighthouseUnavailable if the lighthouse stays
        away for the connect timeout meanwhile, and TrainingOver as soon as the supervisor of the whole job
        knows that all others have ended the training, where this rank is out of it; after the connect timeout
        also if one of them has, and those that are left can't train without it."""
        limit_s, began = self._options.timeouts.connect_timeout_s, time.monotonic()
        looks_s, tell_at = OUTSIDE_LOOK_S if slot().whole else limit_s, began + WAIT_TOLD_S
        while True:
            away, now = self.control.away_since, time.monotonic()
            next_look = min(limit_s + (now if away is None else away), now + looks_s, tell_at)
            until = next_look if deadline is None else min(deadline, next_look)
            if self.control.wait(condition, until):
                return True
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                return False
            if now >= tell_at:
                tell_at = math.inf
                self._tell_what_is_waited_for()
            if self.control.status.outside:
                self.refuse_if_others_are_past()
                if now >= began + limit_s:
                    self._refuse_if_another_is_past()
            away = self.control.away_since
            if away is not None and now >= away + limit_s:
                raise LighthouseUnavailable(
                    f"the lighthouse at {self.lighthouse} has been away for {limit_s:g} s"
                )

    def _tell_what_is_waited_for(self) -> None:
        status = self.control.status
        told = DECLARE_DEAD in status.reason  # at once
        if status.stage is Stage.WAITING and self._options.group_rank == 0 and not told:
            name, where = self._options.name, self.lighthouse
            log.warning("replica group %s: %s (lighthouse %s)", name, status.reason, where)

    def refuse_if_others_are_past(self) -> None:
        """This rank is outside: raises TrainingOver where `wait_for` does."""
        if self._follows and slot().others_are_past():
            raise TrainingOver(f"{OVER} in all other processes")

    def refuse_to_go_back(self, status: ReplicaStatus) -> None:
        """A step begins: raises TrainingOver in a quorum that goes back behind the job's last step where the
        supervisor of the whole job knows that a process has ended the training. It would have another end."""
        if status.view is not None and NOT_HELD in status.view.reason:
            self._refuse_if_another_is_past()

    def _refuse_if_another_is_past(self) -> None:
        if self._follows and slot().another_is_past():
            raise TrainingOver(f"{OVER} in another process, at a later step")

    @property
    def _follows(self) -> bool:
        # With a commit of its own a group may go on alone, also after it was away.
        return self._options.trains and not self._options.group_commit

    def evicted(self) -> bool:
        """Whether this rank is `outside`: its peers may have a quorum without it. If this process was stopped
        just now: once its threads have had time to read that. Any thread."""
        return self.control.wait(lambda status: status.outside, time.monotonic())

    def _on_tick(
        self, status: ReplicaStatus, now: float
    ) -> tuple[list[ReplicaEvent], float | None]:
        """Control thread."""
        tell_at = self._look_at_lighthouse(now)
        events, look_at = self._check_stall(status, now)
        return events, min((at for at in (tell_at, look_at) if at is not None), default=None)

    def _look_at_lighthouse(self, now: float) -> float | None:
        """Say, once, that the lighthouse does not answer; returns when to look again."""
        limits = self._options.timeouts
        control = getattr(self, "control", None)  # its threads run before it is assigned
        away = None if control is None else control.away_since
        if away is None or self._options.group_world_size > 1:  # the group's leader says it
            self._told_of_silence = False
            return None
        if now < away + limits.heartbeat_timeout_s:
            return away + limits.heartbeat_timeout_s
        if not self._told_of_silence and not self._closed:
            self._told_of_silence = True
            self._on_silence(away + limits.connect_timeout_s - now)
        return None

    def _on_silence(self, left_s: float) -> None:
        """The lighthouse has been silent for the heartbeat timeout: say so. One that was started for this job, and is
        gone with the process that keeps it, is started again. Control thread, or that of the group's leader."""
        self._tell_of_silence(left_s)
        if not self._options.lighthouse and not self._closed:
            starter = threading.Thread(target=_start_again, name="ft-lighthouse", daemon=True)
            try:
                starter.start()
            except RuntimeError as failure:  # no threads are left: another process may start one
                log.warning("could not start a lighthouse again: %s", failure)
                return
            self._starter = starter

    def _tell_of_silence(self, left_s: float) -> None:
        until = time.strftime("%H:%M:%S", time.localtime(time.time() + left_s))
        log.warning(
            "replica group %s: the lighthouse at %s does not answer; this process waits for it until %s",
            self._options.name,
            self.lighthouse,
            until,
        )

    def _check_stall(
        self, status: ReplicaStatus, now: float
    ) -> tuple[list[ReplicaEvent], float | None]:
        """Control thread: a collective that takes too long waits for a member that hangs, or that
        can no longer be reached. (What follows from it, when to look again)."""
        if status.attempt is not Attempt.BOUND:
            return [], None
        patience_s, waited_s = self._patience_s(status), self._waited_s(now)
        if waited_s < LOOK_EVERY_S:
            return [], None
        missed = self.plane.unanswered()
        if missed is not None:
            # The next quorum does without the pair: it need not fail to connect first.
            return [
                *([Tried(missed, ())] if missed else []),
                Fail("a member's machine does not confirm what is sent to it", follows=True),
            ], None
        if waited_s < patience_s:
            return [], now + LOOK_EVERY_S
        return [Fail(f"a collective waited {waited_s:.1f} s: {WHY_IT_WAITS}", stalled=True)], None

    def _patience_s(self, status: ReplicaStatus) -> float:
        """How long a collective may wait. Any thread."""
        view, limits = status.view, self._options.timeouts
        healing = view is not None and any(m.healing for m in view.members)
        return limits.heal_timeout_s if healing else limits.timeout_s

    def fail(self, reason: str, waited_s: float, *, follows: bool) -> None:
        """The step has failed: tell the others now. `waited_s`: for how long, if it was in a collective. The
        process group has a timeout of its own, which may pass before `_check_stall` looks: that a member
        hangs must be known all the same, or it takes part in the next attempt, too. `follows`: see `Vote`.
        Any thread."""
        stalled = waited_s >= self._patience_s(self.control.status)
        self.control.submit(Fail(reason, stalled=stalled, follows=follows))

    def close(self, reason: str = "shutdown") -> None:
        """Leave, and free threads, sockets, processes. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            with self._ends:
                self.back()
                if self.control.status.stage is not Stage.LEFT:
                    reduced = self.plane.process_group.idle and not self._waited_s(time.monotonic())
                    self.control.submit(Depart(reason, reduced))
                self.plane.interrupt()
        finally:
            if self._starter is not None:
                self._starter.join()
            self._rendezvous.close()

    def _record(self, job: JobKey, replica_id: str, promised: Term, quorum_id: int) -> None:
        """What the watcher says when this process dies."""
        if quorum_id != NO_QUORUM:
            self._told_left_out = False
        if self._watch is not None:
            self._watch.update([Report(job, replica_id, promised, quorum_id)])

    def back(self) -> None:
        """The loop, which was evicted since it did not come to its vote, does not hang."""
        if self.hangs:
            self.hangs = False
            slot().hangs(self._options.group_rank, 0.0)

    def _on_remark(self, remark: Remark) -> None:
        text = remark.text
        if remark.hangs and not self._closed:
            self.hangs = True
            patience_s = HANG_TIMEOUTS * self._options.timeouts.timeout_s
            slot().hangs(self._options.group_rank, time.monotonic() + patience_s)
        own = f"{self._options.name}: "
        line = own + text.removeprefix(own)
        if DECLARE_DEAD in text:  # a person has to do something
            log.warning(
                "%s (lighthouse %s, job id %s)", line, self.lighthouse, self._options.job_id
            )
        elif f": {self._options.name} {LEFT_OUT}" in text and not self._told_left_out:
            self._told_left_out = True
            log.warning(
                "%s. This process tells the others that it is at %s: if that does not lead here from their "
                "hosts, set %s to an interface or an IP address of this host that does",
                line,
                self._host,
                ENV_INTERFACE,
            )
        else:  # a state that differs may be the first that is seen of memory that is defective
            log.log(logging.WARNING if DISCARDS_STATE in text else logging.INFO, "%s", line)
        self._telemetry.emit(WAITING, reason=text)


def schema_digest(schema: str) -> str:
    """Of what all members must have alike."""
    return hashlib.blake2b(schema.encode(), digest_size=8).hexdigest()


def _reach(address: str, interface: str, limit_s: float) -> tuple[str, str]:
    """(`address` of a lighthouse, as one that can be connected to; this host's, as it is told to the
    other members). Waits until the lighthouse's name resolves, and there is a route to it.

    Raises ValueError if `address` is malformed or there is no such interface, LighthouseUnavailable
    after `limit_s`.
    """
    normal = normalize_address(address)
    named = advertised_host(normal, interface) if interface else ""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            reached = address_that_answers(normal)
            return reached, named or advertised_host(normal, "", reached)
        except ValueError as error:
            if time.monotonic() >= deadline:
                raise LighthouseUnavailable(f"{error}; it is the lighthouse's") from error
            time.sleep(REACH_AGAIN_S)


def _local_lighthouse() -> str:
    from ft_core.shell.local_lighthouse import ensure_local_lighthouse

    return ensure_local_lighthouse()


def _start_again() -> None:
    # It may only be slow, and where none can be started the wait ends by itself.
    with suppress(LighthouseUnavailable):
        _local_lighthouse()
