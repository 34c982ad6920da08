"""`ft-accelerate`, `python -m ft_accelerate.run`, and Accelerate's own test scripts under the plugin."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ft_accelerate.launch import command as cli
from ft_core.launch.restarts import AWAY_EXIT_CODE
from tests.ft_accelerate.installed import installed
from tests.harness import workers
from tests.harness.lighthouses import patient_lighthouse
from tests.harness.waiting import PATIENCE_S

FT = [sys.executable, "-m", "ft_accelerate"]
ON_CPU = {"distributed_type": "MULTI_CPU", "num_processes": 2, "use_cpu": True}


def section(path: Path) -> dict[str, object]:
    found: dict[str, object] = yaml.safe_load(path.read_text())["fault_tolerance_config"]
    return found


def test_config_writes_a_file_from_flags_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "config.yaml"
    answers = ["--num_processes", "4", "--cpu", "--fault_tolerance_min_replicas", "2"]
    assert cli.main(["config", "--config_file", str(path), *answers]) == 0
    written = yaml.safe_load(path.read_text())
    assert (written["distributed_type"], written["num_processes"]) == ("MULTI_CPU", 4)
    assert written["use_cpu"] is True
    assert section(path) == {"use_fault_tolerance": True, "fault_tolerance_min_replicas": 2}


def test_config_default_asks_nothing(tmp_path: Path) -> None:
    """As `accelerate config default`, which leaves a file that is there as it is; ours adds the section to it."""
    path = tmp_path / "new" / "config.json"
    for precision in ("bf16", "no"):
        given = ["--config_file", str(path), "--mixed_precision", precision]
        assert cli.main(["config", "default", *given]) == 0
    found = yaml.safe_load(path.read_text())
    assert found["mixed_precision"] == "bf16"
    assert found["fault_tolerance_config"] == {"use_fault_tolerance": True}


def test_config_adds_to_the_file_that_is_there(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({**ON_CPU, "main_process_port": 4000, "debug": True}))
    for answer in (["--fault_tolerance_timeout_s", "9"], ["--fault-tolerance-job-id", "night"]):
        assert cli.main(["config", "--config_file", str(path), *answer]) == 0
    written = yaml.safe_load(path.read_text())
    assert (written["main_process_port"], written["debug"]) == (4000, True)
    assert section(path) == {
        "use_fault_tolerance": True,
        "fault_tolerance_timeout_s": 9.0,
        "fault_tolerance_job_id": "night",
    }


def test_wrong_answers_end_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "config.yaml")
    answers = ["--num_processes", "4", "--fault_tolerance_group_size", "3"]
    assert cli.main(["config", "--config_file", path, *answers]) == 2
    assert capsys.readouterr().err.startswith(
        "ft-accelerate: a replica group of 3 processes does not fit a machine that runs 4"
    )
    assert not Path(path).exists()
    assert cli.main(["tset"]) == 2
    assert "there is no command 'tset'" in capsys.readouterr().err


def test_env_tells_what_a_report_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({**ON_CPU, "fault_tolerance_config": {"min_replicas": 2}}))
    monkeypatch.setenv("ACCELERATE_FAULT_TOLERANCE_TOKEN", "very secret")
    # `accelerate env` looks for its command, and up to 1.13 does not end well if there is none.
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable), prepend=os.pathsep)
    assert cli.main(["env", "--config_file", str(path)]) == 0
    said = capsys.readouterr().out
    assert "fault_tolerance_config: {'fault_tolerance_min_replicas': 2}" in said
    assert "Accelerate's seams: as expected" in said
    assert "ACCELERATE_FAULT_TOLERANCE_TOKEN: (set)" in said
    assert "very secret" not in said


@pytest.mark.process
def test_it_needs_no_docstrings() -> None:
    """`python -OO` has none: the command ended with an IndexError."""
    done = subprocess.run(
        [sys.executable, "-OO", *FT[1:]], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.stdout.rstrip() == cli.USAGE
    assert "ft-accelerate config     asks" in cli.USAGE


@pytest.mark.process
def test_the_self_test_kills_heals_and_compares(tmp_path: Path) -> None:
    done = workers.run("accelerate", [*FT[1:], "test"], env=installed(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Test is a success!" in done.stdout
    weights = {line.split("│")[6].strip() for line in done.stdout.splitlines() if "│" in line}
    assert len(weights) == 1  # of both groups, with and without a fault


@pytest.mark.process
def test_plain_python_is_protected_by_the_environment(tmp_path: Path) -> None:
    """By the entry point; and `python -m ft_accelerate.run` without it."""
    script = tmp_path / "alone.py"
    script.write_text(
        "import gc, sys\n"
        "from accelerate import Accelerator\n"
        "from ft_accelerate.runtime import process as processes\n"
        "assert gc.isenabled()\n"
        "accelerator = Accelerator(cpu=True)\n"
        "print('protected', processes.current().live, accelerator.num_processes, sys.argv[1:])\n"
    )
    on = {"ACCELERATE_USE_FAULT_TOLERANCE": "true", "NUM_REPLICA_GROUPS": "3"}
    for wrapper, more in (
        ([], on),
        (["-m", "ft_accelerate.run"], {**on, "FT_ACCELERATE_AUTOLOAD": "0"}),
    ):
        command = [sys.executable, *wrapper, str(script), "--x"]
        env = installed(tmp_path, REPLICA_GROUP_ID="1", **more)
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE_S)
        assert "protected True 3 ['--x']" in done.stdout, done.stderr


@pytest.mark.process
def test_a_lighthouse_that_is_gone_ends_a_script_in_a_sentence(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "from accelerate import Accelerator\n"
        "accelerator = Accelerator(cpu=True)\n"
        "model, loader = accelerator.prepare(\n"
        "    torch.nn.Linear(4, 1), torch.utils.data.DataLoader(torch.randn(8, 4)))\n"
        "for batch in loader:\n"
        "    raise AssertionError\n"
    )
    prefix = "ACCELERATE_FAULT_TOLERANCE_"
    nowhere = {prefix + "LIGHTHOUSE": "tcp://127.0.0.1:9", prefix + "TIMEOUT_S": "0.5"}
    env = installed(tmp_path, NUM_REPLICA_GROUPS="2", REPLICA_GROUP_ID="1", **nowhere)
    done = workers.run("accelerate", ["-m", "ft_accelerate.run", str(script)], env=env)
    said = done.stderr.splitlines()
    assert done.returncode == AWAY_EXIT_CODE, done.stderr
    assert said[-1].startswith(
        "ft_accelerate: no lighthouse answers at tcp://127.0.0.1:9 within 0.5 s"
    )
    assert "Traceback" not in done.stderr


@pytest.mark.process
def test_a_script_without_end_training_leaves_before_its_process_group_is_shut_down(
    tmp_path: Path,
) -> None:
    """Peers that left first made a quorum for which there was no process group: a warning, at the end of
    a good run."""
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "from accelerate import Accelerator\n"
        "from ft_accelerate.runtime.process import current\n"
        "from ft_core.process_group.reconfigurable import ReconfigurableProcessGroup as Group\n"
        "accelerator = Accelerator(cpu=True)\n"
        "model, loader = accelerator.prepare(\n"
        "    torch.nn.Linear(4, 1), torch.utils.data.DataLoader(torch.randn(8, 4)))\n"
        "for batch in loader:\n"
        "    accelerator.backward(model(batch).sum())\n"
        "shutdown, runtime, ours = Group.shutdown, current(), current().manager._pg\n"
        "def shut_down(group):\n"
        "    if group is ours:\n"
        "        print('left' if runtime.manager is None else 'a member')\n"
        "    shutdown(group)\n"
        "Group.shutdown = shut_down\n"
    )
    command = [*FT[1:], "launch", "--cpu", "--num_processes", "1", str(script)]
    done = workers.run("accelerate", command, env=installed(tmp_path))
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == {"left"}, done.stderr


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "cold"), [("test_script", False), ("test_sync", True), ("test_ops", False)]
)
def test_accelerates_own_scripts(name: str, cold: bool, tmp_path: Path) -> None:
    """What Accelerate runs to see whether a set-up works, on two replica groups. One of them starts
    as it does for a user."""
    from accelerate.test_utils import path_in_accelerate_package

    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({**ON_CPU, "fault_tolerance_config": {"min_replicas": 2}}))
    script = path_in_accelerate_package("test_utils", "scripts", f"{name}.py")
    command = [*FT, "launch", "--config_file", str(config), str(script)]
    env = installed(tmp_path)
    if cold:
        done = subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=PATIENCE_S
        )
    else:
        done = workers.run("accelerate", command[1:], cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]


@pytest.mark.process
@pytest.mark.parametrize(
    ("ends", "code", "finishes"),
    [
        ("sys.exit(3)", 3, False),
        ("sys.exit('of no use')", 1, False),
        ("sys.exit()", 0, True),
        ("break", 0, True),
    ],
)
def test_a_script_has_finished_unless_it_ends_with_an_error(
    ends: str, code: int, finishes: bool, tmp_path: Path
) -> None:
    """As one does whose own handler of SIGTERM exits: its peers heard that the training is over, and ended when it was
    not back within the join timeout. Also within a pass over its data, which it may hold as an iterator."""
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch\n"
        "from accelerate import Accelerator\n"
        "from ft_core.manager import Manager\n"
        "shut_down = Manager.shutdown\n"
        "def shutdown(manager, *args, finished=False, **kwargs):\n"
        "    print('finished' if finished else 'gone')\n"
        "    shut_down(manager, *args, finished=finished, **kwargs)\n"
        "Manager.shutdown = shutdown\n"
        "accelerator = Accelerator(cpu=True)\n"
        "model, loader = accelerator.prepare(\n"
        "    torch.nn.Linear(4, 1), torch.utils.data.DataLoader(torch.randn(8, 4)))\n"
        "batches = iter(loader)\n"
        "for batch in batches:\n"
        "    accelerator.backward(model(batch).sum())\n"
        f"    {ends}\n"
    )
    env = installed(tmp_path, NUM_REPLICA_GROUPS="1", REPLICA_GROUP_ID="0")
    with patient_lighthouse() as server:
        env["TORCHFT_LIGHTHOUSE"] = server.address()
        done = workers.run("accelerate", ["-m", "ft_accelerate.run", str(script)], env=env)
    assert done.returncode == code, done.stderr
    assert set(done.stdout.split()) == {"finished" if finishes else "gone"}, done.stderr
