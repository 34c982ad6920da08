"""Those that ask for the status wait; votes do not."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from lighthouse.status_desk import PIECE, SHARE, TURN_S, Answer, StatusDesk
from lighthouse.wire import codec
from lighthouse.wire.messages import Status
from tests.harness.waiting import PATIENCE_S

Job = dict[str, Any]


class Desk(StatusDesk):
    """A desk whose jobs take `pause_s` each to collect, and `work_s` of a processor's time."""

    def __init__(self, jobs: list[Job], pause_s: float = 0.0, work_s: float = 0.0) -> None:
        self.ready = threading.Semaphore(0)

        def collect() -> Iterator[Job]:
            for job in jobs:
                time.sleep(pause_s)
                until_s = time.thread_time() + work_s
                while time.thread_time() < until_s:
                    pass
                yield job

        super().__init__(collect, lambda: {"sent": 3}, self.ready.release)

    def collect_all(self) -> None:
        """Take as many turns as the server's thread would; on a busy machine a job may take one."""
        while self.wake_at <= time.monotonic():
            self.turn()

    def made(self) -> Answer:
        """The next answer; the server's thread collects meanwhile."""
        self.collect_all()
        assert self.ready.acquire(timeout=PATIENCE_S)
        answer = self.take()
        assert answer is not None
        return answer


@pytest.mark.parametrize("members", [0, 1, PIECE, 3 * PIECE + 1])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_all_that_ask_are_answered_together(count: int, members: int) -> None:
    jobs = [
        {"step": n, "members": [{"name": f"{n}-{m}"} for m in range(members)], "waiting": ["x"]}
        for n in range(count)
    ]
    desk = Desk(jobs)
    thread: Future[str] = Future()
    for asker in (b"a", b"b", thread, b"a"):
        desk.ask(asker)
    peers, frame = desk.made()
    assert peers == [b"a", b"b"]
    text = thread.result(0)
    assert json.loads(text) == {"jobs": jobs, "server": {"sent": 3}}
    assert codec.decode(frame) == Status(text)
    desk.close()


def test_messages_have_their_turn_while_it_is_collected() -> None:
    desk = Desk([{"step": n} for n in range(5)], pause_s=TURN_S)
    desk.ask(b"a")
    for _ in range(5):
        assert desk.wake_at <= time.monotonic(), "there is more"
        desk.turn()
        assert desk.take() is None
    assert desk.made()[0] == [b"a"]
    desk.close()


def test_a_status_costs_a_small_share_of_the_time() -> None:
    """Those that ask while one is made, or soon after it, wait for the next one."""
    began, work_s = time.monotonic(), 0.01
    desk = Desk([{"step": 0}], work_s=work_s)
    desk.ask(b"a")
    desk.turn()
    desk.ask(b"b")
    assert desk.made()[0] == [b"a"]
    for asker in (b"b", b"c"):
        desk.ask(asker)
        assert desk.wake_at >= began + work_s / SHARE
    desk.wake_at = 0.0
    assert desk.made()[0] == [b"b", b"c"]
    desk.close()


def test_time_for_which_the_machine_ran_other_things_is_no_cost() -> None:
    """A status that was held up for 0.4 s had the next one wait for 20 s: a group that asked gave up."""
    pause_s = 0.4
    desk = Desk([{"step": 0}], pause_s)
    desk.ask(b"a")
    desk.made()
    desk.ask(b"b")
    assert desk.wake_at < time.monotonic() + pause_s / SHARE / 2
    desk.close()


def test_threads_that_wait_when_it_ends_are_refused() -> None:
    desk = Desk([{"step": n} for n in range(2)], pause_s=TURN_S)
    first: Future[str] = Future()
    second: Future[str] = Future()
    desk.ask(first)
    desk.turn()
    desk.ask(second)
    desk.close()
    for each in (first, second):
        with pytest.raises(RuntimeError, match="shut down"):
            each.result(0)


def test_a_status_that_can_not_be_written_does_not_end_the_desk(
    caplog: pytest.LogCaptureFixture,
) -> None:
    jobs: list[Job] = [{"step": object()}]
    desk = Desk(jobs)
    failed: Future[str] = Future()
    desk.ask(failed)
    desk.collect_all()
    with pytest.raises(TypeError, match="not JSON serializable"):
        failed.result(PATIENCE_S)
    assert desk.ready.acquire(timeout=PATIENCE_S)
    assert desk.take() is None
    assert "a status could not be written" in caplog.text
    jobs[:] = [{"step": 1}]
    desk.ask(b"a")
    desk.wake_at = 0.0
    assert desk.made()[0] == [b"a"]
    desk.close()
