"""`accelerate launch` and `accelerate config`, Accelerate's own, with the package installed."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from ft_accelerate.launch import groups, launch_hooks
from ft_accelerate.launch.groups import (
    MachineLayout,
    check_devices,
    environment,
    plan,
    protected,
    visible_devices,
    wanted,
)
from ft_accelerate.options import FaultTolerancePlugin
from ft_core.launch.rank_group import group_command
from lighthouse import LighthouseServer
from tests.ft_accelerate.installed import accelerate, installed
from tests.harness.waiting import PATIENCE_S, until

MULTI_NODE = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "MULTI_GPU",
    "machine_rank": 2,
    "main_process_ip": "10.0.0.1",
    "main_process_port": 4000,
    "num_machines": 4,
    "num_processes": 32,
    "mixed_precision": "bf16",
}
ON_CPU = {"distributed_type": "MULTI_CPU", "num_processes": 2, "use_cpu": True}


@pytest.fixture(scope="module")
def stock() -> ModuleType:
    """`accelerate.commands.launch`, as it is with the package installed."""
    launch_hooks.watch()
    import accelerate.commands.config.cluster
    import accelerate.commands.launch

    assert launch_hooks.problem() == ""
    module: ModuleType = accelerate.commands.launch
    return module


@pytest.fixture(autouse=True)
def _clean_env(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "TORCHFT_", "REPLICA_GROUP", "NUM_REPLICA", "FT_JOB")):
            monkeypatch.delenv(name)


def written(folder: Path, config: Mapping[str, Any], section: Any = None) -> str:
    path = folder / "config.yaml"
    content = dict(config) if section is None else {**config, "fault_tolerance_config": section}
    path.write_text(yaml.safe_dump(content))
    return str(path)


def arguments(stock: ModuleType, *argv: str) -> argparse.Namespace:
    """As `accelerate launch` has them when it is about to start something."""
    args: argparse.Namespace
    args = stock.launch_command_parser().parse_args([*argv, "train.py"])
    args, _, _ = stock._validate_launch_command(args)
    return args


def test_an_existing_multi_node_yaml_becomes_replica_groups(
    stock: ModuleType, tmp_path: Path
) -> None:
    config = written(tmp_path, MULTI_NODE, {"min_replicas": 3})
    args = arguments(stock, "--config_file", config)
    assert wanted(args, {})
    made = plan(args, {})
    assert made.place == MachineLayout(num_replica_groups=4, first=2, groups=1, group_size=8)
    assert made.plugin.lighthouse == "tcp://10.0.0.1:4000"
    assert made.lighthouse.bind == ""  # the first machine's launcher runs it
    assert made.plugin.min_replicas == 3
    first = plan(arguments(stock, "--config_file", config, "--machine_rank", "0"), {})
    assert first.lighthouse.bind == "tcp://0.0.0.0:4000"
    one_each = plan(
        arguments(stock, "--config_file", config, "--fault_tolerance_group_size", "1"), {}
    )
    assert one_each.place == MachineLayout(num_replica_groups=32, first=16, groups=8, group_size=1)


def test_flags_beat_the_yaml_which_beats_the_environment(stock: ModuleType, tmp_path: Path) -> None:
    config = written(tmp_path, ON_CPU, {"timeout_s": 10, "commit": "group", "job_id": "yaml"})
    args = arguments(
        stock,
        "--config_file",
        config,
        "--fault-tolerance-timeout-s",
        "20",
        "--fault_tolerance_job_id",
        "flag",
    )
    env = {
        "ACCELERATE_FAULT_TOLERANCE_COMMIT": "quorum",
        "ACCELERATE_FAULT_TOLERANCE_TOKEN": "env",
    }
    plugin = plan(args, env).plugin
    assert (plugin.timeout_s, plugin.job_id, plugin.commit) == (20.0, "flag", "group")
    assert plugin.token == "env"


def test_what_switches_it_on_and_off(stock: ModuleType, tmp_path: Path) -> None:
    plain = arguments(stock, "--config_file", written(tmp_path, ON_CPU))
    assert not wanted(plain, {})
    assert wanted(plain, {"ACCELERATE_USE_FAULT_TOLERANCE": "true"})
    section = arguments(stock, "--config_file", written(tmp_path, ON_CPU, {"timeout_s": 10}))
    assert wanted(section, {})
    assert not wanted(section, {"ACCELERATE_USE_FAULT_TOLERANCE": "false"})
    off = written(tmp_path, ON_CPU, {"timeout_s": 10, "use_fault_tolerance": False})
    assert not wanted(arguments(stock, "--config_file", off), {})
    flag = arguments(stock, "--config_file", off, "--use_fault_tolerance")
    assert wanted(flag, {"ACCELERATE_USE_FAULT_TOLERANCE": "false"})


def test_num_processes_are_groups_or_one_group_as_the_config_says(
    stock: ModuleType, tmp_path: Path
) -> None:
    config = written(tmp_path, {**ON_CPU, "num_processes": 4}, {"use_fault_tolerance": True})
    assert plan(arguments(stock, "--config_file", config), {}).place.groups == 4
    one = plan(arguments(stock, "--config_file", config, "--fault_tolerance_group_size=4"), {})
    assert (one.place.groups, one.place.group_size) == (1, 4)
    ours = protected([sys.executable, "train.py", "--x"])
    assert ours == [sys.executable, "-m", "ft_accelerate.run", "train.py", "--x"]
    assert group_command(ours, 1) == ours
    assert group_command(ours, 4) == [
        sys.executable,
        "-m",
        "ft_core.launch.rank_group",
        "4",
        *ours,
    ]


def test_what_a_replica_group_is_told(stock: ModuleType, tmp_path: Path) -> None:
    config = written(tmp_path, {**ON_CPU, "num_processes": 4}, {"group_size": 2, "job_id": "j"})
    made = plan(arguments(stock, "--config_file", config), {})
    of_group = environment(made, {}, address="tcp://127.0.0.1:5", devices=["a", "b", "c", "d"])
    told = of_group(1)
    plugin = FaultTolerancePlugin.from_env(told)
    assert (plugin.replica_group_id, plugin.num_replica_groups, plugin.group_size) == (1, 2, 2)
    assert (plugin.lighthouse, plugin.job_id) == ("tcp://127.0.0.1:5", "j")
    assert told["CUDA_VISIBLE_DEVICES"] == "c,d"
    single = plan(
        arguments(stock, "--config_file", config, "--fault_tolerance_group_size", "1"), {}
    )
    told = environment(single, {}, address="tcp://127.0.0.1:5", devices=[])(3)
    assert (told["RANK"], told["WORLD_SIZE"], told["LOCAL_RANK"]) == ("0", "1", "0")
    assert "CUDA_VISIBLE_DEVICES" not in told


def test_processes_that_would_share_a_gpu_are_refused() -> None:
    """NCCL would not connect them, and they would try again and again."""
    check_devices([], 3, {})  # on the CPU
    check_devices(["0", "1"], 2, {})
    check_devices(["0"], 3, {"NCCL_MULTI_RANK_GPU_ENABLE": "1"})
    with pytest.raises(ValueError, match="3 processes .* with 1 GPU, .* num_processes 1, or"):
        check_devices(["0"], 3, {})
    with pytest.raises(ValueError, match="3 processes .* with 2 GPUs, .* num_processes 2, or"):
        check_devices(["0", "1"], 3, {"NCCL_MULTI_RANK_GPU_ENABLE": "0"})


@pytest.mark.parametrize(
    ("listed", "seen"),
    [
        ("2, 0", ["2", "0"]),
        ("", []),
        ("-1", []),
        ("1,-1,0", ["1"]),
        ("NoDevFiles", []),
        ("none", []),
    ],
)
def test_the_gpus_are_those_that_cuda_would_see(listed: str, seen: list[str]) -> None:
    """It takes the list up to the first name that is no GPU's; -1 is how a script is sent to the CPU."""
    assert visible_devices({"CUDA_VISIBLE_DEVICES": listed}) == seen
    uuids = "GPU-8932f937,MIG-3e5c"
    assert visible_devices({"CUDA_VISIBLE_DEVICES": uuids}) == uuids.split(",")


