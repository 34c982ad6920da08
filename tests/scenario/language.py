"""Text scenarios: a file of commands, each followed by everything the machine answers.

Lines of a file: `# comment`, empty, `command words key=value flag`, and (indented by four spaces)
the expected answers. The first command is `job ...`, `replica ...` or `group ...` (the leader of one of
several ranks); there `show="held attempt"` shows fields that are left out elsewhere. Lineages are shown
as the name given to them first, else as L1, L2, ... in order of appearance, so that files stay readable;
`lineage=L1` means the same, `lineage=head` the job's newest. A vote's default is what that was at the first vote on its step. A quorum_id of a
later term than the first is written as epoch.number, a term as epoch:nonce, a genesis with founders as
founders.number. One that joins follows the
lighthouse that offers it a term, and this is left out; with `promised=` it sends just one Join, and all
is shown. `play` returns the file as it should be: a test compares, and
`python -m tests.scenario --write` rewrites (then read the difference!).
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections import Counter
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ft_core.replica.events import (
    Begin,
    Bind,
    CastVote,
    Configured,
    Connected,
    Depart,
    Disconnected,
    Entered,
    Fail,
    Fetched,
    FetchState,
    LeaveAfterStep,
    Loaded,
    Overwrite,
    Published,
    Rejoin,
    ReplicaEvent,
    ServedTorn,
    StopWaiting,
    Transmit,
    Tried,
    Unapplied,
)
from ft_core.replica.group_leader import GroupEffect, GroupLeader, SendUp, peer_of
from ft_core.replica.machine import Replica
from lighthouse.config import LighthouseConfig, Timeouts
from lighthouse.machine.job import Note, Remember, Send
from lighthouse.machine.jobs import Lighthouse
from lighthouse.machine.rules import NONCE_BITS
from lighthouse.wire.messages import (
    DENIED,
    GAVE_UP,
    GAVE_UP_PLACE,
    NO_TERM,
    NOT_COUNTED,
    ONE_RANK,
    TERM_BITS,
    Basis,
    DeathNotice,
    Decision,
    DeclareDead,
    Expelled,
    Heartbeat,
    InDoubt,
    JobKey,
    Join,
    Leave,
    Member,
    Quorum,
    ReachQuery,
    ReachReport,
    Refused,
    Revoke,
    Silence,
    Term,
    Vote,
    Waiting,
)

JOB = JobKey("job", "room")
HIDDEN = (
    "job",
    "addresses",
    "schema_text",
    "name",
    "group_world_size",
    "nonce",
    "promised",
    "genesis",
    "held",
    "attempt",
    "compare",
    "rests",
    "bases",
    "basis",
    "why",
)
FIRST_TERM = Term(0, 1)


@dataclass(slots=True)
class Words:
    """One command, taken apart."""

    name: str
    plain: list[str]
    given: dict[str, str]

    def flag(self, name: str) -> bool:
        return name in self.plain

    def number(self, name: str, default: int = 0) -> int:
        return int(self.given.get(name, default))

    def quorum(self, name: str) -> int:
        return id_from(self.given.get(name, "0"))

    def genesis(self) -> int:
        return id_from(self.given.get("genesis", "0"), NONCE_BITS)


def reach_from(words: Words) -> tuple[tuple[str, ...], tuple[str, ...], Silence | None]:
    """missed="..", reached="..", and silent=".." (which may be empty) of the quorum `quorum`."""
    missed, reached = (tuple(words.given.get(k, "").split()) for k in ("missed", "reached"))
    if "silent" not in words.given:
        return missed, reached, None
    silent, rank = tuple(words.given["silent"].split()), words.number("rank")
    silence = Silence(words.quorum("quorum"), rank, silent, (rank,) * len(silent))
    return missed, reached, silence


def id_from(text: str, bits: int = TERM_BITS) -> int:
    """A quorum_id, which may be written as epoch.number, or a genesis (founders.number)."""
    high, dot, number = text.rpartition(".")
    return (int(high) << bits) + int(number) if dot else int(text)


def id_text(number: int, bits: int = TERM_BITS) -> str:
    high, low = number >> bits, number % (1 << bits)
    return f"{high}.{low}" if high else str(low)


def ids_from(text: str) -> tuple[int, int]:
    """quorum_id/step."""
    quorum_id, _, step = text.partition("/")
    return id_from(quorum_id), int(step)


def term_from(text: str) -> Term:
    epoch, _, nonce = text.partition(":")
    return Term(int(epoch), int(nonce))


def read(line: str) -> Words:
    plain, given = [], {}
    for word in shlex.split(line):
        key, equals, value = word.partition("=")
        if equals:
            given[key] = value
        else:
            plain.append(word)
    return Words(plain[0], plain[1:], given)


@dataclass(slots=True)
class Names:
    """Short names for lineages."""

    by_hash: dict[str, str] = field(default_factory=dict)

    def shorten(self, text: str) -> str:
        def name(match: re.Match[str]) -> str:
            return self.by_hash.setdefault(match.group(), f"L{len(self.by_hash) + 1}")

        return re.sub(r"\b[0-9a-f]{16}\b", name, text)

    def resolve(self, text: str) -> str:
        return next((long for long, short in self.by_hash.items() if short == text), text)


def show(value: Any, hidden: tuple[str, ...] = HIDDEN) -> str:
    """A message, effect or field on one line; what is empty or `hidden` is left out."""
    if isinstance(value, Transmit):
        return show(value.message, hidden)
    if isinstance(value, Term):
        return f"{value.epoch}:{value.nonce}"
    if isinstance(value, Member):
        return value.replica_id + "*" * value.healing
    if isinstance(value, tuple):
        return "[" + " ".join(show(item, hidden) for item in value) + "]"
    if isinstance(value, bytes):
        text = value.decode(errors="replace")
        return text if text.isprintable() and "\ufffd" not in text else value.hex()
    if not hasattr(value, "__dataclass_fields__"):
        return repr(value) if isinstance(value, str) and " " in value else str(value)
    parts = []
    for spec in fields(value):
        inner = getattr(value, spec.name)
        if spec.name in hidden or spec.default == inner:
            continue
        if inner in ("", (), b"", None, False) and spec.default is not True:
            continue
        bits = {"quorum_id": TERM_BITS, "base_id": TERM_BITS, "genesis": NONCE_BITS}.get(spec.name)
        text = show(inner, hidden) if bits is None else id_text(inner, bits)
        parts.append(spec.name if inner is True else f"{spec.name}={text}")
    return f"{type(value).__name__}({', '.join(parts)})"


def hidden_by(words: Words) -> tuple[str, ...]:
    """The fields that a file's first command does not ask for."""
    wanted = words.given.get("show", "").split()
    return tuple(name for name in HIDDEN if name not in wanted)


