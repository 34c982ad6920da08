"""A LightningCLI project; the fault tolerance is one word of its configuration.

    python -m ft_lightning examples/cli/train.py fit --config examples/cli/config.yaml

(plain `python examples/cli/train.py fit ...` where this package is installed with pip). Then try
`--trainer.strategy.help FTDDPStrategy`, or `--trainer.strategy FTDDPStrategy
--trainer.strategy.min_replicas 2`.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Digits(LightningModule):
    """A perceptron for handwritten digits.

    Args:
        learning_rate: of AdamW.
    """

    def __init__(self, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        right = self.net(batch[0]).argmax(1) == batch[1]
        self.log("val_accuracy", right.float().mean(), prog_bar=True)

    def on_fit_end(self) -> None:
        if self.trainer.is_global_zero:
            accuracy = float(self.trainer.callback_metrics["val_accuracy"])
            print(f"step {self.trainer.global_step}, val_accuracy {accuracy:.3f}", flush=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


class DigitsData(LightningDataModule):
    """The digits that come with scikit-learn.

    Args:
        batch_size: of each replica group.
    """

    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        digits = load_digits()
        images = torch.tensor(digits.data, dtype=torch.float32) / 16
        labels = torch.tensor(digits.target)
        self.train = TensorDataset(images[:1500], labels[:1500])
        self.val = TensorDataset(images[1500:], labels[1500:])

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.val, 256)


if __name__ == "__main__":
    torch.set_num_threads(1)
    LightningCLI(Digits, DigitsData, save_config_callback=None)