@pytest.mark.parametrize("port", ["taken", "0", None])
def test_on_gpus_the_port_of_the_first_machine_is_the_lighthouses(
    stock: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, port: str | None
) -> None:
    """Accelerate looks whether it is free for a rendezvous, which is none of ours: it may be that of a
    lighthouse that the launcher before this one has left."""
    asked: list[groups.Launch] = []
    monkeypatch.setattr(launch_hooks, "launch", lambda args, _, env: asked.append(plan(args, env)))
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        at = {"taken": taken, "0": 0, None: None}[port]
        config = {**MULTI_NODE, "machine_rank": 0, "main_process_port": at, "num_processes": 4}
        given = ["--config_file", written(tmp_path, config, {"min_replicas": 2}), "train.py"]
        with pytest.raises(SystemExit) as ended:
            stock.launch_command(stock.launch_command_parser().parse_args(given))
    assert ended.value.code is None
    (made,) = asked
    assert made.lighthouse.address == f"tcp://10.0.0.1:{at or groups.DEFAULT_LIGHTHOUSE_PORT}"


def test_jobs_without_an_id_share_none(stock: ModuleType, tmp_path: Path) -> None:
    """A launcher of all groups makes one up; those of several machines have their SLURM job's, if
    that has all machines."""
    alone = written(tmp_path, ON_CPU, {"min_replicas": 2})
    made = {plan(arguments(stock, "--config_file", alone), {}).plugin.job_id for _ in range(2)}
    assert len(made) == 2 and "default" not in made
    assert plan(arguments(stock, "--config_file", alone), {"FT_JOB_ID": "j"}).plugin.job_id == "j"
    several = arguments(stock, "--config_file", written(tmp_path, MULTI_NODE, {"min_replicas": 2}))
    machines = str(MULTI_NODE["num_machines"])
    for nodes, job_id in ((machines, "77"), ("1", "default")):
        slurm = {"SLURM_JOB_ID": "77", "SLURM_NNODES": nodes}
        assert plan(several, slurm).plugin.job_id == job_id