class JobStage:
    """A lighthouse with one job. Replica groups are named by one word, which is also their id."""

    def __init__(self, words: Words, names: Names) -> None:
        self.now, self.names = 0.0, names
        self.config = LighthouseConfig(
            min_replicas=words.number("min", 1),
            expected_replicas=words.number("expected"),
            timeouts=Timeouts.derive(float(words.given.get("timeout_s", "6"))),
            go_on_after_s=float(words.given.get("go_on_after", "inf")),
        )
        self.hidden = hidden_by(words)
        self.journal: dict[JobKey, tuple[int, tuple[str, ...]]] = {}
        self.promised: dict[str, Term] = {}
        self.left: Counter[str] = Counter()
        self.voted_from: dict[tuple[int, int], str] = {}  # lineages, by (quorum_id, step)
        self.nonces = itertools.count(1)
        self.machine = Lighthouse(self.config, lambda: next(self.nonces))

    def do(self, words: Words) -> list[str]:
        effects: list[Any] = []
        machine, who = self.machine, words.plain[0] if words.plain else ""
        peer = words.given.get("over", who).encode()  # the connection
        if words.name == "at":
            self.now = float(who)
            wanted = machine.deadline()
            effects = machine.expire(self.now) if wanted is not None and wanted <= self.now else []
        elif words.name == "restart":
            remembered = self.journal if who else None
            self.voted_from.clear()
            self.machine = Lighthouse(self.config, lambda: next(self.nonces), remembered)
        elif words.name == "lost":
            effects = machine.disconnected(peer, self.now)
        elif words.name == "death_notice":
            effects = machine.handle(peer + b"#watcher", self._death_notice(who, words), self.now)
        elif words.name == "declare_dead":
            effects = machine.handle(b"tool", DeclareDead(JOB.job_id, who), self.now)
        elif words.name == "deadline":
            return [f"deadline {machine.deadline()}"]
        elif words.name == "jobs":
            return [f"jobs {len(list(machine.statuses()))}"]
        else:
            message = getattr(self, f"_{words.name}")(who, words)
            effects = machine.handle(peer, message, self.now)
            if isinstance(message, Join) and "promised" not in words.given:
                effects = self._follow(peer, message, effects)
        self.machine.check()
        return [line for effect in effects if (line := self._line(effect))]

    def _line(self, effect: Any) -> str:
        if isinstance(effect, Send):
            peers = " ".join(peer.decode() for peer in effect.peers)
            return f"{peers} <- {show(effect.message, self.hidden)}"
        if isinstance(effect, Remember):
            self.journal[effect.job] = (effect.quorum_id, effect.members)
            return ""
        assert isinstance(effect, Note)
        return f"log: {effect.text}"

    def _death_notice(self, who: str, words: Words) -> DeathNotice:
        """Its process had promised itself to the term that it was offered, if it is not said."""
        promised = self.promised.get(who, NO_TERM)
        if "promised" in words.given:
            promised = term_from(words.given["promised"])
        return DeathNotice(JOB, who, "killed", promised, words.quorum("quorum"))

    def _join(self, who: str, words: Words) -> Join:
        given, doubt = words.given, None
        lineage = self.names.resolve(given.get("lineage", "root"))
        if lineage == "head":
            lineage = self._head()
        if "doubt" in given:
            quorum_id, step = ids_from(given["doubt"])
            doubt = InDoubt(quorum_id, step, _after(lineage, quorum_id, step))
        last = tuple(given["last"].split(",")) if "last" in given else ()
        ranks = (who.encode(),) * words.number("ranks", 1)
        return Join(
            JOB,
            given.get("name", who),
            who,
            words.number("step"),
            lineage,
            ranks,
            quorum_id=words.quorum("quorum"),
            last_members=last,
            in_doubt=doubt,
            min_replicas=words.number("min"),
            expected_replicas=words.number("expected"),
            can_heal=not words.flag("no_heal"),
            group_commit=words.flag("group_commit"),
            schema=given.get("schema", ""),
            schema_text=given.get("schema", ""),
            genesis=words.genesis(),
            held=words.quorum("held"),
            promised=term_from(given["promised"])
            if "promised" in given
            else self.promised.get(who, NO_TERM),
            basis=self._basis(words, last, lineage),
            left=words.number("left", self.left[who]),
        )

    def _basis(self, words: Words, last: tuple[str, ...], lineage: str) -> Basis | None:
        """`start=STEP/LINEAGE`, `committed`, `each`, `bases=a,b/c`, `of=GENESIS`: of the last quorum, which started, if
        it is not said, from the state that is held, and in the same branch. `forgot`: nothing is known of it."""
        given = words.given
        if not last or words.flag("forgot"):
            return None
        step, _, start = given.get("start", f"{words.number('step')}/{lineage}").partition("/")
        committed, each = words.flag("committed"), words.flag("each")
        lists = given.get("bases", "" if committed or each else ",".join(last))
        bases = tuple(tuple(names.split(",")) for names in lists.split("/") if names)
        genesis = id_from(words.given["of"], NONCE_BITS) if "of" in words.given else words.genesis()
        return Basis(int(step), self.names.resolve(start), committed, each, bases, genesis)

    def _follow(self, peer: bytes, join: Join, effects: list[Any]) -> list[Any]:
        """If `peer` was offered the job's term, it joins again, and what was said first is left out."""
        for effect in effects:
            offer = effect.message.offer if _is_offer(effect) else None
            if offer is not None and effect.peers == (peer,):
                self.promised[join.replica_id] = offer
                effects.remove(effect)
                return effects + self.machine.handle(peer, replace(join, promised=offer), self.now)
        return effects

    def _head(self) -> str:
        """Lineage of the job's head: what an up-to-date member holds."""
        jobs: Any = self.machine.status()["jobs"]
        return str(jobs[0]["lineage"]) if jobs else "root"

    def _vote(self, who: str, words: Words) -> Vote:
        quorum_id, step = ids_from(words.plain[1])
        given = words.given
        lineage = self.names.resolve(given.get("lineage", ""))
        if not lineage or lineage == "head":
            voted_from = self.voted_from.setdefault((quorum_id, step), self._head())
            lineage = self._head() if lineage else voted_from
        return Vote(
            JOB,
            who,
            quorum_id,
            step,
            lineage,
            words.flag("yes"),
            given.get("reason", ""),
            given.get("phase", "reducing"),
            words.flag("stalled"),
            words.flag("leaving"),
            given.get("control", "").encode(),
            words.number("updates", NOT_COUNTED),
            given.get("digest", "").encode(),
            admits=not words.flag("shut"),
            torn=words.flag("torn"),
            follows=words.flag("follows"),
        )

    def _heartbeat(self, who: str, words: Words) -> Heartbeat:
        return Heartbeat(JOB, who, words.quorum("quorum"), words.number("step"))

    def _reach(self, who: str, words: Words) -> ReachReport:
        return ReachReport(JOB, who, *reach_from(words))

    def _leave(self, who: str, words: Words) -> Leave:
        """`left=` says that it is an older one: how often its sender has left by then."""
        left = words.number("left", self.left[who] + 1)
        self.left[who] = max(self.left[who], left)
        reason, reduced = words.given.get("reason", ""), words.flag("reduced")
        differs, last = words.flag("differs"), words.quorum("quorum")
        promised = self.promised.get(who, NO_TERM)
        return Leave(JOB, who, reason, reduced, promised, left, differs, last)


