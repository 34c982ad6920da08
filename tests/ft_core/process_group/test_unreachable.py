"""A configure that fails names the members that could not be connected to, and soon."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import pytest

from ft_core.process_group import ProcessGroupError
from ft_core.process_group.dialing import connect_limit_s, unreachable
from ft_core.process_group.rendezvous_messages import Address
from tests.ft_core.process_group.members import KIND_NAMES, KINDS, Calls, configure, gloo_groups
from tests.harness.proxy import Proxy
from tests.harness.waiting import PATIENCE_S

LONG_S = 10 * PATIENCE_S  # a wait for it would fail the test


@contextmanager
def silent_address() -> Iterator[Address]:
    """An address that answers no packet: its backlog is full, so the kernel drops them."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        where = listener.getsockname()
        for _ in range(8):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(where)
        yield Address("127.0.0.1", where[1], b"12345678")


def closed_address() -> Address:
    """An address where no process listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return Address("127.0.0.1", listener.getsockname()[1], b"12345678")


@pytest.fixture(params=KINDS, ids=KIND_NAMES)
def native(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_the_limit_follows_the_timeout_within_bounds() -> None:
    assert [connect_limit_s(t) for t in (1.0, 60.0, 90.0, 600.0)] == [0.5, 1.0, 1.5, 2.0]


def test_what_can_not_be_connected_to_is_told_from_the_rest() -> None:
    with silent_address() as silent, socket.create_server(("127.0.0.1", 0)) as listener:
        good = Address("127.0.0.1", listener.getsockname()[1], b"12345678")
        answers = unreachable({3: good, 5: silent, 7: closed_address()}, 0.5)
    assert sorted(answers) == [5, 7]
    assert "no connection" in answers[5]
    assert "its process is gone" in answers[7]


def test_a_group_says_which_addresses_it_can_not_reach() -> None:
    with silent_address() as silent, gloo_groups(2) as groups:
        asked = [groups[1].address(), silent.encode()]
        assert groups[0].unreachable(asked, 1.0) == {1}


def test_a_silent_address_is_missed_long_before_the_timeout(native: bool) -> None:
    with silent_address() as silent, gloo_groups(2, native=native) as groups:
        addresses = [groups[0].address(), silent.encode(), groups[1].address()]
        calls = Calls(lambda rank: groups[rank // 2].configure(1, rank, addresses, LONG_S), [0, 2])
        outcomes = calls.finish()
        assert isinstance(outcomes[0], ProcessGroupError)
        assert outcomes[0].missed == (1,)
        assert "rank 1 (127.0.0.1:" in str(outcomes[0])
        assert "can't be reached" in str(outcomes[0])
        assert outcomes[2].missed == ()  # rank 0 gave up, which is no fault of the network
        configure(groups, 2)


def test_a_pair_is_missed_where_a_third_member_reaches_both(native: bool) -> None:
    with gloo_groups(3, native=native) as groups, Proxy(groups[2]) as proxy:
        proxy.cut = lambda hello: hello.rank == 1
        addresses = [groups[0].address(), groups[1].address(), groups[2].address()]
        calls = Calls(lambda rank: groups[rank].configure(1, rank, addresses, LONG_S), range(3))
        outcomes = calls.finish()
        assert {rank: error.missed for rank, error in outcomes.items()} == {0: (), 1: (2,), 2: ()}
        configure([groups[0], groups[2]], 2)
        configure([groups[0], groups[1]], 3)


@pytest.mark.parametrize("what", ["swallows", "swallows_answers"])
def test_a_member_of_which_nothing_comes_is_named_by_those_that_hear_nothing(what: str) -> None:
    """Its address accepts connections, so it is not missed: it may just be slow."""
    with gloo_groups(3) as groups, Proxy(groups[2]) as proxy:
        setattr(proxy, what, lambda hello: hello.rank == 1)
        addresses = [group.address() for group in groups]
        said: dict[int, list[int]] = {}
        as_it_is = {0: [], 1: [2], 2: [1] if what == "swallows" else []}
        so = threading.Event()
        for rank, group in enumerate(groups):

            def listen(silent: Sequence[int], rank: int = rank) -> None:
                said[rank] = list(silent)
                if said == as_it_is:
                    so.set()

            group.when_silent(listen)
        calls = Calls(lambda rank: groups[rank].configure(1, rank, addresses, LONG_S), range(3))
        assert so.wait(PATIENCE_S), said
        for group in groups:
            group.revoke(ProcessGroupError("seen enough"))
        outcomes = calls.finish()
        assert all(error.missed == () for error in outcomes.values())


def test_a_member_that_does_not_come_is_not_missed(native: bool) -> None:
    """Its kernel accepts connections all the same: nothing keeps it apart from the others."""
    with gloo_groups(3, native=native) as groups:
        addresses = [group.address() for group in groups]
        calls = Calls(lambda rank: groups[rank].configure(1, rank, addresses, 1.0), [0, 2])
        assert [error.missed for error in calls.finish().values()] == [(), ()]
        configure(groups, 2)


def test_an_address_of_another_service_is_missed(native: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as web, gloo_groups(1, native=native) as groups:

        def answer() -> None:
            peer, _ = web.accept()
            with peer:
                peer.recv(1)
                peer.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        other = Address("127.0.0.1", web.getsockname()[1], b"12345678")
        with pytest.raises(ProcessGroupError, match="is no process group") as caught:
            groups[0].configure(1, 0, [groups[0].address(), other.encode()], LONG_S)
        assert caught.value.missed == (1,)
        thread.join(PATIENCE_S)


def test_an_address_that_another_group_has_now_is_missed(native: bool) -> None:
    with gloo_groups(2, native=native) as groups:
        real = Address.decode(groups[1].address())
        stale = Address(real.host, real.port, b"12345678").encode()
        mine = groups[0].address()
        dialed = Calls(lambda _: groups[0].configure(1, 0, [mine, stale], LONG_S), [0])
        # The process there makes a group of its own members meanwhile.
        late = Calls(
            lambda _: groups[1].configure(1, 1, [closed_address().encode(), real.encode()], 1.0),
            [1],
        )
        (outcome,) = dialed.finish().values()
        assert isinstance(outcome, ProcessGroupError)
        assert outcome.missed == (1,)
        late.finish()


def test_an_address_that_is_good_in_one_direction_only(
    native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 dials all others, so they meet; but its own address leads nowhere, and the backends do
    not connect. The others find out, and blame no third member."""
    with silent_address() as silent, gloo_groups(3, native=native) as groups:
        groups[0].address()
        hidden = Address(silent.host, silent.port, groups[0]._listener.cookie)
        monkeypatch.setattr(groups[0], "address", hidden.encode)
        for group in groups[1:]:
            _hold_the_backend(group, monkeypatch)
        addresses = [group.address() for group in groups]
        calls = Calls(lambda rank: groups[rank].configure(1, rank, addresses, LONG_S), range(3))
        missed = {rank: set(error.missed) for rank, error in calls.finish().items()}
        assert missed.pop(0) == set()
        assert set().union(*missed.values()) == {0}


def _hold_the_backend(group: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend of `group` does not connect before it is interrupted."""
    make = group._new_communicator

    def make_and_hold(rank: int, size: int) -> object:
        communicator = make(rank, size)
        over = threading.Event()
        interrupt = communicator.interrupt

        def end() -> None:
            over.set()
            interrupt()

        def connect(rendezvous: object, timeout_s: float) -> None:
            over.wait(PATIENCE_S)
            raise ProcessGroupError("interrupted")

        monkeypatch.setattr(communicator, "connect", connect)
        monkeypatch.setattr(communicator, "interrupt", end)
        return communicator

    monkeypatch.setattr(group, "_new_communicator", make_and_hold)


def test_a_member_that_can_make_no_group_at_all_names_itself(
    native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gloo_groups(2, native=native) as groups:

        def fail(rank: int, size: int) -> object:
            raise OSError("no such device")

        monkeypatch.setattr(groups[1], "_new_communicator", fail)
        addresses = [group.address() for group in groups]
        calls = Calls(lambda rank: groups[rank].configure(1, rank, addresses, LONG_S), [1])
        (outcome,) = calls.finish().values()
        assert outcome.missed == (1,)
