"""Which connection uses which file descriptor, and which are lost when one closes. PURE.

When a process dies, the kernel closes its sockets. ZeroMQ's monitor reports such an event by its
descriptor only. Each frame names the descriptor it came through, so that the two can be matched.
But descriptors are reused, and frames and monitor events travel in two queues. Therefore:

- A peer is one connection. A process that connects again is another peer.
- The owner reads all monitor events *before* it calls `meet`: they include the end of the
  descriptor's earlier user.
- A peer is reported lost only *after* the frames that it had sent were handled (a `Leave`, a
  last vote), but after `MAX_GRACE_S` at the latest if frames never stop coming.
- A first frame that is read after its connection's end may be attributed to the next user of that
  descriptor. The answer to it finds no route (`no_route`).

A connection that has said nothing yet is a *stranger*: nothing is lost with it.
"""

from __future__ import annotations

from collections.abc import Collection

from lighthouse.wire.messages import Peer

MAX_GRACE_S = 0.05


class Routes:
    """See the module's docstring. Not thread-safe: one owner."""

    def __init__(self) -> None:
        self.fd_of: dict[Peer, int] = {}
        """Peers that are connected, each with its descriptor. Read only."""
        self._peers_of: dict[int, set[Peer]] = {}
        self._open: dict[int, None] = {}  # in the order of their arrival
        self.lost: dict[Peer, float] = {}
        """Peers to be reported lost, and when their ends were seen. Read only."""

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self._open)

    @property
    def strange(self) -> int:
        """How many connections have said nothing yet."""
        return len(self._open) - len(self._peers_of)

    def open(self) -> list[int]:
        """Descriptors of all connections, the oldest one first."""
        return list(self._open)

    def peers_of(self, fd: int) -> Collection[Peer]:
        """Those that have spoken on this connection."""
        return self._peers_of.get(fd, ())

    def strangers(self) -> list[int]:
        """Descriptors of connections that have said nothing yet, the oldest one first."""
        return [fd for fd in self._open if fd not in self._peers_of]

    def accepted(self, fd: int) -> None:
        """Monitor: a connection was made."""
        self._open.pop(fd, None)
        self._open[fd] = None

    def closed(self, fd: int, now: float) -> None:
        """Monitor: a connection has ended."""
        self._open.pop(fd, None)
        for peer in self._peers_of.pop(fd, ()):
            del self.fd_of[peer]
            self.lost[peer] = now

    def meet(self, peer: Peer, fd: int, now: float) -> None:
        """The first frame of `peer` came through `fd`."""
        assert peer not in self.fd_of, "a connection has one descriptor"
        if fd in self._open:
            self.fd_of[peer] = fd
            self._peers_of.setdefault(fd, set()).add(peer)
        else:  # it has ended already
            self.lost[peer] = now

    def no_route(self, peer: Peer, now: float) -> None:
        """The socket knows no connection of `peer`, although there is something to tell it."""
        fd = self.fd_of.pop(peer, None)
        if fd is None:
            return
        peers = self._peers_of[fd]
        peers.discard(peer)
        if not peers:
            del self._peers_of[fd]
        self.lost[peer] = now

    def take_lost(self, dry: bool, now: float) -> list[Peer]:
        """Peers to report lost now. `dry`: every frame that had arrived was handled."""
        taken = [p for p, at in self.lost.items() if dry or now >= at + MAX_GRACE_S]
        for peer in taken:
            del self.lost[peer]
        return taken

    def check(self) -> None:
        """Assert every invariant."""
        assert set(self._peers_of) <= set(self._open), "peers of a closed descriptor"
        assert not set(self.lost) & set(self.fd_of), "both lost and connected"
        for fd, peers in self._peers_of.items():
            assert peers, "an empty set was kept"
            assert all(self.fd_of[peer] == fd for peer in peers)
        for peer, fd in self.fd_of.items():
            assert peer in self._peers_of[fd], "connected, but would never be lost"
