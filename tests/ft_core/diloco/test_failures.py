"""Discarded outer steps, bad windows, members that come and go; exact against the reference."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from ft_core.diloco.diloco import DiLoCo, LocalSGD
from ft_core.diloco.fragments import split
from ft_core.diloco.schedule import Schedule, ScheduleEvent
from ft_core.telemetry import QUORUM, WAITING, Event
from lighthouse.errors import JoinRefused
from tests.ft_core.diloco import reference
from tests.ft_core.diloco.members import Trainer, check_states, failing, make_members, run_all
from tests.ft_core.diloco.reference import Reference, network
from tests.harness.cluster import lighthouse, replicas
from tests.harness.waiting import PATIENCE_S

INNER = 100


def equal(trainer: Trainer, run: Reference) -> None:
    """Bit by bit."""
    shared = dict(run.model.named_parameters())
    local = dict(run.members[trainer.number].model.named_parameters())
    for name, value in trainer.globals().items():
        assert torch.equal(value, shared[name]), name
        assert torch.equal(trainer.parameters()[name], local[name]), name


class Script:
    """Plays a schedule on the reference; `at_apply(attempt, fragment)` says what becomes of it."""

    def __init__(self, run: Reference, schedule: Schedule) -> None:
        self.run, self.schedule = run, schedule
        self.step = self.local_step = self.attempt = 0

    def play(self, inner_steps: int, at_apply: Callable[[int, int], bool] | None = None) -> None:
        for _ in range(inner_steps):
            for member in self.run.members.values():
                self.run.inner_step(member)
            self.local_step += 1
            for event in self.schedule.due(self.step, self.local_step):
                fragment = self.schedule.fragment_of(self.step)
                if event is ScheduleEvent.LAUNCH:
                    self.run.launch(fragment)
                    continue
                self.step += at_apply(self.attempt, fragment) if at_apply else self.commit(fragment)
                self.attempt += 1
                self.local_step = 0

    def commit(self, fragment: int) -> bool:
        self.run.apply(fragment)
        return True


@pytest.mark.parametrize(
    ("kind", "sync_every", "fragments", "delay"),
    [(LocalSGD, 5, None, 0), (DiLoCo, 5, None, 0), (DiLoCo, 9, 3, 1)],
)
def test_a_discarded_outer_step_returns_to_the_global_parameters(
    kind: Any, sync_every: int, fragments: Any, delay: int
) -> None:
    """Member 1 fails every third outer step: its model returns as a whole, the other's fragment."""
    options = {"fragments": fragments, "fragment_sync_delay": delay} if kind is DiLoCo else {}
    kinds = [kind, failing(kind, lambda n: n % 3 == 1)]
    with lighthouse(all_join=True) as server:
        trainers = make_members(server, kinds, sync_every=sync_every, **options)
        run_all(trainers, INNER)
    parts = [f.names for f in split(network(), fragments)]
    run = Reference([0, 1], parts, local_sgd=kind is LocalSGD)
    script = Script(run, Schedule(sync_every, len(parts), delay))

    def outcome(attempt: int, fragment: int) -> bool:
        if attempt % 3 != 1:
            return script.commit(fragment)
        run.reset(fragment, [0])
        for part in range(len(parts)):
            run.reset(part, [1])
        return False

    script.play(INNER, outcome)
    assert trainers[0].loop.stats.discarded == trainers[1].loop.stats.discarded > 5
    for trainer in trainers:
        equal(trainer, run)


def test_a_window_that_is_not_finite_is_left_out_and_costs_the_others_nothing() -> None:
    def backward(model: nn.Module, member: int, inner: int) -> None:
        reference.backward(model, member, inner)
        if member == 1 and inner == 7:
            model.a.weight.grad.fill_(float("nan"))

    with lighthouse(all_join=True) as server:
        trainers = make_members(server, [DiLoCo] * 2, sync_every=5, backward=backward)
        run_all(trainers, 30)
    run = Reference([0, 1], [f.names for f in split(network(), None)])
    script = Script(run, Schedule(5))

    def outcome(attempt: int, fragment: int) -> bool:
        if attempt == 1:
            run.launch(fragment, [0])
            run.members[1].optimizer.state.clear()  # its moments are not finite
        return script.commit(fragment)

    script.play(30, outcome)
    for trainer in trainers:
        assert (trainer.loop.stats.committed, trainer.loop.stats.discarded) == (6, 0)
        assert trainer.loop.stats.void == trainer.number
        equal(trainer, run)


