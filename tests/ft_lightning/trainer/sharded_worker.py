"""One rank of a Trainer whose model is sharded: fits one after the other, each a case.

    python tests/ft_lightning/trainer/sharded_worker.py '{"log": "/dir", "cases": ["plain", ...]}'

Under "ft_fsdp" the ranks of a replica group share the model; under "stock" it is Lightning's
ModelParallelStrategy over all ranks, with torch's own two dimensions. The results of a case are written
to `<log>/<rank>.<case>`, a line for each step to `<log>/<rank>.steps`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.strategies import model_parallel
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from ft_lightning.pytorch import FTFSDPStrategy
from tests.harness.script import Log, digest, options_of, process_name
from tests.harness.stock import leave_stock

OPTIONS: dict[str, Any] = {
    "log": "",
    "strategy": "ft_fsdp",
    "cases": ["plain"],
    "inject": {},  # {"<global step>": number}: this one of all processes reports an error once
    "dies": {},  # {"<global step>": number}: it is killed in that step's backward, in its first life
    "dies_in_save": False,  # the second rank of the first group that saves: all ranks have written by then
    "options": {},  # of the strategy
    "dies_in_test": "",  # "step" or "end" of a test after each case: the second rank of the leading group, held there
    "own_start": False,  # each replica group begins with other parameters
    "devices": 1,
    "nodes": 1,  # of a replica group, each with `devices` of its processes
    "after_fit": False,  # each case ends with the script's own save, to <log>/final.ckpt, and a validation
    "holds": [],  # "step:<global step>", "dies_in_save", "saved", "dies_in_test"
}
GROUPS, RANKS = 2, 2
SAMPLES, BATCH = 48, 2


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return result


class ShardedModel(LightningModule):
    def __init__(self, case: str, options: dict[str, Any], files: Log) -> None:
        super().__init__()
        self.case, self.options, self.files = case, options, files
        self.net: Any = None
        self.leads = False  # its replica group, when a test begins
        self.injected: set[int] = set()

    def prepare_data(self) -> None:
        for said in ("begins", "ends"):
            with (self.files.folder / "prepared").open("a") as file:
                file.write(f"{self.files.name} {said}\n")
            time.sleep(0.2)  # time for another process to come in, which must not

    def configure_model(self) -> None:
        """As users of ModelParallelStrategy write it. Stock needs a mesh of three dimensions."""
        if self.net is not None:
            return
        own = self.options["own_start"]
        torch.manual_seed(int(os.environ["REPLICA_GROUP_ID"]) if own else 7)
        self.net = nn.Sequential(Block(8), Block(8), nn.Linear(8, 3))
        mesh = self.device_mesh
        data, tensor = mesh["data_parallel"], mesh["tensor_parallel"]
        if self.options["strategy"] == "stock":
            sizes = (GROUPS, 1, RANKS) if self.case == "tensor" else (GROUPS, RANKS, 1)
            names = ("replicate", "shard", "tensor")
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
            data, tensor = mesh["replicate", "shard"], mesh["tensor"]
        recomputes = self.case == "accumulate"  # and its weights stay gathered
        for number, block in enumerate(self.net[:2]):
            if self.case == "tensor":
                plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
                parallelize_module(block, tensor, plan)
            if recomputes:
                self.net[number] = block = checkpoint_wrapper(block)
            fully_shard(block, mesh=data, reshard_after_forward=not recomputes)
        fully_shard(self.net, mesh=data)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        step, number = self.trainer.global_step, int(self.files.name)
        self.files.at(f"step:{step}")
        if self.options["inject"].get(str(step)) == number and step not in self.injected:
            self.injected.add(step)
            self.trainer.strategy.manager.report_error(RuntimeError("injected"))
        loss = self._loss(batch)
        if self.options["dies"].get(str(step)) == number:
            loss.register_hook(lambda _: self.files.die_once(True))
        self.log("train_loss", loss, sync_dist=True)
        rows = self.all_gather(loss, sync_grads=True).flatten()
        self.rows = [round(float(x), 5) for x in rows]
        return loss + 0.1 * rows.square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self._may_die("step")
        self.log("test_loss", self._loss(batch), sync_dist=True)
        (self.files.folder / f"{self.files.name}.tested").touch()

    def on_test_end(self) -> None:
        self._may_die("end")

    def _may_die(self, place: str) -> None:
        if place == self.options["dies_in_test"] and self.leads and dist.get_rank() == 1:
            (self.files.folder / f"{self.files.name}.died").touch()
            self.files.at("dies_in_test")
            self.files.die_once(True)

    def _loss(self, batch: Any) -> Tensor:
        scores = self.net(batch[0].to(self.net[2].weight.dtype))
        return nn.functional.cross_entropy(scores.float(), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "epoch", "monitor": "val_loss"},
        }


class Steps(Callback):
    """A line a committed step."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        module.files.ready()

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        module.files.step(
            case=module.case,
            step=trainer.global_step,
            digest=shards_digest(module, trainer.optimizers),
            rows=module.rows,
            samples=[round(float(x)) for x in batch[0][:, 0] * SAMPLES],
            leader=trainer.is_global_zero,
            share=share_of(trainer.strategy),
        )


def share_of(strategy: Any) -> int | None:
    """Of the data, that counted in the last step."""
    manager = getattr(strategy, "manager", None)
    return None if manager is None or not manager.spares else manager.step.part.share


