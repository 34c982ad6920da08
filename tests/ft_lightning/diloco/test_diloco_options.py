"""The strategies of periodic agreement by name, YAML and object; what they refuse, and when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn

import ft_lightning
from ft_core.diloco.diloco import DiLoCo
from ft_lightning.diloco import inner_steps

YAML = """
trainer:
  accelerator: cpu
  devices: 1
  logger: false
  strategy:
    class_path: ft_lightning.FTDiLoCoStrategy
    init_args: {sync_every: 30, fragments: 3, fragment_sync_delay: 4, codec: int4, min_replicas: 2}
"""


def test_by_yaml(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(YAML)
    cli = LightningCLI(
        BoringModel,
        run=False,
        args=["--config", str(config)],
        save_config_callback=None,
        seed_everything_default=False,
    )
    strategy = cli.trainer.strategy
    assert type(strategy) is ft_lightning.FTDiLoCoStrategy
    assert strategy._algorithm_options["sync_every"] == 30
    assert strategy._algorithm_options["codec"] == "int4"
    assert strategy._options.min_replicas == 2


@pytest.mark.parametrize("name", ["ft_diloco", "ft_local_sgd", "FT_DiLoCo"])
def test_by_name(name: str) -> None:
    trainer = Trainer(strategy=name, accelerator="cpu", devices=1, logger=False)
    assert trainer.strategy.strategy_name == name.lower()


class TwoOptimizers(BoringModel):
    """As of a GAN: each has a part of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first = torch.nn.Linear(32, 32)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.zero_grad()
            self.manual_backward(self.loss(self.layer(self.first(batch))))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(each.parameters()) for each in (self.first, self.layer)]

    def on_train_epoch_end(self) -> None: ...


@pytest.mark.parametrize("name", ["ft_diloco", "ft_local_sgd"])
def test_a_run_of_two_optimizers_is_resumed(name: str, tmp_path: Path) -> None:
    """Each has a state when the first window begins. The second one's was looked for in the first, and made
    there."""

    def run(epochs: int, ckpt_path: str | None = None) -> list[int]:
        trainer = Trainer(
            strategy=name,
            accelerator="cpu",
            devices=1,
            max_epochs=epochs,
            limit_train_batches=2,
            limit_val_batches=0,
            default_root_dir=tmp_path,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(TwoOptimizers(), ckpt_path=ckpt_path)
        trainer.save_checkpoint(tmp_path / "end.ckpt")
        return [len(optimizer.state) for optimizer in trainer.optimizers]

    assert run(1) == [2, 2]
    assert run(2, str(tmp_path / "end.ckpt")) == [2, 2]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"sync_every": 0}, "sync_every must be positive, got 0"),
        ({"outer_lr": 0}, "outer_lr must be positive"),
        ({"outer_momentum": 1.0}, "outer_momentum must be from 0 to below 1"),
        ({"min_replicas": 0}, "min_replicas must be at least 1"),
    ],
)
def test_refused_at_once(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        ft_lightning.FTDiLoCoStrategy(**options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"sync_every": 2, "fragments": 3}, "fragments"),
        ({"sync_every": 5, "fragment_sync_delay": 5}, "fragment_sync_delay=5 must be smaller"),
        ({"fragment_update_alpha": 1.5}, "fragment_update_alpha must be from 0 to 1"),
        ({"codec": "int2"}, "int2"),
    ],
)
def test_refused_before_the_first_step(options: dict[str, Any], sentence: str) -> None:
    trainer = Trainer(
        strategy=ft_lightning.FTDiLoCoStrategy(**options),
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        max_steps=1,
        enable_model_summary=False,
    )
    model = BoringModel()
    if options.get("fragments"):
        model.layer = nn.Sequential(nn.Linear(32, 4), nn.Linear(4, 2))
    with pytest.raises(ValueError, match=sentence):
        trainer.fit(model)
    assert trainer.global_step == 0


def test_what_travels_is_unchanged() -> None:
    tree = {"a": [torch.arange(3), (torch.tensor(2.5, dtype=torch.bfloat16), "x")], "b": None}
    there = inner_steps.unpack(inner_steps.pack(tree))
    assert there["a"][0].equal(tree["a"][0])
    assert there["a"][1][0].equal(tree["a"][1][0])
    assert there["a"][1][0].dtype == torch.bfloat16
    assert there["a"][1][1:] == ("x",)
    assert there["b"] is None
    assert inner_steps.unpack(inner_steps.pack(torch.empty(0, 4))).shape == (0, 4)


def test_global_values_are_shown_and_the_own_put_back() -> None:
    class Known:
        def state_dict(self) -> dict[str, Any]:
            return {
                "parameters": {"0.weight": torch.ones(2, 2), "0.bias": torch.ones(2)},
                "buffers": {},
            }

    layer = nn.Linear(2, 2)
    module = nn.Sequential(layer, layer)  # tied
    own = layer.weight.detach().clone()
    before = inner_steps.show_global(module, Known())
    assert module[1].weight.equal(torch.ones(2, 2))
    assert set(inner_steps.global_values(module, Known())) == {
        "0.weight",
        "0.bias",
        "1.weight",
        "1.bias",
    }
    inner_steps.put_back(module, before)
    assert layer.weight.equal(own)
    assert DiLoCo.KEY == "diloco"


@pytest.mark.parametrize("name", ["FTDiLoCoStrategy", "FTLocalSGDStrategy"])
def test_one_process_a_replica_group(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODE_RANK", "1")
    strategy = getattr(ft_lightning, name)(lighthouse="tcp://host:1")
    trainer = Trainer(strategy=strategy, accelerator="cpu", devices=2, num_nodes=3, logger=False)
    assert (strategy.scope.group_size, trainer.world_size) == (1, 6)
    with pytest.raises(ValueError, match="one process a replica group, not 2"):
        Trainer(strategy=getattr(ft_lightning, name)(group_size=2), accelerator="cpu", devices=2)
    with pytest.raises(ValueError, match="must decide as one"):
        both = ft_lightning.FTDDPStrategy(commit="group", group_size=2)
        Trainer(strategy=both, accelerator="cpu", devices=2)
