"""python -m tests.hf_examples ACCELERATE [NAME...]: HF's examples under fault tolerance.

ACCELERATE is a checkout of github.com/huggingface/accelerate. Each example runs three times on two CPU
processes: on plain Accelerate, fault tolerant, and fault tolerant with one process killed. One line
each: whether the models are those of the plain run, and whether they are alike after the kill. It is no
part of the test suite; its results are in docs/accelerate_tests.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

from tests.ft_accelerate.installed import installed
from tests.harness.waiting import PATIENCE_S

ON_CPU = {"distributed_type": "MULTI_CPU", "num_processes": 2, "use_cpu": True}
EXAMPLES: dict[str, list[str]] = {
    "examples/by_feature/automatic_gradient_accumulation": [],
    "examples/by_feature/checkpointing": ["--checkpointing_steps", "epoch", "--output_dir", "OUT"],
    "examples/by_feature/cross_validation": ["--num_folds", "2"],
    "examples/by_feature/early_stopping": [],
    "examples/by_feature/gradient_accumulation": ["--gradient_accumulation_steps", "2"],
    "examples/by_feature/gradient_accumulation_for_autoregressive_models": [
        "--gradient_accumulation_steps",
        "2",
        "--per_device_batch_size",
        "8",
    ],
    "examples/by_feature/local_sgd": ["--local_sgd_steps", "2"],
    "examples/by_feature/memory": [],
    "examples/by_feature/multi_process_metrics": [],
    "examples/by_feature/profiler": [],
    "examples/by_feature/schedule_free": [],
    "examples/by_feature/tracking": ["--with_tracking", "--project_dir", "OUT"],
    "examples/nlp_example": [],
    "examples/complete_nlp_example": ["--checkpointing_steps", "epoch", "--output_dir", "OUT"],
    "src/accelerate/test_utils/scripts/external_deps/test_metrics": [],
}


def run(example: Path, given: list[str], folder: Path, *, ours: bool, kill: str) -> str | list[str]:
    """The digests of the models of each process, as text; or the last line of an error."""
    folder.mkdir()
    arguments = [str(folder) if word == "OUT" else word for word in given]
    script = ["-m", "tests.hf_examples.offline", str(example), str(folder / "report"), *arguments]
    env = installed(folder / "site", HF_KILL=kill, HF_DATASETS_CACHE=str(folder / "cache"))
    if ours:
        section = {"min_replicas": 2, "timeout_s": 30}
        config = folder / "ft.yaml"
        config.write_text(yaml.safe_dump({**ON_CPU, "fault_tolerance_config": section}))
        launch = ["-m", "ft_accelerate.launch.command", "launch", "--config_file", str(config)]
    else:
        env |= {"ACCELERATE_USE_CPU": "1", "FT_ACCELERATE_AUTOLOAD": "0"}
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    with (folder / "output").open("wb") as output:
        code = subprocess.run(
            [sys.executable, *launch, *script],
            env=env,
            stdout=output,
            stderr=output,
            timeout=PATIENCE_S,
            cwd=Path.cwd(),
        ).returncode
    said = (folder / "output").read_text()
    lines = said.splitlines()
    if kill and (kills := said.count("was killed by SIGKILL")) != 1:
        return f"processes were killed {kills} times"
    if code:
        return next((x for x in reversed(lines) if "Error" in x or x.startswith("ft_")), lines[-1])
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("report.*"))]
    return [json.dumps(each["models"]) for each in found]


def outcome(plain: str | list[str], found: str | list[str]) -> str:
    if isinstance(found, str):
        return f"failed: {found}"
    if len(set(found)) > 1:
        return "processes differ"
    return "equal" if found == plain else "alike, not equal to plain"


def main(checkout: str, *names: str) -> None:
    for name, given in EXAMPLES.items():
        if names and not any(each in name for each in names):
            continue
        example = Path(checkout, f"{name}.py").resolve()
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(os.environ.get("HF_KEEP", scratch), name.replace("/", "."))
            folder.mkdir(parents=True)
            plain = run(example, given, folder / "plain", ours=False, kill="")
            if isinstance(plain, str):
                print(f"{name}: plain Accelerate failed: {plain}", flush=True)
                continue
            free = outcome(plain, run(example, given, folder / "free", ours=True, kill=""))
            killed = outcome(plain, run(example, given, folder / "killed", ours=True, kill="1:4"))
            print(f"{name}: fault-free {free}; killed {killed}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
