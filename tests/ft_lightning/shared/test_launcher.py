"""How replica groups come about, and end, around real Trainers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ft_core.environment import ENV_WARM
from ft_core.launch.restarts import AWAY_EXIT_CODE
from lighthouse import LighthouseServer
from tests.ft_lightning.harness import NOT_OURS, Run, compare, running
from tests.harness import workers
from tests.harness.lighthouses import patient_lighthouse
from tests.harness.waiting import PATIENCE_S, children_of, gone, until

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.process


def command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_supervisor_and_all_it_started(tmp_path: Path, number: Any) -> None:
    """What was trained is kept: Lightning ends the fit after the batch, as it does without us.

    The end of the process that serves as its lighthouse does not end the supervisor: there is another.
    """
    with running(tmp_path, devices=2, max_epochs=100_000, step_delay_s=0.02) as run:
        main = run.start()
        for index in (0, 1):
            run.until_step(index, 3)
        children = [run.lives(index)[-1] for index in (0, 1)]
        (lighthouse,) = [
            pid for pid in children_of(main.pid) if b"lighthouse.standby" in command(pid)
        ]
        os.kill(*children_of(lighthouse), signal.SIGABRT)
        run.until(lambda: "its process ended (signal 6)" in run.output(), "the next lighthouse")
        for index in (0, 1):
            run.until_step(index, run.lines(index)[-1]["step"] + 3)
        main.send_signal(number)
        assert main.wait(PATIENCE_S) != 0
        ended = [*children, lighthouse]
        until(lambda: all(map(gone, ended)), "the children of a supervisor that has ended")
        assert run.output().count("started again") == 1  # the lighthouse
        assert run.lives(0) == children[:1]


def scheduled(run: Run, index: int) -> subprocess.Popen[bytes]:
    """One of two SLURM tasks."""
    return run.start(
        SLURM_NTASKS="2",
        SLURM_NTASKS_PER_NODE="2",
        SLURM_PROCID=str(index),
        SLURM_LOCALID=str(index),
        SLURM_NODEID="0",
        SLURM_JOB_NAME="train",
        SLURM_JOB_ID="7",
        PL_TRAINER_DEVICES="2",
        LOCAL_RANK=str(index),  # names the test's files; Lightning would set it
        **common(run),
    )


def common(run: Run) -> dict[str, str]:
    return {"TORCHFT_LIGHTHOUSE": run.lighthouse, "FT_JOB_ID": str(run.log)}


def requeued(
    run: Run, server: LighthouseServer, task: subprocess.Popen[bytes]
) -> subprocess.Popen[bytes]:
    """Task 1 is killed; its group comes back as a SLURM job of its own, which was requeued."""
    for index in (0, 1):
        run.until_step(index, 3)
    task.kill()
    run.until_held(0, "step:9")
    own = {"SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "1", "SLURM_PROCID": "0"}
    own |= {"SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_JOB_NAME": "train"}
    again = run.start(1, 2, SLURM_JOB_ID="8", SLURM_RESTART_COUNT="1", **own)
    run.until_waiting(server, "1")
    run.go("step:9")
    return again


def ended_alike(run: Run) -> int:
    """How many steps both groups have taken."""
    steps = len(run.lines(1))
    assert compare(run.lines(0), run.lines(1)) == steps > 3
    assert run.end(0)["digest"] == run.end(1)["digest"]
    assert [run.end(i)["rank"] for i in (0, 1)] == [0, 1]
    assert run.end(0)["world_size"] == 2
    return steps


def test_a_slurm_task_that_dies_comes_back(tmp_path: Path) -> None:
    with patient_lighthouse(join_timeout_s=20.0, connect_timeout_s=3.0) as server:
        options: dict[str, Any] = {"devices": 2, "max_epochs": 1, "holds": ["step:9"]}
        with running(tmp_path, server.address(), **options) as run:
            started = [scheduled(run, index) for index in (0, 1)]
            started[1] = requeued(run, server, started[1])
            run.wait(*started)
            ended_alike(run)


def test_machines_with_one_device_have_supervisors(tmp_path: Path) -> None:
    """A process that is killed comes back; what is started when all is over trains no more."""
    with patient_lighthouse(join_timeout_s=20.0, connect_timeout_s=3.0) as server:
        with running(tmp_path, server.address(), max_epochs=1, holds=["step:9"]) as run:

            def started(index: int) -> subprocess.Popen[bytes]:
                nodes = {"NODE_RANK": str(index), "PL_TRAINER_NUM_NODES": "2"}
                return run.start(**nodes, **common(run))

            machines = [started(index) for index in (0, 1)]
            for index in (0, 1):
                run.until_step(index, 3)
            os.kill(run.lives(1)[-1], signal.SIGKILL)
            run.until_held(0, "step:9")
            run.until(lambda: len(run.lives(1)) == 2, "the killed process to be started again")
            run.until_waiting(server, "1")
            run.go("step:9")
            run.wait(*machines)
            steps = ended_alike(run)
            run.wait(started(1))
            assert "group 1: the training has finished" in run.output()
            assert "does not start it over" in run.output()
            assert "Traceback" not in run.output()
            assert len(run.lines(1)) == steps


SEARCHES = """
import sys
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.tuner import Tuner

