"""The supervisor's side of the keeper of states (`state_keeper.py`): when its process runs.

It is started when its first fetch is due, so a short training has none; by then there may be a
template to fork it from. One that dies is started again: what it held is lost, and the next fetch
brings a newer state.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from ft_core.launch import kept_files
from ft_core.launch.board import Board
from ft_core.launch.kept import Card

LOOK_EVERY_S = 0.5
PAUSE_S = 1.0
"""Before a keeper that has ended is started again; doubled each time."""
LONGEST_PAUSE_S = 60.0
UNWANTED_EXIT_CODE = 3
"""Of a keeper that can't do anything here, and has said so: it is not started again."""
MODULE = "ft_core.launch.state_keeper"

Popen = Callable[..., "subprocess.Popen[bytes]"]


class Keeping:
    """Runs the keeper's process while the children of `board` train. The supervisor's thread, but for
    one of its own.

    Args:
        popen: as `subprocess.Popen`.
        environment: as `supervise` has it.
        every_s: the interval of fetches; 0: there is no keeper.
        speaker: what the keeper's lines on stderr begin with.
        folder: where it writes what it holds; "": nowhere.
    """

    def __init__(
        self,
        board: Board,
        popen: Popen,
        environment: Callable[[int], dict[str, str]],
        every_s: float,
        speaker: str,
        folder: str,
    ) -> None:
        self._board, self._popen, self._environment = board, popen, environment
        self._every_s, self._speaker, self._folder = every_s, speaker, folder
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        if every_s > 0:
            self._thread = threading.Thread(target=self._run, name="ft-keeping", daemon=True)
            self._thread.start()

    def close(self, *, over: bool) -> None:
        """End the keeper. Idempotent. `over`: the training has ended well."""
        held = self._board.card(self._board.keeper) if over and not self._closed.is_set() else None
        self._closed.set()
        with self._lock:
            if self._process is not None:
                self._process.kill()
        if self._thread is not None:
            self._thread.join()
        if held is not None and self._folder:
            kept_files.forget(Card.of(held).place[0], self._folder)

    def _run(self) -> None:
        """A thread of its own: the kernel ends the keeper with it (`die_with`)."""
        if not self._await_training():
            return
        pause_s = PAUSE_S
        while not self._closed.is_set():
            began = time.monotonic()
            if self._live() == UNWANTED_EXIT_CODE:
                return
            self._board.clear(self._board.keeper)
            if time.monotonic() > began + LONGEST_PAUSE_S:
                pause_s = PAUSE_S
            self._closed.wait(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _await_training(self) -> bool:
        """Wait until the children have trained for the first interval; False: closed."""
        began = None
        while not self._closed.wait(LOOK_EVERY_S if began is None else self._every_s):
            if began is not None:
                return True
            if any(self._board.look(child).commits for child in range(self._board.keeper)):
                began = time.monotonic()
        return False

    def _live(self) -> int:
        """One life of the keeper; its exit code."""
        board = self._board
        words = [MODULE, str(self._every_s), self._speaker, str(os.getpid())]
        command = [sys.executable, "-m", *words]
        env = {**self._environment(0), **board.environment(board.keeper)}
        options = {"env": env, "process_group": 0, "pass_fds": board.descriptors}
        with self._lock:
            if self._closed.is_set():
                return 0
            with contextlib.suppress(OSError):
                self._process = self._popen(command, **options)
        process = self._process
        code = process.wait() if process is not None else 1
        with self._lock:
            self._process = None
        return code
