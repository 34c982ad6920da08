"""Retry from kept gradients, by itself: members are threads, and no integration is there."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ft_core.collectives.retry import RetryableReducer, RetryHooks
from ft_core.ddp import RetryableDistributedDataParallel
from tests.harness.thread_quorum import ThreadManager, ThreadQuorum

DATA = torch.randn(4, 2, 5, 8, generator=torch.Generator().manual_seed(1))
"""Of (step, member)."""


class Member:
    """One member's loop: opens a step with each backward, votes, tries again.

    `discards`: numbers of the votes (from 0) before which this member loses its reduced gradients,
    as when an all-reduce breaks off, and reports an error.
    """

    def __init__(
        self,
        manager: ThreadManager,
        *discards: int,
        kind: type[RetryableReducer] = RetryableReducer,
    ) -> None:
        self.manager, self.discards = manager, discards
        self.votes = self.committed = self.refused = 0
        self.models: list[nn.Module] = []
        self.open = False
        self.again: Callable[[], bool] = lambda: True
        hooks = RetryHooks(
            begin=self._begin,
            vote=self._vote,
            again=self._again,
            committed=self._committed,
            refused=self._refused,
        )
        self.reducer = kind(hooks, manager)

    def wrap(self, module: nn.Module, **kwargs: Any) -> RetryableDistributedDataParallel:
        model = RetryableDistributedDataParallel(self.reducer, copy.deepcopy(module), **kwargs)
        self.models.append(model)
        return model

    def _begin(self) -> bool:
        if not self.open:
            self.manager.start_quorum()
        self.open = True
        return True

    def _vote(self) -> bool:
        if self.votes in self.discards:
            for parameter in (p for model in self.models for p in model.parameters()):
                if parameter.grad is not None:
                    parameter.grad.fill_(float("nan"))
            self.manager.report_error(RuntimeError("injected"))
        self.votes += 1
        self.open = False
        return self.manager.should_commit()

    def _again(self) -> bool:
        self._begin()
        return self.again()

    def _committed(self) -> None:
        self.committed += 1

    def _refused(self) -> None:
        self.refused += 1


def _layers() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(8, 30), nn.ReLU(), nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, 4)
    )


LAYERS = _layers()


def layers() -> nn.Sequential:
    """The same weights each time, in whatever thread."""
    return copy.deepcopy(LAYERS)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def mean_gradients(module: nn.Module, batches: list[Tensor]) -> list[Tensor | None]:
    """The mean over members, each with a list of batches whose gradients add up."""
    alone = copy.deepcopy(module)
    for batch in batches:
        (loss_of(alone, batch) / 2).backward()
    return gradients(alone)


@pytest.mark.parametrize("as_view", [True, False])
def test_a_discarded_step_leaves_no_trace_and_runs_no_user_code_again(as_view: bool) -> None:
    """Votes 1 and 2 (the second step, twice) and 4 are discarded, for either member's reason."""

    def train(manager: ThreadManager, discards: dict[int, tuple[int, ...]]) -> tuple[Any, ...]:
        member = Member(manager, *discards.get(manager.rank, ()))
        calls = [0]
        model = member.wrap(layers(), gradient_as_bucket_view=as_view, bucket_cap_mb=0.001)
        model.module.register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in DATA:
            loss_of(model, step[manager.rank]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
        return weights(model.module), calls[0], member.committed, member.votes, member.reducer.kept

    plain = ThreadQuorum(2).run(lambda m: train(m, {}))
    faulty = ThreadQuorum(2).run(lambda m: train(m, {0: (1, 4), 1: (2,)}))
    for calm, shaken in zip(plain, faulty, strict=True):
        assert calm[1:] == (len(DATA), len(DATA), len(DATA), 0)
        assert shaken[1:] == (len(DATA), len(DATA), len(DATA) + 3, 0)
        assert all(torch.equal(calm[0][name], shaken[0][name]) for name in calm[0])


def test_a_window_of_accumulation_votes_at_its_last_pass() -> None:
    """Passes inside `no_sync` stay local; the retry reduces their sum."""

    def train(manager: ThreadManager) -> tuple[list[Tensor | None], int]:
        member = Member(manager, 0) if manager.rank == 0 else Member(manager)
        model = member.wrap(layers())
        with model.no_sync():
            for step in DATA[:2]:
                loss_of(model, step[manager.rank]).backward()
        assert member.votes == 0
        loss_of(model, DATA[2, manager.rank]).backward()
        return gradients(model.module), member.votes

    expected = mean_gradients(layers(), [batch for step in DATA[:3] for batch in step])
    for found, votes in ThreadQuorum(2).run(train):
        torch.testing.assert_close(found, expected)
        assert votes == 2


class Forked(nn.Module):
    """Three branches, of which a forward uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(8, 4) for _ in range(3))

    def forward(self, x: Tensor, used: tuple[int, ...] = (0,)) -> Tensor:
        return sum((self.branches[index](x) for index in used), torch.zeros(()))


def test_a_parameter_that_no_member_uses_keeps_no_gradient() -> None:
    """Else an optimizer with momentum or weight decay would change it."""

    alone = Forked()

    def train(manager: ThreadManager) -> list[Tensor | None]:
        member = Member(manager, 0)
        model = member.wrap(alone, find_unused_parameters=True)
        model(DATA[0, manager.rank], (0,) if manager.rank == 0 else (0, 1)).mean().backward()
        return gradients(model.module)

    results = ThreadQuorum(2).run(train)
    (alone(DATA[0, 0], (0,)).mean() / 2 + alone(DATA[0, 1], (0, 1)).mean() / 2).backward()
    for found in results:
        assert [g is None for g in found] == [False] * 4 + [True] * 2
        torch.testing.assert_close(found, gradients(alone))


def test_a_gradient_that_one_member_has_is_there_in_all() -> None:
    """One that has just healed has none where a loop leaves its peers' at zero: its optimizer would pass over
    that parameter, and theirs would decay it."""
    start = Forked()

    def train(manager: ThreadManager) -> list[Tensor | None]:
        model = Member(manager, 0).wrap(start, find_unused_parameters=True)
        if manager.rank == 0:
            for branch in model.module.branches[:2]:
                for parameter in branch.parameters():
                    parameter.grad = torch.zeros_like(parameter)
        model(DATA[0, manager.rank], (0,)).mean().backward()
        return gradients(model.module)

    for found in ThreadQuorum(2).run(train):
        assert [g is None for g in found] == [False] * 4 + [True] * 2
        assert not any(g.any() for g in found[2:4] if g is not None)


def test_running_statistics_are_those_of_one_forward() -> None:
    """A discard undoes a forward's update; the retry, which has no forward, must not lose it."""

    start = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6))

    def train(manager: ThreadManager, *discards: int) -> dict[str, Tensor]:
        member = Member(manager, *discards)
        model = member.wrap(start)
        for step in DATA:
            loss_of(model, step[manager.rank]).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(parameter.grad)
            model.zero_grad()
        return weights(model.module)

    plain = ThreadQuorum(1).run(train)[0]
    faulty = ThreadQuorum(1).run(lambda m: train(m, 0, 3, 4))[0]
    assert faulty["1.num_batches_tracked"] == len(DATA)
    assert all(torch.equal(plain[name], faulty[name]) for name in plain)