kind, strategy = sys.argv[1:]
print("begins", flush=True)
callbacks = {"rate": [LearningRateFinder()], "size": [BatchSizeFinder()]}.get(kind, [])
model = BoringModel()
model.lr, model.batch_size = 0.1, 2
trainer = Trainer(
    strategy=strategy, devices=2, accelerator="cpu", max_epochs=1, callbacks=callbacks, logger=False
)
if kind == "lr_find":
    Tuner(trainer).lr_find(model)
elif kind == "scale_batch_size":
    Tuner(trainer).scale_batch_size(model)
else:
    trainer.fit(model)
"""


@pytest.mark.parametrize(
    ("kind", "strategy", "said"),
    [
        ("lr_find", "ft_ddp", "ft_ddp finds a learning rate with one replica group only"),
        ("rate", "ft_ddp", "ft_ddp finds a learning rate with one replica group only"),
        ("rate", "ft_diloco", "LocalSGD and DiLoCo cannot find a learning rate"),
        ("scale_batch_size", "ft_ddp", "Tuning the batch size is"),  # Lightning's own sentence
        ("size", "ft_ddp", "a batch size is found by one process"),
    ],
)
def test_a_search_is_refused_before_processes_start(
    tmp_path: Path, kind: str, strategy: str, said: str
) -> None:
    script = tmp_path / "searches.py"
    script.write_text(SEARCHES)
    with running(tmp_path, worker=script) as run:
        process = run.launch([str(script), kind, strategy], {}, without=NOT_OURS)
        run.wait(process, code=1)
        lines = [line for line in run.output().splitlines() if line.strip()]
    assert lines.count("begins") == 1
    assert lines[-1].startswith(f"ValueError: {said}")
    assert sum(line.startswith("ValueError: ") for line in lines) == 1


HANGS = """
import os, sys, time
from pathlib import Path
import torch
from lightning.fabric import Fabric
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader
import ft_lightning.fabric
from ft_lightning.pytorch import FTDDPStrategy

log, kind, last = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
# What hangs is killed after 10 timeouts: time for the others to end first on a busy machine.
timeout_s = 3.0 if last == "hangs" else 1.0
group = os.environ.get("REPLICA_GROUP_ID")
came_back = group == "1" and (log / "hangs").exists()

def one_that_hangs():
    (log / "hangs").touch()
    time.sleep(3600)

def is_to_hang():
    return group == "1" and not (log / "hangs").exists()

class Data(RandomDataset):
    seen = 0

    def __getitem__(self, index):  # in a worker, which is ahead of the loop by two batches
        self.seen += 1
        if kind != "step" and self.seen == 10 and is_to_hang():
            (log / "worker").write_text(str(os.getpid()))
            one_that_hangs()
        return super().__getitem__(index)

def a_batch_ends(strategy):
    time.sleep(0.02)  # leaves the cores to what starts
    if came_back and strategy.num_participants == 2:
        (log / "back").touch()
    return (log / last).exists()

class Model(BoringModel):
    def train_dataloader(self):
        return DataLoader(Data(32, 64), num_workers=int(kind != "step"))

    def training_step(self, batch, batch_idx):
        if kind == "step" and self.global_step >= 5 and is_to_hang():
            one_that_hangs()
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *seen):
        self.trainer.should_stop = a_batch_ends(self.trainer.strategy)

