"""python benchmarks/leader_deaths.py [--loop accelerate] [--trackers csv wandb] [--runs 3] [--json FILE]

What survivors wait when the leader dies, which writes to a tracker: Lightning's Trainer ("lightning"),
transformers' ("transformers") or a raw loop ("accelerate") in three replica groups, steps of 50 ms, the
leader killed twice in mid-run. The next leader opens its trackers beside the training. "longest" is the longest step
within 15 s of a death, less the median of all, over both survivors (the second time: over one); "lost" is the sum
over these seconds. Each run also checks that the tracker holds each step once, in one run. Limit: 200 ms.

Needs the trackers: docs/lightning_tests.md says how to install them.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import arguments, report

from lighthouse import LighthouseServer
from tests.harness.trackers import in_csv, in_mlflow, in_tensorboard, in_wandb, make_mlflow

ROOT = Path(__file__).resolve().parents[1]
TRACKERS = ("csv", "tensorboard", "wandb", "mlflow")
PAUSE_S, LOOK_S, LIMIT_S = 0.05, 15.0, 300.0
STEPS, DEATHS = 900, (100, 450)  # the steps at which groups 0 and 1 are killed
COMMITS = {"lightning": 1, "accelerate": 1, "transformers": 3}
"""A step: Trainer agrees on what it logs."""


def with_lightning(tracker: str, folder: str) -> None:
    import torch
    from lightning.pytorch import LightningModule, Trainer, loggers, seed_everything
    from torch.utils.data import DataLoader, TensorDataset

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(64, 64)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            time.sleep(PAUSE_S)
            loss = self.net(batch[0]).square().mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    torch.set_num_threads(1)
    seed_everything(1, verbose=False)
    make = {
        "csv": lambda: loggers.CSVLogger(folder, "csv"),
        "tensorboard": lambda: loggers.TensorBoardLogger(folder, "tensorboard"),
        "wandb": lambda: loggers.WandbLogger(save_dir=folder, offline=True),
        "mlflow": lambda: loggers.MLFlowLogger(
            "deaths", tracking_uri=f"sqlite:///{folder}/mlflow.db"
        ),
    }
    trainer = Trainer(
        strategy="ft_ddp",
        accelerator="cpu",
        devices=1,
        max_steps=STEPS,
        max_epochs=-1,
        logger=make[tracker](),
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    data = TensorDataset(torch.randn(3 * 8 * STEPS, 64))
    trainer.fit(Module(), DataLoader(data, 8))


def with_accelerate(tracker: str, folder: str) -> None:
    import torch
    from accelerate import Accelerator
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(1)
    accelerator = Accelerator(cpu=True, log_with=tracker, project_dir=f"{folder}/{tracker}")
    accelerator.init_trackers("deaths", config={"pause_s": PAUSE_S})
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(torch.randn(3 * 8 * STEPS, 64)), 8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for step, (batch,) in enumerate(loader):
        if not catches_up():
            time.sleep(PAUSE_S)
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": loss.item()}, step=step)
    accelerator.end_training()


def with_transformers(tracker: str, folder: str) -> None:
    import torch
    from torch.utils.data import TensorDataset
    from transformers import Trainer, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(64, 64)

        def forward(self, x: Any) -> Any:
            if not catches_up():
                time.sleep(PAUSE_S)
            return {"loss": self.net(x).square().mean()}

    def collate(rows: Any) -> Any:
        return {"x": torch.stack([x for x, _ in rows])}

    torch.manual_seed(1)
    arguments = TrainingArguments(
        output_dir=f"{folder}/out",
        max_steps=STEPS,
        per_device_train_batch_size=8,
        use_cpu=True,
        logging_steps=1,
        report_to=tracker,
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    data = TensorDataset(torch.randn(3 * 8 * STEPS, 64), torch.zeros(3 * 8 * STEPS))
    Trainer(Model(), arguments, collate, data).train()


def catches_up() -> bool:
    """Whether this process runs through its past."""
    from ft_accelerate.runtime import process

    return not process.current().live


def steps_of(loop: str, folder: Path, group: int) -> list[tuple[float, int]]:
    """(Unix time, number) of each step that a group has told of: of its last commit."""
    told = ((at, *divmod(number, COMMITS[loop])) for at, number in commits(folder, group))
    return [(at, step) for at, step, rest in told if not rest]


def commits(folder: Path, group: int) -> list[tuple[float, int]]:
    """(Unix time, number) of each commit that a group has told."""
    path = folder / f"events-{group}"
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    told = [json.loads(line) for line in whole.splitlines()]
    return [(event["t"], event["step"]) for event in told if event["kind"] == "commit"]


def one_run(loop: str, tracker: str, folder: Path) -> dict[str, Any]:
    """Kill the leaders of one run; the figures."""
    if tracker == "mlflow":
        make_mlflow(folder / "mlflow.db", "deaths")
    killed_at, processes = [], []
    # As `accelerate launch`: the first leader opens its tracker before it joins.
    with LighthouseServer(min_replicas=1, join_timeout_ms=60_000) as server:
        for group in range(3):
            env = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
                "REPLICA_GROUP_ID": str(group),
                "NUM_REPLICA_GROUPS": "3",
                "TORCHFT_LIGHTHOUSE": server.address(),
                "FT_JOB_ID": str(folder),
                "FT_EVENT_LOG": str(folder / f"events-{group}"),
                "OMP_NUM_THREADS": "1",
                "WANDB_SILENT": "true",
                "WANDB_MODE": "offline",
                "WANDB_DIR": str(folder),
                "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
                "MLFLOW_EXPERIMENT_NAME": "deaths",
                "TENSORBOARD_LOGGING_DIR": str(folder / "tensorboard" / "deaths"),
                "ACCELERATE_USE_FAULT_TOLERANCE": str(loop != "lightning"),
                "ACCELERATE_FAULT_TOLERANCE_JOB_ID": str(folder),
            }
            command = [sys.executable, __file__, "--train", loop, tracker, str(folder)]
            with (folder / f"output-{group}").open("w") as output:
                processes.append(subprocess.Popen(command, env=env, stdout=output, stderr=output))
        try:
            deadline = time.monotonic() + LIMIT_S
            for victim, step in enumerate(DEATHS):
                while not any(at >= step for _, at in steps_of(loop, folder, victim)):
                    if time.monotonic() > deadline or processes[victim].poll() is not None:
                        raise RuntimeError((folder / f"output-{victim}").read_text()[-2000:])
                    time.sleep(0.05)
                processes[victim].send_signal(signal.SIGKILL)
                killed_at.append(time.time())
            if processes[2].wait(timeout=LIMIT_S) != 0:
                raise RuntimeError((folder / "output-2").read_text()[-2000:])
        finally:
            for process in processes:
                process.kill()
                process.wait()
    if round(commits(folder, 2)[-1][1] / STEPS) != COMMITS[loop]:
        raise RuntimeError("a step of this loop has another number of commits: change COMMITS")
    waits = [
        after_death(steps_of(loop, folder, group), moment)
        for victim, moment in enumerate(killed_at)
        for group in range(victim + 1, 3)
    ]
    return {
        "longest_s": max(longest for longest, _ in waits),
        "lost_s": max(lost for _, lost in waits),
        "whole": held(loop, tracker, folder)
        == [step + (loop == "transformers") for step in range(STEPS)],
    }


def after_death(told: list[tuple[float, int]], moment: float) -> tuple[float, float]:
    """(longest, lost) of one survivor, in seconds; see the module's docstring."""
    gaps = [(a, b - a) for (a, _), (b, _) in itertools.pairwise(told)]
    usual = statistics.median(gap for _, gap in gaps)
    near = [gap for begun, gap in gaps if moment - 2 * usual <= begun <= moment + LOOK_S]
    return max(near) - usual, sum(gap - usual for gap in near)


