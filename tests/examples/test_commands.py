"""The examples do what their first lines say: each is run by the command given there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.process, pytest.mark.timeout(200)]


def run(path: str, *more: str) -> str:
    """What the command in the docstring of `path` prints, with `more` arguments."""
    command = re.search(r"^    python (.+)$", (ROOT / path).read_text(), re.MULTILINE)
    assert command is not None, f"{path} does not say how to run it"
    env = {k: v for k, v in os.environ.items() if not k.startswith(("FT_", "TORCHFT_", "PL_"))}
    done = subprocess.run(
        [sys.executable, *command[1].split(), *more],
        env={**env, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    ("path", "steps"), [("examples/train_gan.py", 90), ("examples/train_fabric.py", 72)]
)
def test_two_replica_groups_end_equal(path: str, steps: int) -> None:
    ends = [json.loads(text) for text in re.findall(r"\{.*?\}", run(path))]
    assert {end["replica_group"] for end in ends} == {"0", "1"}
    assert ends[0]["weights"] == ends[1]["weights"]
    assert [end["step"] for end in ends] == [steps, steps]


def test_cli_project() -> None:
    assert len(re.findall(r"step 48, val_accuracy 0\.\d+", run("examples/cli/train.py"))) == 1
