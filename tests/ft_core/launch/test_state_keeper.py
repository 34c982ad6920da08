"""The keeper under a supervisor: all processes are killed at once, and the training goes on."""

from __future__ import annotations

import json
import os
import signal
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ft_core.launch import kept_files
from ft_core.launch.keeping import MODULE
from ft_core.launch.kept import Card, Version, takes
from lighthouse.config import LighthouseConfig, Timeouts
from lighthouse.server import LighthouseServer
from tests.harness import workers
from tests.harness.waiting import PATIENCE_S, until

ROOT = Path(__file__).resolve().parents[3]
GROUP = """
    import json, os, sys, time
    import torch
    from ft_core import Manager, ProcessGroupGloo

    torch.set_num_threads(1)
    group = os.environ["REPLICA_GROUP_ID"]
    weights = torch.zeros(1 << 19)
    manager = Manager(
        ProcessGroupGloo(timeout=60), load_state_dict=weights.copy_, state_dict=lambda: weights,
        use_async_quorum=False, rank=0, world_size=1,
    )
    was_reset = os.path.exists("reset")
    while not os.path.exists("over"):
        if not was_reset and os.path.exists("reset"):
            raise RuntimeError("the driver was reset")
        manager.start_quorum()
        gradient = torch.ones(1)
        manager.allreduce(gradient).wait()
        time.sleep(0.02)
        if manager.should_commit():
            weights += gradient
            assert float(weights.min()) == float(weights.max()) == manager.current_step()
            said = {"group": group, "pid": os.getpid(), "step": manager.current_step()}
            os.write(1, (json.dumps(said) + chr(10)).encode())
    manager.shutdown(finished=True)
"""
PARENT = """
    import os, sys
    from ft_core.launch.supervisor import supervise

    def environment(index):
        return {**os.environ, "REPLICA_GROUP_ID": str(index), "NUM_REPLICA_GROUPS": "2"}

    sys.exit(supervise([sys.executable, "group.py"], environment, count=2, min_alive=1,
                       max_restarts=None, keep_state_s=0.1, keep_state_dir="kept"))
"""


class Job:
    """A supervisor with two groups, and what they have said so far."""

    def __init__(self, folder: Path, process: workers.Worker) -> None:
        self.process, self.folder = process, folder

    def said(self) -> list[dict[str, Any]]:
        lines = (self.folder / "out.txt").read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def told(self) -> str:
        return (self.folder / "err.txt").read_text()

    def pids(self, ended: set[int]) -> set[int]:
        """Of the groups that have committed, but for processes that have ended."""
        return set({row["group"]: row["pid"] for row in self.said()}.values()) - ended

    def await_return(self, ended: set[int]) -> None:
        """Both groups are back, from what was kept."""
        until(lambda: len(self.pids(ended)) == 2, "both are back")
        said = self.said()
        newest = max(row["step"] for row in said if row["pid"] in ended)
        assert 1 < min(row["step"] for row in said if row["pid"] not in ended) <= newest + 2

    def keeper(self) -> int | None:
        """The process id of the keeper; None: it does not run."""
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            for pid in (task / "children").read_text().split():
                if Path(f"/proc/{pid}/comm").read_text().strip() == MODULE.rpartition(".")[2]:
                    return int(pid)
        return None


@pytest.fixture
def start(tmp_path: Path) -> Callable[[], Any]:
    @contextmanager
    def started() -> Iterator[Job]:
        (tmp_path / "group.py").write_text(textwrap.dedent(GROUP))
        (tmp_path / "parent.py").write_text(textwrap.dedent(PARENT))
        timeouts = Timeouts.derive(60.0, join_timeout_s=PATIENCE_S)
        server = LighthouseServer(
            "tcp://127.0.0.1:0", config=LighthouseConfig(timeouts=timeouts, expected_replicas=2)
        )
        env = {**os.environ, "PYTHONPATH": str(ROOT), "TORCHFT_LIGHTHOUSE": server.address()}
        env["FT_JOB_ID"] = "kept"
        (tmp_path / "over").unlink(missing_ok=True)
        with (tmp_path / "out.txt").open("ab") as out, (tmp_path / "err.txt").open("ab") as err:
            process = workers.start(
                "torch", ["parent.py"], cwd=tmp_path, env=env, stdout=out, stderr=err
            )
        try:
            yield Job(tmp_path, process)
        finally:
            (tmp_path / "over").touch()
            process.end()
            server.shutdown()

    return started