@pytest.mark.parametrize(
    ("config", "section", "said"),
    [
        (ON_CPU, {"min_replica": 1}, "did you mean 'fault_tolerance_min_replicas'"),
        (ON_CPU, {"timeout_s": "soon"}, "must be a number of seconds, got 'soon'"),
        (
            {**MULTI_NODE, "deepspeed_config": {"zero_stage": 2}},
            {"min_replicas": 1},
            "cannot be combined with DeepSpeed",
        ),
        (
            {"distributed_type": "MEGATRON_LM", "num_processes": 2},
            {"min_replicas": 1},
            "cannot be combined with Megatron-LM",
        ),
        (
            {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": {"fsdp_version": 1}},
            {"min_replicas": 1},
            "takes FSDP2, whose shards lie within a replica group",
        ),
        ({**ON_CPU, "fault_tolerance": 1}, None, "unknown keys"),
        (
            {**ON_CPU, "fault_tolerance_confg": {"min_replicas": 1}},
            None,
            "did you mean 'fault_tolerance_config'?",
        ),
        (
            {**ON_CPU, "fault_tolerance_min_replicas": 1},
            None,
            "did you mean 'fault_tolerance_min_replicas' in the section 'fault_tolerance_config'?",
        ),
        ({**ON_CPU, "num_proceses": 1}, None, "please try upgrading"),  # Accelerate's own
    ],
)
def test_a_wrong_config_file_is_refused_when_it_is_read(
    stock: ModuleType, tmp_path: Path, config: dict[str, Any], section: Any, said: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        arguments(stock, "--config_file", written(tmp_path, config, section))


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--fault_tolerance_group_size", "3"], "must divide the processes of each machine"),
        (["--fault_tolerance_min_replicas", "3"], r"min_replicas \(3\) must be at most num_rep"),
        (["--fault_tolerance_timeout_s", "0"], "timeout_s must be positive, got 0"),
        (["--no_python"], "trains Python scripts: leave out --no_python"),
        (["--use_fsdp"], "takes FSDP2, whose shards lie within a replica group"),
        (["--use_deepspeed"], "cannot be combined with DeepSpeed"),
        (["--use_megatron_lm"], "cannot be combined with Megatron-LM"),
        (["--use_parallelism_config"], "cannot be combined with ParallelismConfig"),
        (["--tpu"], "cannot be combined with a TPU"),
        ([], "there is no script 'train.py'"),
    ],
)
def test_what_cannot_be_launched_ends_in_a_sentence(
    stock: ModuleType, tmp_path: Path, argv: list[str], said: str
) -> None:
    """Also where Accelerate itself ends first with something else, such as a missing package."""
    section = written(tmp_path, ON_CPU, {"use_fault_tolerance": True})
    (tmp_path / "other").mkdir()
    flag = [written(tmp_path / "other", ON_CPU), "--use_fault_tolerance"]
    for asked in ([section], flag) if "--use_parallelism_config" not in argv else (flag,):
        parser = stock.launch_command_parser()
        args = parser.parse_args(["--config_file", *asked, *argv, "train.py"])
        with pytest.raises(SystemExit, match=said) as caught:
            stock.launch_command(args)
        assert str(caught.value).startswith("ft_accelerate: ")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("argv", "remedy"),
    [
        (
            ["--fault_tolerance_lighthouse", "tcp://127.0.0.1:9"],
            "start one there with `lighthouse`",
        ),
        (
            [
                "--num_machines",
                "2",
                "--machine_rank",
                "1",
                "--main_process_ip",
                "127.0.0.1",
                "--main_process_port",
                "9",
            ],
            "the launcher of machine_rank 0 runs it",
        ),
    ],
)
def test_a_lighthouse_that_never_answers_costs_the_timeout_and_a_sentence(
    stock: ModuleType, tmp_path: Path, argv: list[str], remedy: str
) -> None:
    """Nothing was started then."""
    script = tmp_path / "train.py"
    script.touch()
    config = written(tmp_path, ON_CPU, {"timeout_s": 0.5})
    args = stock.launch_command_parser().parse_args(["--config_file", config, *argv, str(script)])
    with pytest.raises(SystemExit) as caught:
        stock.launch_command(args)
    said = f"ft_accelerate: no lighthouse answers at tcp://127.0.0.1:9 within 0.5 s: {remedy}"
    assert str(caught.value).startswith(said) and "\n" not in str(caught.value)


