"""A program that ends while Gloo still holds an operation that it has lost. Argument: native or
rebuild. Two members are revoked in the midst of a large all-reduce until that happens.
"""

from __future__ import annotations

import random
import sys
import time

import torch

from ft_core.process_group import ProcessGroupError
from ft_core.process_group.gloo_sockets import orphaned_operations
from tests.ft_core.process_group.members import configure, gloo_groups

OPERATION_S = 3.0
ROUNDS = 300
INTO_THE_END_S = 0.4
"""Gloo gives the operation up this long after the interpreter has begun to end."""


def main() -> None:
    tensors = [torch.ones(16_000_000) for _ in range(2)]
    with gloo_groups(2, native=sys.argv[1] == "native", timeout_s=OPERATION_S) as groups:
        for quorum_id in range(1, ROUNDS):
            configure(groups, quorum_id)
            works = [
                group.allreduce([tensor]) for group, tensor in zip(groups, tensors, strict=True)
            ]
            time.sleep(0.02 * random.random())
            for group in groups:
                group.revoke(RuntimeError("in the midst of it"))
            for work in works:
                try:
                    work.wait()
                except ProcessGroupError:
                    pass
            if lost := list(orphaned_operations.due.values()):
                break
    due = max(lost)  # a ValueError: Gloo has lost none
    time.sleep(max(0.0, due - INTO_THE_END_S - time.monotonic()))


if __name__ == "__main__":
    main()
