"""Retry from kept shards, by itself: members are threads, each with all of its model. What FSDP does
inside a replica group: tests/ft_lightning/trainer/test_sharded.py."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ft_core.collectives import sharded
from ft_core.collectives.retry import RetryableReducer
from ft_core.collectives.sharded import RetryableShards, Shards
from ft_core.state import State
from ft_core.step import StartedReduce
from tests.ft_core.collectives.test_retry import (
    DATA,
    Forked,
    Member,
    gradients,
    layers,
    loss_of,
    mean_gradients,
    weights,
)
from tests.harness.cluster import Replica, lighthouse, manager, replicas
from tests.harness.thread_quorum import ThreadManager, ThreadQuorum
from tests.harness.waiting import PATIENCE_S, until


class Breaking(RetryableReducer):
    """Reductions of an attempt that will be discarded leave their buckets undefined."""

    member: Member

    def reduce_bucket(self, bucket: Tensor, divided_by: int) -> StartedReduce:
        started = super().reduce_bucket(bucket, divided_by)
        if self.member.votes in self.member.discards:
            started.wait()
            bucket.fill_(float("nan"))
        return started


def sharing(
    manager: ThreadManager, model: nn.Module, *discards: int
) -> tuple[Member, RetryableShards]:
    member = Member(manager, *discards, kind=Breaking)
    member.reducer.member = member  # type: ignore[attr-defined]
    return member, RetryableShards(member.reducer, model)


@pytest.fixture(params=[sharded.BUCKET_BYTES, 1000])
def buckets(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for all, or several."""
    monkeypatch.setattr(sharded, "BUCKET_BYTES", request.param)


@pytest.mark.usefixtures("buckets")
def test_a_discarded_step_leaves_no_trace() -> None:
    """Votes 1 and 2 (the second step, twice) and 4 are discarded, for either member's reason."""

    def train(manager: ThreadManager, discards: dict[int, tuple[int, ...]]) -> tuple[Any, ...]:
        model = layers()
        member, _ = sharing(manager, model, *discards.get(manager.rank, ()))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in DATA:
            member.reducer.before_forward()
            loss_of(model, step[manager.rank]).backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights(model), member.committed, member.votes

    plain = ThreadQuorum(2).run(lambda m: train(m, {}))
    faulty = ThreadQuorum(2).run(lambda m: train(m, {0: (1, 4), 1: (2,)}))
    for calm, shaken in zip(plain, faulty, strict=True):
        assert calm[1:] == (len(DATA), len(DATA))
        assert shaken[1:] == (len(DATA), len(DATA) + 3)
        assert all(torch.equal(calm[0][name], shaken[0][name]) for name in calm[0])


@pytest.mark.usefixtures("buckets")
def test_a_window_of_accumulation_votes_at_its_last_pass() -> None:
    def train(manager: ThreadManager) -> tuple[list[Tensor | None], int]:
        model = layers()
        member, shards = sharing(manager, model, *([0] if manager.rank == 0 else []))
        shards.require_backward_grad_sync = False
        for step in DATA[:2]:
            loss_of(model, step[manager.rank]).backward()
        assert member.votes == 0
        shards.require_backward_grad_sync = True
        loss_of(model, DATA[2, manager.rank]).backward()
        return gradients(model), member.votes

    expected = mean_gradients(layers(), [batch for step in DATA[:3] for batch in step])
    for found, votes in ThreadQuorum(2).run(train):
        torch.testing.assert_close(found, expected)
        assert votes == 2


@pytest.mark.usefixtures("buckets")
def test_parameters_that_are_not_used() -> None:
    """One that no member has used keeps no gradient. One that another member has used gets the mean."""

    start = Forked()

    def train(manager: ThreadManager) -> list[Tensor | None]:
        model = Forked()
        model.load_state_dict(start.state_dict())
        sharing(manager, model, *([0] if manager.rank == 0 else []))
        model(DATA[0, manager.rank], used=(0, manager.rank)).sum().backward()
        return gradients(model)

    both = ThreadQuorum(2).run(train)
    for mine, other in zip(*both, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)
    zero, one, two = (both[0][index] for index in (0, 2, 4))
    assert zero is not None and one is not None and two is None
    torch.testing.assert_close(one, DATA[0, 1].sum(0).expand(4, 8) / 2)


