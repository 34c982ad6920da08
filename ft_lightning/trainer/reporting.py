"""Callbacks that report how a fit under "ft_ddp" goes: to loggers, and as a picture.

Written once for both of Lightning's namespaces: `ft_lightning.pytorch` and `ft_lightning.pl` put
them in front of their own `Callback`.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ft_core.launch.run_record import END, event_file, read_run
from ft_core.telemetry import (
    COMMIT,
    DISCARD,
    HEAL_DONE,
    SERVE,
    Event,
    JsonlSink,
)
from ft_lightning.trainer.batches import adopt, adopted

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback as _Base
else:
    _Base = object

log = logging.getLogger("ft_lightning")


class Counts:
    """Counts the events of one manager, as a sink of its telemetry.

    Attributes:
        groups: configured number of replica groups.
        participants: of the last committed step.
        commits, discards: how many steps of the manager ended so in this process: optimizer steps
            and agreements at the ends of epochs.
        heals: states that this process took from its peers.
        served: states that peers took from this process.
        step_s: seconds that the last committed step took.

    Thread: any; reading a number needs no lock.
    """

    def __init__(self, groups: int) -> None:
        self.groups = groups
        self.participants = 0
        self.commits = self.discards = self.heals = self.served = 0
        self.step_s = 0.0

    def __call__(self, event: Event) -> None:
        if event.kind == COMMIT:
            self.commits += 1
            self.participants = event.data["participants"]
            self.step_s = event.data["seconds"]
        elif event.kind == DISCARD:
            self.discards += 1
        elif event.kind == HEAL_DONE:
            self.heals += 1
        elif event.kind == SERVE:
            self.served += 1

    def for_bar(self, step: int) -> dict[str, str]:
        """What a progress bar shows. `step`: the Trainer's. Counts of zero are left out.

        As texts, since Rich's bar writes numbers with the user's format for metrics.
        """
        shown = {"groups": f"{self.participants}/{self.groups}", "step": str(step)}
        for name in ("discards", "heals"):
            if getattr(self, name):
                shown[name] = str(getattr(self, name))
        return shown

    def for_loggers(self) -> dict[str, float]:
        """What `FTMetricsCallback` logs."""
        return {
            "ft/participants": float(self.participants),
            "ft/commits": float(self.commits),
            "ft/discards": float(self.discards),
            "ft/heals": float(self.heals),
            "ft/served": float(self.served),
            "ft/step_s": self.step_s,
        }


def show_in_bar(trainer: Any, counts: Counts, *, visible: bool) -> None:
    """Have the Trainer's progress bar (any with Lightning's `get_metrics`: TQDM's, Rich's, a
    user's) show the counts after its own items. `batches.release(bar)` undoes it.

    `visible`: this process has the bar, and the user has not disabled it. Lightning decides by rank
    zero at set-up, before there is a leader, and a bar that was made invisible cannot be shown
    later. So the bar stays with one replica group, whichever leads.
    """
    bar = trainer.progress_bar_callback
    if bar is None or adopted(bar) or not hasattr(bar, "get_metrics"):
        return
    if visible:
        bar.enable()

    def methods(cls: Any) -> dict[str, Any]:
        def get_metrics(self: Any, trainer: Any, module: Any) -> Any:
            items = dict(cls.get_metrics(self, trainer, module))
            ours = counts.for_bar(trainer.global_step)
            return {**items, **{name: value for name, value in ours.items() if name not in items}}

        return {"get_metrics": get_metrics}

    adopt(bar, methods)


class MetricsMixin(_Base):
    """Logs ``ft/...`` numbers to the Trainer's loggers, as often as other metrics are logged:
    participants, commits, discards, heals, states served to peers, and seconds of the last
    commit. Only the leader's logger writes. Under another strategy it does nothing.

    Args:
        every_n_steps: how often, in optimizer steps. Default: the Trainer's ``log_every_n_steps``.

    Raises ValueError if `every_n_steps` is below 1. Lightning calls its hooks in the loop's thread.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(f"every_n_steps must be at least 1, got {every_n_steps}")
        self._every_n_steps = every_n_steps
        self._logged_at = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Steps are another fit's."""
        self._logged_at = 0

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the counts, where it is time to."""
        counts = getattr(trainer.strategy, "counts", None)
        every = self._every_n_steps or trainer.log_every_n_steps
        step = trainer.global_step
        if counts is None or not every or step == self._logged_at or step % every:
            return
        self._logged_at = step
        for logger in trainer.loggers:
            # The x axis of the metrics that Lightning logs itself.
            logger.log_metrics(
                counts.for_loggers(), step=trainer.fit_loop.epoch_loop._batches_that_stepped
            )


class TimelineMixin(_Base):
    """Draws the run when it has ended: commits, discards, memberships and heals of each replica
    group over time. Each group writes its events to ``dirpath`` while it trains, and the leader
    draws them at the end. Needs matplotlib; without it the events are kept, and the log says so.

    Args:
        dirpath: folder for the picture and the events; must be one for all groups (on several
            machines: a shared one). Empty it between runs. Default: ``ft_timeline`` in the
            Trainer's ``default_root_dir``.
        filename: of the picture.

    Raises ValueError if `filename` does not end in .png. Whatever goes wrong with the picture is
    logged. Lightning calls its hooks in the loop's thread.
    """

    def __init__(self, dirpath: str | None = None, filename: str = "timeline.png") -> None:
        if not filename.endswith(".png"):
            raise ValueError(f"the timeline is a PNG file: filename={filename!r} must end in .png")
        self._dirpath, self._filename = dirpath, filename
        self._sink: JsonlSink | None = None
        self.path: Path | None = None
        """Of the picture, once it is drawn."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to write this replica group's events, in its rank 0."""
        manager = getattr(trainer.strategy, "manager", None)
        if manager is None:
            log.warning("FTTimeline draws fits under ft_ddp only: there will be no picture")
            return
        if trainer.strategy.scope.group_rank:
            return  # rank 0 writes for its replica group
        folder = self._folder(trainer)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._sink = JsonlSink(event_file(folder, trainer.strategy.scope.index, os.getpid()))
        except OSError as error:
            log.warning("no timeline: %s", error)
            return
        manager.telemetry.add_sink(self._sink)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """End the record; the leader draws the picture."""
        if self._sink is not None:
            self._sink(Event(END))
            self._close()
            if trainer.is_global_zero:
                self._draw(self._folder(trainer))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Close the record of a fit that has failed, and draw nothing."""
        self._close()

    def _folder(self, trainer: Any) -> Path:
        return Path(self._dirpath or os.path.join(trainer.default_root_dir, "ft_timeline"))

    def _close(self) -> None:
        if self._sink is not None:
            self._sink.close()
            self._sink = None

    def _draw(self, folder: Path) -> None:
        from ft_core.launch.run_record import draw

        try:
            draw(read_run(folder), folder / self._filename)
        except (OSError, RuntimeError, ValueError) as error:
            log.warning("no timeline: %s (the events are in %s)", error, folder)
            return
        self.path = folder / self._filename
        log.info("timeline: %s", self.path)
