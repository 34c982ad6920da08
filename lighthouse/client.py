"""The client end: `Connection` for a thread with a poll loop, `LighthouseClient` for tools."""

from __future__ import annotations

import json
import secrets
import time
from typing import Any, Literal, Self, TypeVar

import zmq

from lighthouse import dealer, sockets
from lighthouse.config import Timeouts, normalize_address, split_address
from lighthouse.errors import LighthouseUnavailable, ProtocolError, VersionMismatch
from lighthouse.own_address import address_that_answers, resolve
from lighthouse.waits import Overdue
from lighthouse.wire import codec
from lighthouse.wire.messages import (
    Declared,
    DeclareDead,
    JobKey,
    Message,
    Request,
    Status,
    StatusRequest,
)

A = TypeVar("A", Status, Declared)
ConnectionEvent = Literal["connected", "disconnected"]
SERVICE = "lighthouse"
"""What connections to a lighthouse ask for."""


def new_identity(name: str) -> bytes:
    """An identity that no other process can guess; `name` is for people."""
    readable = "".join(c for c in name if c.isascii() and c.isprintable())[:200]
    return f"{readable}.{secrets.token_hex(16)}".encode()


class Connection:
    """One connection to a lighthouse: reconnects by itself, never blocks, has no thread.

    Only the thread that built it may call its methods. Register both `sockets` with a `zmq.Poller`
    for POLLIN; when one is readable call `receive()` and `events()`.

    Messages sent while disconnected are queued (up to `CLIENT_SEND_QUEUE_MESSAGES`), each of them
    once, and travel when the connection is back. That is safe, since all requests are idempotent.

    Args:
        address: "tcp://host:port"; see `normalize_address`. ValueError if malformed.
        identity: which process this is: 1 to 255 printable ASCII characters. What a process has
            said counts for its later connections of the same identity, so one that others can't
            guess keeps them from speaking for it (`new_identity`).
        timeouts: its heartbeats are used.
        context: ZeroMQ context, which the caller closes.
        service: what is asked for at `address`.
    """

    def __init__(
        self,
        address: str,
        *,
        identity: bytes,
        timeouts: Timeouts,
        context: zmq.Context[Any],
        service: str = SERVICE,
    ) -> None:
        self.address = normalize_address(address)
        if not (
            0 < len(identity) <= 255 and identity.isascii() and identity.decode().isprintable()
        ):
            raise ValueError("identity must have 1 to 255 printable ASCII characters")
        self.malformed = 0
        """Frames that were dropped because they were not messages of this protocol."""
        self.connected = False
        self._queued: set[bytes] = set()  # since the connection was lost
        self._encoder = codec.Encoder()
        self._socket, self._monitor = sockets.open_dealer(
            context, self.address, service, identity, timeouts
        )
        self.sockets = (self._socket, self._monitor)

    def send(self, message: Request) -> bool:
        """Queue `message`; False if the queue is full (send it again later). Never blocks."""
        (frame,) = self._encoder.encode_all([message])
        if not self.connected and frame in self._queued:
            return True  # or all that was repeated would be answered at once when it is back
        try:
            self._socket.send(frame, dealer.NOBLOCK)
        except zmq.Again:
            return False
        if not self.connected:
            self._queued.add(frame)
        return True

    def receive(self) -> list[Message]:
        """All messages that have arrived, oldest first. Never blocks.

        Raises VersionMismatch if the lighthouse speaks another protocol version. Frames that are
        not messages are dropped and counted in `malformed`.
        """
        messages: list[Message] = []
        receive, option = self._socket.recv, self._socket.getsockopt
        # Asking first is a microsecond; an exception where nothing is there costs several.
        while int(option(dealer.EVENTS)) & dealer.POLLIN:
            try:
                frame = receive(dealer.NOBLOCK)
            except zmq.Again:
                return messages
            if option(dealer.RCVMORE):
                self.malformed += 1
                self._drop_rest()
                continue
            try:
                messages.append(codec.decode(frame))
            except VersionMismatch:
                raise
            except ProtocolError:
                self.malformed += 1
        return messages

    def _drop_rest(self) -> None:
        # All parts of a multi-part message arrive together, so that this cannot raise Again.
        while self._socket.getsockopt(zmq.RCVMORE):
            self._socket.recv(zmq.NOBLOCK)

    def events(self) -> list[ConnectionEvent]:
        """What happened to the connection since the last call, oldest first. Never blocks.

        "connected" follows a handshake: it means a lighthouse, not just an open port.
        """
        happened: list[ConnectionEvent] = []
        while (entry := dealer.read_monitor(self._monitor)) is not None:
            up = entry[0] == dealer.HANDSHAKE_SUCCEEDED
            if up != self.connected:  # a failed handshake disconnects what never was connected
                self.connected = up
                self._queued.clear()
                happened.append("connected" if up else "disconnected")
        return happened

    def close(self, *, linger_s: float = 0.0) -> None:
        """Close at once; queued messages get up to `linger_s` in the background. Idempotent."""
        if not self._socket.closed:
            dealer.close(self._socket, self._monitor, round(linger_s * 1000))


