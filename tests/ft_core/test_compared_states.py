"""Members compare their states: one that differs is named, discards its state, and heals."""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

import pytest
import torch
from torch import nn

from ft_core.config import JobOptions
from ft_core.ddp import DistributedDataParallel
from ft_core.heal.digests import ComparedState
from ft_core.optimizer import Optimizer
from lighthouse.errors import JoinRefused
from tests.harness import cluster
from tests.harness.cluster import Replica, lighthouse, one_of_two, rendezvous, replicas
from tests.harness.waiting import PATIENCE_S

WITHIN = 4
STEP_S = 0.03
T = TypeVar("T")
either_quorum = pytest.mark.parametrize(
    "asynchronous", [False, True], ids=["synchronous", "asynchronous"]
)


def in_threads(run: Callable[[T], None], members: Iterable[T]) -> None:
    """`run(member)` for each, in a thread of its own."""
    replicas(*(partial(run, member) for member in members))


class Trainer:
    """A member that trains a small model. `reasons`: of its discarded steps."""

    def __init__(self, server: Any, name: str, members: int, **options: Any) -> None:
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        self.manager = cluster.manager(
            server.address(),
            name,
            expected_replicas=members,
            load_state_dict=self.load,
            state_dict=self.save,
            **{"compare_steps": WITHIN, **options},
        )
        self.model = DistributedDataParallel(self.manager, self.net)
        inner = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.optimizer = Optimizer(self.manager, inner)
        self.reasons: list[str] = []
        self.heals = 0

    def save(self) -> dict[str, Any]:
        return {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: Any) -> None:
        self.heals += 1
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(4, 3)).square().sum().backward()
        self.optimizer.step()
        outcome = self.manager.last_outcome()
        assert outcome is not None
        if not outcome.committed:
            self.reasons.append(outcome.reason)

    def run_to(self, step: int) -> None:
        while self.manager.current_step() < step:
            self.step()

    def begin(self, *, flip: bool) -> None:
        """Take five steps; then, if it is asked for, a bit flips."""
        self.run_to(5)
        if flip:
            raw = self.net[2].weight.detach().view(torch.int32)
            raw[1, 3] ^= 1 << 2

    def trains_while_another_heals(self, running: threading.Event, over: threading.Event) -> None:
        self.run_to(3)
        running.set()
        while not over.is_set():
            self.step()

    def state(self) -> list[torch.Tensor]:
        return list(self.net.parameters())

    def momenta(self) -> list[torch.Tensor]:
        states = self.optimizer.state.values()
        return [state["momentum_buffer"] for state in states]


def trainers(server: Any, names: str, **options: Any) -> list[Trainer]:
    return [Trainer(server, name, len(names), **options) for name in names]


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[str], list[str]]:
    """The lines of the log that have a text in them."""
    caplog.set_level(logging.INFO)
    return lambda text: [line for line in caplog.messages if text in line]


def check_equal(*members: Trainer) -> None:
    first, *others = (member.state() for member in members)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@either_quorum
def test_a_flipped_bit_is_named_and_healed(
    asynchronous: bool, said: Callable[[str], list[str]]
) -> None:
    with lighthouse(all_join=True) as server:
        a, b, c = members = trainers(server, "abc", use_async_quorum=asynchronous)

        def run(member: Trainer) -> None:
            member.begin(flip=member is b)
            while not b.heals:
                member.step()
            member.run_to(40)
            member.manager.shutdown()

        in_threads(run, members)
        assert [m.heals for m in members] == [0, 1, 0]
        check_equal(a, b, c)
        [reason] = [r for r in a.reasons if "b: its parameters at step" in r]
        assert 5 <= int(reason.partition("at step ")[2].split()[0]) < 5 + WITHIN
        lines = said("b: its parameters at step")
        assert any("discards its state, and heals" in line for line in lines), lines


@either_quorum
def test_a_group_that_commits_by_itself_is_compared_too(asynchronous: bool) -> None:
    """Its peers have acted on their own votes, and go on. Their steps take time: a state is served for
    one of them."""
    with lighthouse(all_join=True) as server:
        a, b, c = members = trainers(server, "abc", use_async_quorum=asynchronous, commit="group")
        healed = threading.Event()

        def run(member: Trainer) -> None:
            member.begin(flip=member is b)
            member.net.register_forward_hook(lambda *_: time.sleep(STEP_S))
            if member is b:
                while not b.heals:
                    b.step()
                b.run_to(b.manager.current_step() + 2 * WITHIN)
                healed.set()
            while not healed.is_set():
                member.step()
            member.manager.shutdown()

        in_threads(run, members)
        assert [m.heals for m in (a, c)] == [0, 0]
        assert b.heals >= 1