def test_drop_window() -> None:
    """Three inner steps are dropped, two follow; the others see a shorter drift, no failure."""
    with lighthouse(all_join=True) as server:
        trainers = make_members(server, [DiLoCo] * 2, sync_every=5)

        def script_of(trainer: Trainer) -> None:
            with trainer.loop, closing_on_error(trainer):
                for inner in range(10):
                    if trainer.number == 1 and inner == 3:
                        trainer.loop.drop_window("the loss exploded")
                    trainer.inner_step()
            trainer.close()

        replicas(*[lambda t=t: script_of(t) for t in trainers])
    run = Reference([0, 1], [f.names for f in split(network(), None)])
    script = Script(run, Schedule(5))
    script.play(3)
    run.reset(0, [1])
    script.play(7)
    for trainer in trainers:
        equal(trainer, run)


def test_an_error_reported_in_a_window_drops_this_window() -> None:
    """The others may wait in their collectives already, and then lose theirs, too."""

    def backward(model: nn.Module, member: int, inner: int) -> None:
        reference.backward(model, member, inner)
        if member == 1 and inner == 7:
            trainers[1].manager.report_error(ValueError("injected"))

    with lighthouse(all_join=True) as server:
        trainers = make_members(server, [DiLoCo] * 2, sync_every=5, backward=backward)
        run_all(trainers, 30)
    assert trainers[1].loop.stats.void == 1
    for trainer in trainers:
        stats = trainer.loop.stats
        assert stats.committed >= 5 and stats.committed + stats.discarded == 6
    check_states(trainers)


def test_a_kept_window_is_sent_again_without_the_one_that_failed() -> None:
    with lighthouse(all_join=True) as server:
        kinds = [DiLoCo, failing(DiLoCo, lambda n: n == 2)]
        trainers = make_members(server, kinds, sync_every=5, keep_windows=True)
        run_all(trainers, 30)
    run = Reference([0, 1], [f.names for f in split(network(), None)])
    script = Script(run, Schedule(5))

    def outcome(attempt: int, fragment: int) -> bool:
        if attempt == 2:
            run.launch(fragment, [0])
        return script.commit(fragment)

    script.play(30, outcome)
    for trainer in trainers:
        assert (trainer.loop.stats.committed, trainer.loop.stats.discarded) == (6, 1)
        equal(trainer, run)


@contextmanager
def closing_on_error(trainer: Trainer) -> Iterator[None]:
    """An error must not leave the others waiting."""
    try:
        yield
    except BaseException:
        trainer.close()
        raise


class Milestones:
    """Members wait here for each other's events, mid-window, by name."""

    def __init__(self) -> None:
        self._events: dict[str, threading.Event] = {}
        self._lock = threading.Lock()

    def __getitem__(self, name: str) -> threading.Event:
        with self._lock:
            return self._events.setdefault(name, threading.Event())

    def wait(self, name: str) -> None:
        assert self[name].wait(PATIENCE_S), name


def tell_without_1(trainer: Trainer, event: threading.Event) -> None:
    """Set `event` once this member has a quorum without member 1."""

    def sink(e: Event) -> None:
        if e.kind == QUORUM and not any(m.startswith("r1:") for m in e.data["members"]):
            event.set()

    trainer.manager.telemetry.add_sink(sink)


def tell_when_waiting(trainer: Trainer, event: threading.Event) -> None:
    """Set `event` once the lighthouse knows this member and has it wait for the next quorum."""
    trainer.manager.telemetry.add_sink(lambda e: event.set() if e.kind == WAITING else None)


