"""The picture of a run: one lane per replica group, drawn from its events. Needs no display."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ft_core.launch.run_record import Life, Run, gap_around

INK, COMMITTED, DISCARDED, HEALED, QUIET = "#222222", "#2a6f97", "#c1121f", "#e09f3e", "#d8dee4"
LANE = 0.62
SHORTEST_LABELLED_S = 1.5
ZOOM_BEFORE_S, ZOOM_AFTER_S = 0.4, 0.8
LONGEST_SHOWN_S = 3.0  # a longer gap shows in the first panel


def draw(run: Run, path: Path) -> None:
    """Write the timeline of `run` to `path` as PNG: the whole run, and below it the kill and heals.

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
                panel.plot(x, lane, "x", color=DISCARDED, markersize=11, markeredgewidth=3,
                           zorder=5)  # fmt: skip
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
                panel.barh(lane, max(done["seconds"], 0.01), LANE, left=left, color=HEALED,
                           zorder=4)  # fmt: skip


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
            "", (a, lane), (b, lane), annotation_clip=True, zorder=6,
            arrowprops={"arrowstyle": "<->", "color": INK, "shrinkA": 0, "shrinkB": 0},
        )  # fmt: skip
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
