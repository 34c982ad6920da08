"""What a device did when, from a trace of torch's profiler."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile


class Span(NamedTuple):
    """One piece of work on a device, in microseconds."""

    name: str
    began: float
    ended: float


@contextmanager
def recorded(activity: ProfilerActivity, categories: Collection[str]) -> Iterator[list[Span]]:
    """A list that holds, after the block, what was done in it. The block must wait for the device."""
    found: list[Span] = []
    everywhere = _ExperimentalConfig(profile_all_threads=True)  # of the host's activity
    with profile(activities=[activity], experimental_config=everywhere) as profiler:
        yield found
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        found += spans_of(json.loads(path.read_text()), categories)


def spans_of(trace: dict[str, Any], categories: Collection[str]) -> list[Span]:
    """The spans of a Chrome trace, in the order in which they began."""
    events = (event for event in trace["traceEvents"] if event.get("ph") == "X")
    return sorted(
        (
            Span(event["name"], event["ts"], event["ts"] + event["dur"])
            for event in events
            if event.get("cat") in categories
        ),
        key=lambda span: span.began,
    )


def busy(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """When anything was under way: intervals that don't touch, in order."""
    merged: list[tuple[float, float]] = []
    for span in sorted(spans, key=lambda span: span.began):
        if merged and span.began <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], span.ended))
        else:
            merged.append((span.began, span.ended))
    return merged


def idle_us(spans: Sequence[Span]) -> float:
    """How long nothing was under way, between the first span and the last."""
    intervals = busy(spans)
    if not intervals:
        return 0.0
    covered = sum(end - begin for begin, end in intervals)
    return intervals[-1][1] - intervals[0][0] - covered


def longest_gap(spans: Sequence[Span]) -> str:
    """The longest time in which nothing was under way: how long, after what, and before what."""
    gaps, last = [(0.0, "", "")], None
    for span in sorted(spans, key=lambda span: span.began):
        if last is not None and span.began > last.ended:
            gaps.append((span.began - last.ended, last.name, span.name))
        if last is None or span.ended > last.ended:
            last = span
    took, before, after = max(gaps)
    return f"{took / 1e3:.3f} ms between {before[:60]} and {after[:60]}"


def hidden(spans: Sequence[Span], communicates: Callable[[str], bool]) -> float | None:
    """The part of the communication's time in which other work was under way, too; None: there was no
    communication."""
    wire = busy(span for span in spans if communicates(span.name))
    work = busy(span for span in spans if not communicates(span.name))
    total = sum(end - begin for begin, end in wire)
    if not total:
        return None
    both = 0.0
    for begin, end in wire:
        both += sum(max(0.0, min(end, e) - max(begin, b)) for b, e in work)
    return both / total
