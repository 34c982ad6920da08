"""Real Trainers and Fabric loops under "ft_diloco" and "ft_local_sgd": killed, healed, equal at every outer step."""

from __future__ import annotations

import contextlib
import csv
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ft_lightning import harness
from tests.ft_lightning.harness import ASKS, Line, Run
from tests.harness import workers
from tests.harness.lighthouses import patient_lighthouse
from tests.harness.runs import ROOT, Process
from tests.harness.trackers import in_csv

pytestmark = pytest.mark.process

FABRIC_WORKER = Path(__file__).with_name("diloco_fabric_worker.py")
BATCHES = 19  # of one of two replicas in an epoch


@contextlib.contextmanager
def running(log: Path, lighthouse: str = "", **options: object) -> Iterator[Run]:
    worker = Path(__file__).with_name("diloco_worker.py")
    with harness.running(log, lighthouse, worker=worker, **options) as run:
        yield run


def die_and_heal(run: Run) -> Any:
    """Replica 1 dies by itself (`die`), comes back while replica 0 is held at step 33, and both end.
    Returns its new process."""
    zero, one = run.start(0), run.start(1)
    run.until(lambda: one.poll() is not None, "the death of replica 1")
    run.until_held(0, "step:33")
    again = run.start_again(1)
    run.go("step:33")
    run.wait(zero, again)
    return again


def die_and_end(run: Run) -> list[Line]:
    """Replica 1 dies by itself (`die`) and is started again, and both end: what they say then."""
    zero, one = run.start(0), run.start(1)
    run.wait(one, code=-signal.SIGKILL)
    run.wait(zero, run.start(1))
    return [run.end(replica) for replica in (0, 1)]


MUST_AGREE = ("digest", "step", "epoch", "batches", "last", "lr", "schedulers", "val_losses")


def compare(a: list[Line], b: list[Line]) -> int:
    """Assert that two replicas agree at every outer step that both logged; how many those are."""
    by_step = {line["outer_step"]: line for line in a if line["committed"]}
    common = [
        (by_step[x["outer_step"]], x) for x in b if x["committed"] and x["outer_step"] in by_step
    ]
    for mine, other in common:
        for key in MUST_AGREE:
            assert mine[key] == other[key], (
                f"outer step {mine['outer_step']}: {key} is {mine[key]!r} and {other[key]!r}"
            )
    return len(common)


def test_killed_and_healed(tmp_path: Path, lighthouse: str) -> None:
    options = {"sync_every": 5, "outer_lr": 0.5, "outer_momentum": 0.8, "min_replicas": 1}
    epochs = 6
    with running(
        tmp_path,
        lighthouse,
        strategy_options=options,
        max_epochs=epochs,
        holds=["step:33"],
        die=[1, 13],
    ) as run:
        again = die_and_heal(run)
    lines, ends = [run.lines(i) for i in (0, 1)], [run.end(i) for i in (0, 1)]
    assert compare(*lines) >= 10
    assert ends[0]["digest"] == ends[1]["digest"]
    assert ends[0]["val_losses"] == ends[1]["val_losses"]
    assert len(set(ends[0]["val_losses"])) == epochs
    assert ends[0]["step"] == ends[1]["step"] == epochs * BATCHES
    # The survivor has lost nothing: no inner step is trained twice, no outer step is discarded.
    assert ends[0]["inner_steps"] == epochs * BATCHES
    assert all(line["committed"] for line in lines[0])
    assert [line["step"] for line in lines[0]] == list(range(5, epochs * BATCHES + 1, 5))
    healed = [line for line in lines[1] if line["pid"] == again.pid]
    assert healed[0]["step"] > 33
    assert {line["participants"] for line in lines[0]} == {1, 2}
    assert sum(end["leader"] for end in ends) == 1


def test_the_next_leader_logs_where_the_dead_one_has(tmp_path: Path, lighthouse: str) -> None:
    """It has come back before the first outer step, so it has not healed: with that step it is told."""
    options = {"sync_every": 5, "min_replicas": 2}
    with running(
        tmp_path,
        lighthouse,
        strategy_options=options,
        max_epochs=1,
        die=[1, 2],
        holds=["step:8"],
    ) as run:
        zero, one = run.start(0), run.start(1)
        run.wait(one, code=-signal.SIGKILL)
        one = run.start(1)
        for rank in (0, 1):
            run.until_held(rank, "step:8")
        zero.kill()
        run.wait(zero, code=-signal.SIGKILL)
        run.go("step:8")
        run.wait(one, run.start(0))
    assert in_csv(tmp_path / "csv/lightning_logs", "train_loss") == list(range(BATCHES))


STREAMING = {"fragments": 2, "fragment_sync_delay": 1, "sync_every": 6}
LAST_STEP = {"min_replicas": 2, "sync_every": 5}  # an outer step is left for the end


