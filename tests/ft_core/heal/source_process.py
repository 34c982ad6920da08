"""A source of a heal as a process of its own: see support.SourceProcess."""

from __future__ import annotations

import sys

from ft_core.heal import HealServer
from tests.ft_core.heal.support import KEY, state


def main() -> None:
    megabytes, seed, live = (int(arg) for arg in sys.argv[1:])
    tree = state(megabytes, seed)
    with HealServer(host="127.0.0.1") as server:
        server.publish(KEY, tree, copy=not live)
        print(server.address, flush=True)
        for line in sys.stdin:
            if line.strip() == "train":  # what an optimizer does at the next step boundary
                took = server.freeze()
                for tensor in tree.values():
                    if hasattr(tensor, "add_"):
                        tensor.add_(1)
                print(took, flush=True)
            elif line.strip() == "retire":
                server.retire()
                print("retired", flush=True)
            elif line.strip() == "sent":
                print(server.stats().bytes_sent + server.stats().bytes_lent, flush=True)


if __name__ == "__main__":
    main()
