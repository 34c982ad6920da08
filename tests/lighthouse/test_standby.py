"""A launcher's own lighthouse: it outlives what ends its process, and not its launcher."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from lighthouse.config import LighthouseConfig
from lighthouse.server import LighthouseServer
from lighthouse.standby import LaunchedLighthouse
from tests.harness.waiting import PATIENCE_S, children_of, gone, until
from tests.lighthouse.support import FAST, Player, commit_together

pytestmark = pytest.mark.process
REPO = Path(__file__).resolve().parents[2]
CONFIG = LighthouseConfig(timeouts=FAST, expected_replicas=1)


@pytest.fixture
def launched() -> Iterator[LaunchedLighthouse]:
    with LaunchedLighthouse(config=CONFIG) as lighthouse:
        yield lighthouse


def _player(lighthouse: LaunchedLighthouse, context: zmq.Context[Any]) -> Player:
    player = Player(lighthouse.address(), "a", context)
    player.join()
    player.await_quorum()
    return player


@pytest.mark.parametrize("signum", [signal.SIGABRT, signal.SIGKILL])
def test_it_is_started_again_at_its_address(
    launched: LaunchedLighthouse, context: zmq.Context[Any], signum: signal.Signals
) -> None:
    (first,) = children_of(launched.pid)
    os.kill(first, signum)
    until(lambda: children_of(launched.pid) not in ([], [first]))
    _player(launched, context).close()


def test_so_is_what_starts_it_again(
    launched: LaunchedLighthouse, context: zmq.Context[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """Its processes end with it. The job was lost: its groups looked for a lighthouse until their time was over."""
    first = launched.pid
    (serving,) = children_of(first)
    os.kill(first, signal.SIGKILL)
    until(lambda: launched.pid != first and gone(serving))
    _player(launched, context).close()
    assert "(signal 9); it is started again" in capfd.readouterr().err


def test_one_that_is_killed_before_it_listens_is_started_again(
    monkeypatch: pytest.MonkeyPatch, context: zmq.Context[Any]
) -> None:
    starts: list[int] = []
    popen = subprocess.Popen

    def killed_at_first(*args: Any, **options: Any) -> Any:
        process: Any = popen(*args, **options)
        starts.append(process.pid)
        if len(starts) == 1:
            process.kill()
        return process

    monkeypatch.setattr(subprocess, "Popen", killed_at_first)
    with LaunchedLighthouse(config=CONFIG) as launched:
        assert len(starts) == 2
        _player(launched, context).close()


def test_signals_of_a_scheduler_leave_it_to_the_groups_that_end(
    launched: LaunchedLighthouse, context: zmq.Context[Any]
) -> None:
    player = _player(launched, context)
    (serving,) = children_of(launched.pid)
    for signum in (signal.SIGTERM, signal.SIGINT):
        for pid in (launched.pid, serving):
            os.kill(pid, signum)
    commit_together([player])
    player.close()
    launched.shutdown()
    launched.shutdown()
    assert gone(serving)


def test_a_process_that_was_forked_from_the_launcher_does_not_keep_it(
    launched: LaunchedLighthouse,
) -> None:
    """It has a copy of the pipe, which is open until it ends."""
    with multiprocessing.get_context("fork").Pool(1):
        launched.shutdown()
    assert gone(launched.pid)


def test_it_lingers_while_it_is_used(context: zmq.Context[Any]) -> None:
    with LaunchedLighthouse(config=CONFIG, linger_s=0.01) as launched:
        player = _player(launched, context)
        ending = threading.Thread(target=launched.shutdown)
        ending.start()
        for _ in range(10):
            commit_together([player])
        assert ending.is_alive()
        player.close()
        ending.join(PATIENCE_S)
        assert not ending.is_alive()


def test_it_ends_with_a_launcher_that_is_killed() -> None:
    script = """
import sys
from lighthouse.config import LighthouseConfig
from lighthouse.standby import LaunchedLighthouse
print(LaunchedLighthouse(config=LighthouseConfig()).pid, flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=REPO,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as launcher:
        assert launcher.stdout is not None
        keeper = int(launcher.stdout.readline())
        (serving,) = children_of(keeper)
        launcher.kill()
        until(lambda: gone(keeper) and gone(serving))


def test_a_port_that_is_taken_is_one_sentence() -> None:
    with LighthouseServer() as other, pytest.raises(OSError, match="stop what listens there"):
        LaunchedLighthouse(other.address(), config=CONFIG)
