"""What a person sees: bars, loggers and the picture, of real fits."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import pytest
from lightning_utilities.core.imports import RequirementCache

from ft_core.launch.run_record import END, event_file, read_run
from ft_core.telemetry import COMMIT, DISCARD, HEAL_DONE, SERVE, Event
from ft_lightning.trainer.reporting import Counts
from tests.ft_lightning.harness import running
from tests.harness import workers

ROOT = Path(__file__).resolve().parents[3]

FITS = """
import sys, torch, logging
from importlib import import_module
folder, name = sys.argv[1:]
L = import_module(name)
callbacks, loggers = (import_module(f"{name}.{m}") for m in ("callbacks", "loggers"))
import ft_lightning
from torch.utils.data import DataLoader, TensorDataset

class Small(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.failed = torch.nn.Linear(2, 1), False
    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and not self.failed:
            self.failed = True
            self.trainer.strategy.manager.report_error(RuntimeError("injected"))
        return self.net(batch[0]).pow(2).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

for bar in (callbacks.TQDMProgressBar(1), callbacks.RichProgressBar(1)):
    kind, items = type(bar), []
    trainer = L.Trainer(
        strategy="ft_ddp", accelerator="cpu", devices=1, max_epochs=1, enable_checkpointing=False,
        enable_model_summary=False, log_every_n_steps=2,
        logger=loggers.CSVLogger(folder, name=kind.__name__, flush_logs_every_n_steps=1),
        callbacks=[bar, ft_lightning.FTMetricsCallback(),
                   ft_lightning.FTTimeline(f"{folder}/{kind.__name__}/picture")],
    )
    trainer.fit(Small(), DataLoader(TensorDataset(torch.randn(16, 2)), 2))
    counts = trainer.strategy.counts
    assert counts.commits >= trainer.global_step == 8 and counts.discards == 1, vars(counts)
    assert type(bar) is kind, "the bar was not given back"
"""


NO_PICTURE = """
import os, sys
from pathlib import Path
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
import ft_lightning
from ft_core.launch.run_record import event_file

folder = Path(sys.argv[1])
(folder / "file").touch()
(folder / "picture" / "timeline.png").mkdir(parents=True)
(folder / "full").mkdir()
full = event_file(folder / "full", 0, os.getpid())
full.symlink_to("/dev/full")

class Once(Callback):
    def on_train_epoch_end(self, trainer, module):
        full.unlink(missing_ok=True)  # it can be read without end

counts = ft_lightning.FTMetricsCallback()
for name in ("full", "file", "picture"):
    trainer = Trainer(
        strategy="ft_ddp", accelerator="cpu", devices=1, max_epochs=1, limit_train_batches=2, log_every_n_steps=2,
        limit_val_batches=0, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        logger=CSVLogger(folder, name=f"{name}_log"), callbacks=[counts, Once(), ft_lightning.FTTimeline(str(folder / name))])
    trainer.fit(BoringModel())
    assert "ft/commits" in Path(trainer.logger.log_dir, "metrics.csv").read_text()
"""


@pytest.mark.process
@pytest.mark.skipif(
    bool(RequirementCache("lightning<2.5.6")),
    reason="the RichProgressBar of Lightning 2.5.0 fails with rich 14.1 and later",
)
def test_bars_loggers_and_picture(tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("FT_", "TORCHFT_"))}
    script = tmp_path / "fits.py"
    script.write_text(FITS)
    done = workers.run(
        "lightning",
        [str(script), str(tmp_path), "lightning.pytorch"],
        env={
            **env,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "200",
            "FT_JOB_ID": str(tmp_path),
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # TQDM's bar, then Rich's: members, step, discards.
    assert "groups=1/1, step=8" in done.stdout + done.stderr
    assert "discards=1" in done.stdout + done.stderr
    assert "groups: 1/1 step: 8" in done.stdout
    for bar in ("TQDMProgressBar", "RichProgressBar"):
        (metrics,) = (tmp_path / bar).glob("version_0/metrics.csv")
        rows = [row for row in csv.DictReader(metrics.open()) if row["ft/discards"]]
        assert [int(row["step"]) for row in rows] == [1, 3, 5, 7]
        assert [float(row["ft/discards"]) for row in rows] == [0, 1, 1, 1]
        assert {float(row["ft/participants"]) for row in rows} == {1.0}
        assert float(rows[-1]["ft/step_s"]) > 0
        picture = tmp_path / bar / "picture" / "timeline.png"
        assert picture.read_bytes()[:4] == b"\x89PNG"
        run = read_run(picture.parent)
        assert run.committed_steps() >= 8
        assert len(run.lives[0].of_kind(DISCARD)) == 1


@pytest.mark.process
def test_a_picture_that_cannot_be_made_ends_no_fit(tmp_path: Path) -> None:
    """Nor does its record on a full disk. A later fit is counted from its first step."""
    script = tmp_path / "fits.py"
    script.write_text(NO_PICTURE)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("FT_", "TORCHFT_"))}
    env |= {"PYTHONPATH": str(ROOT), "FT_JOB_ID": str(tmp_path)}
    done = workers.run("lightning", [str(script), str(tmp_path)], env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("no timeline: ") == 3
    assert done.stderr.count("ends here: it can't be written") == 1


def test_counts_follow_the_events() -> None:
    counts = Counts(3)
    assert counts.for_bar(0) == {"groups": "0/3", "step": "0"}
    counts(Event(COMMIT, {"step": 4, "participants": 2, "seconds": 0.25}))
    counts(Event(SERVE, {"step": 5, "seconds": 0.1}))
    assert counts.for_bar(5) == {"groups": "2/3", "step": "5"}
    counts(Event(DISCARD, {"step": 5, "reason": "", "seconds": 0.1}))
    counts(Event(HEAL_DONE, {"step": 5, "bytes": 1, "seconds": 0.1, "sources": []}))
    assert counts.for_bar(5) == {"groups": "2/3", "step": "5", "discards": "1", "heals": "1"}
    assert counts.for_loggers() == {
        "ft/participants": 2.0,
        "ft/commits": 1.0,
        "ft/discards": 1.0,
        "ft/heals": 1.0,
        "ft/served": 1.0,
        "ft/step_s": 0.25,
    }


def test_a_folder_of_events_is_read_as_a_run(tmp_path: Path) -> None:
    def write(group: int, pid: int, *lines: str) -> None:
        event_file(tmp_path, group, pid).write_text("\n".join(lines))

    commit = '{{"t": {}, "kind": "commit", "step": {}}}'
    end = f'{{"t": 9, "kind": "{END}"}}'
    write(0, 11, commit.format(1, 0), commit.format(2, 1), end)
    write(1, 13, commit.format(6, 1), end)
    write(1, 12, commit.format(1, 0), '{"t": 2, "ki')  # killed while it wrote
    write(2, 14)
    (tmp_path / "events.txt").write_text("something else")
    run = read_run(tmp_path)
    assert [(life.group, life.number, life.pid, life.killed) for life in run.lives] == [
        (0, 0, 11, False),
        (1, 0, 12, True),
        (1, 1, 13, False),
    ]
    assert (run.victim, run.kill_s, run.ended_s) == (1, 1, 9)
    assert run.committed_steps() == 2


PROFILES = """
import sys
from pathlib import Path
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.profilers import AdvancedProfiler

profiler = AdvancedProfiler(Path(sys.argv[0]).parent / "profiles", "run", dump_stats=True)
trainer = Trainer(accelerator="cpu", strategy="ft_ddp", max_epochs=1, limit_train_batches=2, profiler=profiler,
                  limit_val_batches=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                  enable_model_summary=False)
model = BoringModel()
trainer.fit(model)
trainer.test(model, verbose=False)
"""


def test_each_group_has_profiles_of_its_own(tmp_path: Path, lighthouse: str) -> None:
    """In files that carry its rank, as those of `ddp`. All wrote those of rank 0."""
    script = tmp_path / "train.py"
    script.write_text(PROFILES)
    with running(tmp_path, lighthouse, worker=script) as run:
        run.wait(run.start(0), run.start(1))
    names = {path.name for path in (tmp_path / "profiles").iterdir()}
    for kind in ("fit", "test"):
        for rank in (0, 1):
            assert f"{kind}-run-{rank}.txt" in names
    assert "fit-run-1-run_training_batch.prof" in names
