"""Shell of the replica's state machine: its socket, its clock, its threads. No policy.

The machine takes events and is never seen from outside: after each event the shell stores the
machine's frozen status, which any thread may read without a lock.

Threads. The *control thread* ("ft-control") sleeps until its socket, a wake-up or the machine's
deadline needs it. The *plane thread* ("ft-plane") configures the process group, which may block,
and starts to fetch states. The training loop's thread submits events. While it waits for the answer
to its vote it drives the socket itself (`vote`), which saves two thread switches per step: the thread
that holds `_io` owns the socket (a lock is a full fence, as ZeroMQ asks for). It polls for the
answer for a moment before it sleeps: a processor that has gone to sleep takes longer to come back
than the lighthouse to answer (0.3 ms less per step, benchmarks/RESULTS.md). Where answers take longer
than that, since another member is slower, it sleeps at once.

Locks. `_io` before `_lock`, never the other way round; effects that touch the socket are queued
under `_lock` and sent by the holder of `_io`.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Protocol

import zmq

from ft_core.replica.events import (
    Abort,
    CastVote,
    Configure,
    Connected,
    Disconnected,
    Effect,
    FetchState,
    Remark,
    ReplicaEvent,
    StopWaiting,
    Transmit,
    TryToReach,
    Withdraw,
)
from ft_core.replica.machine import Replica
from ft_core.replica.status import ReplicaStatus, Stage
from lighthouse.sockets import await_ready
from lighthouse.waits import ABSENT_S, READ_S, Overdue, in_time
from lighthouse.wire.messages import NO_QUORUM, NO_TERM, Message, Request, Term

log = logging.getLogger("ft_core")

Condition = Callable[[ReplicaStatus], bool]
FOREVER_S = 3600.0
GOODBYE_LINGER_S = 1.0
OUTSIDE_LOOK_S = 1.0
"""How often a rank that waits outside looks whether the others still train: nothing wakes it."""
SPIN_S = 0.0005
"""How long the loop's thread looks for an answer before it sleeps."""


