"""The picture of a run: one lane a replica group, drawn from its events. No display needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from run_record import Life, Run, gap_around

INK, COMMITTED, DISCARDED, HEALED, QUIET = "#222222", "#2a6f97", "#c1121f", "#e09f3e", "#d8dee4"
LANE = 0.62
ZOOM_BEFORE_S, ZOOM_AFTER_S = 0.4, 0.8


def draw(run: Run, path: Path) -> None:
    """Write the timeline of `run` as PNG: the whole run, and below it the moment of the kill."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups = run.groups()
    height = 1.7 + 1.05 * len(groups)
    figure = Figure(figsize=(11, height * (2 if run.kill_s else 1)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    origin = min(life.started_s for life in run.lives)
    end = run.ended_s or max(life.ended_s or life.started_s for life in run.lives)
    panels = figure.subplots(2 if run.kill_s else 1, 1, squeeze=False)[:, 0]
    whole = panels[0]
    _draw_lanes(whole, run, origin)
    whole.set_xlim(-0.01 * (end - origin), (end - origin) * 1.01)
    whole.set_title("Committed steps of each replica group", loc="left", color=INK)
    _mark_processes(whole, run, origin)
    if run.kill_s is not None:
        _draw_zoom(panels[1], run, origin)
    for panel in panels:
        panel.set_yticks(range(len(groups)), [f"replica group {g}" for g in groups])
        panel.set_ylim(len(groups) - 0.45, -0.75)
        panel.set_xlabel("seconds since the start")
        panel.spines[["top", "right", "left"]].set_visible(False)
        panel.tick_params(axis="y", length=0)
    _legend(figure)
    figure.savefig(path)


def _draw_lanes(panel: Any, run: Run, origin: float) -> None:
    for lane, group in enumerate(run.groups()):
        for life in run.lives_of(group):
            for start, stop, members in _memberships(life):
                panel.barh(lane, stop - start, LANE, left=start - origin, color=QUIET, zorder=1)
                if stop - start > 1.5:
                    label = f"quorum of {members}"
                    panel.text(start - origin + 0.1, lane - LANE / 2 - 0.03, label, fontsize=8,
                               color=INK, va="bottom")  # fmt: skip
            _ticks(panel, life, "commit", lane, COMMITTED, 0.34, origin)
            _ticks(panel, life, "discard", lane, DISCARDED, LANE, origin)
            for done in life.of_kind("heal_done"):
                start = done["t"] - done["seconds"] - origin
                panel.barh(lane, max(done["seconds"], 0.02), LANE, left=start, color=HEALED,
                           zorder=4)  # fmt: skip


def _ticks(
    panel: Any, life: Life, kind: str, lane: int, color: str, size: float, origin: float
) -> None:
    times = [event["t"] - origin for event in life.of_kind(kind)]
    panel.vlines(times, lane - size / 2, lane + size / 2, color=color, linewidth=0.9, zorder=3)


def _memberships(life: Life) -> list[tuple[float, float, int]]:
    """(from, until, number of members) of each quorum that the process was in."""
    quorums = life.of_kind("quorum")
    end = life.ended_s or (life.events[-1]["t"] if life.events else life.started_s)
    starts = [event["t"] for event in quorums]
    stops = [*starts[1:], end]
    return [(a, b, len(q["members"])) for a, b, q in zip(starts, stops, quorums, strict=True)]


def _mark_processes(panel: Any, run: Run, origin: float) -> None:
    for lane, group in enumerate(run.groups()):
        for life in run.lives_of(group):
            if life.killed and life.ended_s is not None:
                panel.plot(life.ended_s - origin, lane, "x", color=DISCARDED, markersize=12,
                           markeredgewidth=3, zorder=5)  # fmt: skip
                panel.annotate("SIGKILL", (life.ended_s - origin, lane + LANE / 2), ha="center",
                               va="top", color=DISCARDED, fontsize=9)  # fmt: skip
            elif life.number > 0:
                heal = life.last("heal_done")
                text = "restarted"
                panel.annotate(text, (life.started_s - origin, lane), fontsize=8, color=INK,
                               ha="left", va="center")  # fmt: skip
                if heal is not None:
                    size = f"healed: {heal['bytes'] / 1e6:.1f} MB in {heal['seconds'] * 1e3:.0f} ms"
                    panel.annotate(size, (heal["t"] - origin, lane + LANE / 2), ha="center",
                                   va="top", color="#9a6700", fontsize=9)  # fmt: skip


def _draw_zoom(panel: Any, run: Run, origin: float) -> None:
    kill_s = run.kill_s
    assert kill_s is not None
    _draw_lanes(panel, run, origin)
    panel.axvline(kill_s - origin, color=DISCARDED, linewidth=1.2, linestyle=":", zorder=2)
    panel.text(kill_s - origin, -0.72, f" replica group {run.victim} killed", color=DISCARDED,
               fontsize=9, va="top")  # fmt: skip
    latest = kill_s
    for lane, group in enumerate(run.groups()):
        gap = gap_around(run, group, kill_s)
        if gap is None or group == run.victim:
            continue
        latest = max(latest, gap.until_s)
        a, b = gap.from_s - origin, gap.until_s - origin
        panel.annotate("", (a, lane), (b, lane), arrowprops={"arrowstyle": "<->", "color": INK})
        text = f"{(b - a) * 1e3:.0f} ms between commits, {gap.lost_s * 1e3:.0f} ms of it lost"
        panel.text(b + 0.02, lane + LANE / 2 + 0.02, text, fontsize=9, color=INK, va="top")
    panel.set_xlim(kill_s - origin - ZOOM_BEFORE_S, latest - origin + ZOOM_AFTER_S)
    panel.set_title("Around the kill", loc="left", color=INK)


def _legend(figure: Any) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles = [
        Line2D([], [], color=COMMITTED, marker="|", linestyle="", markersize=10, label="commit"),
        Line2D([], [], color=DISCARDED, marker="|", linestyle="", markersize=14, label="discard"),
        Patch(color=QUIET, label="in a quorum"),
        Patch(color=HEALED, label="heal transfer"),
    ]
    figure.legend(handles=handles, loc="outside upper right", ncols=4, frameon=False)
