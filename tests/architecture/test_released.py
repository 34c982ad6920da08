"""Names of version 0.1.0 that users write are there still: arguments, flags, keys, variables."""

from __future__ import annotations

import dataclasses
import importlib
import inspect

import accelerate  # noqa: F401  # here: its import, and Lightning's, changes the environment
import click
import pytest

import ft_lightning.pytorch  # noqa: F401
from ft_accelerate.options import argument_name, field_names
from lighthouse import cli
from tests.architecture.source import REPO, modules

OF_JOBS = (
    "commit group_size heal_allow_objects job_id lighthouse max_restarts min_replicas "
    "num_replica_groups quorum_timeout_s timeout_s token"
)
OF_STRATEGIES = f"{OF_JOBS} max_retries replica_name"
OF_LOCAL_SGD = "bucket_bytes keep_windows sync_every weighted"
OF_OUTER_STEPS = (
    "backup_device bucket_bytes codec error_feedback fragment_sync_delay fragment_update_alpha "
    "fragments keep_windows outer_optimizer weighted"
)
OF_DILOCO = f"{OF_OUTER_STEPS} outer_lr outer_momentum pin_memory sync_every"

ARGUMENTS = {
    "ft_core.DiLoCo": f"{OF_OUTER_STEPS} inner_optimizer manager model pin_memory sync_every",
    "ft_core.DistributedDataParallel": "manager module",
    "ft_core.DistributedSampler": "dataset drop_last group_rank num_replica_groups num_replicas rank "
    "replica_group_id replica_rank seed shuffle",
    "ft_core.LocalSGD": f"{OF_LOCAL_SGD} manager model optimizer",
    "ft_core.ManagedProcessGroup": "manager",
    "ft_core.Manager": "commit connect_timeout expected_replicas heal_allow_objects heartbeat_interval "
    "hostname init_sync job_id lighthouse_addr load_state_dict max_retries min_replica_size pg port "
    "quorum_timeout rank ranks_hold replica_id state_dict store_addr store_port timeout token "
    "use_async_quorum watch_process weighted world_size world_size_mode",
    "ft_core.Optimizer": "grad_scaler manager optim",
    "ft_core.OptimizerWrapper": "grad_scaler manager optim",
    "ft_core.ProcessGroupDummy": "rank world",
    "ft_core.ProcessGroupGloo": "hostname interface native timeout",
    "ft_core.ProcessGroupNCCL": "device hostname interface native timeout",
    "ft_core.PureDistributedDataParallel": "manager module",
    "ft_lightning.pytorch.FTDDPStrategy": f"{OF_STRATEGIES} validation",
    "ft_lightning.pytorch.FTDiLoCoStrategy": OF_DILOCO,
    "ft_lightning.pytorch.FTLocalSGDStrategy": OF_LOCAL_SGD,
    "ft_lightning.pytorch.FTMetricsCallback": "every_n_steps",
    "ft_lightning.pytorch.FTTimeline": "dirpath filename",
    "ft_lightning.fabric.FTDDPStrategy": OF_STRATEGIES,
    "ft_lightning.fabric.FTDiLoCoStrategy": OF_DILOCO,
    "ft_lightning.fabric.FTLocalSGDStrategy": OF_LOCAL_SGD,
    "ft_accelerate.DiLoCo": f"{OF_OUTER_STEPS} accelerator enabled local_sgd_steps model outer_lr "
    "outer_momentum",
    "ft_accelerate.FaultTolerancePlugin": f"{OF_JOBS} replica_group_id",
    "ft_accelerate.FaultToleranceKwargs": f"{OF_JOBS} replica_group_id",
    "ft_accelerate.LocalSGD": "accelerator enabled local_sgd_steps model",
}
FLAGS = {
    "": "--bind --min-replicas --expected-replicas --timeout --heartbeat-timeout --heartbeat "
    "--join-timeout --step-timeout --revoke-timeout --heal-timeout --connect-timeout --resend "
    "--state-file --web --quiet --version",
    "status": "--address --timeout --json",
}
VARIABLES = (
    "ACCELERATE_FAULT_TOLERANCE_ ACCELERATE_USE_FAULT_TOLERANCE FT_ACCELERATE_AUTOLOAD FT_EVENT_LOG "
    "FT_INTERFACE FT_JOB_ID FT_LIGHTNING_AUTOLOAD NUM_REPLICA_GROUPS REPLICA_GROUP_ID TORCHFT_LIGHTHOUSE"
)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(name: str) -> None:
    home, _, what = name.rpartition(".")
    found = getattr(importlib.import_module(home), what)
    known = set(inspect.signature(found).parameters)
    if dataclasses.is_dataclass(found):
        known |= {field.name for field in dataclasses.fields(found)}
    assert set(ARGUMENTS[name].split()) <= known


@pytest.mark.parametrize("command", FLAGS)
def test_flags_of_the_lighthouse(command: str) -> None:
    found: click.Command = cli.main
    if command:
        assert isinstance(cli.main, click.Group)
        found = cli.main.commands[command]
    assert set(FLAGS[command].split()) <= {flag for p in found.params for flag in p.opts}


def test_keys_and_flags_of_accelerate() -> None:
    assert {f"fault_tolerance_{name}" for name in (*OF_JOBS.split(), "replica_group_id")} <= {
        argument_name(name) for name in field_names()
    }


def test_environment_variables() -> None:
    texts = [module.text for module in modules()]
    texts.append((REPO / "ft_lightning_autoload.py").read_text("utf-8"))
    assert not [v for v in VARIABLES.split() if not any(f'"{v}"' in text for text in texts)]
