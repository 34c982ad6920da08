"""python benchmarks/return_time.py [--only trainer epochs loop lightning fabric] [--high 20000] [--epoch 1000] [--json FILE]

How long a replica group takes from joining to the first step that counts, early and late in a training:
two groups on CPU, a tiny model and map-style data; one group is killed after 100 steps and started
again, then after `--high` steps. What it must not do is grow with the training.

trainer: transformers' Trainer, which enters its loop at its peers' place.
epochs: a raw Accelerate loop over `ft_accelerate.epochs(...)`, which does so, too.
loop: a raw Accelerate loop as it is, which runs through its past.
lightning: Lightning's Trainer.
fabric: a Fabric loop over `strategy.epochs(...)`.

"joining" is the first message to the lighthouse, and "counts" is the first commit of both groups. "peer
waits" is the longest time between two commits of the other group from the joining on. Limit: a difference
of 0.2 s (not for `loop`).
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import arguments, report

from lighthouse import LighthouseServer

ROOT = Path(__file__).resolve().parents[1]
WAYS = ("trainer", "epochs", "loop", "lightning", "fabric")
LOW, BATCH, LIMIT_S = 100, 2, 1500.0
FOREVER = 10_000_000
Event = dict[str, Any]


# ------------------------------------------------------------------ one process


def train(way: str, epoch: int, folder: str) -> None:
    """Train until it is killed. `epoch`: steps in an epoch."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(1)
    data = [
        {"x": torch.full((8,), 1 / (1 + n)), "labels": torch.zeros(1)}
        for n in range(2 * BATCH * epoch)
    ]
    if way == "lightning":
        by_lightning(data, folder)
        return
    if way == "fabric":
        by_fabric(data)
        return
    from ft_accelerate.install import install

    install()
    by_trainer(data, folder) if way == "trainer" else by_loop(data, way)


def by_trainer(data: list[Any], folder: str) -> None:
    import torch
    from transformers import Trainer, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(8, 1)

        def forward(self, x: Any, labels: Any) -> Any:
            return {"loss": (self.net(x) - labels).square().mean()}

    given = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=BATCH,
        max_steps=FOREVER,
        logging_steps=FOREVER,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    Trainer(model=Model(), args=given, train_dataset=data).train()  # type: ignore[arg-type]


def by_loop(data: list[Any], way: str) -> None:
    import torch
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    import ft_accelerate

    accelerator = Accelerator(cpu=True)
    net = torch.nn.Linear(8, 1)
    model, optimizer, loader = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), 1e-3), DataLoader(data, BATCH, shuffle=True)
    )
    for _ in ft_accelerate.epochs(FOREVER) if way == "epochs" else range(FOREVER):
        for batch in loader:
            loss = (model(batch["x"]) - batch["labels"]).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


def by_lightning(data: list[Any], folder: str) -> None:
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from torch.utils.data import DataLoader

    import ft_lightning  # noqa: F401  (makes the strategy's name known)

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(8, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return (self.net(batch["x"]) - batch["labels"]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-3)

    trainer = Trainer(
        strategy="ft_ddp",
        accelerator="cpu",
        devices=1,
        max_steps=FOREVER,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(Model(), DataLoader(data, BATCH, shuffle=True))  # type: ignore[arg-type]


def by_fabric(data: list[Any]) -> None:
    import torch
    from lightning.fabric import Fabric
    from torch.utils.data import DataLoader

    from ft_lightning.fabric import FTDDPStrategy

    strategy = FTDDPStrategy()
    fabric = Fabric(strategy=strategy, accelerator="cpu", devices=1)
    fabric.launch()
    net = torch.nn.Linear(8, 1)
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), 1e-3))
    loader = fabric.setup_dataloaders(DataLoader(data, BATCH, shuffle=True))  # type: ignore[arg-type]
    for _ in strategy.epochs(FOREVER):
        for batch in loader:
            loss = (model(batch["x"]) - batch["labels"]).square().mean()
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


# ------------------------------------------------------------------ the measurement


