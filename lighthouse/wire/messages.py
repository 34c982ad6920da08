"""Wire types of the step protocol: frozen, slotted, validated when built, never subclassed.

Two directions. A replica group (its leader rank) sends `Join`, `Vote`, `Heartbeat` and `Leave`; a
watcher process sends `DeathNotice`; tools send `DeclareDead` and `StatusRequest`. The lighthouse
answers with `Waiting`, `Decision` (which carries the next `Quorum` when the quorum changes),
`Quorum`, `Revoke`, `Expelled`, `Refused`, `Declared` and `Status`. Members that can't connect to each
other say so in a `ReachReport`, and are asked again by a `ReachQuery`.

Every request is idempotent: a sender that gets no answer sends the same message again.
A state is versioned by (step, lineage); a result is bound to (quorum_id, step).
docs/protocol.md says when each message is sent. All types raise ValueError when built from values
out of range.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace

MAX_ID_CHARS = 200
MAX_REASON_CHARS = 2_000
MAX_ADDRESS_BYTES = 4_096
MAX_CONTROL_BYTES = 1_024
MAX_GROUP_WORLD_SIZE = 65_536
MAX_NAMED = 64
"""Members that a `ReachReport` names at most."""
MAX_BASES = 64
"""Lists of members on which a quorum rests."""
MAX_DIGEST_BYTES = 16
NOT_COUNTED = -1
"""`Vote.updates` of a member that has healed since the last commit, or has seen none yet."""
ONE_RANK = -1
"""`Quorum.attempt` where no leader speaks for several ranks."""

Peer = bytes
"""One connection: the identity that its process has presented, "#", and a number."""


def same_process(a: Peer, b: Peer) -> bool:
    """Whether two connections have presented the same identity."""
    return (a.rpartition(b"#")[0] or a) == (b.rpartition(b"#")[0] or b)


TORN = "torn-"
"""Prefix of the lineage of a torn state: it was partly overwritten, or its ranks hold different
positions. A replica group that holds it must heal, and is never a source."""

DECLARE_DEAD = "`lighthouse declare-dead NAME`"
"""In the reason of a wait that has no limit: what a person may do about it."""

LEFT_OUT = "is left out"
"""In the reason of a wait: others train without a member, since it can't connect to them."""

NO_QUORUM = 0
"""quorum_id of a replica group that was never in a quorum."""

TERM_BITS = 20
"""A quorum_id is the epoch of its term, and in its last bits the quorum's number within that term."""
MAX_EPOCH = 2**40 - 1
MAX_STEP = 2**47
MAX_NONCE = 2**63 - 1
INCARNATION_DIGITS = 12
"""Hex digits by which a replica_id differs from those of its group before."""
MAX_WISH = 2**20
"""Most replica groups that a `Join` may ask its job to wait for."""


def name_of(replica_id: str) -> str:
    """The name of the replica group of which `replica_id` ("name:random") is a process."""
    return replica_id.rpartition(":")[0] or replica_id


def is_replica_id(word: str) -> bool:
    """Whether a person's `word` is the replica_id of a process; else it is a name, in which a colon may be, too."""
    return re.search(f":[0-9a-f]{{{INCARNATION_DIGITS}}}$", word) is not None


def epoch_of(quorum_id: int) -> int:
    """The epoch of the term in which a quorum was formed."""
    return quorum_id >> TERM_BITS


