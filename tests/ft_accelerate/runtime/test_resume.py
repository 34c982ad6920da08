"""Raw scripts that resume by themselves from what they have saved, and scripts that should."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ft_accelerate.harness import compare, running
from tests.harness.lighthouses import patient_lighthouse

pytestmark = pytest.mark.process
WORKER = Path(__file__).with_name("resume_worker.py")
STEPS = 5 * 8


@pytest.fixture
def lighthouse() -> Iterator[str]:
    """A heal without a commit is a failed one, after which a group pauses: here for two seconds."""
    with patient_lighthouse(heal_timeout_s=16.0) as server:
        yield server.address()


@pytest.mark.parametrize("streams", [False, True])
def test_what_a_checkpoint_has_counted_is_not_counted_twice(
    tmp_path: Path, lighthouse: str, streams: bool
) -> None:
    """Its peers have begun with step 0, and the one that comes back with the newest checkpoint, saved in
    the middle of an epoch. Then all die, and all begin with that. Of a stream `skip_first_batches` leaves batches out
    when they are read: those were run through besides."""
    options = {"holds": ["step-21", "step-30"], "streams": streams}
    with running(tmp_path, lighthouse, WORKER, **options) as run:
        zero, one = run.start(0), run.start(1)
        one = run.killed_and_back(one, 1, hold="step-21", of=0)
        for index in (0, 1):
            run.until_held(index, "step-30")
        healed = [line for line in run.lines(1) if line["pid"] == one.pid]
        assert [line["step"] for line in healed][-1] == 30
        assert run.output().count("ft_accelerate: replica group 1 is back at batch ") == 1
        assert "replica group 0 is back" not in run.output()
        assert compare(run.lines(0), healed) == len(healed)
        for process in (zero, one):
            process.kill()
            run.wait(process, code=-signal.SIGKILL)
        again = {"FT_RESTARTS": "1"}
        zero, one = run.start(0, **again), run.start(1, **again)
        run.go("step-30")
        run.wait(zero, one)
        assert "this script starts from its beginning" not in run.output()
    assert [line["step"] for line in run.lines(0, "starts")] == [0, 30]
    assert [line["step"] for line in run.lines(1, "starts")] == [0, 18, 30]
    for index in (0, 1):
        steps = sorted({line["step"] for line in run.lines(index)})
        assert steps[-1] == STEPS
        assert run.end(index)["step"] == STEPS
    assert run.end(0)["digest"] == run.end(1)["digest"]


def test_it_draws_as_without_faults_where_it_has_loaded_the_peers_very_place(
    tmp_path: Path, lighthouse: str
) -> None:
    """The newest checkpoint is of the batch at which its peers wait for it, so it has nothing to run through. Its
    loader is made within the peers' pass, for which torch draws a number that they have drawn at that pass's begin."""
    options = {"dropout": 0.5, "epochs": 4, "save_every": 11}
    both = {"ACCELERATE_FAULT_TOLERANCE_MIN_REPLICAS": "2"}
    ends = []
    for dies in (False, True):
        log = tmp_path / str(dies)
        holds = ["step-22"] if dies else []
        with running(log, lighthouse, WORKER, holds=holds, **options) as run:
            zero, one = run.start(0, **both), run.start(1, **both)
            if dies:
                one = run.killed_and_back(one, 1, hold="step-22", of=0, **both)
            run.wait(zero, one)
        assert run.lines(1, "starts")[-1]["step"] == (22 if dies else 0)
        ends += [run.end(index)["digest"] for index in (0, 1)]
    assert len(set(ends)) == 1


@pytest.mark.parametrize("every", [8, 16])
def test_it_loads_what_was_saved_at_an_epochs_last_batch(
    tmp_path: Path, lighthouse: str, every: int
) -> None:
    """The script goes on with the next epoch, without the evaluation between: of `every` 16 another epoch lies between
    it and its peers. It took the next pass for the one that it had saved in, and ended an epoch too early, in each life."""
    both = {"ACCELERATE_FAULT_TOLERANCE_MIN_REPLICAS": "2"}
    with running(tmp_path, lighthouse, WORKER, save_every=every, holds=["step-28"]) as run:
        zero, one = run.start(0, **both), run.start(1, **both)
        one = run.killed_and_back(one, 1, hold="step-28", of=0, **both)
        run.wait(zero, one)
    assert run.lines(1, "starts")[-1]["step"] == (24 if every == 8 else 16)
    compare(*(run.lines(index) for index in (0, 1)))
    assert run.end(0) | {"pid": 0} == run.end(1) | {"pid": 0}


def test_a_script_that_does_not_resume_is_warned(tmp_path: Path, lighthouse: str) -> None:
    options = {"resume": False, "epochs": 2, "holds": ["step-9"]}
    with running(tmp_path, lighthouse, WORKER, **options) as run:
        first = [run.start(0), run.start(1)]
        for index, process in enumerate(first):
            run.until_held(index, "step-9")
            process.kill()
            run.wait(process, code=-signal.SIGKILL)
        assert "this script starts from its beginning" not in run.output()
        run.go("step-9")
        again = {"FT_RESTARTS": "1"}
        run.wait(run.start(0, **again), run.start(1, **again))
        said = run.output()
    assert said.count("this script starts from its beginning, though the job has saved") == 1
    assert f"{tmp_path}/states/step_6" in said
    assert "the job goes back to batch 1 of pass 1 over the data: what was committed later" in said


@pytest.mark.parametrize("says_end", [False, True])
def test_one_that_ends_before_it_is_where_its_peers_are_has_not_succeeded(
    tmp_path: Path, lighthouse: str, says_end: bool
) -> None:
    """Its early stopping, say, has not heard of its past. The next life comes back."""
    options = {"resume": False, "early": 1, "says_end": says_end, "holds": ["step-21", "step-30"]}
    options |= {"epochs": 10, "pause_s": 0.1}  # in all longer than the group pauses
    with running(tmp_path, lighthouse, WORKER, **options) as run:
        zero, one = run.start(0), run.start(1)
        one = run.killed_and_back(one, 1, hold="step-21", of=0)
        run.wait(one, code=1)
        assert run.output().count("its script ended before it was where its peers are") == 1
        run.until_held(0, "step-30")
        asked = run.events(1, "waiting", "quorum")
        one = run.start(1, FT_RESTARTS="2")
        run.until(lambda: run.events(1, "waiting", "quorum") > asked, "it asks again")
        run.go("step-30")
        run.wait(zero, one)
    assert run.end(0)["digest"] == run.end(1)["digest"]
    assert run.end(1)["step"] == 2 * STEPS
