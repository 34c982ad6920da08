"""What happened in a run, reconstructed from the events of its replica groups, and the picture of it.

A *life* is one process of a replica group from its start to its end; a group that was killed and
restarted has two. Times are Unix seconds of one host, or of hosts with synchronized clocks.
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

END = "end"
"""Kind of the last event of a process that ends regularly."""
NEARLY_DONE_S = 0.2
"""For this long after a kill, the step that was under way may still be committed."""


@dataclass(slots=True)
class Life:
    """One process.

    Attributes:
        group, number: the replica group, and which of its lives this is (from 0).
        killed: whether it was killed; `note` is what the timeline says about that.
        events: its telemetry, in order (see ft_core/telemetry.py).
        result: what the process reports at its end.
    """

    group: int
    number: int
    pid: int
    started_s: float
    ended_s: float | None = None
    returncode: int | None = None
    killed: bool = False
    note: str = "SIGKILL, restarted at once"
    events: list[dict[str, Any]] = field(default_factory=list)
    result: dict[str, Any] = field(default_factory=dict)

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """All events of this kind, in order."""
        return [event for event in self.events if event["kind"] == kind]

    def last(self, kind: str) -> dict[str, Any] | None:
        """The last event of this kind, or None."""
        return next((e for e in reversed(self.events) if e["kind"] == kind), None)


@dataclass(slots=True)
class Run:
    """All lives of all replica groups. `kill_s`: when replica group `victim` was killed, if known."""

    lives: list[Life] = field(default_factory=list)
    victim: int | None = None
    kill_s: float | None = None
    ended_s: float | None = None

    def groups(self) -> list[int]:
        """The replica groups, in order."""
        return sorted({life.group for life in self.lives})

    def lives_of(self, group: int) -> list[Life]:
        """The lives of one replica group, in order."""
        return [life for life in self.lives if life.group == group]

    def commit_times(self, group: int) -> list[tuple[float, int]]:
        """(time, step) of each commit that `group` reported."""
        return [
            (e["t"], e["step"]) for life in self.lives_of(group) for e in life.of_kind("commit")
        ]

    def committed_steps(self) -> int:
        """How many optimizer steps the job committed."""
        steps = [step for group in self.groups() for _, step in self.commit_times(group)]
        return max(steps) + 1 if steps else 0  # steps count from 0


@dataclass(frozen=True, slots=True)
class Gap:
    """The time from the last commit before a moment to the first one after it."""

    from_s: float
    until_s: float
    typical_s: float  # the median of the other steps

    @property
    def lost_s(self) -> float:
        """The part of the gap that a usual step does not explain."""
        return max(0.0, self.until_s - self.from_s - self.typical_s)


def gap_around(run: Run, group: int, moment_s: float) -> Gap | None:
    """The longest gap between two commits of `group` that contains `moment_s` or begins up to
    `NEARLY_DONE_S` later (a step that is nearly done is committed in spite of a kill).

    None if `group` did not commit both before and after `moment_s`.
    """
    times = [t for t, _ in run.commit_times(group)]
    before = [t for t in times if t <= moment_s]
    if len(before) < 2:
        return None
    near = [
        (a, b)
        for a, b in itertools.pairwise(times)
        if b > moment_s and a <= moment_s + NEARLY_DONE_S
    ]
    if not near:
        return None
    typical_s = statistics.median(b - a for a, b in itertools.pairwise(before))
    return Gap(*max(near, key=lambda pair: pair[1] - pair[0]), typical_s)


# ---------------------------------------------------------------- a folder of events


def event_file(folder: Path, group: int, pid: int) -> Path:
    """Where process `pid` of replica group `group` writes its events (`telemetry.JsonlSink`)."""
    return folder / f"events.{group}.{pid}.jsonl"


def read_run(folder: Path) -> Run:
    """The run whose processes wrote their events to `folder` (see `event_file`).

    A process that wrote no `END` and has a successor in its group was killed; the last one of these
    is the run's `victim`. Empty files are skipped.
    """
    lives = []
    for path in folder.glob("events.*.jsonl"):
        named = re.fullmatch(r"events\.(\d+)\.(\d+)\.jsonl", path.name)
        events = _events(path)
        if named is not None and events:
            group, pid = int(named[1]), int(named[2])
            lives.append(
                Life(group, 0, pid, events[0]["t"], events[-1]["t"], note="gone", events=events)
            )
    run = Run(sorted(lives, key=lambda life: (life.group, life.started_s)))
    for group in run.groups():
        mine = run.lives_of(group)
        for number, life in enumerate(mine):
            life.number = number
            life.killed = number < len(mine) - 1 and life.last(END) is None
            if life.killed and (run.kill_s is None or life.events[-1]["t"] > run.kill_s):
                run.victim, run.kill_s = group, life.events[-1]["t"]
    run.ended_s = max((life.ended_s or life.started_s for life in run.lives), default=None)
    return run


def _events(path: Path) -> list[dict[str, Any]]:
    events = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            events.append(json.loads(text))
        except json.JSONDecodeError:  # half written by a killed process
            continue
    return events


# ---------------------------------------------------------------- the picture

INK, COMMITTED, DISCARDED, HEALED, QUIET = "#222222", "#2a6f97", "#c1121f", "#e09f3e", "#d8dee4"
LANE = 0.62
SHORTEST_LABELLED_S = 1.5
ZOOM_BEFORE_S, ZOOM_AFTER_S = 0.4, 0.8
LONGEST_SHOWN_S = 3.0  # a longer gap shows in the first panel


def draw(run: Run, path: Path) -> None:
    """Write the timeline of `run` to `path` as PNG: the whole run, and below it the kill and heals:
    a lane per replica group. Needs no display.

    Raises RuntimeError if matplotlib is missing, ValueError if the run has no events.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError("the timeline is drawn by matplotlib: pip install matplotlib") from error
    if not run.lives:
        raise ValueError("there is nothing to draw: no replica group has written any event")

    zooms = _moments(run)
    groups = run.groups()
    rows = 1 + len(zooms)
    height = (1.2 + 0.75 * len(groups)) * rows
    figure = Figure(figsize=(11, height), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, 1, squeeze=False)[:, 0]
    origin = min(life.started_s for life in run.lives)
    _draw_whole(panels[0], run, origin)
    for panel, (moment_s, title) in zip(panels[1:], zooms, strict=True):
        _draw_zoom(panel, run, origin, moment_s, title)
    for panel in panels:
        panel.set_yticks(range(len(groups)), [f"replica group {g}" for g in groups])
        panel.set_ylim(len(groups) - 0.4, -0.7)
        panel.spines[["top", "right", "left"]].set_visible(False)
        panel.tick_params(axis="y", length=0)
    panels[-1].set_xlabel("seconds since the start")
    _legend(figure)
    figure.savefig(path)


