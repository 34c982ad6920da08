"""Sockets and a thread for the group's leader (`ft_core.replica.group_leader`); how ranks find it.

Rank 0 of a replica group of several ranks runs a `GroupServer`; every rank, rank 0 too, connects
to it with a `GroupLink` in place of a connection to the lighthouse. The leader's address travels
through the replica group's own rendezvous store (MASTER_ADDR, MASTER_PORT).
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast, get_args

import zmq

from ft_core.config import JobOptions
from ft_core.errors import QuorumUnavailable
from ft_core.replica.group_leader import (
    BROKEN,
    LEFT,
    GroupEffect,
    GroupLeader,
    SendUp,
    peer_of,
    rank_of,
)
from ft_core.replica.status import INITIAL, RanksHold
from ft_core.shell.group_store import RollCall, group_store
from lighthouse.client import Connection, new_identity
from lighthouse.config import MOST_STRANGERS, Timeouts
from lighthouse.endpoint import Endpoint
from lighthouse.errors import ProtocolError
from lighthouse.own_address import bracketed
from lighthouse.sockets import ServerLimits, Waiter
from lighthouse.waits import READ_S, Overdue
from lighthouse.wire import codec
from lighthouse.wire.messages import JobKey, Join, Message, Peer, Refused, Request

log = logging.getLogger("ft_core")

IN_GROUP_SILENCE_S = 5.0
"""A rank that is silent for this long ends its whole group, which must then be restarted. Towards the
lighthouse a silence costs one step and is noticed much sooner; here a busy machine must not do it."""

_REQUESTS: tuple[type, ...] = get_args(Request)


@dataclass(frozen=True, slots=True)
class Leader:
    """Where the leader listens, the replica group's id until its next restart, and the identity that
    it presents to the lighthouse."""

    address: str
    replica_id: str
    identity: str

    @property
    def secret(self) -> str:
        """What the ranks present to the leader."""
        return self.identity.rpartition(".")[2]


_SERVICE = "replica group"


_leaders = codec.MessageCodec(1, {"leader": Leader})


class GroupServer:
    """The leader's thread. `leader` is what the ranks need to connect.

    Args:
        group_world_size: how many ranks.
        host: IP address to listen on.
        lighthouse, replica_id, timeouts: as for a `Connection`.
        on_silence: called, in this thread, when the lighthouse has been silent for the heartbeat timeout, with
            the seconds that it has left to answer.

    Raises what the system does where it has no thread, port or descriptor left; nothing stays open then.
    """

    def __init__(
        self,
        group_world_size: int,
        *,
        host: str,
        lighthouse: str,
        replica_id: str,
        timeouts: Timeouts,
        on_silence: Callable[[float], None] = lambda left_s: None,
    ) -> None:
        self._machine = GroupLeader(group_world_size)
        self._size = group_world_size
        self._timeouts, self._on_silence = timeouts, on_silence
        self._lighthouse = lighthouse
        self._ranks: dict[Peer, Peer] = {}  # the machine's name of a rank: its connection
        self._job = JobKey()
        self._away_since: float | None = time.monotonic()
        self._overdue = Overdue()
        self._told_of_silence = True  # until it has answered once: ranks say it at their start
        self._context: zmq.Context[Any] = zmq.Context()
        with contextlib.ExitStack() as undo:  # no thread or descriptor may be left
            undo.callback(self._context.destroy, linger=0)
            self._open(host, new_identity(replica_id), replica_id)
            self._wake_read, self._wake_write = socket.socketpair()
            undo.callback(self._wake_read.close)
            undo.callback(self._wake_write.close)
            self._thread = threading.Thread(target=self._run, name="ft-group", daemon=True)
            self._thread.start()
            undo.pop_all()

    def _open(self, host: str, identity: bytes, replica_id: str) -> None:
        timeouts = self._timeouts
        self._endpoint = Endpoint(
            self._context,
            f"tcp://{bracketed(host)}:0",
            _in_group(timeouts),
            service=_SERVICE,
            admits=self._admits,
            # Ranks read, or are gone after `IN_GROUP_SILENCE_S`.
            limits=ServerLimits(queued=0, strangers=MOST_STRANGERS + self._size),
        )
        self.leader = Leader(self._endpoint.address, replica_id, identity.decode())
        self._upstream = Connection(
            self._lighthouse,
            identity=identity,
            timeouts=timeouts,
            context=self._context,
        )

    def close(self) -> None:
        """Stop; queued messages to ranks and lighthouse have a second to be sent. Any thread. Idempotent."""
        with contextlib.suppress(OSError):  # it was closed before
            # Not by `close` alone: a process that was forked from this one has a copy.
            self._wake_write.shutdown(socket.SHUT_WR)
        self._wake_write.close()
        self._thread.join()
        self._context.term()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            with Waiter(*self._endpoint.polled, *self._upstream.sockets, self._wake_read) as waiter:
                self._serve(waiter)
        except Exception:
            log.exception("fault tolerance: the replica group's leader failed")
        finally:
            self._endpoint.close(linger_ms=1_000)
            self._upstream.close(linger_s=1.0)
            self._wake_read.close()

    def _serve(self, waiter: Waiter) -> None:
        while True:
            ready = waiter.wait(self._sleep_ms())
            now = time.monotonic()
            self._take_requests()
            if self._wake_read in ready:
                return  # after the last requests: a leave is among them
            self._take_replies(now)
            for peer in self._endpoint.take_lost(dry=True):
                self._apply(self._machine.disconnected(_name(peer)))
            self._look_at_lighthouse(now)

    def _sleep_ms(self) -> int | None:
        away = self._away_since
        limits = self._timeouts
        told = self._told_of_silence
        patience_s = limits.connect_timeout_s if told else limits.heartbeat_timeout_s
        until = None if away is None else self._overdue.look_at(away + patience_s)
        return self._endpoint.sleep_ms(until)

    def _admits(self, identity: str) -> bool:
        rank, _, secret = identity.partition(".")
        return hmac.compare_digest(secret, self.leader.secret) and (
            rank_of(rank.encode()) is not None
        )

    def _take_requests(self) -> None:
        self._endpoint.attend()
        while (entry := self._endpoint.receive()) is not None:
            peer, data = entry
            try:
                message = codec.decode(data)
            except ProtocolError as error:
                log.warning("replica group: dropped a frame that is no message: %s", error)
                self._endpoint.blame(peer)
                continue
            if not isinstance(message, _REQUESTS):
                self._endpoint.blame(peer)
                continue
            if isinstance(message, Join):
                self._job = message.job
            self._ranks[_name(peer)] = peer
            self._apply(self._machine.handle(_name(peer), cast(Request, message)))

    def _take_replies(self, now: float) -> None:
        for event in self._upstream.events():
            if event == "connected":
                self._away_since, self._told_of_silence = None, False
                if self._machine.unanswered is not None:
                    self._upstream.send(self._machine.unanswered)
            else:
                self._away_since = now
        for message in self._upstream.receive():
            self._apply(self._machine.from_lighthouse(message))  # type: ignore[arg-type]

    def _look_at_lighthouse(self, now: float) -> None:
        limit_s, away = self._timeouts.connect_timeout_s, self._away_since
        if away is None:
            return
        if not self._told_of_silence and now >= away + self._timeouts.heartbeat_timeout_s:
            self._told_of_silence = True
            self._on_silence(away + limit_s - now)
        if self._overdue.passed(away + limit_s, now):
            self._away_since = None
            reason = f"{BROKEN}no lighthouse at {self._lighthouse} for {limit_s:g} s"
            self._send((peer_of(r) for r in range(self._size)), Refused(self._job, reason))

    def _apply(self, effects: Sequence[GroupEffect]) -> None:
        for effect in effects:
            if isinstance(effect, SendUp):
                self._upstream.send(effect.message)
            else:
                self._send(effect.peers, effect.message)

    def _send(self, ranks: Iterable[Peer], message: Message) -> None:
        # One that has not connected yet asks again; a lost one is noticed.
        self._endpoint.send(
            [self._ranks[rank] for rank in ranks if rank in self._ranks], codec.encode(message)
        )


def _name(peer: Peer) -> Peer:
    """The machine's name of the rank behind a connection."""
    return peer.partition(b".")[0]


