"""Which peer uses which file descriptor, and which peers are lost when one closes. PURE.

When a process dies, the kernel closes its sockets. ZeroMQ's monitor reports such an event by its
descriptor only. Each frame names the descriptor it came through, so that the two can be matched.
But descriptors are reused, and frames and monitor events travel in two queues. Therefore:

- The owner reads all monitor events *before* it attributes a frame of an unknown
  (peer, descriptor) pair: they include the end of the descriptor's earlier user.
- A peer is reported lost only *after* the frames that it had sent were handled (a `Leave`, a
  last vote), but after `MAX_GRACE_S` at the latest if frames never stop coming.
- The descriptor of a peer's newest frame counts: the end of an older one says nothing about a
  peer that has reconnected.
- A frame of a lost peer over the same descriptor number has two causes: the peer is back, or the
  frame is old and the number belongs to another peer by now. One treatment serves both: report
  the peer lost, then take the frame as a newcomer's. The answer to a dead peer finds no route
  (`no_route`).
"""

from __future__ import annotations

from lighthouse.wire.messages import Peer

MAX_GRACE_S = 0.05


class Routes:
    """See the module's docstring. Not thread-safe: one owner."""

    def __init__(self) -> None:
        self.fd_of: dict[Peer, int] = {}
        """Peers that are connected, each with its descriptor. Read only."""
        self._peers_of: dict[int, set[Peer]] = {}
        self._open: set[int] = set()
        self.lost: dict[Peer, tuple[int, float]] = {}
        """Peers to be reported lost: (descriptor, when its end was seen). Read only."""

    @property
    def connections(self) -> int:
        return len(self._open)

    def accepted(self, fd: int) -> None:
        """Monitor: a connection was made."""
        self._open.add(fd)

    def closed(self, fd: int, now: float) -> None:
        """Monitor: a connection has ended."""
        self._open.discard(fd)
        for peer in self._peers_of.pop(fd, ()):
            del self.fd_of[peer]
            self.lost[peer] = (fd, now)

    def attribute(self, peer: Peer, fd: int, now: float) -> bool:
        """A frame of `peer` came through `fd`, and `fd_of` did not say so.

        True: report `peer` lost before that frame is handled.
        """
        self._detach(peer)
        if fd not in self._open:  # a frame of a connection that has ended
            self.lost.setdefault(peer, (fd, now))
            return False
        self.fd_of[peer] = fd
        self._peers_of.setdefault(fd, set()).add(peer)
        before = self.lost.pop(peer, None)
        return before is not None and before[0] == fd

    def no_route(self, peer: Peer, now: float) -> None:
        """The socket knows no connection of `peer`, although there is something to tell it."""
        fd = self._detach(peer)
        if fd is not None:
            self.lost[peer] = (fd, now)

    def take_lost(self, dry: bool, now: float) -> list[Peer]:
        """Peers to report lost now. `dry`: every frame that had arrived was handled."""
        taken = [p for p, (_, at) in self.lost.items() if dry or now >= at + MAX_GRACE_S]
        for peer in taken:
            del self.lost[peer]
        return taken

    def check(self) -> None:
        """Assert every invariant."""
        assert set(self._peers_of) <= self._open, "peers of a closed descriptor"
        assert not set(self.lost) & set(self.fd_of), "both lost and connected"
        for fd, peers in self._peers_of.items():
            assert peers, "an empty set was kept"
            assert all(self.fd_of[peer] == fd for peer in peers)
        for peer, fd in self.fd_of.items():
            assert peer in self._peers_of[fd], "connected, but would never be lost"

    def _detach(self, peer: Peer) -> int | None:
        """Forget the descriptor of `peer`, if any, and say which it was."""
        fd = self.fd_of.pop(peer, None)
        if fd is not None:
            peers = self._peers_of[fd]
            peers.discard(peer)
            if not peers:
                del self._peers_of[fd]
        return fd
