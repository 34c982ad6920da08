"""A folder that has checkpoints of an earlier training: all groups name theirs alike."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint

from ft_lightning.trainer.checkpoint_names import CheckpointNames
from ft_lightning.trainer.healing import last_saves, take_last_saves
from tests.harness import workers

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import json, os, signal, sys
from pathlib import Path
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
import ft_lightning

folder, dies = Path(sys.argv[1]), sys.argv[2] == "dies"
group, life = os.environ.get("REPLICA_GROUP_ID"), os.environ.get("FT_RESTARTS")

class Model(BoringModel):
    def on_train_epoch_start(self):
        self.log("epochs_left", 9.0 - self.trainer.current_epoch)  # each model is the best

class Dying(Callback):
    def on_train_epoch_start(self, trainer, module):
        if dies and (group, life, trainer.current_epoch) == ("0", "0", 2):
            os.kill(os.getpid(), signal.SIGKILL)

seed_everything(1)
saving = ModelCheckpoint(folder, monitor="epochs_left", save_last=True, save_on_train_epoch_end=True)
trainer = Trainer(strategy="ft_ddp", accelerator="cpu", devices=2, max_epochs=4, limit_train_batches=4,
                  limit_val_batches=0, callbacks=[saving, Dying()], logger=False,
                  enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Model())
names = [Path(path).name for path in (saving.best_model_path, saving.last_model_path)]
print("names:", json.dumps(names), flush=True)
"""


def train(tmp_path: Path, how: str) -> list[Any]:
    """What each group calls its best and its last checkpoint."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = workers.run("lightning", [str(script), str(tmp_path / "saved"), how], env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = [line.partition("names: ")[2] for line in done.stdout.splitlines()]
    return [json.loads(part) for part in parts if part]


@pytest.mark.process
@pytest.mark.parametrize("how", ["lives", "dies"])
def test_an_earlier_trainings_files_are_not_its_best_and_stay(tmp_path: Path, how: str) -> None:
    """Also where the leader dies, and the next one removes what its own are to replace."""
    folder = tmp_path / "saved"
    assert train(tmp_path, "lives") == [["epoch=3-step=16.ckpt", "last.ckpt"]] * 2
    first = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert sorted(first) == ["epoch=3-step=16.ckpt", "last.ckpt"]
    again = train(tmp_path, how)  # one that dies may come back when the training is over
    assert again and again == [["epoch=3-step=16-v1.ckpt", "last-v1.ckpt"]] * len(again)
    assert sorted({path.name for path in folder.iterdir()} - {*first}) == [
        "epoch=3-step=16-v1.ckpt",
        "last-v1.ckpt",
    ]
    assert {name: (folder / name).read_bytes() for name in first} == first


def test_a_name_is_taken_by_what_was_there_and_what_is_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Lightning sets it when it looks for devices, for good.
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    from lightning.fabric.utilities.cloud_io import get_filesystem
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Own(ModelCheckpoint):
        def file_exists(self, filepath: Any, trainer: Any) -> bool:
            return True

    system = get_filesystem("memory://job")
    system.pipe({"memory://job/a/x=1.ckpt": b"", "memory://job/a/deep/x=2/y.ckpt": b""})
    each = ModelCheckpoint("memory://job/a", filename="deep/{x}")
    own = Own("memory://job/a")
    names, peer = CheckpointNames(), CheckpointNames()
    try:
        names.begin([each, own, SimpleNamespace()], get_filesystem, lambda found: found)

        def taken(name: str) -> bool:
            return each.file_exists(f"memory://job/a/{name}", None)  # type: ignore[arg-type]

        assert taken("x=1.ckpt") and taken("deep/x=2") and own.file_exists("", None)  # type: ignore[arg-type]
        system.pipe("memory://job/a/x=3.ckpt", b"")  # the leader is ahead
        assert not taken("x=3.ckpt")
        names.saved("memory://job/a/x=3.ckpt")
        names.removed("memory://job/a/x=1.ckpt")
        assert taken("x=3.ckpt") and not taken("x=1.ckpt")
        peer.load(names.state())
        assert peer.state() == names.state()
        names.release()
        assert "file_exists" not in vars(each)
    finally:
        system.rm("memory://job", recursive=True)


def test_a_callback_that_heals_knows_of_the_last_save() -> None:
    """Its "last" is that save, as its peers': it wrote another one at the fit's end."""
    peer, mine = [ModelCheckpoint(monitor="loss", save_last=True) for _ in range(2)]
    peer._last_checkpoint_saved, peer._last_global_step_saved = "best.ckpt", 6
    take_last_saves([mine, object.__new__(Other)], last_saves([peer, object.__new__(Other)]))
    assert (mine._last_checkpoint_saved, mine._last_global_step_saved) == ("best.ckpt", 6)
    trainer: Any = None  # it would be asked
    mine.on_train_end(trainer, trainer)


class Other(Checkpoint):
    """Not Lightning's own."""