def printable(text: str) -> str:
    """`text` as one line for a terminal or a log: other characters become spaces."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " for c in text)


def next_lineage(lineage: str, nonce: int, quorum_id: int, step: int) -> str:
    """Lineage of the state that committing `step` makes out of `lineage`.

    `nonce` is that of the term in which `quorum_id` was formed: two lighthouses may give one number
    to two quorums. 16 hex digits. Equal (step, lineage) means the same commits in the same order
    since the same initial state, hence (deterministic reduction, S3) bitwise equal state.
    """
    text = f"{lineage}|{nonce}|{quorum_id}|{step}".encode()
    return hashlib.blake2b(text, digest_size=8).hexdigest()


def _check(ok: bool, what: str) -> None:
    if not ok:
        raise ValueError(what)


def _check_id(value: str, name: str) -> None:
    if not 0 < len(value) <= MAX_ID_CHARS:
        raise ValueError(f"{name} must have 1 to {MAX_ID_CHARS} characters")
    if not value.isprintable():  # it is shown on terminals and in logs
        raise ValueError(f"{name} must have printable characters only, got {value!r}")


def _one_line(message: object, name: str) -> None:
    """A text of one process travels on to the logs and terminals of others: as one `printable` line."""
    value: str = getattr(message, name)
    if len(value) > MAX_REASON_CHARS:
        raise ValueError(f"{name} is longer than {MAX_REASON_CHARS} characters")
    if not value.isprintable():
        object.__setattr__(message, name, printable(value))


def _check_place(quorum_id: int, step: int) -> None:
    """Both travel on: a number that is out of range would spoil the job of its sender's peers."""
    if not 0 <= quorum_id < (MAX_EPOCH + 1) << TERM_BITS or not 0 <= step <= MAX_STEP:
        raise ValueError(f"quorum_id {quorum_id} or step {step} is out of range")


def _check_control(value: bytes) -> None:
    if len(value) > MAX_CONTROL_BYTES:
        raise ValueError(f"control over {MAX_CONTROL_BYTES} bytes")


@dataclass(frozen=True, slots=True)
class JobKey:
    """Names one sequence of quorums. Jobs are independent of each other.

    `room_id` tells apart several sequences within one training (`Manager.start_quorum(room_id=)`).
    """

    job_id: str = "default"
    room_id: str = "default"

    def __post_init__(self) -> None:
        _check_id(self.job_id, "job_id")
        _check_id(self.room_id, "room_id")


@dataclass(frozen=True, slots=True)
class Term:
    """The time in which one lighthouse decides for one job. Terms of a member only grow.

    `epoch` orders the terms that a member has promised itself to. `nonce` is random: two lighthouses
    that do not know of each other never share a term, whatever their clocks and files say.
    """

    epoch: int
    nonce: int

    def __post_init__(self) -> None:
        _check(0 <= self.epoch <= MAX_EPOCH, "epoch out of range")
        _check(0 <= self.nonce <= MAX_NONCE, "nonce out of range")

    def outranks(self, other: Term) -> bool:
        """Whether a member that has promised itself to `other` may follow this one."""
        return self.epoch > other.epoch or other == NO_TERM


NO_TERM = Term(0, 0)
"""Promised by a process that has joined no lighthouse yet."""


@dataclass(frozen=True, slots=True)
class InDoubt:
    """A step whose yes vote was sent and whose decision never arrived."""

    quorum_id: int
    step: int
    lineage_if_committed: str

    def __post_init__(self) -> None:
        _check_place(self.quorum_id, self.step)


@dataclass(frozen=True, slots=True)
class Basis:
    """On what a quorum rests: what a later lighthouse needs to know of it (`lighthouse.machine.fence`).

    Attributes:
        step, lineage: the state from which the quorum started.
        committed: a commit under it is known, so it rests on the list of its own members.
        each: its first commit needs all of its members: it was formed since all were there.
        bases: else, the lists of members of each of which its first commit needs half.
        genesis: of the quorum; its members' states have another one, or none, until they have healed or committed.
    """

    step: int
    lineage: str
    committed: bool = False
    each: bool = False
    bases: tuple[tuple[str, ...], ...] = ()
    genesis: int = 0

    def __post_init__(self) -> None:
        _check_id(self.lineage, "lineage")
        _check_place(NO_QUORUM, self.step)
        _check(0 <= self.genesis <= MAX_NONCE, "genesis out of range")
        _check(len(self.bases) <= MAX_BASES, f"a quorum rests on at most {MAX_BASES} lists")


@dataclass(frozen=True, slots=True)
class Member:
    """One replica group in a quorum.

    `addresses` holds one opaque blob for each group rank (how to reach its process group and its
    heal server). `healing`: its state is not (step, lineage) of the quorum, so that it contributes
    nothing, and must heal before it votes yes.
    """

    replica_id: str
    group_world_size: int
    addresses: tuple[bytes, ...]
    healing: bool = False

    def __post_init__(self) -> None:
        _check_id(self.replica_id, "replica_id")
        _check(1 <= self.group_world_size <= MAX_GROUP_WORLD_SIZE, "group_world_size out of range")
        _check(len(self.addresses) == self.group_world_size, "one address a group rank is needed")
        for address in self.addresses:
            _check(len(address) <= MAX_ADDRESS_BYTES, f"address over {MAX_ADDRESS_BYTES} bytes")


