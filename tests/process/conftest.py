"""Jobs, and the lighthouses that they meet at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lighthouse import LighthouseConfig, LighthouseServer
from lighthouse.config import Timeouts
from tests.harness.waiting import PATIENCE_S
from tests.process.driver import Job, LighthouseProcess

TIMEOUT_S = 20.0
ENDLESS_S = 24 * PATIENCE_S
HEARTBEAT_TIMEOUT_S = 2.0  # ample on a busy machine

JobFactory = Callable[..., Job]


@pytest.fixture
def lighthouse() -> Iterator[LighthouseServer]:
    timeouts = Timeouts.derive(TIMEOUT_S, heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S)
    with LighthouseServer(config=LighthouseConfig(timeouts=timeouts)) as server:
        yield server


@pytest.fixture
def endless() -> Iterator[LighthouseServer]:
    """A lighthouse without timeouts, for jobs with `timeout_s=ENDLESS_S`: what goes on within a
    test's patience has not waited for one."""
    timeouts = Timeouts.derive(
        ENDLESS_S, heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S, revoke_timeout_s=ENDLESS_S / 2
    )
    with LighthouseServer(config=LighthouseConfig(timeouts=timeouts)) as server:
        yield server


@pytest.fixture
def make_job() -> Iterator[JobFactory]:
    """Makes jobs; at the end none of their processes is left."""
    jobs: list[Job] = []

    def make(address: str, **options: Any) -> Job:
        defaults = {"timeout_s": TIMEOUT_S, "heartbeat_s": HEARTBEAT_TIMEOUT_S / 3}
        jobs.append(Job(address, **{**defaults, **options}))
        return jobs[-1]

    yield make
    for job in jobs:
        job.close()


@pytest.fixture
def job(make_job: JobFactory, lighthouse: LighthouseServer) -> Job:
    """A job on a lighthouse that stays."""
    return make_job(lighthouse.address())


@pytest.fixture
def lighthouse_process() -> Iterator[Callable[[int], LighthouseProcess]]:
    """Starts lighthouses as processes, on a given port (0: any); ends them."""
    started: list[LighthouseProcess] = []

    def start(port: int = 0) -> LighthouseProcess:
        arguments = ("--timeout", str(TIMEOUT_S), "--heartbeat-timeout", str(HEARTBEAT_TIMEOUT_S))
        started.append(LighthouseProcess(port=port, arguments=arguments))
        return started[-1]

    yield start
    for process in started:
        process.close()
