"""Warm starts of `devices=N`: a group that dies is forked from a process that has imported Lightning."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import lightning.fabric  # noqa: F401  sets the rank
import pytest
from lightning_utilities.core.rank_zero import rank_zero_only

from ft_lightning.shared.launch_env import renew_rank
from tests.harness import workers
from tests.harness.waiting import PATIENCE_S, template_of, until

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import os, sys, time
warm = "ft_core.launch.warm.template" in sys.modules
from pathlib import Path
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from ft_lightning.pytorch import FTDDPStrategy

log = Path(sys.argv[1])
life = f"{os.environ.get('REPLICA_GROUP_ID')}.{os.environ.get('FT_RESTARTS')}"

class Model(BoringModel):
    def on_train_batch_end(self, *seen):
        time.sleep(0.02)  # leaves the cores to what starts
        if not (log / life).exists() and self.trainer.strategy.num_participants == 2:
            (log / f"{life}.part").write_text(f"{os.getpid()} {warm}")
            (log / f"{life}.part").rename(log / life)

Trainer(strategy=FTDDPStrategy(warm_start=True), accelerator="cpu", devices=2,
        max_epochs=1_000_000, limit_val_batches=0, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False).fit(Model())
"""


@pytest.mark.process
def test_a_group_that_dies_comes_back_warm(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "FT_WARM_START": "1"}
    supervisor = workers.start("lightning", [str(script), str(tmp_path)], env=env)
    try:
        until((tmp_path / "1.0").exists, "a step of both groups")
        until(lambda: template_of(supervisor.pid), "the template")
        pid, warm = (tmp_path / "1.0").read_text().split()
        assert warm == "False"
        os.kill(int(pid), signal.SIGKILL)
        until((tmp_path / "1.1").exists, "a step of both groups, the first of them anew")
        supervisor.terminate()
        supervisor.wait(PATIENCE_S)
    finally:
        supervisor.end()
    assert (tmp_path / "1.1").read_text().split()[1] == "True"


def test_the_rank_of_a_forked_process_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning keeps the one that it finds when it is imported: in the template."""
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("RANK", "3")
    renew_rank()
    assert rank_zero_only.rank == 3
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("LOCAL_RANK")
    for name in ("SLURM_PROCID", "JSM_NAMESPACE_RANK"):
        monkeypatch.delenv(name, raising=False)
    renew_rank()
    assert rank_zero_only.rank == 0