# ---------------------------------------------------------------- replica group -> lighthouse


@dataclass(frozen=True, slots=True)
class Join:
    """Asks to be in the next quorum of a job.

    `name` is the replica group's name for people, stable over restarts; `replica_id` is new at
    every start. `quorum_id` and `last_members`: the last quorum this process was in, if any.
    `basis`: on what that quorum rests; None: its sender was in none, or has given up what it knew.
    `promised`: the term whose quorums and decisions its sender obeys. A lighthouse counts the `Join`
    if that is its own term, and else offers it (`Waiting.offer`). `held`: the quorum that has
    committed the step which led to (step, lineage); `genesis`: of its job. Both are 0 for a state
    that no quorum has committed.
    `schema` is what must be equal in all members (parameter names, shapes, settings);
    `schema_text` is shown to a person if it is not. `min_replicas`, `expected_replicas`: the job
    takes the largest number asked for (0: no wish). `can_heal` False: leave the sender out if it is
    behind. `group_commit`: see docs/protocol.md, "Per-group commit". `attempt`: see `Vote`.
    `left`: how often this process has left before.
    """

    job: JobKey
    name: str
    replica_id: str
    step: int
    lineage: str
    addresses: tuple[bytes, ...]
    quorum_id: int = NO_QUORUM
    last_members: tuple[str, ...] = ()
    in_doubt: InDoubt | None = None
    min_replicas: int = 0
    expected_replicas: int = 0
    can_heal: bool = True
    group_commit: bool = False
    schema: str = ""
    schema_text: str = ""
    promised: Term = NO_TERM
    genesis: int = 0
    held: int = NO_QUORUM
    attempt: int = 0
    basis: Basis | None = None
    left: int = 0

    def __post_init__(self) -> None:
        _check_id(self.name, "name")
        _check_id(self.replica_id, "replica_id")
        _check_id(self.lineage, "lineage")
        _check_place(self.quorum_id, self.step)
        _check(1 <= len(self.addresses) <= MAX_GROUP_WORLD_SIZE, "addresses: one a group rank")
        for address in self.addresses:
            _check(len(address) <= MAX_ADDRESS_BYTES, f"address over {MAX_ADDRESS_BYTES} bytes")
        _check_place(self.held, self.step)
        _check(0 <= self.genesis <= MAX_NONCE, "genesis out of range")
        _check(0 <= self.min_replicas <= MAX_WISH, "min_replicas out of range")
        _check(0 <= self.expected_replicas <= MAX_WISH, "expected_replicas out of range")
        _one_line(self, "schema_text")
        _check(0 <= self.left <= MAX_STEP, "left out of range")


PHASE_IDLE = "idle"  # between steps
PHASE_OPEN = "open"  # in a step, before its first collective: nothing was reduced yet
PHASE_HEALING = "healing"
PHASE_REDUCING = "reducing"  # at least one collective of this step was started
PHASES = (PHASE_IDLE, PHASE_OPEN, PHASE_HEALING, PHASE_REDUCING)


