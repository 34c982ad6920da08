"""A lighthouse for the process tests; and no test's strategy answers in a later one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ft_lightning.shared import world_of_torch
from lighthouse import LighthouseServer
from tests.harness.lighthouses import patient_lighthouse


@pytest.fixture(scope="module")
def coordinator() -> Iterator[LighthouseServer]:
    """One for all runs of a module: they are kept apart by their job ids."""
    with patient_lighthouse() as server:
        yield server


@pytest.fixture
def strict_coordinator() -> Iterator[LighthouseServer]:
    """One that evicts a stopped process after 5 s."""
    with patient_lighthouse(5.0) as server:
        yield server


@pytest.fixture(autouse=True)
def world_is_torchs_again() -> Iterator[None]:
    """Samplers that a later test makes in this process ask torch for the world."""
    yield
    world_of_torch._newest.clear()
