"""One rank of a Fabric whose model is sharded: trainings one after the other, each a case.

    python tests/ft_lightning/fabric/sharded_worker.py '{"log": "/dir", "cases": ["plain", ...]}'

Under "ft_fsdp" the ranks of a replica group share the model; under "stock" it is Lightning's
ModelParallelStrategy over all ranks, with torch's own two dimensions. The results of a case are written
to `<log>/<rank>.<case>`, a line for each step to `<log>/<rank>.steps`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import ft_lightning  # noqa: F401
from ft_lightning.fabric import FTFSDPStrategy
from tests.ft_lightning.trainer.sharded_worker import (
    BATCH,
    GROUPS,
    RANKS,
    SAMPLES,
    Block,
    shards_digest,
)
from tests.harness.script import Log, options_of, process_name
from tests.harness.stock import leave_stock

OPTIONS: dict[str, Any] = {
    "log": "",
    "strategy": "ft_fsdp",
    "cases": ["plain"],
    "inject": {},  # {"<step>": rank}: this one of all ranks reports an error once
    "dies": {},  # {"<step>": rank}: it is killed in that step's backward, in its first life
    "own_start": False,  # each replica group begins with other parameters
    "holds": [],  # "step:<step>"
}


class Training:
    def __init__(self, case: str, options: dict[str, Any], files: Log) -> None:
        self.case, self.options, self.files = case, options, files
        self.ours = options["strategy"] == "ft_fsdp"
        self.fabric = Fabric(
            accelerator="cpu",
            devices=1 if self.ours else GROUPS * RANKS,
            strategy="ft_fsdp" if case in ("string", "one") and self.ours else self.strategy(),
        )
        self.fabric.launch()
        self.fabric.seed_everything(5, verbose=False)
        own = options["own_start"]
        torch.manual_seed(int(os.environ["REPLICA_GROUP_ID"]) if own else 7)
        self.net = self.fabric.setup(nn.Sequential(Block(8), Block(8), nn.Linear(8, 3)))
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.02)
        self.optimizer = self.fabric.setup_optimizers(optimizer)
        images = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(3))
        images[:, 0] = torch.arange(SAMPLES) / SAMPLES
        labels = torch.randint(0, 3, (SAMPLES,), generator=torch.Generator().manual_seed(4))
        data = TensorDataset(images, labels)
        self.loader, self.test = self.fabric.setup_dataloaders(
            DataLoader(data, BATCH, shuffle=True), DataLoader(data, SAMPLES // 4)
        )
        self.injected: set[int] = set()
        self.step, self.right = 0, 0.0

    def strategy(self) -> Any:
        whole = self.case == "full"
        if self.ours:
            return FTFSDPStrategy(self.parallelize, save_distributed_checkpoint=not whole)
        sizes = {"data_parallel_size": GROUPS * RANKS, "tensor_parallel_size": 1}
        return ModelParallelStrategy(
            self.parallelize, save_distributed_checkpoint=not whole, **sizes
        )

    def parallelize(self, net: Any, mesh: Any) -> Any:
        data = mesh["data_parallel"]
        if not self.ours:
            names = ("replicate", "shard")
            data = init_device_mesh("cpu", (GROUPS, RANKS), mesh_dim_names=names)
        if self.case != "string":
            for block in net[:2]:
                fully_shard(block, mesh=data)
        fully_shard(net, mesh=data)
        return net

    def train(self, epochs: int) -> None:
        strategy: Any = self.fabric.strategy
        turns: Any = strategy.epochs(epochs) if self.ours else range(self.step // 6, epochs)
        for _ in turns:
            self.net.train()
            for number, (images, labels) in enumerate(self.loader):
                if self.ours:
                    self.step = strategy.current_step
                self.files.at(f"step:{self.step}")
                again = self.case == "accumulate" and number % 2 == 0
                with self.fabric.no_backward_sync(self.net, enabled=again):
                    loss = nn.functional.cross_entropy(self.net(images), labels)
                    mean = self.fabric.all_reduce(loss.detach().clone())
                    rows = self.fabric.all_gather(loss.detach()).flatten()
                    self.inject(loss)
                    self.fabric.backward(loss)
                if again:
                    continue
                self.fabric.clip_gradients(self.net, self.optimizer, max_norm=0.5)
                self.optimizer.step()
                self.optimizer.zero_grad()
                if self.ours and not strategy.last_step_committed:
                    continue
                self.step += 1
                self.files.step(
                    case=self.case,
                    step=self.step,
                    mean=round(float(mean), 5),
                    digest=shards_digest(self.net.module, [self.optimizer.optimizer]),
                    rows=sorted(round(float(x), 5) for x in rows),
                    samples=[round(float(x)) for x in images[:, 0] * SAMPLES],
                )
            self.validate()

    def validate(self) -> None:
        self.net.eval()
        with torch.no_grad():
            right = [(self.net(x).argmax(-1) == y).float().sum() for x, y in self.test]
        self.right = float(self.fabric.all_reduce(sum(right), reduce_op="sum"))
        self.fabric.barrier()

    def inject(self, loss: Any) -> None:
        step, rank = self.step, self.fabric.global_rank
        if self.options["inject"].get(str(step)) == rank and step not in self.injected:
            self.injected.add(step)
            error, strategy = RuntimeError("injected"), self.fabric.strategy
            loss.register_hook(lambda _: strategy.manager.report_error(error))
        if self.options["dies"].get(str(step)) == rank:
            loss.register_hook(lambda _: self.files.die_once(True))

    @property
    def state(self) -> dict[str, Any]:
        progress = self.fabric.strategy.progress if self.ours else {}
        return {"net": self.net, "optimizer": self.optimizer, "progress": progress}


def train(case: str, options: dict[str, Any], files: Log) -> Training:
    training = Training(case, options, files)
    if case not in ("folder", "full", "one"):
        training.train(1)
        return training
    training.train(1)
    saved = files.folder / case / "saved"
    saved.parent.mkdir(exist_ok=True)
    training.fabric.save(saved, training.state)
    assert saved.is_dir() == (case != "full")
    assert {path.name for path in saved.parent.iterdir()} == {"saved"}
    dist.barrier()
    if training.ours:
        training.fabric.strategy.leave()
    again = Training(case, options, files)
    if case == "one":
        again.validate()
    again.fabric.load(saved, again.state)
    again.step = training.step
    if not again.ours:
        again.loader._num_iter_calls = 1  # the order of the second epoch
    again.train(2)
    return again


def main(options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    files = Log(options["log"], process_name(), options["holds"])
    files.begin_life()
    for case in options["cases"]:
        training = train(case, options, files)
        result = {
            "step": training.step,
            "right": training.right,
            "digest": shards_digest(training.net.module, [training.optimizer.optimizer]),
            "leader": training.fabric.is_global_zero,
        }
        (Path(options["log"]) / f"{files.name}.{case}").write_text(json.dumps(result))
        if training.ours:
            training.fabric.strategy.leave()
    if options["strategy"] == "stock":
        leave_stock()


if __name__ == "__main__":
    main(options_of(OPTIONS))
