"""A file is replaced whole: by a block that ends, that raises, that is killed. A lock of one machine."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from lighthouse.files import (
    draft_of,
    file_name,
    machine_lock,
    put_whole,
    remove_drafts,
    replace_whole,
)
from tests.harness.waiting import PATIENCE_S


def test_the_new_file_takes_the_old_ones_place(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_text("old")
    with replace_whole(str(path)) as draft:
        draft.write_text("new")
        assert draft.parent == tmp_path, "a rename is whole on one file system only"
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_the_folder_may_come_into_being_in_the_block(tmp_path: Path) -> None:
    path = tmp_path / "later" / "state"
    with replace_whole(path) as draft:
        path.parent.mkdir()
        draft.write_text("new")
    assert path.read_text() == "new"


@pytest.mark.parametrize("written", [True, False])
def test_a_block_that_raises_changes_nothing(tmp_path: Path, written: bool) -> None:
    path = tmp_path / "state"
    path.write_text("old")
    with pytest.raises(KeyError), replace_whole(path) as draft:
        if written:
            draft.write_text("ne")
        raise KeyError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_block_that_writes_nothing_is_told(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_text("old")
    with pytest.raises(FileNotFoundError), replace_whole(path):
        pass
    assert path.read_text() == "old"


def test_a_block_that_passes_over_a_folder_that_cannot_be_written_is_told_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Lightning saves a checkpoint. A stand-in refuses, since root may write everywhere."""

    def refused(path: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "touch", refused)
    with pytest.raises(PermissionError), replace_whole(tmp_path / "file"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_the_file_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a machine that loses power may keep the name of a file without its content."""
    path, did = tmp_path / "state", []
    fsync, replace = os.fsync, os.replace
    names = {(tmp_path.stat().st_ino): "folder"}

    def flushed(descriptor: int) -> None:
        did.append(f"flush {names.get(os.fstat(descriptor).st_ino, 'file')}")
        fsync(descriptor)

    def renamed(self: Path, to: Path) -> None:
        did.append("rename")
        replace(self, to)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(Path, "replace", renamed)
    with replace_whole(path) as draft:
        draft.write_text("new")
    assert did == ["flush file", "rename", "flush folder"]


DIE_WITHIN = """
import os, signal, sys
from lighthouse.files import replace_whole
with replace_whole(sys.argv[1]) as draft:
    draft.write_text("ne")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_writer_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_text("old")
    killed = subprocess.run([sys.executable, "-c", DIE_WITHIN, str(path)], timeout=PATIENCE_S)
    assert killed.returncode == -signal.SIGKILL
    assert path.read_text() == "old"
    (draft,) = (p for p in tmp_path.iterdir() if p != path)
    assert draft.name.startswith(".state.") and draft.suffix == ".part"
    others = [tmp_path / ".state.another-host.1.part", tmp_path / f"{draft.name}.txt"]
    for other in others:
        other.touch()
    with replace_whole(path) as mine:
        mine.touch()
        remove_drafts(tmp_path)
        assert mine.exists() and not draft.exists() and all(p.exists() for p in others)


@pytest.mark.parametrize("name", ["m" * 255, "重" * 85, "m" * 100], ids=["long", "wide", "usual"])
def test_a_name_may_be_as_long_as_names_are(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that names its metrics, on a host with a long name. Its draft had no room."""
    monkeypatch.setattr(socket, "gethostname", lambda: "h" * 64)
    path, other = tmp_path / name, tmp_path / f"{name[:-1]}x"
    assert draft_of(path) != draft_of(other)
    path.write_text("old")
    with replace_whole(path) as draft:
        draft.write_text("new")
        remove_drafts(tmp_path)  # this process lives
    assert path.read_text() == "new"
    draft_of(path).mkdir()
    put_whole(draft_of(path), path)
    assert [each.name for each in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_folder_takes_the_place_of_what_has_its_name(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "state"
    if kind == "file":
        path.write_text("old")
    else:
        path.mkdir()
        (path / "old").touch()
    draft = draft_of(path)
    draft.mkdir()
    (draft / "new").touch()
    remove_drafts(tmp_path)  # this process lives
    put_whole(draft, path)
    assert [each.name for each in tmp_path.iterdir()] == ["state"]
    assert [each.name for each in path.iterdir()] == ["new"]


def test_a_folder_of_a_dead_process_goes(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait(PATIENCE_S)
    draft = draft_of(tmp_path / "state")
    left = draft.with_name(draft.name.replace(str(os.getpid()), str(dead.pid)))
    (left / "shards").mkdir(parents=True)
    remove_drafts(tmp_path)
    assert not list(tmp_path.iterdir())


def test_one_process_at_a_time_is_in_a_block_and_no_file_is_left(tmp_path: Path) -> None:
    """Also where some come while the file of the one before is removed."""
    log = tmp_path / "log"
    script = (
        "import os, sys\n"
        "from lighthouse.files import machine_lock\n"
        "for _ in range(200):\n"
        "    with machine_lock('test', 'a subject'), open(sys.argv[1], 'a') as log:\n"
        "        log.write(f'{os.getpid()} ')\n"
        "        log.flush()\n"
        "        log.write(f'{os.getpid()}\\n')\n"
    )
    command = [sys.executable, "-c", script, str(log)]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    started = [subprocess.Popen(command, env=environment) for _ in range(4)]
    assert [process.wait(PATIENCE_S) for process in started] == [0] * 4
    lines = [line.split() for line in log.read_text().splitlines()]
    assert len(lines) == 800
    assert all(len(line) == 2 and len(set(line)) == 1 for line in lines)
    assert list(tmp_path.iterdir()) == [log]


def test_a_killed_process_frees_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    script = (
        "import time\n"
        "from lighthouse.files import machine_lock\n"
        "with machine_lock('test', 'a subject'):\n"
        "    print('in', flush=True)\n"
        "    time.sleep(600)\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"in\n"
        assert len(list(tmp_path.iterdir())) == 1
        holder.kill()
    with machine_lock("test", "a subject"):
        assert len(list(tmp_path.iterdir())) == 1
    assert not list(tmp_path.iterdir())


def test_a_process_that_was_forked_in_the_block_does_not_hold_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A data loader's worker has copies of all descriptors, also of what another thread holds."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with ExitStack() as workers:
        with machine_lock("test", "a subject"):
            workers.enter_context(multiprocessing.get_context("fork").Pool(1))
            (path,) = tmp_path.iterdir()
            waiting = workers.enter_context(path.open())  # as another process that waits for it
        fcntl.flock(waiting, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_job_id_that_looks_like_the_name_of_anothers_file_has_its_own() -> None:
    for text in ("my job", "a/b", ""):
        name = file_name(text)
        names = {name, file_name(name), file_name(file_name(name))}
        assert len(names) == (3 if text else 1)
    assert file_name("job-1.2") == "job-1.2"