def train_by_fabric():
    strategy = ft_lightning.fabric.FTDDPStrategy(timeout_s=timeout_s)
    fabric = Fabric(strategy=strategy, accelerator="cpu", devices=2)
    fabric.launch()
    net = torch.nn.Linear(32, 2)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    loader, stops = fabric.setup_dataloaders(DataLoader(Data(32, 64), num_workers=1)), False
    for epoch in strategy.epochs(1_000_000):
        for batch in loader:
            stops = fabric.all_reduce(torch.tensor(float(stops)), reduce_op="max") > 0
            fabric.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if stops:
                return net
            stops = a_batch_ends(strategy)

if kind == "fabric":
    trained = train_by_fabric()
else:
    trainer = Trainer(strategy=FTDDPStrategy(timeout_s=timeout_s), accelerator="cpu", devices=2,
                      max_epochs=1_000_000, default_root_dir=log)
    trained = Model()
    trainer.fit(trained)
weights = [p.tolist() for p in trained.parameters()]
print(f"\\ngroup {group} ends {weights}")  # at once, beside another process
"""


@pytest.mark.parametrize(
    ("kind", "until_it"),
    [("step", "is back"), ("step", "hangs"), ("loader", "is back"), ("fabric", "is back")],
)
def test_one_that_hangs_comes_back_and_the_job_ends(
    tmp_path: Path, kind: str, until_it: str
) -> None:
    """A step of a Trainer, or the worker of a loader. With a Trainer's own loggers, bars and checkpoints.
    Or the others end first: they do not wait for it."""
    script = tmp_path / "train.py"
    script.write_text(HANGS)
    last = {"is back": "back", "hangs": "hangs"}[until_it]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = workers.run("lightning", [str(script), str(tmp_path), kind, last], env=env)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    assert "replica group 1 was evicted, since its training loop hangs" in text
    assert ("in one_that_hangs" if kind == "step" else "in _next_data") in text
    if kind != "step":
        assert gone(int((tmp_path / "worker").read_text()))
    ends = {line.partition(" ends ")[2] for line in text.splitlines() if " ends " in line}
    if until_it == "is back":
        assert "replica group 1 hung, and was killed; it is started again" in text
        assert text.count(" ends ") == 2
    else:
        assert "replica group 1 hung, and was killed; it is not started again" in text, text
        assert text.count(" ends ") == 1
    assert len(ends) == 1, text


class Supervised(Exception):
    """Instead of a supervisor: with its options."""


@pytest.mark.parametrize("kind", ["trainer", "fabric"])
def test_the_keeper_and_warm_starts_are_on_where_nothing_else_is_said(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Lightning sets it for good: when it looks for devices, which its first import does, too.
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    from lightning.fabric import Fabric
    from lightning.pytorch import Trainer

    from ft_lightning.fabric import FTDDPStrategy as FabricStrategy
    from ft_lightning.pytorch import FTDDPStrategy
    from ft_lightning.shared import launcher

    def supervise(*args: Any, **options: Any) -> int:
        raise Supervised(options)

    monkeypatch.setenv("FT_WARM_START", "1")
    monkeypatch.setattr(launcher, "supervise", supervise)
    monkeypatch.setattr(launcher, "script_command", lambda processes: ["train.py"])
    lighthouse = "tcp://127.0.0.1:1"  # nobody asks it
    made: Any
    if kind == "trainer":
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        strategy: Any = FTDDPStrategy(lighthouse=lighthouse)
        made = Trainer(strategy=strategy, accelerator="cpu", devices=2, **quiet)
    else:
        strategy = FabricStrategy(lighthouse=lighthouse)
        made = Fabric(strategy=strategy, accelerator="cpu", devices=2)
    with pytest.raises(Supervised) as told:
        made.strategy.launcher.launch(lambda: None)
    (options,) = told.value.args
    assert options["keep_state_s"] == 30
    assert options["warm"] is not None


def test_a_supervisor_without_room_for_its_files_ends_its_lighthouse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where temporary files can't be made, say."""
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    from lightning.fabric import Fabric

    from ft_lightning.fabric import FTDDPStrategy as FabricStrategy
    from ft_lightning.shared import launcher

    monkeypatch.setattr(launcher, "script_command", lambda processes: ["train.py"])
    monkeypatch.setattr(launcher.tempfile, "tempdir", str(tmp_path / "gone"))
    before = children_of(os.getpid())
    made: Any = Fabric(strategy=FabricStrategy(), accelerator="cpu", devices=2)
    with pytest.raises(FileNotFoundError):
        made.strategy.launcher.launch(lambda: None)
    assert set(children_of(os.getpid())) <= set(before)


