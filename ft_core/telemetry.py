"""What happened when: events of one rank, for logs, pictures and callbacks.

An event is a kind and plain values. Sinks are called in the thread in which the event happened,
must be quick and must not raise. `JsonlSink` writes one JSON object a line.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ft_core.errors import TooManyDiscards

log = logging.getLogger("ft_core")

QUORUM = "quorum"  # quorum_id, step, members, healing, replica_rank, reason
COMMIT = "commit"  # step, participants, seconds (since the attempt began)
DISCARD = "discard"  # step, reason, seconds
REVOKED = "revoked"  # quorum_id, reason
HEAL_START = "heal_start"  # step, sources
HEAL_DONE = "heal_done"  # step, bytes, seconds, sources
SERVE = "serve"  # step, seconds (the snapshot's copy)
WAITING = "waiting"  # reason


@dataclass(frozen=True, slots=True)
class Event:
    """`wall_s`: Unix time in seconds; `kind`: one of the names above; `data`: plain values."""

    kind: str
    data: dict[str, Any] = field(default_factory=dict)
    wall_s: float = field(default_factory=time.time)


Sink = Callable[[Event], None]


class Telemetry:
    """Fans events out to sinks. Any thread."""

    def __init__(self) -> None:
        self._sinks: list[Sink] = []

    def add_sink(self, sink: Sink) -> None:
        """Call `sink` with each event from now on, in the thread in which the event happens."""
        self._sinks = [*self._sinks, sink]

    def remove_sink(self, sink: Sink) -> None:
        """Undo `add_sink`; does nothing if `sink` was not added."""
        self._sinks = [s for s in self._sinks if s != sink]

    def emit(self, kind: str, **data: Any) -> None:
        """Give an event of `kind` to all sinks, in this thread."""
        if self._sinks:
            event = Event(kind, data)
            for sink in self._sinks:
                sink(event)


class StepRecord:
    """Tells how each step of the loop ends, and raises when too many are discarded in a row."""

    def __init__(self, telemetry: Telemetry, max_retries: int | None) -> None:
        self._telemetry, self._max_retries = telemetry, max_retries
        self._began_at = 0.0
        self._discards_in_a_row = 0

    def begin(self) -> None:
        """A step begins."""
        self._began_at = time.monotonic()

    def committed(self, step: int, groups: int) -> None:
        """`groups`: that contributed."""
        self._discards_in_a_row = 0
        seconds = time.monotonic() - self._began_at
        self._telemetry.emit(COMMIT, step=step, participants=groups, seconds=seconds)

    def discarded(self, step: int, reason: str) -> None:
        """Raises TooManyDiscards."""
        seconds = time.monotonic() - self._began_at
        self._telemetry.emit(DISCARD, step=step, reason=reason, seconds=seconds)
        log.info("step %s discarded: %s", step, reason)
        self._discards_in_a_row += 1
        if self._max_retries is not None and self._discards_in_a_row > self._max_retries:
            raise TooManyDiscards(
                f"{self._discards_in_a_row} steps in a row were discarded, the last because: {reason}"
            )

    def abandoned(self, step: int) -> None:
        """The loop has begun a step, and begins another one."""
        self._telemetry.emit(DISCARD, step=step, reason="never ended", seconds=0.0)


class JsonlSink:
    """Appends events to the file `path` as JSON, one a line, with `common` in each. Any thread.

    Each line is flushed, so that a killed process loses none. Raises OSError if the file cannot be
    opened or written.
    """

    def __init__(self, path: Path, **common: Any) -> None:
        self._common = common
        self._lock = threading.Lock()
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def __call__(self, event: Event) -> None:
        line = {"t": event.wall_s, "kind": event.kind, **self._common, **event.data}
        with self._lock:
            if not self._file.closed:
                self._file.write(json.dumps(line, default=str) + "\n")

    def close(self) -> None:
        """Close the file; later events are dropped."""
        with self._lock:
            self._file.close()
