"""python benchmarks/gpu_scripts.py [--json FILE] [--kills N] [--stops N] [--seed S] [--only NAME ...]

The ordinary scripts of `examples`, each in two replica groups that share one GPU, so many at the same time as
there are processors for. When a script has committed `every` steps, and again after each so many, a process of one group
is killed (SIGKILL), and its group is started again at once; or it is stopped for seconds, longer than the heartbeats that
the lighthouse waits for. What is shown: the steps at which groups were members again, and the digests of both
groups' final weights, which must be equal. Exit status 0 if all are.

NCCL takes processes of one GPU for different machines where their NCCL_HOSTID differs. Each process of a group is started
as on a machine of its own. Without a GPU the scripts run on the CPU, over Gloo.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import arguments, report, start_lighthouse

from ft_core.environment import ENV_HEARTBEAT
from ft_core.launch.rank_group import group_command
from lighthouse.client import LighthouseClient
from lighthouse.errors import LighthouseUnavailable

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
GROUPS = 2
DIGEST = re.compile(r'(?:weights |"digest": "|"weights": )([-.0-9a-f]+)')
SHORTEST_S, LONGEST_S, HEARTBEAT_S = 1.0, 4.0, 0.25
"""Of a stop; and how often a process proves that it is alive, where some are stopped."""
ON_ITS_OWN = 'export LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 GROUP_RANK=$RANK NCCL_HOSTID=$NCCL_HOSTID.$RANK; exec "$@"'
"""A shell starts a rank of several so: it has its machine's only GPU."""


@dataclass(frozen=True)
class Script:
    """`arguments` of `examples/{file}.py`. `on_gpu`: those that put it on the GPU, where it has to be told. `ranks`: of a
    replica group."""

    name: str
    arguments: str
    on_gpu: str = ""
    file: str = ""
    ranks: int = 1
    environment: str = ""

    def command(self, gpu: bool) -> list[str]:
        more = self.on_gpu if gpu else ""
        path = EXAMPLES / f"{self.file or self.name}.py"
        command = [sys.executable, str(path), *self.arguments.split(), *more.split()]
        if self.ranks > 1:
            command = group_command(["sh", "-c", ON_ITS_OWN, "sh", *command], self.ranks)
        return command


SHARDED = (
    "ACCELERATE_USE_FSDP=true FSDP_VERSION=2 FSDP_AUTO_WRAP_POLICY=SIZE_BASED_WRAP FSDP_MIN_NUM_PARAMS=1000 "
    "ACCELERATE_USE_PARALLELISM_CONFIG=true PARALLELISM_CONFIG_DP_REPLICATE_SIZE=2 "
    "PARALLELISM_CONFIG_DP_SHARD_SIZE=2"
)
SCRIPTS = [
    Script("train_lightning", "--max-steps 3000 --step-delay 0.01 --progress", "--accelerator gpu"),
    Script("train_fabric", "--epochs 100 --step-delay 0.01 --devices 1", "--accelerator gpu"),
    Script("accelerate_loop", "--epochs 150"),
    Script("transformers_trainer", "--epochs 60 --output_dir out"),
    Script(
        "train_lightning_diloco",
        "--max-steps 2000 --sync-every 4 --progress",
        "--accelerator gpu",
    ),
    Script("train_hsdp", "--steps 450 --pace-s 0", ranks=2),
    Script("FSDP and TP", "--steps 400 --pace-s 0 --tensor 2", file="train_hsdp", ranks=4),
    Script("Gloo between groups", "--steps 450 --pace-s 0 --gloo", file="train_hsdp", ranks=2),
    Script(
        "train_lightning_fsdp",
        "--devices 1 --num-nodes 2 --max-steps 2000",
        "--accelerator gpu",
        ranks=2,
    ),
    Script("FSDP2", "--epochs 80", file="accelerate_loop", ranks=2, environment=SHARDED),
]


def member(status: dict[str, Any], group: int, lost: str) -> str:
    """The replica_id of `group` in the only job's quorum, if it is not `lost`; empty: it is no member."""
    for job in status["jobs"]:
        for one in job["members"]:
            name, own_id = one["name"], one["replica_id"]
            if name.endswith(str(group)) and not (one["healing"] or one["gone"] or own_id == lost):
                return str(own_id)
    return ""


