"""TransferPlan under a virtual clock: which source is asked for what, whatever sources do."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from ft_core.heal.transfer_plan import (
    FIRST_STALL_S,
    LATE_FLOOR_S,
    PACE_AFTER_S,
    SILENT_SHARE,
    WINDOW,
    TransferPlan,
)


@dataclass
class World:
    """Sources that answer after `service_s` a chunk, one chunk at a time; None never answers.

    A connection that the plan ends is made again after `rest_s`.
    """

    plan: TransferPlan
    service_s: dict[str, float | None]
    now: float = 0.0
    rest_s: float = 1.0
    ended: list[str] = field(default_factory=list)
    asked: dict[int, int] = field(default_factory=dict)
    delivered: dict[str, int] = field(default_factory=dict)
    unable: dict[str, frozenset[int]] = field(default_factory=dict)
    _free_at: dict[str, float] = field(default_factory=dict)
    _events: list[tuple[float, str, int]] = field(default_factory=list)
    _resting: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.service_s:
            self._add(name)

    def _add(self, name: str) -> None:
        self.plan.add_source(name, self.now, unable=self.unable.get(name, frozenset()))

    def run(self, until: float = 1e9) -> None:
        while not self.plan.finished and self.now < until:
            for name in self.plan.late(self.now):
                self.ended.append(name)
                self.lose(name)
                self._resting[name] = self.now + self.rest_s
            for name in [n for n, at in self._resting.items() if at <= self.now]:
                del self._resting[name]
                self._add(name)
            for name, chunk in self.plan.next_requests(self.now):
                assert chunk not in self.unable.get(name, ())
                self.asked[chunk] = self.asked.get(chunk, 0) + 1
                service_s = self.service_s[name]
                if service_s is not None:
                    start = max(self.now, self._free_at.get(name, 0.0))
                    self._free_at[name] = start + service_s
                    heapq.heappush(self._events, (start + service_s, name, chunk))
            self.plan.check()
            due = self.plan.next_deadline()
            times = [*self._resting.values(), *(at for at, _, _ in self._events[:1])]
            times += [] if due is None else [due]
            if not times:
                return
            assert min(times) >= self.now or self._events
            self.now = max(self.now, min(times))
            while self._events and self._events[0][0] <= self.now:
                _, name, chunk = heapq.heappop(self._events)
                if self.plan.received(name, chunk, self.now):
                    self.delivered[name] = self.delivered.get(name, 0) + 1

    def corrupt(self, name: str, rng: random.Random) -> None:
        """What is on the way from it arrives, damaged, if anything is."""
        owed = [event for event in self._events if event[1] == name]
        if owed:
            event = rng.choice(owed)
            self._events.remove(event)
            heapq.heapify(self._events)
            self.plan.corrupted(name, event[2], self.now)

    def lose(self, name: str) -> None:
        """Its connection ends, with all that is on the way."""
        self.plan.drop_source(name)
        self._resting.pop(name, None)
        self._events = [event for event in self._events if event[1] != name]
        heapq.heapify(self._events)
        self._free_at.pop(name, None)

    def wasted(self) -> int:
        return sum(self.asked.values()) - len(self.asked)


def test_two_equal_sources_share() -> None:
    world = World(TransferPlan(200), {"a": 0.01, "b": 0.01})
    world.run()
    assert world.plan.finished
    assert world.now == pytest.approx(1.0, rel=0.1)
    assert abs(world.delivered["a"] - world.delivered["b"]) <= 2 * WINDOW
    assert world.wasted() <= WINDOW


def test_a_source_ten_times_slower_costs_its_share_only() -> None:
    world = World(TransferPlan(300), {"fast": 0.01, "slow": 0.1})
    world.run()
    ideal = 300 / (100 + 10)
    assert world.now < 1.2 * ideal
    assert world.delivered["slow"] >= 15


@pytest.mark.parametrize("unable", [range(290), range(299), [0, 1, 299]], ids=str)
def test_a_source_is_not_asked_for_what_it_is_unable_to_deliver(unable: Sequence[int]) -> None:
    """Nor is another one late with it, however quick this one is with the rest."""
    service_s = {"quick": 1e-4, "slow": 0.2}
    world = World(TransferPlan(300), service_s, unable={"quick": frozenset(unable)})
    world.run()
    assert world.plan.finished
    assert world.delivered["slow"] >= len(unable)
    if len(unable) > 200:  # else it holds up the end with others
        assert not world.ended
        assert world.now <= 0.2 * (len(unable) + 2 * WINDOW)


def test_a_silent_source_costs_one_stall() -> None:
    world = World(TransferPlan(300), {"alive": 0.01, "dead": None})
    world.run()
    assert world.plan.finished
    assert world.now < 3.0 + FIRST_STALL_S
    assert world.ended[0] == "dead"
    assert world.delivered == {"alive": 300}
    assert world.wasted() <= WINDOW * len(world.ended)


def test_a_dropped_source_costs_what_it_owed() -> None:
    plan = TransferPlan(100)
    world = World(plan, {"a": 0.01, "b": 0.01})
    world.run(until=0.2)
    world.lose("b")
    world.run()
    assert plan.finished
    assert world.wasted() <= 2 * WINDOW


def test_the_only_source_is_tried_again() -> None:
    plan = TransferPlan(4)
    world = World(plan, {"only": None})
    world.run(until=FIRST_STALL_S)
    assert not plan.finished
    world.service_s["only"] = 0.01
    world.run()
    assert plan.finished
    assert world.now < 4 * FIRST_STALL_S


def test_a_source_that_sends_slowly_is_not_silent() -> None:
    """Parts of a chunk keep its connection, however long the whole takes."""
    plan = TransferPlan(2)
    plan.add_source("slow", 0.0)
    assert plan.next_requests(0.0) == [("slow", 0), ("slow", 1)]
    now = 0.0
    while now < 10 * FIRST_STALL_S:
        now += FIRST_STALL_S / 2
        assert not plan.late(now)
        plan.progress("slow", now)
    assert not plan.late(now + FIRST_STALL_S - 0.01)
    assert plan.late(now + FIRST_STALL_S) == ["slow"]
    assert plan.late(now + FIRST_STALL_S) == [], "it is told once"
    assert not plan.next_requests(now + FIRST_STALL_S), "it is on its way out"


def test_what_a_source_owes_is_asked_elsewhere_when_its_connection_has_ended() -> None:
    """Until then it may still be written."""
    plan = TransferPlan(3)
    plan.add_source("slow", 0.0)
    owed = [chunk for _, chunk in plan.next_requests(0.0)]
    assert owed == [0, 1, 2]
    plan.add_source("quick", 0.0)
    assert not plan.next_requests(0.0)
    plan.received("slow", 0, 0.1)
    assert plan.late(FIRST_STALL_S + 0.1) == ["slow"]
    assert not plan.next_requests(FIRST_STALL_S + 0.1)
    plan.check()
    plan.drop_source("slow")
    assert plan.next_requests(FIRST_STALL_S + 0.1) == [("quick", 1), ("quick", 2)]
    plan.check()


def test_a_source_that_holds_up_the_end_is_left() -> None:
    plan = TransferPlan(2, window=1)
    plan.add_source("quick", 0.0)
    plan.add_source("slow", 0.0)
    assert plan.next_requests(0.0) == [("quick", 0), ("slow", 1)]
    plan.received("quick", 0, 0.01)
    assert plan.next_requests(0.01) == []
    assert plan.next_deadline() == pytest.approx(LATE_FLOOR_S)
    plan.progress("slow", LATE_FLOOR_S - 0.01)
    assert plan.late(LATE_FLOOR_S - 0.01) == []
    assert plan.late(LATE_FLOOR_S) == ["slow"]
    plan.drop_source("slow")
    assert plan.next_requests(LATE_FLOOR_S) == [("quick", 1)]


def test_a_source_that_joins_late_takes_half() -> None:
    plan = TransferPlan(200)
    world = World(plan, {"a": 0.01})
    world.run(until=0.1)
    world.service_s["b"] = 0.01
    plan.add_source("b", world.now)
    world.run()
    assert world.delivered["b"] > 80


def test_corrupted_goes_to_another_source_and_twice_is_the_end() -> None:
    plan = TransferPlan(1)
    plan.add_source("a", 0.0)
    assert plan.next_requests(0.0) == [("a", 0)]
    assert plan.corrupted("a", 0, 0.1) is None
    plan.add_source("b", 0.1)
    assert plan.next_requests(0.1) == [("b", 0)]
    assert plan.corrupted("b", 0, 0.2) == ["a", "b"]


def test_corrupted_by_the_only_source_is_asked_there_again() -> None:
    plan = TransferPlan(1)
    plan.add_source("a", 0.0)
    plan.next_requests(0.0)
    plan.corrupted("a", 0, 0.1)
    assert plan.next_requests(0.1) == [("a", 0)]
    assert plan.received("a", 0, 0.2)
    assert plan.finished


def test_missing_is_short() -> None:
    plan = TransferPlan(100)
    plan.add_source("a", 0.0)
    assert plan.missing(4) == [(0, 100)]
    for chunk in range(0, 100, 2):
        plan.received("a", chunk, 0.0)
    assert len(plan.missing(4)) == 4
    listed = {c for lo, hi in plan.missing(4) for c in range(lo, hi)}
    assert set(range(1, 100, 2)) <= listed


def test_nothing_to_transfer() -> None:
    plan = TransferPlan(0)
    plan.add_source("a", 0.0)
    assert plan.finished
    assert plan.next_requests(0.0) == []


@pytest.mark.parametrize("seed", range(150))
def test_random_worlds_finish(seed: int) -> None:
    """Sources come, go, stall, send corrupted or unasked chunks; one good one is enough."""
    rng = random.Random(seed)
    plan = TransferPlan(rng.randint(1, 120), window=rng.randint(1, 10))
    world = World(plan, {"good": rng.choice([0.001, 0.05])})
    for step in range(rng.randint(0, 12)):
        name = f"s{step}"
        world.service_s[name] = rng.choice([None, 0.001, 0.01, 0.3])
        plan.add_source(name, world.now)
        world.run(until=world.now + rng.random() * 0.3)
        if rng.random() < 0.5 and len(world.service_s) > 1:
            gone = rng.choice([n for n in world.service_s if n != "good"])
            world.lose(gone)
            del world.service_s[gone]
        if rng.random() < 0.3:
            world.corrupt("good", rng)
            plan.corrupted("good", rng.randrange(plan._count), world.now)
        plan.check()
    world.run(until=world.now + 1000)
    assert plan.finished


def pace(chunks: int, done: int, *, now: float, deadline: float = 30.0) -> float:
    """What is said of a transfer of one source that has received so much."""
    plan = TransferPlan(chunks)
    plan.add_source("a", 0.0)
    plan.next_requests(0.0)
    for chunk in range(done):
        plan.received("a", chunk, now)
    return plan.hopeless_s(now, deadline)


def test_a_transfer_that_can_not_end_in_time_is_known_early() -> None:
    assert pace(1_000, 9, now=PACE_AFTER_S) == pytest.approx(991 / 10)
    assert pace(1_000, 0, now=PACE_AFTER_S) == pytest.approx(1_000)
    assert not pace(1_000, 9, now=PACE_AFTER_S - 0.01)  # too early to say
    assert not pace(1_000, 39, now=PACE_AFTER_S)  # 24 s
    assert not pace(1_000, 24, now=PACE_AFTER_S)  # 39 s: it may get faster
    assert pace(1_000, 400, now=20.0) == pytest.approx(600 * 20 / 401)
    assert not pace(1_000, 0, now=PACE_AFTER_S, deadline=7.9)  # the deadline is near anyway
    assert pace(1_000, 9, now=PACE_AFTER_S, deadline=600.0) == 0.0  # judged after 20 s
    assert pace(100_000, 9, now=20.0, deadline=600.0)
    assert not pace(3, 0, now=2.0)  # of few chunks one may take long
    assert not pace(1_000, 139, now=4.9)  # 35 s
    assert pace(1_000, 139, now=5.0) == pytest.approx(
        861 * 5 / 140
    )  # 31 s more: that is known by now
    assert not pace(1_000, 159, now=5.0)  # 26 s more, 25 left


def test_a_chunk_under_way_counts_by_the_part_that_has_come() -> None:
    """Of few large chunks, and many connections, each would else seem to bring one at once: sources of a slow
    heal stood still for 17 s of 30."""
    plan = TransferPlan(18)
    for number in range(8):
        plan.add_source(f"s{number}", 0.0)
    plan.next_requests(0.0)
    assert not plan.hopeless_s(4.0, 30.0)  # not known
    for number in range(8):
        plan.progress(f"s{number}", 4.0, 0.5)
    assert not plan.hopeless_s(4.0, 30.0)  # 4 of 18
    for number in range(8):
        plan.progress(f"s{number}", 4.0, 0.125)
    assert plan.hopeless_s(4.0, 30.0) == pytest.approx(18 * 4)
    plan.received("s0", 0, 4.0)
    assert not plan.hopeless_s(4.0, 30.0)  # 36 s: it may get faster
    assert plan.hopeless_s(6.0, 30.0) == pytest.approx(17 * 6 / (1 + 7 / 8))


def silent_since(last: float, *, done: int, count: int = 1_000, sources: int = 1) -> TransferPlan:
    """A plan of which `done` chunks have come, evenly, the last one at `last`."""
    plan = TransferPlan(count)
    for number in range(sources):
        plan.add_source(f"s{number}", 0.0)
    for number in range(done):
        now = last * (number + 1) / done
        plan.next_requests(now)
        plan.received(f"s{number % sources}", number, now)
    return plan


@pytest.mark.parametrize(("count", "done"), [(1_000, 500), (1_000, 999), (20, 18)])
@pytest.mark.parametrize("sources", [1, 3])
def test_a_transfer_that_falls_silent_is_given_up_early(
    count: int, done: int, sources: int
) -> None:
    """However much has come: its peers wait for the rest in vain."""
    plan = silent_since(1.0, done=done, count=count, sources=sources)
    assert not plan.hopeless_s(1.0 + 30.0 / SILENT_SHARE - 0.1, 30.0)
    assert plan.hopeless_s(1.0 + 30.0 / SILENT_SHARE, 30.0) == math.inf
    plan.received("s0", count - 1, 4.0)
    assert plan.finished or plan.hopeless_s(4.1, 30.0) < math.inf


def test_a_corrupted_chunk_is_asked_of_another_process() -> None:
    """Not over another connection to the same one, unless there is no other."""
    for others in (["b 0"], []):
        plan = TransferPlan(4, window=1)
        for name in ["a 0", "a 1", *others]:
            plan.add_source(name, 0.0, of=name[0])
        asked = dict(plan.next_requests(0.0))
        bad = asked.pop("a 0")
        assert plan.corrupted("a 0", bad, 1.0) is None
        for name, chunk in asked.items():
            plan.received(name, chunk, 1.0)
        again = [name for name, chunk in plan.next_requests(1.0) if chunk == bad]
        assert again == (others or ["a 0"])
        assert plan.corrupted(again[0], bad, 2.0) == ["a", again[0][0]]


def test_silence_is_judged_by_the_usual_time_between_chunks() -> None:
    slow = silent_since(4.0, done=8, count=16)  # two a second
    assert not slow.hopeless_s(4.0 + 4.9, 30.0)
    assert slow.hopeless_s(4.0 + 5.0, 30.0) == math.inf
    assert not silent_since(1.0, done=500).hopeless_s(6.0, 7.9)  # the deadline is near anyway
    assert not silent_since(0.0, done=0, count=1).hopeless_s(9.0, 30.0)  # nothing is usual yet


def test_a_plan_without_sources_has_no_pace() -> None:
    assert TransferPlan(9).hopeless_s(99.0, 100.0) == 0.0
