"""What goes into the replica's machine, and what comes out: events and effects. Values only. PURE.

The machine also takes the lighthouse's replies (`lighthouse.wire.messages.Reply`) as events.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_type_hints

from lighthouse.wire.messages import NOT_COUNTED, Member, Reply, Request, Silence

# ---------------------------------------------------------------- events: the training loop


@dataclass(frozen=True, slots=True)
class Begin:
    """The loop starts an attempt, or goes on waiting in it.

    Attributes:
        heal_in_step: the loop does not wait for its state. It computes on what it has, contributes
            nothing, and loads the state before it votes (asynchronous quorum).
    """

    heal_in_step: bool = False


@dataclass(frozen=True, slots=True)
class Entered:
    """The loop has left its step's boundary, and computes now."""


@dataclass(frozen=True, slots=True)
class Bind:
    """The first collective of the attempt is about to start: bind the attempt to its quorum.

    Nothing happens while the attempt may not reduce yet; the status tells.
    """


@dataclass(frozen=True, slots=True)
class Fail:
    """This attempt can't commit: tell the others now. `stalled`: a collective waits for a member. `follows`:
    one has failed, maybe since another member has said no, or is dead."""

    reason: str
    stalled: bool = False
    follows: bool = False


@dataclass(frozen=True, slots=True)
class ServedTorn:
    """The loop has changed the state before its vote while peers healed from it: tell them to heal again."""

    reason: str


@dataclass(frozen=True, slots=True)
class CastVote:
    """The loop's collectives are over: yes or no. The status has the outcome when it is known.

    A yes that has lost its quorum counts as a no. `control`, `updates`, `digest` and `admits` travel
    with a yes (`lighthouse.wire.messages.Vote`). After `StopWaiting`: the loop waits again for the answer to
    the vote that it has cast.
    """

    ok: bool
    reason: str = ""
    control: bytes = b""
    updates: int = NOT_COUNTED
    digest: bytes = b""
    admits: bool = True


@dataclass(frozen=True, slots=True)
class StopWaiting:
    """The loop waits no longer for the answer to its vote, and can't apply an update meanwhile."""


@dataclass(frozen=True, slots=True)
class Unapplied:
    """The loop has not applied the update of the last step, which was committed: it holds the state
    before that step. Leave the quorum; the next `Begin` joins again with that state."""

    reason: str


@dataclass(frozen=True, slots=True)
class LeaveAfterStep:
    """The next vote says that it is the last one."""


@dataclass(frozen=True, slots=True)
class Depart:
    """Leave the quorum now, for good. `reduced`: the collectives of the step, if any, are done."""

    reason: str
    reduced: bool = False


@dataclass(frozen=True, slots=True)
class Rejoin:
    """Leave the quorum; the next `Begin` joins again, and heals.

    Attributes:
        join_now: join again at once. For a loop that begins its next attempt right away: none of the
            members that stay can commit a step between the two messages, however slow this process is.
        discard_state: join as a member that holds no state. False: as one that holds the state with
            which it left, from which the job goes on if no member has a newer one.
    """

    reason: str
    discard_state: bool = True
    join_now: bool = False


# ---------------------------------------------------------------- events: state and process group


@dataclass(frozen=True, slots=True)
class Configured:
    """The process group has the members of `quorum_id`, or could not be configured (`error`).

    `missed`: replica_ids of members that could not be connected to.
    """

    quorum_id: int
    error: str = ""
    missed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Tried:
    """What the effect `TryToReach` asked for: which members could be connected to (replica_ids).
    Also what is known of a group that is being made (`silence`: it takes long), or has failed."""

    missed: tuple[str, ...]
    reached: tuple[str, ...]
    silence: Silence | None = None


@dataclass(frozen=True, slots=True)
class Fetched:
    """What the effect `fetch` (this very object) asked for has arrived, or not (`error`).

    `denied`: it never will, since this member's options differ from its peers'.
    """

    fetch: FetchState
    error: str = ""
    denied: bool = False


@dataclass(frozen=True, slots=True)
class Overwrite:
    """The first bytes of the state that is being fetched are about to overwrite this rank's own.

    `ReplicaStatus.overwriting` says whether it may be. Then it is not a state until it has been
    loaded, and must never be a source for others.

    Attributes:
        in_step: the tensors that a step under way does not change, rather than all of the state.
    """

    in_step: bool


@dataclass(frozen=True, slots=True)
class FetchAgain:
    """The fetched state was changed before it was loaded."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The loop has loaded the fetched state: this rank is at the quorum's position."""


@dataclass(frozen=True, slots=True)
class Published:
    """The state at `position` (step, lineage) is served to healing peers; None: nothing is. Status'
    `published` says whether it may be: a state that is no longer this rank's is not."""

    position: tuple[int, str] | None


# ---------------------------------------------------------------- events: the connection


@dataclass(frozen=True, slots=True)
class Connected:
    """The lighthouse can be reached (again): repeat what it may not have heard."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The lighthouse can't be reached."""


# ---------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Transmit:
    """Effect: send `message` to the lighthouse (or the group's leader)."""

    message: Request


@dataclass(frozen=True, slots=True)
class Configure:
    """Effect: give the process group these members; then report `Configured`. `why`: the quorum's reason."""

    quorum_id: int
    members: tuple[Member, ...]
    replica_rank: int
    why: str = ""


@dataclass(frozen=True, slots=True)
class TryToReach:
    """Effect: try to connect to the process groups of `members`; then report `Tried`."""

    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """Effect: revoke the process group now: blocked collectives fail, later ones too."""

    quorum_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Effect: stop serving the state, at once, whatever the loop is doing. `diverged`: its peers have
    found that its state is a different one, so what it has shown before is not to be kept either."""

    reason: str
    diverged: bool = False


@dataclass(frozen=True, slots=True)
class FetchState:
    """Effect: fetch the state (step, lineage) from `sources`, and stop an earlier fetch that may
    still be under way; then report `Fetched` with this very effect."""

    step: int
    lineage: str
    sources: tuple[Member, ...]


EXPELLED = "expelled: "
"""At the start of a remark's text: the others have gone on without this rank."""
DISCARDS_STATE = "this replica group discards its state, and heals"
"""In the text of a remark: the state is not that of the peers."""
MAX_HEALS = 3
"""A state that is not that of the peers again after so many heals, without a commit, will never be."""
DIFFERS_AGAIN = (
    f"again after {MAX_HEALS} heals: this process makes something else of its peers' state (a callback or a hook "
    "that changes parameters when they are loaded, or has not seen what came before)"
)


@dataclass(frozen=True, slots=True)
class Remark:
    """Effect: something worth a log line. `hangs`: the loop is not back since it was evicted."""

    text: str
    hangs: bool = False


Effect = Transmit | Configure | TryToReach | Abort | Withdraw | FetchState | Remark
ReplicaEvent = (
    Begin
    | Entered
    | Bind
    | Fail
    | ServedTorn
    | CastVote
    | StopWaiting
    | Unapplied
    | LeaveAfterStep
    | Depart
    | Rejoin
    | Configured
    | Tried
    | Fetched
    | Overwrite
    | FetchAgain
    | Loaded
    | Published
    | Connected
    | Disconnected
    | Reply
)


def handlers(machine: type) -> dict[type, str]:
    """Each event that `machine` takes, and its `_on_` method: whose first argument is annotated so."""
    found: dict[type, str] = {}
    for name, method in vars(machine).items():
        if name.startswith("_on_"):
            event, *_ = get_type_hints(method).values()
            assert event not in found, f"two methods take {event.__name__}"
            found[event] = name
    return found
