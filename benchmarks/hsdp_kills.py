"""python benchmarks/hsdp_kills.py [--kills N] [--groups G] [--shards S] [--tensor T] [--json FILE]

Replica groups of S x T ranks (FSDP2 over S of them, 2 by default, and tensor parallelism over T, 1 by default), of which
one rank is killed (SIGKILL) again and again: in each phase of a step in turn, each rank of each group. Its group is
started again, as a launcher does, and heals. Measured for each kill:

- healthy groups that are lost;
- from the SIGKILL to the survivors' next committed step, less the time of one step;
- from the SIGKILL to the end of the dead rank's siblings. In a group of two no launcher ends the other one here; in
  larger ones all are ended, as by a launcher.

At the end all groups must hold the same weights and moments.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import multiprocessing as mp
import os
import signal
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import arguments, report

LIMIT = timedelta(seconds=60)
PHASES = ("begin", "gather", "forward", "backward", "reduce", "vote", "optimizer", "heal")
"""Between two steps; while the other ranks of its group are in FSDP's all-gather; between two all-gathers;
between two reductions; with a reduction across the groups under way; before the vote; between the commit and
the update; while the group that comes back takes its state."""
BEGIN, HEAL = PHASES.index("begin"), PHASES.index("heal")
PATIENCE_S = 120.0
SETTLED = 5
"""Steps with all groups before the next kill."""


class Rank:
    """One rank of a group. `shared`: what all processes see, see `main`."""

    def __init__(self, group: int, rank: int, pace_s: float, shared: Any) -> None:
        self.group, self.rank, self.pace_s = group, rank, pace_s
        self.shared, self.number = shared, group * shared.ranks + rank

    def at(self, phase: str) -> None:
        """Die here, if it is this rank's turn."""
        order = self.shared.order
        if order[0] == self.number and PHASES[order[1]] == phase:
            self.shared.killed_at.value = time.monotonic()
            os.kill(os.getpid(), signal.SIGKILL)

    def model(self) -> Any:
        import torch
        from torch import nn
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        torch.manual_seed(self.group)  # groups begin with weights of their own
        layers = [
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)
        ]
        model = nn.Sequential(*layers)
        mesh = init_device_mesh("cpu", self.shared.sizes, mesh_dim_names=("shard", "tensor"))
        for layer in layers:
            if self.shared.sizes[1] > 1:
                plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
                parallelize_module(layer, mesh["tensor"], plan)
            fully_shard(layer, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
        layers[2].register_forward_pre_hook(lambda *_: self.at("gather"), prepend=True)
        layers[2].register_forward_pre_hook(lambda *_: self.at("forward"))
        layers[2].register_full_backward_pre_hook(lambda *_: self.at("backward"))
        return model

    def train(self, lighthouse: str, port: int) -> None:
        import torch
        import torch.distributed as dist

        from ft_core import Manager, Optimizer, ProcessGroupGloo, replicate

        torch.set_num_threads(1)
        store = dist.TCPStore("127.0.0.1", port, None, False, LIMIT)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("inner", store),
            rank=self.rank,
            world_size=self.shared.ranks,
            timeout=LIMIT,
        )
        model = self.model()
        inner = torch.optim.AdamW(model.parameters())
        inner.register_step_pre_hook(lambda *_: self.at("optimizer"))

        class Watched(ProcessGroupGloo):
            def issue(group, *args: Any, **kwargs: Any) -> Any:
                work = super().issue(*args, **kwargs)
                self.at("reduce")
                return work

        def load(state: dict[str, Any]) -> None:
            self.at("heal")
            model.load_state_dict(state["model"])
            inner.load_state_dict(state["optimizer"])

        manager = Manager(
            Watched(timeout=LIMIT),
            state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
            load_state_dict=load,
            lighthouse_addr=lighthouse,
            replica_id=str(self.group),
            timeout=LIMIT,
            expected_replicas=self.shared.groups,
            rank=self.rank,
            world_size=self.shared.ranks,
            store_addr="127.0.0.1",
            store_port=port,
            use_async_quorum=False,
        )
        replicate(model, manager)
        optimizer = Optimizer(manager, inner)
        seed = self.number // self.shared.sizes[1]  # one batch for ranks that share each layer
        data = torch.randn(16, 64, generator=torch.Generator().manual_seed(seed))
        self._loop(manager, optimizer, model, inner, data)

    def _loop(self, manager: Any, optimizer: Any, model: Any, inner: Any, data: Any) -> None:
        shared, began = self.shared, time.monotonic()
        while True:
            self.at("begin")
            optimizer.zero_grad()
            time.sleep(self.pace_s)  # stands for what a larger model would compute
            model(data).square().mean().backward()
            self.at("vote")
            optimizer.step()
            now = time.monotonic()
            if not optimizer.step_was_skipped:
                participants = manager.last_outcome().participants
                shared.participants[self.number] = participants
                if participants == shared.groups:
                    shared.steps[self.number] += 1
                    shared.seconds[self.number] = now - began
                if shared.killed_at.value and not shared.again_at[self.number]:
                    shared.again_at[self.number] = now
                began = now
            if shared.digest_at.value and manager.current_step() == shared.digest_at.value:
                shared.digests.put((self.number, digest(model, inner)))
                time.sleep(PATIENCE_S)  # until it is ended


