"""Answers questions for the status, without a vote waiting for that.

Theory. The server's thread alone may read the machine. It collects what a status says for a short
time per turn, and handles messages in between. The text is made by a thread of the desk, in pieces,
between which it lets go of the interpreter. All that ask meanwhile are answered together by the
next one; it is begun after a pause, which is longer the more the last one has cost. Those that ask
wait: each answer says what was the case after the question.
"""

from __future__ import annotations

import json
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any

from lighthouse.wire import codec
from lighthouse.wire.messages import Peer, Status

log = logging.getLogger("lighthouse")

SHARE = 0.02
"""Of a processor's time that goes into statuses."""
TURN_S = 0.0005
"""How long the server's thread collects before messages get their turn."""
PIECE = 256
"""Entries of a list that are made into text at a time."""
SHORT = 4_096
"""Characters after which the desk's thread goes on at once."""
LET_GO_S = 0.0001
"""How long it sleeps after more: long enough for another thread to wake up."""

Asker = Peer | Future[str]
Parts = Iterator[dict[str, Any]]
Answer = tuple[list[Peer], bytes]


class StatusDesk:
    """See the module's docstring. All methods are the server's thread's.

    Args:
        collect: begins a status: the jobs, one after the other.
        server: the part "server" of it.
        wake: called in the desk's thread when `take` has an answer.
    """

    def __init__(
        self,
        collect: Callable[[], Parts],
        server: Callable[[], dict[str, Any]],
        wake: Callable[[], object],
    ) -> None:
        self._collect, self._server, self._wake = collect, server, wake
        self.wake_at = math.inf
        """When `turn` has something to do; of `time.monotonic`."""
        self._asked: dict[Asker, None] = {}
        self._asking: dict[Asker, None] = {}
        self._collected: list[dict[str, Any]] = []
        self._parts: Parts | None = None
        self._busy = False
        self._cost_s = 0.0
        self._next_at = 0.0
        self._work: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[Answer | None, float]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="lighthouse-status", daemon=True)
        self._thread.start()

    def ask(self, asker: Asker) -> None:
        """A peer, or a thread that waits for a future, asks. A peer that asks again counts once."""
        self._asked[asker] = None
        if not self._busy and self._parts is None:
            self.wake_at = self._next_at

    def turn(self) -> None:
        """Collect for a short time. Call it when it is `wake_at`."""
        begin, used_s = time.monotonic(), time.thread_time()
        if self._parts is None:
            self._parts, self._collected = self._collect(), []
            self._asking, self._asked = self._asked, {}
        for part in self._parts:
            self._collected.append(part)
            if time.monotonic() - begin >= TURN_S:
                break
        else:
            self._parts, self._busy, self.wake_at = None, True, math.inf
            self._work.put((self._collected, self._server(), list(self._asking)))
        # Not the time for which a busy machine ran other things: the pause is many times as long.
        self._cost_s += time.thread_time() - used_s

    def take(self) -> Answer | None:
        """Peers that wait for an answer, and the frame; None: it is not ready."""
        try:
            answer, cost_s = self._done.get_nowait()
        except queue.Empty:
            return None
        self._next_at = time.monotonic() + (self._cost_s + cost_s) / SHARE
        self._busy, self._cost_s = False, 0.0
        self.wake_at = self._next_at if self._asked else math.inf
        return answer

    def close(self) -> None:
        """End the thread. Those that still wait are refused, or get no answer."""
        self._work.put(None)
        self._thread.join()
        refuse(*self._asking, *self._asked)

    # ---------------------------------------------------------------- the desk's thread

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            jobs, server, asking = work
            begin = time.thread_time()
            answer = None
            try:
                answer = self._answer(jobs, server, asking)
            except Exception as error:  # those that ask later are answered all the same
                log.exception("a status could not be written")
                _fail(asking, error)
            self._done.put((answer, time.thread_time() - begin))
            self._wake()

    def _answer(
        self, jobs: list[dict[str, Any]], server: dict[str, Any], asking: list[Asker]
    ) -> Answer:
        pieces = []
        for piece in _text_of(jobs, server):
            pieces.append(piece)
            if len(piece) > SHORT:
                time.sleep(LET_GO_S)
        text = "".join(pieces)
        for each in asking:
            if isinstance(each, Future):
                each.set_result(text)
        peers = [each for each in asking if not isinstance(each, Future)]
        return peers, codec.encode(Status(text)) if peers else b""


def refuse(*askers: Asker) -> None:
    """Tell threads that still wait for a status that the lighthouse has ended."""
    _fail(askers, RuntimeError("this lighthouse has been shut down"))


def _fail(askers: Iterable[Asker], error: Exception) -> None:
    for each in askers:
        if isinstance(each, Future) and not each.done():
            each.set_exception(error)


def _text_of(jobs: list[dict[str, Any]], server: dict[str, Any]) -> Iterator[str]:
    """The JSON text, in pieces that take a fraction of a millisecond each."""
    yield '{"jobs": ['
    for number, job in enumerate(jobs):
        lists = {name: value for name, value in job.items() if isinstance(value, list)}
        others = {name: value for name, value in job.items() if name not in lists}
        yield (", " if number else "") + json.dumps(others)[:-1]
        for name, entries in lists.items():
            yield f', "{name}": ['
            for at in range(0, len(entries), PIECE):
                yield (", " if at else "") + json.dumps(entries[at : at + PIECE])[1:-1]
            yield "]"
        yield "}"
    yield f'], "server": {json.dumps(server)}}}'