def test_a_plain_parameter_of_data_parallel_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="fully_shard"):
        RetryableShards(RetryableReducer.__new__(RetryableReducer), layers(), data_parallel=2)


@pytest.fixture
def asked(between: tuple[nn.Module, Shards]) -> Iterator[tuple[nn.Module, Shards]]:
    """It is as forward has left it after the test, too."""
    model, _ = between
    gathered = [isinstance(p, DTensor) for p in model.parameters()]
    assert not all(gathered)
    yield between
    assert [isinstance(p, DTensor) for p in model.parameters()] == gathered


@pytest.fixture(scope="module")
def between() -> tuple[nn.Module, Shards]:
    """A sharded model between forward and backward, and what compares it. For the module: torch keeps the group
    of a mesh, and its socket."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = layers()
    fully_shard(model[0])
    fully_shard(model)
    shards = Shards(model)
    model(DATA[0, 0])
    dist.destroy_process_group()
    return model, shards


def test_to_compare_gives_up_nothing_that_a_forward_has_gathered(
    asked: tuple[nn.Module, Shards],
) -> None:
    """Else the ranks of a group would run unlike collectives: a rank whose step has failed compares nothing."""
    _, shards = asked
    assert all(isinstance(p, DTensor) for p in shards())


def test_nor_does_to_serve(asked: tuple[nn.Module, Shards]) -> None:
    model, shards = asked
    state = State()
    state.sharded_models["sharded"] = shards
    state.register("model", model.load_state_dict, model.state_dict)
    state.register("names", list, lambda: dict(model.named_parameters()))
    own = dict(zip((name for name, _ in model.named_parameters()), shards(), strict=True))
    for saved in state.save().values():
        assert saved.keys() == own.keys()
        for name, value in saved.items():
            assert isinstance(value, DTensor)
            assert value.to_local().data_ptr() == own[name].to_local().data_ptr()


def test_to_serve_another_managers_state_leaves_a_model_alone(
    asked: tuple[nn.Module, Shards],
) -> None:
    """Its loop may be a thread that is in a forward: that met shards and gathered parameters in one layer."""
    model, _ = asked
    gathered = [isinstance(p, DTensor) for p in model.parameters()]
    state = State()
    state.register("other", list, lambda: [isinstance(p, DTensor) for p in model.parameters()])
    assert state.save() == {"other": gathered}


def test_a_manager_puts_its_sharded_models_at_rest(asked: tuple[nn.Module, Shards]) -> None:
    _, shards = asked
    with lighthouse() as server:
        own = manager(server.address(), "a", ranks_hold="shards")
        for key in ("sharded", "sharded.1"):
            own.register_compared(key, shards)
        assert list(own.state.sharded_models.values()) == [shards, shards]
        own.shutdown()
        assert not own.state.sharded_models


def test_a_rank_that_uses_its_shards_receives_others_beside_them(
    between: tuple[nn.Module, Shards], caplog: pytest.LogCaptureFixture
) -> None:
    """While it computes a validation, say. What it has received is a state of its shards."""
    _, shards = between

    with lighthouse() as server:
        first, late = Replica(server, "first"), Replica(server, "late", value=7.0)
        for one, value in ((first, 1.0), (late, 7.0)):
            own = [torch.full_like(each.detach(), value) for each in shards()]
            one.manager.register_state_dict_fn("shards", lambda _: None, lambda own=own: own)
        there, received = threading.Event(), threading.Event()

        def train() -> None:
            first.run_to(2)
            there.set()
            while not received.is_set():
                first.step()
            first.close()

        def validate() -> None:
            assert there.wait(PATIENCE_S)
            late.manager.start_quorum(takes_state=False)
            assert late.manager.is_healing()
            plane = late.manager._session.plane  # type: ignore[union-attr]
            until(lambda: plane._state is not None, "the state")
            received.set()
            late.close()

        replicas(train, validate)
    assert "failed" not in caplog.text


def test_a_model_that_is_moved_has_other_shards(between: tuple[nn.Module, Shards]) -> None:
    model, shards = between
    model.to(torch.float64)
    assert [p.dtype for p in shards()] == [torch.float64] * len(list(model.parameters()))
    assert {value.dtype for value in model.state_dict().values()} == {torch.float64}