def test_no_state_has_a_majority() -> None:
    """With two members nothing tells which of them is right."""
    with lighthouse(all_join=True) as server:
        a, b = members = trainers(server, "ab")

        def run(member: Trainer) -> None:
            member.begin(flip=member is b)
            with pytest.raises(JoinRefused, match=r"no state is held by more than half .* \(a: "):
                member.run_to(30)
            member.manager.shutdown()

        in_threads(run, members)
        assert a.heals == b.heals == 0


@pytest.mark.parametrize("part", ["parameter", "momentum"])
def test_a_heal_that_does_not_restore_all_is_compared_at_once(part: str) -> None:
    """The load function spoils a tensor: that member is told before it trains on, and heals again."""
    with lighthouse() as server:
        old, new = (Trainer(server, name, 1, compare_steps=1024) for name in ("old", "new"))
        over, running = threading.Event(), threading.Event()
        complete = new.load

        def load(state: Any) -> None:
            complete(state)
            if new.heals == 1 and part == "parameter":
                new.net[2].weight.data.add_(1.0)
            elif new.heals == 1:
                new.momenta()[0].add_(1.0)

        for member in (old, new):
            member.manager.register_compared("momenta", member.momenta, after_heals=True)
        new.manager.set_state_dict_fns(load, new.save)

        def serve() -> None:
            old.trains_while_another_heals(running, over)
            old.manager.shutdown()

        def heal() -> None:
            running.wait()
            while new.heals < 2:
                new.step()
            target = new.manager.current_step() + 1
            new.run_to(target)
            new.manager.leave_after_step()
            over.set()
            new.step()
            new.manager.shutdown()

        replicas(serve, heal)
        assert new.heals == 2
        assert any("new: its parameters at step" in reason for reason in old.reasons)


@either_quorum
def test_one_that_never_restores_all_is_refused(asynchronous: bool) -> None:
    """It would heal for ever, and each time the others discard a step."""
    with lighthouse() as server:
        old, new = (
            Trainer(server, name, 1, use_async_quorum=asynchronous) for name in ("old", "new")
        )
        over, running = threading.Event(), threading.Event()
        complete = new.load

        def load(state: Any) -> None:
            complete(state)
            new.net[2].weight.data.add_(1.0)

        new.manager.set_state_dict_fns(load, new.save)

        def serve() -> None:
            old.trains_while_another_heals(running, over)
            old.run_to(old.manager.current_step() + 3)
            old.manager.shutdown()

        def heal() -> None:
            running.wait()
            with pytest.raises(JoinRefused, match="new: its parameters .* again after 3 heals"):
                new.run_to(10**9)
            over.set()
            new.manager.shutdown()

        replicas(serve, heal)
        assert new.heals == 4
        assert old.heals == 0


def test_comparing_can_be_switched_off() -> None:
    with lighthouse(all_join=True) as server:
        a, b = members = [Trainer(server, name, 2, compare_steps=0) for name in "ab"]

        def run(member: Trainer) -> None:
            member.begin(flip=member is b)
            member.run_to(12)
            member.manager.shutdown()

        in_threads(run, members)
        assert not torch.equal(a.net[2].weight, b.net[2].weight)
        assert a.heals == b.heals == 0


def test_members_compare_alike() -> None:
    with lighthouse() as server:
        first = Trainer(server, "first", 1, compare_steps=8)
        first.run_to(1)
        other = Trainer(server, "other", 1, compare_steps=16)
        with pytest.raises(JoinRefused, match="parameters are compared: in 16 steps"):
            other.step()
        other.manager.shutdown()
        first.manager.shutdown()


class Counting(Replica):
    """A loop of its own, which says when it has updated its state. Its caught exceptions skip it."""

    skip_at = -1

    def step(self, gradient: float = 1.0) -> bool:
        reduced = self.begin(gradient)
        committed = self.manager.should_commit()
        if committed and self.manager.current_step() != self.skip_at:
            self.weights -= reduced
            self.manager.updated()
        return committed


@either_quorum
def test_a_loop_that_leaves_out_an_update_heals(
    asynchronous: bool, said: Callable[[str], list[str]]
) -> None:
    """Two members are enough: one of them has made fewer updates."""
    with lighthouse(all_join=True) as server:
        a, b = members = [
            Counting(
                server, name, expected_replicas=2, min_replica_size=2, use_async_quorum=asynchronous
            )
            for name in "ab"
        ]  # neither is at the end before the other is back
        b.skip_at = 3

        def run(member: Counting) -> None:
            member.run_to(8)
            member.close()

        in_threads(run, members)
        assert a.manager.state_dict() == b.manager.state_dict()
        assert torch.equal(a.weights, b.weights)
        assert torch.equal(a.weights, torch.full((8,), -8.0))
        lines = said("b: it has made no update after step 2, and its peers one update")
        assert any("discards its state, and heals" in line for line in lines), lines


