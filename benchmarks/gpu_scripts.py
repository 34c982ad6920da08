"""python benchmarks/gpu_scripts.py [--json FILE] [--kill-at STEP] [--only NAME ...]

The ordinary scripts of `examples`, each in two replica groups that share one GPU, all scripts at the same time. When a
script has committed `kill-at` steps, its group 1 is killed (SIGKILL) and started again at once. What is shown: the step
at which it was killed, the step at which it was a member again, and the digests of both groups' final weights,
which must be equal. Exit status 0 if all are.

NCCL takes processes of one GPU for different machines where their NCCL_HOSTID differs. Without a GPU the
scripts run on the CPU, over Gloo.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import arguments, report, start_lighthouse

from lighthouse.client import LighthouseClient
from lighthouse.errors import LighthouseUnavailable

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
LIMIT_S = 240.0
"""For one script; the GPU's machine imports slowly when all start at once."""
GROUPS = 2
DIGEST = re.compile(r'(?:weights |"digest": "|"weights": )([-.0-9a-f]+)')


@dataclass(frozen=True)
class Script:
    """`arguments` of `examples/{name}.py`. `on_gpu`: those that put it on the GPU, where it has to be told."""

    name: str
    arguments: str
    on_gpu: str = ""


SCRIPTS = [
    Script("train_lightning", "--max-steps 3000 --step-delay 0.01 --progress", "--accelerator gpu"),
    Script("train_fabric", "--epochs 100 --step-delay 0.01 --devices 1", "--accelerator gpu"),
    Script("accelerate_loop", "--epochs 150"),
    Script("transformers_trainer", "--epochs 20 --output_dir out"),
]


def member(status: dict[str, Any], group: int, killed: str) -> str:
    """The replica_id of `group` in the only job's quorum, if it is not `killed`; empty: it is no member."""
    for job in status["jobs"]:
        for one in job["members"]:
            name, own_id = one["name"], one["replica_id"]
            if name.endswith(str(group)) and not (
                one["healing"] or one["gone"] or own_id == killed
            ):
                return str(own_id)
    return ""


def run(script: Script, kill_at: int, gpu: bool, folder: Path) -> dict[str, Any]:
    """Both groups of `script`, of which group 1 is killed once."""
    folder.mkdir()
    lighthouse, address = start_lighthouse()
    more = script.on_gpu if gpu else ""
    command = [sys.executable, str(EXAMPLES / f"{script.name}.py")]
    command += [*script.arguments.split(), *more.split()]
    logs = [folder / f"{group}.log" for group in range(GROUPS)]
    deadline = time.monotonic() + LIMIT_S

    def start(group: int) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "TORCHFT_LIGHTHOUSE": address,
            "NUM_REPLICA_GROUPS": str(GROUPS),
            "REPLICA_GROUP_ID": str(group),
            "NCCL_HOSTID": f"group-{group}",
            "ACCELERATE_USE_FAULT_TOLERANCE": "true",
        }
        with logs[group].open("ab") as log:
            return subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, cwd=folder, start_new_session=True
            )

    groups = [start(group) for group in range(GROUPS)]

    def until(reached: Callable[[dict[str, Any]], str]) -> tuple[str, int]:
        with LighthouseClient(address) as client:
            while time.monotonic() < deadline and all(one.poll() is None for one in groups):
                status = client.status(10.0)
                if status["jobs"] and (found := reached(status)):
                    return found, status["jobs"][0]["step"]
                time.sleep(0.02)
        last = logs[1].read_text("utf-8", "replace")[-2000:]
        raise RuntimeError(f"{script.name} did not get there: {last}")

    try:
        killed, step = until(
            lambda status: status["jobs"][0]["step"] >= kill_at and member(status, 1, "")
        )
        os.killpg(groups[1].pid, signal.SIGKILL)
        groups[1].wait()
        began, groups[1] = time.monotonic(), start(1)
        _, back = until(partial(member, group=1, killed=killed))
        back_s = time.monotonic() - began
        codes = [one.wait(max(0.1, deadline - time.monotonic())) for one in groups]
    finally:
        for one in groups:
            if one.poll() is None:
                os.killpg(one.pid, signal.SIGKILL)
        lighthouse.terminate()
    digests = [DIGEST.findall(log.read_text("utf-8", "replace"))[-1:] for log in logs]
    equal = digests[0] == digests[1] != [] and codes == [0] * GROUPS
    return {
        "script": script.name,
        "killed_at": step,
        "back_at": back,
        "back_s": round(back_s, 1),
        "exit_codes": codes,
        "digests": [*digests[0], *digests[1]],
        "equal": equal,
    }


def main() -> int:
    parser = arguments((__doc__ or "").partition("\n\n")[2])
    parser.add_argument("--kill-at", type=int, default=60, metavar="STEP")
    names = [script.name for script in SCRIPTS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", default=names)
    args = parser.parse_args()
    import torch

    gpu = torch.cuda.is_available()
    chosen = [script for script in SCRIPTS if script.name in args.only]
    with tempfile.TemporaryDirectory() as top, ThreadPoolExecutor(len(chosen)) as pool:
        found = []
        futures = [pool.submit(run, one, args.kill_at, gpu, Path(top) / one.name) for one in chosen]
        for script, future in zip(chosen, futures, strict=True):
            try:
                found.append(future.result())
            except (RuntimeError, LighthouseUnavailable, subprocess.TimeoutExpired) as error:
                found.append({"script": script.name, "error": str(error), "equal": False})
    rows = [
        [
            one["script"],
            one.get("killed_at", ""),
            f"{one['back_at']}, after {one['back_s']} s" if "back_at" in one else one["error"],
            " ".join(one.get("digests", ())),
            "equal" if one["equal"] else "DIFFERENT",
        ]
        for one in found
    ]
    place = torch.cuda.get_device_name(0) if gpu else "CPU"
    columns = ["script", "killed at step", "member again at step", "digests", ""]
    report(f"Ordinary scripts, two groups each, on one {place}", columns, rows, found, args.json)
    return 0 if all(one["equal"] for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
