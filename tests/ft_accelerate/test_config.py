"""Options, the section, and what every machine becomes: without Accelerate."""

from __future__ import annotations

import dataclasses
import re
import socket
import subprocess
import sys
from typing import Any

import pytest

from ft_accelerate import FaultTolerancePlugin
from ft_accelerate.launch.groups import MachineLayout, layout, lighthouse_plan
from ft_accelerate.options import field_names, is_enabled, read_section
from ft_accelerate.runtime.startup import GroupRanks
from ft_core.environment import ReplicaEnv, Supervision
from ft_core.launch.rank_group import rank_environment
from tests.harness.waiting import PATIENCE_S


def test_options_go_through_the_environment_and_come_back() -> None:
    given = FaultTolerancePlugin(
        num_replica_groups=4,
        replica_group_id=2,
        lighthouse="tcp://10.0.0.1:29510",
        min_replicas=2,
        spares=0,
        timeout_s=7.5,
        quorum_timeout_s=90,
        max_restarts=1,
        commit="group",
        job_id="night",
        heal_allow_objects=True,
        group_size=8,
        token="secret",
    )
    env = given.to_env()
    assert len(env) == len(field_names()) + 1
    assert env["ACCELERATE_USE_FAULT_TOLERANCE"] == "true"
    assert env["ACCELERATE_FAULT_TOLERANCE_TIMEOUT_S"] == "7.5"
    assert FaultTolerancePlugin.from_env(env) == given


