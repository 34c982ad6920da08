"""One of four processes: trains a model under torch's own 2-D HSDP, and again as two replica groups.

`python -m tests.ft_core.sharded.like_torch RANK PORTS LIGHTHOUSE CASE ...`. PORTS: of the store of all
four, and of each group. Prints a JSON object: for each case the digests of this rank's shards (weights
and moments) after the steps, of both kinds.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from ft_core import Manager, Optimizer, ProcessGroupGloo
from ft_core.collectives.sharded import replicate
from tests.ft_core.sharded.model import Transformer

STEPS = 4
IMPLEMENTATIONS = {
    "together": CheckpointImpl.NO_REENTRANT,
    "reentrant": CheckpointImpl.REENTRANT,
}
LIMIT = timedelta(seconds=120)


def build(case: str, data: DeviceMesh, tensor: DeviceMesh | None) -> Transformer:
    """A model whose data-parallel dimensions are those of `data`: one of a group, or two of torch's."""
    torch.manual_seed(7)
    together = case == "together"
    model = Transformer(tied=case == "tied" or together)
    if tensor is not None:
        for block in model.blocks:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, tensor, plan)
    options: dict[str, Any] = {"mesh": data}
    if case == "mixed":
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if case == "half":
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    if together:
        options |= {
            "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
            "reshard_after_forward": False,
        }
    if together or case == "reentrant":
        wrap = partial(checkpoint_wrapper, checkpoint_impl=IMPLEMENTATIONS[case])
        apply_activation_checkpointing(model, wrap, check_fn=lambda each: each in model.blocks)
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    if case == "unused":
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_reduce_scatter_unused_params(True)
    return model


def train(case: str, model: Transformer, optimizer: Any, step_no: Callable[[], int]) -> str:
    """The digest of this rank's part after `STEPS` steps. The same batches in both kinds."""
    rank, micro = dist.get_rank(), 2 if case in ("accumulate", "together") else 1
    while (step := step_no()) < STEPS:
        optimizer.zero_grad()
        for part in range(micro):
            generator = torch.Generator().manual_seed(
                100 * step + 10 * part + _data_rank(case, rank)
            )
            tokens = torch.randint(0, 32, (2, 9), generator=generator)
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(part == micro - 1)
            model(
                tokens[:, :-1], tokens[:, 1:], skip=case in ("skipped", "unused") and step == 1
            ).backward()
        if case in ("clip", "together"):
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            assert float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm) > 0.1
        optimizer.step()
    mixer = hashlib.blake2b(digest_size=8)
    for parameter in model.parameters():
        values = [parameter, *optimizer.state[parameter].values()]
        for value in values:
            mixer.update(local(value).contiguous().view(torch.uint8).numpy().tobytes())
    return mixer.hexdigest()


def _data_rank(case: str, rank: int) -> int:
    return rank // 2 if case == "tensor" else rank


def local(value: Tensor) -> Tensor:
    part: Tensor = value.detach().to_local() if hasattr(value, "to_local") else value.detach()
    return part.reshape(-1)


def torchs_own(case: str) -> str:
    names = ("replicate", "shard", "tensor")
    sizes = (2, 1, 2) if case == "tensor" else (2, 2, 1)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    model = build(case, mesh["replicate", "shard"], mesh["tensor"] if case == "tensor" else None)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    done = [0]

    def step_no() -> int:
        done[0] += 1
        return done[0] - 1

    return train(case, model, inner, step_no)


def ours(case: str, lighthouse: str, port: int) -> str:
    names = ("group", "shard", "tensor")
    sizes = (2, 1, 2) if case == "tensor" else (2, 2, 1)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    model = build(case, mesh["shard"], mesh["tensor"] if case == "tensor" else None)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    group, rank = divmod(dist.get_rank(), 2)
    manager = Manager(
        ProcessGroupGloo(timeout=LIMIT),
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        load_state_dict=lambda state: None,
        lighthouse_addr=lighthouse,
        replica_id=str(group),
        job_id=case,
        expected_replicas=2,
        min_replica_size=2,
        rank=rank,
        world_size=2,
        store_addr="127.0.0.1",
        store_port=port,
        use_async_quorum=case == "together",
        timeout=LIMIT,
        watch_process=False,
    )
    if case == "plain":
        refusals(model, manager)
    assert replicate(model, manager) is model
    digest = train(case, model, Optimizer(manager, inner), manager.current_step)
    dist.barrier()  # all have committed: none is left alone in its last step
    manager.shutdown()
    return digest


def refusals(model: Transformer, manager: Manager) -> None:
    """What would leave a gradient that is not averaged."""
    wrong: list[tuple[nn.Module, dict[str, Any], str]] = [
        (nn.Linear(2, 2), {}, "fully_shard"),
        (nn.Sequential(model, nn.Linear(2, 2)), {}, "'1.weight' (2 such parameters)"),
        (model, {"reduce_op": dist.ReduceOp.MAX}, "AVG or SUM"),
    ]
    for module, options, text in wrong:
        with pytest.raises(ValueError, match=re.escape(text)):
            replicate(module, manager, **options)


def main(rank: str, ports: str, lighthouse: str, *cases: str) -> None:
    torch.set_num_threads(1)
    world, *groups = (int(port) for port in ports.split(","))
    store = dist.TCPStore("127.0.0.1", world, None, False, LIMIT)
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=4, timeout=LIMIT)
    found = {c: [torchs_own(c), ours(c, lighthouse, groups[int(rank) // 2])] for c in cases}
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
