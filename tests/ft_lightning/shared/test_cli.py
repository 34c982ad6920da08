"""Without code: LightningCLI's files and words, and the environment variables."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.harness import workers

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.process

# One process per import of Lightning: all the ways to say it are tried in one.
WAYS = """
import contextlib, io, os, sys
import ft_lightning
from {namespace}.cli import LightningCLI
from {namespace}.demos.boring_classes import BoringModel
QUIET = {{"accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False,
         "enable_checkpointing": False, "enable_model_summary": False, "max_steps": 2}}

def cli(*words):
    return LightningCLI(BoringModel, args=list(words), run=False, save_config_callback=None,
                        trainer_defaults=QUIET)

def check(strategy, **options):
    assert type(strategy).__module__ == "{home}", type(strategy)
    for name, value in options.items():
        assert getattr(strategy._options, name) == value, (name, strategy._options)

with open("config.yaml", "w") as file:
    file.write("trainer:\\n  strategy: ft_ddp\\n")
check(cli("--config", "config.yaml").trainer.strategy)
with open("path.yaml", "w") as file:
    file.write('''trainer:
  strategy:
    class_path: {home}.FTDDPStrategy
    init_args: {{min_replicas: 2, num_replica_groups: 2, replica_name: "1",
                gradient_as_bucket_view: false}}
''')
strategy = cli("--config", "path.yaml").trainer.strategy
check(strategy, min_replicas=2, num_replica_groups=2)
assert strategy._ddp_kwargs["gradient_as_bucket_view"] is False, strategy._ddp_kwargs
strategy = cli("--trainer.strategy", "ft_ddp_find_unused_parameters_true").trainer.strategy
check(strategy)
assert strategy._ddp_kwargs["find_unused_parameters"] is True
check(cli("--trainer.strategy", "FTDDPStrategy", "--trainer.strategy.timeout_s", "7")
      .trainer.strategy, timeout_s=7.0)

help_text = io.StringIO()
with contextlib.redirect_stdout(help_text), contextlib.suppress(SystemExit):
    cli("--trainer.strategy.help", "FTDDPStrategy")
for name in ("min_replicas", "num_replica_groups", "lighthouse", "timeout_s", "quorum_timeout_s",
             "replica_name", "commit", "max_retries", "max_restarts", "heal_allow_objects",
             "token", "job_id", "validation", "spares", "find_unused_parameters"):
    assert f"strategy.{{name}}" in help_text.getvalue(), name
assert "no step is taken with fewer replica groups" in " ".join(help_text.getvalue().split())

cli("--config", "config.yaml", "--trainer.max_steps", "2").trainer.fit(BoringModel())

from {namespace} import Trainer
os.environ["PL_TRAINER_STRATEGY"] = "ft_ddp"
check(Trainer(accelerator="cpu", devices=1, logger=False).strategy)
from {fabric} import Fabric
os.environ["LT_STRATEGY"] = "ft_ddp"
assert type(Fabric(accelerator="cpu", devices=1).strategy).__module__ == "{fabric_home}"
"""


@pytest.mark.parametrize(
    "names",
    [
        ("lightning.pytorch", "ft_lightning.pytorch", "lightning.fabric", "ft_lightning.fabric"),
        ("pytorch_lightning", "ft_lightning.pl", "lightning_fabric", "ft_lightning.fabric_lf"),
    ],
    ids=lambda names: names[0],
)
def test_every_way_without_code(tmp_path: Path, names: tuple[str, str, str, str]) -> None:
    namespace, home, fabric, fabric_home = names
    script = WAYS.format(namespace=namespace, home=home, fabric=fabric, fabric_home=fabric_home)
    run(tmp_path, "-c", script)


STEP = """
import torch
import ft_lightning
from lightning.fabric import Fabric

fabric = Fabric()
net = torch.nn.Linear(2, 1)
net, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
fabric.backward(net(torch.ones(1, 2)).sum())
optimizer.step()
print("committed", fabric.strategy.last_step_committed, fabric.strategy.num_participants)
"""


def test_fabrics_command(tmp_path: Path) -> None:
    """`fabric run` and the script that it starts: each imports Lightning by itself."""
    (tmp_path / "train.py").write_text(STEP)
    command = "import ft_lightning; from lightning.fabric.cli import _main; _main()"
    options = ["--strategy", "ft_ddp", "--accelerator", "cpu", "--devices", "1"]
    assert "committed True 1" in run(tmp_path, "-c", command, "run", *options, "train.py")


def run(folder: Path, *words: str) -> str:
    """What Python writes, started in `folder` where torch is imported and no Lightning."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("FT_", "TORCHFT_", "PL_"))}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "FT_JOB_ID": str(folder)}
    done = workers.run("torch", words, env=env, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