PLAIN_EVENTS: dict[str, ReplicaEvent] = {
    "entered": Entered(),
    "bind": Bind(),
    "loaded": Loaded(),
    "leave_after_step": LeaveAfterStep(),
    "connected": Connected(),
    "disconnected": Disconnected(),
}


class ReplicaStage:
    """One replica machine, called `a`."""

    def __init__(self, words: Words, names: Names) -> None:
        self.now, self.names, self.hidden = 0.0, names, hidden_by(words)
        self.fetches: dict[tuple[int, str], list[FetchState]] = {}  # of each state
        join = Join(
            JOB,
            "a",
            "a",
            words.number("step"),
            words.given.get("lineage", "root"),
            (b"a",),
            group_commit=words.flag("group_commit"),
            promised=NO_TERM if words.flag("fresh") else FIRST_TERM,
        )
        self.machine = Replica(join, resend_s=1.0, revoke_grace_s=0.5)

    def do(self, words: Words) -> list[str]:
        machine, now = self.machine, self.now
        name, plain = words.name, words.plain
        effects: list[Any] = []
        if name == "wants":
            return [f"group {machine.status.wants_group}"]
        if name == "at":
            self.now = float(plain[0])
            wanted = machine.deadline()
            effects = machine.expire(self.now) if wanted is not None and wanted <= self.now else []
        else:
            effects = machine.handle(self._event(words), now)
        machine.check()
        for effect in effects:
            if isinstance(effect, FetchState):
                self.fetches.setdefault((effect.step, effect.lineage), []).append(effect)
        return [show(effect, self.hidden) for effect in effects] + [self._state()]

    def _event(self, words: Words) -> ReplicaEvent:
        name, plain, error = words.name, words.plain, words.given.get("error", "")
        if name == "leave":
            return Depart("shutdown", words.flag("reduced"))
        if name in PLAIN_EVENTS:
            return PLAIN_EVENTS[name]
        if name == "begin":
            return Begin(heal_in_step=words.flag("heal_in_step"))
        if name == "rejoin":
            return Rejoin(
                plain[0], discard_state=not words.flag("keep"), join_now=words.flag("join_now")
            )
        if name == "unapplied":
            return Unapplied(plain[0])
        if name == "stop_waiting":
            return StopWaiting()
        if name == "served_torn":
            return ServedTorn("the loop has changed it")
        if name == "fail":
            return Fail(plain[0], stalled=words.flag("stalled"), follows=words.flag("follows"))
        if name == "vote":
            return CastVote(
                words.flag("yes"),
                control=words.given.get("control", "").encode(),
                updates=words.number("updates", NOT_COUNTED),
                digest=words.given.get("digest", "").encode(),
                admits=not words.flag("shut"),
            )
        if name == "configured":
            return Configured(
                id_from(plain[0]), error, tuple(words.given.get("missed", "").split())
            )
        if name == "tried":
            return Tried(*reach_from(words))
        if name == "fetched":
            fetches = self.fetches[int(plain[0]), self.names.resolve(plain[1])]
            fetch = fetches[0 if words.flag("first") else -1]
            return Fetched(fetch, error, denied=words.flag("denied"))
        if name == "overwrite":
            return Overwrite(in_step=words.flag("in_step"))
        if name == "published":
            return (
                Published(None)
                if words.flag("none")
                else Published((self.machine.step, self.machine.lineage))
            )
        reply: ReplicaEvent = getattr(self, f"_{name}")(words)
        return reply

    def _state(self) -> str:
        machine = self.machine
        text = f"{machine.stage.value}/{machine.attempt.value} {machine.step}/{machine.lineage}"
        for shown in ("ready", "healing", "may_vote", "state_fetched"):
            text += f" {shown}" * getattr(machine, shown)
        text += " serves" * machine.status.still_read
        if machine.status.targets:
            text += f" targets={show(machine.status.targets)}"
        if machine.outcome is not None:
            text += f" {show(machine.outcome)}"
        return f"= {text}"

    def _quorum(self, words: Words) -> Quorum:
        given = words.given
        names = given.get("changed", "").split()
        changed = tuple(
            Member(n.rstrip("*"), 1, (n.rstrip("*").encode(),), n.endswith("*")) for n in names
        )
        return Quorum(
            JOB,
            id_from(words.plain[0]),
            words.number("step"),
            self.names.resolve(given.get("lineage", "root")),
            words.quorum("base"),
            tuple(given.get("removed", "").split()),
            changed,
            "test",
            given.get("settle", ""),
            given.get("control", "").encode(),
            words.number("nonce", FIRST_TERM.nonce),
            words.genesis(),
            words.quorum("held"),
            int(given.get("attempt", ONE_RANK)),
        )

    def _decision(self, words: Words) -> Decision:
        quorum_id, step = ids_from(words.plain[0])
        following = None
        if "next" in words.given:
            words.plain[0] = words.given["next"]
            words.given["step"] = words.given.get("next_step", str(step))
            following = self._quorum(words)
        return Decision(
            JOB,
            quorum_id,
            step,
            words.flag("commit"),
            "test",
            following,
            words.flag("waiting"),
            words.given.get("control", "").encode(),
        )

    def _revoke(self, words: Words) -> Revoke:
        quorum_id, step = ids_from(words.plain[0])
        return Revoke(JOB, quorum_id, step, "a peer died")

    def _query(self, words: Words) -> ReachQuery:
        return ReachQuery(JOB, tuple(Member(name, 1, (name.encode(),)) for name in words.plain))

    def _expelled(self, words: Words) -> Expelled:
        hung, differs = words.flag("hung"), words.flag("differs")
        return Expelled(
            JOB, id_from(words.plain[0]), words.given.get("reason", "evicted"), hung, differs
        )

    def _waiting(self, words: Words) -> Waiting:
        if "offer" in words.given:
            return Waiting(JOB, "not enough", term_from(words.given["offer"]))
        return Waiting(JOB, "not enough")

    def _refused(self, words: Words) -> Refused:
        return Refused(JOB, words.given.get("reason", "wrong model"))