def held(loop: str, tracker: str, folder: Path) -> list[int]:
    """The steps of which the tracker holds the loss."""
    name = "loss" if loop != "transformers" else "train/loss"
    if tracker == "csv":
        return in_csv(folder / "csv", "loss")
    if tracker == "tensorboard":
        return in_tensorboard(folder / "tensorboard", name)
    if tracker == "wandb":
        steps = {"accelerate": "_step", "transformers": "train/global_step"}
        return in_wandb(folder, name, steps.get(loop, "trainer/global_step"))
    return in_mlflow(folder / "mlflow.db", "deaths", "loss")


TRAIN = {
    "lightning": with_lightning,
    "accelerate": with_accelerate,
    "transformers": with_transformers,
}


def main() -> None:
    parser = arguments((__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--train", nargs=3, metavar=("LOOP", "TRACKER", "FOLDER"), help="a process")
    parser.add_argument("--loop", choices=tuple(TRAIN), default="lightning")
    parser.add_argument("--trackers", nargs="+", choices=TRACKERS, default=TRACKERS)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    if options.train:
        loop, tracker, folder = options.train
        TRAIN[loop](tracker, folder)
        return
    rows, figures = [], {}
    for tracker in options.trackers:
        if importlib.util.find_spec(tracker) is None:
            continue
        if tracker == "csv" and options.loop != "lightning":
            continue
        runs = []
        for _ in range(options.runs):
            with tempfile.TemporaryDirectory() as folder:
                runs.append(one_run(options.loop, tracker, Path(folder)))
            print(tracker, runs[-1], flush=True)
        figures[tracker] = runs
        longest, lost = (
            ", ".join(f"{run[key] * 1e3:.0f}" for run in runs) for key in ("longest_s", "lost_s")
        )
        rows.append((tracker, longest, lost, "yes" if all(run["whole"] for run in runs) else "NO"))
    columns = ("tracker", "longest, ms", "lost, ms", "each step once")
    title = f"two deaths of the leader: {options.loop}"
    report(title, columns, rows, figures, options.json)


if __name__ == "__main__":
    main()
