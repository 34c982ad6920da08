"""What scripts use besides a plain loop, all at once: see `breadth_worker.py`."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ft_accelerate.runtime.checkpoints import POSITION_FILE
from tests.ft_accelerate.harness import compare, running
from tests.harness.lighthouses import patient_lighthouse
from tests.harness.waiting import PATIENCE_S

pytest.importorskip("torchdata")

pytestmark = pytest.mark.process

WORKER = Path(__file__).with_name("breadth_worker.py")
HEARTBEAT_TIMEOUT_S = 1.5
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1")
STEPS = 9  # in an epoch, of each of two replicas


@pytest.fixture
def strict_lighthouse() -> Iterator[str]:
    with patient_lighthouse(HEARTBEAT_TIMEOUT_S) as server:
        yield server.address()


def saved(checkpoint: Path) -> dict[str, Any]:
    """Names in it but for ours, and what the stateful loader says of its place."""
    place = torch.load(checkpoint / "dl_state_dict.bin", weights_only=False)
    names = sorted(p.name for p in checkpoint.iterdir())
    return {
        "names": [name for name in names if name != POSITION_FILE],
        "ours": POSITION_FILE in names,
        "place": place,
    }


def batches_tracked(checkpoint: Path) -> int:
    """How many forwards are in the generator's running statistics."""
    found = load_file(checkpoint / "model.safetensors")
    [count] = [value for name, value in found.items() if name.endswith("num_batches_tracked")]
    return int(count)


def test_a_gan_equals_plain_ddp_bit_for_bit_also_with_discards(
    tmp_path: Path, lighthouse: str
) -> None:
    """Two updates a batch, over which gradients accumulate; a part that some batches leave out, a
    frozen one; compiled by Accelerate; a stateful loader, whose first batches are skipped. One of the
    replica groups is started by torchrun."""
    options = {
        "accumulate": 2,
        "optional": True,
        "dynamo": "aot_eager",
        "stateful": True,
        "start": 3,
        "save": 5,
        "epochs": 2,
    }
    injected = {"inject": {"2": 1, "5": 0}, "inject_second": {"3": 0, "5": 1}}
    with running(tmp_path / "plain", worker=WORKER, **options) as plain:
        plain.wait(*plain.start_plain(), code=None)
    # Two processes that compile on a busy machine may be further apart than the others' 20 s, and one of
    # them would be left behind.
    patient = {"ACCELERATE_FAULT_TOLERANCE_TIMEOUT_S": str(PATIENCE_S)}
    with running(tmp_path / "ft", lighthouse, WORKER, **injected, **options) as run:
        run.wait(run.start(0, **patient), run.start(1, launcher=TORCHRUN, **patient))
    for index in (0, 1):
        mine, expected = run.lines(index), plain.lines(index)
        for key in ("step", "index", "epoch", "batch", "weights", "lr", "ticks", "loader"):
            assert [x[key] for x in mine] == [x[key] for x in expected], key
        assert run.events(index, "discard") >= 2  # its own, and those of others it had begun
    assert compare(run.lines(0), run.lines(1)) == len(run.lines(0)) > 6
    expected_files = {**saved(plain.log / "checkpoint_5"), "ours": True}
    assert saved(run.log / "checkpoint_5") == expected_files


def test_killed_between_two_updates_and_in_a_save_and_stopped(
    tmp_path: Path, strict_lighthouse: str
) -> None:
    """It heals into the middle of a batch: the state has the first update, not the second.

    Then the main process dies in writing a checkpoint, which the next one writes: it held what it would
    have written. One that is stopped for longer than the heartbeat timeout is left behind, and heals when it goes on.
    """
    options = {
        "epochs": 12,
        "step_delay_s": 0.02,
        "stateful": True,
        "compile": "eager",
        "save": 5,
        "die_in_save": 10,
        "holds": ["step-5", "between-50", "step-60", "between-90"],
    }
    with running(tmp_path, strict_lighthouse, WORKER, **options) as run:
        zero, one = run.start(0), run.start(1)
        one = run.killed_and_back(one, 1, hold="step-5", of=0)
        run.until(lambda: zero.poll() == -signal.SIGKILL, "death in a save")
        torn = 5 * (run.lines(0)[-1]["step"] // 5)
        zero = run.killed_and_back(zero, 0, hold="between-50", of=1)
        before, again = (saved(tmp_path / f"checkpoint_{step}") for step in (torn - 5, torn))
        assert again.keys() == before.keys() and again != before
        forwards = [batches_tracked(tmp_path / f"checkpoint_{step}") for step in (torn - 5, torn)]
        assert forwards[1] * (torn - 5) == forwards[0] * torn
        for index in (0, 1):
            run.until_held(index, "step-60")
        assert run.lines(0)[-1]["pid"] == zero.pid
        one.send_signal(signal.SIGSTOP)
        run.go("step-60")
        run.until_held(0, "between-90")
        before = run.events(1, "waiting", "quorum")
        one.send_signal(signal.SIGCONT)
        run.until(lambda: run.events(1, "waiting", "quorum") > before, "the stopped one asks")
        run.go("between-90")
        run.wait(zero, one)
    assert run.end(0)["digest"] == run.end(1)["digest"]
    assert run.end(0)["step"] == run.end(1)["step"] == 12 * STEPS
    assert compare(run.lines(0), run.lines(1)) > STEPS
    by_step = {x["step"]: x for x in run.lines(0)}
    for line in run.lines(1):
        assert line["loader"] == by_step.get(line["step"], line)["loader"]
    done = {line["step"] for index in (0, 1) for line in run.lines(index)}
    assert done == set(range(1, 12 * STEPS + 1))
    assert run.lines(1)[-1]["pid"] == one.pid  # stopped, not started again
    assert not (tmp_path / ".ft_saving").exists()
    back = next(line["step"] for line in run.lines(1) if line["step"] > 90)
    both = -(-back // 5) * 5  # the first save since then
    assert len(saved(tmp_path / f"checkpoint_{both}")["names"]) == 9
