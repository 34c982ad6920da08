"""Connections and names: a simulated kernel that reuses descriptors, with two queues in between."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from lighthouse.routes import MAX_GRACE_S, Routes

A, B = b"a", b"b"


def test_a_closed_descriptor_loses_the_peer_that_spoke_through_it() -> None:
    routes = Routes()
    routes.accepted(7)
    routes.meet(A, 7, 0.0)
    routes.closed(7, 1.0)
    assert routes.lost
    assert routes.take_lost(dry=True, now=1.0) == [A]
    assert not routes.lost
    assert not routes.fd_of
    routes.check()


def test_frames_that_are_left_are_waited_for_but_not_for_ever() -> None:
    routes = Routes()
    routes.accepted(7)
    routes.meet(A, 7, 0.0)
    routes.closed(7, 1.0)
    assert routes.take_lost(dry=False, now=1.0) == []
    assert routes.take_lost(dry=False, now=1.0 + MAX_GRACE_S) == [A]


def test_the_end_of_an_older_connection_means_nothing_to_the_next_one() -> None:
    routes = Routes()
    routes.accepted(7)
    routes.meet(A, 7, 0.0)
    routes.accepted(8)
    routes.meet(B, 8, 1.0)
    routes.closed(7, 2.0)
    assert routes.take_lost(dry=True, now=2.0) == [A]
    assert routes.fd_of == {B: 8}


def test_the_next_user_of_a_descriptor_is_another_peer() -> None:
    routes = Routes()
    routes.accepted(7)
    routes.meet(A, 7, 0.0)
    routes.closed(7, 1.0)
    routes.accepted(7)
    routes.meet(B, 7, 1.0)
    assert routes.take_lost(dry=True, now=1.0) == [A]
    assert routes.fd_of == {B: 7}


def test_a_silent_peer_is_a_stranger_and_the_oldest_comes_first() -> None:
    routes = Routes()
    for fd in (9, 7, 8):
        routes.accepted(fd)
    routes.meet(A, 7, 0.0)
    assert routes.strangers() == [9, 8]
    routes.closed(9, 1.0)
    routes.accepted(9)
    assert routes.strangers() == [8, 9]
    assert routes.connections == 3


def test_a_peer_that_spoke_and_went_before_it_was_read_is_lost() -> None:
    routes = Routes()
    routes.accepted(7)
    routes.closed(7, 0.0)
    routes.meet(A, 7, 0.0)
    assert routes.take_lost(dry=True, now=0.0) == [A]


def test_a_ghost_on_another_peers_descriptor_is_found_by_answering_it() -> None:
    routes = Routes()
    for _ in range(2):  # a's connection has come and gone, b has its descriptor now
        routes.accepted(7)
        routes.closed(7, 0.0)
    routes.accepted(7)
    routes.meet(A, 7, 0.0)
    routes.meet(B, 7, 0.0)
    routes.no_route(A, 0.0)
    assert routes.take_lost(dry=True, now=0.0) == [A]
    assert routes.fd_of == {B: 7}
    routes.no_route(b"never heard of", 0.0)
    assert not routes.lost


@settings(max_examples=300)
@given(st.data())
def test_the_living_are_kept_and_the_dead_are_found(data: st.DataObject) -> None:
    """Peers connect (each with a lowest free descriptor, as the kernel does), speak, reconnect and
    die; frames and monitor events wait in queues that the owner drains at its leisure."""
    routes = Routes()
    alive: dict[bytes, int] = {}
    frames: list[tuple[bytes, int]] = []
    events: list[tuple[str, int]] = []
    reported: list[bytes] = []
    ended: set[bytes] = set()
    heard: set[bytes] = set()
    met: set[bytes] = set()
    names = iter(b"peer%d" % n for n in range(1_000))

    def connect(peer: bytes) -> None:
        fd = min(set(range(100)) - set(alive.values()))
        alive[peer] = fd
        events.append(("accepted", fd))
        frames.append((peer, fd))

    def drain_events() -> None:
        while events:
            kind, fd = events.pop(0)
            if kind == "accepted":
                routes.accepted(fd)
            else:
                routes.closed(fd, 0.0)

    def turn() -> None:
        drain_events()
        while frames:
            peer, fd = frames.pop(0)
            heard.add(peer)
            if peer not in met:
                met.add(peer)
                drain_events()
                routes.meet(peer, fd, 0.0)
            if peer not in alive:  # each first frame is answered, and the socket knows no route
                routes.no_route(peer, 0.0)
        reported.extend(routes.take_lost(dry=True, now=0.0))
        routes.check()

    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["connect", "die", "speak", "reconnect", "turn"]))
        if action == "connect":
            connect(next(names))
        elif action == "turn":
            turn()
        elif alive:
            peer = data.draw(st.sampled_from(sorted(alive)))
            if action == "speak":
                frames.append((peer, alive[peer]))
            else:
                events.append(("closed", alive.pop(peer)))
                ended.add(peer)
                if action == "reconnect":  # by another name: a peer is one connection
                    connect(next(names))
    turn()
    assert set(routes.fd_of) == set(alive), "exactly the living are known"
    assert set(reported) <= ended, "a peer was reported whose connection held"
    assert heard - set(alive) <= set(reported), "a peer spoke and died unreported"