def _choose(address: str) -> str:
    """`address`, or the one of its host's addresses that answers."""
    normal = normalize_address(address)
    try:
        return address_that_answers(normal)
    except ValueError:
        return normal  # its name may resolve later; `status` says so if it does not


def _answers(message: Message, request: Request) -> bool:
    """Whether `message`, which is of the kind that answers `request`, may be its answer."""
    if not (isinstance(message, Declared) and isinstance(request, DeclareDead)):
        return True  # a status answers all that ask for one
    return (message.job_id, message.member) == (request.job_id, request.member)


class LighthouseClient:
    """Asks a lighthouse for its status, and tells it of deaths; blocking. A context manager.

    One thread at a time.

    Args:
        address: "tcp://host:port", "host:port" or "http://host:port". ValueError otherwise.
        timeout_s: how long each call waits for an answer.
    """

    def __init__(self, address: str, *, timeout_s: float = 10.0) -> None:
        self.timeout_s = timeout_s
        self._timeouts = Timeouts.derive(max(timeout_s, 1.0))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._connection = Connection(
                _choose(address),
                identity=new_identity("tool"),
                timeouts=self._timeouts,
                context=self._context,
            )
        except BaseException:
            self._context.destroy(linger=0)  # also of a link half made
            raise
        self.address = self._connection.address
        self._poller = zmq.Poller()
        for socket in self._connection.sockets:
            self._poller.register(socket, zmq.POLLIN)

    def status(self, timeout_s: float | None = None) -> dict[str, Any]:
        """All jobs and the server's counters, as plain JSON types.

        Raises LighthouseUnavailable after `timeout_s`, VersionMismatch for another release.
        """
        status = self._ask(StatusRequest(), Status, timeout_s)
        answer: dict[str, Any] = json.loads(status.text)
        return answer

    def declare_dead(self, member: str, *, job_id: str = JobKey().job_id) -> tuple[bool, str]:
        """Say that the replica group `member` (a name or a replica_id) is dead, or will not come.

        Returns whether that was accepted, and a sentence. Raises as `status` does, and ValueError.
        """
        answer = self._ask(DeclareDead(job_id, member), Declared)
        return answer.accepted, answer.text

    def _ask(self, request: Request, kind: type[A], timeout_s: float | None = None) -> A:
        """The answer to `request`."""
        wait_s = self.timeout_s if timeout_s is None else timeout_s
        overdue, deadline = Overdue(), time.monotonic() + wait_s
        self._connection.events()
        self._connection.receive()  # an answer to an earlier call that came too late
        if self._connection.connected:
            self._connection.send(request)  # else below: the next call would get a second answer
        while not overdue.passed(deadline, now := time.monotonic()):
            self._poller.poll(max(1, round((overdue.look_at(deadline) - now) * 1000)))
            # Also after a break, which may have lost what was sent.
            if "connected" in self._connection.events():
                self._connection.send(request)
            for message in self._connection.receive():
                if isinstance(message, kind) and _answers(message, request):
                    return message
        try:
            resolve(*split_address(self.address))
        except ValueError as error:
            raise LighthouseUnavailable(str(error)) from error
        raise LighthouseUnavailable(
            f"no lighthouse answers at {self.address} within {wait_s:g} s: check that one runs "
            "there (command `lighthouse`), and that host, port and firewall let it be reached"
        )

    def wait_until_up(self, timeout_s: float | None = None) -> None:
        """Return when a lighthouse answers. Raises as `status` does."""
        self.status(timeout_s)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._connection.close()
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()