class GroupStage(ReplicaStage):
    """The leader of the replica group `a`. A command is a rank and what it says, or what the lighthouse
    says; `gone 1`: the connection of rank 1 has ended."""

    def __init__(self, words: Words, names: Names) -> None:
        self.names, self.hidden = names, hidden_by(words)
        self.leader = GroupLeader(words.number("size", 2))

    def do(self, words: Words) -> list[str]:
        leader = self.leader
        if words.name == "gone":
            effects = leader.disconnected(peer_of(int(words.plain[0])))
        elif words.name == "status":
            return [f"unanswered {show(leader.unanswered, self.hidden)}"]
        elif words.name.isdigit():
            rank, said = words.name, words.plain.pop(0)
            message = getattr(self, f"_says_{said}")(rank, words)
            effects = leader.handle(peer_of(int(rank)), message)
        else:
            effects = leader.from_lighthouse(getattr(self, f"_{words.name}")(words))
        leader.check()
        return [self._line(effect) for effect in effects]

    def _line(self, effect: GroupEffect) -> str:
        if isinstance(effect, SendUp):
            return f"-> {show(effect.message, self.hidden)}"
        ranks = " ".join(peer.decode().removeprefix("rank-") for peer in effect.peers)
        return f"{ranks} <- {show(effect.message, self.hidden)}"

    def _says_join(self, rank: str, words: Words) -> Join:
        given, lineage = words.given, words.given.get("lineage", "root")
        doubt = InDoubt(*ids_from(given["doubt"]), "after") if "doubt" in given else None
        return Join(
            JOB,
            "a",
            "a",
            words.number("step"),
            lineage,
            (f"at-{rank}".encode(),),
            quorum_id=words.quorum("quorum"),
            in_doubt=doubt,
            can_heal=not words.flag("no_heal"),
            group_commit=words.flag("group_commit"),
            schema=given.get("schema", ""),
            promised=term_from(given["promised"]) if "promised" in given else FIRST_TERM,
            attempt=words.number("attempt"),
            left=words.number("left"),
            basis=Basis(words.number("step"), lineage) if words.flag("reports") else None,
        )

    def _says_vote(self, rank: str, words: Words) -> Vote:
        given = words.given
        return Vote(
            JOB,
            "a",
            *ids_from(words.plain[0]),
            given.get("lineage", "root"),
            words.flag("yes"),
            given.get("reason", ""),
            given.get("phase", "reducing"),
            words.flag("stalled"),
            words.flag("leaving"),
            given.get("control", "").encode(),
            words.number("updates", NOT_COUNTED),
            given.get("digest", "").encode(),
            words.number("attempt"),
            admits=not words.flag("shut"),
            torn=words.flag("torn"),
        )

    def _says_heartbeat(self, rank: str, words: Words) -> Heartbeat:
        return Heartbeat(JOB, "a", words.quorum("quorum"), words.number("step"))

    def _says_reach(self, rank: str, words: Words) -> ReachReport:
        return ReachReport(JOB, "a", *reach_from(words))

    def _says_leave(self, rank: str, words: Words) -> Leave:
        starts = {"state": GAVE_UP, "place": GAVE_UP_PLACE, "denied": DENIED}
        gave_up = "".join(starts.get(word, "") for word in words.plain)
        left = words.number("left", 1)
        return Leave(JOB, "a", f"{gave_up}spoilt", words.flag("reduced"), left=left)


def _is_offer(effect: Any) -> bool:
    return isinstance(effect, Send) and isinstance(effect.message, Waiting)


def _after(lineage: str, quorum_id: int, step: int) -> str:
    from lighthouse.wire.messages import next_lineage

    return next_lineage(lineage, FIRST_TERM.nonce, quorum_id, step)


def play(text: str) -> str:
    """`text` with the answers that the machine gives now."""
    names = Names()
    stages = {"job": JobStage, "replica": ReplicaStage, "group": GroupStage}
    stage: JobStage | ReplicaStage | None = None
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("    "):
            continue
        lines.append(line)
        if not line.strip() or line.startswith("#"):
            continue
        words = read(line)
        if stage is None:
            stage = stages[words.name](words, names)
            continue
        lines += ["    " + names.shorten(answer) for answer in stage.do(words)]
    return "\n".join(lines) + "\n"
