"""Who a process is, from what its launcher and its user said."""

from __future__ import annotations

import pytest

from ft_lightning.scope import Role, child_environment, resolve

AT = {"TORCHFT_LIGHTHOUSE": "tcp://host:1"}
SLURM = {"SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_JOB_NAME": "train"}


def test_slurm_tasks_are_replica_groups() -> None:
    scope = resolve({**SLURM, "SLURM_NNODES": "2", **AT}, devices=2, num_nodes=2)
    assert (scope.role, scope.name, scope.index, scope.num_groups) == (Role.MEMBER, "3", 3, 4)
    assert scope.device == 1
    assert resolve({**SLURM, "SLURM_RESTART_COUNT": "1"}, devices=2).restarts == 1
    # In a shell on a node people start what they like; an explicit name always wins.
    assert resolve({**SLURM, "SLURM_JOB_NAME": "bash"}, devices=2).role is Role.SUPERVISOR
    named = {**SLURM, "REPLICA_GROUP_ID": "0", "NUM_REPLICA_GROUPS": "2"}
    assert (resolve(named, devices=1).index, resolve(named, devices=1).num_groups) == (0, 2)


def test_one_group_a_node() -> None:
    scope = resolve({"NODE_RANK": "1", **AT}, devices=1, num_nodes=3)
    assert (scope.role, scope.name, scope.index, scope.num_groups) == (Role.MEMBER, "1", 1, 3)


def test_several_groups_on_each_node() -> None:
    node = resolve({"NODE_RANK": "1"}, devices=2, num_nodes=3, lighthouse="tcp://h:1")
    assert (node.role, node.index, node.num_groups) == (Role.SUPERVISOR, 2, 6)
    assert node.supervised == 2
    env = child_environment(
        {"NODE_RANK": "1"}, node, number=1, lighthouse="tcp://h:1", supervisor_pid=42, restarts=0
    )
    child = resolve(env, devices=2, num_nodes=3)
    assert (child.role, child.index, child.num_groups, child.device) == (Role.MEMBER, 3, 6, 1)


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
    env = child_environment(
        {"WORLD_SIZE": "1", "LOCAL_RANK": "0", "PATH": "/bin"},
        resolve({}, devices=3),
        number=1,
        lighthouse="tcp://h:1",
        supervisor_pid=42,
        restarts=2,
    )
    assert "WORLD_SIZE" not in env
    assert "LOCAL_RANK" not in env
    assert env["PATH"] == "/bin"
    assert env["TORCHFT_LIGHTHOUSE"] == "tcp://h:1"
    scope = resolve(env, devices=3)
    assert (scope.role, scope.index, scope.num_groups) == (Role.MEMBER, 1, 3)
    assert (scope.device, scope.supervisor_pid, scope.restarts) == (1, 42, 2)


def test_arguments_beat_the_environment() -> None:
    env = {"REPLICA_GROUP_ID": "2", "NUM_REPLICA_GROUPS": "3"}
    scope = resolve(env, devices=1, num_replica_groups=4, replica_name="blue")
    assert (scope.name, scope.index, scope.num_groups) == ("blue", 2, 4)


@pytest.mark.parametrize(
    ("env", "options", "says"),
    [
        ({"WORLD_SIZE": "2"}, {"devices": 1}, "WORLD_SIZE is 2"),
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
        resolve(env, **options)  # type: ignore[arg-type]
