"""The examples do what their first lines say: each is run by the command given there."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ft_accelerate.installed import installed
from tests.harness import workers
from tests.harness.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.process


def command(path: str, *more: str, flags: tuple[str, ...] = ()) -> list[str]:
    """Python's arguments for the command in the first lines of `path`, with `more` arguments, and `flags`
    for `accelerate launch`."""
    found = re.search(r"(python|accelerate launch) (.*examples/\S+)", (ROOT / path).read_text())
    assert found is not None, f"{path} does not say how to run it"
    words = [*found[2].split(), *more]
    if found[1] == "python":
        return words
    return ["-m", "accelerate.commands.accelerate_cli", "launch", *flags, *words]


def run(path: str, folder: Path, *more: str, framework: str) -> str:
    """What that command prints. It runs as a fork of a process that has imported `framework`."""
    done = workers.run(framework, command(path, *more), env=installed(folder))
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    ("path", "framework", "steps"),
    [("examples/train_gan.py", "lightning", 90), ("examples/train_fabric.py", "torch", 72)],
)
def test_two_replica_groups_end_equal(
    path: str, framework: str, steps: int, tmp_path: Path
) -> None:
    said = run(path, tmp_path, framework=framework)
    ends = [json.loads(text) for text in re.findall(r"\{.*?\}", said)]
    assert {end["replica_group"] for end in ends} == {"0", "1"}
    assert ends[0]["weights"] == ends[1]["weights"]
    assert [end["step"] for end in ends] == [steps, steps]


def test_sharded_groups_end_equal(tmp_path: Path) -> None:
    more = ("--max-steps", "20")
    said = run("examples/train_lightning_fsdp.py", tmp_path, *more, framework="lightning")
    ends = re.findall(r"group (\d): 20 steps, loss \d\.\d+, weights ([0-9a-f]{16})", said)
    assert sorted(group for group, _ in ends) == ["0", "0", "1", "1"], said
    assert len({weights for _, weights in ends}) == 1


def test_cli_project(tmp_path: Path) -> None:
    said = run("examples/cli/train.py", tmp_path, framework="lightning")
    assert len(re.findall(r"step 48, val_accuracy 0\.\d+", said)) == 1


def test_streaming_diloco_with_lightning(tmp_path: Path) -> None:
    more = ("--devices", "2", "--fragments", "2", "--delay", "3", "--codec", "int4")
    said = run("examples/train_lightning_diloco.py", tmp_path, *more, framework="lightning")
    ends = [json.loads(text) for text in re.findall(r"\{.*?\}", said)]
    assert {end["replica_group"] for end in ends} == {"0", "1"}
    assert ends[0]["digest"] == ends[1]["digest"]


@pytest.mark.parametrize("name", ["accelerate_loop", "accelerate_local_sgd"])
def test_accelerate_loops(name: str, tmp_path: Path) -> None:
    said = run(f"examples/{name}.py", tmp_path, "--epochs", "20", framework="accelerate")
    last = re.findall(r"epoch (\d+): (\S+)% of (\d+) digits are right", said)[-1]
    assert float(last[1]) > 85
    assert last[2] == "297"  # each of the test's digits counts once


def test_transformers_trainer(tmp_path: Path) -> None:
    said = run(
        "examples/transformers_trainer.py",
        tmp_path,
        "--output_dir",
        str(tmp_path / "out"),
        "--epochs",
        "1",
        framework="transformers",
    )
    steps = dict(re.findall(r"process (\d): (\d+) steps", said))
    assert set(steps) == {"0", "1"}
    assert steps["0"] == steps["1"]
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("name", "epochs", "processes", "evaluated"),
    [
        ("accelerate_loop", 8, 3, r"epoch \d+: \S+ of 297"),
        ("accelerate_local_sgd", 8, 3, r"epoch \d+: \S+ of 297"),
        ("transformers_trainer", 3, 2, "'eval_loss'"),
    ],
)
def test_the_main_process_is_killed_and_then_the_next_one(
    name: str, epochs: int, processes: int, evaluated: str, tmp_path: Path
) -> None:
    """With `min_replicas` at the number of groups none trains to its end without the one that is away."""
    more = ("--epochs", str(epochs))
    if name == "transformers_trainer":
        more += ("--output_dir", str(tmp_path / "out"))
    words = command(
        f"examples/{name}.py", *more, flags=("--fault_tolerance_min_replicas", str(processes))
    )
    framework = "transformers" if name == "transformers_trainer" else "accelerate"
    launcher = workers.start(
        framework,
        words,
        env=installed(tmp_path / "site"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    said: list[str] = []
    try:
        for main in ("0", "1"):
            until(launcher, evaluated, said)
            pids = dict(re.findall(r"process (\d) has pid (\d+)", "".join(said)))
            os.kill(int(pids[main]), signal.SIGKILL)
            until(launcher, f"replica group {main} was killed by SIGKILL", said)
            until(launcher, f"replica group {main} is back at", said)
        until(launcher, "", said)
        assert launcher.wait(PATIENCE_S) == 0, said
    finally:
        launcher.end()
    # Two lines may run into each other: `python -u` writes a line's end by itself.
    weights = dict(re.findall(r"process (\d): (?:\d+ steps, )?weights (\w{16})", "".join(said)))
    assert len(weights) == processes and len(set(weights.values())) == 1, "".join(said[-40:])


def until(process: workers.Worker, pattern: str, said: list[str]) -> None:
    """Read what the process prints, to `said`, up to a line with `pattern`; "": to its end."""
    assert process.stdout is not None
    for raw in process.stdout:
        said.append(raw.decode())
        if pattern and re.search(pattern, said[-1]):
            return
    assert not pattern, f"no {pattern!r} in {said}"


def test_the_demonstration_takes_its_processes_with_it_when_it_is_told_to_end(
    tmp_path: Path,
) -> None:
    command = [sys.executable, str(ROOT / "examples/survive_kill.py"), "--replicas", "2"]
    with subprocess.Popen(
        [*command, "--out", str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as demo:
        assert demo.stdout is not None
        started: list[int] = []
        for line in demo.stdout:
            started += map(int, re.findall(r"started: process (\d+)", line))
            if len(started) == 2:
                break
        demo.send_signal(signal.SIGTERM)
        demo.stdout.read()
    left = [pid for pid in started if Path(f"/proc/{pid}").exists()]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert len(started) == 2 and not left
    assert demo.returncode == 128 + signal.SIGTERM
