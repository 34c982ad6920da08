"""What a member has done since each fragment's last outer step, and how that counts. PURE."""

from __future__ import annotations


class Windows:
    """One window a fragment: its inner steps (or samples), and whether they may count.

    `unit`: what means are weighted by: "" (every window counts one), "steps" (inner steps, in
    windows of `sync_every`) or "samples".

    A window is *void* from when it was dropped until the next inner step: it counts nothing. It is
    *open* from when it was sent until its outer step is known to be committed or discarded: should
    this member be overtaken meanwhile, nobody here knows whether it was counted, and it must not
    be sent again.
    """

    def __init__(self, fragments: int, sync_every: int, unit: str) -> None:
        if unit not in ("", "steps", "samples"):
            raise ValueError(
                f'weighted must be False, True (or "steps") or "samples", got {unit!r}'
            )
        self._sync_every, self._unit = sync_every, unit
        self._counts = [0.0] * fragments
        self._void: set[int] = set()
        self._open: set[int] = set()

    def inner_step(self) -> None:
        """The member has made an inner step."""
        if self._unit != "samples":
            self._counts = [count + 1 for count in self._counts]
        self._void.clear()

    def add_samples(self, samples: int) -> None:
        """The inner step under way has so many samples. Raises ValueError."""
        if self._unit != "samples":
            raise ValueError('add_samples needs weighted="samples" on all members')
        if samples < 0:
            raise ValueError(f"samples must not be negative, got {samples}")
        self._counts = [count + samples for count in self._counts]

    def weight(self, fragment: int) -> float:
        """The fragment's share of the mean."""
        if fragment in self._void:
            return 0.0
        if not self._unit:
            return 1.0
        count = self._counts[fragment]
        return count / self._sync_every if self._unit == "steps" else count

    def drop_all(self) -> None:
        """All windows are dropped: until there is new work they count nothing."""
        self._counts = [0.0] * len(self._counts)
        self._void.update(range(len(self._counts)))

    def restart(self, fragment: int) -> None:
        """The fragment's window begins anew."""
        self._counts[fragment] = 0.0

    def sent(self, fragment: int) -> None:
        """The fragment's window is on its way."""
        self._open.add(fragment)

    def in_step(self) -> None:
        """The member stands where its quorum stands: what it had sent before was not counted, or
        it would have been overtaken."""
        self._open.clear()

    def committed(self, fragment: int) -> None:
        """The outer step with the fragment's window was committed."""
        self._open.discard(fragment)

    def may_be_kept(self, fragment: int) -> bool:
        """Whether the window can't have been counted."""
        return fragment not in self._open