def test_running_statistics_follow_the_first_member_through_a_retry() -> None:
    def train(manager: ThreadManager) -> Tensor:
        member = Member(manager, 0) if manager.rank == 1 else Member(manager)
        model = member.wrap(nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 2)))
        loss_of(model, DATA[0, manager.rank]).backward()
        found: Tensor = model.module[0].running_mean.clone()
        return found

    found = ThreadQuorum(2).run(train)
    expected = nn.BatchNorm1d(8)
    expected(DATA[0, 0])
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], expected.running_mean)


def test_each_backward_that_synchronizes_is_a_step_of_its_own() -> None:
    """As with two optimizers in one batch: the first update is made when the second step begins."""

    def train(manager: ThreadManager) -> tuple[int, int, dict[str, Tensor], dict[str, Tensor]]:
        member = Member(manager, 0, 2)
        first, second = member.wrap(layers()), member.wrap(layers())
        for model, step in ((first, DATA[0]), (second, DATA[1])):
            loss_of(model, step[manager.rank]).backward()
            torch.optim.SGD(model.parameters(), 0.1).step()
        both = loss_of(first, DATA[2, manager.rank]) + loss_of(second, DATA[2, manager.rank])
        first.zero_grad()
        second.zero_grad()
        both.backward()  # one step, whose gradients two optimizers use
        return member.committed, member.votes, weights(first.module), weights(second.module)

    one, other = ThreadQuorum(2).run(train)
    assert one[:2] == other[:2] == (3, 5)
    for mine, its in zip(one[2:], other[2:], strict=True):
        assert all(torch.equal(mine[name], its[name]) for name in mine)


