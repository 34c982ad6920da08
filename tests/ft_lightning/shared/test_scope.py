"""A process's rank and group, from what its launcher and its user said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from lightning.fabric.utilities.distributed import _suggested_max_num_threads

from ft_core.environment import Supervision
from ft_core.launch.rank_group import rank_environment
from ft_lightning.shared import launch_env, topology
from ft_lightning.shared.launch_env import LaunchEnv, machines
from ft_lightning.shared.topology import Role, Scope

AT = {"TORCHFT_LIGHTHOUSE": "tcp://host:1"}
SLURM = {"SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_JOB_NAME": "train"}


def resolve(env: dict[str, str], **options: Any) -> Scope:
    num_nodes = options.get("num_nodes", 1)
    return topology.resolve(LaunchEnv.read(env, num_nodes=num_nodes), **options)


def child_environment(
    env: dict[str, str], supervisor: Scope, number: int, restarts: int = 0
) -> dict[str, str]:
    """The environment of the supervisor's group of that number here."""
    told = Supervision(pid=42, restarts=restarts).environment()
    return told | launch_env.child_environment(
        supervisor.index + number,
        supervisor.num_groups,
        device=number * supervisor.group_size,
        lighthouse="tcp://h:1",
        job_id=supervisor.job_id,
        processes=supervisor.supervised * supervisor.group_size,
        env=env,
    )


def test_slurm_tasks_are_replica_groups() -> None:
    scope = resolve({**SLURM, "SLURM_NNODES": "2", **AT}, devices=2, num_nodes=2)
    assert (scope.role, scope.name, scope.index, scope.num_groups) == (Role.MEMBER, "3", 3, 4)
    assert scope.device == 1
    assert resolve({**SLURM, "SLURM_RESTART_COUNT": "1"}, devices=2).restarts == 1
    # In a shell on a node people start what they like; an explicit name always wins.
    assert resolve({**SLURM, "SLURM_JOB_NAME": "bash"}, devices=2).role is Role.SUPERVISOR
    named = {**SLURM, "REPLICA_GROUP_ID": "0", "NUM_REPLICA_GROUPS": "2"}
    assert (resolve(named, devices=1).index, resolve(named, devices=1).num_groups) == (0, 2)


def test_a_node_with_one_device_has_a_supervisor_as_any_other() -> None:
    node = resolve({"NODE_RANK": "1", **AT}, devices=1, num_nodes=3)
    assert (node.role, node.index, node.num_groups) == (Role.SUPERVISOR, 1, 3)
    assert (node.supervised, node.group_size) == (1, 1)
    env = child_environment({"NODE_RANK": "1", **AT}, node, number=0)
    child = resolve(env, devices=1, num_nodes=3)
    assert (child.role, child.name, child.index, child.num_groups) == (Role.MEMBER, "1", 1, 3)


def test_several_groups_on_each_node() -> None:
    options: dict[str, Any] = {"devices": 2, "num_nodes": 3, "group_size": 1}
    node = resolve({"NODE_RANK": "1"}, **options, lighthouse="tcp://h:1")
    assert (node.role, node.index, node.num_groups) == (Role.SUPERVISOR, 2, 6)
    assert node.supervised == 2
    env = child_environment({"NODE_RANK": "1"}, node, number=1)
    child = resolve(env, **options)
    assert (child.role, child.index, child.num_groups, child.device) == (Role.MEMBER, 3, 6, 1)


def child_of(supervisor: Scope, number: int, rank: int) -> dict[str, str]:
    """The environment of a rank of a supervised group."""
    env = child_environment({"PATH": "/bin"}, supervisor, number, restarts=1)
    return rank_environment(env, rank=rank, size=supervisor.group_size, port=4000)


def test_a_node_is_one_group_of_all_its_devices() -> None:
    node = resolve({"NODE_RANK": "1", **AT}, devices=4, num_nodes=3)
    assert (node.role, node.index, node.num_groups) == (Role.SUPERVISOR, 1, 3)
    assert (node.supervised, node.group_size) == (1, 4)
    child = resolve(child_of(node, 0, 2), devices=4, num_nodes=3)
    assert (child.role, child.name, child.index, child.num_groups) == (Role.MEMBER, "1", 1, 3)
    assert (child.group_rank, child.group_size, child.device, child.local_rank) == (2, 4, 2, 2)
    assert (child.rank, child.world_size, child.number, child.node) == (6, 12, 0, 0)
    half = resolve({"NODE_RANK": "1", **AT}, devices=4, num_nodes=3, group_size=2)
    assert (half.index, half.num_groups, half.supervised, half.group_size) == (2, 6, 2, 2)


def test_devices_of_one_machine_are_divided_into_groups() -> None:
    parent = resolve({}, devices=6, group_size=2)
    assert (parent.role, parent.num_groups, parent.supervised) == (Role.SUPERVISOR, 3, 3)
    child = resolve(child_of(parent, 2, 1), devices=6, group_size=2)
    assert (child.index, child.group_rank, child.group_size, child.restarts) == (2, 1, 2, 1)
    assert (child.rank, child.world_size, child.device, child.number) == (5, 6, 5, 2)
    assert (child.store_addr, child.store_port, child.supervisor_pid) == ("127.0.0.1", 4000, 42)
    alone = resolve({}, devices=2, group_size=2)
    assert (alone.num_groups, alone.supervised, alone.world_size) == (1, 1, 2)


TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "2",
}


def test_torchrun_is_one_group_of_its_ranks() -> None:
    named = {**TORCHRUN, "REPLICA_GROUP_ID": "1", "NUM_REPLICA_GROUPS": "2"}
    scope = resolve(named, devices=2, num_nodes=2)
    assert (scope.role, scope.name, scope.index, scope.num_groups) == (Role.MEMBER, "1", 1, 2)
    assert (scope.group_rank, scope.group_size, scope.local_rank, scope.node) == (3, 4, 1, 1)
    assert (scope.rank, scope.world_size, scope.device, scope.restarts) == (7, 8, 1, 2)
    assert (scope.store_addr, scope.store_port) == ("host", 29500)
    # In a SLURM job, too; and without a number it is the only group.
    only = resolve({**TORCHRUN, **SLURM}, devices=2, num_nodes=2)
    assert (only.name, only.index, only.num_groups, only.world_size) == ("0", 0, 1, 4)
    one = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "REPLICA_GROUP_ID": "0"}
    assert resolve(one, devices=1).group_size == 1


BLOCKS = {
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_JOB_ID": "123456",
    "SLURM_JOB_NAME": "train",
    "SLURM_STEP_NODELIST": "gpu[08-09],big",
}


def test_slurm_tasks_in_a_row_are_a_group() -> None:
    task = {
        **BLOCKS,
        "SLURM_NTASKS": "12",
        "SLURM_PROCID": "7",
        "SLURM_LOCALID": "3",
        **AT,
        "SLURM_NODEID": "1",
        "SLURM_NNODES": "3",
    }
    scope = resolve(task, devices=4, num_nodes=3, group_size=2)
    assert (scope.role, scope.index, scope.num_groups) == (Role.MEMBER, 3, 6)
    assert (scope.group_rank, scope.local_rank, scope.device, scope.rank) == (1, 1, 3, 7)
    assert (scope.store_addr, scope.store_port) == ("127.0.0.1", 15000 + 3456 + 3)
    # A group of tasks on several machines meets on that of its first.
    wide = resolve(task, devices=4, num_nodes=3, group_size=6)
    assert (wide.index, wide.group_rank, wide.node, wide.local_rank) == (1, 1, 0, 1)
    assert wide.store_addr == "gpu09"
    last = {**task, "SLURM_PROCID": "8", "SLURM_LOCALID": "0", "SLURM_NODEID": "2"}
    scope = resolve(last, devices=4, num_nodes=3, group_size=6)
    assert (scope.group_rank, scope.node, scope.local_rank, scope.store_addr) == (2, 1, 0, "gpu09")
    assert machines("a[1-3,07]x,b c") == ["a1x", "a2x", "a3x", "a07x", "b", "c"]
    with pytest.raises(ValueError, match="cannot be read"):
        machines("a[1-3,x]")


