"""Explicit-state model of members and lighthouses, with the product's own rules in it.

A lighthouse life is a ballot b = 1..K; they all live at once, are cut off from each other, and may
stop and wake at any point. What is said is a fact that stays said: a receiver may act on it late,
twice, or never. Members die and come back as new ones with an old checkpoint. Unreachable is not dead:
a lighthouse may go on without any member at any time; it knows of a death by an obituary, or never.

Member    (id, alive, promised, cfg, comm, pos, held, st, said)
    cfg: last quorum accepted; comm: 1 it knows of a commit under it, 2 it has had part in one or has healed;
    pos: ids of the quorums that committed each step; held: newest quorum in which pos was the position;
    said: what it told each ballot when it promised.
    st: 0 works, 1 voted yes and heard nothing, 2 told discard, 3 behind, 4 behind and never was a member
Light     (own, bases, pos, n, live)   own: 0 nothing yet, 1 has taken over, 2 has committed
Quorum    id -> (members, bases, pos)
"""
# mypy: ignore-errors
# ruff: noqa

from __future__ import annotations

import time
from itertools import combinations

from lighthouse.machine import fence

RULES = "promise t r basekept doubt newest proofs record voter notimmortal nonce roll more_than_half commit_moves_base word each freeze alldead redo".split()
Q = 8  # quorum id = ballot * Q + n


class Violation(Exception):
    pass


def subsets(xs, least=1):
    xs = list(xs)
    for k in range(len(xs), least - 1, -1):
        yield from combinations(xs, k)


def prefix(a, b):
    return b[: len(a)] == a