def test_the_second_of_two_backwards_is_retried_with_what_was_there() -> None:
    """Where forwards were forgotten before, as where a Fabric loop's batch begins, the forward between them moves
    the bucket that holds the gradients of the first: what was kept was overwritten with zeros."""

    def train(manager: ThreadManager) -> tuple[list[Tensor | None], int]:
        member = Member(manager, 1) if manager.rank == 0 else Member(manager)
        model = member.wrap(layers())
        model.forget_forward()
        for step in DATA[:2]:
            loss_of(model, step[manager.rank]).backward()
        return gradients(model.module), member.votes

    expected = mean_gradients(layers(), [batch for step in DATA[:2] for batch in step])
    for found, votes in ThreadQuorum(2).run(train):
        torch.testing.assert_close(found, expected)
        assert votes == 3


@pytest.mark.parametrize("whole", [True, False])
def test_a_backward_within_a_backward_has_no_vote_of_its_own(whole: bool) -> None:
    """Reentrant checkpoints bring the first gradients in an inner backward."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.below = nn.Identity() if whole else nn.Linear(8, 8)
            self.above = layers()

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = checkpoint(self.above, self.below(x), use_reentrant=True)
            return found

    start = Checkpointed()

    def train(manager: ThreadManager) -> tuple[list[Tensor | None], int]:
        member = Member(manager, 0)
        model = member.wrap(start, bucket_cap_mb=0.001)
        loss_of(model, DATA[0, manager.rank].clone().requires_grad_()).backward()
        return gradients(model.module), member.votes

    expected = mean_gradients(start, [b.clone().requires_grad_() for b in DATA[0]])
    for found, votes in ThreadQuorum(2).run(train):
        torch.testing.assert_close(found, expected)
        assert votes == 2


def test_a_backward_that_raises_ends_its_step_and_the_next_one_is_clean() -> None:
    def train(manager: ThreadManager) -> tuple[list[Tensor | None], int, int]:
        member = Member(manager)
        model = member.wrap(layers(), bucket_cap_mb=0.001)
        hook = model.module[0].weight.register_hook(_raise)
        with pytest.raises(RuntimeError, match="of the user's"):
            loss_of(model, DATA[0, manager.rank]).backward()
        hook.remove()
        assert member.votes == 0 and member.reducer.busy
        model.zero_grad()
        loss_of(model, DATA[1, manager.rank]).backward()
        return gradients(model.module), member.votes, member.committed

    expected = mean_gradients(layers(), list(DATA[1]))
    for found, votes, committed in ThreadQuorum(2).run(train):
        torch.testing.assert_close(found, expected)
        assert (votes, committed) == (2, 1)


def _raise(gradient: Tensor) -> Tensor:
    raise RuntimeError("of the user's")


def test_what_a_hook_raises_is_raised_by_backward() -> None:
    """In a hook of autograd's it would end the process."""

    def refuse() -> bool:
        raise ValueError("no quorum")

    manager = ThreadQuorum(1).members[0]
    hooks = RetryHooks(begin=refuse, vote=lambda: True, again=lambda: True)
    model = RetryableDistributedDataParallel(RetryableReducer(hooks, manager), layers())
    for _ in range(2):
        with pytest.raises(ValueError, match="no quorum"):
            loss_of(model, DATA[0, 0]).backward()


def test_parameters_that_backward_does_not_reach_are_an_error() -> None:
    member = Member(ThreadQuorum(1).members[0])
    model = member.wrap(Forked())
    with pytest.raises(RuntimeError, match="did not reach all parameters.*find_unused"):
        model(DATA[0, 0], (0,)).mean().backward()
    assert member.votes == 0 and not member.reducer.busy