@pytest.mark.parametrize(
    ("strategy", "options"),
    [("FTDiLoCoStrategy", {}), ("FTDiLoCoStrategy", STREAMING), ("FTLocalSGDStrategy", {})],
    ids=["diloco", "streaming", "local_sgd"],
)
def test_a_group_that_comes_back_behind_the_last_batch_ends_with_its_peers(
    tmp_path: Path, lighthouse: str, strategy: str, options: dict[str, Any]
) -> None:
    """They wait for it in the last outer step. Its loop was in an epoch, which it ended once more, with a validation."""
    with running(
        tmp_path,
        lighthouse,
        strategy=strategy,
        strategy_options=LAST_STEP | options,
        max_epochs=1,
        die=[1, BATCHES - 1],
    ) as run:
        ends = die_and_end(run)
    for same in ("digest", "step", "epoch", "val_losses"):
        assert ends[0][same] == ends[1][same]
    assert ends[0]["epoch"] == len(ends[0]["val_losses"]) == 1


@pytest.mark.parametrize("options", [{}, STREAMING], ids=["diloco", "streaming"])
def test_a_fabric_loop_that_comes_back_behind_the_last_batch_ends_with_its_peers(
    tmp_path: Path, lighthouse: str, options: dict[str, Any]
) -> None:
    """It comes to the last outer step at once. It sent nothing in it, and left; its peers waited for ever."""
    with harness.running(
        tmp_path,
        lighthouse,
        worker=FABRIC_WORKER,
        strategy_options=LAST_STEP | options,
        epochs=1,
        die=[1, BATCHES - 1],
    ) as run:
        ends = die_and_end(run)
    assert ends[0]["digest"] == ends[1]["digest"]
    assert ends[0]["step"] == ends[1]["step"] == BATCHES