def _moments(run: Run) -> list[tuple[float, str]]:
    """(time, title) of each panel that zooms in."""
    found = []
    if run.kill_s is not None:
        found.append((run.kill_s, f"Replica group {run.victim} is killed"))
    for life in run.lives:
        healed = life.last("heal_done")
        if life.number > 0 and healed is not None:
            what = f"{healed['bytes']:,} bytes in {healed['seconds'] * 1e3:.1f} ms"
            found.append((healed["t"], f"Replica group {life.group} is back and heals: {what}"))
    return found


def _draw_whole(panel: Any, run: Run, origin: float) -> None:
    end = run.ended_s or max(life.ended_s or life.started_s for life in run.lives)
    _draw_lanes(panel, run, origin, width=0.3)
    for lane, group in enumerate(run.groups()):
        for life in run.lives_of(group):
            if life.killed and life.ended_s is not None:
                x = life.ended_s - origin
                panel.plot(
                    x, lane, "x", color=DISCARDED, markersize=11, markeredgewidth=3, zorder=5
                )
                label = f" {life.note}"
                _text(panel, x, lane + LANE / 2, label, DISCARDED, va="top")
    panel.set_xlim(-0.01 * (end - origin), (end - origin) * 1.01)
    panel.set_title("The run: commits of each replica group", loc="left", color=INK)