@pytest.mark.process
def test_all_that_end_at_once_go_on_from_what_the_keeper_holds(start: Callable[[], Any]) -> None:
    with start() as job:
        until(lambda: "is kept by a process of its own" in job.told(), "the keeper holds a state")
        first = job.keeper()
        assert first is not None
        os.kill(first, signal.SIGKILL)
        until(lambda: job.told().count("is kept by") == 2, "the next keeper holds a newer one")
        assert job.keeper() not in (None, first)
        ended = job.pids(set())
        for pid in ended:
            os.kill(pid, signal.SIGKILL)
        job.await_return(ended)

        ended |= job.pids(ended)
        (job.folder / "reset").touch()  # all fail with an error, which may be the machine's
        job.await_return(ended)

        # All, the keeper and their supervisor: what is on the disk is left.
        keeper, again = job.keeper(), job.pids(ended)
        job.process.send_signal(signal.SIGSTOP)  # it starts none meanwhile
        for pid in (keeper, *again):
            os.kill(pid or job.process.pid, signal.SIGKILL)
        job.process.kill()
        job.process.wait()
        ended |= again
    with start() as job:
        job.await_return(ended)
        (job.folder / "over").touch()
        assert job.process.wait(PATIENCE_S) == 0
        assert not list((job.folder / "kept").rglob("*.state")), "a job that ends well leaves none"


KEPT = Version(step=10, lineage="l", genesis=7, held=4)


@pytest.mark.parametrize(
    ("own", "begins"),
    [
        (Version(0, "", 0, 0), True),  # a fresh start
        (replace(KEPT, step=9), True),  # an older checkpoint
        (replace(KEPT, held=3, step=99), True),  # of a quorum that a newer one has not gone on from
        (KEPT, False),
        (replace(KEPT, step=11), False),  # a newer checkpoint
        (replace(KEPT, held=5, step=2), False),
        (Version(11, "", 0, 0), False),  # a checkpoint that says no more than its step
        (Version(10, "", 0, 0), True),
        (Version(3, "x", 8, 2), False),  # of another run
    ],
)
def test_a_process_begins_with_what_is_kept_if_that_is_newer(own: Version, begins: bool) -> None:
    assert KEPT.begins_with(own) is begins


def test_the_keeper_never_goes_back() -> None:
    card = Card("tcp://a/w", ("job", "room", "schema"), KEPT)
    assert takes(None, card)
    assert not takes(card, card)
    assert not takes(card, replace(card, version=None))
    assert not takes(card, replace(card, version=replace(KEPT, step=9)))
    assert takes(card, replace(card, version=replace(KEPT, step=11)))
    assert takes(card, replace(card, version=replace(KEPT, step=1, held=5)))
    assert takes(card, replace(card, version=Version(1, "x", 8, 1))), "the job has begun anew"
    assert takes(
        card, replace(card, place=("job", "room 2", "schema"), version=Version(1, "x", 7, 1))
    )


@pytest.mark.parametrize("version", [None, KEPT])
def test_a_card_travels(version: Version | None) -> None:
    card = Card("tcp://a/w", ("job", "room", "schema"), version, "token")
    assert Card.of(card.row()) == card


def test_each_job_has_a_file_of_its_own_and_one_that_cannot_be_reached_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = ["a_b", "a/b", "a b", "\N{SNOWMAN}" * 200, "\N{COMET}" * 200]
    for step, job in enumerate(jobs):
        version = Version(step, "after", 1, 1)
        kept_files.write(str(tmp_path), Card("nowhere", (job,), version), [])

    def kept_steps() -> list[int]:
        found = [kept_files.read(job) for job in jobs]
        return [each[0].version.step for each in found if each and each[0].version]

    monkeypatch.setenv(kept_files.ENV_FOLDER, str(tmp_path))
    assert kept_steps() == [0, 1, 2, 3, 4]
    kept_files.forget("a/b")
    assert kept_steps() == [0, 2, 3, 4]

    kept_files.file_of(
        str(tmp_path), "a/b"
    ).mkdir()  # neither read nor removed, as in a folder of others
    assert kept_steps() == [0, 2, 3, 4]
    kept_files.forget("a/b")

    monkeypatch.setenv(kept_files.ENV_FOLDER, str(tmp_path / ("x" * 300)))
    assert kept_steps() == [], "a start that finds no folder begins without it"
