"""Retry from kept gradients with real managers: a member that heals in the step that is retried."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ft_core.collectives.retry import RetryableReducer, RetryHooks
from ft_core.config import SHARED_JOB
from ft_core.ddp import RetryableDistributedDataParallel
from tests.harness.cluster import Replica, lighthouse, replicas
from tests.harness.lighthouses import has_joined
from tests.harness.waiting import until

STEPS, RATE = 12, 0.1
DATA = torch.randn(STEPS, 2, 4, 3, generator=torch.Generator().manual_seed(0))
"""A batch for each step and member."""
START = nn.Linear(3, 2)
LEAVES_AT = 6


class Member:
    """A loop that computes the batch of its step, anew only if it has healed in the meantime."""

    def __init__(self, server: Any, index: int, **options: Any) -> None:
        self.server, self.index, self.open, self.healed = server, index, False, False
        self.net = nn.Linear(3, 2)
        self.net.load_state_dict(START.state_dict())
        self.manager = Replica(server, str(index), **options).manager
        self.manager.set_state_dict_fns(self._load, self.net.state_dict)
        self.participants: dict[int, int] = {}
        self.refused = self.computed = 0
        self.gives_up = False
        hooks = RetryHooks(
            begin=self._begin, vote=self._vote, again=self._again, refused=self._refused
        )
        self.model = RetryableDistributedDataParallel(
            RetryableReducer(hooks, self.manager), self.net
        )

    def _load(self, state: dict[str, Any]) -> None:
        self.healed = True
        self.net.load_state_dict(state)

    def _begin(self) -> bool:
        if not self.open:
            self.manager.start_quorum()
        self.open = True
        return True

    def _vote(self) -> bool:
        both = self.manager.replica_world_size() == 2
        leaves = self.index == 1 and both and self.manager.current_step() == LEAVES_AT
        if leaves and not self.gives_up:
            self.manager.report_error(RuntimeError("injected"))
        step, contributes = self.manager.current_step(), self.manager.is_participating()
        participants, self.open = self.manager.num_participants(), False
        committed = self.manager.should_commit()
        if committed and contributes:
            self.participants[step] = participants
        if leaves and not self.gives_up:
            self.gives_up = True
            self.manager.rejoin("injected")
        return committed

    def _again(self) -> bool:
        healed, self.healed = self.healed, False
        self._begin()
        healed, self.healed = healed or self.healed, False
        return not healed

    def _refused(self) -> None:
        self.refused += 1

    def train(self) -> None:
        optimizer = torch.optim.SGD(self.net.parameters(), RATE)
        while self.manager.current_step() < STEPS:
            # None ends while the other is on its way back.
            if self.manager.current_step() == STEPS - 2:
                until(lambda: has_joined(self.server, SHARED_JOB, "1", or_member=True), "member 1")
            refused, self.healed = self.refused, False
            self.model.zero_grad()
            batch = DATA[self.manager.current_step(), self.index]
            self.computed += 1
            self.model(batch).square().mean().backward()
            if self.refused == refused:
                optimizer.step()
        self.manager.shutdown()


@pytest.mark.parametrize("use_async_quorum", [True, False])
def test_a_member_that_heals_in_the_step_adds_nothing_of_its_old_state(
    use_async_quorum: bool,
) -> None:
    """Member 1 loses its state in a vote: it comes back in a retry, or later. The weights are those
    of a loop over the gradients of exactly the members that took part in each step."""
    with lighthouse() as server:
        options = {"use_async_quorum": use_async_quorum, "expected_replicas": 2}
        members = [Member(server, index, **options) for index in (0, 1)]
        replicas(*[member.train for member in members])
    assert members[1].gives_up
    assert members[0].computed == STEPS, "a discarded step has run user code again"
    plain = nn.Linear(3, 2)
    plain.load_state_dict(START.state_dict())
    for step in range(STEPS):
        plain.zero_grad()
        count = members[0].participants[step]
        for index in range(count):
            (plain(DATA[step, index]).square().mean() / count).backward()
        torch.optim.SGD(plain.parameters(), RATE).step()
    for member in members:
        for mine, right in zip(member.net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, right)
    assert members[0].participants[LEAVES_AT - 1] == 2
