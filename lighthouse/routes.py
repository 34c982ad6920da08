"""Which peer speaks through which file descriptor, and who is lost when one closes. PURE.

A process that dies closes its sockets; the kernel's descriptor is all that ZeroMQ's monitor tells
about that. Each frame names the descriptor it came through, and so the two are matched. But
descriptors are reused, and frames and monitor events travel in two queues. Therefore:

- The owner takes in all monitor events *before* it attributes a frame of an unknown
  (peer, descriptor) pair: the end of the descriptor's earlier user is in there already.
- A peer is reported lost only *after* the frames that it had sent were handled (a goodbye, a
  last vote), but no later than `MAX_GRACE_S` where frames never stop coming.
- The descriptor that a peer spoke through last is the one that counts: the end of an older one
  says nothing about a peer that has reconnected.
- A peer that died before its first frame was read, and whose descriptor somebody else has by
  now, is found out when it is answered (`no_route`).
"""

from __future__ import annotations

Peer = bytes

MAX_GRACE_S = 0.05


class Routes:
    """See the module's docstring. Not thread-safe: one owner."""

    def __init__(self) -> None:
        self.fd_of: dict[Peer, int] = {}
        """Peers that are known, each with its descriptor. Read only."""
        self._peers_of: dict[int, set[Peer]] = {}
        self._open: set[int] = set()
        self._lost: dict[Peer, float] = {}  # not yet reported; when it was seen

    @property
    def connections(self) -> int:
        return len(self._open)

    @property
    def pending(self) -> bool:
        """Whether somebody is lost and not yet reported."""
        return bool(self._lost)

    def accepted(self, fd: int) -> None:
        """Monitor: a connection was made."""
        self._open.add(fd)

    def closed(self, fd: int, now: float) -> None:
        """Monitor: a connection has ended."""
        self._open.discard(fd)
        for peer in self._peers_of.pop(fd, ()):
            self._lost.setdefault(peer, now)

    def attribute(self, peer: Peer, fd: int, now: float) -> None:
        """A frame of `peer` came through `fd`, and `fd_of` did not say so."""
        self._detach(peer)
        self.fd_of[peer] = fd
        if fd in self._open:
            self._peers_of.setdefault(fd, set()).add(peer)
            self._lost.pop(peer, None)  # it has come back
        else:
            self._lost[peer] = now  # it came, spoke and went before its frame was read

    def no_route(self, peer: Peer, now: float) -> None:
        """The socket knows no connection of `peer`, although there is something to tell it."""
        if peer in self.fd_of:
            self._lost.setdefault(peer, now)

    def take_lost(self, dry: bool, now: float) -> list[Peer]:
        """Peers to report lost now. `dry`: every frame that had arrived was handled."""
        taken = [p for p, seen_at in self._lost.items() if dry or now >= seen_at + MAX_GRACE_S]
        for peer in taken:
            del self._lost[peer]
            self._detach(peer)
            self.fd_of.pop(peer, None)
        return taken

    def check(self) -> None:
        """Assert every invariant."""
        assert set(self._peers_of) <= self._open, "peers of a closed descriptor"
        assert set(self._lost) <= set(self.fd_of), "a stranger is lost"
        for fd, peers in self._peers_of.items():
            assert peers, "an empty set was kept"
            assert all(self.fd_of[peer] == fd for peer in peers)
        for peer, fd in self.fd_of.items():
            assert peer in self._lost or peer in self._peers_of[fd], "alive, but never lost"

    def _detach(self, peer: Peer) -> None:
        fd = self.fd_of.get(peer)
        peers = self._peers_of.get(fd) if fd is not None else None
        if fd is not None and peers is not None:
            peers.discard(peer)
            if not peers:
                del self._peers_of[fd]
