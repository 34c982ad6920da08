"""A lighthouse whose thread ends on an internal error: no other thread waits for it for ever."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from lighthouse.machine.jobs import Lighthouse
from lighthouse.server import LighthouseServer
from tests.harness.waiting import PATIENCE_S


def test_a_status_that_is_asked_for_while_the_machine_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(machine: Lighthouse) -> Any:
        raise KeyError("a fault of the machine")

    monkeypatch.setattr(Lighthouse, "statuses", fail)
    server = LighthouseServer()
    pool = ThreadPoolExecutor(1)
    answer = pool.submit(server.status)
    with pytest.raises(RuntimeError, match="shut down"):
        answer.result(PATIENCE_S)
    pool.shutdown()
    with pytest.raises(RuntimeError, match="stopped on an internal error"):
        server.join(PATIENCE_S)
    with pytest.raises(RuntimeError, match="shut down"):
        server.status()
    server.shutdown()