class GroupLink:
    """A rank's end: a `Connection` to the leader. Its loss ends the group."""

    def __init__(self, leader: Leader, rank: int, timeouts: Timeouts, context: Any) -> None:
        self._connection = Connection(
            leader.address,
            identity=b"%s.%s" % (peer_of(rank), leader.secret.encode()),
            timeouts=_in_group(timeouts),
            context=context,
            service=_SERVICE,
        )
        self.sockets = self._connection.sockets
        self._lost = False
        self._over = False  # the group has left: its leader may end

    def send(self, message: Request, /) -> bool:
        """As `Connection.send`."""
        return self._connection.send(message)

    def receive(self) -> list[Message]:
        """As `Connection.receive`; the last message is a `Refused` if the leader is gone."""
        messages = self._connection.receive()
        if any(isinstance(m, Refused) and m.reason.startswith(LEFT) for m in messages):
            self._over = True
        if self._lost and not self._over:
            self._lost = False
            messages.append(
                Refused(
                    JobKey(),
                    f"{BROKEN}its leader (rank 0) is gone; this rank "
                    "ends so that the launcher can restart the group",
                )
            )
        return messages

    def events(self) -> Sequence[str]:
        """As `Connection.events`."""
        events = self._connection.events()
        self._lost = self._lost or "disconnected" in events
        return events

    def close(self, *, linger_s: float = 0.0) -> None:
        """As `Connection.close`."""
        self._connection.close(linger_s=linger_s)