class Run:
    """Both groups of `script`. Raises RuntimeError where they do not get on."""

    def __init__(self, script: Script, gpu: bool, folder: Path, options: Any) -> None:
        folder.mkdir()
        self.script, self.folder, self.command = script, folder, script.command(gpu)
        self.lighthouse, self.address = start_lighthouse()
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")]),
            "TORCHFT_LIGHTHOUSE": self.address,
            "NUM_REPLICA_GROUPS": str(GROUPS),
            "ACCELERATE_USE_FAULT_TOLERANCE": "true",
            **({ENV_HEARTBEAT: str(HEARTBEAT_S)} if options.stops else {}),
            **dict(item.split("=") for item in script.environment.split()),
        }
        self.logs = [folder / f"{group}.log" for group in range(GROUPS)]
        self.deadline = options.began + options.limit_s
        self.groups = [self.start(group) for group in range(GROUPS)]

    def start(self, group: int) -> subprocess.Popen[bytes]:
        own = {"REPLICA_GROUP_ID": str(group), "NCCL_HOSTID": f"group-{group}"}
        with self.logs[group].open("ab") as log:
            return subprocess.Popen(
                self.command,
                env=self.environment | own,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,
            )

    def until(self, reached: Callable[[dict[str, Any]], str]) -> tuple[str, int]:
        with LighthouseClient(self.address) as client:
            while time.monotonic() < self.deadline and not any(one.poll() for one in self.groups):
                status = client.status(10.0)
                if status["jobs"] and (found := reached(status)):
                    return found, status["jobs"][0]["step"]
                time.sleep(0.02)
        raise RuntimeError(f"{self.script.name} did not get there")

    def ends(self) -> str:
        """Exit statuses, and what was said last."""
        said = [log.read_text("utf-8", "replace")[-1500:] for log in self.logs]
        return "; ".join(
            f"group {group} ({process.poll()}): {last}"
            for group, (process, last) in enumerate(zip(self.groups, said, strict=True))
        )

    def all_at(self, step: int, group: int) -> tuple[str, int]:
        """The replica_id of `group` when all groups are members and the job has come to `step`."""

        def there(status: dict[str, Any]) -> str:
            members = [member(status, number, "") for number in range(GROUPS)]
            return members[group] if all(members) and status["jobs"][0]["step"] >= step else ""

        return self.until(there)

    def a_rank(self, group: int, rng: random.Random) -> int:
        """The process of one of the ranks of `group`."""
        pid = self.groups[group].pid
        if self.script.ranks == 1:
            return pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(rng.choice(children))

    def kill(self, group: int, rng: random.Random) -> None:
        os.kill(self.a_rank(group, rng), signal.SIGKILL)
        self.groups[group].wait(60.0)
        self.groups[group] = self.start(group)

    def stop(self, group: int, rng: random.Random) -> None:
        pid = self.a_rank(group, rng)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(rng.uniform(SHORTEST_S, LONGEST_S))
        os.kill(pid, signal.SIGCONT)
        if self.script.ranks > 1:
            with suppress(subprocess.TimeoutExpired):  # its group has not missed it
                self.groups[group].wait(5.0)
        if self.groups[group].poll():
            self.groups[group] = self.start(group)

    def end(self) -> None:
        for one in self.groups:
            if one.poll() is None:
                os.killpg(one.pid, signal.SIGKILL)
        self.lighthouse.terminate()


def run(script: Script, options: Any, gpu: bool, folder: Path) -> dict[str, Any]:
    """Both groups of `script`, with its faults; the first kill is one of group 1."""
    rng = random.Random(f"{script.name} {options.seed}")
    faults = ["kill"] * options.kills + ["stop"] * options.stops
    faults[1:] = rng.sample(faults[1:], len(faults[1:]))
    job, found = Run(script, gpu, folder, options), []
    try:
        back = 0
        for number, fault in enumerate(faults):
            group = rng.randrange(GROUPS) if number else 1
            lost, step = job.all_at(back + options.every, group)
            began = time.monotonic()
            getattr(job, fault)(group, rng)
            _, back = job.until(partial(member, group=group, lost=lost if fault == "kill" else ""))
            found.append((fault, group, step, back, round(time.monotonic() - began, 1)))
        codes = [one.wait(max(0.1, job.deadline - time.monotonic())) for one in job.groups]
    except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"{error}; faults: {found}; {job.ends()}") from error
    finally:
        job.end()
    digests = [DIGEST.findall(log.read_text("utf-8", "replace"))[-1:] for log in job.logs]
    equal = digests[0] == digests[1] != [] and codes == [0] * GROUPS
    return {
        "script": script.name,
        "faults": found,
        "exit_codes": codes,
        "digests": [*digests[0], *digests[1]],
        "equal": equal,
    }


def main() -> int:
    parser = arguments((__doc__ or "").partition("\n\n")[2])
    parser.add_argument("--kills", type=int, default=1, help="of a script's processes")
    parser.add_argument("--stops", type=int, default=0, help="of a script's processes")
    parser.add_argument("--every", type=int, default=40, metavar="STEPS", help="between faults")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--at-a-time", type=int, metavar="N", help="scripts; default: by processors"
    )
    parser.add_argument("--limit-s", type=float, default=600.0, help="for all scripts together")
    names = [script.name for script in SCRIPTS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", default=names)
    options = parser.parse_args(namespace=argparse.Namespace(began=time.monotonic()))
    import torch

    gpu = torch.cuda.is_available()
    chosen = [script for script in SCRIPTS if script.name in options.only]
    at_a_time = options.at_a_time or max(1, len(os.sched_getaffinity(0)) // 4)
    with tempfile.TemporaryDirectory() as top, ThreadPoolExecutor(at_a_time) as pool:
        found = []
        futures = [pool.submit(run, one, options, gpu, Path(top) / one.name) for one in chosen]
        for script, future in zip(chosen, futures, strict=True):
            try:
                found.append(future.result())
            except (RuntimeError, LighthouseUnavailable) as error:
                found.append({"script": script.name, "error": str(error), "equal": False})
    rows = [
        [
            one["script"],
            " ".join(
                f"{fault} of {group} at {step}: back at {back}, after {seconds} s"
                for fault, group, step, back, seconds in one["faults"]
            )
            if "faults" in one
            else one["error"],
            " ".join(one.get("digests", ())),
            "equal" if one["equal"] else "DIFFERENT",
        ]
        for one in found
    ]
    place = torch.cuda.get_device_name(0) if gpu else "CPU"
    columns = ["script", "faults", "digests", ""]
    report(f"Ordinary scripts, two groups each, on one {place}", columns, rows, found, options.json)
    return 0 if all(one["equal"] for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