@dataclass(frozen=True, slots=True)
class Vote:
    """A member's yes or no on (quorum_id, step), after its collectives.

    `lineage`: of the state that the sender holds; a yes needs the quorum's. A no revokes the
    quorum. `phase`: what the member was doing when it voted no; one that had started no collective
    loses nothing and goes on under the next quorum. `stalled`: a collective of this member waited
    longer than its timeout, so members that are not reducing are to blame. `leaving`: the vote
    counts, and the next quorum forms without the sender. `control`: bytes that all members get
    back with the decision; the lowest-ranked yes voter's are taken (see `Decision`). `updates`: how
    often the sender has updated its state since the last committed step. `digest`: of that part of
    its state which members compare at this step; empty: none. Members that disagree with
    their peers hold another state (`lighthouse.machine.ballot`).
    `attempt`: how many attempts at steps a rank has spent, this one included; for the leader of its
    replica group, which keeps the ranks' attempts in step. `admits`: after this step the sender can
    give its state to a newcomer; if it can't, newcomers that must heal wait for a later commit.
    `torn`: with a no: the sender's loop has changed its state while members may have healed from it.
    `follows`: with a no: it may be of another member's making, since a collective failed here, or was stopped.
    """

    job: JobKey
    replica_id: str
    quorum_id: int
    step: int
    lineage: str
    ok: bool
    reason: str = ""
    phase: str = PHASE_REDUCING
    stalled: bool = False
    leaving: bool = False
    control: bytes = b""
    updates: int = NOT_COUNTED
    digest: bytes = b""
    attempt: int = 0
    admits: bool = True
    torn: bool = False
    follows: bool = False

    def __post_init__(self) -> None:
        _check_id(self.replica_id, "replica_id")
        _check_place(self.quorum_id, self.step)
        _one_line(self, "reason")
        _check_control(self.control)
        _check(not (self.ok and self.torn), "torn goes with a no")
        if self.phase not in PHASES:
            raise ValueError(f"phase must be one of {PHASES}")
        if not NOT_COUNTED <= self.updates < 2**31:
            raise ValueError("updates out of range")
        if len(self.digest) > MAX_DIGEST_BYTES:
            raise ValueError(f"digest over {MAX_DIGEST_BYTES} bytes")


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Says, after a silence, where a member believes it is; answered only if it is wrong."""

    job: JobKey
    replica_id: str
    quorum_id: int
    step: int

    def __post_init__(self) -> None:
        _check_place(self.quorum_id, self.step)


FINISHED = "finished"
"""Reason of a `Leave` that says that the training is complete."""
OVER = "the training has finished"
"""Start of what is said to one that comes back after that."""
UNLIKE = "all replica groups need the same"
"""In what is said to one whose settings are not those of its peers."""
SETTLED = "settled on return"
"""Reason of the outcome of a step in doubt."""
NOT_HELD = "is held by no replica group that is here"
"""In the reason of a quorum that goes back behind the job's last step."""
OTHERS_FINISHED = "others have finished the training"
"""The end of the reason of a quorum after such a `Leave`: its members do more than the others did."""
TOO_FEW_LEFT = f"{OTHERS_FINISHED}, and too few are left"
"""Start of a reason to wait that does not end by itself: a loop that asks for a quorum ends with it."""
NOT_KNOWN = "not known here"
"""At the end of the reason of an `Expelled`: a connection was lost meanwhile, or the lighthouse was started again."""
GAVE_UP = "gave up its state: "
"""A `Leave` whose reason starts with this is followed by a `Join`: its sender leaves in order to heal."""
GAVE_UP_PLACE = "gave up its place: "
"""The same of a sender that holds the state with which it leaves."""
DENIED = "heal denied: "
"""A `Leave` whose reason starts with this is of one that never gets a state: its options differ from its peers'."""


@dataclass(frozen=True, slots=True)
class Leave:
    """The replica group stops taking part now, as intended.

    `reduced`: all collectives that it has started in this step are done, so the others' are to end
    by themselves. Their step may still commit. `promised`, `quorum_id`: the term that its sender has obeyed
    last, and its last quorum.
    `left`: how often this process has left, this time included. A `Join` that says as much is newer.
    `differs`: since the last commit its state was not that of its step: what has healed from it is not, either.
    """

    job: JobKey
    replica_id: str
    reason: str = ""
    reduced: bool = False
    promised: Term = NO_TERM
    left: int = 1
    differs: bool = False
    quorum_id: int = NO_QUORUM

    def __post_init__(self) -> None:
        _one_line(self, "reason")
        _check_place(self.quorum_id, 0)
        _check(1 <= self.left <= MAX_STEP, "left out of range")

    @property
    def comes_back(self) -> bool:
        """Whether its sender lives on, and is to join again."""
        return self.reason.startswith((GAVE_UP, GAVE_UP_PLACE))


