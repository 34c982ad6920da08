"""A rank of a replica group that trains a `fully_shard`ed transformer, for tests that kill it."""

from __future__ import annotations

import hashlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ft_core import Manager, Optimizer, ProcessGroupGloo, replicate, state
from ft_core.collectives.agreement import agree, exchange_headers
from tests.ft_core.sharded.like_torch import local
from tests.ft_core.sharded.model import Transformer

PHASES = (
    "begin",  # between two steps
    "gather",  # in a forward, between two all-gathers
    "forward",  # forward is over, and a collective of the script comes before backward
    "backward",  # between two reductions of a backward
    "between",  # backward is over, the vote is not cast
    "load",  # the healed state has arrived and is being put in place
)


def train_shards(worker: Any, options: Any) -> None:
    state.LARGE_BYTES = 1  # small tensors are received in a step as large ones are
    limit = timedelta(seconds=options.timeout_s)
    store = dist.TCPStore("127.0.0.1", options.store_port, None, False, limit)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("inner", store),
        rank=options.rank,
        world_size=options.shards,
        timeout=limit,
    )
    mesh = init_device_mesh("cpu", (options.shards,), mesh_dim_names=("shard",))
    torch.manual_seed(options.seed)
    model = Transformer(width=options.elements, depth=2)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.blocks[1].register_forward_pre_hook(lambda *_: worker._at("gather"))
    model.blocks[1].register_full_backward_pre_hook(lambda *_: worker._at("backward"))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def load(healed: dict[str, Any]) -> None:
        worker._at("load")
        mine = model.state_dict()
        own = [local(mine[k]).data_ptr() == local(healed["model"][k]).data_ptr() for k in mine]
        worker._report("loaded", in_place=all(own))
        model.load_state_dict(healed["model"])
        inner.load_state_dict(healed["optimizer"])

    manager = Manager(
        ProcessGroupGloo(timeout=limit),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        timeout=limit,
        heartbeat_interval=timedelta(seconds=options.heartbeat_s),
        lighthouse_addr=options.lighthouse,
        replica_id=options.name,
        expected_replicas=options.expected_replicas,
        use_async_quorum=options.use_async_quorum,
        rank=options.rank,
        world_size=options.shards,
        store_addr="127.0.0.1",
        store_port=options.store_port,
    )
    replicate(model, manager)
    optimizer = Optimizer(manager, inner)
    manager.telemetry.add_sink(
        lambda event: worker._report("event", event=event.kind, t=event.wall_s, **event.data)
    )
    worker._report("began", replica_id=manager.replica_id)
    while not _stops(worker, options.pause_s):
        worker._now = manager.current_step()
        worker._at("begin")
        if not options.asks_after_forward:
            optimizer.zero_grad()
        worker._now = manager.current_step()
        seed = 1_000 * manager.current_step() + 10 * int(options.name) + options.rank
        tokens = torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(seed))
        loss = model(tokens[:, :-1], tokens[:, 1:])
        if options.asks_after_forward:
            worker._at("forward")
            _ask(manager)
            optimizer.zero_grad()
        loss.backward()
        worker._at("between")
        optimizer.step()
        _report_step(worker, manager, model, inner)
    manager.shutdown()
    dist.destroy_process_group()


def _ask(manager: Manager) -> None:
    """An operation of the script's, as an Accelerate script's `gather` is."""
    agree(
        lambda: exchange_headers(manager.step, [0]),
        begin=manager.start_quorum,
        vote=lambda: manager.should_commit(no_update=True),
        is_behind=lambda: False,
    )


def _stops(worker: Any, pause_s: float) -> bool:
    """Whether the run ends now: the ranks of a group do so together."""
    with worker._shared.changed:
        worker._shared.changed.wait_for(lambda: worker._shared.stopping, timeout=pause_s)
        stopping = torch.tensor([int(worker._shared.stopping)])
    dist.all_reduce(stopping, op=dist.ReduceOp.MIN)
    return bool(stopping.item())


def _report_step(worker: Any, manager: Manager, model: Transformer, inner: Any) -> None:
    mixer = hashlib.blake2b(digest_size=8)
    for parameter in model.parameters():
        for value in (parameter, *inner.state.get(parameter, {}).values()):
            mixer.update(local(value).contiguous().view(torch.uint8).numpy().tobytes())
    outcome, position = manager.last_outcome(), manager.state_dict()
    worker._report(
        "step",
        committed=outcome is not None and outcome.committed,
        step=position["step"],
        lineage=position["lineage"],
        digest=mixer.hexdigest(),
        reason=outcome.reason if outcome else "",
    )
