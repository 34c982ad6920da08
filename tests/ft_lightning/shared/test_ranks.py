"""Replica groups of several processes, as torchrun, SLURM and several machines start them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest

import ft_lightning
from ft_core.launch.rank_group import free_port
from ft_core.launch.restarts import BROKEN_EXIT_CODE
from ft_lightning.pytorch import FTDDPStrategy
from lighthouse import LighthouseServer
from lighthouse.errors import TrainingOver
from tests.ft_lightning.harness import Line, Run, compare, running
from tests.harness.cluster import ranks, replicas
from tests.harness.waiting import PATIENCE_S, gone, until

pytestmark = pytest.mark.process
WORKER = Path(__file__).parents[1] / "fabric" / "fabric_worker.py"
TORCHRUN = [
    "-m",
    "torch.distributed.run",
    "--nproc-per-node",
    "2",
    "--max-restarts",
    "3",
    "--rdzv-backend",
    "c10d",
    "--rdzv-endpoint",
    "127.0.0.1:0",
    "--monitor-interval",
    "0.1",
]
AGREE = ("epoch", "batch_idx", "digest", "lr", "loss", "ranks", "count")


def agree(mine: list[Line], others: list[Line]) -> None:
    """Assert that two ranks took the same steps, each with samples of its own."""
    alone = {line["step"]: line for line in mine}
    both = [(alone[line["step"]], line) for line in others if line["step"] in alone]
    assert len(both) > 10
    for one, other in both:
        for key in AGREE:
            assert one[key] == other[key], (one["step"], key)
        assert not set(one["batch"]) & set(other["batch"])


def test_a_rank_that_learns_alone_that_the_fit_is_over_waits_for_no_other() -> None:
    """Within a batch, where the others have healed, and wait for it in Lightning's broadcast at the next batch: it
    waited for them in turn, and the job hung."""
    strategy, error = FTDDPStrategy(), TrainingOver("over")
    with ranks(2) as both:
        replicas(*[each.barrier for each in both])
        strategy._in_group = both[0]
        assert strategy._when_over(error) is error


def test_torchrun_restarts_its_group_which_heals(
    tmp_path: Path, coordinator: LighthouseServer
) -> None:
    """Two torchruns of two processes each; one process dies, and takes its group along."""
    options = {"worker": WORKER, "devices": 2, "epochs": 10, "holds": ["step:8", "life:2"]}
    with running(tmp_path, coordinator.address(), **options) as run:
        started = [run.start(index, 2, TORCHRUN) for index in (0, 1)]
        for rank in range(4):
            run.until_step(rank, 3)
        first = [run.lives(rank)[0] for rank in range(4)]
        os.kill(first[2], signal.SIGKILL)
        run.until_held(0, "step:8")
        run.go("life:2")
        run.until_waiting(coordinator, "1")
        run.go("step:8")
        run.wait(*started)
    lines = [run.lines(rank) for rank in range(4)]
    assert [line["step"] for line in lines[0]] == list(range(1, 51))
    for rank in (2, 3):
        healed = [line for line in lines[rank] if line["pid"] != first[rank]]
        assert healed[0]["step"] > 8
        assert len(healed) > 5
    for mine in lines[1:]:
        agree(lines[0], mine)
    assert lines[0][0]["ranks"] == lines[0][-1]["ranks"] == [0, 1, 2, 3]
    ends = [run.end(rank) for rank in range(4)]
    assert len({end["digest"] for end in ends}) == 1
    assert [(end["rank"], end["world_size"], end["epoch"]) for end in ends] == [
        (rank, 4, 10) for rank in range(4)
    ]
    assert [len(run.lives(rank)) for rank in range(4)] == [1, 1, 2, 2]


def srun(run: Run, tasks: int, *, job: int, **env: str) -> list[subprocess.Popen[bytes]]:
    """`srun --ntasks=T --ntasks-per-node=T` on one node: the tasks, with what it tells each."""
    step = {
        "SLURM_JOB_ID": f"{job}",
        "SLURM_JOBID": f"{job}",
        "SLURM_JOB_NAME": "train",
        "SLURM_STEP_ID": "0",
        "SLURM_STEPID": "0",
        "SLURM_CLUSTER_NAME": "cluster",
        "SLURM_NTASKS": f"{tasks}",
        "SLURM_NPROCS": f"{tasks}",
        "SLURM_STEP_NUM_TASKS": f"{tasks}",
        "SLURM_NTASKS_PER_NODE": f"{tasks}",
        "SLURM_TASKS_PER_NODE": f"{tasks}",
        "SLURM_STEP_TASKS_PER_NODE": f"{tasks}",
        "SLURM_DISTRIBUTION": "block",
        "SLURM_NNODES": "1",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_NODELIST": "localhost",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURMD_NODENAME": "localhost",
        "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
        "SLURM_NODEID": "0",
        "SLURM_SUBMIT_HOST": "login",
        "SLURM_GTIDS": ",".join(map(str, range(tasks))),
        "SLURM_CPUS_ON_NODE": f"{tasks}",
    }
    step |= {"TORCHFT_LIGHTHOUSE": run.lighthouse, "FT_JOB_ID": str(run.log), **env}
    return [
        run.start(SLURM_PROCID=str(task), SLURM_LOCALID=str(task), **step) for task in range(tasks)
    ]


def left_in_peace(events: Path, name: str) -> bool:
    """Whether group `name` has lost no step when the other one left for the last time."""
    told = [json.loads(text) for text in events.read_text().splitlines()]
    mine = [e for e in told if e["name"] == name and e["kind"] in ("commit", "discard")]
    both = max(i for i, e in enumerate(mine) if e.get("participants") == 2)
    rest = [(e["kind"], e.get("participants")) for e in mine[both + 1 :]]
    return len(rest) > 2 and set(rest) == {("commit", 1)}


def second_group_ended_alike(run: Run, *, steps: int) -> None:
    """Assert that both ranks of group 1, of two of two, took all steps."""
    ends = [run.end(rank) for rank in (2, 3)]
    assert [(end["rank"], end["world_size"], end["step"]) for end in ends] == [
        (2, 4, steps),
        (3, 4, steps),
    ]
    assert ends[0]["digest"] == ends[1]["digest"]


def test_slurm_tasks_die_come_back_in_a_job_of_their_own_and_leave(
    tmp_path: Path, coordinator: LighthouseServer
) -> None:
    """Four tasks of one step are two groups. One is killed: its group ends, the other trains on.

    The group comes back as a job of its own that was requeued; then the group that stayed is told
    to end, which costs the other group no step.
    """
    events = tmp_path / "events.jsonl"
    options: dict[str, Any] = {"max_epochs": 5, "own_start": True}
    options |= {"strategy_options": {"group_size": 2}, "devices": 4}
    options["holds"] = ["step:4", "step:14", "step:24"]
    job = free_port()  # the ranks' port follows from it
    with running(tmp_path, coordinator.address(), **options) as run:
        tasks = srun(run, 4, job=job)
        for rank in range(4):
            run.until_held(rank, "step:4")
        tasks[3].kill()
        run.go("step:4")
        run.wait(tasks[2], code=BROKEN_EXIT_CODE)
        run.until_held(0, "step:14")
        group = {"REPLICA_GROUP_ID": "1", "NUM_REPLICA_GROUPS": "2", "SLURM_RESTART_COUNT": "1"}
        group["FT_EVENT_LOG"] = str(events)
        again = srun(run, 2, job=job + 1, **group)
        run.until_waiting(coordinator, "1")
        run.go("step:14")
        for rank in range(4):
            run.until_held(rank, "step:24")
        for task in tasks[:2]:
            task.terminate()
        run.go("step:24")
        run.wait(*tasks[:2], *again)
    lines = [run.lines(rank) for rank in range(4)]
    assert compare(*lines[:2]) == len(lines[0]) == lines[0][-1]["step"] == 25
    assert compare(*lines[2:]) == len(lines[3])
    for rank in (2, 3):
        healed = [line for line in lines[rank] if line["pid"] == again[rank - 2].pid]
        assert 14 < healed[0]["step"] < 24
        assert [line["step"] for line in healed] == list(range(healed[0]["step"], 51))
        assert compare(lines[0], lines[rank]) > 8
        assert {line["participants"] for line in healed} == {2, 4}
    second_group_ended_alike(run, steps=50)
    assert left_in_peace(events, "1")


def test_nodes_of_several_processes_die_come_back_and_leave(
    tmp_path: Path, coordinator: LighthouseServer
) -> None:
    """Two machines, each a supervisor of one group of two: a rank dies, a supervisor dies, and is
    started again; then a supervisor is told to end, which costs the other no step."""
    events = tmp_path / "events.jsonl"
    options: dict[str, Any] = {"worker": WORKER, "devices": 2, "num_nodes": 2, "epochs": 20}
    options["holds"] = ["step:14", "life:2", "step:44", "step:74"]
    with running(tmp_path, coordinator.address(), **options) as run:

        def node(number: int, **env: str) -> subprocess.Popen[bytes]:
            env |= {"TORCHFT_LIGHTHOUSE": run.lighthouse, "FT_JOB_ID": str(run.log)}
            return run.start(NODE_RANK=str(number), MASTER_ADDR="127.0.0.1", **env)

        zero, one = node(0), node(1, FT_EVENT_LOG=str(events))
        for rank in range(4):
            run.until_step(rank, 3)
        os.kill(run.lives(3)[0], signal.SIGKILL)
        run.until_held(0, "step:14")
        run.go("life:2")
        run.until_waiting(coordinator, "1")
        run.go("step:14")
        run.until_step(2, 18)
        zero.kill()
        run.until(lambda: all(gone(run.lives(rank)[0]) for rank in (0, 1)), "its ranks to end")
        run.until_held(2, "step:44")
        again = node(0)
        run.until_waiting(coordinator, "0")
        run.go("step:44")
        for rank in range(4):
            run.until_held(rank, "step:74")
        again.terminate()
        for rank in (0, 1):
            run.until((tmp_path / f"{rank}.told").exists, f"SIGTERM at rank {rank}")
        run.go("step:74")
        run.wait(again, code=128 + signal.SIGTERM)
        run.wait(one)
    lines = [run.lines(rank) for rank in range(4)]
    assert [len(run.lives(rank)) for rank in range(4)] == [2, 2, 2, 2]
    agree(lines[2], lines[3])
    for rank in (0, 1):
        agree(lines[2], lines[rank])
        healed = [line for line in lines[rank] if line["pid"] == run.lives(rank)[1]]
        assert 44 < healed[0]["step"] < 74 <= healed[-1]["step"] < 100
    assert [line["step"] for line in lines[2]][-57:] == list(range(44, 101))
    assert "replica group 1 was killed by SIGKILL; it is started again" in run.output()
    second_group_ended_alike(run, steps=100)
    # With 0, then alone, with 0 again, and alone for the rest: nothing was discarded for that.
    assert left_in_peace(events, "1")


@pytest.mark.parametrize("late", [[0], [2, 3]])
def test_a_rank_whose_group_was_told_to_end_ends_so_if_the_one_that_was_told_is_killed(
    tmp_path: Path, coordinator: LighthouseServer, late: list[int]
) -> None:
    """In a Fabric loop, before it votes, or while it waits for the other group's vote."""
    options: dict[str, Any] = {"worker": WORKER, "devices": 2, "epochs": 2, "late": late}
    groups = 1 if late == [0] else 2
    with running(tmp_path, coordinator.address(), told_in_vote={"6": 1}, **options) as run:
        zero, one = run.start_ranks(0, size=2, groups=groups)
        others = run.start_ranks(1, size=2, groups=groups) if groups == 2 else []
        run.wait(one, code=-signal.SIGKILL)
        run.wait(zero, code=128 + signal.SIGTERM)
        run.wait(*others)
    assert [line["step"] for line in run.lines(0)] == list(range(1, 7))
    assert "broken" not in run.output()


