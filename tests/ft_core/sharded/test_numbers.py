"""Two replica groups of two ranks train as torch's own 2-D HSDP over the same four does, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import ExitStack

import pytest
from torch.distributed.fsdp import FSDPModule

from tests.harness import workers
from tests.harness.cluster import lighthouse, rendezvous
from tests.harness.waiting import PATIENCE_S

CASES = [
    "plain",
    "accumulate",
    "clip",
    "mixed",
    "half",
    "tied",
    "skipped",
    "tensor",
    "reentrant",
    "together",
]
"""Also: accumulated without synchronization; clipped by the norm of DTensors; of other dtypes; with a
parameter that two modules share; with a block that a step leaves out; with tensor parallelism inside; with
activations that are computed again, reentrant; and all at once: mixed precision, accumulated, clipped, tied, activations
that are computed again, weights that stay gathered, an asynchronous quorum."""
if hasattr(FSDPModule, "set_reduce_scatter_unused_params"):  # not in torch 2.11
    CASES.append("unused")


@pytest.mark.process
def test_numbers_are_those_of_torchs_hsdp() -> None:
    with lighthouse(all_join=True) as server, rendezvous(3) as stores, ExitStack() as stack:
        ports = ",".join(str(store.port) for store in stores)
        ranks = []
        for rank in range(4):
            command = ["-m", "tests.ft_core.sharded.like_torch", str(rank), ports, server.address()]
            ranks.append(
                workers.start("torch", [*command, *CASES], env=os.environ, stdout=subprocess.PIPE)
            )
            stack.callback(ranks[-1].end)
        found = []
        for each in ranks:
            assert each.stdout is not None
            found.append(json.loads(each.stdout.readline()))
            assert each.wait(PATIENCE_S) == 0
    for case in CASES:
        for rank in range(4):
            torchs, ours = found[rank][case]
            assert torchs == ours, f"{case}, rank {rank}"
        first = [ours for _, ours in (found[rank][case] for rank in range(4))]
        assert first[:2] == first[2:], "both groups hold the same shards"
        assert len(set(first)) == 2
