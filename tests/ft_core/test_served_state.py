"""A member that serves its state to others is only told of changes that its loop has made meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

from ft_core.attempt import FIRST_CHECKS
from ft_core.config import UNNAMED
from ft_core.heal import HealError, HealKey, HealProgress, HealStats, fetch
from ft_core.shell import data_plane
from ft_core.state import CHANGED_WHILE_SERVED, LARGE_BYTES
from tests.harness.cluster import Replica, lighthouse, replicas
from tests.harness.waiting import PATIENCE_S, until

LARGE = LARGE_BYTES // 4


class LargeReplica(Replica):
    """Its tensor is served and received in place."""

    def __init__(self, server: Any, name: str, **options: Any) -> None:
        super().__init__(server, name, **{"use_async_quorum": True, **options})
        self.weights = torch.zeros(LARGE)
        self.discards: list[str] = []
        self.began = 0  # the last step that it has begun
        self.manager.register_step_end(self._ended)

    def _ended(self, committed: bool) -> None:
        if not committed:
            self.discards.append(str(self.manager.errored()))

    def step(self, gradient: float = 1.0) -> bool:
        self.manager.start_quorum()
        self.began = self.manager.current_step()
        return self.end(self.reduce(gradient))


def waiting(server: Any, *names: str) -> bool:
    jobs = server.status()["jobs"]
    return bool(jobs) and set(names) <= set(jobs[0]["waiting"])


def test_two_members_that_heal_at_the_same_step() -> None:
    """Each is up to date before the step's vote, and the other one does not heal from it."""
    with lighthouse() as server:
        a, b, c = (LargeReplica(server, name) for name in "abc")
        running = threading.Event()

        def first() -> None:
            a.run_to(3)
            a.manager.start_quorum()
            running.set()
            until(lambda: waiting(server, "b", "c"), "both newcomers")
            assert a.manager.should_commit()
            a.weights -= 1.0
            a.run_to(8)
            a.close()

        def later(replica: LargeReplica) -> None:
            running.wait()
            replica.run_to(8)
            replica.close()

        replicas(first, lambda: later(b), lambda: later(c))
        assert [a.discards, b.discards, c.discards] == [[], [], []]
        assert torch.equal(a.weights, b.weights) and torch.equal(a.weights, c.weights)