def test_a_member_that_joins_again_with_its_state_has_made_its_updates(
    said: Callable[[str], list[str]],
) -> None:
    """Else no count would tell it from one that has left out an update."""
    with lighthouse(all_join=True) as server:
        a, b = members = [
            Counting(server, name, expected_replicas=2, min_replica_size=2) for name in "ab"
        ]
        b.skip_at = 3
        moved = threading.Event()

        def run(member: Counting) -> None:
            member.run_to(3)
            if member is a:
                a.manager.rejoin("moved", discard_state=False, join_now=True)
                moved.set()
            assert moved.wait(PATIENCE_S)
            member.run_to(6)
            member.close()

        in_threads(run, members)
        assert torch.equal(a.weights, b.weights)
        assert torch.equal(a.weights, torch.full((8,), -6.0))
        assert said("b: it has made no update after step 2, and its peers one update")


def test_an_update_that_all_leave_out_costs_nothing() -> None:
    """A loop that skips a step whose gradients are not finite, say."""
    with lighthouse(all_join=True) as server:
        a, b = members = [Counting(server, name, expected_replicas=2) for name in "ab"]
        discards: list[bool] = []
        for member in members:
            member.skip_at = 3
            member.manager.register_step_end(lambda committed: discards.append(not committed))

        def run(member: Counting) -> None:
            member.run_to(8)
            member.close()

        in_threads(run, members)
        assert torch.equal(a.weights, torch.full((8,), -7.0))
        assert torch.equal(a.weights, b.weights)
        assert not any(discards)


class Shard(Replica):
    """One of two ranks of a group, with a shard of its own, or with a copy."""

    def __init__(self, server: Any, name: str, rank: int, store: Any, hold: str) -> None:
        super().__init__(
            server,
            name,
            float(rank) if hold == "shards" else 0.0,
            **one_of_two(rank, store, hold=hold),
            expected_replicas=3,
            compare_steps=WITHIN,
            init_sync=False,
        )
        self.manager.register_compared("weights", lambda: [self.weights])
        self.manager.set_state_dict_fns(self.load, lambda: {"weights": self.weights})
        self.heals = 0

    def load(self, state: Any) -> None:
        self.heals += 1
        self.weights.copy_(state["weights"])


@pytest.mark.parametrize("hold", ["shards", "copies"])
def test_each_rank_is_compared_with_its_like(hold: str) -> None:
    """A group is told if one of its ranks differs, and all of its ranks heal."""
    with lighthouse(all_join=True) as server, rendezvous(3) as stores:
        groups = [
            [Shard(server, name, rank, store, hold) for rank in (0, 1)]
            for name, store in zip("abc", stores, strict=True)
        ]
        spoilt, ends = groups[1][1], [0]

        def run(member: Shard) -> None:
            member.run_to(5)
            if member is spoilt:
                member.weights[3] += 2.0
                while not member.heals:
                    member.step()
                ends[0] = member.manager.current_step() + 2 * WITHIN  # which no other is past yet
            while not ends[0] or member.manager.current_step() < ends[0]:
                member.step()

        members = [member for group in groups for member in group]
        in_threads(run, members)
        replicas(*(member.close for member in members))
        assert [[member.heals for member in group] for group in groups] == [[0, 0], [1, 1], [0, 0]]
        for rank in (0, 1):
            start = float(rank) if hold == "shards" else 0.0
            for group in groups:
                assert torch.equal(group[rank].weights, torch.full((8,), start - ends[0]))


def test_a_dropped_model_is_compared_in_no_member() -> None:
    """Also where Python's garbage collector has not come by yet: it does at unlike times in members."""

    def digest(collected: bool) -> bytes:
        compared = ComparedState(1)
        for number in range(2):
            model = nn.Linear(3, 2)
            nn.init.constant_(model.weight, number)
            nn.init.zeros_(model.bias)
            vars(model)["owner"] = model  # a cycle
            known = weakref.ref(model)

            def tensors(known: Any = known) -> list[torch.Tensor]:
                return [] if known() is None else list(known().parameters())

            compared.register(f"module.{number}", tensors)
            assert compared.at(number, whole=True) is not None
        if collected:
            gc.collect()
            compared.register("module.1", tensors)
        found = compared.at(2, whole=True)
        assert found is not None and known() is model
        return found.finish()

    gc.disable()
    try:
        assert digest(collected=True) == digest(collected=False)
    finally:
        gc.enable()


def test_the_environment_switches_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert JobOptions.resolve().compare_steps == 1024
    monkeypatch.setenv("FT_COMPARE_STEPS", "0")
    assert JobOptions.resolve().compare_steps == 0
    assert JobOptions.resolve(compare_steps=7).compare_steps == 7
