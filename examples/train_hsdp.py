# python examples/train_hsdp.py
"""Fault-tolerant HSDP: a transformer whose shards are spread over the ranks of a replica group (FSDP2, with
`--tensor 2` tensor parallelism, too), and whose gradients are averaged over replica groups that come and go.

The command starts two replica groups of two processes each, kills one process in the middle of a step,
and starts its group again, as a launcher does. The other group trains on; the group that comes back
heals, each rank its own shards. Exit code 0 only if both groups end with equal weights, bit for bit.
Where there are fewer GPUs than processes, these share them.

`train()` is all that a script of your own needs. It takes its place from the variables that torchrun
sets, too:  REPLICA_GROUP_ID=0 NUM_REPLICA_GROUPS=2 torchrun --nproc_per_node 2 examples/train_hsdp.py
"""

import argparse
import hashlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ft_core import (
    Manager,
    Optimizer,
    ProcessGroupGloo,
    ProcessGroupNCCL,
    init_process_group,
    replicate,
)
from ft_core.launch.rank_group import group_command
from lighthouse import LighthouseServer

GROUPS, SHARDS = 2, 2
WORDS, LENGTH = 32, 16

parser = argparse.ArgumentParser(description="Fault-tolerant HSDP")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--kill-at", type=int, default=60, help="step in which a process is killed")
parser.add_argument("--pace-s", type=float, default=0.05, help="a step takes at least this long")
parser.add_argument("--tensor", type=int, default=1, help="ranks that share a matrix of the MLPs")
parser.add_argument("--gloo", action="store_true", help="between the groups, also on GPUs")
args = parser.parse_args()
RANKS = SHARDS * args.tensor
"""Of a group."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.mix(self.before(x)).chunk(3, dim=-1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(F.gelu(self.up(self.after(x))))


class Transformer(nn.Module):
    def __init__(self, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, WORDS)

    def forward(self, words):
        x = self.words(words) + self.places.weight[: words.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(step: int, shard: int, device: torch.device) -> torch.Tensor:
    """Sequences that count in steps of their own: 3 7 11 15 ... The samples follow from the step."""
    generator = torch.Generator().manual_seed(1000 * step + shard)
    first, by = torch.randint(0, WORDS, (2, 16, 1), generator=generator)
    return ((first + by * torch.arange(LENGTH + 1)) % WORDS).to(device)


def train() -> None:
    """One rank of one replica group."""
    rank, group = int(os.environ["RANK"]), int(os.environ.get("REPLICA_GROUP_ID", 0))
    groups = int(os.environ.get("NUM_REPLICA_GROUPS", 1))
    print(f"rank {rank} is process {os.getpid()}", flush=True)
    on_gpus, number = torch.cuda.is_available(), group * RANKS + rank
    device = torch.device("cpu")
    if on_gpus:
        device = torch.device("cuda", number % torch.cuda.device_count())
        torch.cuda.set_device(device)
        if torch.cuda.device_count() < GROUPS * RANKS:  # NCCL takes one process a GPU and host
            os.environ["NCCL_HOSTID"] = str(number)
    torch.set_num_threads(1)

    # ---- inside the group: FSDP2 over its ranks, with a process group of torch's own
    init_process_group("nccl" if on_gpus else "gloo")
    names = ("shard", "tensor")
    mesh = init_device_mesh(device.type, (SHARDS, args.tensor), mesh_dim_names=names)
    torch.manual_seed(group)  # replica groups may start with different weights
    model = Transformer().to(device)
    for block in model.blocks:
        if args.tensor > 1:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tensor"], plan)
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    one_mesh = args.tensor == 1  # else torch neither clips nor updates all parameters in one call
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=None if one_mesh else False)

    # ---- between groups: a quorum
    def state_dict() -> dict:
        return {"model": model.state_dict(), "optimizer": adamw.state_dict()}

    def load_state_dict(state: dict) -> None:
        model.load_state_dict(state["model"])
        adamw.load_state_dict(state["optimizer"])
        if rank == 0:
            print("healed", flush=True)

    manager = Manager(
        pg=ProcessGroupNCCL() if on_gpus and not args.gloo else ProcessGroupGloo(),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        use_async_quorum=False,  # a group that comes back begins with a step that counts
    )
    replicate(model, manager)
    optimizer = Optimizer(manager, adamw)

    def finished() -> bool:
        """After the last step; a group that is away is waited for, so that all end alike."""
        outcome = manager.last_outcome()
        all_there = outcome is not None and outcome.participants == groups
        return manager.current_step() >= args.steps and all_there

    while not finished():
        began = time.perf_counter()
        optimizer.zero_grad()  # begins a step: joins a quorum, and heals if this group is behind
        step = manager.current_step()
        words = batch(step, number // args.tensor, device)  # ranks that share a matrix: the same
        loss = F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        loss.backward()  # FSDP reduces over the group's ranks, and the manager over the groups
        if one_mesh:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()  # votes; updates the shards if all voted yes
        if rank == 0 and optimizer.step_was_skipped:
            print(f"step {step} discarded: {manager.last_outcome().reason}", flush=True)
        elif rank == 0 and step % 10 == 0:
            participants = manager.last_outcome().participants
            print(f"step {step} loss {loss.item():.3f} participants {participants}", flush=True)
        time.sleep(max(0.0, began + args.pace_s - time.perf_counter()))
    weights = hashlib.sha256()
    for parameter in model.parameters():
        weights.update(parameter.full_tensor().detach().cpu().numpy().tobytes())
    if rank == 0:
        print(f"done: loss {loss.item():.3f}, weights {weights.hexdigest()[:16]}", flush=True)
    dist.barrier()  # the group's ranks leave together
    manager.shutdown(finished=True)
    dist.destroy_process_group()


# ---- the rest is the demonstration: what a launcher does, and a kill


class Group:
    """A replica group's processes, which end together, and what they print."""

    def __init__(self, number: int, lighthouse: str) -> None:
        self.pids: dict[int, int] = {}
        self.step, self.done = 0, ""
        self._number = number
        own = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        own |= {
            "TORCHFT_LIGHTHOUSE": lighthouse,
            "REPLICA_GROUP_ID": str(number),
            "NUM_REPLICA_GROUPS": str(GROUPS),
            "PYTHONPATH": os.pathsep.join(
                [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
            ),
            "OMP_NUM_THREADS": "1",
            "FT_SUPERVISOR": str(os.getpid()),
        }
        command = [sys.executable, *sys.argv]
        self.process = subprocess.Popen(
            group_command(command, RANKS),
            env=own,
            stdout=subprocess.PIPE,
            text=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            say(f"group {self._number}: {line.rstrip()}")
            # Unbuffered, lines of two ranks may run into each other.
            for rank, pid in re.findall(r"rank (\d+) is process (\d+)", line):
                self.pids[int(rank)] = int(pid)
            if found := re.match(r"step (\d+)", line):
                self.step = int(found[1])
            if found := re.match(r"done: .*weights (\w+)", line):
                self.done = found[1]


def say(text: str) -> None:
    print(f"{time.perf_counter() - BEGAN:6.1f} s  {text}", flush=True)


def demonstrate() -> int:
    with LighthouseServer() as lighthouse:
        groups = [Group(number, lighthouse.address()) for number in range(GROUPS)]
        kills = 1
        while True:
            codes = [group.process.poll() for group in groups]
            if codes[0] not in (None, 0) or (codes[1] not in (None, 0) and kills):
                say(f"FAILED: groups ended with {codes}")
                return 1
            if kills and groups[1].step >= args.kill_at:
                kills, victim = 0, groups[1].pids[1]
                say(f"SIGKILL to rank 1 of group 1, process {victim}")
                os.kill(victim, signal.SIGKILL)
                groups[1].process.wait()
                say("group 1 has ended as a whole: started again")
                groups[1] = Group(1, lighthouse.address())
            elif all(group.done for group in groups) and codes == [0] * GROUPS:
                break
            time.sleep(0.02)
    if groups[0].done != groups[1].done:
        say("FAILED: the groups hold different weights")
        return 1
    say("survived: both replica groups hold the same weights")
    return 0


if __name__ == "__main__":
    BEGAN = time.perf_counter()
    if "RANK" in os.environ:
        train()
    else:
        raise SystemExit(demonstrate())
