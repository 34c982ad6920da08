"""Managers train over the double of NCCL's semantics (tests/harness/nccl_double.py), and links break."""

from __future__ import annotations

import itertools

import torch

from ft_core.manager import Manager
from ft_core.process_group import ProcessGroupNCCL
from tests.harness.cluster import lighthouse, replicas
from tests.harness.nccl_double import DoubleDevice, Wires

STEPS = 12
CUT_AT = (3, 8, 13)
"""Kernels in whose midst all links break, as they are counted over both members."""


def test_no_gradient_is_committed_that_was_not_reduced() -> None:
    wires, kernels = Wires(), itertools.count(1)
    wires.delay_s = lambda: 0.001

    def queued() -> None:
        if next(kernels) in CUT_AT:
            wires.cut()

    wires.on_kernel = queued
    with lighthouse(all_join=True, min_replicas=2) as server:

        def train(index: int) -> tuple[int, list[float]]:
            device = DoubleDevice(wires, index + 1)
            weights, discarded = torch.zeros(8), 0
            manager = Manager(
                ProcessGroupNCCL(20.0, hostname="127.0.0.1", on=device),
                lambda state: weights.copy_(state["weights"]),
                lambda: {"weights": weights},
                min_replica_size=2,
                lighthouse_addr=server.address(),
                replica_id=str(index),
                expected_replicas=2,
                rank=0,
                world_size=1,
                watch_process=False,
                weighted=True,  # its factors travel in host memory
            )
            while manager.current_step() < STEPS:
                manager.start_quorum()
                manager.set_samples(1 + 2 * index)
                gradient = device.place(torch.full((8,), 4.0 * index))
                manager.allreduce(gradient).wait()
                if manager.should_commit():
                    assert gradient.tolist() == [3.0] * 8
                    weights -= gradient
                else:
                    discarded += 1
            manager.shutdown(finished=True)
            return discarded, weights.tolist()

        results = replicas(lambda: train(0), lambda: train(1))
    assert [weights for _, weights in results] == [[-3.0 * STEPS] * 8] * 2
    assert all(discarded >= 1 for discarded, _ in results)
    assert not wires.faults
