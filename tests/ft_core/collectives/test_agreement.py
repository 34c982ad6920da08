"""Agreements between updates: one loop, and headers that are checked before data moves."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ft_core.collectives.agreement import Agreed, agree, exchange_headers
from tests.harness.cluster import Replica, agreed, lighthouse, replicas


def loop_of(votes: str, behind_from: int = 99) -> tuple[list[str], Agreed[int] | None]:
    """What `agree` calls, and returns: votes are answered by `votes`; behind from that call on."""
    told: list[str] = []

    def note(what: str) -> Callable[[], None]:
        return lambda: told.append(what)

    def attempt() -> int:
        told.append("attempt")
        return len(told)

    def vote() -> bool:
        told.append("vote")
        return votes[told.count("vote") - 1] == "y"

    agreed = agree(
        attempt, begin=note("begin"), vote=vote, is_behind=lambda: len(told) >= behind_from
    )
    return told, agreed


ROUND = ["begin", "attempt", "vote"]


def test_it_is_repeated_until_it_is_committed() -> None:
    assert loop_of("nny") == (ROUND * 3, Agreed(8))


def test_a_member_that_is_behind_stops() -> None:
    """Before it begins, when `begin` has loaded a state, and when the vote has: also a committed
    one, which was the others'."""
    assert loop_of("y", behind_from=0) == ([], None)
    assert loop_of("ny", behind_from=4) == ([*ROUND, "begin"], None)
    assert loop_of("ny", behind_from=6) == (ROUND * 2, None)


def test_members_have_the_result_of_the_same_attempt() -> None:
    with lighthouse(min_replicas=2) as server:
        pair = [Replica(server, str(i), expected_replicas=2) for i in (0, 1)]

        bound = threading.Barrier(2)

        def run(index: int) -> tuple[list[list[int]] | None, int]:
            manager, attempts = pair[index].manager, [0]

            def attempt() -> list[list[int]] | None:
                attempts[0] += 1
                if attempts[0] == 1:  # both are in it: else the other would go on with its first
                    assert manager.bind() and bound.wait(20) >= 0
                    if index == 1:
                        manager.report_error(RuntimeError("injected"))
                header = [7, index, attempts[0]]
                return exchange_headers(manager.step, header)

            return agreed(manager, attempt), attempts[0]

        one, other = replicas(lambda: run(0), lambda: run(1))
        assert one == other == ([[7, 0, 2], [7, 1, 2]], 2)
        replicas(*[replica.close for replica in pair])


def test_a_member_that_contributes_nothing_has_no_header() -> None:
    with lighthouse() as server:
        old = Replica(server, "0", use_async_quorum=True)
        new = Replica(server, "1", value=5.0, use_async_quorum=True)
        old.step()

        def run(replica: Replica) -> list[list[int]] | None:
            manager = replica.manager
            header = [int(replica is old)]
            while True:
                manager.start_quorum()
                said = exchange_headers(manager.step, header)
                together = manager.replica_world_size() == 2
                manager.should_commit(no_update=True)
                if together:
                    return said

        assert replicas(lambda: run(old), lambda: run(new)) == [[[1]], [[1]]]
        replicas(old.close, new.close)