def test_a_notebook_is_told_what_to_do() -> None:
    """No script to run again, as in a notebook: said in a sentence, before anything is started."""
    script = """
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
import ft_lightning
Trainer(strategy="ft_ddp", accelerator="cpu", devices=2, logger=False).fit(BoringModel())
"""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("FT_", "TORCHFT_", "PL_"))}
    done = workers.run("lightning", ["-c", script], env={**env, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 1
    assert "devices=2 starts 2 processes that run your script again" in done.stderr
    assert "put the training into a script" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "how",
    [
        ["again.py"],
        ["-m", "again"],
        ["-m", "ft_lightning", "-m", "again"],
        ["-m", "cProfile", "-o", os.devnull, "again.py"],
        ["folder"],
    ],
    ids=" ".join,
)
def test_the_script_is_run_again_as_it_was_started(tmp_path: Path, how: list[str]) -> None:
    """It has consumed its arguments and changed its folder, and does so again in each process."""
    script = """
import os, sys
import ft_lightning
from ft_lightning.shared.registration import note_start
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

note_start()  # as the first import does, which a fork has behind it
given, folder = sys.argv[1:], os.getcwd()
sys.argv = sys.argv[:1]
os.chdir("elsewhere")
if "REPLICA_GROUP_ID" in os.environ:
    print(given, folder)
    sys.exit()
Trainer(strategy="ft_ddp", accelerator="cpu", devices=2, logger=False).fit(BoringModel())
"""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "folder").mkdir()
    for name in ("again.py", "folder/__main__.py"):
        (tmp_path / name).write_text(script)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("FT_", "TORCHFT_", "PL_"))}
    env["PYTHONPATH"] = str(ROOT)
    command = [*how, "--lr", "1 2"]
    done = workers.run("lightning", command, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"['--lr', '1 2'] {tmp_path}"] * 2


def test_the_interpreters_options_are_those_of_the_command(tmp_path: Path) -> None:
    """`python -u -W ... script`: what is printed is seen at once, a warning is an error."""
    script = tmp_path / "script.py"
    script.write_text(
        """
import os, sys
if "REPLICA_GROUP_ID" in os.environ:
    said = [sys.stdout.write_through, sys.warnoptions, os.environ["PYTHONFAULTHANDLER"]]
    sys.stdout.write(f"{said}\\n")  # one write: two processes without a buffer may share a line
    sys.exit()
import ft_lightning
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

Trainer(strategy="ft_ddp", accelerator="cpu", devices=2, logger=False).fit(BoringModel())
"""
    )
    options = ["-u", "-W", "error::ResourceWarning", "-X", "faulthandler"]
    said = python_with([*options, str(script)], tmp_path, {ENV_WARM: "0"})
    assert said.splitlines() == [str([True, ["error::ResourceWarning"], "1"])] * 2


@pytest.mark.parametrize("option", ["-O", "-OO", "-B", "-s", "-P", "-X dev", "-u"])
def test_each_of_the_interpreters_options_has_a_variable(tmp_path: Path, option: str) -> None:
    flags = "(sys.flags, sys.stdout.write_through)"
    inner = f"import sys; print({flags})"
    outer = f"""
import os, subprocess, sys
from ft_lightning.shared.launch_env import interpreter_options
print({flags}, flush=True)
env = {{**os.environ, **interpreter_options()}}
subprocess.run([sys.executable, "-c", {inner!r}], env=env, check=True)
"""
    plain = python_with(["-c", inner], tmp_path, {})
    mine, childs = python_with([*option.split(), "-c", outer], tmp_path, {}).splitlines()
    assert mine == childs
    assert mine != plain.strip()


