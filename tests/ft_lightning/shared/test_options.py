"""Options that cannot work are refused in a sentence."""

from __future__ import annotations

import inspect
from dataclasses import fields, replace
from typing import Any, cast

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import RandomIterableDataset
from torch.utils.data import DataLoader, DistributedSampler

from ft_core.environment import ReplicaEnv
from ft_lightning import fabric_lf, fabric_lightning, pl, pytorch
from ft_lightning.pytorch import FTDDPStrategy
from ft_lightning.shared.strategy_base import Options, job_of, refuse_ddp_options
from ft_lightning.shared.topology import Role, Scope
from ft_lightning.trainer.batches import check_loader
from ft_lightning.trainer.decisions import Hyperparameters

FINE: dict[str, Any] = {
    "min_replicas": 1,
    "num_replica_groups": None,
    "lighthouse": None,
    "timeout_s": 60.0,
    "quorum_timeout_s": None,
    "replica_name": None,
    "commit": "quorum",
    "max_retries": None,
    "max_restarts": None,
    "heal_allow_objects": False,
    "token": "",
    "job_id": None,
}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"min_replicas": 0}, "min_replicas must be at least 1"),
        ({"min_replicas": 3, "num_replica_groups": 2}, "must be at least min_replicas"),
        ({"timeout_s": 0.0}, "timeout_s must be positive"),
        ({"quorum_timeout_s": -1.0}, "quorum_timeout_s must be positive"),
        ({"commit": "mine"}, "commit must be"),
        ({"validation": "divided"}, "validation must be"),
        ({"validation": "sharded", "commit": "group"}, 'needs commit="quorum"'),
        ({"max_restarts": -1}, "max_restarts must not be negative"),
        ({"spares": -1}, "spares must be at least 0"),
        ({"spares": 2, "num_replica_groups": 2}, "spares=2 of 2 replica groups leaves 0"),
        ({"spares": 1, "commit": "group"}, 'spares needs commit="quorum"'),
    ],
)
def test_wrong_options(wrong: dict[str, Any], says: str) -> None:
    Options(**FINE)
    with pytest.raises(ValueError, match=says):
        Options(**{**FINE, **wrong})


@pytest.mark.parametrize("module", [pytorch, pl, fabric_lightning, fabric_lf])
def test_every_strategy_shows_every_option(module: Any) -> None:
    """To `help()`, LightningCLI and type checkers: by name, type and default."""
    shown = inspect.signature(module.FTDDPStrategy).parameters
    assert {each.name for each in fields(Options)} == set(shown) - {"kwargs"}
    assert module.FTDDPStrategy()._options == Options(**FINE)
    for parameter in shown.values():
        assert parameter.annotation is not inspect.Parameter.empty
        assert f"{parameter.name}: " in str(module.FTDDPStrategy.__init__.__doc__)


def test_a_fabric_loop_validates_itself() -> None:
    with pytest.raises(ValueError, match="needs a Trainer"):
        fabric_lightning.FTDDPStrategy(validation="sharded")


@pytest.mark.parametrize(
    "strategy",
    [fabric_lightning.FTDiLoCoStrategy, pytorch.FTDiLoCoStrategy],
)
def test_hot_spares_are_for_steps_that_all_take_together(strategy: Any) -> None:
    with pytest.raises(ValueError, match='has no hot spares: spares=1 needs "ft_ddp"'):
        strategy(spares=1)


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(cast(Any, range(8))),  # each group would read all of it
        DataLoader(RandomIterableDataset(4, 8), 2),
        [1, 2],
    ],
)
def test_a_spare_can_take_over_only_what_a_sampler_divides(loader: Any) -> None:
    data = range(8)
    sampler: Any = DistributedSampler(cast(Any, data), 3, 0)
    check_loader(DataLoader(cast(Any, data), sampler=sampler), 3)
    with pytest.raises(ValueError, match=f"{type(loader).__name__} has none, so set spares=0"):
        check_loader(loader, 3)


def test_what_only_says_its_default_is_taken_out() -> None:
    """LightningCLI passes all options that there are, set or not."""
    given = {"start_method": "popen", "init_sync": True, "ddp_comm_hook": None, "dim": 0}
    refuse_ddp_options(given)
    assert given == {"ddp_comm_hook": None, "dim": 0}


