"""The lighthouse's shell: an endpoint, a clock and one thread around the pure machine.

Theory. The thread sleeps until a frame, a connection event, a command of another thread or the
machine's deadline, whichever is first; there is no polling period. It never waits for a peer: one
that does not read its answers is disconnected. The death of a process shows within milliseconds as
a closed connection; `routes.py` finds out whose it was. `status_desk.py` answers those that ask for
the status.

Nothing that a peer sends ends the thread. `endpoint.py` keeps strangers out; what is not a message is
counted and dropped; and a job whose rules fail on a message starts over, as after a restart of the
lighthouse. An error of the thread itself ends it: a fresh process costs the replica groups no more
than a reconnect.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import secrets
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, get_args

import zmq

from lighthouse import sockets
from lighthouse.client import SERVICE
from lighthouse.config import LighthouseConfig, normalize_address
from lighthouse.endpoint import Complaints, Endpoint, raise_descriptor_limit
from lighthouse.errors import ProtocolError, VersionMismatch
from lighthouse.journal import Journal
from lighthouse.machine.job import Effect, Note, Remember, Send
from lighthouse.machine.jobs import Lighthouse
from lighthouse.status_desk import StatusDesk, refuse
from lighthouse.waits import Overdue
from lighthouse.wire import codec
from lighthouse.wire.messages import (
    MAX_NONCE,
    JobKey,
    Peer,
    Refused,
    Request,
    StatusRequest,
    Vote,
    printable,
)

log = logging.getLogger("lighthouse")

BATCH_MESSAGES = 4_096
"""Frames handled before connection events and deadlines get their turn."""
LOOK_S = 0.02
"""How long the server, after it was away, waits for what ZeroMQ's thread has to hand over."""
SPIN_S = 0.0003
"""How long votes are looked for before the thread sleeps: 0.1 ms less per step, benchmarks/RESULTS.md."""
SHUTDOWN_LINGER_MS = 200

STATUS_COST = 50
"""Of a question for the status, in what a connection may cost (`endpoint.COST_A_SECOND`)."""

_REQUESTS: tuple[type, ...] = get_args(Request)


@dataclass(slots=True)
class Stats:
    """Counters since the start. All but `connections` only grow."""

    received: int = 0
    sent: int = 0
    malformed: int = 0
    """Frames that were not requests of this protocol; dropped."""
    other_versions: int = 0
    """Frames of another protocol version; answered so that the sender can say so."""
    slow_peers: int = 0
    """Messages that were dropped because the receiver's queue was full; it was disconnected."""
    no_route: int = 0
    """Messages to peers that were gone already."""
    lost_peers: int = 0
    """Peers whose connection ended."""
    refused: int = 0
    """Connections that were turned away in the handshake: not of this protocol."""
    disconnected: int = 0
    """Connections that the lighthouse has ended: too many messages, or answers not read."""
    failures: int = 0
    """Jobs that were started over because of an internal error, which the log tells."""
    connections: int = 0

    def as_dict(self) -> dict[str, int]:
        """All counters, by name."""
        return {name: getattr(self, name) for name in self.__slots__}


