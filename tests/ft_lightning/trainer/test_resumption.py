"""All processes die: the job goes on from its newest whole checkpoint, and another one does not."""

from __future__ import annotations

import csv
import json
import os
import signal
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch.utils.data import DataLoader, DistributedSampler

from ft_core.config import JobOptions
from ft_lightning.shared import trainings
from ft_lightning.shared.epoch_rest import Origin, batches_left, samples_of_a_batch
from ft_lightning.shared.topology import Role, Scope
from ft_lightning.trainer.batches import Batches
from ft_lightning.trainer.leader import Checkpoints
from ft_lightning.trainer.resumption import FOLDER, Resumption
from ft_lightning.trainer.saves import write_whole
from ft_lightning.trainer.strategy import FTDDPMixin
from tests.ft_lightning.harness import Run, running
from tests.harness.runs import Process

WORKER = Path(__file__).with_name("fits_worker.py")
EPOCHS, STEPS = 4, 16
KILLED_AT, SAVED_AT = 10, 8


def kill_all(run: Run, place: str) -> None:
    """Both groups wait at this place, and die there."""
    for name in (0, 1):
        run.until_held(name, place)
    for name in (0, 1):
        os.kill(run.lives(name)[-1], signal.SIGKILL)


def first_steps(run: Run, name: int) -> list[int]:
    """The first step of each life of a group that has trained."""
    lives: dict[int, int] = {}
    for line in run.lines(name, "trained"):
        lives.setdefault(line["pid"], line["step"])
    return list(lives.values())


@pytest.mark.process
def test_a_supervised_job_goes_on_from_its_newest_checkpoint(tmp_path: Path) -> None:
    """All groups are killed, and started again. The checkpoint goes when there is a newer one. The script run
    once more begins anew."""
    place = f"step:1:{KILLED_AT}"
    options: dict[str, Any] = {"fits": 1, "epochs": EPOCHS, "devices": 2, "strategy": {}}
    with running(tmp_path, worker=WORKER, holds=[place, "life:2"], **options) as run:
        main = run.start()
        kill_all(run, place)
        for name in (0, 1):  # whichever is started again first finds that all are dead
            run.until_held(name, "life:2")
        run.go(place)
        run.go("life:2")
        run.wait(main)
        assert [first_steps(run, name) for name in (0, 1)] == [[0, SAVED_AT]] * 2
        output = (tmp_path / "output.0").read_text()
        assert output.count("GPU available") == 1
        assert output.count("ft_lightning: training with 2 of 2 replica groups") == 2  # both lives
        said = "ft_lightning: all had ended; the job goes on from "
        assert run.output().count(said) == 1
        (left,) = tmp_path.glob("lightning_logs/version_*/checkpoints/*.ckpt")
        assert left.name.endswith(f"step={STEPS}.ckpt")
        run.wait(run.start())
        assert [first_steps(run, name) for name in (0, 1)] == [[0, SAVED_AT, 0]] * 2
        assert run.output().count(said) == 1
        done = [run.lines(name, "fits") for name in (0, 1)]
        assert {line["step"] for lines in done for line in lines} == {STEPS}
        assert len({line["digest"] for lines in done for line in lines}) == 1


def add_torn_file(folder: Path, whole: Path) -> None:
    """A newer checkpoint of the job, of which the first half was written."""
    torn = whole.with_name("torn.ckpt")
    torn.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    (record,) = (folder / FOLDER).glob("*.json")
    fits = json.loads(record.read_text())
    fits["1"]["saves"].append([str(torn), SAVED_AT + 1])
    record.write_text(json.dumps(fits))


def life(run: Run) -> list[Process]:
    return [run.start(index) for index in (0, 1)]


