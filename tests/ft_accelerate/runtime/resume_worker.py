"""One process of a test: a raw script that saves its state, and resumes from the newest by itself.

    python tests/ft_accelerate/runtime/resume_worker.py '{"log": "/dir", ...}'

As Accelerate's own example of checkpointing does it: the number of steps is in the checkpoint's name,
epoch and batch follow from it, and `skip_first_batches` leaves out what is done.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.ft_accelerate.installed import run_script
from tests.ft_accelerate.runtime.loop_worker import LoopLog, Stream
from tests.harness.script import digest

OPTIONS: dict[str, Any] = {
    "log": "",
    "resume": True,
    "epochs": 5,
    "early": 0,  # a second life ends after so many epochs
    "says_end": False,
    "streams": False,  # the training data, which has no length
    "save_every": 6,
    "pause_s": 0.0,  # before each step after "step-30"
    "dropout": 0.0,
    "holds": [],  # places to wait at: "step-<step>"
    "inject": {},
}


def run(options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    accelerator = Accelerator(cpu=True)
    set_seed(5)
    log = LoopLog(options, accelerator)
    folder = Path(options["log"]) / "states"
    images, labels = torch.randn(64, 8), torch.randint(0, 3, (64,))
    data = TensorDataset(images, labels)
    if options["streams"]:
        unread = DataLoader(Stream(data), 4)
    else:
        unread = DataLoader(data, 4, shuffle=True)
    batches_each = len(data) // 4 // accelerator.num_processes
    net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(options["dropout"]), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    model, optimizer, train, test = accelerator.prepare(net, optimizer, unread, DataLoader(data, 8))
    step = 0
    found = sorted(folder.glob("step_*"), key=lambda path: int(path.name.split("_")[1]))
    if options["resume"] and found:
        accelerator.load_state(str(found[-1]))
        step = int(found[-1].name.split("_")[1])
    first, done = divmod(step, batches_each)
    log.append("starts", step=step)
    again = os.environ.get("FT_RESTARTS") == "1"
    for epoch in range(first, (again and options["early"]) or options["epochs"]):
        model.train()
        batches: Any = train
        if epoch == first and done:
            batches = accelerator.skip_first_batches(train, done)
        for index, (x, y) in enumerate(batches, done if epoch == first else 0):
            log.at(f"step-{step}")
            time.sleep(options["pause_s"] if log.live and step > 30 else 0.0)
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            log.step(
                step=step,
                epoch=epoch,
                index=index,
                digest=digest(net.state_dict()),
                lr=0,
                ticks=0,
                average=0,
                count=0,
            )
            if step % options["save_every"] == 0:
                accelerator.save_state(str(folder / f"step_{step}"))
        model.eval()
        for x, _ in test:
            with torch.no_grad():
                accelerator.gather_for_metrics(model(x))
    if options["says_end"]:
        accelerator.end_training()
    log.end(step=step, digest=digest(net.state_dict()))


if __name__ == "__main__":
    run_script(OPTIONS, run)