def test_streaming_killed_in_the_overlap_under_the_launcher(tmp_path: Path) -> None:
    options = {
        "sync_every": 8,
        "fragments": 2,
        "fragment_sync_delay": 2,
        "codec": "int8",
        "outer_lr": 0.5,
        "outer_momentum": 0.8,
    }
    epochs, steps = 8, -(-BATCHES // 2)
    with running(
        tmp_path,
        strategy_options=options,
        devices=2,
        max_epochs=epochs,
        accumulate=2,
        precision="bf16-mixed",
        step_delay_s=0.01,
        holds=["step:25", "life:2"],
        die=[1, 15],
    ) as run:
        main = run.start()  # 15: sent after inner step 14, to be applied after 16
        run.until_held(0, "step:25")
        run.begin_again(1, 2)
        run.go("step:25")
        run.wait(main)
    lines, ends = [run.lines(i) for i in (0, 1)], [run.end(i) for i in (0, 1)]
    assert compare(*lines) >= 5
    assert ends[0]["digest"] == ends[1]["digest"]
    assert ends[0]["val_losses"] == ends[1]["val_losses"]
    assert ends[0]["step"] == ends[1]["step"] == epochs * steps
    committed = [line["step"] for line in lines[0] if line["committed"]]
    assert committed == list(range(4, epochs * steps + 1, 4)), "the survivor has lost an outer step"
    together = [line["metrics"] for line in lines[0] if line["participants"] > 1]
    assert all(metrics["outer_bytes"] > 0 for metrics in together)
    assert all(metrics["outer_hidden_s"] > 0 for metrics in together)  # behind inner steps


def test_stopped_at_random_moments(tmp_path: Path) -> None:
    """Each time for longer than the others wait: it goes on where it was, in inner steps of a quorum that
    is without it, maybe as its leader. Logs and weights are as if it had come back from a death."""
    options = {"sync_every": 5, "fragments": 2, "fragment_sync_delay": 1, "outer_lr": 0.5}
    epochs, moment = 8, random.Random(4)
    stops = [(0, 20), (1, 60), (0, 100)]
    holds = [f"step:{step + 30}" for _, step in stops]
    with (
        patient_lighthouse(1.5) as server,
        running(
            tmp_path,
            server.address(),
            strategy_options=options,
            max_epochs=epochs,
            holds=holds,
            step_delay_s=0.005,
        ) as run,
    ):
        both = run.start(0), run.start(1)
        for (name, step), hold in zip(stops, holds, strict=True):
            other = 1 - name
            run.until_step(name, step)
            time.sleep(moment.uniform(0.0, 0.05))
            os.kill(both[name].pid, signal.SIGSTOP)
            run.until_held(other, hold)
            assert run.lines(other)[-1]["participants"] == 1
            asked = run.events(name, *ASKS)
            os.kill(both[name].pid, signal.SIGCONT)
            run.until(lambda: run.events(name, *ASKS) > asked, f"group {name} to ask")  # noqa: B023
            run.go(hold)
        run.wait(*both)
    lines, ends = [run.lines(i) for i in (0, 1)], [run.end(i) for i in (0, 1)]
    assert compare(*lines) >= 10
    assert ends[0]["digest"] == ends[1]["digest"]
    assert ends[0]["val_losses"] == ends[1]["val_losses"]
    assert ends[0]["step"] == ends[1]["step"] == epochs * BATCHES
    for path in tmp_path.glob("csv/lightning_logs/*/metrics.csv"):
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert all(None not in row and row["step"].isdigit() for row in rows)


def test_local_sgd_by_name_and_resumed(tmp_path: Path, lighthouse: str) -> None:
    first = {"strategy": "ft_local_sgd", "max_epochs": 2}
    with running(tmp_path / "a", lighthouse, **first) as run:
        run.wait(run.start(0), run.start(1))
    assert compare(run.lines(0), run.lines(1)) == len(run.lines(0)) == 2 * BATCHES // 10
    assert run.lines(0)[0]["metrics"]["outer_divergence"] > 0
    saved = sorted((tmp_path / "a" / "checkpoints").iterdir(), key=lambda p: p.name)
    assert [path.name for path in saved] == ["epoch=0-step=19.ckpt", "epoch=1-step=38.ckpt"]
    logged = (tmp_path / "a" / "csv" / "lightning_logs" / "version_0" / "metrics.csv").read_text()
    assert "outer_divergence" in logged.splitlines()[0]
    with running(
        tmp_path / "b", lighthouse, **{**first, "max_epochs": 3, "resume": str(saved[1])}
    ) as again:
        again.wait(again.start(0), again.start(1))
    lines = again.lines(0)
    assert compare(lines, again.lines(1)) == len(lines)
    assert lines[0]["outer_step"] == run.lines(0)[-1]["outer_step"] + 1
    assert lines[0]["step"] == 2 * BATCHES + 10
    assert again.end(0)["digest"] == again.end(1)["digest"]
    assert len(again.end(0)["val_losses"]) == 3


def test_a_fabric_loop_is_killed_healed_and_resumed(tmp_path: Path, lighthouse: str) -> None:
    options = {"sync_every": 10, "fragments": 2, "fragment_sync_delay": 1, "outer_momentum": 0.8}
    epochs = 5
    with harness.running(
        tmp_path / "a",
        lighthouse,
        worker=FABRIC_WORKER,
        strategy_options=options,
        epochs=epochs,
        holds=["step:33"],
        die=[1, 13],
    ) as run:
        again = die_and_heal(run)
    lines, ends = [run.lines(i) for i in (0, 1)], [run.end(i) for i in (0, 1)]
    by_step = {line["outer_step"]: line for line in lines[0]}
    common = [(by_step[x["outer_step"]], x) for x in lines[1] if x["outer_step"] in by_step]
    assert len(common) > 5
    for mine, other in common:
        for key in ("digest", "step", "place", "lr"):
            assert mine[key] == other[key], f"outer step {mine['outer_step']}: {key}"
    healed = [line for line in lines[1] if line["pid"] == again.pid]
    assert healed[0]["step"] > 33
    # The survivor has lost nothing.
    assert ends[0]["trained"] == epochs * BATCHES
    assert all(line["committed"] for line in lines[0])
    assert ends[0]["digest"] == ends[1]["digest"]
    assert ends[0]["step"] == ends[1]["step"] == epochs * BATCHES
    with harness.running(
        tmp_path / "b",
        lighthouse,
        worker=FABRIC_WORKER,
        strategy_options=options,
        epochs=epochs + 1,
        load=str(tmp_path / "a" / "saved.ckpt"),
    ) as more:
        more.wait(more.start(0), more.start(1))
    assert more.end(0)["digest"] == more.end(1)["digest"] != ends[0]["digest"]
    assert more.lines(0)[0]["outer_step"] == lines[0][-1]["outer_step"] + 1


def test_saves_by_the_clock_are_at_the_same_outer_steps(tmp_path: Path, lighthouse: str) -> None:
    """Their clocks differ, and each has its time over between two outer steps, too."""
    options = {"strategy": "ft_local_sgd", "step_delay_s": 0.03, "save_every_s": [0.9, 0.05]}
    with running(tmp_path, lighthouse, max_epochs=3, **options) as run:
        run.wait(run.start(0), run.start(1))
        mine, other = run.lines(0), run.lines(1)
    assert compare(mine, other) >= 5
    saved = [line["saved"] for line in mine]
    assert saved == [line["saved"] for line in other]
    assert len(set(saved)) >= 2  # none yet, and one that was saved
    assert len(list((tmp_path / "timed").iterdir())) == 1


LAST_SAVE = """
import os, signal, sys, time
from pathlib import Path
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.io import TorchCheckpointIO

log = Path(sys.argv[1])

class Deadly(TorchCheckpointIO):
    def save_checkpoint(self, checkpoint, path, storage_options=None):
        if not (log / "dies").exists():
            (log / "dies").touch()
            while not (log / "over").exists():  # the other one has taken its last step
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        super().save_checkpoint(checkpoint, path, storage_options)

class Model(BoringModel):
    def on_train_end(self):
        (log / "over").touch()

Trainer(strategy="ft_local_sgd", accelerator="cpu", devices=2, max_steps=20, limit_val_batches=0,
        callbacks=[ModelCheckpoint(log, filename="last", every_n_train_steps=20)],
        plugins=[Deadly()], logger=False, enable_progress_bar=False,
        enable_model_summary=False).fit(Model())
"""


def test_the_last_save_outlives_its_leader(tmp_path: Path) -> None:
    """It dies in it, and no outer step follows, since the last one was that of the last batch."""
    script = tmp_path / "train.py"
    script.write_text(LAST_SAVE)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = workers.run("lightning", [str(script), str(tmp_path)], env=env)
    text = done.stdout + done.stderr
    assert (tmp_path / "dies").exists(), text
    assert done.returncode == 0, text
    assert torch.load(tmp_path / "last.ckpt", weights_only=False)["global_step"] == 20


@pytest.mark.parametrize("strategy", ["FTDiLoCoStrategy", "FTLocalSGDStrategy"])
def test_a_peer_dies_right_behind_an_outer_step(
    tmp_path: Path, lighthouse: str, strategy: str
) -> None:
    """As the next slot begins. The others go on, and give its next life their state behind an inner step. They had
    waited for another quorum where they look at theirs, and denied it the state there, for ever."""
    with running(
        tmp_path,
        lighthouse,
        strategy=strategy,
        strategy_options={"min_replicas": 2, "sync_every": 5},
        max_epochs=1,
        holds=["slot:2", "step:10"],
    ) as run:
        die_in_slot(run, run.start(0), run.start(1), "slot:2", goes_on_to="step:10")
    ends = [run.end(replica) for replica in (0, 1)]
    for same in ("digest", "step", "epoch", "val_losses"):
        assert ends[0][same] == ends[1][same]


def die_in_slot(run: Run, zero: Process, one: Process, slot: str, *, goes_on_to: str = "") -> None:
    """Replica 1 is killed where both are held in `slot`, and is started again; both end. `goes_on_to`: a place to
    which the other comes by itself."""
    for name in (0, 1):
        run.until_held(name, slot)
    revoked = run.events(0, "revoked")
    one.kill()
    run.wait(one, code=-signal.SIGKILL)
    run.until(lambda: run.events(0, "revoked") > revoked, "replica 0 to hear of the death")
    run.go(slot)
    if goes_on_to:
        run.until_held(0, goes_on_to)
        run.go(goes_on_to)
    run.wait(zero, run.start(1))


TWO_OUTER_STEPS = {"min_replicas": 2, "sync_every": 10, "fragments": 2}


def test_a_peer_dies_between_the_last_outer_steps(tmp_path: Path, lighthouse: str) -> None:
    """Its next life makes those that are left: it had made none, and the others waited for ever."""
    with running(
        tmp_path, lighthouse, strategy_options=TWO_OUTER_STEPS, max_epochs=1, holds=["slot:4"]
    ) as run:
        die_in_slot(run, run.start(0), run.start(1), "slot:4")
    ends = [run.end(replica) for replica in (0, 1)]
    for same in ("digest", "step", "epoch", "val_losses"):
        assert ends[0][same] == ends[1][same]


def test_a_fabric_loop_comes_back_at_an_outer_step_and_between_the_last_ones(
    tmp_path: Path, lighthouse: str
) -> None:
    """First where its peer waits in an outer step: it made an inner step more before it, here all of the epoch's, so
    that the peer was alone in what is left for the end. Then it has to make the last one of these."""
    with harness.running(
        tmp_path,
        lighthouse,
        worker=FABRIC_WORKER,
        strategy_options=TWO_OUTER_STEPS,
        epochs=1,
        samples=128,  # 16 batches of each
        die=[1, 13],
        holds=["slot:4"],
    ) as run:
        zero, one = run.start(0), run.start(1)
        run.wait(one, code=-signal.SIGKILL)
        die_in_slot(run, zero, run.start(1), "slot:4")
    lines, ends = [run.lines(i) for i in (0, 1)], [run.end(i) for i in (0, 1)]
    assert [line["place"] for line in lines[0]] == [line["place"] for line in lines[1]]
    assert ends[0]["digest"] == ends[1]["digest"]
