"""PURE. Which source is asked for which chunk. No clock, socket or thread: `now` is given.

Theory. Every chunk is in exactly one of these places:

    a range       [lo, hi), owned by a source (its stripe) or by none (an orphan)
    returned      handed back: its source was lost, or sent it corrupted
    outstanding   requested from one source
    done          received and checked

A chunk is never requested from two sources at a time: both would write into the same memory, and the
second, unchecked one over the first. So what a source owes is handed out again only when its connection
has ended, which `drop_source` says.

A source is kept busy with `window` outstanding chunks, with fewer at first: a slow one that is the first to be
ready must not hold most of the state. It takes returned chunks first, then its own
stripe, then an orphaned one, then the far half of the largest stripe of another source. What it is unable to
deliver it hands back.

`late` names the sources whose connections are to be ended. One that owes chunks and sends nothing for
`stall_s` (a multiple of the usual time between two of its chunks) is stalled. One that owes its oldest
chunk for much longer than another source usually takes holds up the end, if that other has nothing else
to do. A connection that is made again is a new source.

A chunk that fails its checksum is requested again, from another process if there is one. The second
failure of one chunk ends the heal. A source here is a connection; a process may have several.

A transfer that can't end in time is given up early: members wait for it, and what it has cost them is
lost. Its pace so far says so, with a margin, as links get faster, too. So does a silence of all sources
that is long for this transfer, however little is left.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

WINDOW = 4
FIRST_STALL_S = 2.0  # before anything is known of a source's speed
STALL_FLOOR_S = 1.0  # a connection is worth more than a short pause of a busy machine
STALL_CAP_S = 10.0
STALL_FACTOR = 10.0
LATE_FACTOR = 4.0
LATE_FLOOR_S = 0.1
PACE_AFTER_S = 1.0
"""How long a transfer runs before its pace is judged; one that may take less than eight times as long
is never judged."""
PACE_MARGIN = 1.5
SURE_AFTER, SURE_MARGIN = 5, 1.1
"""After so many times that time the pace is known better."""
SILENT_SHARE = 10
"""A silence of this part of the time that the transfer has is the end of it, if it is also
`STALL_FACTOR` times what it usually takes from one chunk to the next."""
_SMOOTHING = 0.2


@dataclass(slots=True)
class _Source:
    of: str
    window: int
    unable: Collection[int]
    lo: int = 0
    hi: int = 0
    outstanding: dict[int, float] = field(default_factory=dict)  # chunk -> when asked
    last_progress: float = 0.0
    part: float | None = None  # what has come of the chunk under way, if its reports say so
    interval_s: float | None = None  # usual time between two chunks
    latency_s: float | None = None  # usual time from request to chunk
    ending: bool = False  # its connection is being ended

    def stall_s(self) -> float:
        if self.interval_s is None:
            return FIRST_STALL_S
        return min(STALL_CAP_S, max(STALL_FLOOR_S, STALL_FACTOR * self.interval_s))


class TransferPlan:
    """The state of one transfer of `count` chunks. Times are seconds of one monotonic clock.

    `window`: how many chunks a source is asked for ahead; `first`: how many at first, one more with each that it
    delivers. `began`: when it began; None: when the first source is added.
    """

    def __init__(
        self,
        count: int,
        *,
        window: int = WINDOW,
        first: int = WINDOW,
        began: float | None = None,
    ) -> None:
        self._count = count
        self._first = min(first, window)
        self._window = window
        self._done = bytearray(count)
        self._left = count
        self._sources: dict[str, _Source] = {}
        self._orphans: list[tuple[int, int]] = [(0, count)] if count else []
        self._returned: deque[int] = deque()
        self._bad: dict[int, list[str]] = {}  # chunk -> sources that sent it corrupted
        self._began = began
        self._last = began or 0.0  # when a source last delivered anything
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
        (infinite: the sources have fallen silent); else 0. The chunk that each source is sending counts
        by its part that has come, and as a whole where that is not known."""
        if self._began is None or deadline - self._began < 8 * PACE_AFTER_S:
            return 0.0
        took_s = now - self._began
        judged_s = max(PACE_AFTER_S, (deadline - self._began) / 30)
        if took_s < judged_s:
            return 0.0
        done = self._count - self._left
        if done:
            usual_s = (self._last - self._began) / done
            longest_s = max((deadline - self._began) / SILENT_SHARE, STALL_FACTOR * usual_s)
            if now - self._last >= longest_s:
                return math.inf
        under_way = sum(1.0 if s.part is None else s.part for s in self._sources.values())
        chunks = max(1.0, done + under_way)
        rest_s = self._left * took_s / chunks
        margin = SURE_MARGIN if took_s >= SURE_AFTER * judged_s else PACE_MARGIN
        return rest_s if rest_s > margin * (deadline - now) else 0.0

    def add_source(
        self, name: str, now: float, *, of: str = "", unable: Collection[int] = frozenset()
    ) -> None:
        """A source is ready to serve chunks. `of`: the process that it is a connection to, if there may be
        several; else its name. `unable`: chunks that it can't deliver."""
        assert name not in self._sources
        self._began = now if self._began is None else self._began
        self._sources[name] = _Source(of or name, self._first, unable, last_progress=now)

    def drop_source(self, name: str) -> None:
        """A source's connection has ended; the others take over what it owed. Unknown names are
        ignored."""
        source = self._sources.pop(name, None)
        if source is None:
            return
        if source.lo < source.hi:
            self._orphans.append((source.lo, source.hi))
        self._returned.extend(source.outstanding)
        self.retries += len(source.outstanding)

    def progress(self, name: str, now: float, part: float | None = None) -> None:
        """A part of a chunk has come from this source; `part`: of 1, if that is known."""
        self._last = now
        if name in self._sources:
            source = self._sources[name]
            source.last_progress, source.part = now, source.part if part is None else part

    def received(self, name: str, chunk: int, now: float) -> bool:
        """A valid chunk arrived. False if it is a duplicate."""
        self._note_progress(name, chunk, now)
        if self._done[chunk]:
            return False
        if name in self._sources:
            source = self._sources[name]
            source.window = min(self._window, source.window + 1)
        self._done[chunk] = 1
        self._left -= 1
        return True

    def corrupted(self, name: str, chunk: int, now: float) -> list[str] | None:
        """A chunk that this source owed arrived with a wrong checksum. Returns the sources that sent it
        corrupted if this ends the heal (the second time), else None."""
        if not self._note_progress(name, chunk, now):
            return None
        blamed = self._bad.setdefault(chunk, [])
        blamed.append(self._sources[name].of)
        self._returned.append(chunk)
        self.retries += 1
        return blamed if len(blamed) > 1 else None

    def returned(self, name: str, chunk: int, now: float) -> None:
        """A chunk that this source owed has changed while it was sent. It is requested again, and no
        source is blamed."""
        if self._note_progress(name, chunk, now):
            self._returned.append(chunk)
            self.retries += 1

    def _note_progress(self, name: str, chunk: int, now: float) -> bool:
        """Whether this source owed the chunk."""
        self._last = now
        source = self._sources.get(name)
        if source is None:
            return False
        asked = source.outstanding.pop(chunk, None)
        since = source.last_progress if asked is None else max(source.last_progress, asked)
        source.interval_s = _smooth(source.interval_s, now - since)
        if asked is not None:
            source.latency_s = _smooth(source.latency_s, now - asked)
        source.last_progress = now
        source.part = None if source.part is None else 0.0
        return asked is not None

    def late(self, now: float) -> list[str]:
        """Sources whose connections are to be ended now. Each is named once."""
        names = [name for name, at in self._ends() if now >= at]
        for name in names:
            self._sources[name].ending = True
        return names

    def _ends(self) -> list[tuple[str, float]]:
        """(source, when it is late if nothing more comes from it)."""
        idle = [s for s in self._sources.values() if not s.outstanding and not s.ending]
        ends = []
        for name, source in self._sources.items():
            if source.ending or not source.outstanding:
                continue
            at = source.last_progress + source.stall_s()
            oldest, asked = next(iter(source.outstanding.items()))
            latencies = [s.latency_s for s in idle if oldest not in s.unable]
            quickest_s = min((each for each in latencies if each is not None), default=None)
            if quickest_s is not None:
                at = min(at, asked + max(LATE_FLOOR_S, LATE_FACTOR * quickest_s))
            ends.append((name, at))
        return ends

    def next_requests(self, now: float) -> list[tuple[str, int]]:
        """(source, chunk) pairs to request now."""
        requests: list[tuple[str, int]] = []
        hungry = [
            (name, source)
            for name, source in self._sources.items()
            if not source.ending and len(source.outstanding) <= source.window // 2
        ]
        progress = True
        while progress:  # one chunk each in turn, so that the stripes start evenly
            progress = False
            for name, source in hungry:
                if len(source.outstanding) < source.window:
                    chunk = self._take(name, source)
                    if chunk is not None:
                        self._ask(source, chunk, now)
                        requests.append((name, chunk))
                        progress = True
        return requests

    def _ask(self, source: _Source, chunk: int, now: float) -> None:
        if not source.outstanding:
            source.last_progress = now  # it owed no chunk until now
        source.outstanding[chunk] = now

    def _take(self, name: str, source: _Source) -> int | None:
        chunk = self._take_returned(name)
        while chunk is None:
            while source.lo < source.hi:
                taken, source.lo = source.lo, source.lo + 1
                if self._done[taken]:
                    continue
                if taken not in source.unable:
                    return taken
                self._returned.append(taken)
            if not self._adopt(source):
                return None
        return chunk

    def _take_returned(self, name: str) -> int | None:
        of, unable = self._sources[name].of, self._sources[name].unable
        others = any(s.of != of and not s.ending for s in self._sources.values())
        for _ in range(len(self._returned)):
            chunk = self._returned.popleft()
            if self._done[chunk]:
                continue
            if chunk in unable or (others and of in self._bad.get(chunk, ())):
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

    def next_deadline(self) -> float | None:
        """When to call `late` even if nothing arrives; None: no such time."""
        return min((at for _, at in self._ends()), default=None)

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
        """Assert all invariants, for tests: every chunk is somewhere, and requested once."""
        covered = bytearray(self._done)
        for source in self._sources.values():
            covered[source.lo : source.hi] = b"\1" * (source.hi - source.lo)
            for chunk in source.outstanding:
                covered[chunk] = 1
        owed = [chunk for source in self._sources.values() for chunk in source.outstanding]
        assert len(owed) == len(set(owed)), "a chunk is requested from two sources"
        for lo, hi in self._orphans:
            covered[lo:hi] = b"\1" * (hi - lo)
        for chunk in self._returned:
            covered[chunk] = 1
        assert self._left == self._done.count(0)
        assert 0 not in covered, f"chunk {covered.find(0)} is nowhere"


def _smooth(old: float | None, new: float) -> float:
    return new if old is None else old + _SMOOTHING * (new - old)
