"""Starts Trainers in processes, reads what they logged."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ft_core.launch.rank_group import free_port, rank_environment
from lighthouse import LighthouseServer
from tests.harness import runs
from tests.harness.lighthouses import has_joined, is_member
from tests.harness.runs import Line, Process, compare_steps, ended

WORKER = Path(__file__).parent / "trainer" / "worker.py"
SCENARIOS = Path(__file__).parent / "trainer" / "scenarios.py"
ASKS = ("waiting", "quorum")
"""Telemetry events of a group that has asked for a quorum and got the lighthouse's answer."""
NOT_OURS = ("FT_", "TORCHFT_", "PL_", "REPLICA_", "NUM_REPLICA")


class Run(runs.Run):
    """Trainers of one test."""

    framework = "lightning"

    def __init__(self, log: Path, lighthouse: str, worker: Path = WORKER, **options: Any) -> None:
        super().__init__(log, lighthouse, worker, **options)

    def start(
        self, index: int | None = None, groups: int = 2, through: Sequence[str] = (), **env: str
    ) -> Process:
        """Replica group `index` of `groups`; None: a plain start of the script. `through`: what
        Python runs in its place, such as torchrun's module."""
        if index is not None:
            env = {"REPLICA_GROUP_ID": str(index), "NUM_REPLICA_GROUPS": str(groups), **env}
            env["TORCHFT_LIGHTHOUSE"] = self.lighthouse
            env["FT_JOB_ID"] = str(self.log)  # one lighthouse serves several runs
        env = {"FT_EVENT_LOG": str(self.log / "events"), **env}
        arguments = [*through, str(self.script), json.dumps(self.options)]
        several = "NODE_RANK" in env or self.options.get("devices", 1) > 1
        supervises = bool(through) or ("RANK" not in env and several)
        return self.launch(arguments, env, without=NOT_OURS, supervises=supervises)

    def start_ranks(self, index: int, *, size: int, groups: int, **env: str) -> list[Process]:
        """The processes of replica group `index`, as a launcher would start them."""
        port = free_port()
        return [
            self.start(
                index, groups, **{**rank_environment({}, rank=rank, size=size, port=port), **env}
            )
            for rank in range(size)
        ]

    def lose_a_rank_and_heal(self, coordinator: LighthouseServer, steps: int) -> None:
        """Two groups of two ranks, with sharded models and the options `dies={"2": 3}` and
        `holds=["step:4"]`: rank 2 is killed, which takes its group alone, and the group's shards heal."""
        healthy = self.start_ranks(0, size=2, groups=2)
        group = self.start_ranks(1, size=2, groups=2)
        self.wait(group[1], code=-signal.SIGKILL)
        self.wait(group[0], code=None)
        for rank in (0, 1):
            self.until_held(rank, "step:4")
        group = self.start_ranks(1, size=2, groups=2)
        self.until_waiting(coordinator, "1")
        self.go("step:4")
        self.wait(*healthy, *group)
        assert self.events(1, "heal_start") >= 1
        lines = [self.lines(rank) for rank in range(4)]
        for rank in (0, 1):
            assert [line["step"] for line in lines[rank]] == list(range(1, steps + 1))
            mine = {line["step"]: line["digest"] for line in lines[rank]}
            theirs = {line["step"]: line["digest"] for line in lines[2 + rank]}
            assert theirs == {step: mine[step] for step in theirs}
            assert steps in theirs

    def events(self, group: int, *kinds: str, since: float = 0.0) -> int:
        """How many telemetry events of these kinds replica group `group` has written. `since`: Unix time."""
        path = self.log / "events"
        if not path.exists():
            return 0
        whole = path.read_text().rpartition("\n")[0]  # the last line may be half written
        told = [json.loads(text) for text in whole.splitlines()]
        return sum(
            event["name"] == str(group) and event["kind"] in kinds and event["t"] > since
            for event in told
        )

    def start_again(self, index: int) -> Process:
        """Another life of replica group `index`, once it waits for those that hold."""
        asked = self.events(index, *ASKS)
        process = self.start(index)
        self._until_asks(index, asked)
        return process

    def begin_again(self, name: int, life: int, *, group: int | None = None) -> None:
        """Let life number `life` of replica `name` begin, which a launcher has started and which waits
        at its start (place "life:N"); until its group waits for those that hold."""
        group = name if group is None else group
        self.until_held(name, f"life:{life}")
        asked = self.events(group, *ASKS)
        self.go(f"life:{life}")
        self._until_asks(group, asked)

    def _until_asks(self, group: int, asked: int) -> None:
        self.until(lambda: self.events(group, *ASKS) > asked, f"group {group} to ask for a quorum")

    def until_waiting(
        self, server: LighthouseServer, name: str, *, or_member: bool = False
    ) -> None:
        """Until `name` waits at the lighthouse to be let in. `or_member`: or has been."""
        self.until(
            lambda: has_joined(server, str(self.log), name, or_member=or_member), f"{name} to join"
        )

    def until_gone(self, server: LighthouseServer, name: str) -> None:
        """Until the lighthouse knows that `name` has died or left: its next life is told from it."""
        self.until(lambda: not is_member(server, str(self.log), name), f"{name} to be gone")

    def validations(self, name: int) -> dict[int, Line]:
        """What replica `name` logged of each epoch's validation; its metric is that of the set."""
        lines = [json.loads(text) for text in (self.log / f"{name}.validations").open()]
        for line in lines:
            assert abs(line["val_loss"] - line["truth"]) < 1e-5, (name, line)
        return {line["epoch"]: line for line in lines}


def running(
    log: Path, lighthouse: str = "", **options: Any
) -> contextlib.AbstractContextManager[Run]:
    """A run whose processes are gone at the end."""
    return ended(Run(log, lighthouse, **options))


class Scenarios(Run):
    """Several fits in each process, see `scenarios.py`."""

    def __init__(
        self, log: Path, lighthouse: str, worker: Path = SCENARIOS, **options: Any
    ) -> None:
        super().__init__(log, lighthouse, worker, **options)

    def run(self, groups: int) -> None:
        """All of them, on so many processes, under "ft_ddp" or what `strategy` says."""
        if self.options.get("strategy", "ft_ddp") == "ft_ddp":
            self.wait(*[self.start(index, groups) for index in range(groups)])
            return
        world = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(groups),
        }
        self.wait(*[self.start(LOCAL_RANK=str(index), **world) for index in range(groups)])

    def result(self, rank: int, name: str) -> Line:
        result: Line = json.loads((self.log / f"{rank}.{name}").read_text())
        return result


MUST_AGREE = (
    "epoch",
    "batch_idx",
    "module_batch_idx",
    "last",
    "total",
    "digest",
    "lr",
    "schedulers",
    "average",
    "steps",
    "manager_step",
)


def compare(a: list[Line], b: list[Line]) -> int:
    """Assert that two replicas agree at every step that both logged; returns how many those are."""
    return compare_steps(a, b, MUST_AGREE, optional=("weights", "stopping"))