def one_run(way: str, kill_at: int, epoch: int, folder: Path) -> dict[str, float]:
    """Kill group 1 after so many steps, and start it again; the figures, in seconds."""
    processes = []
    with LighthouseServer() as server:

        def start(group: int, life: int) -> subprocess.Popen[bytes]:
            prefix = "ACCELERATE_FAULT_TOLERANCE_"
            env = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
                "ACCELERATE_USE_FAULT_TOLERANCE": "true",
                prefix + "REPLICA_GROUP_ID": str(group),
                prefix + "NUM_REPLICA_GROUPS": "2",
                prefix + "LIGHTHOUSE": server.address(),
                prefix + "JOB_ID": str(folder),
                "REPLICA_GROUP_ID": str(group),
                "NUM_REPLICA_GROUPS": "2",
                "TORCHFT_LIGHTHOUSE": server.address(),
                "FT_JOB_ID": str(folder),
                "FT_RESTARTS": str(life),
                "FT_EVENT_LOG": str(folder / f"{group}.{life}"),
                "OMP_NUM_THREADS": "1",
            }
            command = [sys.executable, __file__, "--train", way, str(epoch), str(folder)]
            with (folder / f"{group}.{life}.output").open("w") as output:
                processes.append(subprocess.Popen(command, env=env, stdout=output, stderr=output))
            return processes[-1]

        try:
            start(0, 0)
            victim = start(1, 0)
            reached = lambda e: e["kind"] == "commit" and e["step"] >= kill_at  # noqa: E731
            await_(folder / "1.0", reached, victim)
            victim.kill()
            victim.wait()
            back = start(1, 1)
            counts = lambda e: e["kind"] == "commit" and e["participants"] == 2  # noqa: E731
            counting = await_(folder / "1.1", counts, back)
        finally:
            for process in processes:
                process.kill()
                process.wait()
    joined = next(events(folder / "1.1"))["t"]
    of_peer = [e["t"] for e in events(folder / "0.0") if e["kind"] == "commit"]
    waits = [b - a for a, b in itertools.pairwise(of_peer) if joined <= b <= counting["t"] + 1]
    return {
        "back_s": counting["t"] - joined,
        "peer_waits_s": max(waits, default=0.0),
        "step": counting["step"],
    }


def await_(path: Path, wanted: Callable[[Event], bool], process: subprocess.Popen[bytes]) -> Event:
    """The first of these events that a process writes."""
    deadline, at = time.monotonic() + LIMIT_S, 0
    while time.monotonic() < deadline and process.poll() is None:
        text = b""
        if path.exists():
            with path.open("rb") as written:  # all of it each time would take the trainers' cores
                written.seek(at)
                text = b"".join(written.read().rpartition(b"\n")[:2])
        at += len(text)
        for line in text.splitlines():
            if wanted(event := json.loads(line)):
                return event
        time.sleep(0.2)
    ended = f"the process ended with code {process.poll()}, or {LIMIT_S:g} s were over"
    raise RuntimeError(f"{ended}: {Path(f'{path}.output').read_text()[-2000:]}")


def events(path: Path) -> Iterator[Event]:
    for line in path.read_text().rpartition("\n")[0].splitlines():
        yield json.loads(line)


def main() -> None:
    parser = arguments((__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--train", nargs=3, metavar=("WAY", "EPOCH", "FOLDER"), help="one process")
    parser.add_argument("--only", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--high", type=int, default=20_000, help="steps before the later kill")
    parser.add_argument("--epoch", type=int, default=1000, help="steps in an epoch")
    options = parser.parse_args()
    if options.train:
        way, epoch, folder = options.train
        train(way, int(epoch), folder)
        return
    rows, figures = [], {}
    for way in options.only:
        runs = []
        for kill_at in (LOW, options.high):
            with tempfile.TemporaryDirectory() as folder:
                runs.append(one_run(way, kill_at, options.epoch, Path(folder)))
            print(way, runs[-1], flush=True)
        figures[way] = runs
        low_s, high_s = (run["back_s"] for run in runs)
        waits = ", ".join(f"{run['peer_waits_s']:.2f}" for run in runs)
        steps = ", ".join(f"{run['step']:,.0f}" for run in runs)
        rows.append((way, steps, f"{low_s:.2f}", f"{high_s:.2f}", f"{high_s - low_s:+.2f}", waits))
    columns = ("way", "steps", "early, s", "late, s", "difference, s", "peer waits, s")
    report("From joining to the first step that counts", columns, rows, figures, options.json)


if __name__ == "__main__":
    main()
