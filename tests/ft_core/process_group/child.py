"""A member of a process group in a process of its own: see test_processes.Child."""

from __future__ import annotations

import sys

import torch

from ft_core.process_group import ProcessGroupGloo


def main() -> None:
    group = ProcessGroupGloo(30.0, hostname="127.0.0.1")
    print(group.address().decode(), flush=True)
    addresses = [address.encode() for address in sys.stdin.readline().split()]
    group.configure(1, int(sys.stdin.readline()), addresses, 30.0)
    print("configured", flush=True)
    for line in sys.stdin:
        tensor = torch.ones(int(line))
        group.allreduce([tensor]).wait()
        print("reduced", tensor[0].item(), flush=True)


if __name__ == "__main__":
    main()
