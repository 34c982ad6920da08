"""Where a script was when it saved its state: in the checkpoint, for the process that loads it.

A script that resumes by itself (`load_state` of the newest checkpoint, then a loop from the epoch in its
name) begins in the middle. Its passes over the loaders are counted from where the checkpoint was saved,
so that a process that comes back, and finds a newer checkpoint than its peers have begun with, does not
count the passes before it twice.

When all processes of its job have died, a script goes on from the state that its launcher's keeper
holds (`ft_core.launch.kept`), unless what it has loaded is newer. One that does not resume, and of which
nothing is kept, begins at step 0. It is warned if the job has saved a state: this machine remembers the
newest one of each job in a file.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from pathlib import Path
from typing import Any

from ft_accelerate.runtime.script_position import ScriptPosition, Target
from lighthouse.files import machine_file, replace_whole

log = logging.getLogger("ft_accelerate")

FILE = "ft_position.json"
LEFT_OUT = (
    "the kept state of the job is not used, since this process begins %s: results of what it leaves out, or "
    "repeats, would be wrong"
)


class SavedPosition:
    """The position of this process's script in the checkpoints that it saves and loads.

    `job_id`: "" if what other processes have saved may be another job's. The loop's thread only.
    """

    def __init__(self, position: ScriptPosition, job_id: str) -> None:
        self._position = position
        self._newest = machine_file("ft_accelerate", job_id, "saved") if job_id else None
        self._loaded = False

    def on_save(self, models: Any, weights: Any, folder: str) -> None:
        """Accelerate's hook: `folder` is written."""
        (Path(folder) / FILE).write_text(json.dumps({"pass": self._position.resumes_at}))

    def on_load(self, models: Any, folder: str) -> None:
        """Accelerate's hook: `folder` is read."""
        self._loaded = True
        with contextlib.suppress(OSError, ValueError, KeyError):  # it is not one of ours
            self._position.resume_at(int(json.loads((Path(folder) / FILE).read_text())["pass"]))

    def goes_on_from(self, kept: Target, *, past: bool | None, has_trained: bool) -> bool:
        """Before the first step: whether this script goes on from a state that was kept at that place.

        Args:
            past: what a framework says that counts its own steps; None: there is none.
            has_trained: what this script has prepared has trained before.
        """
        position = self._position
        if kept.begun > position.begun:
            log.warning(LEFT_OUT, "with an earlier training of the script")
            return False
        if past is not None:
            return not past
        if has_trained and not self._loaded:
            log.warning(LEFT_OUT, "with what it has loaded in a way of its own")
            return False
        if kept.window is None:
            return not self._loaded
        here = position.active[-1] if position.active else None
        place = (position.iterations, 0) if here is None else (here.seq, here.yielded)
        return place <= kept.window

    def remember(self, folder: Path) -> None:
        """The main process has saved `folder`."""
        if self._newest is not None:
            with contextlib.suppress(OSError), replace_whole(self._newest) as draft:
                draft.write_text(str(folder))

    def warn_if_starting_anew(self) -> None:
        """This script trains from its own beginning, in the main process."""
        if self._loaded or self._newest is None:
            return
        self._loaded = True
        with contextlib.suppress(OSError):
            folder = self._newest.read_text()
            if os.path.isdir(folder):
                log.warning(
                    "no process of this job was left in training, and this script starts from its "
                    "beginning, though the job has saved %s: a script goes on from there if it calls "
                    "accelerator.load_state before its first batch, and begins its loop there",
                    folder,
                )

    def forget(self) -> None:
        """The training is at its end."""
        if self._newest is not None:
            self._newest.unlink(missing_ok=True)