@pytest.mark.parametrize("name", ["ddp_comm_hook", "model_averaging_period", "start_method"])
def test_options_of_stock_ddp_that_do_not_fit(name: str) -> None:
    refuse_ddp_options({"find_unused_parameters": True, name: None})
    with pytest.raises(ValueError, match=f"takes no {name}"):
        refuse_ddp_options({name: object()})


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"min_replica": 2}, "there is no argument min_replica: did you mean min_replicas?"),
        ({"find_unused_parameter": True}, "did you mean find_unused_parameters?"),
        ({"nonsense": 1}, "there is no argument nonsense$"),
        (
            {"static_graph": True},
            "static_graph is not available with fault tolerance: its first step",
        ),
    ],
)
def test_arguments_that_there_are_not_are_found_when_the_strategy_is_made(
    given: dict[str, Any], sentence: str
) -> None:
    for strategy in (FTDDPStrategy, fabric_lightning.FTDDPStrategy):
        strategy(find_unused_parameters=True, static_graph=False, timeout=None)
        with pytest.raises(ValueError, match=sentence):
            strategy(**given)


@pytest.mark.parametrize(
    ("options", "trainer", "sentence"),
    [
        ({"min_replicas": 3}, {}, r"min_replicas \(3\) must be at most the number .* \(2, from"),
        ({"spares": 1, "min_replicas": 2}, {}, "spares=1 of 2 replica groups leaves 1 that"),
        ({}, {"sync_batchnorm": True}, "leave out sync_batchnorm=True"),
    ],
)
def test_what_cannot_work_is_found_before_processes_start(
    options: dict[str, Any], trainer: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        Trainer(
            strategy=FTDDPStrategy(**options), devices=2, accelerator="cpu", logger=False, **trainer
        )


def test_who_is_alone_has_a_job_of_its_own() -> None:
    """Two scripts on one machine share its lighthouse, but not their weights."""
    alone = Scope(role=Role.MEMBER, name="0", index=0, num_groups=1)
    jobs = {job_of(Options(**FINE), alone, ReplicaEnv()) for _ in range(2)}
    assert len(jobs) == 2 and None not in jobs
    for options, scope, known in (
        (FINE, replace(alone, num_groups=2), ReplicaEnv()),
        (FINE, alone, ReplicaEnv(job_id="mine")),
        (FINE, alone, ReplicaEnv(name="0")),
        ({**FINE, "replica_name": "0"}, alone, ReplicaEnv()),
    ):
        assert job_of(Options(**options), scope, known) is None
    assert job_of(Options(**{**FINE, "job_id": "mine"}), alone, ReplicaEnv()) == "mine"


def test_what_numbers_the_groups_names_the_job() -> None:
    """Unless a person does."""
    task = Scope(role=Role.MEMBER, name="1", index=1, num_groups=4, job_id="77")
    assert job_of(Options(**FINE), task, ReplicaEnv()) == "77"
    assert job_of(Options(**FINE), task, ReplicaEnv(job_id="mine")) is None, "the environment's"
    assert job_of(Options(**{**FINE, "job_id": "mine"}), task, ReplicaEnv()) == "mine"


def test_hyperparameters_are_equal_or_not_whatever_changed_and_how() -> None:
    """The digest that votes carry: equal for equal numbers, another one for each change."""

    def optimizer(**options: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam([torch.nn.Parameter(torch.ones(1))], **options)

    rate = torch.tensor(1.0)
    watched = [optimizer(lr=1), optimizer(lr=rate, betas=(torch.tensor(0.5), torch.tensor(0.9)))]
    known = Hyperparameters()
    seen = [known.digest(watched, None)]
    assert known.digest(watched, None) == seen[0]
    watched[0].param_groups[0]["lr"] = 1.0  # as a scheduler leaves it
    assert known.digest(watched, None) == seen[0]

    def step(change: Any, *args: Any) -> None:
        change(*args)
        seen.append(known.digest(watched, {"scale": len(seen) // 5}))
        assert seen[-1] == Hyperparameters().digest(watched, {"scale": (len(seen) - 1) // 5})

    group = watched[0].param_groups[0]
    step(group.update, {"lr": 0.5})
    step(rate.fill_, 0.25)
    step(watched[1].param_groups[0]["betas"][1].fill_, 0.8)
    step(group.update, {"own": "name"})
    step(group.pop, "own")
    step(watched[0].add_param_group, {"params": [torch.nn.Parameter(torch.ones(1))]})
    assert len(set(seen)) == len(seen)


def test_ft_fsdp_divides_the_devices_into_two_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """With groups of one rank, which is the default elsewhere, nothing would be sharded."""

    def groups(devices: int) -> tuple[int, int]:
        trainer = Trainer(strategy="ft_fsdp", accelerator="cpu", devices=devices, logger=False)
        scope = trainer.strategy.scope
        return scope.num_groups, scope.group_size

    assert groups(4) == (2, 2)
    with pytest.raises(ValueError, match="cannot be divided into 2 replica groups"):
        groups(3)
    monkeypatch.setenv("NUM_REPLICA_GROUPS", "3")
    assert groups(6) == (3, 2)