def _in_group(timeouts: Timeouts) -> Timeouts:
    """With the timeouts of links within a group."""
    silence_s = min(IN_GROUP_SILENCE_S, timeouts.timeout_s / 4)
    return Timeouts.derive(
        timeouts.timeout_s, heartbeat_timeout_s=max(silence_s, timeouts.heartbeat_timeout_s)
    )


# ---------------------------------------------------------------- the rendezvous


_LEFT_OVER = (
    ". WORLD_SIZE, RANK and MASTER_ADDR of the environment say that there are so many: unset them if they are "
    "left over from another job"
)


class GroupRendezvous:
    """The place in the replica group's own store where the ranks of one manager meet.

    Like torch's "env://", rank 0 runs the store unless the launcher does; it keeps this object as
    long as other ranks may come. All ranks create their managers of one job in the same order.

    Attributes:
        leader: the group's, for ranks other than 0 that have met.
    """

    def __init__(self, options: JobOptions) -> None:
        self._options = options
        self._rank, self._size = options.group_rank, options.group_world_size
        self._store: Any = None
        self._roll_call = RollCall(f"ft_core/leader/{options.job_id}", self._rank, self._size)
        self._key = ""  # of this manager in the store
        self.leader: Leader | None = None

    def meet(self, mine: str, limit_s: float, as_rank_0: Callable[[], str]) -> str:
        """Wait until all ranks are here. Returns the lineage of the state with which this rank begins; `mine`: of
        what it holds itself.

        Where ranks hold shards and all of them begin, that of all shards in the order of the ranks. Where they begin
        with unlike copies, that of `as_rank_0`, which all of them call.

        Raises QuorumUnavailable after `limit_s`: a later call goes on with what is there. ValueError
        if the store has no address.
        """
        if self._size == 1:
            return mine
        from torch.distributed import DistError, DistStoreError

        deadline = time.monotonic() + limit_s
        try:
            store = self._open(deadline)
            ranks = [f"{self._key}/{rank}" for rank in range(self._size)]
            store.set(ranks[self._rank], mine)
            store.wait(ranks, _left(deadline))
            lineage = self._lineage([store.get(key).decode() for key in ranks], mine, as_rank_0)
            if self._rank:
                store.wait([self._key], _left(deadline))
                self.leader = _leaders.decode(store.get(self._key))
                self.close()  # from here on only rank 0 keeps the store
        except DistError as error:
            if not isinstance(error, DistStoreError):
                self.close()  # it is gone: the next call looks for it again
            left_over = _LEFT_OVER if "WORLD_SIZE" in os.environ else ""
            raise QuorumUnavailable(
                f"no quorum within {limit_s:g} s: not all {self._size} ranks of replica group "
                f"{self._options.name} are here ({error}){left_over}"
            ) from error
        return lineage

    def _lineage(self, each: list[str], mine: str, as_rank_0: Callable[[], str]) -> str:
        if not all(lineage.startswith(INITIAL) for lineage in each):
            return mine
        if self._options.ranks_hold is RanksHold.COPIES:
            return mine if len(set(each)) == 1 else as_rank_0()
        return INITIAL + hashlib.blake2b("|".join(each).encode(), digest_size=16).hexdigest()

    def from_rank_0(self, name: str, decide: Callable[[], str], limit_s: float) -> str:
        """What `decide` returns in rank 0, which calls it once in the life of this manager.

        Raises as `meet`, before which all ranks call it.
        """
        if self._size == 1:
            return decide()
        from torch.distributed import DistError

        deadline = time.monotonic() + limit_s
        try:
            store = self._open(deadline)
            key = f"{self._key}/{name}"
            if self._rank == 0 and not store.check([key]):
                store.set(key, decide())
            store.wait([key], _left(deadline))
            return str(store.get(key).decode())
        except DistError as error:
            raise QuorumUnavailable(
                f"no quorum within {limit_s:g} s: rank 0 of replica group {self._options.name} is not "
                f"here ({error})"
            ) from error

    def _open(self, deadline: float) -> Any:
        """The store, to which this rank is connected, and in which all ranks know this manager's key."""
        options = self._options
        if self._store is None:
            where, left_s = (options.store_addr, options.store_port), deadline - time.monotonic()
            self._store = group_store(*where, max(left_s, 0.001), hosts=self._rank == 0)
            self._store.set_timeout(timedelta(seconds=options.timeouts.connect_timeout_s))
        if not self._key:
            self._key = self._roll_call.key(self._store, _left(deadline).total_seconds())
        return self._store

    def announce(self, leader: Leader) -> None:
        """Rank 0: let the other ranks find the leader."""
        self._store.set(self._key, _leaders.encode(leader))

    def close(self) -> None:
        """Leave the store. Idempotent."""
        self._store = None


def _left(deadline: float) -> timedelta:
    """How long to wait for keys. Those that are there are read, also by a process that was stopped."""
    return timedelta(seconds=max(READ_S, deadline - time.monotonic()))
