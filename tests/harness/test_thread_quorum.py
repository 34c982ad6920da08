"""The fake of these tests keeps Manager's promises."""

from __future__ import annotations

import inspect

import torch
from torch.distributed import ReduceOp

from ft_core.manager import Manager
from ft_core.step import GradientManager, StepManager
from tests.harness.thread_quorum import ThreadManager, ThreadQuorum


def test_it_averages_and_commits() -> None:
    def step(manager: ThreadManager) -> tuple[float, bool]:
        manager.start_quorum()
        value = manager.allreduce(torch.tensor([float(manager.rank)])).wait()
        return value.item(), manager.should_commit()

    assert ThreadQuorum(3).run(step) == [(1.0, True)] * 3


def test_one_error_discards_for_all() -> None:
    def step(manager: ThreadManager) -> bool:
        manager.start_quorum()
        if manager.rank == 1:
            manager.report_error(RuntimeError("no good"))
        return manager.should_commit()

    assert ThreadQuorum(2).run(step) == [False, False]


def test_a_silent_member_adds_nothing() -> None:
    def step(manager: ThreadManager) -> tuple[float, int | None]:
        manager.start_quorum()
        value = manager.allreduce(torch.ones(1), ReduceOp.SUM).wait().item()
        return value, manager.participating_rank()

    assert ThreadQuorum(3, silent=(0,)).run(step) == [(2.0, None), (2.0, 0), (2.0, 1)]


def test_it_has_no_method_that_manager_lacks() -> None:
    for name, member in inspect.getmembers(ThreadManager, inspect.isfunction):
        if name.startswith("_"):
            continue
        real = inspect.signature(getattr(Manager, name)).parameters
        assert set(inspect.signature(member).parameters) - {"load", "save"} <= set(real), name


def test_it_is_all_that_ddp_and_the_optimizer_need() -> None:
    (member,) = ThreadQuorum(1).members
    gradients: GradientManager = member  # mypy compares the signatures
    steps: StepManager = member
    for protocol, double in ((GradientManager, gradients), (StepManager, steps)):
        needed = {name for name in vars(protocol) if not name.startswith("_")}
        assert needed and not needed - set(dir(double))
