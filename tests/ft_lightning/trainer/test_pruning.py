"""Parameters that Lightning's `ModelPruning` prunes during a fit in which a group dies."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.harness import workers

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.process

SCRIPT = """
import hashlib, os, signal, sys
from pathlib import Path
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelPruning
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from ft_lightning import FTDDPStrategy, FTDiLoCoStrategy

folder, strategy, permanent, kill = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "True", sys.argv[4] == "True"

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        if kill and self.current_epoch == 2 and batch_idx == 1 and os.environ["REPLICA_GROUP_ID"] == "1":
            if not (folder / "killed").exists():
                (folder / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return (self.net(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

options = {"min_replicas": 2}
strategy = FTDDPStrategy(**options) if strategy == "ft_ddp" else FTDiLoCoStrategy(sync_every=3, **options)
seed_everything(1)
data = TensorDataset(torch.randn(48, 8), torch.randn(48, 1))
module = Net()
pruning = ModelPruning("l1_unstructured", amount=lambda epoch: 0.3 if epoch in (0, 3) else 0.0,
                       use_lottery_ticket_hypothesis=permanent, make_pruning_permanent=permanent)
trainer = Trainer(strategy=strategy, devices=2, accelerator="cpu", logger=False, max_epochs=5,
                  enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                  callbacks=[pruning])
trainer.fit(module, DataLoader(data, 4))
digest = hashlib.sha256(b"".join(v.detach().numpy().tobytes() for v in module.state_dict().values())).hexdigest()[:8]
print(f"\\nends: {digest} {int(sum((p == 0).sum() for p in (module.net[0].weight, module.net[2].weight)))}")
"""


def run(folder: Path, strategy: str, permanent: bool, kill: bool) -> tuple[int, str]:
    """(The exit code of such a script, all that it says)."""
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(SCRIPT)
    arguments = [str(script), str(folder), strategy, str(permanent), str(kill)]
    done = workers.run("lightning", arguments, env={**os.environ, "PYTHONPATH": str(ROOT)})
    return done.returncode, done.stdout + done.stderr


def ends(text: str) -> list[str]:
    """What each group has at the end."""
    return [line.partition("ends: ")[2] for line in text.splitlines() if "ends: " in line]


@pytest.mark.parametrize("permanent", [True, False])
def test_a_group_that_comes_back_is_pruned_like_its_peers(tmp_path: Path, permanent: bool) -> None:
    """It has built its model unpruned, and the checkpoint of the callback holds no masks. Its parameters
    were others after each heal, and the job ended. One that is reset in the first pruning is not in the next."""
    code, text = run(tmp_path / "whole", "ft_ddp", permanent, kill=False)
    assert code == 0, text
    first, second = ends(text)
    assert first == second and first.split()[1] != "0", text
    code, text = run(tmp_path / "killed", "ft_ddp", permanent, kill=True)
    assert code == 0, text
    assert ends(text) == [first, first], text
    assert (tmp_path / "killed" / "killed").exists()
    assert "are not those of its peers" not in text


def test_pruning_under_diloco_ends_with_a_sentence(tmp_path: Path) -> None:
    code, text = run(tmp_path / "run", "ft_diloco", True, kill=False)
    assert code == 1, text
    assert "LocalSGD and DiLoCo can't prune" in text
