"""A transformer sharded over the processes of each replica group (FSDP2), with PyTorch Lightning.

    python examples/train_lightning_fsdp.py --devices 4

starts two replica groups of two processes each on this machine. Kill -9 any of the processes: its group
comes back as a whole and heals, each process its own shards; the other one continues. The line that makes it fault
tolerant is marked; the module is written as for Lightning's ModelParallelStrategy.

Or start each group with torchrun, on any machines, with TORCHFT_LIGHTHOUSE, NUM_REPLICA_GROUPS=2 and its
REPLICA_GROUP_ID set:  torchrun --nproc-per-node 2 examples/train_lightning_fsdp.py --devices 2
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

WORDS, LENGTH = 32, 16


class Counts(LightningModule):
    """Learns sequences that count in steps of their own: 3 7 11 15 ..."""

    def __init__(self, step_delay_s: float) -> None:
        super().__init__()
        self.step_delay_s = step_delay_s
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
        self.words = nn.Embedding(WORDS, 64)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, WORDS)

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for module in (*self.blocks.layers, self):
            fully_shard(module, mesh=mesh)

    def forward(self, words: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(words.shape[1], words.device)
        scores: Tensor = self.head(self.blocks(self.words(words), causal, is_causal=True))
        return scores

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(self.step_delay_s)
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), prog_bar=True, sync_dist=True)

    def _loss(self, batch: Any) -> Tensor:
        words = batch[0]
        return F.cross_entropy(self(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--devices", type=int, default=4, help="processes on this machine")
    parser.add_argument(
        "--num-nodes", type=int, default=1, help="machines of a group under torchrun"
    )
    parser.add_argument("--accelerator", default="cpu", help="what Trainer takes")
    parser.add_argument("--max-steps", type=int, default=300)
    parser.add_argument("--step-delay", type=float, default=0.0, help="seconds, to watch it")
    args = parser.parse_args()

    torch.set_num_threads(1)
    seed_everything(1)
    first, by = torch.randint(0, WORDS, (2, 1024, 1))
    words = TensorDataset((first + by * torch.arange(LENGTH + 1)) % WORDS)
    model = Counts(args.step_delay)
    trainer = Trainer(
        strategy="ft_fsdp",  # this one; the name is known where the package is installed
        accelerator=args.accelerator,
        devices=args.devices,
        num_nodes=args.num_nodes,
        max_steps=args.max_steps,
    )
    trainer.fit(model, DataLoader(words, 16, shuffle=True), DataLoader(words, 64))

    weights = hashlib.sha256()
    for parameter in model.parameters():
        weights.update(parameter.full_tensor().detach().cpu().numpy().tobytes())
    loss = float(trainer.callback_metrics["val_loss"])
    group, step = os.environ["REPLICA_GROUP_ID"], trainer.global_step
    print(f"group {group}: {step} steps, loss {loss:.3f}, weights {weights.hexdigest()[:16]}")


if __name__ == "__main__":
    main()