class Model:
    def __init__(
        self,
        slots=3,
        ballots=2,
        nmax=2,
        steps=2,
        deaths=1,
        births=0,
        cold=False,
        without=(),
        witness=True,
        foreign=False,
        after=(),
    ):
        self.slots, self.K, self.steps = slots, ballots, steps
        # Quorums a lighthouse may announce.
        self.nmax = nmax if isinstance(nmax, tuple) else (nmax,) * ballots
        self.deaths, self.births, self.cold = deaths, births, cold
        self.on = {r: r not in without for r in RULES}
        self.witness = witness
        self.names, self.foreign, self.after = slots, foreign, after
        self.known = {}  # takeovers by what they depend on: many states differ in something else

    def start(self):
        ids = tuple(range(self.slots))
        lights = [(0, (), (), 0, 0) for _ in range(self.K)]
        if self.cold:
            ms = tuple((i, 1, 0, 0, 0, (), 0, 0, ()) for i in ids)
            return (ms, tuple(lights), (), frozenset(), frozenset())
        q = Q + 1
        lights[0] = (2, (ids,), (), 1, q)
        ms = tuple((i, 1, 1, q, 3, (), q, 0, ()) for i in ids)
        return (ms, tuple(lights), ((q, ids, (ids,), ()),), frozenset(), frozenset())

    def rolled(self, some):
        """Somebody of every name is here, and each name has one process."""
        return len({i % 4 for i in some}) == self.names

    # ---------------------------------------------------------------- the rules, as in the product

    def enough(self, some, members, b, dead, more):
        named = {name(d): (p, 0) for d, p in dead.items()}
        here = {name(x) for x in some}
        return fence.enough(here, frozenset(map(name, members)), (b, 0), named, more=more)

    def takeovers(self, b, P, D, quorums):
        """[(bases, pos)]. P: id -> what it said on promising b. D: id -> record of a proven death."""
        case = b, tuple(P.items()), tuple(D.items()), tuple(quorums.items())
        if case not in self.known:
            self.known[case] = list(self._takeovers(b, P, D, quorums))
        return self.known[case]

    def _takeovers(self, b, P, D, quorums):
        reports = {name(x): report(r) for x, r in P.items()}
        obituaries = {name(d): ((r[2], 0), report(r[3:8])) for d, r in D.items()}
        known = [*reports.values(), *(said for _, said in obituaries.values())]
        top = max((said.quorum for said in known), default=0)
        record = None
        if top:
            members, bases, start = quorums[top]
            lists = tuple(frozenset(map(name, base)) for base in bases)
            record = fence.Record(frozenset(map(name, members)), lists, len(start), start)
        found = fence.takeover((b, 0), reports, obituaries, record, complete=self.rolled(P))
        if found is None:
            return
        lists = tuple(sorted(tuple(sorted(map(int, base))) for base in found.bases))
        said = reports[found.source]
        pos = start if record is not None and said.doubt == start else said.lineage
        if found.doubt in ("commit", "either"):
            yield lists, pos + (top,)
        if found.doubt != "commit":
            yield lists, pos

    # ---------------------------------------------------------------- all next states
    def next(self, state):
        ms, lights, qs, votes, decs = state
        on, quorums = self.on, {q[0]: q[1:] for q in qs}
        out = []

        def member(i, m, what, lights=lights, qs=qs, votes=votes, decs=decs):
            out.append((what, (ms[:i] + (m,) + ms[i + 1 :], lights, qs, votes, decs)))

        def light(b, l, what, qs=qs, votes=votes, decs=decs):
            out.append((what, (ms, lights[: b - 1] + (l,) + lights[b:], qs, votes, decs)))

        deaths = sum(not m[1] for m in ms)
        for i, m in enumerate(ms):
            id, alive, promised, cfg, comm, pos, held, st, said = m
            name = "ABC"[id % 4] + "'" * (id // 4)
            if not alive:
                if id + 4 not in [x[0] for x in ms] and len(ms) < self.slots + self.births:
                    # 99: another run's state.
                    for cp in {(), pos} | ({(99, 99)} if self.foreign else set()):
                        new = (id + 4, 1, 0, 0, 0, cp, held if cp and cp[0] != 99 else 0, 0, ())
                        out.append(
                            (
                                f"{name}' starts from checkpoint {len(cp)}",
                                (ms + (new,), lights, qs, votes, decs),
                            )
                        )
                continue
            if deaths < self.deaths:
                member(i, (id, 0, *m[2:]), f"{name} dies")
            for b in range(1, self.K + 1):
                if b > promised or (not on["promise"] and b not in [s[0] for s in said]):
                    r = (b, cfg, comm, pos, held, st)
                    member(
                        i, (id, 1, b, cfg, comm, pos, held, st, said + (r,)), f"{name} promises {b}"
                    )
            for q, members, bases, start in qs:
                if q > cfg and id in members and (q // Q == promised or not on["promise"]):
                    p = pos + (cfg,) if st == 1 and pos + (cfg,) == start else pos
                    s = 0 if p == start else 4 if cfg == 0 or st == 4 else 3
                    member(
                        i,
                        (id, 1, promised, q, comm & 2, p, q if s == 0 else held, s, said),
                        f"{name} takes {q}",
                    )
            if cfg:
                mine = cfg // Q == promised or not on["promise"]
                start = quorums[cfg][2]
                if (
                    st >= 3
                    and (mine or not on["freeze"])
                    and any(x[1] and x[3] == cfg and x[5] == start and x[7] < 3 for x in ms)
                ):
                    if comm & 2 and not prefix(pos, start):
                        raise Violation(
                            f"S3: {name} lives, holds {pos} and is told to heal to {start}"
                        )
                    member(
                        i, (id, 1, promised, cfg, comm | 2, start, cfg, 0, said), f"{name} heals"
                    )
                if st == 0 and mine and len(pos) < self.steps:
                    member(
                        i,
                        (id, 1, promised, cfg, comm, pos, held, 1, said),
                        f"{name} votes yes on {cfg} step {len(pos)}",
                        votes=votes | {(id, cfg, len(pos))},
                    )
                if st == 1 and mine:
                    if (cfg, len(pos), 1) in decs:
                        member(
                            i,
                            (id, 1, promised, cfg, 3, pos + (cfg,), cfg, 0, said),
                            f"{name} hears commit of {cfg} step {len(pos)}",
                        )
                    if (cfg, len(pos), 0) in decs:
                        member(
                            i,
                            (id, 1, promised, cfg, comm, pos, held, 2, said),
                            f"{name} hears discard of {cfg} step {len(pos)}",
                        )
        dead = {m[0]: m for m in ms if not m[1]}
        for b in range(1, self.K + 1):
            own, bases, pos, n, live = lights[b - 1]
            if live:
                members, qbases, start = quorums[live]
                step = len(pos)
                light(
                    b,
                    (own, bases, pos, n, 0),
                    f"lighthouse {b} discards {live} step {step}",
                    decs=decs | {(live, step, 0)},
                    votes=frozenset(v for v in votes if v[1] != live),
                )
                yes = [x for x in members if (x, live, step) in votes]
                known = {d: r[2] for d, r in dead.items()} if self.witness else {}
                if not on["proofs"]:
                    known = {x: b for x in range(12) if x not in yes}  # who is lost counts as dead
                for S in subsets(yes):
                    whole = self.rolled(S) and on["roll"]
                    if (
                        on["r"]
                        and not whole
                        and not all(self.enough(S, N, b, known, False) for N in bases)
                    ):
                        continue
                    go_on = live if len(S) == len(members) else 0
                    base = members if on["commit_moves_base"] else bases[0]
                    light(
                        b,
                        (2, (members,), pos + (live,), n, go_on),
                        f"lighthouse {b} commits {live} step {step} with " + self.text(S),
                        decs=decs | {(live, step, 1)},
                        votes=frozenset(v for v in votes if v[1] != live),
                    )
            elif n < self.nmax[b - 1]:
                here = {m[0]: s[1:] for m in ms for s in m[8] if s[0] == b}
                if b == 1 and not self.cold:
                    here.update({i: None for i in range(self.slots)})
                found = set()
                if own:
                    lists = bases
                    if not on["commit_moves_base"]:
                        lists = (
                            (quorums[max(q for q in quorums if q // Q == b)][0],) if n else bases
                        )
                    can = [
                        x
                        for x, r in here.items()
                        if own == 2 or not on["redo"] or prefix(r[2], pos)
                    ]
                    # Who came later with a newer state: needs a new ballot.
                    found.add((lists, pos, tuple(sorted(can))))
                else:
                    for P in subsets(here):
                        for D in subsets(dead, 0) if self.witness else [()]:
                            for lists, p in self.takeovers(
                                b, {x: here[x] for x in P}, {d: dead[d] for d in D}, quorums
                            ):
                                found.add((lists, p, P))
                for lists, p, P in found:
                    for M in subsets(P):
                        qb = b if on["nonce"] or b < 3 else b - 1
                        q = qb * Q + n + 1
                        if q in quorums and quorums[q][0] != M:
                            raise Violation(
                                f"S1: {q} is {self.text(quorums[q][0])} and {self.text(M)}"
                            )
                        l = (max(own, 1), lists, p, n + 1, q)
                        light(
                            b,
                            l,
                            f"lighthouse {b} announces {q} = {self.text(M)} at step {len(p)}",
                            qs=qs + ((q, M, lists, p),),
                        )
        return out

    @staticmethod
    def text(ids):
        return "{" + " ".join("ABC"[i % 4] + "'" * (i // 4) for i in ids) + "}"

    # ---------------------------------------------------------------- invariants and progress
    def check(self, state):
        # Not one that only brings a checkpoint.
        holders = [m for m in state[0] if m[1] and m[4] & 2]
        for x, y in combinations(holders, 2):
            if not (prefix(x[5], y[5]) or prefix(y[5], x[5])):
                a, b = self.text((x[0],)), self.text((y[0],))
                raise Violation(f"S2: {a} holds {x[5]}, {b} holds {y[5]}")

    def stuck(self, state):
        """Faults have stopped, all who live go to a new lighthouse, all deaths are proven: it must form a quorum."""
        ms, _, qs, _, _ = state
        P = {m[0]: m[3:8] for m in ms if m[1]}
        D = {m[0]: m for m in ms if not m[1]}
        if not P or (all(not r[0] for r in P.values()) and not self.rolled(P)):
            return False
        if not self.rolled(P):  # a whole list is dead: to wait for all names is right
            top = max(m[3] for m in ms)
            members, bases, _ = next((q[1:] for q in qs if q[0] == top), ((), (), ()))
            if any(not set(N) & set(P) for N in (members, *bases)):
                return False
        return not self.takeovers(self.K + 1, P, D, {q[0]: q[1:] for q in qs})

    def canon(self, state):
        """Drop what nobody can act on any more."""
        ms, lights, qs, votes, decs = state
        if self.on["promise"]:
            low = min((m[2] for m in ms if m[1]), default=99)
            bound = {m[2] for m in ms if m[1]}
            lights = tuple(
                l if b in bound or b > low else (2, (), (), self.nmax[b - 1], 0)
                for b, l in enumerate(lights, 1)
            )
        # Then it only matters who has promised.
        said = {b for b, l in enumerate(lights, 1) if l[0] < 2}
        keep = {b for b, l in enumerate(lights, 1) if l[3] < self.nmax[b - 1]}
        ms = tuple(
            (
                id,
                a,
                p,
                c,
                k,
                pos,
                h,
                st if a else 0,
                tuple(
                    r if r[0] in said else (r[0],)
                    for r in r9
                    if r[0] in keep or not self.on["promise"]
                ),
            )
            for id, a, p, c, k, pos, h, st, r9 in ms
        )
        live = {l[4] for l in lights}
        used = {m[3] for m in ms} | {s[1] for m in ms for s in m[8] if len(s) > 1} | live
        if not self.on["commit_moves_base"]:
            used |= {q[0] for q in qs}
        strict = self.on["promise"]
        qs = tuple(
            sorted(
                q
                for q in qs
                if q[0] in used
                or any(
                    m[1] and m[0] in q[1] and m[3] < q[0] and (m[2] == q[0] // Q or not strict)
                    for m in ms
                )
            )
        )
        decs = frozenset(
            d
            for d in decs
            if any(m[1] and m[7] == 1 and m[3] == d[0] and len(m[5]) == d[1] for m in ms)
        )
        votes = frozenset(v for v in votes if v[1] in live)
        return (ms, lights, qs, votes, decs)


def name(id):
    return f"{id:02}"


def report(said):
    cfg, comm, pos, held, st = said
    doubt = pos + (cfg,) if st == 1 else None
    return fence.Promise(cfg, bool(comm & 1), len(pos), pos, held, doubt)


def explore(model, limit=10**9, seconds=600, progress=True, keep=False):
    first = model.canon(model.start())
    for wanted in model.after:  # a search that begins after these events
        first = model.canon(next(t for what, t in model.next(first) if what == wanted))
    seen, layer, depth, n, edges = {hash(first)}, [first], 0, 1, 0
    met = set()  # as `seen`, of states as `next` makes them
    back = {hash(first): None} if keep else None
    t0, stucks = time.time(), 0
    while layer and n < limit and time.time() - t0 < seconds:
        following = []
        for s in layer:
            try:
                steps = model.next(s)
            except Violation as v:
                return dict(
                    found=str(v), trace=path(back, s), states=n, depth=depth, s=time.time() - t0
                )
            edges += len(steps)
            for what, t in steps:
                if (h := hash(t)) in met:
                    continue
                met.add(h)
                t = model.canon(t)
                h = hash(t)
                if h in seen:
                    continue
                seen.add(h)
                n += 1
                if keep:
                    back[h] = (hash(s), what)
                try:
                    model.check(t)
                    if progress and model.stuck(t):
                        raise Violation(
                            "L: all who live are here, all deaths are proven, and nothing may form"
                        )
                except Violation as v:
                    return dict(
                        found=str(v),
                        trace=path(back, t),
                        states=n,
                        depth=depth + 1,
                        s=time.time() - t0,
                    )
                following.append(t)
            if n >= limit or time.time() - t0 > seconds:
                return dict(
                    found="", full=False, states=n, edges=edges, depth=depth, s=time.time() - t0
                )
        layer, depth = following, depth + 1
    return dict(found="", full=not layer, states=n, edges=edges, depth=depth, s=time.time() - t0)


def path(back, s):
    steps, s = [], hash(s)
    while back and back.get(s):
        s, what = back[s]
        steps.append(what)
    return steps[::-1]


BASE = (
    "lighthouse 1 discards 9 step 0",
    "lighthouse 1 announces 10 = {A B} at step 0",
    "lighthouse 1 discards 10 step 0",
    "lighthouse 1 announces 11 = {A} at step 0",
)
ROLL = (
    "A promises 1",
    "B promises 1",
    "lighthouse 1 announces 9 = {A B} at step 0",
    "A takes 9",
    "A votes yes on 9 step 0",
    "lighthouse 1 commits 9 step 0 with {A}",
    "A hears commit of 9 step 0",
    "B dies",
    "B' starts from checkpoint 0",
)
LATE = (
    "A votes yes on 9 step 0",
    "lighthouse 1 commits 9 step 0 with {A}",
    "lighthouse 1 announces 10 = {A B} at step 1",
    "A takes 10",
    "B takes 10",
    "B promises 2",
)
LAST = (
    "A votes yes on 9 step 0",
    "B votes yes on 9 step 0",
    "lighthouse 1 commits 9 step 0 with {A}",
    "A hears commit of 9 step 0",
    "lighthouse 1 announces 10 = {B} at step 1",
    "B takes 10",
    "B votes yes on 10 step 1",
    "lighthouse 1 commits 10 step 1 with {B}",
    "B hears commit of 10 step 1",
    "B dies",
)
SCENARIOS = {  # name -> bounds
    "two members, two lighthouses": dict(slots=2, deaths=1),
    "two members, one dies and comes back": dict(slots=2, deaths=1, births=1),
    "two members, deaths never proven": dict(slots=2, deaths=1, births=1, witness=False),
    "two members, three lighthouses": dict(slots=2, ballots=3, steps=1, deaths=0),
    "two members, started cold": dict(slots=2, cold=True, deaths=1, births=1, steps=1, nmax=1),
    "two members, another run's state comes": dict(
        slots=2, deaths=1, births=1, steps=1, foreign=True
    ),
    "three members, two lighthouses": dict(slots=3, deaths=0, steps=1, nmax=1),
    "three members, lists announced in vain": dict(
        slots=3, deaths=0, steps=1, nmax=(3, 1), after=BASE
    ),
    "three members, one dies": dict(slots=3, deaths=1, steps=1, nmax=1),
}
MUTANTS = {  # the rule that is taken out -> (what that means, bounds that show it)
    "promise": ("members listen to a lighthouse that they have left", dict(slots=2, deaths=0)),
    "t": (
        "a new lighthouse goes on with whoever came (today, after the join timeout)",
        dict(slots=2, deaths=0),
    ),
    "r": ("a lighthouse commits with any one member", dict(slots=3, deaths=0, steps=1)),
    "more_than_half": ("half is enough for a takeover, too", dict(slots=2, deaths=0)),
    "commit_moves_base": (
        "halves are counted from the last list announced, not from the last that committed",
        dict(slots=3, deaths=0, steps=1, nmax=(3, 1), after=BASE),
    ),
    "basekept": (
        "members forget on which list their quorum rests",
        dict(slots=2, deaths=0, nmax=3),
    ),
    "doubt": (
        "a yes in doubt is discarded unless all are back (today, rule 4)",
        dict(slots=3, deaths=0, steps=1, nmax=1),
    ),
    "newest": (
        "the highest step wins (today, R2)",
        dict(slots=2, deaths=1, births=1, steps=1, foreign=True),
    ),
    "proofs": ("a lost connection counts as a death", dict(slots=2, deaths=0)),
    "record": (
        "an obituary says only that it is dead, not what it had promised",
        dict(slots=3, deaths=1, steps=1, nmax=1),
    ),
    "voter": ("the dead alone make up the half", dict(slots=2, deaths=1, births=1, steps=2)),
    "nonce": (
        "two lives of lighthouses share a number",
        dict(slots=2, ballots=3, deaths=0, steps=1),
    ),
    "word": (
        "an obituary stands for what the dead had said on promising",
        dict(slots=3, deaths=1, steps=1, nmax=1),
    ),
    "each": (
        "half of a cold quorum may commit its first step",
        dict(slots=2, cold=True, deaths=1, births=1, steps=1, nmax=1),
    ),
    "alldead": (
        "where a whole list is proven dead anybody may start",
        dict(slots=2, deaths=1, births=1, after=LAST),
    ),
    "freeze": (
        "a heal of the old quorum is loaded after the promise",
        dict(slots=2, deaths=1, births=1, after=LATE),
    ),
    "roll": (
        "a job starts cold with a majority of its names",
        dict(slots=3, deaths=1, births=1, cold=True, steps=1, nmax=1, after=ROLL),
    ),
}