@dataclass(frozen=True, slots=True)
class Silence:
    """A rank that has been making the process group of a quorum for a second or longer.

    Attributes:
        rank: its number in its replica group.
        members, ranks: those of which it has heard nothing, although connections can be made:
            replica_ids, and numbers in their groups.
    """

    quorum_id: int
    rank: int
    members: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_place(self.quorum_id, 0)
        for rank in (self.rank, *self.ranks):
            _check(0 <= rank < MAX_GROUP_WORLD_SIZE, "rank out of range")
        _check(len(self.members) == len(self.ranks), "members and ranks: one for the other")


@dataclass(frozen=True, slots=True)
class ReachReport:
    """Which members the sender could not connect to (`missed`), and which it could (`reached`).

    Sent when a process group could not be made, and as the answer to a `ReachQuery`; with a `silence`,
    again and again while one is being made. A sender that can't make a process group whatever the
    others do names itself. Up to `MAX_NAMED` in all.
    """

    job: JobKey
    replica_id: str
    missed: tuple[str, ...] = ()
    reached: tuple[str, ...] = ()
    silence: Silence | None = None

    def __post_init__(self) -> None:
        silent = () if self.silence is None else self.silence.members
        named = len(self.missed) + len(self.reached) + len(silent)
        _check(named <= MAX_NAMED, f"a report names at most {MAX_NAMED} members")


@dataclass(frozen=True, slots=True)
class DeathNotice:
    """A watcher saw the process behind `replica_id` die (before its sockets closed).

    `promised`, `quorum_id`: the term that the process had promised itself to last, and its last quorum.
    """

    job: JobKey
    replica_id: str
    cause: str = ""
    promised: Term = NO_TERM
    quorum_id: int = NO_QUORUM

    def __post_init__(self) -> None:
        _check_id(self.replica_id, "replica_id")
        _check_place(self.quorum_id, 0)
        _one_line(self, "cause")


@dataclass(frozen=True, slots=True)
class DeclareDead:
    """An operator or a supervisor says that a replica group is dead, or will not come.

    `member`: its name, or the replica_id of a process (`is_replica_id`). It holds for all rooms of the job.
    """

    job_id: str
    member: str

    def __post_init__(self) -> None:
        _check_id(self.job_id, "job_id")
        _check_id(self.member, "member")


@dataclass(frozen=True, slots=True)
class StatusRequest:
    """Asks for a `Status`."""


# ---------------------------------------------------------------- lighthouse -> replica group


EACH, OWN, ON_LAST = "each", "own", "last"
"""On what a quorum rests: see `Quorum`."""


@dataclass(frozen=True, slots=True)
class Quorum:
    """A new quorum: which members train together from (step, lineage) on.

    Replica ranks are positions in the full member list. To a receiver whose last quorum was
    `base_id` only the difference travels: drop `removed`, replace those in `changed` by
    replica_id, append the rest of `changed` in order. Members that are kept are not healing, even
    if they were before. `base_id` 0: `changed` is the full list.
    `nonce`: of the term, whose epoch is in the `quorum_id`. `genesis`: a random number, which the
    first quorum of the job has made. `held`: see `Join`, for (step, lineage).
    `settle`: what became of the receiver's step in doubt ("commit", "discard" or ""); `control`:
    that of the step's `Decision`, where it is still known. `attempt`: from the leader of a replica
    group of several ranks, how many attempts its ranks have spent; the lighthouse leaves it out.
    `compare`: members have healed since the last commit, so that all compare all of their states.
    `rests`: on what the quorum rests (`Basis`): on `bases`, on each of its members (`EACH`), on
    half of them (`OWN`), or, where `base_id` is given, on half of that quorum's (`ON_LAST`).
    """

    job: JobKey
    quorum_id: int
    step: int
    lineage: str
    base_id: int
    removed: tuple[str, ...]
    changed: tuple[Member, ...]
    reason: str = ""
    settle: str = ""
    control: bytes = b""
    nonce: int = 0
    genesis: int = 0
    held: int = NO_QUORUM
    attempt: int = ONE_RANK
    compare: bool = False
    rests: str = ""
    bases: tuple[tuple[str, ...], ...] = ()

    @property
    def term(self) -> Term:
        """In which it was formed."""
        return Term(epoch_of(self.quorum_id), self.nonce)

    def __post_init__(self) -> None:
        _check_control(self.control)
        _check(self.settle in ("", "commit", "discard"), "settle: commit, discard or empty")
        _check(self.rests in ("", EACH, OWN, ON_LAST), "rests: each, own, last or empty")


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer to a vote: what becomes of (quorum_id, step), and the next quorum.

    `next_quorum` None: the same quorum goes on with step + 1 (the steady state; constant size).
    `waiting` True: no next quorum yet, one will follow (or `Waiting` says why not).
    `control`: that of the lowest-ranked member that voted yes; all members get the same bytes.
    """

    job: JobKey
    quorum_id: int
    step: int
    committed: bool
    reason: str = ""
    next_quorum: Quorum | None = None
    waiting: bool = False
    control: bytes = b""


@dataclass(frozen=True, slots=True)
class Revoke:
    """Orders a member to stop the collectives of (quorum_id, step) now, and to vote."""

    job: JobKey
    quorum_id: int
    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class Waiting:
    """No quorum yet, and why; sent when the reason changes.

    `offer`: the receiver is not counted yet, and has to join again with this term as its promise.
    None: nothing is offered.
    """

    job: JobKey
    reason: str
    offer: Term | None = None


@dataclass(frozen=True, slots=True)
class Expelled:
    """The receiver is not a member (evicted, diverged or unknown) and must join again.

    `hung`: its training loop made no progress; it may join when the loop does, not before.
    `differs`: its state is not its peers', although its version is: it must discard it, and heal.
    """

    job: JobKey
    quorum_id: int
    reason: str
    hung: bool = False
    differs: bool = False


@dataclass(frozen=True, slots=True)
class ReachQuery:
    """Asks the receiver to connect to the process groups of `members`: see `ReachReport`."""

    job: JobKey
    members: tuple[Member, ...]


NONE_IS_RIGHT = "no state is held by more than half"
"""In the reason of a `Refused` after which no state is to be trusted."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Joining will not help; `reason` is a sentence for a person."""

    job: JobKey
    reason: str


