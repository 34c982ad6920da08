"""What a lighthouse keeps over a restart: one small file, replaced whole at quorum changes.

Optional. Without it, a restarted lighthouse learns from the first member that comes back which
others to wait for. With it, the lighthouse knows at once. Safety never depends on the file.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from lighthouse.files import replace_whole
from lighthouse.wire.messages import JobKey

FORMAT = 2
MAX_FILE_BYTES = 256 * 1024 * 1024

Remembered = dict[JobKey, tuple[int, tuple[str, ...]]]
"""Job -> (quorum_id, members of that quorum)."""


def read(path: Path) -> Remembered:
    """What an earlier lighthouse left in `path`; empty if there is no such file.

    Raises ValueError, with a sentence that says what to do, if the file can't be used.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"over {MAX_FILE_BYTES} bytes")
        raw = json.loads(path.read_text(encoding="utf-8"))
        return _parse(raw)
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise ValueError(
            f"the state file {path} can't be used ({error or type(error).__name__}): delete it "
            "(a running job only waits a little longer for its members) or name another one"
        ) from error


def _parse(raw: Any) -> Remembered:
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise ValueError(f"not a lighthouse state file of format {FORMAT}")
    remembered: Remembered = {}
    for job in raw["jobs"]:
        quorum_id, members = job["quorum_id"], job["members"]
        if type(quorum_id) is not int or not isinstance(members, list):
            raise ValueError("a job without quorum_id or members")
        if not all(isinstance(member, str) for member in members):
            raise ValueError("members must be strings")
        key = JobKey(job["job_id"], job["room_id"])
        remembered[key] = (quorum_id, tuple(members))
    return remembered


def _write(path: Path, remembered: Remembered) -> None:
    jobs = [
        {"job_id": key.job_id, "room_id": key.room_id, "quorum_id": quorum_id, "members": members}
        for key, (quorum_id, members) in remembered.items()
    ]
    with replace_whole(path) as draft:
        draft.write_text(json.dumps({"format": FORMAT, "jobs": jobs}), encoding="utf-8")


class Journal:
    """Keeps the newest (quorum_id, members) of each job in `path`.

    `save` only hands over. A thread of its own writes, since a disk may be slow and a quorum must
    not wait for it. Of several saves in quick succession only the last need reach the file.

    Raises ValueError, with a sentence for a person, if the file is corrupt or can't be written.
    """

    def __init__(self, path: Path, *, max_jobs: int) -> None:
        self.path = path
        self.remembered = read(path)
        self.error: Exception | None = None
        """The last write's failure, or None."""
        self._max_jobs = max_jobs
        self._pending: Remembered | None = None
        self._closing = False
        self._changed = threading.Condition()
        try:  # a path that can't be written is an error now, not at the first quorum
            _write(path, self.remembered)
        except OSError as error:
            raise ValueError(
                f"the state file {path} can't be written ({error.strerror}): name one in a"
                " directory that exists and is writable"
            ) from error
        self._thread = threading.Thread(target=self._run, name="lighthouse-journal", daemon=True)
        self._thread.start()

    def save(self, job: JobKey, quorum_id: int, members: tuple[str, ...]) -> None:
        """Remember one job's quorum. Always called by the same thread; returns at once."""
        self.remembered.pop(job, None)
        self.remembered[job] = (quorum_id, members)
        while len(self.remembered) > self._max_jobs:
            del self.remembered[next(iter(self.remembered))]  # the job that changed longest ago
        with self._changed:
            self._pending = dict(self.remembered)
            self._changed.notify()

    def close(self) -> None:
        """Write what is pending and end the thread. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._pending is None and not self._closing:
                    self._changed.wait()
                pending, self._pending = self._pending, None
                if pending is None:
                    return
            try:
                _write(self.path, pending)
                self.error = None
            except Exception as error:  # training goes on with a full disk
                self.error = error
