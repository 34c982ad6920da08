"""States of real optimizers, schedulers and trainers travel without allow_objects."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ft_core.heal import HealServer, digest, fetch
from tests.ft_core.heal.support import KEY, same, soon


def _through(server: HealServer, tree: Any, into: Any = None) -> Any:
    server.publish(KEY, tree)
    return fetch([server.address], KEY, into=into, deadline=soon())[0]


def _trained(make: Callable[..., torch.optim.Optimizer]) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)
    )
    optimizer = make(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(5, 4)).square().mean().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True),
        torch.optim.Adagrad,
        torch.optim.Rprop,
        lambda p: torch.optim.RMSprop(p, centered=True),
        torch.optim.ASGD,
        torch.optim.NAdam,
        torch.optim.Adafactor,
    ],
)
def test_optimizers(
    make_server: Callable[..., HealServer], make: Callable[..., torch.optim.Optimizer]
) -> None:
    model, optimizer = _trained(make)
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    back = _through(make_server(), tree)
    assert same(back, tree)
    assert digest(back) == digest(tree)
    fresh_model, fresh = _trained(make)
    fresh_model.load_state_dict(back["model"])
    fresh.load_state_dict(back["optimizer"])
    assert same(fresh.state_dict(), optimizer.state_dict())


def _schedulers(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    lr = torch.optim.lr_scheduler
    return {
        "step": lr.StepLR(optimizer, 2),
        "multi": lr.MultiStepLR(optimizer, [1, 2, 2]),
        "cosine": lr.CosineAnnealingLR(optimizer, 10),
        "warm": lr.CosineAnnealingWarmRestarts(optimizer, 5),
        "cycle": lr.OneCycleLR(optimizer, 0.1, total_steps=10),
        "lambda": lr.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
        "plateau": lr.ReduceLROnPlateau(optimizer),
        "sequential": lr.SequentialLR(
            optimizer, [lr.ConstantLR(optimizer), lr.ExponentialLR(optimizer, 0.9)], [2]
        ),
        "chained": lr.ChainedScheduler([lr.LinearLR(optimizer), lr.PolynomialLR(optimizer)]),
    }


def test_schedulers_scaler_and_generator(make_server: Callable[..., HealServer]) -> None:
    _, optimizer = _trained(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    tree = {name: s.state_dict() for name, s in _schedulers(optimizer).items()}
    tree["scaler"] = torch.amp.GradScaler("cpu").state_dict()
    tree["generator"] = {"state": torch.Generator().manual_seed(3).get_state()}
    assert same(_through(make_server(), tree), tree)


def test_a_whole_lightning_checkpoint(
    make_server: Callable[..., HealServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # Lightning sets it and leaves it
    lightning = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
    from lightning.pytorch.demos.boring_classes import BoringModel
    from lightning.pytorch.loggers import CSVLogger

    class Model(BoringModel):
        def __init__(self, width: int = 3) -> None:
            super().__init__()
            self.save_hyperparameters()

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.step(batch)
            self.log("val_loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
            return [optimizer], [torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2])]

    trainer = lightning.Trainer(
        default_root_dir=tmp_path,
        max_epochs=2,
        limit_train_batches=3,
        limit_val_batches=2,
        accelerator="cpu",
        devices=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=CSVLogger(tmp_path),
        callbacks=[
            EarlyStopping("val_loss"),
            ModelCheckpoint(tmp_path, monitor="val_loss", save_top_k=2, save_last=True),
            LearningRateMonitor(),
        ],
    )
    trainer.fit(Model())
    tree = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    assert tree["optimizer_states"]
    assert tree["callbacks"]
    assert same(_through(make_server(), tree), tree)