def test_arguments_beat_our_variables_which_beat_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUM_REPLICA_GROUPS", "3")
    monkeypatch.setenv("FT_JOB_ID", "core")
    monkeypatch.setenv("ACCELERATE_FAULT_TOLERANCE_JOB_ID", "ours")
    monkeypatch.setenv("ACCELERATE_FAULT_TOLERANCE_TIMEOUT_S", "11")
    plugin = FaultTolerancePlugin(timeout_s=5)
    assert (plugin.num_replica_groups, plugin.job_id, plugin.timeout_s) == (3, "ours", 5.0)
    assert FaultTolerancePlugin.from_env({}) == FaultTolerancePlugin.from_env(
        {"ACCELERATE_FAULT_TOLERANCE_TIMEOUT_S": ""}
    )


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"min_replicas": 3, "num_replica_groups": 2}, r"min_replicas \(3\) must be at most"),
        ({"replica_group_id": 2, "num_replica_groups": 2}, "a number from 0 to 1"),
        (
            {"min_replicas": 2, "num_replica_groups": 2, "spares": 1},
            "spares=1 of 2 replica groups leaves 1 that contribute, fewer than min_replicas=2",
        ),
        ({"num_replica_groups": 2, "spares": 1, "commit": "group"}, 'spares needs commit="quorum"'),
        ({"num_replica_groups": 2, "spares": 1, "group_size": 1}, "leaves one process that trains"),
        ({"num_replica_groups": 0}, "num_replica_groups must be at least 1, got 0"),
        ({"timeout_s": 0}, "timeout_s must be positive, got 0"),
        ({"timeout_s": "soon"}, "timeout_s must be a number of seconds, got 'soon'"),
        ({"timeout_s": float("inf")}, "timeout_s must be a number of seconds, got inf"),
        ({"quorum_timeout_s": -1}, "quorum_timeout_s must be positive, got -1"),
        ({"min_replicas": 0}, "min_replicas must be at least 1, got 0"),
        ({"max_restarts": 1.5}, "max_restarts must be a whole number, got 1.5"),
        ({"commit": "both"}, 'commit must be "quorum" or "group", got \'both\''),
        ({"lighthouse": "10.0.0.1"}, "is no lighthouse address: write it as tcp://host:port"),
        ({"heal_allow_objects": "perhaps"}, "heal_allow_objects must be true or false"),
    ],
)
def test_wrong_options_are_refused_in_a_sentence(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        FaultTolerancePlugin(**wrong)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_a_misspelt_field_has_its_near_match() -> None:
    with pytest.raises(ValueError, match="no field min_replica: did you mean min_replicas"):
        FaultTolerancePlugin(min_replica=2)  # type: ignore[call-arg]


def test_a_wrong_variable_is_named() -> None:
    with pytest.raises(ValueError, match="variable ACCELERATE_FAULT_TOLERANCE_MIN_REPLICAS must"):
        FaultTolerancePlugin.from_env({"ACCELERATE_FAULT_TOLERANCE_MIN_REPLICAS": "two"})
    with pytest.raises(ValueError, match="variable ACCELERATE_USE_FAULT_TOLERANCE must be true or"):
        is_enabled({"ACCELERATE_USE_FAULT_TOLERANCE": "maybe"})


def test_a_misspelt_environment_variable_is_refused() -> None:
    with pytest.raises(ValueError, match=r"MIN_REPLCAS is unknown: did you mean .*MIN_REPLICAS\?"):
        FaultTolerancePlugin.from_env({"ACCELERATE_FAULT_TOLERANCE_MIN_REPLCAS": "2"})
    with pytest.raises(ValueError, match="did you mean ACCELERATE_USE_FAULT_TOLERANCE"):
        is_enabled({"ACCELERATE_USE_FAULT_TOLERENCE": "true"})


def test_a_process_finds_its_place_among_all() -> None:
    env = rank_environment({}, rank=2, size=4, port=29500)
    plugin = FaultTolerancePlugin(num_replica_groups=3, replica_group_id=1)
    for group_size in (0, 4):
        plugin.group_size = group_size
        found = GroupRanks(plugin, ReplicaEnv.read(env), Supervision())
        assert (found.num_processes, found.process_index, found.place.local_rank) == (12, 6, 2)
        job = plugin.job(found.place)
        assert (job.store_addr, job.store_port) == ("127.0.0.1", 29500)
    plugin.group_size = 0
    alone = GroupRanks(plugin, ReplicaEnv.read({}), Supervision())
    assert (alone.num_processes, alone.process_index, alone.place.local_rank) == (3, 1, 0)


@pytest.mark.parametrize(
    ("said", "steps", "silence_s"),
    [({}, 1024, 0.6), ({"FT_COMPARE_STEPS": "0", "FT_HEARTBEAT_S": "0.5"}, 0, 1.5)],
)
def test_the_cores_variables_count(said: dict[str, str], steps: int, silence_s: float) -> None:
    job = FaultTolerancePlugin().job(ReplicaEnv.read(said))
    assert (job.compare_steps, job.timeouts.heartbeat_timeout_s) == (steps, silence_s)


@pytest.mark.parametrize("said", ["0", "-1", "soon"])
def test_a_heartbeat_is_a_number_of_seconds(said: str) -> None:
    with pytest.raises(ValueError, match="FT_HEARTBEAT_S must be a positive number of seconds"):
        ReplicaEnv.read({"FT_HEARTBEAT_S": said})


def test_a_hot_spare_reads_a_share_and_has_a_number_of_its_own() -> None:
    env = rank_environment({}, rank=1, size=2, port=29500)
    found = [
        GroupRanks(
            FaultTolerancePlugin(num_replica_groups=5, replica_group_id=group, spares=2),
            ReplicaEnv.read(env),
            Supervision(),
        )
        for group in range(5)
    ]
    assert {ranks.num_processes for ranks in found} == {6}
    assert [ranks.number for ranks in found] == [1, 3, 5, 7, 9]
    assert [ranks.process_index for ranks in found] == [1, 3, 5, 1, 3]


@pytest.mark.parametrize(
    ("env", "group_size", "said"),
    [
        (
            {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "1"},
            0,
            "the rank in the replica group must be from 0 to 1",
        ),
        ({"WORLD_SIZE": "2"}, 0, "of 2 processes needs MASTER_ADDR and MASTER_PORT"),
        ({}, 2, "group_size is 2, but this process was started as one of 1"),
        ({"WORLD_SIZE": "many"}, 0, "WORLD_SIZE must be a number, got 'many'"),
    ],
)
def test_a_wrong_place_is_refused(env: dict[str, str], group_size: int, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        FaultTolerancePlugin(group_size=group_size).job(ReplicaEnv.read(env))
    assert "\n" not in str(caught.value)


def test_the_section_gets_its_prefix_and_types() -> None:
    section = {"min_replicas": 2, "fault_tolerance_timeout_s": 30, "use_fault_tolerance": True}
    assert read_section(section) == {
        "fault_tolerance_min_replicas": 2,
        "fault_tolerance_timeout_s": 30.0,
        "use_fault_tolerance": True,
    }
    assert read_section(None) == {}
    assert read_section({"job_id": None}) == {}
    assert read_section({"spares": "1"}) == {"fault_tolerance_spares": 1}, (
        "of how many is not known here"
    )


@pytest.mark.parametrize(
    ("section", "said"),
    [
        (
            {"fault_tolerance_min_replica": 2},
            "unknown key 'fault_tolerance_min_replica': did you mean "
            "'fault_tolerance_min_replicas'?",
        ),
        ({"zzz": 1}, "unknown key 'zzz': it takes use_fault_tolerance, fault_tolerance_num"),
        ({"timeout_s": "soon"}, "timeout_s in fault_tolerance_config must be a number of seconds"),
        ({"commit": "both"}, 'fault_tolerance_config: commit must be "quorum" or "group"'),
        ({"timeout_s": 0}, "fault_tolerance_config: timeout_s must be positive, got 0"),
        ([1], "fault_tolerance_config must hold keys and values"),
    ],
)
def test_a_typo_in_the_section_is_refused(section: object, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        read_section(section)
    assert "\n" not in str(caught.value)


def place(total: int, first: int, groups: int, size: int) -> MachineLayout:
    return MachineLayout(num_replica_groups=total, first=first, groups=groups, group_size=size)


@pytest.mark.parametrize(
    ("given", "becomes"),
    [
        ({"num_processes": 4}, place(4, 0, 4, 1)),
        ({"num_processes": 4, "group_size": 4}, place(1, 0, 1, 4)),
        ({"num_processes": 4, "group_size": 2}, place(2, 0, 2, 2)),
        ({"num_processes": 4, "num_replica_groups": 2}, place(2, 0, 2, 2)),
        ({"num_processes": 32, "num_machines": 4, "machine_rank": 2}, place(4, 2, 1, 8)),
        (
            {"num_processes": 32, "num_machines": 4, "machine_rank": 2, "group_size": 1},
            place(32, 16, 8, 1),
        ),
        ({"num_processes": 4, "num_machines": 4, "machine_rank": 3}, place(4, 3, 1, 1)),
        (
            {"num_processes": 32, "num_machines": 4, "machine_rank": 1, "num_replica_groups": 8},
            place(8, 2, 2, 4),
        ),
        (
            {"num_processes": 32, "num_machines": 4, "machine_rank": 3, "group_size": 4},
            place(8, 6, 2, 4),
        ),
        (
            {"num_processes": 2, "num_replica_groups": 6, "replica_group_id": 4},
            place(6, 4, 2, 1),
        ),
    ],
)
def test_what_a_machine_becomes(given: dict[str, int], becomes: MachineLayout) -> None:
    assert layout(**given) == becomes


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"num_processes": 5, "num_machines": 2}, "must be a multiple of num_machines"),
        ({"num_processes": 4, "num_machines": 2, "machine_rank": 2}, "a number from 0 to 1"),
        ({"num_processes": 4, "group_size": 3}, "must divide the processes of each machine"),
        ({"num_processes": 8, "num_machines": 2, "group_size": 8}, "does not fit a machine"),
        ({"num_processes": 4, "num_replica_groups": 3}, "replica groups of equal size"),
        (
            {"num_processes": 4, "num_replica_groups": 8, "group_size": 1},
            "say with fault_tolerance_replica_group_id which group",
        ),
        (
            {"num_processes": 2, "num_replica_groups": 4, "replica_group_id": 3},
            "there are to be only 4",
        ),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        layout(**given)


def test_who_runs_the_lighthouse() -> None:
    alone = layout(num_processes=2)
    assert lighthouse_plan(alone).bind == "tcp://127.0.0.1:0"
    named = lighthouse_plan(alone, lighthouse="tcp://a:1")
    assert (named.address, named.bind) == ("tcp://a:1", "")
    for rank, bind in ((0, "tcp://0.0.0.0:4000"), (1, "")):
        where = lighthouse_plan(
            layout(num_processes=4, num_machines=2, machine_rank=rank),
            num_machines=2,
            machine_rank=rank,
            main_process_ip="10.0.0.1",
            main_process_port=4000,
        )
        assert (where.address, where.bind) == ("tcp://10.0.0.1:4000", bind)


@pytest.mark.parametrize("ip", ["fd00::5", "[fd00::5]", "first"])
def test_a_first_machine_with_ipv6_only_listens_there(
    ip: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = socket.getaddrinfo

    def resolve(host: Any, *args: Any, **kwargs: Any) -> Any:
        return real("fd00::5" if host == "first" else host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    where = lighthouse_plan(
        layout(num_processes=4, num_machines=2),
        num_machines=2,
        main_process_ip=ip,
        main_process_port=4000,
    )
    shown = "first" if ip == "first" else "[fd00::5]"
    assert (where.address, where.bind) == (f"tcp://{shown}:4000", "tcp://[::]:4000")


def test_a_lighthouse_that_cannot_be_found_is_refused() -> None:
    many = layout(num_processes=4, num_machines=2)
    with pytest.raises(ValueError, match="set main_process_ip to the first machine's address"):
        lighthouse_plan(many, num_machines=2)
    part = layout(num_processes=1, num_replica_groups=3, replica_group_id=1)
    with pytest.raises(ValueError, match="starts 1 of 3 replica groups, and they need a common"):
        lighthouse_plan(part)


def test_every_option_is_explained() -> None:
    text = FaultTolerancePlugin.__doc__ or ""
    for field in dataclasses.fields(FaultTolerancePlugin):
        assert f"        {field.name} (`" in text
        assert field.metadata["help"].endswith(".")


def test_neither_torch_nor_accelerate_is_loaded() -> None:
    code = (
        "import sys, ft_accelerate.autoload, ft_accelerate.launch.command, ft_accelerate.launch.groups, "
        "ft_core.launch.rank_group, ft_accelerate.run, ft_accelerate.launch.launch_hooks\n"
        "assert not {'torch', 'accelerate', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)
