"""Checkpoints that `save_state` leaves whole or not at all, and where a script was when it saved one.

Each process writes to a folder of its own in `.ft_saving`, beside the checkpoint. The main process
gives its folder the checkpoint's name when all is written; the others bring their random states to
it, or leave them for the main process to take along if it is not done yet: it may be several checkpoints
behind. There is no barrier in this: scripts may save on the main process only. What a dead writer has left
behind is removed by the next save of its replica group.

Processes that share one model (FSDP) write it together, so a folder there is a replica group's, which waits
for all of its processes.

A main process that was stopped while it wrote replaces nothing that its successor has written since.

A checkpoint that is written over an older one, or into a folder in use, replaces it file by file,
each of them whole.

A script that resumes by itself (`load_state` of the newest checkpoint, then a loop from the epoch in its
name) begins in the middle. Its passes over the loaders are counted from where the checkpoint was saved
(`SavedPosition`), so that a process that comes back, and finds a newer checkpoint than its peers have begun
with, does not count the passes before it twice.

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
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ft_accelerate.runtime.script_position import ScriptPosition, Target
from ft_accelerate.runtime.startup import GroupRanks
from lighthouse.files import machine_file, replace_whole

log = logging.getLogger("ft_accelerate")

FOLDER = ".ft_saving"
OWN = re.compile(r"random_states_\d+\.pkl$|rng_state_\d+\.pth$")
"""Files that each process writes under a name of its own; of all others the main process's count."""


def named(
    accelerator: Any, output_dir: str | os.PathLike[str] | None, saved: SavedPosition
) -> Path | None:
    """The checkpoint's name, if `save_state(output_dir)` is called now; None: Accelerate says what is wrong.

    Raises ValueError if the next number is taken, as Accelerate does; but not by the same checkpoint, where all
    have died and go on from an older state.
    """
    if accelerator.project_configuration.automatic_checkpoint_naming:
        return _numbered(accelerator, saved)
    return None if output_dir is None else Path(os.path.abspath(str(output_dir)))