@pytest.mark.process
@pytest.mark.parametrize("resume", [True, False])
def test_a_job_with_an_id_goes_on_when_it_is_started_again(
    tmp_path: Path, lighthouse: str, resume: bool
) -> None:
    """By hand, with FT_JOB_ID. The newest file is torn: the one before it is taken. A job that has
    finished begins anew."""
    place = f"step:1:{KILLED_AT}"
    strategy: dict[str, Any] = {"timeout_s": 20, "resume": resume}
    options: dict[str, Any] = {"fits": 1, "epochs": EPOCHS, "strategy": strategy}
    with running(tmp_path, lighthouse, worker=WORKER, holds=[place], **options) as run:
        killed = life(run)
        kill_all(run, place)
        run.wait(*killed, code=-signal.SIGKILL)
        (whole,) = tmp_path.glob("lightning_logs/version_*/checkpoints/*.ckpt")
        add_torn_file(tmp_path, whole)
        run.go(place)
        run.wait(*life(run))
        begins = SAVED_AT if resume else 0
        assert [first_steps(run, name) for name in (0, 1)] == [[0, begins]] * 2
        run.wait(*life(run))
        assert [first_steps(run, name) for name in (0, 1)] == [[0, begins, 0]] * 2
        assert run.output().count(f"goes on from {whole}") == resume


@pytest.mark.process
@pytest.mark.parametrize("how", ["supervised", "by hand"])
def test_the_only_group_of_a_job_goes_on_in_its_log(
    tmp_path: Path, lighthouse: str, how: str
) -> None:
    """What its first life has logged stays in the file."""
    place = f"step:1:{KILLED_AT}"
    options: dict[str, Any] = {"fits": 1, "epochs": EPOCHS, "logs": True}
    if how == "supervised":
        options |= {"devices": 2, "strategy": {"group_size": 2}}
    with running(tmp_path, lighthouse, worker=WORKER, holds=[place], **options) as run:
        first = run.start(None if how == "supervised" else 0, 1)
        run.until_held(0, place)
        os.kill(run.lives(0)[-1], signal.SIGKILL)
        run.go(place)
        if how == "by hand":
            run.wait(first, code=-signal.SIGKILL)
            first = run.start(0, 1)
        run.wait(first)
    (path,) = tmp_path.glob("lightning_logs/*/metrics.csv")
    with path.open(newline="") as file:
        steps = [int(row["step"]) for row in csv.DictReader(file) if row["loss"]]
    last = max(steps)
    assert last + 1 > KILLED_AT
    assert sorted(set(steps)) == list(range(last + 1))


class Connector:
    """Lightning's, which remembers what it was to load."""

    started: Any = "nothing"
    _loaded_checkpoint: ClassVar[dict[str, Any]] = {}

    def resume_start(self, checkpoint_path: Any = None, weights_only: Any = None) -> None:
        self.started = checkpoint_path


class Loop:
    """Lightning's, of which `skip` is asked."""

    done = skip = False


def started_from(
    root: Path | str, job: str, restarts: int, *, wanted: bool, given: Any = None
) -> Any:
    """The checkpoint that another process of the job loads, and what its leader says."""
    resumption = fit(root, job, restarts, wanted=wanted)
    trainer = resumption._trainer
    trainer._checkpoint_connector.resume_start(given)
    resumption.release()
    assert type(trainer._checkpoint_connector) is Connector
    trainer.global_step = 5 if trainer._checkpoint_connector.started else 0
    return trainer._checkpoint_connector.started, resumption.begin()


