"""How the ranks of a replica group find each other in its store, also in a group that torchrun starts again."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ft_core import init_process_group
from ft_core.config import JobOptions
from ft_core.errors import QuorumUnavailable
from ft_core.launch.rank_group import free_port
from ft_core.replica.status import INITIAL, RanksHold
from ft_core.shell.group_server import GroupRendezvous
from ft_core.shell.group_store import RollCall, group_store
from tests.harness.cluster import replicas
from tests.harness.waiting import PATIENCE_S

SCRIPT = """
import os, pathlib, signal, sys
import torch, torch.distributed as dist
from ft_core import init_process_group

init_process_group("gloo")
rank, total = dist.get_rank(), torch.ones(1)
dist.all_reduce(total)
first = pathlib.Path(sys.argv[1], f"rank {rank} has begun")
life = 2 if first.exists() else 1
line = f"life {life}, rank {rank}: {int(total)} ranks\\n"
os.write(1, line.encode())  # whole: print would write the line end apart
if life == 1:
    first.touch()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()  # until torchrun ends it: an end of its own would count as a restart
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("machines", [1, 2])
def test_ranks_that_torchrun_starts_again_find_each_other(machines: int, tmp_path: Path) -> None:
    """torchrun's store still has the addresses of those before; torch's own groups take them. Of two machines only
    that of the rank that died counts a restart."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--max-restarts=1"]
    if machines == 1:
        torchrun += ["--nproc-per-node=2", f"--master-port={free_port()}"]
    else:
        where = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
        torchrun += ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", where]
    options: dict[str, Any] = {"stdout": PIPE, "stderr": PIPE, "text": True}
    agents = [Popen([*torchrun, str(script), str(tmp_path)], **options) for _ in range(machines)]
    said = [agent.communicate(timeout=PATIENCE_S) for agent in agents]
    assert [agent.returncode for agent in agents] == [0] * machines, said
    lines = {line for out, _ in said for line in out.splitlines()}
    assert {"life 2, rank 0: 2 ranks", "life 2, rank 1: 2 ranks"} <= lines


def stores(ranks: int) -> list[Any]:
    """One store, as each of `ranks` ranks reaches it."""
    port = free_port()
    return [group_store("127.0.0.1", port, PATIENCE_S, hosts=rank == 0) for rank in range(ranks)]


def test_what_an_earlier_life_left_answers_no_roll_call() -> None:
    """It died at any point of its own."""
    ranks = stores(3)

    def call(rank: int) -> str:
        return RollCall("here", rank, 3).key(ranks[rank], PATIENCE_S)

    lives = [replicas(*[partial(call, rank) for rank in range(3)]) for _ in range(2)]
    with pytest.raises(dist.DistStoreError, match="has not answered within 0.01 s"):
        RollCall("here", 0, 3).key(ranks[0], 0.01)  # both others of the last life are in the store
    lives.append(replicas(*[partial(call, rank) for rank in range(3)]))
    with pytest.raises(dist.DistStoreError):
        RollCall("here", 2, 3).key(ranks[2], 0.01)  # so is its rank 0
    lives.append(replicas(*[partial(call, rank) for rank in range(3)]))
    assert all(len({*keys}) == 1 for keys in lives)
    assert len({keys[0] for keys in lives}) == len(lives)


def test_a_rank_may_be_at_its_next_roll_call_while_others_are_at_this_one() -> None:
    ranks = stores(2)

    def call(rank: int) -> list[str]:
        return [RollCall("here", rank, 2).key(ranks[rank], PATIENCE_S) for _ in range(50)]

    first, second = replicas(partial(call, 0), partial(call, 1))
    assert first == second
    assert len({*first}) == 50


def test_a_roll_call_that_was_given_up_is_made_again() -> None:
    ranks = stores(2)
    calls = [RollCall("here", rank, 2) for rank in range(2)]
    for rank in (0, 1, 0):  # so that rank 1 has its answer
        with pytest.raises(dist.DistStoreError):
            calls[rank].key(ranks[rank], 0.0)
    keys = [calls[rank].key(ranks[rank], PATIENCE_S) for rank in (1, 0)]
    assert keys[0] == keys[1]


@pytest.mark.parametrize("hold", RanksHold)
def test_rank_0_waits_for_what_each_rank_begins_with(hold: RanksHold) -> None:
    """A rank's answer to the roll call was taken for it where the rank came with its own a moment later: the ranks
    began with unlike lineages, a group that no quorum takes."""
    where = {"group_world_size": 2, "store_addr": "127.0.0.1", "store_port": free_port()}
    ranks = [
        GroupRendezvous(JobOptions(name="g", group_rank=rank, ranks_hold=hold, **where))
        for rank in range(2)
    ]

    def agree(rank: int) -> str:
        return ranks[rank].from_rank_0("kept", lambda: "version", PATIENCE_S)

    def meet(rank: int, limit_s: float) -> str:
        return ranks[rank].meet(f"{INITIAL}{rank}", limit_s, lambda: f"{INITIAL}0")

    assert replicas(partial(agree, 0), partial(agree, 1)) == ["version", "version"]
    with pytest.raises(QuorumUnavailable, match="not all 2 ranks"):
        meet(0, 0.01)
    with pytest.raises(QuorumUnavailable):
        meet(1, 0.01)  # rank 0 has not announced the leader
    of_group, again = meet(0, PATIENCE_S), meet(0, PATIENCE_S)
    assert of_group == again != f"{INITIAL}1"
    assert (of_group == f"{INITIAL}0") == (hold is RanksHold.COPIES)


def test_without_a_launcher_it_is_this_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    init_process_group("gloo")
    try:
        total = torch.ones(1)
        dist.all_reduce(total)
        assert (dist.get_world_size(), total.item()) == (1, 1.0)
    finally:
        dist.destroy_process_group()