@pytest.mark.parametrize("forwards", [1, 2])
def test_a_further_backward_is_a_step_of_its_own(forwards: int) -> None:
    """Through the output of a forward that had a backward (`retain_graph`), or behind a later one. torch's reducer
    awaits one backward, and left the others to each member."""

    def losses(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        outputs = [model(x) for _ in range(forwards)]
        return outputs[0].square().mean(), outputs[-1].abs().mean()

    def train(manager: ThreadManager) -> tuple[list[Tensor | None], int]:
        member = Member(manager, 0, 2)
        model = member.wrap(layers())
        for loss in losses(model, DATA[0, manager.rank]):
            loss.backward(retain_graph=True)
        return gradients(model.module), member.committed

    alone = layers()
    for batch in DATA[0]:
        (sum(losses(alone, batch)) / 2).backward()  # type: ignore[attr-defined]
    for found, committed in ThreadQuorum(2).run(train):
        torch.testing.assert_close(found, gradients(alone))
        assert committed == 2


def test_a_further_backward_where_parameters_may_be_unused_is_refused() -> None:
    member = Member(ThreadQuorum(1).members[0])
    output = member.wrap(layers(), find_unused_parameters=True)(DATA[0, 0])
    output.square().mean().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second backward .* call backward once"):
        output.abs().mean().backward()


def test_a_newcomer_contributes_nothing_and_takes_the_mean_also_of_a_retry() -> None:
    def train(manager: ThreadManager) -> list[Tensor | None]:
        member = Member(manager, 0)
        model = member.wrap(layers())
        loss_of(model, DATA[0, manager.rank]).backward()
        return gradients(model.module)

    alone = layers()
    loss_of(alone, DATA[0, 0]).backward()
    for found in ThreadQuorum(2, silent=(1,)).run(train):
        torch.testing.assert_close(found, gradients(alone))


def test_one_that_heals_while_it_retries_computes_its_batch_anew() -> None:
    """Its kept gradients belong to the state that it had: `again` refuses them, and leaves the step
    open for the batch that the healed member computes."""

    def train(manager: ThreadManager) -> tuple[list[Tensor | None], int, int]:
        member = Member(manager, 0)
        heals = manager.rank == 1
        member.again = lambda: not heals
        model = member.wrap(layers())
        if heals:
            with torch.no_grad():
                model.module[0].weight.zero_()  # not the state of the others
        loss_of(model, DATA[0, manager.rank]).backward()
        if heals:
            assert member.open and member.reducer.kept == 0
            model.module.load_state_dict(layers().state_dict())
            model.zero_grad()
            loss_of(model, DATA[0, manager.rank]).backward()
        return gradients(model.module), member.committed, member.refused

    expected = mean_gradients(layers(), list(DATA[0]))
    for rank, (found, committed, refused) in enumerate(ThreadQuorum(2).run(train)):
        torch.testing.assert_close(found, expected)
        assert (committed, refused) == (1, rank)


def test_a_pass_that_is_refused_stays_local() -> None:
    """As the update of a batch which the peers have made already."""
    manager = ThreadQuorum(1).members[0]
    told: list[str] = []
    hooks = RetryHooks(
        begin=lambda: False,
        vote=lambda: bool(told.append("vote")),
        again=lambda: bool(told.append("again")),
        refused=lambda: told.append("refused"),
    )
    model = RetryableDistributedDataParallel(RetryableReducer(hooks, manager), layers())
    loss_of(model, DATA[0, 0]).backward()
    assert told == ["refused"] and manager.sizes == []


def test_another_divisor_than_the_participants_needs_no_other_retry() -> None:
    """A sum with a constant divisor overrides two methods."""

    class Constant(RetryableReducer):
        @property
        def divisor(self) -> int:
            return 8

        def reduce_bucket(self, bucket: Tensor, divided_by: int) -> Any:
            bucket.mul_(divided_by / 8)
            quorum.sums.append(divided_by)
            return super().reduce_bucket(bucket, 2)  # no more division, as there are two

    quorum: Any = ThreadQuorum(2)
    quorum.sums = []

    def train(manager: ThreadManager) -> list[Tensor | None]:
        member = Member(manager, 0, kind=Constant)
        model = member.wrap(layers())
        loss_of(model, DATA[0, manager.rank]).backward()
        return gradients(model.module)

    expected = [None if g is None else g / 4 for g in mean_gradients(layers(), list(DATA[0]))]
    for found in quorum.run(train):
        torch.testing.assert_close(found, expected)
    assert sorted(quorum.sums) == [1, 1, 8, 8]


@pytest.mark.parametrize("attached", [False, True])
def test_a_model_that_is_dropped_leaves_no_memory_behind(attached: bool) -> None:
    """A script may train one after the other with the same manager."""

    def train(manager: ThreadManager) -> tuple[list[Any], Any]:
        member = Member(manager)
        if not attached:
            member.reducer.detach()
        model = member.wrap(nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)))
        loss_of(model, DATA[0, manager.rank]).backward()
        # A forward puts back what it has found there, which may be the other thread's model. Both are over.
        nn.parallel.DistributedDataParallel._active_ddp_module = None
        manager.step_end_hooks.clear()  # a Manager holds them weakly
        known = [weakref.ref(part) for part in (*model.modules(), *model.parameters())]
        member.models.clear()
        load, save = manager.state_fns.get("module.buffers", (lambda state: None, lambda: None))
        del model
        load({"buffers": [torch.ones(4)]})  # of a peer that has it still
        member.reducer.attach(manager)
        gc.collect()  # in case that something refers to itself
        return [part() for part in known], save()

    for left, saved in ThreadQuorum(2).run(train):
        assert not any(left) and saved is None
