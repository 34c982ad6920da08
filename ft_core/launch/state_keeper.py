"""The keeper's process: holds the state of the training in case all processes die at once.

    python -m ft_core.launch.state_keeper INTERVAL SPEAKER SUPERVISOR

It is an observer: at intervals it asks one member's heal server for the version that this member shows
next (`NEXT`). The member serves it as to a healing peer, at the boundary of its step. No quorum changes
for it, and no message of the protocol is sent. What it holds it serves to processes that start. The rules
are in `kept.py`; the supervisor's board tells which process is where.

Where the ranks of a replica group share one copy of the model, each shows its part. All are asked at once for
one step that is still to come: they make their steps together, so each shows that very version, or one of
them was asked too late, and all are asked again for a later one.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ft_core.config import JobOptions
from ft_core.heal import ANY, NEXT, HealDenied, HealError, HealKey, HealProgress, HealServer, fetch
from ft_core.launch import kept_files
from ft_core.launch.board import Slot, slot
from ft_core.launch.keeping import UNWANTED_EXIT_CODE
from ft_core.launch.kept import Card, takes
from ft_core.launch.supervisor import die_with, say
from lighthouse.waits import Overdue

log = logging.getLogger("ft_core")

HOST = "127.0.0.1"
PATIENCE_S = 30.0
"""A member that shows nothing for this long is busy with something else: another one is asked."""
SHARE = 0.05
"""Of the time, at most, fetches go on."""
CONFIRMED_EVERY_S = 0.02
AHEAD = (1, 2, 4, 8, 16)
"""How many steps after the one under way ranks are asked for, one try after the other."""
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
        self._servers: list[HealServer] = []  # of each part
        self._held: list[Any] = []
        self._spare: list[Any] = []  # of the version before: the next one is received into it
        self.card: Card | None = None
        """What it holds. Read only."""

    def run(self) -> None:
        """Forever. Raises TooLarge."""
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
                    self._tell(
                        f"the state is not kept in case that all replica groups die: {error}"
                    )
            except HealError as error:
                log.debug("child %d shows no state: %s", child, error)
        return False

    def close(self) -> None:
        """Stop serving."""
        for server in self._servers:
            server.close()

    def _fetch(self, child: int, first: Card) -> bool:
        """All parts of one version of `child`, of which `first` is the card of its first rank."""
        disowned = self._board.disowned
        for ahead in AHEAD if first.parts > 1 else (0,):
            rows = [self._board.card(child, rank) for rank in range(first.parts)]
            sources = [Card.of(row) for row in rows if row is not None]
            if len(sources) < first.parts:
                return False  # they are on another machine, or just writing
            step = NEXT.step if first.parts == 1 else self._board.progress_of(child)[0] + 1 + ahead
            deadline = time.monotonic() + max(self.patience_s, 2 * self._every_s)
            version, nbytes = self._fetch_parts(sources, step, deadline)
            if version is None:
                continue
            took = self._takes(child, sources, version, nbytes, deadline)
            if took and self._board.disowned != disowned:  # K4: perhaps before this was told of
                self._board.forget_kept(len(sources))
                kept_files.forget(first.place[0], self._folder)
            return took
        return False

    def _fetch_parts(
        self, sources: list[Card], step: int, deadline: float
    ) -> tuple[HealKey | None, int]:
        """The version that all have shown from `step` on, None if it is not the same; and its bytes."""
        spare = self._spare if len(self._spare) == len(sources) else [None] * len(sources)

        def one(rank: int) -> tuple[Any, HealKey, int]:
            return self._fetch_part(sources[rank], len(sources), step, deadline, spare[rank])

        with ThreadPoolExecutor(len(sources)) as pool:
            fetched = list(pool.map(one, range(len(sources))))
        self._spare = [packed for packed, _, _ in fetched]  # until it counts
        versions = {version for _, version, _ in fetched}
        return versions.pop() if len(versions) == 1 else None, sum(size for *_, size in fetched)

    def _fetch_part(
        self, source: Card, parts: int, step: int, deadline: float, into: Any
    ) -> tuple[Any, HealKey, int]:
        versions: list[HealKey] = []

        def progress(seen: HealProgress) -> None:
            if not versions:
                self._check_room(parts * seen.bytes_total, into is not None)
                versions.append(seen.key)

        packed, stats = fetch(
            [source.address],
            HealKey(step, ANY),
            deadline=deadline,
            into=into,
            options=_options(source.token),
            progress=progress,
        )
        return packed, versions[0], stats.bytes

    def _takes(
        self, child: int, sources: list[Card], version: HealKey, nbytes: int, deadline: float
    ) -> bool:
        """What was fetched is served from now on, if it counts and is newer."""
        confirmed = [
            self._confirmed(child, rank, source, version, deadline)
            for rank, source in enumerate(sources)
        ]
        cards = [card for card in confirmed if card is not None]
        if len(cards) < len(sources) or not takes(self.card, cards[0]):
            return False
        first = self.card is None
        self._spare, self._held = self._held, self._spare
        self._serve(cards, sources[0].token, version)
        if first:
            self._tell(
                f"all of the state ({nbytes / 1e6:.0f} MB) is kept by a process of its own every "
                f"{self._every_s:g} s: if all replica groups die, they go on from there. "
                "keep_state_s=0 turns it off"
            )
        self._write()
        return True

    def _write(self) -> None:
        """A disk that takes nothing is reported once: what is in memory is served all the same."""
        if not self._folder or self.card is None:
            return
        try:
            kept_files.write(self._folder, self.card, self._held)
        except (OSError, RuntimeError) as error:
            if not self._told_of_disk:
                self._told_of_disk = True
                self._tell(f"the kept state can't be written to {self._folder}: {error}")

    def _check_room(self, state_bytes: int, has_room: bool) -> None:
        """`has_room`: there is memory for the version that is fetched."""
        copies = 2 - bool(self._held) - has_room
        free = self._free_bytes()
        if copies > 0 and copies * state_bytes > MEMORY_SHARE * free:
            raise TooLarge(
                f"the state is not kept in case that all replica groups die: {copies} copies of "
                f"{state_bytes / 1e6:.0f} MB are too many for {free / 1e6:.0f} MB of free memory"
            )

    def _confirmed(
        self, child: int, rank: int, source: Card, version: HealKey, deadline: float
    ) -> Card | None:
        """K1: the rank's card, when it says that it has committed a step from `version`; else None.

        Until then the card may show an older version: one that was published for this fetch, and retired
        before the server's thread could begin with it. The next commit may be that of `version`, and
        another rank's card comes before the one after it. If it has not come by then, the loop has
        changed what it showed.
        """
        overdue, decided = Overdue(), self._board.progress_of(child)[1] + 2
        while not overdue.passed(deadline, time.monotonic()):
            late = self._board.progress_of(child)[1] >= decided  # looked at before the card
            row = self._board.card(child, rank)
            if row is not None:  # else it is dead, or just writing
                card = Card.of(row)
                shown = card.version
                if shown is not None and HealKey(shown.step, shown.lineage) == version:
                    return card
                if late or card.address != source.address:
                    return None
            time.sleep(CONFIRMED_EVERY_S)
        return None

    def _serve(self, cards: list[Card], token: str, version: HealKey) -> None:
        if len(self._servers) != len(cards):
            self.close()
            self._servers = [HealServer(host=HOST, options=_options(token)) for _ in cards]
        served = list(zip(cards, self._servers, self._held, strict=True))
        # The first one last: by its card processes decide, and the others fetch the same version.
        for rank, (card, server, packed) in reversed(list(enumerate(served))):
            server.publish(version, packed, copy=False)
            self.card = replace(card, address=server.address, token="")
            self._board.tell(self.card.row(), rank)


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
