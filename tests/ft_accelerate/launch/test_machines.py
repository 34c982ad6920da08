"""`accelerate launch` on several machines, here several launchers of one: only `machine_rank` differs."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from ft_accelerate.launch.cli_test import SCRIPT
from ft_core.launch.rank_group import free_port
from tests.ft_accelerate.installed import installed
from tests.harness import workers
from tests.harness.waiting import PATIENCE_S, until

STAYS = "the lighthouse of this machine stays until the other machines are done"
USED = "the lighthouse of the launcher before this one still runs, and is used"
TRAINS = """
import os, sys, time
from pathlib import Path
import torch
from accelerate import Accelerator

log, group = Path(sys.argv[1]), os.environ["ACCELERATE_FAULT_TOLERANCE_REPLICA_GROUP_ID"]
held = sys.argv[2:]
accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model, data = torch.nn.Linear(4, 1), torch.utils.data.TensorDataset(torch.randn(128, 4))
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.SGD(model.parameters(), 0.01), torch.utils.data.DataLoader(data, 8))

def hold(place):
    if f"{group}:{place}" in held:
        (log / f"{group}:{place}").touch()
        while not (log / "go").exists():
            time.sleep(0.01)

for number, (batch,) in enumerate(loader):
    if number == 3:
        hold("step")
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
    optimizer.zero_grad()
hold("trained")
accelerator.end_training()
(log / f"{group}.end").write_text(str([p.tolist() for p in model.parameters()]))
"""


class Machines:
    """Launchers of one job. `folder`: what they say is there, in `said.N` of the Nth that was started."""

    def __init__(self, folder: Path, processes: int = 1) -> None:
        self.port = free_port()
        self.folder, self.started = folder, list[workers.Worker]()
        self._env = installed(folder / "package")
        config = {
            "distributed_type": "MULTI_CPU",
            "use_cpu": True,
            "num_processes": 2 * processes,
            "num_machines": 2,
            "main_process_ip": "127.0.0.2",
            "main_process_port": self.port,
            "fault_tolerance_config": {"min_replicas": 2},
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(config))

    def start(self, rank: int, *script: str) -> workers.Worker:
        launch = ["-m", "accelerate.commands.accelerate_cli", "launch"]
        launch += ["--config_file", str(self.folder / "config.yaml"), "--machine_rank", str(rank)]
        with (self.folder / f"said.{len(self.started)}").open("wb") as out:
            command = [*launch, *script]
            machine = workers.start("accelerate", command, env=self._env, stdout=out, stderr=out)
        self.started.append(machine)
        return machine

    def said(self, number: int) -> str:
        return (self.folder / f"said.{number}").read_text()

    def unused(self) -> bool:
        """Whether nothing listens at the lighthouse's address."""
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.2", self.port)):
            return True
        return False


@pytest.fixture
def trains(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(TRAINS)
    return str(path)


@contextlib.contextmanager
def ended(machines: Machines) -> Iterator[Machines]:
    try:
        yield machines
    finally:
        for machine in machines.started:
            machine.end()


@pytest.mark.process
def test_two_machines_train_together(tmp_path: Path) -> None:
    """The same file and command on both, but for `machine_rank`; the first runs the lighthouse.

    Each machine is a replica group of two processes.
    """
    with ended(Machines(tmp_path, processes=2)) as machines:
        for rank in range(2):
            machines.start(rank, str(SCRIPT), str(tmp_path), "-1", "0")
        codes = [machine.wait(PATIENCE_S) for machine in machines.started]
        said = [machines.said(rank) for rank in range(2)]
    assert codes == [0, 0], "".join(said)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    assert len({process["weights"] for process in found}) == 1
    assert [process["group"] for process in found] == [0, 1, 2, 3]
    assert [process["local_main"] for process in found] == [True, False, True, False]
    assert "starting replica group 1 of 2, 2 processes each" in said[1]
    assert STAYS in said[0]
    assert "replica group 1 has finished" in said[1]  # its number in the job, not on the machine


@pytest.mark.process
def test_the_first_machine_is_done_first(tmp_path: Path, trains: str) -> None:
    """Its lighthouse stays for the other one, which has not left the quorum yet."""
    with ended(Machines(tmp_path)) as machines:
        for rank in range(2):
            machines.start(rank, trains, str(tmp_path), "1:trained")
        until(
            lambda: (tmp_path / "1:trained").exists() and STAYS in machines.said(0), "group 0's end"
        )
        assert machines.started[0].poll() is None
        (tmp_path / "go").touch()
        codes = [machine.wait(PATIENCE_S) for machine in machines.started]
        said = machines.said(0) + machines.said(1)
    assert codes == [0, 0], said
    assert "Traceback" not in said
    assert (tmp_path / "0.end").read_text() == (tmp_path / "1.end").read_text()


@pytest.mark.process
def test_the_first_machines_launcher_is_killed_and_started_again(
    tmp_path: Path, trains: str
) -> None:
    """Its lighthouse outlives it, for the others, and the next launcher uses that."""
    with ended(Machines(tmp_path)) as machines:
        for rank in range(2):
            machines.start(rank, trains, str(tmp_path), "0:step")
        until((tmp_path / "0:step").exists, "a step of both")
        machines.started[0].kill()
        machines.started[0].wait(PATIENCE_S)
        (tmp_path / "go").touch()
        machines.start(0, trains, str(tmp_path))
        codes = [machine.wait(PATIENCE_S) for machine in machines.started[1:]]
        said = machines.said(1) + machines.said(2)
        assert codes == [0, 0], said
        assert USED in machines.said(2)
        assert "Traceback" not in said
        until(machines.unused, "the end of the lighthouse")
    assert (tmp_path / "0.end").read_text() == (tmp_path / "1.end").read_text()
