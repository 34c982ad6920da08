"""Several processes save in one folder at the same moment."""

from __future__ import annotations

import os
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ft_accelerate.options import FaultTolerancePlugin
from ft_accelerate.runtime.checkpoints import FOLDER, SavedPosition, publish, save_again
from ft_accelerate.runtime.script_position import ScriptPosition
from ft_accelerate.runtime.startup import GroupRanks
from ft_core.environment import ReplicaEnv, Supervision
from tests.harness.waiting import until


def ranks(index: int) -> GroupRanks:
    place = ReplicaEnv.read({"REPLICA_GROUP_ID": str(index), "NUM_REPLICA_GROUPS": "2"})
    return GroupRanks(
        FaultTolerancePlugin(replica_group_id=index, num_replica_groups=2), place, Supervision()
    )


def has_ticked(clock: Path, since: Path) -> bool:
    """Whether a file that is written now is newer than the folder `since`."""
    clock.write_text("")
    return clock.stat().st_mtime_ns > since.stat().st_mtime_ns


@pytest.mark.parametrize("before", [True, False])
def test_one_that_is_ahead_has_saved_the_next_state_already(tmp_path: Path, before: bool) -> None:
    """The main process was slow, and used to remove what the other had brought for that: before it had begun with
    the first, or meanwhile."""
    root = tmp_path / FOLDER

    def write(index: int, draft: Path) -> Path:
        (draft / f"random_states_{index}.pkl").write_text(draft.name)
        return draft

    def other_saves_both() -> None:
        for state in ("first", "second"):
            publish(tmp_path / state, root, ranks(1), partial(write, 1), lambda: False)

    def write_slowly(draft: Path) -> Path:
        if not before:
            other_saves_both()
        return write(0, draft)

    if before:
        other_saves_both()
        until(partial(has_ticked, tmp_path / "clock", root), "the file system's clock")
    publish(tmp_path / "first", root, ranks(0), write_slowly, lambda: True)
    publish(tmp_path / "second", root, ranks(0), partial(write, 0), lambda: True)
    for state in ("first", "second"):
        texts = {path.read_text() for path in (tmp_path / state).iterdir()}
        assert texts == {f"{state}.0", f"{state}.1"}
    assert not root.exists()


@pytest.mark.parametrize("stopped", [True, False])
def test_a_main_process_that_was_stopped_in_a_save_replaces_nothing_of_its_successors(
    tmp_path: Path, stopped: bool
) -> None:
    """A folder that each save is written to: an older state used to replace the newer one."""
    root, last = tmp_path / FOLDER, tmp_path / "last"

    def write(step: int, draft: Path) -> Path:
        (draft / "model").write_text(str(step))
        return draft

    def write_and_stop(draft: Path) -> Path:
        until(partial(has_ticked, tmp_path / "clock", draft), "the file system's clock")
        written = write(10, draft)
        if stopped:
            publish(last, root, ranks(1), partial(write, 15), lambda: True)
        return written

    assert publish(last, root, ranks(0), partial(write, 5), lambda: True)
    assert publish(last, root, ranks(0), write_and_stop, lambda: True) is not stopped
    assert (last / "model").read_text() == ("15" if stopped else "10")
    assert not root.exists()


@pytest.mark.parametrize("written", [True, False], ids=["dies behind it", "dies in it"])
def test_the_next_main_process_deletes_the_oldest_checkpoint(tmp_path: Path, written: bool) -> None:
    """In place of a main process that dies in the save, or between it and that. `total_limit` was left to the next save,
    and behind the last one there was one too many."""
    settings = SimpleNamespace(automatic_checkpoint_naming=True, total_limit=2, iteration=3)
    accelerator = SimpleNamespace(project_configuration=settings, is_main_process=True)
    folder = tmp_path / "checkpoints"
    for number in range(3 if written else 2):
        (folder / f"checkpoint_{number}").mkdir(parents=True)

    def original(_: Any, draft: str) -> str:
        (Path(draft) / "model").write_text("whole")
        return draft

    final = folder / "checkpoint_2"
    assert save_again(original, ranks(1), accelerator, final) == final
    assert {path.name for path in folder.iterdir()} == {"checkpoint_1", "checkpoint_2"}
    assert (final / "model").exists() is not written  # one that is there is whole
    assert (settings.automatic_checkpoint_naming, settings.iteration) == (True, 3)


@pytest.mark.parametrize("is_main", [True, False])
def test_the_folder_goes_while_it_is_looked_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_main: bool
) -> None:
    """Another process has finished, and removes the folder, which is empty: it used to be an error."""
    root, glob, removed = tmp_path / FOLDER, Path.glob, []

    def late(path: Path, pattern: str) -> Any:
        if path == root and not os.listdir(root):
            root.rmdir()
            removed.append(path)
            raise FileNotFoundError(root)  # as it does where the folder goes within it
        return glob(path, pattern)

    def write(draft: Path) -> Path:
        (draft / "random_states_0.pkl").write_text("mine")
        return draft

    monkeypatch.setattr(Path, "glob", late)
    root.mkdir()
    (tmp_path / "state").mkdir()
    assert publish(tmp_path / "state", root, ranks(0), write, lambda: is_main) == is_main
    assert removed
    assert (tmp_path / "state" / "random_states_0.pkl").read_text() == "mine"
    assert not root.exists()


def test_the_main_process_is_done_while_another_brings_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finds nothing in the folder that the other has just made for them, and removes it: they used to be lost."""
    root, final, mkdir, saved = tmp_path / FOLDER, tmp_path / "state", Path.mkdir, []

    def write(index: int, draft: Path) -> Path:
        (draft / f"random_states_{index}.pkl").write_text(str(index))
        return draft

    def main_is_done(path: Path, *args: Any, **kwargs: Any) -> None:
        mkdir(path, *args, **kwargs)
        if path == root / "state.parts" and not saved:
            saved.append(path)
            publish(final, root, ranks(0), partial(write, 0), lambda: True)

    monkeypatch.setattr(Path, "mkdir", main_is_done)
    publish(final, root, ranks(1), partial(write, 1), lambda: False)
    assert saved
    assert {path.name for path in final.iterdir()} == {f"random_states_{i}.pkl" for i in (0, 1)}
    assert not root.exists()


def test_a_machine_without_temporary_files_remembers_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended a script, which was at its end, with an error of the file's, and did not leave the others."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    saved = SavedPosition(ScriptPosition(), "job")
    saved.remember(tmp_path)
    saved.forget()