def fit(root: Path | str, job: str, restarts: int = 0, *, wanted: bool = True) -> Resumption:
    trainer = SimpleNamespace(
        default_root_dir=str(root),
        global_step=0,
        current_epoch=0,
        loggers=[],
        callback_metrics={},
        checkpoint_callbacks=[],
        max_epochs=8,
        max_steps=-1,
        fit_loop=Loop(),
        strategy=SimpleNamespace(forget_checkpoint=lambda: None),
        _checkpoint_connector=Connector(),
    )
    scope = Scope(role=Role.MEMBER, name="0", index=0, num_groups=2, restarts=restarts)
    options = JobOptions(name="0", job_id=job)
    return Resumption(trainer, options, scope, wanted=wanted, ask=lambda question: question())


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize(
    ("job", "restarts"), [("mine", 0), ("mine", 1), ("default", 0), ("default", 1), ("another", 1)]
)
def test_which_start_goes_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    job: str,
    restarts: int,
    wanted: bool,
    finished: bool,
) -> None:
    """A fit saves two checkpoints, the second of which is removed, and ends. Then another begins."""
    monkeypatch.setattr(trainings, "over", lambda job: "")  # no peers are in a later fit
    saved = [tmp_path / "a.ckpt", tmp_path / "b.ckpt"]
    for name in ("mine", "default"):
        first = fit(tmp_path, name)
        assert not first.begin()
        first._trainer.global_step = 5
        for path in saved:
            path.touch()
            first.saved(path)
        if finished:
            first.finished()
    saved[1].unlink()
    goes_on = wanted and job != "another" and (restarts > 0 or (job == "mine" and not finished))
    path, said = started_from(tmp_path, job, restarts, wanted=wanted)
    assert path == (str(saved[0]) if goes_on else None)
    assert ("the job goes on from" in said) == goes_on
    assert ("has not finished" in said) == (not goes_on and job != "another" and not finished)
    again = started_from(tmp_path, job, 1, wanted=True)[0]  # one that began anew has saved nothing
    assert again == path


class Elsewhere(LocalFileSystem):
    """A storage of its own protocol, as an object store's, whose files are in a folder."""

    protocol = ("elsewhere",)

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return LocalFileSystem._strip_protocol(str(path).removeprefix("elsewhere://"))


@pytest.mark.parametrize("kind", ["elsewhere://", "file://", "file:"])
def test_a_folder_that_is_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Records and checkpoints are found there by the job's next processes; nothing is in a folder of this
    name below the working directory."""
    fsspec.register_implementation("elsewhere", Elsewhere, clobber=True)
    monkeypatch.chdir(tmp_path)
    root = f"{kind}{tmp_path}/root"
    (tmp_path / "root").mkdir()
    saved = Checkpoints()
    io = TorchCheckpointIO()
    first = fit(root, "mine")
    assert not first.begin()
    first._trainer.global_step = 5
    for name in ("a", "b"):
        given = io, {"step": 5}, f"{root}/{name}.ckpt", None
        write = partial(write_whole, *given, plain=True, still_leads=lambda: True)
        assert saved.save(f"{root}/{name}.ckpt", write)
        first.saved(f"{root}/{name}.ckpt")
    here = {path.name for path in tmp_path.iterdir()}
    assert here == {"root"}
    assert {p.name for p in (tmp_path / "root").iterdir()} == {FOLDER, "a.ckpt", "b.ckpt"}
    path, said = started_from(root, "mine", 1, wanted=True)
    assert torch.load(Path(path.removeprefix("elsewhere://"))) == {"step": 5}
    assert path.endswith("/b.ckpt") and f"goes on from {path}" in said


def test_each_job_has_a_record_of_its_own_which_takes_metrics_of_any_shape(tmp_path: Path) -> None:
    """The ids "a/b" and "a_b" had one; and a metric of several numbers ended the fit at its end."""
    (tmp_path / "a.ckpt").touch()
    first, again, other = fit(tmp_path, "a/b"), fit(tmp_path, "a/b"), fit(tmp_path, "a_b")
    first.saved(tmp_path / "a.ckpt")
    first._trainer.callback_metrics = {"confusion": torch.eye(2), "loss": torch.tensor(0.5)}
    first.finished()
    assert again.has_ended() and not other.has_ended()
    assert started_from(tmp_path, "a_b", 1, wanted=True)[0] is None


def test_a_folder_that_does_not_exist_is_made(tmp_path: Path) -> None:
    """A logger or `dirpath` elsewhere leaves nobody who makes `default_root_dir`, and its parents."""
    first = fit(tmp_path / "runs" / "root", "mine")
    assert not first.begin()
    (tmp_path / "a.ckpt").touch()
    first.saved(tmp_path / "a.ckpt")
    path, _ = started_from(tmp_path / "runs" / "root", "mine", 1, wanted=True)
    assert path == str(tmp_path / "a.ckpt")


def test_a_folder_in_memory_ends_with_the_process() -> None:
    first = fit("memory://root", "mine")
    assert "default_root_dir is in the memory of each process" in first.begin()
    first.saved("memory://root/a.ckpt")
    assert started_from("memory://root", "mine", 1, wanted=True)[0] is None


def test_a_path_that_is_given_is_loaded(tmp_path: Path) -> None:
    first = fit(tmp_path, "mine")
    (tmp_path / "a.ckpt").touch()
    first.saved(tmp_path / "a.ckpt")
    assert started_from(tmp_path, "mine", 1, wanted=True, given="b.ckpt") == ("b.ckpt", "")


class OlderConnector(Connector):
    """Lightning 2.5's: it reads files as a whole, and is not told to."""

    def resume_start(self, checkpoint_path: Any = None) -> None:  # type: ignore[override]
        self.started = checkpoint_path


