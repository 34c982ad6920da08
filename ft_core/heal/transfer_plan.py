"""PURE. Which source is asked for which chunk. No clock, socket or thread: `now` is given.

Theory. Every chunk is in exactly one of these places:

    a range       [lo, hi), owned by a source (its stripe) or by none (an orphan)
    returned      handed back: its source died, stalled, or sent it corrupted
    outstanding   requested from one source, or from two when the first is late
    done          received and checked

A source is kept busy with `window` outstanding chunks. It takes returned chunks first, then its own
stripe, then an orphaned one, then the far half of the largest stripe of another source. When no
chunk is left to hand out, it hedges: it requests the oldest chunk that another source owes for much
longer than this source usually takes.

A source that owes chunks and delivers none for `stall_s` (a multiple of the usual time between two
of its chunks) is stalled: its chunks are returned and its stripe is orphaned. What it still delivers
is accepted and ends the stall. If all sources are stalled, each is probed with one chunk at a time
at doubling intervals, since a request may have been lost.

A chunk that fails its checksum is requested again, from another source if there is one. The second
failure of one chunk ends the heal.

A transfer that can't end in time is given up early: members wait for it, and what it has cost them is
lost. Its pace so far says so, with a margin, as links get faster, too. So does a silence of all sources
that is long for this transfer, however little is left.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

WINDOW = 8
FIRST_STALL_S = 2.0  # before anything is known of a source's speed
STALL_FLOOR_S = 0.25
STALL_CAP_S = 10.0
STALL_FACTOR = 10.0
HEDGE_FACTOR = 4.0
HEDGE_FLOOR_S = 0.02
MAX_PROBE_S = 4.0
PACE_AFTER_S = 1.0
"""How long a transfer runs before its pace is judged; one that may take less than eight times as long
is never judged."""
PACE_MARGIN = 1.5
SILENT_SHARE = 10
"""A silence of this part of the time that the transfer has is the end of it, if it is also
`STALL_FACTOR` times what it usually takes from one chunk to the next."""
_SMOOTHING = 0.2


@dataclass(slots=True)
class _Source:
    lo: int = 0
    hi: int = 0
    outstanding: dict[int, float] = field(default_factory=dict)  # chunk -> when asked
    last_progress: float = 0.0
    interval_s: float | None = None  # usual time between two chunks
    latency_s: float | None = None  # usual time from request to chunk
    stalled: bool = False
    probe_at: float = 0.0
    probe_wait_s: float = 0.0
    received: int = 0

    def stall_s(self) -> float:
        if self.interval_s is None:
            return FIRST_STALL_S
        return min(STALL_CAP_S, max(STALL_FLOOR_S, STALL_FACTOR * self.interval_s))


class TransferPlan:
    """The state of one transfer of `count` chunks. Times are seconds of one monotonic clock."""

    def __init__(self, count: int, *, window: int = WINDOW) -> None:
        self._count = count
        self._window = window
        self._done = bytearray(count)
        self._left = count
        self._sources: dict[str, _Source] = {}
        self._orphans: list[tuple[int, int]] = [(0, count)] if count else []
        self._returned: deque[int] = deque()
        self._bad: dict[int, list[str]] = {}  # chunk -> sources that sent it corrupted
        self._began: float | None = None
        self._last = 0.0  # when a source last delivered anything
        self.retries = 0

    @property
    def finished(self) -> bool:
        """Whether every chunk is done."""
        return self._left == 0

    @property
    def remaining(self) -> int:
        """How many chunks are not done."""
        return self._left

    def hopeless_s(self, now: float, deadline: float) -> float:
        """How long the rest will take at the pace so far, if that is past `deadline` by a margin
        (infinite: the sources have fallen silent); else 0. A chunk that each source may be sending
        counts as received."""
        if self._began is None or deadline - self._began < 8 * PACE_AFTER_S:
            return 0.0
        took_s = now - self._began
        if took_s < max(PACE_AFTER_S, (deadline - self._began) / 30):
            return 0.0
        done = self._count - self._left
        if done:
            usual_s = (self._last - self._began) / done
            longest_s = max((deadline - self._began) / SILENT_SHARE, STALL_FACTOR * usual_s)
            if now - self._last >= longest_s:
                return math.inf
        chunks = done + max(1, len(self._sources))
        rest_s = self._left * took_s / chunks
        return rest_s if rest_s > PACE_MARGIN * (deadline - now) else 0.0

    def is_done(self, chunk: int) -> bool:
        """Whether this chunk was received and checked."""
        return bool(self._done[chunk])

    def stalled(self, name: str) -> bool:
        """Whether this source owes chunks and delivers none."""
        return name in self._sources and self._sources[name].stalled

    def add_source(self, name: str, now: float) -> None:
        """A source is ready to serve chunks."""
        assert name not in self._sources
        self._began = now if self._began is None else self._began
        self._sources[name] = _Source(last_progress=now)

    def drop_source(self, name: str) -> None:
        """A source is lost; the others take over what it owed. Unknown names are ignored."""
        source = self._sources.pop(name, None)
        if source is not None:
            self._release(source)

    def _release(self, source: _Source) -> None:
        if source.lo < source.hi:
            self._orphans.append((source.lo, source.hi))
            source.lo = source.hi = 0
        owed = [chunk for chunk in source.outstanding if not self._done[chunk]]
        self._returned.extend(owed)
        self.retries += len(owed)
        source.outstanding.clear()

    def received(self, name: str, chunk: int, now: float) -> bool:
        """A valid chunk arrived. False if it is a duplicate."""
        self._note_progress(name, chunk, now)
        if self._done[chunk]:
            return False
        self._done[chunk] = 1
        self._left -= 1
        return True

    def corrupted(self, name: str, chunk: int, now: float) -> list[str] | None:
        """A chunk arrived with a wrong checksum. Returns the sources that sent it corrupted if this
        ends the heal (the second time), else None."""
        self._note_progress(name, chunk, now)
        if self._done[chunk]:
            return None
        blamed = self._bad.setdefault(chunk, [])
        blamed.append(name)
        self._returned.append(chunk)
        self.retries += 1
        return blamed if len(blamed) > 1 else None

    def returned(self, name: str, chunk: int, now: float) -> None:
        """A chunk could not be read from this source in this way. It is requested again, and no
        source is blamed."""
        self._note_progress(name, chunk, now)
        if not self._done[chunk]:
            self._returned.append(chunk)
            self.retries += 1

    def _note_progress(self, name: str, chunk: int, now: float) -> None:
        self._last = now
        source = self._sources.get(name)
        if source is None:
            return
        asked = source.outstanding.pop(chunk, None)
        since = source.last_progress if asked is None else max(source.last_progress, asked)
        if not source.stalled:  # the length of a stall says nothing about its usual pace
            source.interval_s = _smooth(source.interval_s, now - since)
        if asked is not None:
            source.latency_s = _smooth(source.latency_s, now - asked)
        source.last_progress = now
        source.stalled = False
        source.probe_wait_s = 0.0
        source.received += 1

    def next_requests(self, now: float) -> list[tuple[str, int]]:
        """(source, chunk) pairs to request now. Also finds stalled sources."""
        for source in self._sources.values():
            owes = bool(source.outstanding)
            stalled_at = source.last_progress + source.stall_s()
            if owes and not source.stalled and now >= stalled_at:
                self._release(source)
                source.stalled = True
                source.probe_wait_s = source.stall_s()
                source.probe_at = now
        requests: list[tuple[str, int]] = []
        healthy = [item for item in self._sources.items() if not item[1].stalled]
        hungry = [item for item in healthy if len(item[1].outstanding) <= self._window // 2]
        progress = True
        while progress:  # one chunk each in turn, so that the stripes start evenly
            progress = False
            for name, source in hungry:
                if len(source.outstanding) < self._window:
                    chunk = self._take(name, source, now)
                    if chunk is not None:
                        self._ask(source, chunk, now)
                        requests.append((name, chunk))
                        progress = True
        if not healthy:
            requests.extend(self._probe(now))
        return requests

    def _ask(self, source: _Source, chunk: int, now: float) -> None:
        if not source.outstanding:
            source.last_progress = now  # it owed no chunk until now
        source.outstanding[chunk] = now

    def _probe(self, now: float) -> Iterator[tuple[str, int]]:
        for name, source in self._sources.items():
            if now < source.probe_at:
                continue
            source.outstanding.clear()
            chunk = self._take(name, source, now)
            if chunk is None:
                chunk = next((c for c in range(self._count) if not self._done[c]), None)
            if chunk is not None:
                # It stays in `returned`: the first source to revive may request it too.
                self._returned.append(chunk)
                source.probe_at = now + source.probe_wait_s
                source.probe_wait_s = min(MAX_PROBE_S, 2 * source.probe_wait_s)
                self.retries += 1
                yield name, chunk

    def _take(self, name: str, source: _Source, now: float) -> int | None:
        chunk = self._take_returned(name, source)
        if chunk is not None:
            return chunk
        while True:
            while source.lo < source.hi:
                source.lo += 1
                if not self._done[source.lo - 1]:
                    return source.lo - 1
            if not self._adopt(source):
                return self._hedge(source, now)

    def _take_returned(self, name: str, source: _Source) -> int | None:
        others = any(n != name and not s.stalled for n, s in self._sources.items())
        for _ in range(len(self._returned)):
            chunk = self._returned.popleft()
            if self._done[chunk]:
                continue
            if chunk in source.outstanding or (others and name in self._bad.get(chunk, ())):
                self._returned.append(chunk)
                continue
            return chunk
        return None

    def _adopt(self, source: _Source) -> bool:
        """Give a source without a stripe an orphaned one, or half of the largest."""
        if self._orphans:
            source.lo, source.hi = self._orphans.pop()
            return True
        rich = max(self._sources.values(), key=lambda s: s.hi - s.lo)
        size = rich.hi - rich.lo
        if rich is source or size == 0:
            return False
        middle = rich.lo + size // 2
        source.lo, source.hi = middle, rich.hi
        rich.hi = middle
        return True

    def _hedge(self, source: _Source, now: float) -> int | None:
        late = self._hedge_candidates(source)
        if late is None or now < late[0]:
            return None
        self.retries += 1
        return late[1]

    def _hedge_candidates(self, source: _Source) -> tuple[float, int] | None:
        """(time, chunk): when this source may request which chunk that another owes."""
        if source.latency_s is None:
            return None
        patience_s = max(HEDGE_FLOOR_S, HEDGE_FACTOR * source.latency_s)
        copies: dict[int, int] = {}
        for other in self._sources.values():
            for chunk in other.outstanding:
                copies[chunk] = copies.get(chunk, 0) + 1
        best: tuple[float, int] | None = None
        for other in self._sources.values():
            if other is source:
                continue
            for chunk, asked in other.outstanding.items():
                if self._done[chunk] or copies[chunk] > 1 or chunk in source.outstanding:
                    continue
                if best is None or asked + patience_s < best[0]:
                    best = (asked + patience_s, chunk)
        return best

    def next_deadline(self) -> float | None:
        """When to call `next_requests` even if nothing arrives; None: no such time."""
        healthy = [source for source in self._sources.values() if not source.stalled]
        if not healthy:
            return min((source.probe_at for source in self._sources.values()), default=None)
        times: list[float] = []
        for source in healthy:
            if source.outstanding:
                times.append(source.last_progress + source.stall_s())
            if len(source.outstanding) <= self._window // 2:
                late = self._hedge_candidates(source)
                if late is not None:
                    times.append(late[0])
        return min(times, default=None)

    def missing(self, max_ranges: int) -> list[tuple[int, int]]:
        """Chunks that are not done, as at most `max_ranges` ranges [lo, hi); where there are more,
        ranges are merged over the smallest gaps."""
        ranges: list[tuple[int, int]] = []
        index = self._done.find(0)
        while index >= 0:
            end = self._done.find(1, index)
            end = self._count if end < 0 else end
            ranges.append((index, end))
            index = self._done.find(0, end)
        while len(ranges) > max_ranges:
            at = min(range(len(ranges) - 1), key=lambda i: ranges[i + 1][0] - ranges[i][1])
            ranges[at : at + 2] = [(ranges[at][0], ranges[at + 1][1])]
        return ranges

    def check(self) -> None:
        """Assert all invariants, for tests: every chunk is somewhere."""
        covered = bytearray(self._done)
        for source in self._sources.values():
            covered[source.lo : source.hi] = b"\1" * (source.hi - source.lo)
            for chunk in source.outstanding:
                covered[chunk] = 1
        for lo, hi in self._orphans:
            covered[lo:hi] = b"\1" * (hi - lo)
        for chunk in self._returned:
            covered[chunk] = 1
        assert self._left == self._done.count(0)
        assert 0 not in covered, f"chunk {covered.find(0)} is nowhere"


def _smooth(old: float | None, new: float) -> float:
    return new if old is None else old + _SMOOTHING * (new - old)