class Link(Protocol):
    """One end of the connection to the lighthouse or to the group's leader, such as
    `lighthouse.client.Connection`. One thread at a time."""

    def send(self, message: Request, /) -> bool:
        """Send a request; False if it could not be queued. Never blocks."""

    def receive(self) -> list[Message]:
        """The messages that have come, in order; empty if none has. Never blocks."""

    def events(self) -> Sequence[str]:
        """What happened to the connection since the last call, in order ("disconnected",
        say)."""

    @property
    def sockets(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """What to poll: `receive` and `events` have something where one of the two is
        readable."""

    def close(self, *, linger_s: float = 0.0) -> None:
        """Close it, and give what was sent up to `linger_s` seconds to leave."""


class Plane(Protocol):
    """What the machine's effects act on; each method carries out its effect (`ft_core.replica.events`).
    `configure` and `fetch` run on the plane thread;
    `configure` may block there. The others run anywhere and must not block."""

    def configure(self, effect: Configure) -> None:
        """Connect the process group to the members of a quorum, and tell the machine how that
        ended."""

    def fetch(self, effect: FetchState) -> None:
        """Begin to fetch a state from its sources; a fetch under way ends without a word."""

    def try_to_reach(self, effect: TryToReach) -> None:
        """Find out, in a thread of its own, whether a connection to a member can be made."""

    def abort(self, effect: Abort) -> None:
        """End the collectives of a quorum, and its `configure`, if one is under way."""

    def withdraw(self, effect: Withdraw) -> None:
        """Stop serving the published state to peers, those that are reading it included."""


class Control:
    """See the module's docstring.

    Args:
        replica: the machine; this object is its only user.
        link: to the lighthouse, or to the group's leader.
        plane: carries out the effects on the process group and the state.
        on_remark: gets the machine's remarks (any thread, quick).
        on_place: gets the term that the machine obeys and its newest quorum, before it says anything
            that binds it to them (any thread, quick).
        on_tick: called when the machine's deadline has passed, and when the lighthouse is lost;
            gives events, which are handled, and when it wants to be called again before the next
            deadline (`time.monotonic()`, or None).

    Attributes:
        status: of the machine after its last event. Replaced, never changed. Any thread.
        away_since: `time.monotonic()` since when the lighthouse is silent; None: it is connected.
    """

    def __init__(
        self,
        replica: Replica,
        link: Link,
        plane: Plane,
        *,
        on_remark: Callable[[Remark], None],
        on_place: Callable[[Term, int], None],
        on_tick: Callable[[ReplicaStatus, float], tuple[list[ReplicaEvent], float | None]],
    ) -> None:
        self._replica, self.status = replica, replica.status
        self._link, self._plane = link, plane
        self._on_remark, self._on_tick, self._on_place = on_remark, on_tick, on_place
        self._place = NO_TERM, NO_QUORUM
        self._tick_at: float | None = None
        self._overdue: Overdue | None = None  # something is due; guarded by `_io`
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._io = threading.Lock()
        self._outbox: deque[Request] = deque()
        self._jobs: queue.SimpleQueue[Configure | FetchState | None] = queue.SimpleQueue()
        self._link_fds = tuple(int(s.getsockopt(zmq.FD)) for s in link.sockets)
        self._monitor_told = True  # something has happened to the connection
        self._waiting = 0  # threads in `wait`; guarded by `_lock`
        self._epoll, self._drive_epoll = select.epoll(), select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        for epoll in (self._epoll, self._drive_epoll):
            for fd in (self._wake_fd, *self._link_fds):
                epoll.register(fd, select.EPOLLIN)
        self._planned = 0.0  # when the control thread wakes by itself
        self._resumed_at = 0.0  # when it last did so late: this process had been stopped
        self._prompt = True  # the last answer to a vote came soon: worth spinning for the next
        self._closing = self._closed = False
        self.away_since: float | None = time.monotonic()
        self._crash: BaseException | None = None
        self._threads: list[threading.Thread] = []
        with ExitStack() as undo:
            undo.callback(self.close)
            for name, run in (("ft-control", self._run_control), ("ft-plane", self._run_plane)):
                thread = threading.Thread(target=run, name=name, daemon=True)
                thread.start()
                self._threads.append(thread)
            undo.pop_all()

    # ------------------------------------------------------------------ for the training loop

    def submit(self, event: ReplicaEvent) -> ReplicaStatus:
        """Have the machine handle `event`, and carry out its effects; the status after it.

        Any thread.
        """
        with self._lock:
            status = self._handle(event, time.monotonic())
            self._notify_waiting()
        if self._closing:
            return status  # the report of a heal that was still under way: nothing follows from it
        if self._outbox:
            self._flush()
        elif status.deadline is not None and status.deadline < self._planned:
            self.wake()
        return status

    def wait(self, condition: Condition, deadline: float | None) -> bool:
        """Wait until `condition` holds or `deadline` (time.monotonic) passes; whether it holds. What
        came before, while this process was stopped, counts.

        Raises RuntimeError if the control thread has failed.
        """
        with self._lock:
            overdue, due = Overdue(), None
            if deadline is not None:
                due = max(deadline, time.monotonic(), self._reads_until())
            while not condition(self.status):
                self._raise_crash()
                now = time.monotonic()
                if overdue.passed(due, now):
                    return False
                self._waiting += 1
                try:
                    left = None if due is None else max(0.0, overdue.look_at(due) - now)
                    self._changed.wait(left)
                finally:
                    self._waiting -= 1
        return True

    def _notify_waiting(self) -> None:
        """The status has changed. Holds `_lock`."""
        if self._waiting:
            self._changed.notify_all()

    def await_connected(self, deadline: float) -> bool:
        """Wait until the link is up; whether it is."""
        return self.wait(lambda _: self.away_since is None, deadline)

    def _reads_until(self) -> float:
        """Until then (`time.monotonic()`) what came while this process was stopped may be unread. Any thread."""
        now = time.monotonic()
        return READ_S + (now if now > self._planned + ABSENT_S else self._resumed_at)

    def vote(self, vote: CastVote, deadline: float, outside: Callable[[], None]) -> ReplicaStatus:
        """`submit`, then wait for the outcome, with the socket driven by the calling thread.

        `outside` is called every `OUTSIDE_LOOK_S` while this rank is outside, and may raise.

        The status has no outcome if `deadline` (time.monotonic) has passed, or the rank was
        refused. Then, and after an exception, the outcome is not known to the machine either until
        this is called again. Raises RuntimeError if the control thread has failed. The hot path.
        """
        with self._io:
            messages = self._link_fds[0]
            try:
                self._epoll.modify(messages, 0)  # or each one would wake the control thread, too
                with self._lock:
                    self._handle(vote, time.monotonic())
                    self._notify_waiting()
                return self._await_outcome(deadline, outside)
            except BaseException:  # such as KeyboardInterrupt
                self._stop_waiting()
                raise
            finally:
                self._epoll.modify(messages, select.EPOLLIN)
                wanted = self.status.deadline
                if wanted is not None and wanted < self._planned:
                    self.wake()

    def wake(self) -> None:
        """Let the control thread look at its timers again. Any thread."""
        with self._lock:  # the report of a late heal may come while the descriptor is closed
            if not self._closed:
                os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Send what is queued, stop the threads, close the link."""
        self._closing = True
        self._jobs.put(None)
        self.wake()
        deadline = time.monotonic() + 10.0
        for thread in self._threads:
            in_time(partial(_has_ended, thread), deadline)
        # Here, since that of the control thread may have failed, and a context waits for its sockets.
        self._link.close(linger_s=GOODBYE_LINGER_S)
        with self._lock:
            self._closed = True
            self._epoll.close()
            self._drive_epoll.close()
            os.close(self._wake_fd)

    # ------------------------------------------------------------------ the socket

    def _await_outcome(self, deadline: float, outside: Callable[[], None]) -> ReplicaStatus:
        """Drive the socket in the caller's thread until the step is over. Holds `_io`."""
        began, overdue, ask_at = time.monotonic(), None, math.inf
        while True:
            self._turn()
            status = self.status
            refused = status.stage is not Stage.MEMBER and status.refused
            if status.outcome is not None or refused:
                self._prompt = time.monotonic() - began < 2 * SPIN_S
                return status
            self._raise_crash()
            look_at = deadline
            if (now := time.monotonic()) >= deadline:
                overdue = overdue or Overdue()
                if overdue.passed(deadline, now):
                    return self._stop_waiting()
                look_at = overdue.look_at(deadline)
            if status.outside:
                if now >= ask_at:
                    outside()
                ask_at = min(ask_at, now + OUTSIDE_LOOK_S)
                look_at = min(look_at, ask_at)
            else:
                ask_at = math.inf
            timeout_s = self._timeout(look_at)
            spin_s = began + SPIN_S - time.monotonic() if self._prompt else 0.0
            self._sleep(self._drive_epoll, timeout_s, spin_s)

    def _stop_waiting(self) -> ReplicaStatus:
        """The loop's thread goes without an outcome. Holds `_io`, so that none can come before."""
        with self._lock:
            return self._handle(StopWaiting(), time.monotonic())

    def _sleep(self, epoll: select.epoll, timeout_s: float | None, spin_s: float = 0.0) -> None:
        for fd, _ in await_ready(epoll, timeout_s, spin_s):
            if fd == self._link_fds[1]:
                self._monitor_told = True
            elif fd == self._wake_fd:
                try:
                    os.eventfd_read(self._wake_fd)
                except BlockingIOError:
                    pass  # the other thread has taken it

    def _due(self) -> float | None:
        """When the machine, or `on_tick`, wants to be called."""
        wanted, tick_at = self.status.deadline, self._tick_at
        if wanted is None or tick_at is None:
            return tick_at if wanted is None else wanted
        return min(wanted, tick_at)

    def _timeout(self, deadline: float | None = None) -> float | None:
        due, overdue = self._due(), self._overdue
        if due is not None and overdue is not None:
            due = overdue.look_at(due)
        times = [t for t in (due, deadline) if t is not None]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _turn(self) -> None:
        """Everything that is due now: outbox, events, messages, timers. Holds `_io`.

        A ZeroMQ descriptor reports changes only, and sending may swallow one, so nothing may be
        left unread after the last send.
        """
        while True:
            self._send_outbox()
            told, self._monitor_told = self._monitor_told, False
            events = self._link.events() if told else ()
            messages = self._link.receive()
            now = time.monotonic()
            with self._lock:
                for event in events:
                    self._on_link_event(event, now)
                for message in messages:
                    self._handle(message, now)  # type: ignore[arg-type]
                due = self._due()
                if due is None or due > now:
                    self._overdue = None
                else:
                    self._look_at_timers(due, now, dry=not (events or messages))
                if events or messages:
                    self._notify_waiting()
            if not self._outbox:
                return

    def _look_at_timers(self, due: float, now: float, dry: bool) -> None:
        """Something is due, unless it was this process that was away: then its peers' messages, and the
        collectives, get the time to arrive. Holds `_io` and `_lock`."""
        self._overdue = self._overdue or Overdue()
        if not self._overdue.passed(due, now, dry):
            return
        wanted = self.status.deadline
        if wanted is not None and wanted <= now:
            self._expire(now)
        else:
            self._tick(now)

    def _on_link_event(self, event: str, now: float) -> None:
        if event == "connected":
            self.away_since = None
            self._handle(Connected(), now)
        else:
            self.away_since = self.away_since or now
            self._tick_at = now
            self._handle(Disconnected(), now)

    def _send_outbox(self) -> None:
        while self._outbox:
            # A full queue drops the message: the machine repeats what is not answered.
            self._link.send(self._outbox.popleft())

    def _flush(self) -> None:
        """Send what is queued: here if the socket is free, else by its present owner."""
        if self._io.acquire(blocking=False):
            try:
                self._send_outbox()
            finally:
                self._io.release()
        # Sending may swallow the descriptor's edge; and a present owner may just have looked.
        self.wake()

    # ------------------------------------------------------------------ the machine

    def _handle(self, event: ReplicaEvent, now: float) -> ReplicaStatus:
        """Holds `_lock`."""
        effects = self._replica.handle(event, now)
        # Before the effects: the plane thread reads it.
        self.status = status = self._replica.status
        if effects:
            self._carry_out(effects)
        return status

    def _expire(self, now: float) -> None:
        """The machine's deadline has passed. Holds `_lock`."""
        effects = self._replica.expire(now)
        self.status = self._replica.status
        self._carry_out(effects)
        self._tick(now)

    def _tick(self, now: float) -> None:
        """Holds `_lock`."""
        events, self._tick_at = self._on_tick(self.status, now)
        for event in events:
            self._handle(event, now)
        self._notify_waiting()

    # ------------------------------------------------------------------ effects and threads

    def _carry_out(self, effects: list[Effect]) -> None:
        view = self._replica.view
        place = self._replica.promised, NO_QUORUM if view is None else view.quorum_id
        if effects and place != self._place:
            self._place = place
            self._on_place(*place)
        for effect in effects:
            if isinstance(effect, Transmit):
                self._outbox.append(effect.message)
            elif isinstance(effect, Abort):
                self._plane.abort(effect)
            elif isinstance(effect, Withdraw):
                self._plane.withdraw(effect)
            elif isinstance(effect, TryToReach):
                self._plane.try_to_reach(effect)
            elif isinstance(effect, Remark):
                self._on_remark(effect)
            else:
                self._jobs.put(effect)

    def _run_control(self) -> None:
        try:
            while not self._closing:
                with self._io:
                    self._turn()
                with self._lock:
                    timeout_s = self._timeout()
                    self._planned = time.monotonic() + (
                        FOREVER_S if timeout_s is None else timeout_s
                    )
                self._sleep(self._epoll, timeout_s)
                if (now := time.monotonic()) > self._planned + ABSENT_S:
                    self._resumed_at = now
            with self._io:
                self._send_outbox()
        except BaseException as error:
            self._note_crash(error)

    def _run_plane(self) -> None:
        """Runs effects that take time, in their order."""
        try:
            while (job := self._jobs.get()) is not None:
                if isinstance(job, FetchState):
                    self._plane.fetch(job)
                elif job.quorum_id == self.status.wants_group:
                    self._plane.configure(job)
                # else: revoked already, or superseded by a newer quorum whose Configure follows
        except BaseException as error:
            self._note_crash(error)

    def _note_crash(self, error: BaseException) -> None:
        """A thread has failed: the loop's thread gets that instead of waiting for what never comes."""
        log.exception("fault tolerance: the thread %s failed", threading.current_thread().name)
        with self._lock:
            self._crash = error
            self._notify_waiting()

    def _raise_crash(self) -> None:
        if self._crash is not None:
            raise RuntimeError("fault tolerance stopped working in this process") from self._crash


def _has_ended(thread: threading.Thread, limit_s: float | None) -> bool:
    """Whether it has within that time."""
    thread.join(limit_s)
    return not thread.is_alive()