@pytest.mark.parametrize("use_async_quorum", [True, False])
def test_a_state_may_hold_what_a_validation_has_made(use_async_quorum: bool) -> None:
    """Tensors of `torch.inference_mode` count no changes, and only there may they be written to: a large one ended the
    first step, and later ones kept every other process from coming back."""

    def made(value: float) -> dict[str, Any]:
        with torch.inference_mode():
            rows = torch.full((LARGE // 8, 8), value)
            return {"bank": rows, "turned": rows.t() + 1, "best": torch.tensor(value)}

    with lighthouse() as server:
        members = [LargeReplica(server, name, use_async_quorum=use_async_quorum) for name in "ab"]
        kept = [made(7.0), made(0.0)]
        for each, own in zip(members, kept, strict=True):
            each.manager.register_state_dict_fn("kept", own.update, partial(dict, own))
        running = threading.Event()

        def first() -> None:
            members[0].run_to(3)
            members[0].manager.start_quorum()
            running.set()
            until(lambda: waiting(server, "b"), "the newcomer")
            assert members[0].manager.should_commit()
            members[0].weights -= 1.0
            kept[0].update(made(8.0))
            members[0].run_to(8)
            members[0].close()

        def later() -> None:
            assert running.wait(PATIENCE_S)
            members[1].run_to(8)
            members[1].close()

        replicas(first, later)
    assert [each.discards for each in members] == [[], []]
    for name, value in kept[0].items():
        assert torch.equal(kept[1][name], value), name


def test_a_member_whose_state_differs_serves_it_no_more() -> None:
    """It is told so with the vote of a step in which a newcomer heals from it, while it is read."""
    with lighthouse(all_join=True) as server:
        a, b, c = members = [LargeReplica(server, name, expected_replicas=3) for name in "abc"]
        late = LargeReplica(server, "late", expected_replicas=3)
        for each in (*members, late):
            each.manager.register_compared("weights", partial(list, [each.weights]))
        running, reads, told = threading.Event(), threading.Event(), threading.Event()
        last = list[int]()

        def hold(_: HealProgress) -> None:
            reads.set()
            assert told.wait(PATIENCE_S)

        def read(key: HealKey) -> HealStats:
            source, deadline = b.manager._session.plane.source, time.monotonic() + PATIENCE_S  # type: ignore[union-attr]
            return fetch([source], key, deadline=deadline, options=UNNAMED, progress=hold)[1]

        def train(member: LargeReplica) -> None:
            member.run_to(3)
            running.set()
            until(lambda: waiting(server, "late"), "the newcomer")
            member.step()
            if member is b:
                b.weights[7] += 1.0
                serve_and_be_told()
            finish(member)

        def serve_and_be_told() -> None:
            b.manager.start_quorum()
            position = b.manager._session.control.status.published  # type: ignore[union-attr]
            assert position is not None
            with ThreadPoolExecutor(1) as pool:
                found = pool.submit(read, HealKey(*position))
                assert reads.wait(PATIENCE_S)
                b.manager.allreduce(torch.ones(LARGE)).wait()
                assert not b.manager.should_commit()
                told.set()
                with pytest.raises(HealError, match="its parameters at step 4 are not those"):
                    found.result(PATIENCE_S)

        def finish(member: LargeReplica) -> None:
            # The newcomer's source has lost its state: it may have to heal again, after a pause.
            while not last:
                member.step()
            member.run_to(last[0])
            member.close()

        def come_late() -> None:
            assert running.wait(PATIENCE_S)
            late.run_to(5)
            last.append(late.manager.current_step() + 3)
            finish(late)

        replicas(*(partial(train, each) for each in members), come_late)
        for each in (b, c, late):
            assert torch.equal(each.weights, a.weights)
            assert CHANGED_WHILE_SERVED not in str(each.discards)


def test_a_group_that_commits_alone_serves_the_state_that_it_has_trained_past(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A heal takes longer than its steps: the transfer begins when it is in the next one."""
    fetch = data_plane.fetch
    with lighthouse() as server:
        first, late = (LargeReplica(server, name, commit="group") for name in ("first", "late"))
        running, end = threading.Event(), list[int]()

        def fetch_later(sources: Any, key: HealKey, **options: Any) -> Any:
            until(lambda: first.began > key.step, "the step after the one that is served")
            return fetch(sources, key, **options)

        monkeypatch.setattr(data_plane, "fetch", fetch_later)

        def train() -> None:
            first.run_to(3)
            running.set()
            while not end or first.manager.current_step() < end[0]:
                first.step()

        def come_late() -> None:
            assert running.wait(PATIENCE_S)
            came = late.step()
            end.append(late.manager.current_step() + 3)
            assert came, late.discards
            late.run_to(end[0])

        replicas(train, come_late)
        replicas(first.close, late.close)
        assert torch.equal(late.weights, first.weights)


def test_a_member_whose_loop_uses_its_state_takes_none_until_it_allows_it() -> None:
    """In a validation, say: the weights stay as they are, and the next step heals."""
    with lighthouse() as server:
        first, late = Replica(server, "first"), Replica(server, "late", value=7.0)
        others, running, end = torch.full((8,), 7.0), threading.Event(), list[int]()
        late.manager.register_state_dict_fn("others", others.copy_, lambda: others)
        first.manager.register_state_dict_fn("others", lambda _: None, lambda: torch.zeros(8))

        def train() -> None:
            first.run_to(3)
            running.set()
            until(lambda: waiting(server, "late"), "the newcomer")
            while not end or first.manager.current_step() < end[0]:
                first.step()
            first.close()

        def validate() -> None:
            assert running.wait(PATIENCE_S)
            late.manager.start_quorum(takes_state=False)
            assert late.manager.is_healing()
            late.manager.allreduce(torch.ones(8)).wait()
            assert late.manager.errored() is not None
            for mine in (late.weights, others):
                assert torch.equal(mine, torch.full((8,), 7.0))
            assert not late.manager.should_commit()
            late.manager.rejoin("the validation is over")
            while not late.step():
                pass
            end.append(late.manager.current_step() + 3)
            late.run_to(end[0])
            late.close()

        replicas(train, validate)
        assert late.manager.state_dict() == first.manager.state_dict()
        assert torch.equal(late.weights, first.weights)
        assert torch.equal(others, torch.zeros(8))


def move(replica: Replica) -> None:
    replica.manager.rejoin("moved", discard_state=False)


class QueueReplica(LargeReplica):
    """Where it is `writing`, its loop writes a large tensor before its vote, as a forward writes a queue of
    keys, or a momentum encoder. Half of it before a member that heals reads, and half after."""

    def __init__(self, server: Any, name: str, bypass: bool, reading: Reading) -> None:
        # Within a step a receiver sees no change of its own loop's that bypasses the counters.
        super().__init__(server, name, use_async_quorum=not bypass)
        self.queue = torch.zeros(2 * LARGE)
        self.written = self.queue.data if bypass else self.queue
        self.reading, self.writes, self.healed = reading, 0, list[list[float]]()
        self.writing = self.discards_first = False
        """`discards_first`: its first step in which a member heals from it is discarded before it writes."""
        self.outlasts = False
        """It goes on with its step under the quorum after the one in which a member has healed from it."""
        self.leaves: Callable[[Replica], Any] | None = None
        """How it leaves, rather than vote, when a member has healed from it."""
        self.manager.register_state_dict_fn("queue", self._load, lambda: self.queue)

    def _load(self, queue: torch.Tensor) -> None:
        self.healed.append(queue.unique().tolist())
        self.queue.copy_(queue)

    def step(self, gradient: float = 1.0) -> bool:
        self.manager.start_quorum()
        if self.discards_first and self.heals_another():
            self.discards_first = False
            self.manager.report_error(RuntimeError("a bad batch"))
            return self.manager.should_commit()
        if self.writing:
            self.writes += 1
            before, after = self.written.chunk(2)
            before.fill_(self.writes)
            read = self.reading.let_in(self)
            if read and self.outlasts:
                until(lambda: not self.heals_another(), "the next quorum")
            after.fill_(self.writes)
            if read and self.leaves is not None:
                leave, self.leaves = self.leaves, None
                leave(self)
                return False
        return self.end(self.reduce(gradient))


class Reading:
    """Holds a step of the source until a heal from it has ended, and that until the step has come so far."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._comes, self._goes = threading.Event(), threading.Event()
        self.reads, self._fetch = 0, data_plane.fetch
        self.first: QueueReplica | None = None
        """The first read is of its state alone, and later ones are not held."""
        monkeypatch.setattr(data_plane, "fetch", self._read)

    def let_in(self, source: QueueReplica) -> bool:
        """Whether a member has read from it."""
        if not source.heals_another():
            return False
        self._goes.clear()
        self._comes.set()
        until(lambda: self._goes.is_set() or not source.heals_another(), "the heal")
        self._comes.clear()
        return self._goes.is_set()

    def _read(self, sources: list[str], *args: Any, **options: Any) -> Any:
        if self.first is not None:
            if self.reads:
                self.reads += 1
                return self._fetch(sources, *args, **options)
            sources = [self.first.manager._session.plane.source]  # type: ignore[union-attr]
        interrupt = options["interrupt"]  # another heal takes its place
        until(lambda: self._comes.is_set() or interrupt.is_set, "the source's step")
        if interrupt.is_set:
            raise HealError("interrupted")
        self._comes.clear()
        self.reads += 1
        try:
            return self._fetch(sources, *args, **options)
        finally:
            self._goes.set()


@pytest.mark.parametrize("when", ["at once", "in a later attempt", "from its first step on"])
@pytest.mark.parametrize("bypass", [False, True], ids=["counted", "through data"])
def test_a_loop_that_changes_what_it_serves_costs_one_step(
    bypass: bool, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member that has read it meanwhile heals once more, from a copy; as do all that come later. None does
    where the loop has done so in its first steps."""
    reading = Reading(monkeypatch)
    with lighthouse() as server:
        source, *others = (QueueReplica(server, name, bypass, reading) for name in "abc")
        source.writing = known = when == "from its first step on"
        begun, over, reads = threading.Event(), threading.Event(), list[int]()

        def train() -> None:
            source.run_to(2 + FIRST_CHECKS)
            source.writing, source.discards_first = True, when == "in a later attempt"
            begun.set()
            while not over.is_set():
                source.step()
            source.close()

        def come_and_go() -> None:
            assert begun.wait(PATIENCE_S)
            for other in others:
                while not other.step():
                    pass
                other.close()
                reads.append(reading.reads)
            over.set()

        replicas(train, come_and_go)
        assert [len(other.healed[-1]) for other in others] == [1, 1]
        # The first may not have been loaded when the source's no comes.
        assert reads == ([1, 2] if known else [2, 3])
        told = [reason for reason in source.discards if CHANGED_WHILE_SERVED in reason]
        first = int(when == "in a later attempt")
        assert told == ([] if known else source.discards[first : first + 1])
        assert not source.discards_first


def test_so_does_one_whose_step_goes_on_under_another_quorum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There the member that has read its state counts as one that holds it."""
    reading = Reading(monkeypatch)
    with lighthouse() as server:
        source, late = (QueueReplica(server, name, True, reading) for name in "ab")
        begun, over = threading.Event(), threading.Event()

        def train() -> None:
            source.run_to(2 + FIRST_CHECKS)
            source.writing = source.outlasts = True
            begun.set()
            while not over.is_set():
                source.step()
            source.close()

        def come_late() -> None:
            assert begun.wait(PATIENCE_S)
            late.manager.start_quorum()
            assert len(late.healed[0]) == 2
            late.manager.report_error(RuntimeError("a bad batch"))
            assert not late.manager.should_commit()
            source.outlasts = False
            while not late.step():
                pass
            over.set()
            late.close()

        replicas(train, come_late)
        assert len(late.healed) == 2 and len(late.healed[-1]) == 1


@pytest.mark.parametrize("leave", [Replica.close, move], ids=["for good", "for a moment"])
def test_a_member_that_leaves_in_such_a_step_says_so_before(
    leave: Callable[[Replica], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member that has read its state does not go on with what others still have."""
    reading = Reading(monkeypatch)
    with lighthouse() as server:
        source, other, late = (QueueReplica(server, name, True, reading) for name in "abc")
        begun, over = threading.Event(), threading.Event()

        def train() -> None:
            source.run_to(2 + FIRST_CHECKS)
            reading.first, source.writing, source.leaves = source, True, leave
            begun.set()
            while source.leaves is not None:
                source.step()
            source.close()

        def go_on() -> None:
            while not over.is_set():
                other.step()
            other.close()

        def come_late() -> None:
            assert begun.wait(PATIENCE_S)
            while not late.step():
                pass
            over.set()
            late.close()

        replicas(train, go_on, come_late)
        assert late.healed[-1] == [0.0] and reading.reads == 2


def test_one_whose_collectives_fail_while_too_few_contribute_heals_all_the_same() -> None:
    """No step is made without it, and an asynchronous heal waited for a vote that came too late: its peer's no ended
    the collectives that it was in. So it went on, attempt after attempt, with groups of several ranks."""
    with lighthouse(all_join=True) as server:
        options: dict[str, Any] = {"expected_replicas": 2, "min_replica_size": 2}
        a, b = (Replica(server, name, use_async_quorum=True, **options) for name in "ab")
        b.weights += 1
        refused = threading.Semaphore(0)

        def first() -> None:
            while a.manager.current_step() < 3:
                if not a.end(a.begin()):
                    refused.release()
            a.close()

        def second() -> None:
            lost = 0
            while b.manager.current_step() < 3:
                reduced = b.begin()
                if b.manager.num_participants() < 2:
                    lost += 1
                    assert lost < 5, "no step is made"
                    assert refused.acquire(timeout=PATIENCE_S), "its peer has said no"
                    b.reduce()
                b.end(reduced)
            b.close()

        replicas(first, second)
        assert torch.equal(a.weights, b.weights)