@pytest.mark.parametrize("given", ["--use_fault_tolerence", "--fault-tolerance-min-replica=1"])
def test_a_misspelt_flag_has_its_near_match(stock: ModuleType, given: str) -> None:
    with pytest.raises(SystemExit, match="there is no flag .*: did you mean --") as caught:
        stock.launch_command_parser().parse_args([given, "train.py"])
    meant = "--use_fault_tolerance" if "use" in given else "--fault_tolerance_min_replicas"
    assert str(caught.value).endswith(f"did you mean {meant}?")


def test_a_misspelt_flag_of_accelerate_is_its_own_error(
    stock: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        stock.launch_command_parser().parse_args(["--num_proceses", "train.py"])
    assert "unrecognized arguments: --num_proceses" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--tee", "3", "--log_dir", "logs"], "--tee and --log_dir: no effect"),
        (["--log_dir=logs"], "ft_accelerate: --log_dir: no effect, since torchrun is not started"),
        (["--monitor_interval", "1", "--rdzv_backend", "c10d"], ""),
    ],
)
def test_flags_of_torchrun_that_say_nothing_are_named(
    stock: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    said: str,
) -> None:
    config = written(tmp_path, ON_CPU)
    argv = ["--config_file", config, "--use_fault_tolerance", *flags, "train.py"]
    monkeypatch.setattr(sys, "argv", ["accelerate", *argv])
    stock._validate_launch_command(stock.launch_command_parser().parse_args(argv))
    lines = [x for x in capsys.readouterr().err.splitlines() if x.startswith("ft_accelerate")]
    assert len(lines) == bool(said) and said in "".join(lines)


