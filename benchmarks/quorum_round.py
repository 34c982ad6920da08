"""What a quorum costs: N replica groups against one lighthouse, over loopback.

    python benchmarks/quorum_round.py [--replicas 32 128 512 2048] [--rounds 20] [--json FILE]
        [--torchft-python PYTHON]

form    all join (connections are open), until each has the full member list
steady  all vote, until each has the decision: the cost of every step
change  one is gone: revoke, all others vote, until each has the decision with the next quorum

The lighthouse is the real command in a process of its own; this process plays all replica groups,
with one DEALER socket each, in one thread. So both share the machine, as in torchft's measurement
(`quorum_round_torchft.py`: one thread a replica). torchft has one kind of round, which carries the
member list every time. It is compared with those rounds of ours that a training step needs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq

# The script's own directory is on the path when it runs as a script.
from common import arguments, report, start_lighthouse

from lighthouse.client import SERVICE
from lighthouse.wire import codec
from lighthouse.wire.messages import (
    NO_TERM,
    Decision,
    JobKey,
    Join,
    Message,
    Quorum,
    Revoke,
    Status,
    StatusRequest,
    Term,
    Vote,
    Waiting,
    next_lineage,
)

JOB = JobKey("bench", "round")
PATIENCE_MS = 120_000


@contextmanager
def lighthouse() -> Iterator[str]:
    """Address of a lighthouse in a process of its own; torchft's default heartbeat timeout."""
    limits = "--join-timeout", "60", "--heartbeat-timeout", "5"
    process, address = start_lighthouse("--quiet", *limits)
    with process:
        yield address
        process.kill()


class Crowd:
    """N replica groups, each with a connection of its own."""

    def __init__(self, address: str, size: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, size + 10)
        self.ids = [f"replica_{n}-0123456789abcdef" for n in range(size)]
        self.sockets = [self._connect(address, replica_id) for replica_id in self.ids]
        self.step, self.lineage, self.quorum_id, self.nonce = 0, "init", 0, 0
        self.say_all([codec.encode(StatusRequest())] * size)
        self.hear_all(Status)

    def _connect(self, address: str, replica_id: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.PLAIN_USERNAME, SERVICE.encode())
        socket.setsockopt(zmq.PLAIN_PASSWORD, replica_id.encode())
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
        socket.connect(address)
        return socket

    def say_all(self, frames: list[bytes]) -> None:
        for socket, frame in zip(self.sockets, frames, strict=True):
            socket.send(frame)

    def hear_all(self, kind: type[Message], but: tuple[type, ...] = ()) -> Message:
        """The message of this kind that all received (equal frames decoded once); skips `but`."""
        frame, message = b"", None
        for socket in self.sockets:
            while (heard := socket.recv()) != frame:
                found = codec.decode(heard)
                if isinstance(found, kind):
                    frame, message = heard, found
                    break
                assert isinstance(found, but), found
        assert isinstance(message, kind)
        return message

    def form(self) -> float:
        """Seconds for all to join and have the member list."""
        begin = time.perf_counter()
        self.say_all(self._joins(NO_TERM))
        offer = self.hear_all(Waiting)
        assert isinstance(offer, Waiting) and offer.offer is not None
        self.nonce = offer.offer.nonce
        self.say_all(self._joins(offer.offer))
        quorum = self.hear_all(Quorum, but=(Waiting,))
        elapsed_s = time.perf_counter() - begin
        assert isinstance(quorum, Quorum)
        assert len(quorum.changed) == len(self.ids)
        self.quorum_id = quorum.quorum_id
        return elapsed_s

    def commit(self) -> float:
        """Seconds for all to vote and have the decision."""
        begin = time.perf_counter()
        self.say_all(self._votes())
        decision = self.hear_all(Decision)
        elapsed_s = time.perf_counter() - begin
        self._advance(decision)
        return elapsed_s

    def change(self) -> float:
        """Seconds from the end of one member until all others have the next quorum."""
        begin = time.perf_counter()
        self.sockets.pop().close()
        self.ids.pop()
        self.hear_all(Revoke)
        self.say_all(self._votes())
        decision = self.hear_all(Decision)
        elapsed_s = time.perf_counter() - begin
        assert isinstance(decision, Decision)
        assert decision.next_quorum is not None
        assert len(decision.next_quorum.removed) == 1
        assert not decision.next_quorum.changed, "a difference, not the list"
        self._advance(decision)
        self.quorum_id = decision.next_quorum.quorum_id
        return elapsed_s

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _joins(self, promised: Term) -> list[bytes]:
        return [
            codec.encode(
                Join(
                    JOB,
                    replica_id.split("-")[0],
                    replica_id,
                    0,
                    "init",
                    (address(n),),
                    expected_replicas=len(self.ids),
                    promised=promised,
                )
            )
            for n, replica_id in enumerate(self.ids)
        ]

    def _votes(self) -> list[bytes]:
        return [
            codec.encode(Vote(JOB, replica_id, self.quorum_id, self.step, self.lineage, True))
            for replica_id in self.ids
        ]

    def _advance(self, decision: Message) -> None:
        assert isinstance(decision, Decision)
        assert decision.committed, decision
        self.lineage = next_lineage(self.lineage, self.nonce, self.quorum_id, self.step)
        self.step += 1


