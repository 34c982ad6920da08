"""Which process prints and which writes: what needs no fit (`test_scenarios.py` has those that do)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from lightning_utilities.core.rank_zero import rank_zero_only

from ft_lightning.shared.strategy_base import act_as_leader
from ft_lightning.shared.topology import Role, Scope
from ft_lightning.trainer.leader import Checkpoints, before_quorum, without_quorum
from ft_lightning.trainer.saves import write_whole


class Logger:
    """Like Lightning's: what it wrote, and an experiment."""

    experiment = "its own"

    def __init__(self) -> None:
        self.wrote: list[Any] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.wrote.append(metrics)


@pytest.fixture(autouse=True)
def rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 0, raising=False)


def speaks() -> bool:
    function: Any = rank_zero_only
    return bool(function.rank == 0)


def scope(index: int, groups: int = 2, restarts: int = 0) -> Scope:
    return Scope(
        role=Role.MEMBER, name=str(index), index=index, num_groups=groups, restarts=restarts
    )


def trainer(*loggers: Any, interrupted: bool = False) -> Any:
    return SimpleNamespace(loggers=list(loggers), callbacks=[], interrupted=interrupted)


@pytest.mark.parametrize("leader", [0, 1, 2])
def test_no_two_groups_are_one_rank(leader: int) -> None:
    """Workers of data loaders would draw the same augmentations in both."""
    function: Any = rank_zero_only
    ranks = []
    for index in range(3):
        act_as_leader(index == leader, scope(index, 3))
        ranks.append(function.rank)
    assert len(set(ranks)) == 3 and ranks[leader] == 0


def test_until_the_first_quorum_the_one_that_speaks_has_silent_loggers() -> None:
    logger = Logger()
    writes, loggers = before_quorum(trainer(logger), scope(0), lambda: "nobody's", lambda: True)
    logger.log_metrics({"a": 1})
    assert not writes and loggers is not None
    assert speaks() and not logger.wrote and logger.experiment == "nobody's"
    act_as_leader(True, scope(0))
    loggers.in_quorum(True, takes_over=False)
    logger.log_metrics({"a": 2})
    assert logger.wrote == [{"a": 2}] and logger.experiment == "its own"
    loggers.end()
    assert type(logger) is Logger


@pytest.mark.parametrize("place", [scope(1), scope(0, restarts=1)])
def test_others_are_silent_until_the_first_quorum(place: Scope) -> None:
    logger = Logger()
    assert not before_quorum(trainer(logger), place, lambda: None, lambda: True)[0]
    logger.log_metrics({"a": 1})
    assert not speaks() and not logger.wrote


def test_a_logger_that_cannot_be_silenced_silences_its_group() -> None:
    class Final(Logger):
        def __init_subclass__(cls) -> None:
            raise TypeError("no subclasses")

    loggers = [Logger(), Final()]
    assert before_quorum(trainer(*loggers), scope(0), lambda: None, lambda: True) == (False, None)
    assert not speaks() and type(loggers[0]) is Logger


def test_the_only_group_writes_at_once() -> None:
    logger = Logger()
    assert before_quorum(trainer(logger), scope(0, groups=1), None, lambda: True) == (True, None)
    logger.log_metrics({})
    assert speaks() and logger.wrote == [{}]


@pytest.mark.parametrize(
    ("place", "interrupted", "writes"),
    [
        (scope(0), False, True),
        (scope(0), True, True),
        (scope(1), False, False),
        (scope(0, restarts=1), False, True),
        (scope(0, restarts=1), True, False),  # its peers' files may be newer
        (scope(0, groups=1, restarts=1), True, True),
    ],
)
def test_which_group_writes_after_a_fit_without_a_quorum(
    place: Scope, interrupted: bool, writes: bool
) -> None:
    assert without_quorum(trainer(interrupted=interrupted), place) is writes
    assert speaks() is writes


class FullDisk:
    """Fails for the names given."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        if path in self.names:
            raise OSError(f"no space left for {path}")


def writing(disk: FullDisk, name: str) -> Callable[[], None]:
    return partial(write_whole, disk, {}, name, None, plain=False, still_leads=lambda: True)


class Checkpoint:
    """A callback that saves: Lightning's base class has this name."""

    def saves(self, checkpoints: Checkpoints, disk: FullDisk, *names: str) -> list[bool]:
        return [checkpoints.save(name, writing(disk, name)) for name in names]


def test_a_fit_of_which_no_checkpoint_was_saved_raises_at_its_end() -> None:
    checkpoints, callback = Checkpoints(), Checkpoint()
    checkpoints.begin()
    assert callback.saves(checkpoints, FullDisk("a", "b"), "a", "b") == [False, False]
    with pytest.raises(RuntimeError, match="could save none of its checkpoints: no space .* b"):
        checkpoints.end()
    checkpoints.begin()
    assert callback.saves(checkpoints, FullDisk("b"), "a", "b") == [True, False]
    checkpoints.end()
    checkpoints.begin()
    assert callback.saves(checkpoints, FullDisk("a"), "a", "b") == [False, True]
    checkpoints.end()


def test_the_users_own_save_raises() -> None:
    with pytest.raises(OSError, match="no space left for a"):
        Checkpoints().save("a", writing(FullDisk("a"), "a"))
