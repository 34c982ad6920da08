"""A model of which a part is frozen when the fit begins, and trained later in it."""

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
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from ft_lightning import FTDDPStrategy, FTDiLoCoStrategy

log, by, strategy, devices = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
group = os.environ.get("REPLICA_GROUP_ID")
dies_in = {"callback": 1, "backbone": 3}.get(by)
began_again = group == "1" and (log / "killed").exists()

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.head = nn.Linear(8, 1)
        self.came_back = False
        self.hidden = [nn.Linear(8, 1)] if by == "list" else []

    def on_train_epoch_start(self):
        if by == "backbone" and self.current_epoch:  # from its present value
            self.optimizers().param_groups[0]["lr"] *= 0.99

    def training_step(self, batch, batch_idx):
        if self.current_epoch == dies_in and batch_idx == 2:
            if group == "1" and not began_again:
                (log / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        self.came_back |= began_again and self.trainer.strategy.num_participants == 2
        out = sum((each(batch[0]) for each in self.hidden), self.head(self.backbone(batch[0])))
        return (out - batch[1]).square().mean()

    def configure_optimizers(self):
        every = [self, *self.hidden]
        return torch.optim.Adam([p for m in every for p in m.parameters() if p.requires_grad], lr=0.01)

class Unfreezes(BaseFinetuning):
    def freeze_before_training(self, module):
        self.freeze(module.backbone, train_bn=False)

    def finetune_function(self, module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.backbone, optimizer, lr=0.001)

class ByHand(Callback):
    def setup(self, trainer, module, stage):
        module.backbone.requires_grad_(False)

    def on_train_epoch_start(self, trainer, module):
        module.backbone.requires_grad_(trainer.current_epoch > 0)

callbacks = {"callback": Unfreezes, "hand": ByHand, "list": Callback}
make = callbacks.get(by, lambda: BackboneFinetuning(1, lambda epoch: 1.01, should_align=False))
if by not in ("hand", "list"):  # the peer waits for the one that is killed
    strategy = FTDDPStrategy(min_replicas=2) if strategy == "ft_ddp" else FTDiLoCoStrategy(min_replicas=2, sync_every=3)
seed_everything(1)
data = TensorDataset(torch.randn(48, 8), torch.randn(48, 1))
before = Net()
module = Net()
module.load_state_dict(before.state_dict())
trainer = Trainer(strategy=strategy, devices=devices, accelerator="cpu", logger=False, max_epochs=40,
                  enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                  callbacks=[make()])
trainer.fit(module, DataLoader(data, 4))
learned = not torch.equal(module.backbone[0].weight, before.backbone[0].weight)
values = [*module.state_dict().values(), *(p.float() for s in trainer.optimizers[0].state.values() for p in s.values())]
digest = hashlib.sha256(b"".join(v.numpy().tobytes() for v in values)).hexdigest()[:8]
rates = [round(g["lr"], 12) for g in trainer.optimizers[0].param_groups]
print(f"\\nrates: {rates}")
places = len(trainer.optimizers[0].param_groups), trainer.global_step
print(f"\\nends: {digest} {learned} {places} {module.backbone[1].track_running_stats}")
if began_again:
    print(f"\\ncame back: {module.came_back}")
"""


def run(tmp_path: Path, by: str, strategy: str = "ft_ddp", devices: int = 2) -> tuple[int, str]:
    """(The exit code of such a script, all that it says)."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = workers.run(
        "lightning", [str(script), str(tmp_path), by, strategy, str(devices)], env=env
    )
    return done.returncode, done.stdout + done.stderr


def test_what_a_callback_unfreezes_is_averaged_and_heals(tmp_path: Path) -> None:
    """A group dies after that, and comes back: its optimizer has fewer parameter groups than its peer's."""
    code, text = run(tmp_path, "callback")
    assert code == 0, text
    ends = {line.partition("ends: ")[2] for line in text.splitlines() if "ends: " in line}
    (end,) = ends
    assert end.endswith("True (2, 240) True"), text
    assert text.count("ends: ") == 2
    assert "came back: True" in text


@pytest.mark.parametrize("strategy", ["ft_ddp", "ft_diloco"])
def test_what_a_hook_changes_from_its_present_value_is_changed_once(
    tmp_path: Path, strategy: str
) -> None:
    """`on_train_epoch_start` is called in a group that comes back in a later epoch, for what no state has. Its
    peers have called it before they gave their state: rates are theirs, and it contributes at once. It had
    changed them once more, and had to heal again."""
    code, text = run(tmp_path, "backbone", strategy)
    assert code == 0, text
    rates = [line.partition("rates: ")[2] for line in text.splitlines() if "rates: " in line]
    assert len(rates) == 2 and len(set(rates)) == 1, text
    assert "differ from those of its peers" not in text
    assert text.count("came back: True") == 1


@pytest.mark.parametrize("strategy", ["ft_ddp", "ft_local_sgd"])
def test_what_is_unfrozen_by_hand_is_refused_with_a_sentence(tmp_path: Path, strategy: str) -> None:
    code, text = run(tmp_path, "hand", strategy)
    assert code == 1, text
    assert (
        "ValueError: backbone.0.weight, backbone.0.bias, backbone.1.weight and 1 more: frozen"
        in text
    )
    assert "Unfreeze them in a BaseFinetuning callback" in text


def test_what_is_no_part_of_the_module_and_is_trained_is_refused_with_a_sentence(
    tmp_path: Path,
) -> None:
    """Under stock `ddp` each process trains it by itself; nor would it heal."""
    code, text = run(tmp_path, "list")
    assert code == 1, text
    assert (
        "ValueError: the optimizer trains 2 parameters (of shapes [1, 8], [1]) that are in" in text
    )
    assert "Make their module an attribute of the LightningModule" in text


@pytest.mark.parametrize("by", ["hand", "list"])
def test_a_process_that_trains_alone_has_nothing_to_average(by: str, tmp_path: Path) -> None:
    code, text = run(tmp_path, by, devices=1)
    assert code == 0, text
    assert text.count("ends: ") == 1
