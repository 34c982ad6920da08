"""The simulator's own parts: what they promise to the runs built on them."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest

from lighthouse.wire.messages import (
    EACH,
    ON_LAST,
    Decision,
    Heartbeat,
    JobKey,
    Quorum,
    Reply,
    Request,
)
from tests.sim.checker import Checker, Violation
from tests.sim.clock import Clock
from tests.sim.cluster import Cluster
from tests.sim.network import Link, Network, NetworkProfile
from tests.sim.plane import Contribution, Plane
from tests.sim.process import Process
from tests.sim.profile import FAULTS, MORE_FAULTS, Fault, Profile, profile_of
from tests.sim.run import run

JOB = JobKey("job", "room")


class Ear:
    """A process that only listens."""

    def __init__(self) -> None:
        self.alive = True
        self.heard: list[Any] = []

    def link_up(self) -> None:
        self.heard.append("up")

    def link_down(self) -> None:
        self.heard.append("down")

    def hear(self, message: Reply) -> None:
        self.heard.append(message)


def make(profile: NetworkProfile) -> tuple[Clock, Network, Link, Ear, list[Request], list[bytes]]:
    clock, ear = Clock(), Ear()
    network = Network(clock, random.Random(1), profile)
    said: list[Request] = []
    lost: list[bytes] = []
    network.to_lighthouse = lambda home, peer, message: said.append(message)
    network.lighthouse_lost = lambda home, peer: lost.append(peer)
    link = Link("a", ear)
    network.lighthouse_started()
    network.attach(link)
    clock.run_until(1.0)
    return clock, network, link, ear, said, lost


def heartbeat(step: int) -> Heartbeat:
    return Heartbeat(JOB, "a", 1, step)


def test_the_clock_runs_calls_in_order_of_time_then_of_scheduling() -> None:
    clock = Clock()
    seen: list[str] = []
    clock.at(2.0, seen.append, "late")
    clock.at(1.0, seen.append, "first")
    clock.at(1.0, seen.append, "second")
    clock.run_until(1.5)
    assert seen == ["first", "second"]
    assert clock.now == 1.5


def test_one_connection_keeps_the_order() -> None:
    clock, network, link, _, said, _ = make(NetworkProfile(jitter_s=0.5))
    for step in range(50):
        network.send_up(link, heartbeat(step))
    clock.run_until(10.0)
    assert said == [heartbeat(step) for step in range(50)]


def test_harsh_mode_loses_repeats_and_reorders() -> None:
    clock, network, link, _, said, _ = make(NetworkProfile(loss=0.2, repeat=0.2, reorder=0.2))
    for step in range(200):
        network.send_up(link, heartbeat(step))
    clock.run_until(10.0)
    steps = [m.step for m in said if isinstance(m, Heartbeat)]
    assert set(steps) < set(range(200))
    assert len(steps) > len(set(steps))
    assert steps != sorted(steps)


def test_a_broken_connection_takes_what_is_on_its_way_and_keeps_what_is_sent_later() -> None:
    clock, network, link, ear, said, lost = make(NetworkProfile())
    network.send_up(link, heartbeat(1))
    network.break_link(link, lighthouse_s=0.3, process_s=0.1)
    network.send_up(link, heartbeat(2))  # no process has noticed yet
    clock.run_until(1.1)  # the process has, and is not connected again yet
    network.send_up(link, heartbeat(3))
    clock.run_until(3.0)
    assert said == [heartbeat(3)]
    assert ear.heard == ["up", "down", "up"]
    assert lost == [b"a#1"]


def test_a_partition_lasts_until_it_is_lifted() -> None:
    clock, network, link, ear, said, lost = make(NetworkProfile())
    network.block(link)
    clock.run_until(5.0)
    network.send_up(link, heartbeat(1))
    network.send_down(b"a#1", Decision(JOB, 1, 1, True))
    clock.run_until(9.0)
    assert (said, ear.heard) == ([], ["up", "down"])
    network.unblock(link)
    clock.run_until(10.0)
    assert (said, ear.heard) == ([heartbeat(1)], ["up", "down", "up"])
    assert lost == [b"a#1"]


# ---------------------------------------------------------------- plane


class Worker:
    def __init__(self, replica_id: str) -> None:
        self.replica_id = replica_id
        self.made: list[str] = []
        self.results: list[Any] = []

    def group_made(self, quorum_id: int, error: str) -> None:
        self.made.append(error)

    def connects(self, quorum_id: int) -> bool:
        return False

    def reduced(self, quorum_id: int, sequence: int, total: Any) -> None:
        self.results.append(total)


def three_workers() -> tuple[Clock, Plane, list[Any], Checker]:
    clock = Clock()
    everybody = frozenset("abc")
    checker = Checker(
        now=lambda: clock.now,
        unreachable=frozenset,
        living=lambda: everybody,
        cut_since=lambda since: frozenset(),
        life=lambda: 1,
    )
    checker.announced(0, 1, ("a", "b", "c"))
    checker.healing[1] = frozenset()
    plane = Plane(clock, random.Random(1), checker)
    return clock, plane, [Worker(name) for name in "abc"], checker


def part(name: str) -> Contribution:
    return Contribution(name, 7, ord(name))


def test_a_group_needs_all_its_members() -> None:
    clock, plane, workers, _ = three_workers()
    for worker in workers[:2]:
        plane.configure(worker, 1, ("a", "b", "c"))
    clock.run_until(1.0)
    assert not workers[0].made
    plane.configure(workers[2], 1, ("a", "b", "c"))
    clock.run_until(2.0)
    assert [w.made for w in workers] == [[""], [""], [""]]


def test_all_members_that_finish_an_all_reduce_hold_the_same_sum() -> None:
    clock, plane, workers, _ = three_workers()
    for worker in workers:
        plane.configure(worker, 1, ("a", "b", "c"))
    clock.run_until(1.0)
    for worker in workers:
        plane.enter(worker, 1, 0, part(worker.replica_id))
    clock.run_until(2.0)
    sums = [w.results for w in workers]
    assert sums[0] == sums[1] == sums[2]
    assert sums[0][0].parts == {part("a"), part("b"), part("c")}


def test_a_member_that_goes_breaks_the_operation_for_those_not_done() -> None:
    clock, plane, workers, _ = three_workers()
    for worker in workers:
        plane.configure(worker, 1, ("a", "b", "c"))
    clock.run_until(1.0)
    for worker in workers[:2]:
        plane.enter(worker, 1, 0, part(worker.replica_id))
    plane.leave("c", 1)
    clock.run_until(2.0)
    assert all(result is None for w in workers for result in w.results)


def test_collectives_of_two_steps_never_meet() -> None:
    clock, plane, workers, _ = three_workers()
    for worker in workers:
        plane.configure(worker, 1, ("a", "b", "c"))
    clock.run_until(1.0)
    plane.enter(workers[0], 1, 0, part("a"))
    plane.enter(workers[1], 1, 0, part("b"))
    with pytest.raises(Violation, match="mismatched"):
        plane.enter(workers[2], 1, 1, part("c"))


# ---------------------------------------------------------------- checker


def test_two_member_lists_of_one_id_are_a_violation() -> None:
    *_, checker = three_workers()
    with pytest.raises(Violation, match="S1"):
        checker.same_members(1, ("a", "b"), ("a", "c"))
    with pytest.raises(Violation, match="S1"):
        checker.announced(0, 1, ("a", "b"))


def test_two_states_at_one_position_are_a_violation() -> None:
    *_, checker = three_workers()
    checker.born("a", (0, "root"), 1)
    with pytest.raises(Violation, match="S3"):
        checker.born("b", (0, "root"), 2)


def test_a_healing_contributor_is_a_violation() -> None:
    clock, plane, workers, checker = three_workers()
    checker.healing[1] = frozenset("c")
    for worker in workers:
        plane.configure(worker, 1, ("a", "b", "c"))
    clock.run_until(1.0)
    plane.enter(workers[0], 1, 0, part("a"))
    plane.enter(workers[1], 1, 0, part("b"))
    with pytest.raises(Violation, match="S4"):
        plane.enter(workers[2], 1, 0, part("c"))


def quorum_of(checker: Checker, quorum_id: int, base_id: int, members: tuple[str, ...]) -> None:
    checker.announced(0, quorum_id, members)
    rests = ON_LAST if base_id else EACH
    checker.starts(Quorum(JOB, quorum_id, 0, "root", base_id, (), (), rests=rests))


def test_a_no_that_the_deciding_lighthouse_knew_is_a_violation() -> None:
    """A later lighthouse may commit against it (F5) while one on whom the quorum rests is away."""
    *_, checker = three_workers()
    checker.living = lambda: frozenset("abcd")
    quorum_of(checker, 2, 0, ("a", "b", "c", "d"))
    quorum_of(checker, 3, 2, ("a", "b", "c"))
    for life in (1, 2):  # the second time the no comes to the new lighthouse, too
        checker.life = partial(int, life)
        checker.votes_no("a", 3, 7)
        with pytest.raises(Violation, match="committed against a"):
            quorum_of(checker, 2 + 2 * life, 2, ("a", "b", "c", "d"))
            checker._unanimous(3, 7)
    quorum_of(checker, 7, 2, ("a", "b", "c"))
    checker._unanimous(3, 7)
    quorum_of(checker, 8, 2, ("a", "b", "c", "d"))
    checker._unanimous(3, 7)  # one that was away is back, and hears what has become of the step


# ---------------------------------------------------------------- runs


def test_a_paused_process_finds_what_it_missed() -> None:
    cluster = Cluster("pause", Profile(slots=("a",)))
    cluster.start_lighthouse()
    cluster.spawn("a")
    cluster.clock.run_until(3.0)
    process = cluster.process_in("a")
    assert isinstance(process, Process)
    process.pause()
    before = process.commits
    cluster.clock.run_until(4.0)
    assert process.commits == before
    process.resume()
    cluster.clock.run_until(6.0)
    assert process.commits > before + 5


@pytest.mark.parametrize("kind", [*FAULTS, *MORE_FAULTS])
def test_each_fault_alone_is_survived(kind: str) -> None:
    faults = (Fault(2.0, kind, "a", 1.0), Fault(3.0, kind, "b", 1.0))
    # The processes of the next training wait for each other.
    faulty_s = 10.0 if kind == "finish" else 6.0
    result = run(f"only {kind}", Profile(faults=faults, faulty_s=faulty_s))
    assert result.commits > 30
    assert not result.woken


def test_a_heal_of_many_short_steps_under_per_group_commit() -> None:
    """Its sources act on their own votes, and are a step further by then."""
    faults = tuple(Fault(at_s, "crash", "b") for at_s in (1.0, 2.0))
    profile = Profile(
        faults=faults, faulty_s=3.0, forward_s=0.005, group_commit=True, asynchronous=True
    )
    result = run("short steps", profile)
    assert result.heals >= len(faults)
    # Two members lose an attempt when it dies, and one when it is back.
    assert result.discards <= 4 * len(faults)


def test_seeds_cover_every_fault_and_mode() -> None:
    profiles = [profile_of(seed) for seed in range(300)]
    apart = {"give_up", "cut", "suspend", "suspend_lighthouse", "keeper_dies"}
    assert {fault.kind for p in profiles for fault in p.faults} == {*FAULTS, *MORE_FAULTS, *apart}
    assert any(p.network.harsh for p in profiles)
    assert any(p.group_commit for p in profiles)
    assert any(p.asynchronous for p in profiles)
    assert any(p.heals_first for p in profiles)
    assert any(p.jobs > 1 for p in profiles)
    for habit in ("no_heal", "own_rules", "own_checkpoints", "other_clocks", "old_journal"):
        assert any(getattr(p, habit) for p in profiles), habit
    assert any(p.network.reconnect_s > 1.0 for p in profiles)


def test_a_job_that_can_not_commit_breaks_the_liveness_promise() -> None:
    profile = Profile(slots=("a", "b"), min_replicas=2, faulty_s=3.0)

    def deafen(cluster: Cluster) -> None:
        """The lighthouse hears nothing after the first second."""
        hears = cluster.network.to_lighthouse

        def maybe(home: int, peer: bytes, message: Request) -> None:
            if cluster.clock.now < 1.0:
                hears(home, peer, message)

        cluster.network.to_lighthouse = maybe

    with pytest.raises(Violation, match="L1"):
        run("deaf", profile, prepare=deafen)