def python_with(arguments: list[str], cwd: Path, variables: dict[str, str]) -> str:
    """What a cold `python ARGUMENTS` prints, with no variable that is an option of its own."""
    ours = ("FT_", "TORCHFT_", "PL_", "PYTHON")
    env = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**env, "PYTHONPATH": str(ROOT), **variables},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_restart_loop_ends_when_the_training_is_over(tmp_path: Path) -> None:
    """One line without a stack, and an exit code of its own, as in the loops of docs/lightning.md."""
    script = tmp_path / "script.py"
    script.write_text(
        """
from ft_lightning.shared.launch_env import LaunchEnv
from ft_lightning.shared.launcher import live_with_group
from ft_lightning.shared.topology import resolve
from lighthouse.errors import TrainingOver
live_with_group(resolve(LaunchEnv.read(num_nodes=1), devices=1, num_nodes=1, group_size=None,
                        num_replica_groups=None, replica_name=None, lighthouse=None))
raise TrainingOver("the training has finished at step 9, and this one is late")
"""
    )
    loop = f"until {sys.executable} {script} || [ $? -eq 79 ]; do exit 1; done"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TORCHFT_LIGHTHOUSE": "tcp://h:1"}
    env |= {"REPLICA_GROUP_ID": "1", "NUM_REPLICA_GROUPS": "2"}
    done = subprocess.run(
        ["bash", "-c", loop], env=env, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    assert (
        done.stderr == "ft_lightning: the training has finished at step 9, and this one is late\n"
    )


def test_a_lighthouse_that_never_answers_costs_one_sentence(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        """
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
import ft_lightning
strategy = ft_lightning.FTDDPStrategy(timeout_s=1.0)
Trainer(strategy=strategy, accelerator="cpu", devices=1, logger=False).fit(BoringModel())
"""
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith(("FT_", "TORCHFT_", "PL_"))}
    env |= {"PYTHONPATH": str(ROOT), "TORCHFT_LIGHTHOUSE": "tcp://127.0.0.1:9"}
    env |= {"REPLICA_GROUP_ID": "1", "NUM_REPLICA_GROUPS": "2"}
    done = workers.run("lightning", [str(script)], env=env, cwd=tmp_path)
    assert done.returncode == AWAY_EXIT_CODE
    assert "ft_lightning: no lighthouse answers at tcp://127.0.0.1:9 within 1 s" in done.stderr
    assert "Traceback" not in done.stderr


HYDRA = """
import os
from pathlib import Path
import hydra
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
import ft_lightning

@hydra.main(version_base=None, config_path=None)
def main(config):
    Trainer(strategy="ft_ddp", accelerator="cpu", devices=2, max_steps=2).fit(BoringModel())
    told = Path(__file__).with_name(os.environ["REPLICA_GROUP_ID"])
    told.write_text(HydraConfig.get().runtime.output_dir)

main()
"""


@pytest.mark.parametrize("chdir", [False, True])
def test_all_processes_of_a_hydra_application_have_one_run_directory(
    tmp_path: Path, chdir: bool
) -> None:
    """The script is named by a relative path."""
    done = of_hydra(tmp_path, f"hydra.job.chdir={chdir}")
    assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.glob("outputs/*/*")
    assert [(tmp_path / name).read_text() for name in ("0", "1")] == [str(folder)] * 2
    assert (folder / "lightning_logs").exists() == chdir
    assert (folder / ".hydra" / "config.yaml").exists()


def test_a_hydra_sweep_is_refused(tmp_path: Path) -> None:
    """It would end with its first job, and exit code 0."""
    done = of_hydra(tmp_path, "-m", "+x=1,2")
    assert done.returncode != 0
    assert "devices=N ends the process with the first of them" in done.stderr
    assert "is not attached to a" not in done.stderr
    assert not (tmp_path / "0").exists()


def of_hydra(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("hydra")
    (folder / "script.py").write_text(HYDRA)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("FT_", "TORCHFT_", "PL_"))}
    paths = [str(ROOT), *env.get("PYTHONPATH", "").split(os.pathsep)]
    env["PYTHONPATH"] = os.pathsep.join(paths)
    return workers.run("lightning", ["script.py", *arguments], env=env, cwd=folder)