def test_a_slurm_step_of_its_own_is_one_group() -> None:
    """An element of a job array, requeued by itself: its tasks are the ranks of the group named."""
    element = {
        **BLOCKS,
        "SLURM_NTASKS": "4",
        "SLURM_PROCID": "2",
        "SLURM_LOCALID": "2",
        **AT,
        "SLURM_NODEID": "0",
        "SLURM_NNODES": "1",
        "SLURM_RESTART_COUNT": "2",
        "REPLICA_GROUP_ID": "1",
        "NUM_REPLICA_GROUPS": "3",
    }
    scope = resolve(element, devices=4, group_size=4)
    assert (scope.role, scope.name, scope.index, scope.num_groups) == (Role.MEMBER, "1", 1, 3)
    assert (scope.group_rank, scope.group_size, scope.local_rank, scope.device) == (2, 4, 2, 2)
    assert (scope.rank, scope.world_size, scope.restarts) == (6, 12, 2)
    assert (scope.store_addr, scope.store_port) == ("127.0.0.1", 15000 + 3456 + 1)
    # Of one task, it is a group of its own as anywhere.
    one = {**element, "SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "1", "SLURM_PROCID": "0"}
    alone = resolve(one, devices=1)
    assert (alone.index, alone.num_groups, alone.group_size, alone.restarts) == (1, 3, 1, 2)
    with pytest.raises(ValueError, match="srun --ntasks=2"):
        resolve(element, devices=4, group_size=2)


def test_one_device_and_no_environment_is_the_only_group() -> None:
    scope = resolve({}, devices=1)
    assert (scope.role, scope.name, scope.index, scope.num_groups) == (Role.MEMBER, "0", 0, 1)


def test_environment_names_a_member() -> None:
    scope = resolve({"REPLICA_GROUP_ID": "2", "NUM_REPLICA_GROUPS": "3"}, devices=1)
    assert (scope.role, scope.name, scope.index, scope.num_groups) == (Role.MEMBER, "2", 2, 3)


def test_several_devices_without_environment_are_supervised() -> None:
    scope = resolve({}, devices=3)
    assert scope.role is Role.SUPERVISOR
    assert scope.num_groups == 3


def test_supervised_child_is_a_member_on_its_own_device() -> None:
    started = {"WORLD_SIZE": "1", "LOCAL_RANK": "0", "PATH": "/bin"}
    env = child_environment(started, resolve({}, devices=3), number=1, restarts=2)
    assert "WORLD_SIZE" not in env
    assert "LOCAL_RANK" not in env
    assert env["PATH"] == "/bin"
    assert env["TORCHFT_LIGHTHOUSE"] == "tcp://h:1"
    scope = resolve(env, devices=3)
    assert (scope.role, scope.index, scope.num_groups) == (Role.MEMBER, 1, 3)
    assert (scope.device, scope.supervisor_pid, scope.restarts) == (1, 42, 2)


def test_supervised_processes_share_the_processors_as_those_of_the_stock_launcher_do() -> None:
    supervisor = resolve({}, devices=2)
    wanted = str(_suggested_max_num_threads(2))
    assert child_environment({}, supervisor, number=1)["OMP_NUM_THREADS"] == wanted
    said = {"OMP_NUM_THREADS": "7"}
    assert child_environment(said, supervisor, number=1)["OMP_NUM_THREADS"] == "7"


def test_arguments_beat_the_environment() -> None:
    env = {"REPLICA_GROUP_ID": "2", "NUM_REPLICA_GROUPS": "3"}
    scope = resolve(env, devices=1, num_replica_groups=4, replica_name="blue")
    assert (scope.name, scope.index, scope.num_groups) == ("blue", 2, 4)


@pytest.mark.parametrize(
    ("env", "options", "says"),
    [
        ({"WORLD_SIZE": "2"}, {"devices": 1}, "WORLD_SIZE is 2, but RANK"),
        ({**TORCHRUN, "NUM_REPLICA_GROUPS": "2"}, {"devices": 1}, "one torchrun for each"),
        ({**TORCHRUN, "REPLICA_GROUP_ID": "0"}, {"devices": 1, "group_size": 2}, "4 process"),
        ({"REPLICA_GROUP_ID": "0"}, {"devices": 1, "group_size": 2}, "torchrun --nproc-per-node"),
        ({}, {"devices": 3, "group_size": 2}, "cannot be divided"),
        ({"NODE_RANK": "0", **AT}, {"devices": 3, "num_nodes": 2, "group_size": 2}, "multiple of"),
        ({**SLURM}, {"devices": 2, "group_size": 3}, "4 SLURM tasks cannot be divided"),
        ({**SLURM, **BLOCKS, "SLURM_NODEID": "1"}, {"devices": 2, "group_size": 2}, "block"),
        ({}, {"devices": 1, "num_nodes": 2}, "NODE_RANK does not say"),
        ({"NODE_RANK": "2", **AT}, {"devices": 1, "num_nodes": 2}, "there are num_nodes=2"),
        ({"NODE_RANK": "0"}, {"devices": 1, "num_nodes": 2}, "need a lighthouse"),
        ({**SLURM, "SLURM_NNODES": "2"}, {"devices": 2}, "2 SLURM nodes: .* need a lighthouse"),
        ({}, {"devices": 1, "num_replica_groups": 3}, "from 0 to 2"),
        ({}, {"devices": 3, "num_replica_groups": 2}, "make them equal"),
        ({"REPLICA_GROUP_ID": "3", "NUM_REPLICA_GROUPS": "3"}, {"devices": 1}, "from 0 to 2"),
        ({"REPLICA_GROUP_ID": "east", "NUM_REPLICA_GROUPS": "3"}, {"devices": 1}, "'east'"),
        ({"REPLICA_GROUP_ID": "0", "FT_LIGHTNING_DEVICE": "x"}, {"devices": 1}, "FT_LIGHTNING"),
    ],
)
def test_what_does_not_fit_is_said(env: dict[str, str], options: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        resolve(env, **options)


def test_the_job_has_the_id_of_what_numbers_its_groups() -> None:
    """Two jobs on one lighthouse then share no id by accident. A number that a person gives, or a
    SLURM job for each group, leaves it to them: the groups would not find each other."""
    task = {**SLURM, "SLURM_JOB_ID": "77", **AT}
    assert resolve(task, devices=2).job_id == "77"
    assert (
        resolve({**task, "REPLICA_GROUP_ID": "0", "NUM_REPLICA_GROUPS": "2"}, devices=1).job_id
        == ""
    )
    node = {"NODE_RANK": "1", "SLURM_JOB_ID": "77", **AT}
    assert resolve({**node, "SLURM_NNODES": "3"}, devices=4, num_nodes=3).job_id == "77"
    assert resolve({**node, "SLURM_NNODES": "1"}, devices=4, num_nodes=3).job_id == ""
    supervisor = replace(resolve({}, devices=2), job_id="run-1")
    for said, told in ({}, "run-1"), ({"FT_JOB_ID": "mine"}, "mine"):
        assert child_environment(said, supervisor, number=0)["FT_JOB_ID"] == told