@dataclass(frozen=True, slots=True)
class Declared:
    """The answer to `DeclareDead`: a sentence for a person. `accepted` False: nothing has changed."""

    job_id: str
    member: str
    accepted: bool
    text: str


@dataclass(frozen=True, slots=True)
class Status:
    """All jobs as JSON text, for people and dashboards."""

    text: str


Request = Join | Vote | Heartbeat | Leave | ReachReport | DeathNotice | DeclareDead | StatusRequest
Reply = Quorum | Decision | Revoke | Waiting | Expelled | ReachQuery | Refused | Declared | Status
Message = Request | Reply


def healed(members: tuple[Member, ...]) -> tuple[Member, ...]:
    """`members` after a committed step: none is still healing. Both ends conclude it alike."""
    if not any(member.healing for member in members):
        return members
    return tuple(replace(m, healing=False) if m.healing else m for m in members)


def apply_delta(base: tuple[Member, ...], quorum: Quorum) -> tuple[Member, ...]:
    """Full member list of `quorum`, from the receiver's previous list `base`. See `Quorum`."""
    if quorum.base_id == NO_QUORUM:
        return quorum.changed
    removed = set(quorum.removed)
    changed = {member.replica_id: member for member in quorum.changed}
    kept = [
        changed.pop(m.replica_id, replace(m, healing=False) if m.healing else m)
        for m in base
        if m.replica_id not in removed
    ]
    return (*kept, *changed.values())


def member_delta(
    old: tuple[Member, ...], new: tuple[Member, ...]
) -> tuple[tuple[str, ...], tuple[Member, ...]] | None:
    """(removed, changed) such that `apply_delta` turns `old` into `new`; None if none does.

    A member that heals is always in `changed`: receivers of one list may differ in whether they
    know that a step was committed, which ends healing.
    """
    new_by_id = {member.replica_id: member for member in new}
    old_by_id = {m.replica_id: replace(m, healing=False) if m.healing else m for m in old}
    removed = tuple(m.replica_id for m in old if m.replica_id not in new_by_id)
    changed = tuple(m for m in new if old_by_id.get(m.replica_id) != m)
    kept_order = [m.replica_id for m in old if m.replica_id in new_by_id]
    order = kept_order + [m.replica_id for m in changed if m.replica_id not in old_by_id]
    return (removed, changed) if order == [m.replica_id for m in new] else None