def _draw_lanes(panel: Any, run: Run, origin: float, *, width: float) -> None:
    for lane, group in enumerate(run.groups()):
        for life in run.lives_of(group):
            for start, stop, members in _memberships(life):
                panel.barh(lane, stop - start, LANE, left=start - origin, color=QUIET, zorder=1)
                if stop - start > SHORTEST_LABELLED_S:
                    x, text = start - origin, f" quorum of {members}"
                    _text(panel, x, lane - LANE / 2, text, INK, va="bottom")
            _ticks(panel, life, "commit", lane, COMMITTED, 0.34, origin, width)
            _ticks(panel, life, "discard", lane, DISCARDED, LANE, origin, 1.5)
            for done in life.of_kind("heal_done"):
                left = done["t"] - done["seconds"] - origin
                panel.barh(
                    lane, max(done["seconds"], 0.01), LANE, left=left, color=HEALED, zorder=4
                )


def _ticks(
    panel: Any,
    life: Life,
    kind: str,
    lane: int,
    color: str,
    size: float,
    origin: float,
    width: float,
) -> None:
    times = [event["t"] - origin for event in life.of_kind(kind)]
    panel.vlines(times, lane - size / 2, lane + size / 2, color=color, linewidth=width, zorder=3)


def _memberships(life: Life) -> list[tuple[float, float, int]]:
    """(from, until, number of members) of each quorum that the process took part in."""
    quorums = life.of_kind("quorum")
    end = life.events[-1]["t"] if life.events else life.started_s
    if life.killed and life.ended_s is not None:
        end = life.ended_s
    starts = [event["t"] for event in quorums]
    stops = [*starts[1:], end][: len(starts)]  # a life may end before its first quorum
    return [(a, b, len(q["members"])) for a, b, q in zip(starts, stops, quorums, strict=True)]


def _draw_zoom(panel: Any, run: Run, origin: float, moment_s: float, title: str) -> None:
    """The moment, and the gap between commits of each group that commits on both sides of it."""
    _draw_lanes(panel, run, origin, width=1.3)
    panel.axvline(moment_s - origin, color=DISCARDED, linewidth=1.2, linestyle=":", zorder=2)
    latest = moment_s
    for lane, group in enumerate(run.groups()):
        gap = gap_around(run, group, moment_s)
        if gap is None or gap.until_s - gap.from_s > LONGEST_SHOWN_S:
            continue
        latest = max(latest, gap.until_s)
        a, b = gap.from_s - origin, gap.until_s - origin
        panel.annotate(
            "",
            (a, lane),
            (b, lane),
            annotation_clip=True,
            zorder=6,
            arrowprops={"arrowstyle": "<->", "color": INK, "shrinkA": 0, "shrinkB": 0},
        )
        lost = f"{gap.lost_s * 1e3:.0f} ms lost ({(b - a) * 1e3:.0f} ms between two commits)"
        _text(panel, b, lane + LANE / 2, lost, INK, va="top")
    panel.set_xlim(moment_s - origin - ZOOM_BEFORE_S, latest - origin + ZOOM_AFTER_S)
    panel.set_title(title, loc="left", color=INK)


def _text(panel: Any, x: float, y: float, text: str, color: str, *, va: str) -> None:
    """A label that is clipped to its panel and ignored by the layout."""
    label = panel.text(x, y, text, fontsize=8, color=color, va=va, clip_on=True, zorder=6)
    label.set_in_layout(False)


def _legend(figure: Any) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles = [
        Line2D([], [], color=COMMITTED, marker="|", linestyle="", markersize=10, label="commit"),
        Line2D([], [], color=DISCARDED, marker="|", linestyle="", markersize=14, label="discard"),
        Patch(color=QUIET, label="in a quorum"),
        Patch(color=HEALED, label="heal transfer"),
    ]
    figure.legend(handles=handles, loc="outside lower right", ncols=4, frameon=False)