def digest(model: Any, inner: Any) -> str:
    mixer = hashlib.blake2b(digest_size=8)
    for parameter in model.parameters():
        for value in (parameter, *inner.state[parameter].values()):
            part = value.detach()
            part = part.to_local() if hasattr(part, "to_local") else part
            mixer.update(part.contiguous().numpy().tobytes())
    return mixer.hexdigest()


class Shared:
    """What all processes see. `order`: number of the rank that is to die, and the phase."""

    def __init__(self, context: Any, groups: int, sizes: tuple[int, int]) -> None:
        self.groups, self.sizes, self.ranks = groups, sizes, math.prod(sizes)
        ranks = groups * self.ranks
        self.order = context.Array("i", [-1, 0], lock=False)
        self.killed_at, self.digest_at = context.Value("d", 0.0), context.Value("i", 0)
        self.again_at, self.seconds = (context.Array("d", ranks, lock=False) for _ in range(2))
        self.participants, self.steps = (context.Array("i", ranks, lock=False) for _ in range(2))
        self.digests = context.Queue()


def rank_main(rank: Rank, lighthouse: str, port: int) -> None:
    rank.train(lighthouse, port)


class Groups:
    """All replica groups' processes, in the place of launchers."""

    def __init__(self, context: Any, lighthouse: str, options: Any) -> None:
        self.context, self.lighthouse, self.options = context, lighthouse, options
        self.shared = Shared(context, options.groups, (options.shards, options.tensor))
        self.processes: dict[int, Any] = {}
        self.stores: dict[int, Any] = {}

    def start(self, group: int) -> None:
        import torch.distributed as dist

        store = dist.TCPStore("127.0.0.1", 0, None, True, LIMIT, wait_for_workers=False)
        self.stores[group] = store
        for rank in range(self.shared.ranks):
            one = Rank(group, rank, self.options.pace_s, self.shared)
            self.shared.steps[one.number] = 0
            process = self.context.Process(
                target=rank_main, args=(one, self.lighthouse, store.port), daemon=True
            )
            process.start()
            self.processes[one.number] = process

    def until(self, condition: Any, what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > deadline:
                raise SystemExit(f"waited in vain for {what}")
            time.sleep(0.001)

    def settle(self) -> None:
        """Wait until all groups have trained together."""
        steps = self.shared.steps
        for number in self.processes:
            steps[number] = 0
        self.until(lambda: min(steps) >= SETTLED, "all groups to train")

    def kill(self, number: int, phase: int) -> dict[str, Any]:
        """Kill a rank in a phase; its group is started again."""
        shared, ranks = self.shared, self.shared.ranks
        group = number // ranks
        self.settle()
        step_s = statistics.median(shared.seconds)
        healthy = [n for n in self.processes if n // ranks != group]
        if phase == HEAL:
            self._die(number, BEGIN, healthy)
            shared.order[1], shared.order[0] = phase, number
            self.start(group)
        killed_at, sibling_s = self._die(number, phase, healthy)
        self.until(lambda: all(shared.again_at[n] for n in healthy), "the survivors")
        lost = {n // ranks for n in healthy if self.processes[n].exitcode is not None}
        again_s = max(shared.again_at[n] for n in healthy) - killed_at
        self.start(group)
        return {
            "rank": number,
            "phase": PHASES[phase],
            "lost_groups": len(lost),
            "step_s": step_s,
            "beyond_s": again_s - step_s,
            "sibling_s": sibling_s,
        }

    def _die(self, number: int, phase: int, healthy: list[int]) -> tuple[float, float]:
        """When a rank was killed, and how long its group's other ranks have lived on."""
        shared = self.shared
        for n in healthy:
            shared.again_at[n] = 0.0
        shared.killed_at.value = 0.0
        shared.order[1], shared.order[0] = phase, number
        self.until(lambda: self.processes[number].exitcode is not None, "the kill")
        shared.order[0] = -1
        siblings = set(self.processes) - {number, *healthy}
        if shared.ranks > 2:
            for n in siblings:
                self.processes[n].kill()
        self.until(
            lambda: all(self.processes[n].exitcode is not None for n in siblings),
            "the dead rank's sibling to end",
        )
        killed_at: float = shared.killed_at.value
        return killed_at, time.monotonic() - killed_at

    def equal(self) -> bool:
        """Whether all groups hold the same shards, rank by rank."""
        self.settle()
        self.shared.digest_at.value = self.highest() + 50
        found = dict(self.shared.digests.get(timeout=PATIENCE_S) for _ in self.processes)
        return all(found[n] == found[n % self.shared.ranks] for n in found)

    def highest(self) -> int:
        from lighthouse.client import LighthouseClient

        with LighthouseClient(self.lighthouse, timeout_s=10.0) as client:
            jobs: list[dict[str, Any]] = client.status()["jobs"]
        return max(int(job["highest_step"]) for job in jobs)

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.join()


def main() -> None:
    parser = arguments("HSDP over replica groups: kills of single ranks")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--shards", type=int, default=2, help="ranks of a group that FSDP2 is over")
    parser.add_argument("--tensor", type=int, default=1, help="... and tensor parallelism")
    parser.add_argument("--pace-s", type=float, default=0.05, help="a step takes so much longer")
    options = parser.parse_args()
    from lighthouse import LighthouseServer

    context = mp.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "torch.distributed.fsdp",
            "torch.distributed.tensor.parallel",
            "ft_core.manager",
            "ft_core.collectives.sharded",
            "ft_core.optimizer",
            "torch.optim.adamw",
            "torch._dynamo",
        ]
    )
    ranks, phases = options.groups * options.shards * options.tensor, len(PHASES)
    turns = ((sum(divmod(k, phases)) % ranks, k % phases) for k in itertools.count())
    with LighthouseServer("tcp://127.0.0.1:0") as lighthouse:
        groups = Groups(context, lighthouse.address(), options)
        try:
            for group in range(options.groups):
                groups.start(group)
            kills = [groups.kill(*turn) for turn in itertools.islice(turns, options.kills)]
            equal = groups.equal()
        finally:
            groups.end()
    rows = []
    for phase in (*PHASES, "all"):
        of = [kill for kill in kills if phase in (kill["phase"], "all")]
        if of:
            beyond, sibling = (
                sorted(1e3 * k[key] for k in of) for key in ("beyond_s", "sibling_s")
            )
            rows.append(
                (
                    phase,
                    len(of),
                    sum(k["lost_groups"] for k in of),
                    *(f"{median_and_most(each)}" for each in (beyond, sibling)),
                )
            )
    title = (
        f"{options.groups} groups, FSDP2 over {options.shards} and TP over {options.tensor} inside"
    )
    columns = [
        "killed in",
        "kills",
        "healthy groups lost",
        "survivors beyond a step, ms",
        "sibling's end, ms",
    ]
    report(title, columns, rows, {"kills": kills, "equal": equal}, options.json)
    print(
        f"step {1e3 * statistics.median(k['step_s'] for k in kills):.0f} ms; all groups equal: {equal}"
    )
    raise SystemExit(0 if equal and not any(k["lost_groups"] for k in kills) else 1)


def median_and_most(values: list[float]) -> str:
    return f"{statistics.median(values):.0f} (most {values[-1]:.0f})"


if __name__ == "__main__":
    main()