@pytest.mark.parametrize("use_async_quorum", [False, True])
@pytest.mark.parametrize(
    ("kind", "sync_every", "fragments", "delay", "weighted"),
    [(LocalSGD, 4, None, 0, False), (DiLoCo, 4, None, 0, False), (DiLoCo, 8, 2, 2, True)],
)
def test_members_change_at_outer_steps(
    kind: Any, sync_every: int, fragments: Any, delay: int, weighted: bool, use_async_quorum: bool
) -> None:
    """0 and 1 train; 2 joins and heals; 1 leaves; 0 and 2 go on. With a synchronous quorum 2 contributes to its first
    outer step, so 1 leaves before that. Two contribute to each outer step, so that sums are exact."""
    options: dict[str, Any] = {"weighted": weighted}
    if kind is DiLoCo:
        options.update(fragments=fragments, fragment_sync_delay=delay)
    slot = sync_every // (fragments or 1)
    together = slot if use_async_quorum else 0  # steps of all three, but for the first
    gate = Milestones()
    manager = {"use_async_quorum": use_async_quorum}

    def trainer(i: int) -> Trainer:
        return Trainer(
            server.address(),
            i,
            kind,
            expected=2 if i < 2 else 0,
            sync_every=sync_every,
            manager=manager,
            **options,
        )

    def old(i: int) -> Trainer:
        t = trainer(i)
        with t.loop, closing_on_error(t):
            for _ in range(5 * slot + 1):
                t.inner_step()
            gate[f"{i} is in slot 5"].set()
            gate.wait("2 waits")  # it enters with the commit that ends slot 5
            for _ in range(slot):
                t.inner_step()
            # Slot 6 has begun: 0, 1 and 2 are in the quorum.
            for _ in range(together):
                t.inner_step()
            if i == 1:
                gate.wait("0 listens")
                gate.wait("2 listens")
                t.close()
                return t
            tell_without_1(t, gate["0 has a quorum without 1"])
            gate["0 listens"].set()
            gate.wait("0 has a quorum without 1")
            for _ in range(7 * slot - together - 1):
                t.inner_step()
        t.close()
        return t

    def new() -> Trainer:
        gate.wait("0 is in slot 5")
        gate.wait("1 is in slot 5")
        t = trainer(2)
        tell_when_waiting(t, gate["2 waits"])
        with t.loop, closing_on_error(t):
            if use_async_quorum:
                gate.wait("2 waits")
                # It computes its first slot on what it has, and this slot is dropped.
            for _ in range(together + 1):
                t.inner_step()
            tell_without_1(t, gate["2 has a quorum without 1"])
            gate["2 listens"].set()
            gate.wait("2 has a quorum without 1")
            for _ in range(7 * slot - together - 1):
                t.inner_step()
        t.close()
        return t

    with lighthouse() as server:
        zero, one, two = replicas(lambda: old(0), lambda: old(1), new)
    assert zero.loop.stats.discarded == two.loop.stats.discarded == one.loop.stats.discarded == 0
    check_states([zero, one, two])
    parts = [f.names for f in split(network(), fragments)]
    run = Reference([0, 1], parts, local_sgd=kind is LocalSGD, weighted=weighted)
    script = Script(run, Schedule(sync_every, len(parts), delay))
    script.play(6 * slot)
    run.members[2] = run.new_member(2)  # at the global parameters, in slot 6
    if not use_async_quorum:
        script.play(1)
        del run.members[1]
        script.play(7 * slot - 1)
        equal(zero, run)
        equal(two, run)
    for name, value in zero.globals().items():
        assert torch.equal(value, two.globals()[name])
    assert zero.manager.current_step() == two.manager.current_step() == 13


