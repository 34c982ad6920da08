"""Jobs of many replica groups, and groups of many ranks: a quorum forms, one dies, heals and is back. And what that
costs in messages, which docs/protocol.md tells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from lighthouse.wire.messages import Decision
from tests.sim.cluster import Cluster
from tests.sim.groups import Groups
from tests.sim.profile import Fault, Profile
from tests.sim.run import run

MANY = 64


def counted(send: Callable[[Any, Any], None], seen: Counter[str]) -> Callable[[Any, Any], None]:
    """`send` of the network, whose messages are counted by kind."""

    def count(to: Any, message: Any) -> None:
        kind = type(message).__name__
        if isinstance(message, Decision) and message.next_quorum is not None:
            kind = "Decision with a quorum"
        seen[kind] += 1
        send(to, message)

    return count


def messages_of(count: int, faults: tuple[Fault, ...], seconds: float) -> tuple[Counter[str], Any]:
    """What a job of `count` groups says in a run, by kind; and its checker."""
    seen: Counter[str] = Counter()
    clusters: list[Cluster] = []

    def prepare(cluster: Cluster) -> None:
        network = cluster.network
        network.send_up = counted(network.send_up, seen)  # type: ignore[method-assign]
        network.send_down = counted(network.send_down, seen)  # type: ignore[method-assign]
        clusters.append(cluster)

    profile = Profile(
        slots=tuple(f"g{number:02}" for number in range(count)),
        expected_replicas=count,
        faulty_s=seconds,
        faults=faults,
        death_notices=1.0,
    )
    run(1, profile, prepare=prepare)
    (checker,) = clusters[0].checkers.values()
    return seen, checker


def test_many_groups_form_a_quorum_lose_one_and_heal_it() -> None:
    seen, checker = messages_of(MANY, (), 3.0)
    assert len(checker.births) == 1
    assert seen["Vote"] == seen["Decision"] == checker.commits, (
        "a step costs each group one of each"
    )

    seen, checker = messages_of(MANY, (Fault(1.0, "crash", "g40"),), 3.0)
    assert len(checker.births) == 3, "all, all but one, all"
    assert checker.heals == 1
    assert seen["Revoke"] < MANY
    assert seen["Decision with a quorum"] == 2 * (MANY - 1), (
        "the quorum without it, and that with it again"
    )


def test_a_rank_of_many_dies_and_its_group_heals() -> None:
    groups = Groups(1, slots=("a", "b"), size=MANY, kinds=("kill a rank",), faults=1, faulty_s=2.0)
    groups.run()
    assert groups.struck == ["kill a rank"]
    assert sum(world.checker.heals for world in groups.worlds) == MANY
    commits = groups.worlds[0].checker.commits
    assert groups.asked["Vote"] < 2 * commits + 2 * MANY, (
        "a group has one voice; its ranks may repeat it once"
    )
    assert groups.asked["Join"] < MANY, "three processes have joined, each with a few words"
    messages = groups.clock.events / (commits * MANY)
    assert messages < 20, "a rank's share of a step does not grow with the number of ranks"