def save_whole(
    original: Callable[..., Any],
    ranks: GroupRanks,
    accelerator: Any,
    final: Path | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`original(accelerator, final, ...)`, whole or not at all. Returns the checkpoint's path.

    Raises as `original`, with nothing written then.
    """
    settings = accelerator.project_configuration
    numbered = settings.automatic_checkpoint_naming
    if final is None:
        return original(accelerator, final, *args, **kwargs)
    root = Path(settings.project_dir) / FOLDER if numbered else final.parent / FOLDER

    def write(draft: Path) -> Path:
        if numbered:
            return _in_project(draft, original, accelerator, final, *args, **kwargs)
        return Path(original(accelerator, str(draft), *args, **kwargs))

    main = publish(final, root, ranks, write, lambda: bool(accelerator.is_main_process))
    if main and numbered:
        _delete_oldest(final.parent, settings.total_limit)
    return final


def save_again(
    original: Callable[..., Any],
    ranks: GroupRanks,
    accelerator: Any,
    final: Path,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """As `save_whole`, when the others, and the numbers of checkpoints, are further on. One with a number
    that is there is whole; its writer may have died before it deleted the oldest."""
    settings = accelerator.project_configuration
    numbered, iteration = settings.automatic_checkpoint_naming, settings.iteration
    if not numbered or not final.exists():
        settings.automatic_checkpoint_naming = False
        try:
            save_whole(original, ranks, accelerator, final, *args, **kwargs)
        finally:
            settings.automatic_checkpoint_naming, settings.iteration = numbered, iteration
    if numbered and accelerator.is_main_process:
        _delete_oldest(final.parent, settings.total_limit)
    return final


def publish(
    final: Path,
    root: Path,
    ranks: GroupRanks,
    write: Callable[[Path], Path],
    is_main: Callable[[], bool],
) -> bool:
    """Write a checkpoint elsewhere, and give it its name when it is whole.

    Args:
        final: the checkpoint's name.
        root: a folder on the same file system, for what is not whole yet.
        ranks: this process's replica group.
        write: writes this process's part into the empty folder that it is given; returns where.
        is_main: whether this process names the checkpoint; called when all is written.

    Returns whether this process has named it.
    """
    index = ranks.number
    if ranks.shards:
        index -= ranks.place.group_rank
        write = partial(_write_together, ranks, write)
    draft, parts = root / f"{final.name}.{index}", root / f"{final.name}.parts"
    if index != ranks.number:
        write(draft)
        return False
    _remove(root, f"*.{index}")
    began_ns = _make(draft)
    try:
        written = write(draft)
        main = is_main()
        if main and _was_replaced(written, final, began_ns):
            return False  # this process was stopped meanwhile, and has a successor
        if main:
            _publish(written, final)
            _bring(parts, final)
        elif written.is_dir():
            _contribute(written, parts, final)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        with contextlib.suppress(OSError):
            root.rmdir()  # fails while another process uses it
    return main


def _was_replaced(written: Path, final: Path, began_ns: int) -> bool:
    """Whether another main process has written this checkpoint, or one of its name, since."""
    for path in written.iterdir():
        if not OWN.match(path.name):
            with contextlib.suppress(OSError):
                if (final / path.name).stat().st_mtime_ns > began_ns:
                    return True
    return False


def _write_together(ranks: GroupRanks, write: Callable[[Path], Path], draft: Path) -> Path:
    """All processes of the group write to `draft`, which the first of them has made, and wait for each
    other. One that can't raises."""
    ranks.from_rank_0(lambda: None)
    written = write(draft)
    ranks.from_rank_0(lambda: None)
    return written


def _remove(root: Path, pattern: str) -> None:
    """What an earlier process of this number left."""
    with contextlib.suppress(FileNotFoundError):  # another has removed `.ft_saving`, empty
        for left in root.glob(pattern):
            shutil.rmtree(left, ignore_errors=True)


def _make(draft: Path) -> int:
    """Returns the time at which it was made, by the clock of its file system."""
    while not draft.is_dir():
        with contextlib.suppress(FileNotFoundError):  # another has removed `.ft_saving`, empty
            draft.mkdir(parents=True)
    return draft.stat().st_mtime_ns


def _numbered(accelerator: Any, saved: SavedPosition) -> Path:
    folder = Path(accelerator.project_dir) / "checkpoints"
    final = folder / f"checkpoint_{accelerator.save_iteration}"
    if final.exists() and not saved.is_here(final):
        raise ValueError(
            f"Checkpoint directory {final} ({accelerator.save_iteration}) already exists. Please "
            "manually override `self.save_iteration` with what iteration to start with."
        )
    return final


def _in_project(
    draft: Path, original: Callable[..., Any], accelerator: Any, *args: Any, **kwargs: Any
) -> Path:
    """Have Accelerate number its checkpoint in another project's folder, which is empty."""
    settings = accelerator.project_configuration
    before, settings.project_dir = settings.project_dir, str(draft)
    try:
        return Path(original(accelerator, *args, **kwargs))
    finally:
        settings.project_dir = before


def _publish(written: Path, final: Path) -> None:
    final.parent.mkdir(parents=True, exist_ok=True)
    try:
        written.rename(final)
    except OSError:  # it is there, and not empty
        _move(written, final)


def _move(source: Path, to: Path) -> None:
    to.mkdir(exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.is_dir():
            _move(path, to / path.name)
        else:
            path.replace(to / path.name)


def _contribute(written: Path, parts: Path, final: Path) -> None:
    """Bring this process's own files to the checkpoint, whether it is there yet or not."""
    own = [path for path in written.iterdir() if OWN.match(path.name)]
    for path in own:
        # It may be done between any two of these, and removes `parts` then.
        for folder in (final, parts, final):
            with contextlib.suppress(OSError):
                if folder == parts:
                    parts.mkdir(exist_ok=True)
                path.replace(folder / path.name)
                break
    if final.exists():  # it may have become so, after it had looked for parts
        _bring(parts, final)


def _bring(parts: Path, final: Path) -> None:
    """Several processes may do so at once: a file that is gone was brought by another."""
    with contextlib.suppress(FileNotFoundError):
        for path in list(parts.iterdir()):
            with contextlib.suppress(FileNotFoundError):
                path.replace(final / path.name)
        with contextlib.suppress(OSError):
            parts.rmdir()


def _delete_oldest(folder: Path, limit: int | None) -> None:
    """Accelerate's `total_limit`, when the new checkpoint is there."""
    if limit is None:
        return
    numbers = {path: re.search(r"(\d+)$", path.name) for path in folder.iterdir()}
    known = sorted((int(m[1]), path) for path, m in numbers.items() if m is not None)
    for _, path in known[: max(0, len(known) - limit)]:
        shutil.rmtree(path)


# ---------------------------------------------------------------- where a script was

POSITION_FILE = "ft_position.json"
LEFT_OUT = (
    "the kept state of the job is not used, since this process begins %s: results of what it leaves out, or "
    "repeats, would be wrong"
)


class SavedPosition:
    """The position of this process's script in the checkpoints that it saves and loads.

    `job_id`: "" if what other processes have saved may be another job's. The loop's thread only.
    """

    def __init__(self, position: ScriptPosition, job_id: str) -> None:
        self._position, self._job_id = position, job_id
        self._newest = machine_file("ft_accelerate", job_id, "saved") if job_id else None
        self._loaded = False
        self.goes_on = ""
        """What is to be said when this script trains; "": it does not go on from what its job has saved."""

    def on_save(self, models: Any, weights: Any, folder: str) -> None:
        """Accelerate's hook: `folder` is written."""
        (Path(folder) / POSITION_FILE).write_text(json.dumps(self._here()))

    def _here(self) -> dict[str, Any]:
        position = self._position
        return {
            "pass": position.resumes_at,
            "behind": position.resumes_behind,
            "job": self._job_id,
        }

    def is_here(self, folder: Path) -> bool:
        """Whether the job has saved `folder` at the place where this script is."""
        with contextlib.suppress(OSError, ValueError):
            told = json.loads((folder / POSITION_FILE).read_text())
            return bool(self._job_id) and told == self._here()
        return False

    def on_load(self, models: Any, folder: str) -> None:
        """Accelerate's hook: `folder` is read."""
        self._loaded = True
        with contextlib.suppress(OSError, ValueError, KeyError):  # it is not one of ours
            told = json.loads((Path(folder) / POSITION_FILE).read_text())
            self._position.resume_at(int(told["pass"]), behind=bool(told.get("behind")))

    def goes_on_from(self, kept: Target, *, past: bool | None, has_trained: bool) -> bool:
        """Before the first step: whether this script goes on from a state that was kept at that place.

        Args:
            past: what a framework says that counts its own steps; None: there is none.
            has_trained: what this script has prepared has trained before.
        """
        position = self._position
        if position.is_in_past_of(kept):
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

    def in_words(self) -> str:
        """The script's place; "" while what it goes on from is yet to be told. Any thread."""
        return "" if self.goes_on else self._position.in_words()

    def remember(self, folder: Path) -> None:
        """The main process has saved `folder`."""
        if self._newest is not None:
            with contextlib.suppress(OSError), replace_whole(self._newest) as draft:
                draft.write_text(str(folder))

    def trains(self) -> None:
        """This script trains, in the main process, and has taken nothing from others."""
        if self.goes_on:
            log.warning("%s", self.goes_on)
            self.goes_on = ""
        elif not self._loaded:
            self._warn_if_starting_anew()

    def _warn_if_starting_anew(self) -> None:
        if self._newest is None:
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
            with contextlib.suppress(OSError):
                self._newest.unlink()