def test_no_member_joins_between_the_outer_steps_of_a_sync() -> None:
    """It would not know that more of them follow at once. 2 asks in the first of three, and joins behind the
    last."""
    gate = Milestones()

    class Gated(DiLoCo):
        def _vote(self) -> bool:
            if self._syncs:
                gate["0 and 1 synchronize"].set()
                gate.wait("2 waits")
            return super()._vote()

    def trainer(i: int, kind: type[DiLoCo]) -> Trainer:
        options = {"expected": 2 if i < 2 else 0, "sync_every": 6, "fragments": 3}
        return Trainer(server.address(), i, kind, **options)

    def run(t: Trainer, before: Callable[[], object]) -> tuple[Trainer, int]:
        with t.loop, closing_on_error(t):
            before()
            step = t.manager.current_step()
            for _ in range(12):
                t.inner_step()
        t.close()
        return t, step

    def old(i: int) -> tuple[Trainer, int]:
        t = trainer(i, Gated)

        def before() -> None:
            for _ in range(3):  # the second fragment's slot has begun
                t.inner_step()
            assert t.loop.sync()

        return run(t, before)

    def new() -> tuple[Trainer, int]:
        gate.wait("0 and 1 synchronize")
        t = trainer(2, DiLoCo)
        tell_when_waiting(t, gate["2 waits"])
        return run(t, lambda: None)

    with lighthouse() as server:
        found = replicas(lambda: old(0), lambda: old(1), new)
    assert [step for _, step in found] == [1 + 3] * 3
    check_states([t for t, _ in found])
    assert [t.manager.current_step() for t, _ in found] == [1 + 3 + 6] * 3


def test_members_with_other_settings_are_refused_when_they_join() -> None:
    with lighthouse() as server:
        first = Trainer(server.address(), 0, DiLoCo, sync_every=8)
        with first.loop:
            for i, other in enumerate(
                (
                    {"sync_every": 6},
                    {"fragments": 2},
                    {"codec": "int8"},
                    {"weighted": True},
                    {"fragment_update_alpha": 0.5},
                    {"fragment_sync_delay": 1},
                    {"bucket_bytes": 99},
                    {"keep_windows": True},
                ),
                start=1,
            ):
                late = Trainer(server.address(), i, DiLoCo, **{"sync_every": 8, **other})
                with pytest.raises(JoinRefused, match="diloco: "):
                    late.loop.__enter__()
                late.close()
        first.close()


@pytest.mark.parametrize("seed", range(4))
def test_random_faults_leave_equal_states(seed: int) -> None:
    """Three members whose votes, windows and loops fail at random, with all options mixed: an equal
    (step, lineage) is an equal state, and the last outer steps commit."""
    pick = random.Random(seed)
    options: dict[str, Any] = {
        "sync_every": 6,
        "fragments": pick.choice([1, 2, 3]),
        "fragment_sync_delay": pick.choice([0, 1]),
        "fragment_update_alpha": pick.choice([0.0, 0.5]),
        "codec": pick.choice([None, "int8", "int4"]),
        "keep_windows": seed % 2 == 1,
        "weighted": pick.choice([False, True]),
        "bucket_bytes": pick.choice([64, 1 << 20]),
    }
    manager = {"use_async_quorum": pick.choice([False, True])}
    dice = [random.Random(100 * seed + i) for i in range(3)]

    def backward(model: nn.Module, member: int, inner: int) -> None:
        reference.backward(model, member, inner)
        chance = dice[member].random() if inner < 60 else 1.0
        if chance < 0.02:
            model.a.weight.grad.fill_(float("inf"))
        elif chance < 0.04:
            trainers[member].manager.report_error(ValueError("injected"))
        elif chance < 0.06:
            trainers[member].loop.drop_window("injected")

    def faulty(member: int) -> Any:
        return failing(DiLoCo, lambda n: dice[member].random() < 0.1 and n < 20)

    with lighthouse(all_join=True) as server:
        trainers = make_members(
            server, [faulty(i) for i in range(3)], backward=backward, manager=manager, **options
        )
        run_all(trainers, 90)
    check_states(trainers)
    assert sum(t.loop.stats.discarded for t in trainers) > 0
    for trainer in trainers:
        assert trainer.loop.stats.committed > 5
        assert all(bool(torch.isfinite(v).all()) for v in trainer.globals().values())