def address(n: int) -> bytes:
    """As opaque and about as long as a real one."""
    return f"tcp://10.0.{n // 250}.{n % 250}:29512|tcp://10.0.{n // 250}.{n % 250}:29513".encode()


def ours(replicas: int, rounds: int) -> dict[str, float]:
    with lighthouse() as where:
        crowd = Crowd(where, replicas)
        form_s = crowd.form()
        steady_s = [crowd.commit() for _ in range(rounds)]
        change_s = [crowd.change() for _ in range(5)]
        crowd.close()
    return {
        "form_s": form_s,
        "steady_s": statistics.median(steady_s),
        "change_s": statistics.median(change_s),
    }


def torchft(python: str, replicas: int, rounds: int) -> dict[str, float] | None:
    """torchft's figures; None where it is not installed or gave up."""
    script = Path(__file__).with_name("quorum_round_torchft.py")
    command = [python, str(script), str(replicas), str(rounds)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=True)
    except (subprocess.SubprocessError, OSError) as error:
        said = getattr(error, "stderr", None) or str(error)
        text = said.decode() if isinstance(said, bytes) else said
        print(f"torchft at {replicas}: {text.strip().splitlines()[-1]}", file=sys.stderr)
        return None
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def options() -> argparse.Namespace:
    parser = arguments("What a quorum costs, against torchft's lighthouse")
    parser.add_argument("--replicas", type=int, nargs="+", default=[32, 128, 512, 2048])
    parser.add_argument("--rounds", type=int, default=20, help="steady rounds, of which the median")
    parser.add_argument(
        "--torchft-python", default=sys.executable, metavar="PYTHON", help="one that has torchft"
    )
    parser.add_argument("--alone", action="store_true", help="leave torchft out")
    return parser.parse_args()


def main() -> None:
    chosen = options()
    figures: list[dict[str, Any]] = []
    rows = []
    for replicas in chosen.replicas:
        mine = ours(replicas, chosen.rounds)
        peer_rounds = max(4, min(chosen.rounds, 4096 // replicas))
        peer = None if chosen.alone else torchft(chosen.torchft_python, replicas, peer_rounds)
        figures.append({"replicas": replicas, "ours": mine, "torchft": peer})
        row = [str(replicas), *(f"{mine[k] * 1e3:.1f}" for k in ("form_s", "steady_s", "change_s"))]
        if peer is None:
            row += ["-"] * 4
        else:
            row += [f"{peer['form_s'] * 1e3:.1f}", f"{peer['steady_s'] * 1e3:.1f}"]
            row += [f"{peer[k] / mine[k]:.1f}x" for k in ("form_s", "steady_s")]
        rows.append(row)
        print(*row, file=sys.stderr)
    columns = [
        "replicas",
        "form ms",
        "steady ms",
        "change ms",
        "torchft first",
        "torchft round",
        "first: ratio",
        "steady: ratio",
    ]
    report("One quorum round, loopback", columns, rows, figures, chosen.json)


if __name__ == "__main__":
    main()
