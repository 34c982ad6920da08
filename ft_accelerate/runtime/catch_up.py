"""How long a process that is behind may stay among its peers while its script runs through its past. PURE: no clock, no IO."""

from __future__ import annotations

from collections.abc import Callable

from ft_accelerate.runtime.script_position import ScriptPosition

STAY_S = 0.25
"""How long peers may stand still the first time."""
GROWS = 4
LONGEST = 0.25
"""Of the timeout: how long they may at most. A member that heals is evicted when others' collectives have waited
for half of it."""
TELL_S = 2.0
"""A catching up that takes longer is worth a line."""
BATCHES_A_S = 5000.0
"""Until this script's own speed is known."""
MEASURE_S = 0.05


class CatchUp:
    """How long a process that is behind may stay in the quorum while it catches up.

    In the quorum its peers wait for it. So it stays only if it will soon be where they are; else it
    leaves, which costs them one repetition of a step's reduction, runs through its past meanwhile, and
    joins again. Each time that it leaves it may stay longer the next time: peers that are quick, and gone
    on, would otherwise be ahead of it again each time. When it may stay for `longest_s` it does, however far it
    has to go: a script that runs through its past no faster than its peers train comes nearer only while they wait.

    The loop's thread only. Times are in seconds, of one monotonic clock.

    `measures`: the time that passes decides, too. Not in a group of several processes, which decide
    without a message, and so by what they all know.
    """

    def __init__(self, position: ScriptPosition, *, measures: bool, longest_s: float) -> None:
        self._position, self._measures, self._longest_s = position, measures, longest_s
        self._may_stay_s = STAY_S
        self._joined_at: float | None = None
        self._began: tuple[float, int] | None = None
        self._told: set[str] = set()

    def joined(self, now: float) -> None:
        """This process is in a quorum, and has healed."""
        behind = self._position.distance > 0
        self._joined_at = now if behind else None
        if behind and self._began is None:
            self._began = now, self._position.batches_done

    def left(self) -> None:
        """It has left the quorum for now."""
        self._joined_at = None
        self._may_stay_s = max(self._may_stay_s, min(self._may_stay_s * GROWS, self._longest_s))

    def live(self) -> None:
        """It is where its peers are."""
        self._joined_at = self._began = None
        self._may_stay_s = STAY_S
        self._told.clear()

    def overstays(self, now: float, evicted: Callable[[], bool] = lambda: False) -> bool:
        """Whether it is in the quorum, behind, and should leave; or it was there, and its peers wait no longer
        (`evicted`): then it is not back among them where they were."""
        if self._joined_at is None or not self._position.distance:
            return False
        if self._measures and evicted():
            return True
        stayed_s = now - self._joined_at if self._measures else 0.0
        expected_s = self.expected_s(now) if self._may_stay_s < self._longest_s else 0.0
        return stayed_s + expected_s > self._may_stay_s

    def expected_s(self, now: float) -> float:
        """How long it takes to get where the peers were when they were met last."""
        return self._position.distance / (self._speed(now) or BATCHES_A_S)

    def news(self, now: float) -> str:
        """What to tell the person who watches, each once in a catching up; empty: nothing."""
        if self._began is None:
            return ""
        distance, speed = self._position.distance, self._speed(now)
        if self._position.all_is_one_window and "again" not in self._told and distance > 1:
            self._told.add("again")
            return (
                f"runs through {distance:,} gradient steps of its past, and reads their data again: its "
                "loader of training data was not prepared"
            )
        waited = now - self._began[0] >= STAY_S
        if "long" in self._told or not waited or not speed or distance / speed < TELL_S:
            return ""
        self._told.add("long")
        rate = f"{speed:,.0f}" if speed >= 1 else f"{speed:.1g}"
        return (
            f"is about {distance:,} batches behind: at {rate} a second it is back in "
            f"{distance / speed:,.0f} s"
        )

    def _speed(self, now: float) -> float:
        """Batches a second; 0: not known."""
        if not self._measures or self._began is None:
            return 0.0
        at, batches = self._began
        done = self._position.batches_done - batches
        return done / (now - at) if now - at > MEASURE_S else 0.0
