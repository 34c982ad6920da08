"""Which fragment is sent when, when it is applied, and what a member's window counts. PURE.

Theory. A *window* is `sync_every` (H) inner steps. In a window every one of the P fragments has one
outer step: the window is cut into P *slots*, and slot i is fragment i's. In a slot of L inner steps
the fragment is *launched* (its pseudo-gradient is computed and sent) after inner step L - tau, and
*applied* (waited for, voted on, stepped) after inner step L, so that its communication has tau inner
steps to hide behind (Streaming DiLoCo, arXiv 2501.18512, algorithm 2). P = 1 and tau = 0 is DiLoCo
(arXiv 2311.08105, algorithm 1), with parameters in place of pseudo-gradients LocalSGD (arXiv
1805.09767, algorithm 1, synchronization indices H, 2H, ...).

One outer step is one step of the manager, so the fragment follows from the number of committed steps
alone: step modulo P. Members agree on that number anyway. So a member that joins knows the next
fragment from it, and all members send the same fragments in the same order whatever happened to them
before. A discarded outer step does not advance the number: its fragment is next again.

A member has a window for each fragment (`Windows`): what it has done since the fragment's last outer
step, and whether that counts.

No clock, tensor or process group in here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class ScheduleEvent(Enum):
    """What happens after an inner step."""

    LAUNCH = "launch"
    APPLY = "apply"


@dataclass(frozen=True, slots=True)
class Schedule:
    """The clock. Raises ValueError when the numbers contradict each other.

    Attributes:
        sync_every: inner steps in a window (H).
        fragments: how many fragments (P), each with one outer step a window.
        delay: inner steps between launch and apply (tau).
    """

    sync_every: int
    fragments: int = 1
    delay: int = 0

    def __post_init__(self) -> None:
        if self.sync_every < 1:
            raise ValueError(f"sync_every must be at least 1, got {self.sync_every}")
        if self.fragments < 1:
            raise ValueError(f"fragments must be at least 1, got {self.fragments}")
        if self.sync_every < self.fragments:
            raise ValueError(
                f"sync_every={self.sync_every} leaves no inner step to each of {self.fragments} "
                "fragments: use fewer fragments, or a larger sync_every"
            )
        if self.delay < 0:
            raise ValueError(f"fragment_sync_delay must not be negative, got {self.delay}")
        if self.delay >= self.shortest_slot:
            raise ValueError(
                f"fragment_sync_delay={self.delay} must be smaller than the {self.shortest_slot} "
                f"inner steps between two outer steps (sync_every={self.sync_every} over "
                f"{self.fragments} fragments): use a smaller delay, or a larger sync_every"
            )

    @property
    def shortest_slot(self) -> int:
        """Inner steps of the shortest slot: the window need not divide evenly."""
        return self.sync_every // self.fragments

    def fragment_of(self, step: int) -> int:
        """Which fragment the outer step number `step` (committed steps so far) is for."""
        return step % self.fragments

    def slot_steps(self, fragment: int) -> int:
        """Inner steps of this fragment's slot. All slots together are one window."""
        h, p = self.sync_every, self.fragments
        return (fragment + 1) * h // p - fragment * h // p

    def due(self, step: int, local_step: int) -> tuple[ScheduleEvent, ...]:
        """What happens after inner step `local_step` (1, 2, ... in the slot) of outer step `step`.

        A slot that runs over (its launch came late) launches and applies at its next inner step.
        """
        length = self.slot_steps(self.fragment_of(step))
        if local_step >= length:
            return (
                (ScheduleEvent.APPLY,)
                if self.delay
                else (ScheduleEvent.LAUNCH, ScheduleEvent.APPLY)
            )
        if self.delay and local_step == length - self.delay:
            return (ScheduleEvent.LAUNCH,)
        return ()


class Windows:
    """One window per fragment: its inner steps (or samples), and whether they may count.

    `unit`: what means are weighted by: "" (every window counts one), "steps" (inner steps, in
    windows of `sync_every`) or "samples".

    A window is *void* from when it was dropped until the next inner step: it counts nothing. It is
    *open* from when it was sent until its outer step is known to be committed or discarded: should
    this member be overtaken meanwhile, it can't know whether the window was counted, and it must not
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
        """The member is at its quorum's position. So what it had sent before was not counted: else
        the quorum would be ahead of it."""
        self._open.clear()

    def committed(self, fragment: int) -> None:
        """The outer step with the fragment's window was committed."""
        self._open.discard(fragment)

    def may_be_kept(self, fragment: int) -> bool:
        """Whether the window can't have been counted."""
        return fragment not in self._open
