"""The keeper's process: holds the state of the training in case that all processes die at once.

    python -m ft_core.launch.state_keeper INTERVAL SPEAKER SUPERVISOR

It is an observer: at intervals it asks one member's heal server for the version that this member shows
next (`NEXT`). The member serves it as to a healing peer, at the boundary of its step. No quorum changes
for it, and no message of the protocol is sent. What it holds it serves to processes that start. The rules
are in `kept.py`; the supervisor's board tells which process is where.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ft_core.config import JobOptions
from ft_core.heal import NEXT, HealDenied, HealError, HealKey, HealProgress, HealServer, fetch
from ft_core.launch import kept_files
from ft_core.launch.board import Slot, slot
from ft_core.launch.keeping import UNWANTED_EXIT_CODE
from ft_core.launch.kept import Card, takes
from ft_core.launch.supervisor import die_with, say

log = logging.getLogger("ft_core")

HOST = "127.0.0.1"
PATIENCE_S = 30.0
"""A member that shows nothing for so long is busy with something else: another one is asked."""
SHARE = 0.05
"""Of the time, at most, fetches go on."""
CONFIRMED_EVERY_S = 0.02
MEMORY_SHARE = 0.5
"""Of the memory that is free, at most, two copies of the state take."""


class TooLarge(Exception):
    """The state takes more memory than there is for it."""


class StateKeeper:
    """See the module's docstring. One thread.

    Args:
        board: of the supervisor.
        every_s: interval of fetches, from begin to begin.
        tell: gets sentences for the user.
        free_bytes: how much memory could be had now.
        patience_s: see `PATIENCE_S`.
        folder: where it writes what it holds (`kept_files.py`); "": nowhere.
    """

    def __init__(
        self,
        board: Slot,
        every_s: float,
        tell: Callable[[str], object],
        free_bytes: Callable[[], int] | None = None,
        patience_s: float = PATIENCE_S,
        folder: str = "",
    ) -> None:
        self._board, self._every_s, self._tell = board, every_s, tell
        self._free_bytes = free_bytes or available_bytes
        self.patience_s = patience_s
        self._folder = folder
        self._told_of_refusal = self._told_of_disk = False
        self._server: HealServer | None = None
        self._held: Any = None
        self._spare: Any = None  # of the version before: the next one is received into it
        self.card: Card | None = None
        """What it holds. Read only."""

    def run(self) -> None:
        """For ever. Raises TooLarge."""
        while True:
            began = time.monotonic()
            self.renew()
            took_s = time.monotonic() - began
            time.sleep(max(self._every_s - took_s, took_s * (1 / SHARE - 1), CONFIRMED_EVERY_S))

    def renew(self) -> bool:
        """Fetch a newer version, if a member shows one; whether it did. Raises TooLarge."""
        for child, row in sorted(self._board.cards().items()):
            card = Card.of(row)
            try:
                if self._fetch(child, card):
                    return True
            except HealDenied as error:
                if not self._told_of_refusal:
                    self._told_of_refusal = True
                    self._tell(f"the state is not kept in case that all replica groups die: {error}")
            except HealError as error:
                log.debug("child %d shows no state: %s", child, error)
        return False

    def close(self) -> None:
        """Stop serving."""
        if self._server is not None:
            self._server.close()

    def _fetch(self, child: int, source: Card) -> bool:
        versions: list[HealKey] = []

        def progress(seen: HealProgress) -> None:
            if not versions:
                self._check_room(seen.bytes_total)
                versions.append(seen.key)

        deadline = time.monotonic() + max(self.patience_s, 2 * self._every_s)
        options = _options(source.token)
        packed, stats = fetch(
            [source.address], NEXT, deadline=deadline, into=self._spare, options=options,
            progress=progress,
        )  # fmt: skip
        self._spare = packed  # until it counts
        card = self._confirmed(child, source, versions[0], deadline)
        if card is None or not takes(self.card, card):
            return False
        first = self.card is None
        self._spare, self._held = self._held, packed
        self._serve(card, source.token, versions[0])
        if first:
            self._tell(
                f"all of the state ({stats.bytes / 1e6:.0f} MB) is kept by a process of its own every "
                f"{self._every_s:g} s: if all replica groups die, they go on from there. "
                "keep_state_s=0 turns it off"
            )
        self._write()
        return True

    def _write(self) -> None:
        """A disk that takes nothing is told of once: what is in memory is served all the same."""
        if not self._folder or self.card is None:
            return
        try:
            kept_files.write(self._folder, self.card, self._held)
        except (OSError, RuntimeError) as error:
            if not self._told_of_disk:
                self._told_of_disk = True
                self._tell(f"the kept state can't be written to {self._folder}: {error}")

    def _check_room(self, state_bytes: int) -> None:
        copies = 2 - (self._held is not None) - (self._spare is not None)
        free = self._free_bytes()
        if copies > 0 and copies * state_bytes > MEMORY_SHARE * free:
            raise TooLarge(
                f"the state is not kept in case that all replica groups die: {copies} copies of "
                f"{state_bytes / 1e6:.0f} MB are too many for {free / 1e6:.0f} MB of free memory"
            )

    def _confirmed(
        self, child: int, source: Card, version: HealKey, deadline: float
    ) -> Card | None:
        """K1: the member's card, when it says that it has committed a step from `version`; else None.

        Until then the card may show an older version: one that was published for this fetch, and retired
        before the server's thread could begin with it.
        """
        while time.monotonic() < deadline:
            row = self._board.cards().get(child)
            if row is not None:  # else it is dead, or just writing
                card = Card.of(row)
                shown = card.version
                if shown is not None and HealKey(shown.step, shown.lineage) == version:
                    return card
                passed = shown is not None and shown != source.version and shown.step > version.step
                if passed or card.address != source.address:
                    return None
            time.sleep(CONFIRMED_EVERY_S)
        return None

    def _serve(self, card: Card, token: str, version: HealKey) -> None:
        if self._server is None:
            self._server = HealServer(host=HOST, options=_options(token))
        self._server.publish(version, self._held, copy=False)
        self.card = replace(card, address=self._server.address, token="")
        self._board.tell(self.card.row())


def available_bytes() -> int:
    """How much memory a process could have now: of the machine, and of its control group."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    try:
        group = Path("/sys/fs/cgroup")
        most = int((group / "memory.max").read_text())
        return min(free, most - int((group / "memory.current").read_text()))
    except (OSError, ValueError):  # there is no limit
        return free


def _options(token: str) -> JobOptions:
    return JobOptions(name="keeper", token=token)


def main() -> None:
    """The process of `sys.argv`."""
    every_s, speaker, supervisor = float(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    die_with(supervisor)
    tell = partial(say, speaker)
    try:
        folder = os.environ.get(kept_files.ENV_FOLDER, "")
        StateKeeper(slot(), every_s, tell, folder=folder).run()
    except TooLarge as error:
        tell(str(error))
        sys.exit(UNWANTED_EXIT_CODE)


if __name__ == "__main__":
    main()
