"""python benchmarks/walk.py [--only core heal lightning fabric accelerate] [--list]

How far a reader has to walk: for one committed step (two replica groups), and for one heal, the
files of the product that run, and the moves between them: calls from one file into another, found
with `sys.setprofile`. `--list` prints each move of the loop's thread. No figure here is a time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
PACKAGES = ("lighthouse", "ft_core", "ft_lightning", "ft_accelerate")
WALKS = ("core", "heal", "lightning", "fabric", "accelerate")
TRACED_STEP = 12


class Tracer:
    """Counts calls that cross from one file of the product into another, by thread."""

    def __init__(self) -> None:
        self.on = False
        self.moves: dict[str, list[str]] = defaultdict(list)
        self.files: dict[str, set[str]] = defaultdict(set)

    def install(self) -> None:
        """In this thread and in those that start later."""
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def figures(self) -> dict[str, Any]:
        return {
            "threads": {
                name: {"files": len(self.files[name]), "moves": len(self.moves[name])}
                for name in sorted(self.files)
            },
            "files": len(set().union(*self.files.values())),
            "moves": sum(map(len, self.moves.values())),
            "list": self.moves,
        }

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not self.on:
            return
        to = _file(frame)
        if to is None:
            return
        thread = threading.current_thread().name
        self.files[thread].add(to)
        caller = frame.f_back
        while caller is not None and _file(caller) is None:
            caller = caller.f_back
        source = "(outside)" if caller is None else _file(caller)
        if source != to:
            self.moves[thread].append(f"{source} -> {to} {frame.f_code.co_qualname}")


def _file(frame: FrameType) -> str | None:
    name = frame.f_code.co_filename
    if not name.startswith(f"{ROOT}/"):
        return None
    name = name[len(str(ROOT)) + 1 :]
    return name if name.startswith(PACKAGES) else None


TRACER = Tracer()


def core() -> None:
    """One step of a loop of your own: `zero_grad`, forward, backward, `step`."""
    import torch

    barrier = threading.Barrier(2)

    def loop(number: int, manager: Any, model: Any, optimizer: Any) -> None:
        for step in range(8):
            barrier.wait()
            if number == 0 and step == 6:
                TRACER.on = True
            barrier.wait()
            optimizer.zero_grad()
            model(torch.ones(4, 512)).sum().backward()
            optimizer.step()
            barrier.wait()
            if number == 0 and step == 6:
                time.sleep(
                    0.05
                )  # what the lighthouse and the control thread still do belongs to the step
                TRACER.on = False
            barrier.wait()

    _two_loops(loop, expected=2)


def heal() -> None:
    """A second replica group joins a running first one: until its first commit."""
    import torch

    joined, done = threading.Event(), threading.Event()

    def loop(number: int, manager: Any, model: Any, optimizer: Any) -> None:
        if number == 1:
            joined.wait()
            TRACER.on = True
        steps = 0
        while not done.is_set():
            optimizer.zero_grad()
            model(torch.ones(4, 512)).sum().backward()
            optimizer.step()
            steps += 1
            if number == 1:
                TRACER.on = False
                done.set()
            elif steps == 5:
                joined.set()
            elif not TRACER.on:
                time.sleep(0.01)

    _two_loops(loop, expected=1)


def _two_loops(loop: Callable[..., None], *, expected: int) -> None:
    import torch

    from ft_core import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
    from lighthouse import LighthouseServer

    torch.set_num_threads(1)
    TRACER.install()
    server = LighthouseServer("tcp://127.0.0.1:0")

    def run(number: int) -> None:
        torch.manual_seed(number)
        module = torch.nn.Sequential(
            torch.nn.Linear(512, 600), torch.nn.ReLU(), torch.nn.Linear(600, 4)
        )
        inner = torch.optim.SGD(module.parameters(), lr=0.1)

        def load(state: Any) -> None:
            module.load_state_dict(state["model"])
            inner.load_state_dict(state["optimizer"])

        manager = Manager(
            pg=ProcessGroupGloo(),
            load_state_dict=load,
            state_dict=lambda: {"model": module.state_dict(), "optimizer": inner.state_dict()},
            min_replica_size=expected,
            expected_replicas=expected,
            lighthouse_addr=server.address(),
            replica_id=f"r{number}",
            rank=0,
            world_size=1,
            use_async_quorum=False,
            watch_process=False,
            timeout=timedelta(seconds=20),
        )
        model = DistributedDataParallel(manager, module)
        loop(number, manager, model, Optimizer(manager, inner))
        manager.shutdown()

    loops = [threading.Thread(target=run, args=(n,), name=f"loop {n}") for n in range(2)]
    for thread in loops:
        thread.start()
    for thread in loops:
        thread.join()
    server.shutdown()


def _traced(step: int) -> None:
    """Called by process 0 after each step: trace the one after TRACED_STEP."""
    if step == TRACED_STEP:
        TRACER.install()
        TRACER.on = True
    elif step == TRACED_STEP + 1:
        TRACER.on = False
        sys.setprofile(None)


def _net_and_data() -> tuple[Any, Any, Callable[..., Any]]:
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    data = TensorDataset(torch.randn(256, 8), torch.randint(0, 3, (256,)))
    return net, DataLoader(data, batch_size=4), nn.functional.cross_entropy


def lightning(rank: int) -> None:
    """One batch of a Trainer, from one `on_train_batch_end` to the next."""
    import torch
    from lightning.pytorch import Callback, LightningModule, Trainer

    import ft_lightning  # noqa: F401 - makes "ft_ddp" known

    net, data, loss_of = _net_and_data()

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, index: int) -> Any:
            loss = loss_of(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Watch(Callback):
        def on_train_batch_end(
            self, trainer: Any, module: Any, out: Any, batch: Any, i: int
        ) -> None:
            if rank == 0:
                _traced(i)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    Trainer(
        strategy="ft_ddp",
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        callbacks=[Watch()],
        enable_model_summary=False,
        **quiet,
    ).fit(Module(), data)


def fabric(rank: int) -> None:
    """One step of a Fabric loop."""
    import torch
    from lightning.fabric import Fabric

    import ft_lightning  # noqa: F401

    net, data, loss_of = _net_and_data()
    engine = Fabric(strategy="ft_ddp", accelerator="cpu", devices=1)
    engine.launch()
    net, optimizer = engine.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for i, (x, y) in enumerate(engine.setup_dataloaders(data)):
        optimizer.zero_grad()
        engine.backward(loss_of(net(x), y))
        optimizer.step()
        if rank == 0:
            _traced(i)


def accelerate(rank: int) -> None:
    """One step of a raw Accelerate loop."""
    import torch
    from accelerate import Accelerator

    net, data, loss_of = _net_and_data()
    engine = Accelerator(cpu=True)
    net, optimizer, data = engine.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), data)
    for i, (x, y) in enumerate(data):
        optimizer.zero_grad()
        engine.backward(loss_of(net(x), y))
        optimizer.step()
        if rank == 0:
            _traced(i)
    engine.end_training()


def _in_two_processes(walk: str) -> dict[str, Any]:
    """Each a replica group of its own; the figures of the first."""
    from lighthouse import LighthouseServer

    server = LighthouseServer("tcp://127.0.0.1:0", min_replicas=2)
    command = [sys.executable, __file__, "--child", walk]
    if walk == "accelerate":
        command = [sys.executable, "-m", "ft_accelerate.run", __file__, "--child", walk]
    common = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TORCHFT_LIGHTHOUSE": server.address(),
        "NUM_REPLICA_GROUPS": "2",
    }
    children = [
        subprocess.Popen(
            command, env={**common, "REPLICA_GROUP_ID": str(n)}, stdout=subprocess.PIPE
        )
        for n in range(2)
    ]
    outputs = [child.communicate(timeout=300)[0] for child in children]
    server.shutdown()
    if any(child.returncode for child in children):
        raise SystemExit(f"{walk}: a process has failed")
    found: dict[str, Any] = json.loads(outputs[0].splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=WALKS, default=WALKS)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--child", choices=WALKS, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        walk = globals()[chosen.child]
        if chosen.child in ("core", "heal"):
            walk()
        else:
            walk(int(os.environ["REPLICA_GROUP_ID"]))
        TRACER.on = False
        print(json.dumps(TRACER.figures() if TRACER.files else {}))
        return
    print(f"{'walk':<12}{'thread':<28}{'files':>6}{'moves':>7}")
    for walk in chosen.only:
        if walk in ("core", "heal"):
            command = [sys.executable, __file__, "--child", walk]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
            found = json.loads(done.stdout.splitlines()[-1])
        else:
            found = _in_two_processes(walk)
        for thread, figures in found["threads"].items():
            print(f"{walk:<12}{thread:<28}{figures['files']:>6}{figures['moves']:>7}")
            if chosen.list and thread in ("loop 0", "MainThread"):
                print("\n".join(f"    {move}" for move in found["list"][thread]))
        print(f"{walk:<12}{'all':<28}{found['files']:>6}{found['moves']:>7}")


if __name__ == "__main__":
    main()
