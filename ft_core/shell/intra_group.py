"""Calls among the ranks of one replica group outside of steps: barriers, broadcasts, and the state
with which they begin.

A replica group lives and dies as a whole, so a rank may wait here for the others of its own group:
if one dies, this one ends too (the launcher ends it, and its connection closes). No rank waits for
another group. Each call goes to rank 0 and back with its name, so that ranks which make different
calls get an error instead of waiting. The ranks find each other by the group's rendezvous store.

torch's default process group is not used: frameworks would take it for the world.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import logging
import pickle
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

from ft_core.config import JobOptions
from ft_core.errors import GroupBroken
from ft_core.heal import HealKey, HealServer, fetch
from ft_core.heal.objects import naming_option
from ft_core.shell.group_store import RollCall, group_store
from lighthouse.config import MOST_STRANGERS
from lighthouse.own_address import advertised_host, bracketed

log = logging.getLogger("ft_core")

OPEN_TIMEOUT_S = 7 * 86_400.0
"""The first call waits for ranks that start late; the launcher ends a group that lost a rank."""
_OUT_OF_DESCRIPTORS_S = 0.1
_HEADER = struct.Struct("!Q")
_COOKIE_BYTES = 32
_KEY = "ft_core/intra_group"


class IntraGroup:
    """Calls among the ranks of a replica group; with one rank they return at once.

    Args:
        options: of the job: the rank in the group, the group's rendezvous store, the interface to
            meet at, how states travel.
        timeout_s: bounds a call once all ranks have met.

    Thread: the training loop's. Raises GroupBroken if another rank is gone or late, RuntimeError if
    it calls something else.
    """

    def __init__(self, options: JobOptions, *, timeout_s: float = OPEN_TIMEOUT_S) -> None:
        self._options = options
        self._rank, self._size = options.group_rank, options.group_world_size
        self._where = options.store_addr, options.store_port
        self._timeout_s = timeout_s
        self._peers: list[socket.socket] = []
        self._store: Any = None
        self._local = 0
        self._broken = ""

    @contextlib.contextmanager
    def local_only(self) -> Iterator[None]:
        """Calls reach this rank only, where the others do not make them: within the context, or
        within a function that `local_only()` decorates."""
        self._local += 1
        try:
            yield
        finally:
            self._local -= 1

    def barrier(self, *, limited: bool = True) -> None:
        """Wait until all ranks have called it; `limited` False: without a time limit."""
        if self._reaches_peers:
            self._all("barrier", None, lambda values: None, limited=limited)

    def broadcast(self, value: Any, src: int = 0) -> Any:
        """The `value` of rank `src` of the group: any object that can be pickled."""
        if not self._reaches_peers:
            return value
        source = src % self._size
        mine = value if self._rank == source else None
        return self._all("broadcast", mine, lambda values: values[source])

    def decide(self, decision: bool, *, all_of_them: bool) -> bool:
        """Whether `decision` is true on all ranks, or on any."""
        if not self._reaches_peers:
            return decision
        agreed: bool = self._all("decision", bool(decision), all if all_of_them else any)
        return agreed

    def gather(self, value: Any) -> list[Any]:
        """The `value` of each rank, in their order: any objects that can be pickled."""
        if not self._reaches_peers:
            return [value]
        values: list[Any] = self._all("gather", value, lambda values: values)
        return values

    def from_rank_0(self, decide: Callable[[], Any]) -> Any:
        """The result of `decide()`, which rank 0 alone calls; the others wait without a limit."""
        if not self._reaches_peers:
            return decide()
        mine = decide() if self._rank == 0 else None
        return self._all("decision of the first", mine, lambda values: values[0], limited=False)

    def sync_initial_state(
        self,
        name: Callable[[], str],
        give: Callable[[], Any],
        take: Callable[[Any], None],
        *,
        into: Callable[[], Any] = lambda: None,
    ) -> str:
        """Have all ranks begin with the state of rank 0; returns that state's name.

        A replica group joins as one member, so its ranks must begin with equal states. Other groups
        need not: they heal. `name()`: of this rank's state, equal for equal states. `give()`: the
        state, which is sent as in a heal and received into the tensors of `into()`. `take(state)`
        loads it where this rank's differs. Raises HealError too.
        """
        with naming_option(self._options):
            mine = name()
        if not self._reaches_peers:
            return mine
        first: str = self.broadcast(mine)
        differ = self._all("beginning", mine != first, _numbers_of_true)
        if not differ:
            return first
        key, server = HealKey(0, first), None
        # The port of the job's options is for the server that serves the other groups.
        options = dataclasses.replace(self._options, heal_port=0)
        if self._rank == 0:
            server = HealServer(host=self._host, options=options)
            with naming_option(self._options):
                server.publish(key, give(), expected_targets=len(differ))
        with contextlib.closing(server) if server else contextlib.nullcontext():
            address = self.broadcast(server.address if server else "")
            if mine != first:
                state, _ = fetch(
                    [address],
                    key,
                    into=into(),
                    deadline=time.monotonic() + OPEN_TIMEOUT_S,
                    options=options,
                )
                take(state)
                mine = name()
            self.barrier(limited=False)
        if not self.decide(first == mine, all_of_them=True):
            raise RuntimeError(
                "the ranks of a replica group begin with different optimizers or schedulers: make "
                "them equal, and load the same checkpoint in all"
            )
        return first

    def close(self) -> None:
        """End the connections. Idempotent."""
        for peer in self._peers:
            peer.close()
        self._peers, self._store = [], None

    def __getstate__(self) -> dict[str, Any]:
        """A copy (of a Trainer, say) has no connections."""
        return {**vars(self), "_peers": [], "_store": None, "_broken": ""}

    # ------------------------------------------------------------------ one call

    @property
    def _reaches_peers(self) -> bool:
        return self._size > 1 and not self._local

    def _all(
        self, name: str, mine: Any, combine: Callable[[list[Any]], Any], *, limited: bool = True
    ) -> Any:
        if self._broken:  # a caller has caught the error: none would come to the next meeting
            raise GroupBroken(self._broken)
        if not self._peers:
            try:
                self._open()
            except OSError as error:
                self._break_off(f"{name}: the ranks of this replica group can't meet ({error})")
                raise GroupBroken(self._broken) from error
        try:
            for peer in self._peers:
                peer.settimeout(self._timeout_s if limited else None)
            if self._rank == 0:
                failure, result = self._lead(name, mine, combine)
            else:
                _send(self._peers[0], (name, mine))
                failure, result = _receive(self._peers[0])
        except (OSError, EOFError) as error:
            late = isinstance(error, TimeoutError)
            what = f"did not come within {self._timeout_s:g} s" if late else "is gone"
            self._break_off(
                f"{name}: another rank of this replica group {what} ({error or type(error).__name__}); "
                "all ranks of a group must make the same calls"
            )
            raise GroupBroken(self._broken) from error
        except BaseException as error:  # the others would wait for what this rank has not sent
            self._break_off(f"{name}: it has failed in this rank before ({type(error).__name__})")
            raise
        if failure:
            raise RuntimeError(failure)
        return result

    def _break_off(self, why: str) -> None:
        """End the connections for all that hold them: workers of a data loader, which were forked from this
        process, have copies."""
        self._broken = why
        for peer in self._peers:
            with contextlib.suppress(OSError):  # it has ended already
                peer.shutdown(socket.SHUT_RDWR)
        self.close()

    def _lead(self, name: str, mine: Any, combine: Callable[[list[Any]], Any]) -> tuple[str, Any]:
        """(why the call has failed in all ranks, its result)."""
        values, names = [mine], [name]
        for peer in self._peers:
            its_name, value = _receive(peer)
            names.append(its_name)
            values.append(value)
        failure, result = "", None
        if len(set(names)) > 1:
            failure = (
                f"the ranks of this replica group call different things ({', '.join(names)}): all "
                "must make the same calls in the same order"
            )
        else:
            result = combine(values)
        for peer in self._peers:
            _send(peer, (failure, result))
        return failure, result

    # ------------------------------------------------------------------ rendezvous

    def _open(self) -> None:
        self._store = group_store(*self._where, OPEN_TIMEOUT_S, hosts=self._rank == 0)
        key = RollCall(_KEY, self._rank, self._size).key(self._store, OPEN_TIMEOUT_S)
        if self._rank == 0:
            self._wait_for_ranks(key)
            return
        host, port, cookie = pickle.loads(self._store.get(key))
        peer = socket.create_connection((host, port), OPEN_TIMEOUT_S)
        self._peers = [peer]
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.sendall(cookie + _HEADER.pack(self._rank))

    def _wait_for_ranks(self, key: str) -> None:
        cookie = secrets.token_bytes(_COOKIE_BYTES)
        arrived: dict[int, socket.socket] = {}
        host = self._host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=family) as server:
            self._store.set(key, pickle.dumps((host, server.getsockname()[1], cookie)))
            with contextlib.closing(Door(server, cookie, self._size)) as door:
                while len(arrived) < self._size - 1:
                    rank, peer = door.next()
                    arrived[rank] = peer
        self._peers = [arrived[rank] for rank in sorted(arrived)]

    @property
    def _host(self) -> str:
        """Our address for the other ranks."""
        addr, port = self._where
        if addr == "127.0.0.1":
            return addr
        return advertised_host(f"tcp://{bracketed(addr)}:{port}", self._options.interface)


class Door:
    """Lets in those that present the cookie. One that is silent, slow or a stranger keeps none waiting:
    all that have connected are heard at once, and the oldest of too many makes way."""

    def __init__(self, server: socket.socket, cookie: bytes, ranks: int) -> None:
        self._server, self._cookie, self._ranks = server, cookie, ranks
        server.setblocking(False)
        self._said: dict[socket.socket, bytes] = {}  # the oldest first
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)
        self._complained = False

    def next(self) -> tuple[int, socket.socket]:
        """The next rank, and its connection."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._server:
                    self._accept()
                elif key.fileobj in self._said and (found := self._hear(key.fileobj)):
                    return found

    def close(self) -> None:
        """Send those away that wait."""
        for stranger in list(self._said):
            self._send_away(stranger)
        self._selector.close()

    def _accept(self) -> None:
        try:
            peer, _ = self._server.accept()
        except BlockingIOError:
            return
        except OSError as error:  # most likely no descriptors are left
            if not self._complained:
                self._complained = True
                log.warning("a rank of this group may have to wait at its door: %s", error)
            if self._said:
                self._send_away(next(iter(self._said)))
            else:
                time.sleep(_OUT_OF_DESCRIPTORS_S)
            return
        peer.setblocking(False)
        if len(self._said) >= MOST_STRANGERS + self._ranks:
            self._send_away(next(iter(self._said)))
        self._said[peer] = b""
        self._selector.register(peer, selectors.EVENT_READ)

    def _hear(self, peer: socket.socket) -> tuple[int, socket.socket] | None:
        whole = _COOKIE_BYTES + _HEADER.size
        try:
            part = peer.recv(whole - len(self._said[peer]))
        except BlockingIOError:
            return None
        except OSError:
            part = b""
        said = self._said[peer] = self._said[peer] + part
        known = hmac.compare_digest(said[:_COOKIE_BYTES], self._cookie[: len(said)])
        if not part or not known:
            self._send_away(peer)
            return None
        if len(said) < whole:
            return None
        self._selector.unregister(peer)
        del self._said[peer]
        peer.setblocking(True)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        (rank,) = _HEADER.unpack(said[_COOKIE_BYTES:])
        return rank, peer

    def _send_away(self, stranger: socket.socket) -> None:
        self._selector.unregister(stranger)
        del self._said[stranger]
        stranger.close()


def _numbers_of_true(values: list[bool]) -> list[int]:
    return [number for number, value in enumerate(values) if value]


def _send(peer: socket.socket, value: Any) -> None:
    data = pickle.dumps(value)
    peer.sendall(_HEADER.pack(len(data)) + data)


def _receive(peer: socket.socket) -> Any:
    (size,) = _HEADER.unpack(_read(peer, _HEADER.size))
    return pickle.loads(_read(peer, size))


def _read(peer: socket.socket, size: int) -> bytes:
    """Exactly so many bytes. Raises EOFError if the connection ends before."""
    data = bytearray()
    while len(data) < size:
        part = peer.recv(min(size - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)