def test_an_older_lightning_goes_on_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "Connector", OlderConnector)
    first = fit(tmp_path, "mine")
    assert not first.begin()
    (tmp_path / "a.ckpt").touch()
    first.saved(tmp_path / "a.ckpt")
    assert started_from(tmp_path, "mine", 1, wanted=True)[0] == str(tmp_path / "a.ckpt")


@pytest.mark.parametrize(("before", "done", "told"), [(3, 4, True), (2, 4, False), (3, 0, False)])
def test_a_resume_within_an_epoch_with_another_number_of_processes_says_so(
    capsys: pytest.CaptureFixture[str], before: int, done: int, told: bool
) -> None:
    """Where it can't be known which samples are left: the order of this sampler is its own."""
    current = SimpleNamespace(ready=done, completed=done)
    trainer = SimpleNamespace(num_training_batches=8)
    trainer.fit_loop = SimpleNamespace(
        restarted_mid_epoch=True,
        epoch_progress=SimpleNamespace(current=SimpleNamespace(processed=0)),
        epoch_loop=SimpleNamespace(
            restarted_on_train_batch_end=False,
            batch_progress=SimpleNamespace(current=current, is_last_batch=False),
        ),
        _combined_loader=SimpleNamespace(flattened=[DataLoader([0, 1, 2], shuffle=True)]),
    )
    strategy = SimpleNamespace(
        _checkpoints=SimpleNamespace(loaded={"world_size": before}),
        _batches=Batches(lambda loader, epoch: None),
        _trainer=trainer,
        scope=SimpleNamespace(rank=0),
        world_size=2,
    )
    resume: Any = FTDDPMixin._resume_epoch
    resume(strategy)
    said = capsys.readouterr().err
    assert (
        "saved within an epoch, by 3 processes; with 2 the epoch goes on at batch 4" in said
    ) == told


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("processes", [1, 3, 4])
def test_what_is_left_of_an_epoch_is_divided_as_a_sampler_divides_the_whole(
    processes: int, shuffle: bool, drop_last: bool
) -> None:
    """From the first sample on, and from the midst of it."""
    data = list(range(50))
    loaders = []
    for rank in range(processes):
        sampler: Any = DistributedSampler(data, processes, rank, shuffle, 7, drop_last)
        sampler.set_epoch(2)
        loaders.append(DataLoader(data, 4, sampler=sampler, drop_last=drop_last))
    assert [samples_of_a_batch(loader) for loader in loaders] == [4 * processes] * processes
    for loader in loaders:
        assert batches_left(loader, Origin(2)) == list(loader.batch_sampler)
    whole: Any = DistributedSampler(data, 1, 0, shuffle, 7)
    whole.set_epoch(2)
    order = list(whole)
    left = [batches_left(loader, Origin(2, 0, 24)) for loader in loaders]
    seen = [sample for batches in left for batch in batches for sample in batch]
    assert len({len(batches) for batches in left}) == 1
    assert set(seen) <= set(order[24:])
    if drop_last:
        assert len(seen) == len(set(seen)) > 26 - 4 * processes
    else:
        assert set(seen) == set(order[24:]) and len(seen) < 26 + processes
