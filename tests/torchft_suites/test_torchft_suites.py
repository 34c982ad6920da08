"""torchft's own tests pass on this project's classes, but for texts and for what does not exist here."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.harness.waiting import PATIENCE_S
from tests.torchft_suites import names

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(
        names.folder() is None, reason='torchft is not installed: pip install "torchft==0.2.0"'
    ),
]


def outcomes(*modules: str) -> dict[str, tuple[str, str]]:
    """Case: (passed, failed or skipped; why), of these modules, run in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.torchft_suites", *modules],
        capture_output=True,
        text=True,
        timeout=3 * PATIENCE_S,
        check=False,
    )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')]
    assert rows, done.stdout[-1000:] + done.stderr[-3000:]
    return {case: (outcome, why) for case, outcome, why in rows}


def is_not_here(why: str) -> bool:
    return any(word in why for word in ("CUDA", "GPUs", "torchcomms", "ProcessGroupBaby"))


SUITES = {
    "manager": (["manager_integ_test"], 7),
    "local_sgd": (
        [
            "local_sgd_integ_test:test_local_sgd",
            "local_sgd_integ_test:test_diloco",
            "local_sgd_integ_test:test_streaming_diloco_recovery",
            "local_sgd_integ_test:test_streaming_diloco_commit_failure",
        ],
        16,
    ),
    "one_process": (["optim_test", "data_test", "lighthouse_test:join", "ddp_test:pure"], 4),
    "process_groups": (
        [
            "process_group_test:test_collective_[0-9]",
            "process_group_test:test_gloo",
            "process_group_test:test_dummy",
        ],
        11,
    ),
}
"""Name: (modules, with a part of the names of the cases that must pass; how many these are)."""


@pytest.mark.parametrize("suite", SUITES)
def test_cases_pass(suite: str) -> None:
    modules, number = SUITES[suite]
    seen = outcomes(*modules)
    assert {case: why for case, (how, why) in seen.items() if how == "failed"} == {}
    assert all(is_not_here(why) for how, why in seen.values() if how == "skipped"), seen
    assert sum(how == "passed" for how, _ in seen.values()) == number, seen