@pytest.mark.parametrize("waits", [True, False])
def test_a_trainer_that_waits_for_a_quorum_ends_when_it_is_told_to(
    coordinator: LighthouseServer, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """It has no step to finish, and no other member may ever come. Told while it waits, or just before."""
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # Lightning leaves it set
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import LambdaCallback
    from lightning.pytorch.demos.boring_classes import BoringModel
    from lightning.pytorch.utilities.exceptions import SIGTERMException

    job, alone = uuid.uuid4().hex, {"min_replicas": 2, "num_replica_groups": 2}
    where = {"lighthouse": coordinator.address(), "job_id": job, "quorum_timeout_s": PATIENCE_S}
    strategy = ft_lightning.FTDDPStrategy(replica_name="0", **where, **alone)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}

    def tell(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def tell_when_it_waits() -> None:
        until(
            lambda: any(r["job_id"] == job and r["waiting"] for r in coordinator.status()["jobs"])
        )
        tell()

    before = signal.getsignal(signal.SIGTERM)
    teller = threading.Thread(target=tell_when_it_waits if waits else lambda: None)
    teller.start()
    callbacks = [] if waits else [LambdaCallback(on_train_start=tell)]
    trainer = Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_epochs=1, callbacks=callbacks, **quiet
    )
    with pytest.raises(SIGTERMException):
        trainer.fit(BoringModel())
    teller.join()
    assert trainer.received_sigterm and trainer.global_step == 0
    assert signal.getsignal(signal.SIGTERM) == before
