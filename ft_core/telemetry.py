"""What happened when: events of one rank, for logs, pictures and callbacks.

An event is a kind and plain values. Sinks are called in the thread in which the event happened,
must be quick and must not raise. `JsonlSink` writes one JSON object per line.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

log = logging.getLogger("ft_core")

QUORUM = "quorum"  # quorum_id, members, healing, replica_rank, reason
COMMIT = "commit"  # step, participants, seconds (since the attempt began)
DISCARD = "discard"  # step, reason, seconds
REVOKED = "revoked"  # quorum_id, reason
HEAL_START = "heal_start"  # step, sources
HEAL_DONE = "heal_done"  # step, bytes, same_host_bytes, seconds, sources
KEPT = "kept"  # step (of the state with which this process begins, from the supervisor's keeper)
VISIT = (
    "visit"  # nothing: there is no state to go on from here; this member joins again after the step
)
SERVE = "serve"  # step, seconds (the snapshot's copy)
WAITING = "waiting"  # reason


@dataclass(frozen=True, slots=True)
class Event:
    """`wall_s`: Unix time in seconds; `kind`: one of the names above; `data`: plain values."""

    kind: str
    data: dict[str, Any] = field(default_factory=dict)
    wall_s: float = field(default_factory=time.time)


TOLD_DISCARDS = (3, 10, 30, 100, 300, 1000)
"""This many discards in a row are worth a line."""

Sink = Callable[[Event], None]


class Telemetry:
    """Fans events out to sinks. Any thread."""

    def __init__(self) -> None:
        self._sinks: list[Sink] = []

    def add_sink(self, sink: Sink) -> None:
        """Call `sink` with each event from now on, in the thread in which the event happens."""
        self._sinks = [*self._sinks, sink]

    def emit(self, kind: str, **data: Any) -> None:
        """Give an event of `kind` to all sinks, in this thread."""
        if self._sinks:
            event = Event(kind, data)
            for sink in self._sinks:
                sink(event)


class DiscardsTold:
    """Warns of a step that is discarded again and again: a loop of one's own need not look at each outcome. A sink of
    telemetry. Thread: any, one at a time."""

    def __init__(self, name: str) -> None:
        self._name, self._discards = name, 0

    def __call__(self, event: Event) -> None:
        if event.kind == COMMIT:
            self._discards = 0
        elif event.kind == DISCARD:
            self._discards += 1
            if self._discards in TOLD_DISCARDS:
                log.warning(
                    "replica group %s: step %s was discarded %s times in a row: %s",
                    self._name,
                    event.data["step"],
                    self._discards,
                    event.data["reason"],
                )


def event_log(path: str, name: str) -> JsonlSink:
    """The sink of FT_EVENT_LOG: `path` is its value, `name` that of this replica group. Raises ValueError."""
    try:
        return JsonlSink(Path(path), name=name)
    except OSError as error:
        raise ValueError(
            f"FT_EVENT_LOG={path} can't be written ({error.strerror}): let it name a file, in a folder that is there"
        ) from None


class JsonlSink:
    """Appends events to the file `path` as JSON, one a line, with `common` in each. Any thread.

    Each line is flushed, so that a killed process loses none. Raises OSError if the file cannot be
    opened. Where it can't be written (a full disk) a log line says so, and later events are dropped.
    """

    def __init__(self, path: Path, **common: Any) -> None:
        self._common = common
        self._lock = threading.Lock()
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def __call__(self, event: Event) -> None:
        line = {"t": event.wall_s, "kind": event.kind, **self._common, **event.data}
        with self._lock:
            if self._file.closed:
                return
            try:
                self._file.write(json.dumps(line, default=str) + "\n")
            except OSError as error:
                log.warning("%s ends here: it can't be written (%s)", self._file.name, error)
                self._close()

    def close(self) -> None:
        """Close the file; later events are dropped."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        with contextlib.suppress(OSError):  # what could not be written is in its buffer still
            self._file.close()
