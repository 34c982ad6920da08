"""Files that several processes share: one that is replaced whole, and a lock for one machine; and standard streams."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

NAME_BYTES = 255
"""The longest name of a file, on usual file systems."""


@contextlib.contextmanager
def replace_whole(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Replace the file `path`: a reader, or a crash at any moment, sees the old file or the new one.

        with replace_whole(path) as draft:
            draft.write_text(text)

    The block writes the file `draft`, in the same folder. At its end the draft is on the disk, and
    then takes the name `path`. If the block raises, the draft is removed and `path` is as it was. A
    process that is killed in between leaves its draft, `.NAME.HOST.PID.part`; see `remove_drafts`.

    Any thread, but one at a time for a path. Raises OSError if the file can't be written, also where the block
    has kept that to itself, and FileNotFoundError if the block has written none.
    """
    path = Path(path)
    draft = draft_of(path)
    try:
        yield draft
        if not draft.exists():
            draft.touch()  # raises why: Lightning's save passes over a PermissionError
            draft.unlink()
        _flush(draft)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # some network file systems can't flush a folder
        _flush(path.parent)


def draft_of(path: Path) -> Path:
    """What this process writes before it takes the name `path`. No other process has one of that name.

    A long name is cut, and told apart by a hash: what has room for `path` has room for its draft."""
    name, end = f".{path.name}", f".{_host()}.{os.getpid()}.part"
    room = NAME_BYTES - len(os.fsencode(end))
    if len(whole := os.fsencode(name)) > room:
        digest = "." + hashlib.blake2b(whole, digest_size=8).hexdigest()
        name = whole[: room - len(digest)].decode(errors="ignore") + digest
    return path.with_name(name + end)


def put_whole(draft: Path, path: Path) -> None:
    """Give a file or folder the name `path`, whatever has it now. What has the name is whole at any
    moment; where a folder is replaced, nothing has it between two system calls."""
    old = draft_of(path.with_name(f"{path.name}.old"))
    if draft.is_dir() or path.is_dir():
        with contextlib.suppress(FileNotFoundError):
            path.rename(old)
    draft.replace(path)
    remove_whole(old)


def remove_whole(path: Path) -> None:
    """Remove a file, or a folder with all that is in it, if it is there."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def remove_drafts(folder: str | os.PathLike[str]) -> None:
    """Remove the drafts that dead processes of this machine have left. Any thread."""
    end = re.compile(rf"\..*\.{re.escape(_host())}\.(\d+)\.part")
    with contextlib.suppress(OSError):
        for path in Path(folder).iterdir():
            if (left := end.fullmatch(path.name)) and not _lives(int(left[1])):
                remove_whole(path)


def _host() -> str:
    return socket.gethostname().replace("/", "_")


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _flush(path: Path) -> None:
    """Return when the file, or the folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_name(text: str) -> str:
    """A name for a file that is about `text`, such as a job's id: no two texts have one."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", text)
    looks_hashed = re.search(r"\.[0-9a-f]{16}$", text)
    if name != text or looks_hashed:
        name += "." + hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return name


def machine_file(purpose: str, subject: str, kind: str) -> Path:
    """A file of this user on this machine, for what its processes share about `subject` (any text)."""
    digest = hashlib.blake2b(subject.encode(), digest_size=6).hexdigest()
    return Path(tempfile.gettempdir()) / f"{purpose}-{os.getuid()}-{digest}.{kind}"


@contextlib.contextmanager
def machine_lock(purpose: str, subject: str) -> Iterator[None]:
    """Be the only process of this user on this machine in such a block; wait until it is free.

    `purpose` is part of the lock file's name, as is a hash of `subject` (any text). The file goes with the block, and
    the lock with this process if that is killed. Any thread.
    """
    path = machine_file(purpose, subject, "lock")
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    while True:
        descriptor = os.open(path, flags, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            break
        os.close(descriptor)  # the one before has removed this file: the next may hold another
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        # Not by closing it alone: a process that was forked meanwhile has a copy.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def hold_standard_streams() -> None:
    """Open /dev/null for each of the descriptors 0 to 2 that is closed; processes that are started from
    here have all three. Idempotent; call it before others are opened.

    Else the next file or socket gets such a number, and what libraries write to stderr goes there.
    """
    for number in range(3):
        try:
            os.set_inheritable(number, True)  # of a library, which has put /dev/null there
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for as long as the process


def write_out(stream: TextIO | None, text: str = "") -> None:
    """Write `text` to a standard stream, with what waits in its buffer. Any thread. None: it is closed.

    A line that nobody can read ends no process. Where the reader is gone (a terminal that was closed,
    `| head`), the stream leads nowhere from then on: else what waits in its buffer would fail again when
    Python shuts down, which makes the exit code 120.
    """
    if stream is None:
        return
    try:
        if text:
            stream.write(text)
        stream.flush()
    except ValueError:
        pass  # the script has closed it
    except OSError as error:
        if error.errno in (errno.EPIPE, errno.EIO):
            null = os.open(os.devnull, os.O_WRONLY)
            with contextlib.suppress(OSError, AttributeError):  # it is no file
                os.dup2(null, stream.fileno())
            os.close(null)
