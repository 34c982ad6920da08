"""PURE. When a replica group that has died is started again, after which pause, and when not.

| case | what follows |
|---|---|
| it was killed, or failed, and others live | it is started again after a pause |
| the pause | 0.5 s; it doubles with each death of this group, up to 30 s, and is halved by each 30 s that a life has trained. While few are alive (half of the groups of this machine, or one) it is 0.5 s, and what is left of another one no longer. Where it would be 0.5 s it is left out, if the life that ended has trained for 5 s. One that was killed from outside, and had trained for 2 s, is started again at once, and its pause does not grow. Nor does that of one which asks to be started again (exit code 75): it waits for the first pause |
| all have ended with the same error, or crashed by the same signal, at the same step | an error of the script: the job ends, whatever the order of exits. If other machines train too, or all were killed from outside (SIGKILL, SIGTERM ...): the second time in a row |
| an error, and no other group is alive that has not failed itself | an error of the script, too |
| the same two, and the keeper holds a state | it may have been the machine (a driver's reset, no memory): they go on from that state. Once for each state: it must be newer than at the group's last error. The same end at the same step the second time in a row is an error of the script |
| the last two lives of all have ended with the same error, and the job has made no step of the training further (operations of a script are none) | an error of the script, too: what only the leader runs (a save) fails in one group after the other |
| no lighthouse answers any of them (exit code 69) | the job ends with that code |
| `max_restarts` deaths of a group within an hour | it is given up; None: no limit |
| ten deaths of a group in a row without one committed step of the job in between | it is given up |
| three lives of a group in a row were refused for another model or other settings than its peers' (exit code 78), and it has never trained | it is given up; that is no error of the script |
| another has finished | it is not started again |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

EXTERNAL_SIGNALS = frozenset({1, 2, 3, 9, 14, 15})
"""HUP, INT, QUIT, KILL, ALRM, TERM: sent by another process, so they say nothing about the script."""
AWAY_EXIT_CODE = 69
"""Of a process for which no lighthouse answers."""
BROKEN_EXIT_CODE = 75
"""Of a rank whose replica group has lost another rank, and of a process whose next life passes over what has
ended meanwhile (EX_TEMPFAIL: try again)."""
SIGTERM_EXIT_CODE = 128 + 15
"""Of a process that has ended as SIGTERM asks, by itself."""
UNLIKE_EXIT_CODE = 78
"""Of a process whose model or settings are not those of its peers (EX_CONFIG)."""
OVER_EXIT_CODE = 79
"""Of a process that comes back after the training has ended: nothing is left to do."""
NOT_AT_FAULT = frozenset({AWAY_EXIT_CODE, BROKEN_EXIT_CODE, SIGTERM_EXIT_CODE, OVER_EXIT_CODE})
"""Of processes whose script is not at fault, as with a signal from outside."""
REMEMBERED = 256
"""Deaths of a group."""


@dataclass(frozen=True, slots=True)
class Death:
    """How one process of a replica group has ended.

    Attributes:
        at: when, in seconds of any clock.
        exit_code: as Popen's: negative for a signal.
        step: at which its training stood; -1: it had not trained.
        trained_s: for how long it had taken part in the training.
        trained: the last step of the training that this life had made (`step` may be an operation of its script's);
            -1: none.
        commits: how many steps the groups of this machine had committed until then, in all lives.
        level: how often the pause that followed was doubled; -1: it was not grown at all.
        kept: the step of the state that the keeper held, with which the training can go on; -1: none.
    """

    at: float
    exit_code: int
    step: int = -1
    trained_s: float = 0.0
    trained: int = -1
    commits: int = 0
    level: int = -1
    kept: int = -1

    @property
    def external(self) -> bool:
        """Whether another process has ended it."""
        return -self.exit_code in EXTERNAL_SIGNALS

    @property
    def manner(self) -> tuple[int, int]:
        """How and where it ended."""
        return self.exit_code, self.step


History = tuple[Death, ...]
"""Of one replica group, oldest first."""


@dataclass(frozen=True, slots=True)
class Again:
    """Start it again after `pause_s`; `level` is to be remembered with its death."""

    pause_s: float
    level: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """This group is not started again; the others go on. `why` follows "it is"."""

    why: str


@dataclass(frozen=True, slots=True)
class EndJob:
    """No group is started again. `why` is a sentence without its subject."""

    why: str


Verdict = Again | GiveUp | EndJob


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """The rules above. Durations are in seconds.

    Attributes:
        max_restarts: of one group within `window_s`; None: no limit.
        elsewhere: other supervisors have replica groups of this job.
        fruitless: this many deaths of a group without a step in between are too many.
        refusals: this many lives of a group that has never trained, and is unlike its peers, are enough. One
            may be refused for peers of an earlier job, of which the lighthouse does not know yet that they are dead.
        healthy_s: training for this long halves the next pause.
        settled_s: after a life that has trained for this long, the first pause is left out.
        repaid_s: after a life that has trained for this long and was killed from outside, each pause
            is left out. It has not failed, and has given the others more than its return costs them.
    """

    max_restarts: int | None = None
    elsewhere: bool = False
    window_s: float = 3600.0
    first_pause_s: float = 0.5
    longest_pause_s: float = 30.0
    refusals: int = 3
    healthy_s: float = 30.0
    settled_s: float = 5.0
    repaid_s: float = 2.0
    fruitless: int = 10

    def after(
        self, histories: Sequence[History], index: int, lives: Sequence[bool | None]
    ) -> Verdict:
        """What follows the newest death in `histories[index]`.

        Args:
            histories: one of each group of this supervisor.
            lives: for each group, whether the process that runs has made a step of the training; None:
                none runs.
        """
        mine = histories[index]
        death = mine[-1]
        if death.exit_code == AWAY_EXIT_CODE and not any(life is not None for life in lives):
            if all(each and each[-1].exit_code == AWAY_EXIT_CODE for each in histories):
                return EndJob("so have all: no lighthouse answers")
        if why := self._scripts_fault(histories, index, lives):
            return EndJob(why)
        recent = [d for d in mine if d.at > death.at - self.window_s]
        if self.max_restarts is not None and len(recent) > self.max_restarts:
            within = f" within {self.window_s / 60:g} minutes" if self.max_restarts else ""
            return GiveUp(f"given up after {self.max_restarts} restarts{within}")
        if self._in_vain(mine):
            return GiveUp(
                f"given up: the job has committed no step between {self.fruitless} of its ends"
            )
        unlike = all(d.exit_code == UNLIKE_EXIT_CODE and d.step < 0 for d in mine)
        if unlike and len(mine) >= self.refusals:
            return GiveUp("not started again: it is refused each time")
        return self._pause(mine, len(histories), sum(life is not None for life in lives))

    def _scripts_fault(
        self, histories: Sequence[History], index: int, lives: Sequence[bool | None]
    ) -> str:
        death = histories[index][-1]
        if death.exit_code == UNLIKE_EXIT_CODE:
            return ""
        # The cause may be on another machine, or this machine itself.
        untold = death.step >= 0 and (self.elsewhere or self._is_kept(histories[index]))
        crashed = death.exit_code < 0
        rounds = 2 if untold or death.external or (crashed and len(histories) == 1) else 1
        alike = all(self._ended_like(each, death, rounds) for each in histories)
        if alike and not any(lives):
            if not death.external or death.step > 0:
                where = f" at step {death.step}" if death.step >= 0 else ""
                again = " again" if rounds > 1 else ""
                return f"so have all{where}{again}: an error of the script"
        if self._came_no_further(histories, death) and not any(lives):
            return "so have all, twice and no step further: an error of the script"
        others = [h for i, h in enumerate(histories) if i != index]
        running = any(life is not None for life in lives)
        failed = all(h and h[-1].exit_code > 0 for h in others)
        if death.exit_code > 0 and not running and failed and not untold:
            return "no other is alive: an error of the script"
        return ""

    @staticmethod
    def _is_kept(mine: History) -> bool:
        """Whether the keeper held a newer state than at any error of this group before."""
        kept = mine[-1].kept
        return kept >= 0 and all(each.external or each.kept < kept for each in mine[:-1])

    @staticmethod
    def _ended_like(history: History, death: Death, rounds: int) -> bool:
        """Whether a group's last `rounds` lives have ended as `death`."""
        last = history[-rounds:]
        return len(last) == rounds and all(each.manner == death.manner for each in last)

    @staticmethod
    def _came_no_further(histories: Sequence[History], death: Death) -> bool:
        """Whether the last two lives of all groups have ended with this error, and the job is where it was. What
        only the leader runs (a save) fails in one group after the other: each leads when the one before is gone."""
        if death.exit_code <= 0 or death.exit_code in NOT_AT_FAULT:
            return False
        if any([d.exit_code for d in each[-2:]] != [death.exit_code] * 2 for each in histories):
            return False
        last, before = ([each[n].trained for each in histories] for n in (-1, -2))
        return max(last) <= max(before)

    def _in_vain(self, mine: History) -> bool:
        last = mine[-self.fruitless :]
        return len(last) == self.fruitless and last[0].commits == last[-1].commits

    def longest_wait_s(self, count: int, alive: int) -> float:
        """How long a group may still wait, where `alive` of this supervisor's `count` groups are."""
        few = not self.elsewhere and alive <= max(1, count // 2)
        return self.first_pause_s if few else self.longest_pause_s

    def _pause(self, mine: History, count: int, alive: int) -> Again:
        death, before = mine[-1], mine[-2].level if len(mine) > 1 else -1
        level = max(-1, before - int(death.trained_s / self.healthy_s))
        if death.external and death.trained_s >= self.repaid_s:
            return Again(0.0, level)
        first_s = 0.0 if death.trained_s >= self.settled_s else self.first_pause_s
        asks = death.exit_code == BROKEN_EXIT_CODE
        if asks or self.longest_wait_s(count, alive) == self.first_pause_s:
            return Again(first_s, level)
        if level < 0:
            return Again(first_s, 0)
        pause_s = min(self.first_pause_s * 2 ** min(level + 1, 30), self.longest_pause_s)
        return Again(pause_s, level + 1)