def shards_digest(module: nn.Module, optimizers: Any = ()) -> str:
    """Of this rank's part of weights and moments."""
    values = dict(module.state_dict())
    for number, optimizer in enumerate(optimizers):
        for index, state in optimizer.state_dict()["state"].items():
            values |= {f"{number}.{index}.{key}": value for key, value in state.items()}
    plain = {key: getattr(value, "to_local", lambda v=value: v)() for key, value in values.items()}
    return digest((key, value.detach().float()) for key, value in plain.items())


def fit(case: str, options: dict[str, Any], files: Log, **given: Any) -> Trainer:
    seed_everything(5, verbose=False)
    sizes = {"data_parallel_size": 1 if case == "tensor" else RANKS}
    sizes["tensor_parallel_size"] = RANKS // sizes["data_parallel_size"]
    kind: Callable[..., Any] = FTFSDPStrategy
    stock = options["strategy"] == "stock"
    if stock:
        kind, sizes["data_parallel_size"] = ModelParallelStrategy, sizes["data_parallel_size"] * 2
    images = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(3))
    images[:, 0] = torch.arange(SAMPLES) / SAMPLES
    labels = torch.randint(0, 3, (SAMPLES,), generator=torch.Generator().manual_seed(4))
    data = TensorDataset(images, labels)
    ckpt_path = given.pop("ckpt_path", None)
    trainer = Trainer(
        accelerator="cpu",
        devices=GROUPS * RANKS if stock else options["devices"],
        num_nodes=options["nodes"],
        strategy=kind(save_distributed_checkpoint=case != "full", **sizes, **options["options"]),
        accumulate_grad_batches=2 if case == "accumulate" else 1,
        gradient_clip_val=None if case == "tensor" else 0.5,  # torch has no norm over two meshes
        precision={"half": "bf16-true", "mixed": "bf16-mixed"}.get(case, "32-true"),
        default_root_dir=str(files.folder / case),
        logger=CSVLogger(files.folder, "logs") if options["dies_in_test"] else False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 1, "enable_checkpointing": False, **given},
    )
    loaders = DataLoader(data, BATCH, shuffle=True), DataLoader(data, SAMPLES // 4)
    trainer.fit(ShardedModel(case, options, files), *loaders, ckpt_path=ckpt_path)
    return trainer


def train(case: str, options: dict[str, Any], files: Log) -> Trainer:
    if options["after_fit"]:
        trainer = fit(case, options, files, callbacks=[Steps()])
        trainer.save_checkpoint(files.folder / "final.ckpt")
        files.at("saved")
        trainer.validate(trainer.lightning_module, trainer.val_dataloaders, verbose=False)
        return trainer
    if options["dies_in_test"]:
        trainer = fit(case, options, files, callbacks=[Steps()])
        model: Any = trainer.lightning_module
        model.leads = trainer.strategy.broadcast(trainer.is_global_zero)
        trainer.test(model, trainer.val_dataloaders, verbose=False)
        return trainer
    if case not in ("folder", "full"):
        return fit(case, options, files, callbacks=[Steps()])
    # A checkpoint of the first epoch, from which another Trainer goes on.
    folder = files.folder / case / "saved"
    saving = ModelCheckpoint(str(folder), filename="first", enable_version_counter=False)
    first = fit(case, options, files, callbacks=[Steps(), saving], enable_checkpointing=True)
    saved = folder / "first.ckpt"
    while not saved.exists():  # written by the leading group
        time.sleep(0.02)
    assert saved.is_dir() == (case == "folder")
    assert {path.name for path in folder.iterdir()} == {"first.ckpt"}
    if options["dies_in_save"]:
        return first
    dist.barrier()
    return fit(case, options, files, callbacks=[Steps()], max_epochs=2, ckpt_path=str(saved))


def die_in_save(files: Log, *, first: bool) -> None:
    """`first`: before this rank has written, so that the folder has no name yet."""
    write = model_parallel._distributed_checkpoint_save

    def dying(state: Any, path: Path) -> None:
        dies = dist.get_rank() == 1 and not list(files.folder.glob("*.died"))
        if dies and first:
            (files.folder / f"{files.name}.died").touch()
            files.at("dies_in_save")
            files.die_once(True)
        write(state, path)
        if dies:
            (files.folder / f"{files.name}.died").touch()
            files.die_once(True)

    model_parallel._distributed_checkpoint_save = dying


def main(options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    files = Log(options["log"], process_name(), options["holds"])
    if "REPLICA_GROUP_ID" in os.environ:  # not in the process that starts the ranks
        files.begin_life()
    if options["dies_in_save"]:
        die_in_save(files, first=options["after_fit"])
    for case in options["cases"]:
        trainer = train(case, options, files)
        module = trainer.lightning_module
        whole = [name for name, p in module.named_parameters() if not isinstance(p, DTensor)]
        result = {
            "whole": whole,
            "step": trainer.global_step,
            "digest": shards_digest(module),
            "norm": sum(
                float(p.detach().float().full_tensor().norm()) for p in module.parameters()
            ),
            "val_loss": float(trainer.callback_metrics.get("val_loss", 0.0)),
            "leader": trainer.is_global_zero,
        }
        (Path(options["log"]) / f"{files.name}.{case}").write_text(json.dumps(result))
    if options["strategy"] == "stock":
        leave_stock()


if __name__ == "__main__":
    main(options_of(OPTIONS))