class LighthouseServer:
    """A lighthouse in a thread of this process; `address()` is where it listens.

    All methods may be called from any thread. A `with` block ends with `shutdown`.

    Args:
        bind: "tcp://host:port"; port 0 means any free one, host 0.0.0.0 or * all interfaces.
        config: all other options.
        min_replicas, join_timeout_ms: instead of `config`, as in torchft.
        state_file: see `lighthouse.journal`; None: nothing is kept over a restart.
        on_note: called in the server's thread with each line for the log (one per quorum change,
            none per step), and must return at once; None: the logger "lighthouse" gets it.

    Raises ValueError for a malformed address, for `config` together with torchft's options, and
    for a state file that can't be used; OSError if the address can't be bound.
    """

    def __init__(
        self,
        bind: str = "tcp://127.0.0.1:0",
        *,
        config: LighthouseConfig | None = None,
        min_replicas: int | None = None,
        join_timeout_ms: float | None = None,
        state_file: Path | None = None,
        on_note: Callable[[Note], None] | None = None,
    ) -> None:
        self.config = _config(config, min_replicas, join_timeout_ms)
        endpoint = normalize_address(bind, to_connect=False)
        self._on_note = on_note or self._log_note
        with contextlib.ExitStack() as undo:  # no thread or descriptor may be left
            self._open(endpoint, state_file, undo)
            undo.pop_all()

    def _open(self, endpoint: str, state_file: Path | None, undo: contextlib.ExitStack) -> None:
        self._journal = None
        if state_file is not None:
            self._journal = Journal(Path(state_file), max_jobs=self.config.max_jobs)
            undo.callback(self._journal.close)
        remembered = self._journal.remembered if self._journal else None
        self._machine = Lighthouse(
            self.config,
            lambda: 1 + secrets.randbelow(MAX_NONCE),
            remembered,
            on_failure=self._on_failure,
        )
        raise_descriptor_limit()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        undo.callback(self._context.destroy, linger=0)
        self._endpoint = Endpoint(
            self._context,
            endpoint,
            self.config.timeouts,
            service=SERVICE,
            keeps=self._machine.serves,
        )
        self._wake_read, self._wake_write = socket.socketpair()
        undo.callback(self._wake_read.close)
        undo.callback(self._wake_write.close)
        self.bound = self._endpoint.address
        """Where it listens, as it was bound: "tcp://0.0.0.0:29510" for all interfaces."""
        self._address = sockets.reachable(self.bound)
        self.stats = Stats()
        self._votes_missing = False  # the last request was a vote, and others' have to come
        self._prompt = True  # the last of them came soon: worth looking for the next
        self._complaints = Complaints()
        self._encoder = codec.Encoder()
        self._commands: queue.SimpleQueue[Future[str] | None] = queue.SimpleQueue()
        self._wake_read.setblocking(False)
        # Guards the sending end of the wake-up pair; a signal handler may interrupt its holder.
        self._lock = threading.RLock()
        self._failure: BaseException | None = None
        self._desk = StatusDesk(self._machine.statuses, self._server_status, self._wake)
        undo.callback(self._desk.close)
        self._thread = threading.Thread(target=self._run, name="lighthouse", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ any thread

    def address(self) -> str:
        """ "tcp://host:port", where other hosts can reach it if `bind` lets them."""
        return self._address

    def status(self) -> dict[str, Any]:
        """All jobs and the server's counters, as plain JSON types; see docs/lighthouse.md.

        Raises RuntimeError if the server has ended.
        """
        answer: Future[str] = Future()
        if not self._command(answer):
            raise RuntimeError("this lighthouse has been shut down")
        status: dict[str, Any] = json.loads(answer.result())
        return status

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of the server's thread; False after `timeout_s`.

        Raises RuntimeError if an internal error ended it.
        """
        self._thread.join(timeout_s)
        if self._failure is not None:
            raise RuntimeError(
                f"the lighthouse stopped on an internal error: {self._failure!r}; start it "
                "again (no step is lost) and report this"
            ) from self._failure
        return not self._thread.is_alive()

    def request_stop(self) -> None:
        """Like `shutdown`, but returns at once; a signal handler may call it."""
        self._command(None)

    def shutdown(self) -> None:
        """Stop, and release port, thread and files. Idempotent.

        Replica groups keep looking for a lighthouse at this address.
        """
        self.request_stop()
        self._thread.join()
        with self._lock:
            self._wake_write.close()

    close = shutdown

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.shutdown()

    def _command(self, command: Future[str] | None) -> bool:
        """Hand `command` to the server's thread; False if that has ended."""
        with self._lock:
            if self._wake_write.fileno() < 0 or not self._thread.is_alive():
                return False
            self._commands.put(command)
        return self._wake()

    def _wake(self) -> bool:
        """Wake the server's thread up; False if it has ended."""
        with self._lock:
            try:
                self._wake_write.send(b"!", socket.MSG_DONTWAIT)
            except BlockingIOError:
                pass  # it is being woken already
            except OSError:
                return False
        return True

    # ------------------------------------------------------------------ the server's thread

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            # Crash-only: a machine that failed must not decide another step, and a fresh process in
            # its place costs the replica groups no more than a reconnect.
            self._failure = error
            log.exception("the lighthouse stops on an internal error")
        finally:
            self._close()

    def _serve(self) -> None:
        with sockets.Waiter(*self._endpoint.polled, self._wake_read) as waiter:
            self._serve_with(waiter)

    def _serve_with(self, waiter: sockets.Waiter) -> None:
        endpoint = self._endpoint
        frames = endpoint.polled[0]
        dry, deadline, now = True, self._machine.deadline(), time.monotonic()
        overdue = Overdue(LOOK_S)
        while True:
            ready = self._wait(waiter, self._sleep_ms(dry, deadline))
            if self._wake_read in ready and not self._obey():
                return
            if self._desk.wake_at <= now:
                self._desk.turn()
            if len(ready) != 1 or frames not in ready or endpoint.look_at <= now:
                endpoint.attend()
            # POLLIN may be spurious (a peer killed inside a frame), and frames that arrived
            # since must be handled before their senders are reported lost: read in any case.
            dry = self._drain_frames()
            for peer in endpoint.take_lost(dry):
                self.stats.lost_peers += 1
                self._apply(self._machine.disconnected(peer, time.monotonic()))
            deadline, now = self._machine.deadline(), time.monotonic()
            if overdue.passed(deadline, now, dry):
                self._apply(self._machine.expire(now))
                deadline = self._machine.deadline()

    def _wait(self, waiter: sockets.Waiter, timeout_ms: int | None) -> set[sockets.Watched]:
        """What may be readable. While some have voted on a step the others' votes are looked for
        without sleep, if the last that was waited for came within that time."""
        if not self._votes_missing or timeout_ms == 0:
            return waiter.wait(timeout_ms)
        began = time.monotonic()
        ready = waiter.wait(timeout_ms, SPIN_S if self._prompt else 0.0)
        self._prompt = time.monotonic() - began < SPIN_S
        return ready

    def _sleep_ms(self, dry: bool, deadline: float | None) -> int | None:
        """How long to wait for events; None: forever. `dry`: no frame is left to be handled."""
        if not dry or self._endpoint.losing:
            return 0
        asked = self._desk.wake_at
        return self._endpoint.sleep_ms(asked if deadline is None else min(deadline, asked))

    def _obey(self) -> bool:
        """Run the commands of other threads; False: stop."""
        try:
            self._wake_read.recv(4_096)
        except BlockingIOError:
            pass
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                break
            if command is None:
                return False
            self._desk.ask(command)
        if (answer := self._desk.take()) is not None:
            peers, frame = answer
            for peer in peers:
                self._endpoint.charge(peer, len(frame) >> 10)
            self._send(peers, frame)
        return True

    def _server_status(self) -> dict[str, Any]:
        stats, endpoint = self.stats, self._endpoint
        stats.connections, stats.received = endpoint.connections, endpoint.received
        stats.malformed, stats.slow_peers = endpoint.malformed, endpoint.slow
        stats.no_route, stats.refused = endpoint.unrouted, endpoint.refused
        stats.disconnected = endpoint.disconnected
        journal_error = self._journal.error if self._journal else None
        return {
            "address": self._address,
            "protocol_version": codec.VERSION,
            "state_file_error": str(journal_error) if journal_error else "",
            **self.stats.as_dict(),
        }

    def _drain_frames(self) -> bool:
        """Handle frames that have arrived, up to `BATCH_MESSAGES`; True if none is left."""
        receive = self._endpoint.receive
        for _ in range(BATCH_MESSAGES):
            if (entry := receive()) is None:
                return True
            self._handle(*entry)
        return False

    def _handle(self, peer: Peer, data: memoryview) -> None:
        try:
            message = codec.decode(data)
        except VersionMismatch as error:
            self.stats.other_versions += 1
            # The sender can read no more of the answer than its version, and needs no more.
            self._send((peer,), codec.encode(Refused(JobKey(), str(error))))
            return
        except ProtocolError:
            self._endpoint.blame(peer)
            return
        if isinstance(message, StatusRequest):
            self._endpoint.charge(peer, STATUS_COST)
            self._desk.ask(peer)
        elif isinstance(message, _REQUESTS):
            effects = self._machine.handle(peer, message, time.monotonic())  # type: ignore[arg-type]
            self._apply(effects)
            self._votes_missing = not effects and isinstance(message, Vote)
        else:
            self._endpoint.blame(peer)  # a reply: only a lighthouse sends those

    def _on_failure(self, job: JobKey, error: Exception) -> None:
        """The rules of one job have failed: it starts over, and this thread goes on."""
        self.stats.failures += 1
        self._complaints.say(
            "an internal error; the job starts over, no step is lost; report this: %s",
            "".join(traceback.format_exception(error)),
        )

    def _apply(self, effects: list[Effect]) -> None:
        if not effects:
            return  # most votes
        sends = [effect for effect in effects if isinstance(effect, Send)]
        frames = self._encoder.encode_all([send.message for send in sends])
        for send, frame in zip(sends, frames, strict=True):
            self._send(send.peers, frame)
        for effect in effects:  # only now: no peer waits for these
            if isinstance(effect, Note):
                self._note(effect)
            elif isinstance(effect, Remember) and self._journal is not None:
                self._journal.save(effect.job, effect.quorum_id, effect.members)

    def _note(self, note: Note) -> None:
        try:
            self._on_note(note)
        except Exception as error:  # of the owner's function: it must not end the training
            self._complaints.say("on_note raised %r", error)

    def _log_note(self, note: Note) -> None:
        say = self._complaints.say if note.refusal else log.info
        say("%s/%s: %s", note.job.job_id, note.job.room_id, printable(note.text))

    def _send(self, peers: Iterable[Peer], data: bytes) -> None:
        self.stats.sent += self._endpoint.send(peers, data)

    def _close(self) -> None:
        self._endpoint.close(SHUTDOWN_LINGER_MS)
        self._desk.close()
        with self._lock:
            self._wake_read.close()
            while True:
                try:
                    command = self._commands.get_nowait()
                except queue.Empty:
                    break
                if command is not None:
                    refuse(command)
        if self._journal is not None:
            self._journal.close()
        self._context.term()


def _config(
    config: LighthouseConfig | None, min_replicas: int | None, join_timeout_ms: float | None
) -> LighthouseConfig:
    if config is None:
        config = LighthouseConfig()
    elif min_replicas is not None or join_timeout_ms is not None:
        raise ValueError("give either config or min_replicas and join_timeout_ms, not both")
    if min_replicas is not None:
        config = replace(config, min_replicas=min_replicas)
    if join_timeout_ms is not None:
        timeouts = replace(config.timeouts, join_timeout_s=join_timeout_ms / 1000)
        config = replace(config, timeouts=timeouts)
    return config