@pytest.mark.parametrize(
    ("argv", "env", "said"),
    [
        (["--use_fault_tolerance"], {}, "--use_fault_tolerance is behind the script's name"),
        ([], {"ACCELERATE_FAULT_TOLERANCE_MIN_REPLICAS": "2"}, "_MIN_REPLICAS is set, but"),
        ([], {"NUM_REPLICA_GROUPS": "2"}, ""),  # also of other schedulers
        (["--lr", "1"], {}, ""),
        (
            ["--use_fault_tolerance"],
            {"ACCELERATE_USE_FAULT_TOLERANCE": "true"},
            "",
        ),
    ],
)
def test_a_wish_that_has_no_effect_is_said(
    stock: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    argv: list[str],
    env: dict[str, str],
    said: str,
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    config = written(tmp_path, ON_CPU)
    parsed = stock.launch_command_parser().parse_args(["--config_file", config, "train.py", *argv])
    stock._validate_launch_command(parsed)
    lines = [x for x in capsys.readouterr().err.splitlines() if x.startswith("ft_accelerate")]
    assert len(lines) == bool(said) and said in "".join(lines)


def test_a_wrong_section_ends_in_a_sentence_without_a_stack(
    stock: ModuleType, tmp_path: Path
) -> None:
    config = written(tmp_path, ON_CPU, {"min_replica": 1})
    args = stock.launch_command_parser().parse_args(["--config_file", config, "train.py"])
    with pytest.raises(SystemExit, match=r"^ft_accelerate: fault_tolerance_config has the unknown"):
        stock.launch_command(args)


def test_a_wrong_flag_is_refused(stock: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments(stock, "--fault_tolerance_timeout_s", "soon")
    assert "it must be a number of seconds, got 'soon'" in capsys.readouterr().err


def test_config_update_keeps_the_section(stock: ModuleType, tmp_path: Path) -> None:
    from accelerate.commands.config.update import update_config

    config = written(tmp_path, ON_CPU, {"min_replicas": 2, "use_fault_tolerance": True})
    update_config(argparse.Namespace(config_file=config))
    assert yaml.safe_load(Path(config).read_text())["fault_tolerance_config"] == {
        "fault_tolerance_min_replicas": 2,
        "use_fault_tolerance": True,
    }


def test_without_a_section_nothing_changes(stock: ModuleType, tmp_path: Path) -> None:
    from accelerate.commands.config.update import update_config

    config = written(tmp_path, ON_CPU)
    update_config(argparse.Namespace(config_file=config))
    assert "fault_tolerance_config" not in yaml.safe_load(Path(config).read_text())
    args = arguments(stock, "--config_file", config)
    command, env = stock.prepare_simple_launcher_cmd_env(args)
    assert command == [sys.executable, "train.py"]
    assert not [name for name in env if "FAULT_TOLERANCE" in name]


def test_moved_seams_are_refused_in_a_sentence(
    stock: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An Accelerate that has no such function, or one with other parameters."""
    for name, change, sentence in (
        (
            "accelerate.utils.launch",
            {"prepare_multi_gpu_env": None},
            "prepare_multi_gpu_env is not there",
        ),
        (
            "accelerate.commands.launch",
            {"launch_command_parser": lambda program: None},
            "launch_command_parser takes no 'subparsers'",
        ),
    ):
        monkeypatch.setattr(launch_hooks, "_problems", [])
        moved = ModuleType(name)
        known = vars(sys.modules[name]) | change
        vars(moved).update({k: v for k, v in known.items() if v is not None})
        with monkeypatch.context() as within:
            within.setitem(sys.modules, name, moved)
            launch_hooks.replace_in(moved)
        assert sentence in launch_hooks.problem()
    with pytest.raises(ValueError, match="does not know accelerate .*train without fault"):
        arguments(stock, "--config_file", written(tmp_path, ON_CPU, {"min_replicas": 1}))
    args = arguments(stock, "--config_file", written(tmp_path, ON_CPU))
    assert stock.prepare_simple_launcher_cmd_env(args)[0] == [sys.executable, "train.py"]


def test_autoload_breaks_no_import(monkeypatch: pytest.MonkeyPatch) -> None:
    from ft_accelerate.autoload import autoload

    def fail() -> None:
        raise RuntimeError("moved")

    monkeypatch.setattr(launch_hooks, "watch", fail)
    autoload()


# ---------------------------------------------------------- the commands themselves

TELL = """
import json, os, sys

import accelerate

mine = {k: v for k, v in os.environ.items() if k.startswith("ACCELERATE_FAULT_TOLERANCE_")}
index = accelerate.PartialState().local_process_index
os.write(1, (json.dumps([mine, sys.argv[1:], index]) + chr(10)).encode())
"""


@pytest.mark.process
def test_plain_accelerate_launch_starts_the_groups(tmp_path: Path) -> None:
    """The entry point alone: torch is imported before the modules that read the YAML."""
    script = tmp_path / "tell.py"
    script.write_text(TELL)
    config = written(tmp_path, ON_CPU, {"min_replicas": 2})
    command = [*accelerate("launch"), "--config_file", config, str(script), "--lr", "1"]
    env = installed(tmp_path)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    numbers = {t["ACCELERATE_FAULT_TOLERANCE_REPLICA_GROUP_ID"]: index for t, _, index in told}
    assert numbers == {"0": 0, "1": 1}, "local_process_index is as under plain Accelerate"
    assert {t["ACCELERATE_FAULT_TOLERANCE_MIN_REPLICAS"] for t, _, _ in told} == {"2"}
    assert all(argv == ["--lr", "1"] for _, argv, _ in told)
    assert "starting replica groups 0 to 1 of 2" in done.stderr


@pytest.mark.process
def test_so_does_the_launcher_that_is_run_as_a_module(tmp_path: Path) -> None:
    """As debuggers are told to start it. Python runs such a module without an import."""
    config = written(tmp_path, ON_CPU, {"min_replica": 2})
    flags = ["--config_file", config, "--use_fault_tolerance", "train.py"]
    command = [sys.executable, "-m", "accelerate.commands.launch", *flags]
    env = installed(tmp_path)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1
    assert done.stderr.startswith("ft_accelerate: ") and "min_replicas" in done.stderr


def test_the_first_machines_lighthouse_stays_until_the_others_are_done(
    stock: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher of another machine is connected to it, also while none of its groups runs. And it has a
    keeper and warm starts where nothing else is said."""
    monkeypatch.setenv("FT_WARM_START", "1")
    script = tmp_path / "train.py"
    script.touch()
    seen: list[int] = []
    with LighthouseServer("tcp://127.0.0.1:0") as server:
        ip, port = server.bound.removeprefix("tcp://").split(":")

        def supervise(*args: Any, **options: Any) -> int:
            until(lambda: server.status()["server"]["connections"] == 1, "the launcher")
            seen.append(options["first"])
            assert options["keep_state_s"] == 30
            assert options["warm"] is not None
            return 0

        monkeypatch.setattr(groups, "supervise", supervise)
        config = written(tmp_path, {**ON_CPU, "num_processes": 2, "num_machines": 2}, {})
        options = ["--machine_rank", "1", "--main_process_ip", ip, "--main_process_port", port]
        args = arguments(stock, "--config_file", config, *options, str(script))
        assert groups.launch(args, [sys.executable, str(script)], {}) == 0
        assert seen == [1]
        until(lambda: server.status()["server"]["connections"] == 0, "its end")


@pytest.mark.process
def test_opted_out_the_section_is_an_unknown_key(tmp_path: Path) -> None:
    config = written(tmp_path, ON_CPU, {"min_replicas": 2})
    command = [*accelerate("launch"), "--config_file", config, "train.py"]
    env = installed(tmp_path, FT_ACCELERATE_AUTOLOAD="0")
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode != 0
    assert "unknown keys (['fault_tolerance_config'])" in done.stderr


@pytest.mark.process
def test_accelerate_config_asks_our_questions_too(tmp_path: Path) -> None:
    """On a real terminal, as Accelerate's menus want one."""
    from accelerate.commands.config import cluster

    path = tmp_path / "answered.yaml"
    answers = [
        ("In which compute environment", MENU[0]),
        ("Which type of machine", MENU[1]),
        ("How many different machines", "\n"),
        ("checked while running", "\n"),
        *(
            [("(IPEX)", "\n")] if "(IPEX)" in inspect.getsource(cluster) else []
        ),  # Accelerate 1.11 asks
        ("launch mpirun", "\n"),
        ("torch dynamo", "\n"),
        ("How many processes", "4\n"),
        ("mixed precision", MENU[0]),
        ("train fault-tolerantly", "yes\n"),
        ("restarted together)? [1]", "3\n"),
        ("Please enter a number that divides the 4", "2\n"),
        ("smallest number of replica groups to train with (there are 2)", "1\n"),
        ("lighthouse that runs already", "\n"),
        ("hangs be evicted", "-3\n"),
        ("Please enter a number of seconds above 0", "30\n"),
        ("died be restarted", "-1\n"),
        ("Please enter a whole number from 0 on", "\n"),
        ("How should a step be committed", MENU[0]),
        ("other options", "yes\n"),
        ("should be hot spares", "2\n"),
        ("Please enter a number from 0 to 1", "1\n"),
        ("name on the lighthouse", "\n"),
        ("shared secret", "\n"),
        ("wait for a quorum", "\n"),
        ("arbitrary Python objects", "\n"),
        ("configuration saved", ""),
    ]
    command = [*accelerate("config"), "--config_file", str(path)]
    said = converse(command, installed(tmp_path, TERM="xterm"), answers)
    config = yaml.safe_load(path.read_text())
    assert config["fault_tolerance_config"] == {
        "use_fault_tolerance": True,
        "fault_tolerance_group_size": 2,
        "fault_tolerance_min_replicas": 1,
        "fault_tolerance_timeout_s": 30.0,
        "fault_tolerance_commit": "quorum",
        "fault_tolerance_spares": 1,
    }, said


MENU = ("\r", "1\r")
"""Answers to a menu: what it stands at; number 1. Those to a question end with a newline."""


def converse(command: list[str], env: dict[str, str], answers: list[tuple[str, str]]) -> str:
    """Answer each question when it has been asked; returns all that was said."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(command[0], command, env)
    said, seen, typed, deadline = "", 0, "", time.monotonic() + PATIENCE_S
    try:
        for question, answer in answers:
            while question not in said[seen:]:
                assert time.monotonic() < deadline, said
                if not select.select([terminal], [], [], 0.5)[0]:
                    # A menu throws away what was typed before it listened.
                    os.write(terminal, typed.encode() if typed in MENU else b"")
                    continue
                try:
                    said += os.read(terminal, 65536).decode(errors="replace")
                except OSError:  # the other end is closed
                    raise AssertionError(f"never asked {question!r}: {said}") from None
            seen = said.index(question, seen) + len(question)
            os.write(terminal, answer.encode())
            typed = answer
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise
    finally:
        os.waitpid(pid, 0)
        os.close(terminal)
    return said


@pytest.mark.parametrize(
    "first", ["ft_accelerate.install", "ft_accelerate.runtime.runtime", "torch"]
)
def test_whatever_is_imported_first_the_process_is_protected(first: str, tmp_path: Path) -> None:
    """The entry point acts in the midst of the import that brings Accelerate in."""
    code = f"import {first}, accelerate, torch; assert accelerate.state.torch is not torch"
    env = installed(
        tmp_path,
        ACCELERATE_USE_FAULT_TOLERANCE="true",
        ACCELERATE_FAULT_TOLERANCE_NUM_REPLICA_GROUPS="2",
        ACCELERATE_FAULT_TOLERANCE_REPLICA_GROUP_ID="0",
    )
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=PATIENCE_S)
